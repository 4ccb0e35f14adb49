"""linear_gelu: the MLP of a width-1,024 transformer at 3,664 to 30,227 tokens, beside the product alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, near, normal, short
from prequal.bench.sparse import TOKENS, WIDTH
from prequal.registry import Cost


@prequal.linear_gelu.cost
def _(x, weight, bias, approximate, *, exact_rounding):
    rows, (outer, inner) = x.numel() // max(x.shape[-1], 1), weight.shape
    size = x.element_size()
    # of no columns nothing is multiplied, and of no rows nothing is read
    read = x.numel() + (weight.numel() + (0 if bias is None else outer) if rows else 0)
    unit = "bf16" if x.dtype in (torch.bfloat16, torch.float16) else "fp32"
    return Cost((read + rows * outer) * size if x.numel() else 0, 2 * rows * inner * outer, unit)


def eager(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def product(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.linear(x, weight, bias)


def no_standard(got: Any, want: Any, args: Any) -> None:
    """Another function: only its time is of interest."""
    return


BF16 = torch.bfloat16


def cases() -> Iterator[Case]:
    for quick, (tokens,) in each([(n,) for n in (*TOKENS, 24_000)]):

        def make(device: torch.device, tokens=tokens) -> tuple[Any, ...]:
            x = normal(device, tokens, WIDTH, dtype=BF16)
            weight = normal(device, 4 * WIDTH, WIDTH, dtype=BF16) * WIDTH**-0.5
            return x, weight, normal(device, 4 * WIDTH, dtype=BF16, seed=1)

        what = f"{short(BF16)} [{tokens}, {WIDTH}] to {4 * WIDTH}"
        kept = partial(prequal.linear_gelu, exact_rounding=True)
        yield Case(
            "linear_gelu",
            what,
            make,
            quick=quick,
            others=[
                Other("torch eager", eager, near),
                Other("rounding preserved", kept, near, "peer"),
                Other("the product alone", product, no_standard, "peer"),
            ],
            compiled=eager,
            compare_compiled=near,
        )
