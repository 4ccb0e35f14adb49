"""topk_rows_ on tiles of a search. benchmarks/retrieval.py measures the whole search.

A tile that is merged again and again soon has nothing new: what is timed are the later tiles of a search, of which
almost nothing passes the filter. The whole search has the early ones too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, normal
from prequal.ops.topk_rows import nothing_yet, scores_of
from prequal.registry import Cost


@prequal.topk_rows_.cost
def _(best, idx, products, row_terms, column_terms, metric, *, first_index, fresh):
    # products and terms read; what is held read, and written only where something passes
    read = (x for x in (best, idx, products, row_terms, column_terms) if x is not None)
    steps = {"dot": 0, "cosine": 2, "l2": 3}[metric]  # a score
    return Cost(sum(x.numel() * x.element_size() for x in read), steps * products.numel())


# Tiles of 16 MB: queries, columns, k, metric
SHAPES = (
    *((1024, 4096, 10, "cosine"), (1024, 4096, 100, "cosine"), (1024, 4096, 10, "dot"), (1024, 4096, 10, "l2")),
    *(
        (64, 65_536, 10, "cosine"),
        (64, 65_536, 128, "cosine"),
        (1, 1_000_000, 10, "cosine"),
        (1, 1_000_000, 128, "dot"),
    ),
    *((1, 4_194_304, 10, "cosine"), (8, 524_288, 32, "l2"), (1024, 1024, 1, "cosine")),
)


def eager(
    best: Tensor,
    idx: Tensor,
    products: Tensor,
    row_terms: Tensor | None,
    column_terms: Tensor | None,
    metric: str,
) -> tuple[Tensor, Tensor]:
    """What one would write: topk of the tile, then of both."""
    k = best.shape[1]
    scores, places = scores_of(products, row_terms, column_terms, metric).topk(min(k, products.shape[1]))
    found, where = torch.cat((best, scores), 1).topk(k)
    best.copy_(found)
    idx.copy_(torch.cat((idx, places), 1).gather(1, where))
    return best, idx


def as_good(got: Any, want: Any, args: Any) -> str | None:
    """The same scores; among equal ones another index is as right."""
    wrong = int((got[0] != want[0]).sum())
    return f"{wrong} of {got[0].numel()} scores are others" if wrong else None


def cases() -> Iterator[Case]:
    for quick, (queries, columns, k, metric) in each(SHAPES):

        def make(device: torch.device, queries=queries, columns=columns, k=k, metric=metric) -> tuple[Any, ...]:
            products = normal(device, queries, columns, dtype=torch.float32)
            terms: tuple[Tensor | None, Tensor | None] = (None, None)
            if metric != "dot":
                terms = torch.ones(queries, device=device), torch.ones(columns, device=device)
            return *nothing_yet(queries, k, torch.float32, device), products, *terms, metric

        yield Case(
            "topk_rows_",
            f"float32 [{queries}, {columns}], k {k}, {metric}",
            make,
            quick=quick,
            others=[Other("torch eager", eager, as_good)],
        )
