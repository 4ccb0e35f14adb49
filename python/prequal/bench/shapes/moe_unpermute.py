"""moe_unpermute and its gradient: 16,384 tokens of 4,096 columns from 2, 6 and 8 experts each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import by_autograd, each, near, normal, short
from prequal.contracts import Tolerance
from prequal.registry import Cost

from .moe_permute import BF16, CHOICES, TOKENS, WIDTH, choice


def map_bytes(row_map, weights):
    return sum(x.numel() * x.element_size() for x in (row_map, weights) if x is not None)


@prequal.moe_unpermute.cost
def _(yp, row_map, weights):
    # rows that are meant read once, their sums written; which are dropped is not known here
    (rows, width), (tokens, k) = yp.shape, row_map.shape
    size = yp.element_size()
    return Cost((min(rows, tokens * k) + tokens) * width * size + map_bytes(row_map, weights), 2 * tokens * k * width)


@prequal.moe_unpermute_backward.cost
def _(grad, yp, row_map, weights, *, weights_grad):
    # grad read, yp's gradient written; for that of the weights yp read, too
    (rows, width), (tokens, k) = yp.shape, row_map.shape
    size = yp.element_size()
    asks = weights is not None and weights_grad
    moved = (grad.numel() + yp.numel()) * size + map_bytes(row_map, weights)
    if asks:
        moved += min(rows, tokens * k) * width * size + tokens * k * weights.element_size()
    return Cost(moved, (3 if asks else 1) * tokens * k * width)


def eager(yp: Tensor, row_map: Tensor, weights: Tensor) -> Tensor:
    return (yp[row_map.long()] * weights[..., None].to(yp.dtype)).sum(1)


# Eager rounds weights and products to bf16, 2^-9 of each product twice. A token's weights add up to 1: that is at most
# 2^-8 of the largest of its values (normal numbers, below 7), however small their sum. Some of 67 million come near it.
OTHERS_SUMS = Tolerance({BF16: (2.0**-6, 2.0**-8 * 7)})


def near_sums(got: Any, want: Any, args: Any) -> str | None:
    found = OTHERS_SUMS.compare(got, want)
    return None if found is None else str(found)


# Eager rounds its products to bf16, 2^-9 of each, and their sum: 2^-9 sqrt(4,096) of values near 1, and 2^-9 of it.
OTHERS_DOTS = Tolerance({torch.float32: (2.0**-7, 0.5)})


def near_shares(got: Any, want: Any, args: Any) -> str | None:
    found = OTHERS_DOTS.compare(got[1], want[1])
    return near(got[0], want[0], args) or (None if found is None else str(found))


def split(grad: Tensor, yp: Tensor, row_map: Tensor, weights: Tensor) -> Any:
    return (yp, row_map, weights), (yp, weights), (grad,)


def cases() -> Iterator[Case]:
    for quick, (k, experts) in each(CHOICES):

        def make(device: torch.device, k=k, experts=experts) -> tuple[Any, ...]:
            chosen, counts = choice(device, TOKENS, k, experts)
            narrow = torch.zeros(TOKENS, 1, device=device)
            row_map = prequal.moe_permute.op.reference(narrow, chosen, counts)[1]
            weights = normal(device, TOKENS, k, dtype=torch.float32).softmax(1)
            return normal(device, TOKENS * k, WIDTH, dtype=BF16), row_map, weights

        def make_gradient(device: torch.device, make=make) -> tuple[Any, ...]:
            return normal(device, TOKENS, WIDTH, dtype=BF16, seed=1), *make(device)

        what = f"{short(BF16)} [{TOKENS}, {WIDTH}], {k} of {experts}"
        yield Case(
            "moe_unpermute",
            what,
            make,
            quick=quick,
            others=[Other("torch eager", eager, near_sums)],
            compiled=eager,
            compare_compiled=near_sums,
        )
        yield Case(
            "moe_unpermute_backward",
            f"{what}, backward",
            make_gradient,
            quick=quick,
            others=[Other("torch eager", by_autograd(eager, split), near_shares)],
        )
