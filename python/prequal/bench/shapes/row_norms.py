"""row_norms of a corpus: a million rows, and of a few queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, normal, short
from prequal.registry import Cost


@prequal.row_norms.cost
def _(x, form):
    # a square and an addition each
    return Cost(x.numel() * x.element_size() + x.shape[0] * 4, 2 * x.numel())


BF16, F32 = torch.bfloat16, torch.float32
SHAPES = (
    *((1_000_000, 256, BF16), (1_000_000, 64, BF16), (1_000_000, 1024, BF16), (1_000_000, 100, BF16)),
    *((1024, 64, BF16), (500_000, 256, F32)),
)


def eager(x: Tensor, form: str) -> Tensor:
    """What one would write for the cosine."""
    return 1 / torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).clamp(min=1e-12)


def near(got: Any, want: Any, args: Any) -> str | None:
    worst = float(((got - want) / want).abs().max())
    return None if worst <= 4e-5 else f"off by {worst:.2g} of the value"


def cases() -> Iterator[Case]:
    for quick, (rows, width, dtype) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return normal(device, rows, width, dtype=dtype), "inverse"

        yield Case(
            "row_norms",
            f"{short(dtype)} [{rows}, {width}], inverse",
            make,
            quick=quick,
            others=[Other("torch eager", eager, near)],
            compiled=eager,
            compare_compiled=near,
        )
