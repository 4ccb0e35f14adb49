"""topk_products: few queries and many rows, beside torch's matrix product and topk.

The numbers are whole: products have no rounding, so the op and its reference must find equal scores and rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, normal, short
from prequal.registry import Cost


@prequal.topk_products.cost
def _(queries, corpus, k, column_terms, metric, *, first_index):
    # inputs read and results written once
    read = sum(x.numel() * x.element_size() for x in (queries, corpus, column_terms) if x is not None)
    wide = 8 if queries.dtype == torch.float64 else 4
    work = 2 * queries.shape[0] * corpus.shape[0] * queries.shape[1]
    unit = "fp32" if queries.element_size() >= 4 else "bf16"
    return Cost(read + queries.shape[0] * k * (wide + 8), work, unit)


# queries, rows, width, k, metric
SHAPES = (
    *((1, 1_000_000, 256, 10, "cosine"), (1, 1_000_000, 64, 10, "cosine"), (1, 1_000_000, 1024, 128, "cosine")),
    *((16, 500_000, 1024, 128, "cosine"), (16, 1_000_000, 256, 10, "dot"), (16, 1_000_000, 64, 128, "cosine")),
    *((64, 1_000_000, 256, 10, "cosine"), (1, 100_000, 64, 10, "cosine"), (16, 100_000, 256, 10, "l2")),
    *((1, 1000, 64, 1, "cosine"), (16, 1000, 1024, 128, "cosine")),
)
BF16 = torch.bfloat16


def eager(queries: Tensor, corpus: Tensor, k: int, column_terms: Tensor | None, metric: str) -> tuple[Tensor, Tensor]:
    """What one would write, with products in float32. Norms of the corpus are computed as ours are."""
    wide = torch.mm(queries, corpus.t(), out_dtype=torch.float32)
    if metric == "cosine":
        wide *= 1 / torch.linalg.vector_norm(corpus, dim=1, dtype=torch.float32)
        wide *= (1 / torch.linalg.vector_norm(queries, dim=1, dtype=torch.float32)).unsqueeze(1)
    elif metric == "l2":
        wide = 2 * wide - corpus.float().square().sum(1) - queries.float().square().sum(1, keepdim=True)
    return torch.topk(wide, k)


def as_good(got: Any, want: Any, args: Any) -> str | None:
    """The same scores; among equal ones another row is as right."""
    off = float((got[0] - want[0]).abs().max())
    return None if off <= 1e-5 * float(want[0].abs().max()) else f"scores are off by {off:.2g}"


def cases() -> Iterator[Case]:
    for quick, (queries, rows, width, k, metric) in each(SHAPES):

        def make(device: torch.device, queries=queries, rows=rows, width=width, k=k, metric=metric) -> tuple[Any, ...]:
            q, corpus = (normal(device, n, width, dtype=BF16, seed=n).mul_(1.2).round_() for n in (queries, rows))
            return q, corpus, k, None, metric

        yield Case(
            "topk_products",
            f"{short(BF16)} {queries} of [{rows}, {width}], k {k}, {metric}",
            make,
            quick=quick,
            others=[Other("torch eager", eager, as_good)],
        )
