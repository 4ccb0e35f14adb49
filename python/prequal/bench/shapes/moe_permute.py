"""moe_permute: 16,384 tokens of 4,096 columns to 2, 6 and 8 experts each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, normal, short
from prequal.registry import Cost

TOKENS, WIDTH = 16_384, 4096
CHOICES = ((8, 256), (2, 8), (6, 64))  # of a token, out of how many experts
BF16 = torch.bfloat16


@prequal.moe_permute.cost
def _(x, experts, counts, *, capacity):
    # x read once and each of its rows written k times; a place read and one written a choice
    (tokens, k), size = experts.shape, x.element_size()
    read = x.numel() * size if k else 0
    return Cost(read + k * x.numel() * size + tokens * k * (experts.element_size() + 4) + 8 * (counts.shape[0] + 1))


def choice(device: torch.device, tokens: int, k: int, experts: int) -> tuple[Tensor, Tensor]:
    """[T, k] int32 and [E] int32: of random logits, as a router gives them."""
    chosen = normal(device, tokens, experts, dtype=torch.float32).topk(k).indices.int()
    counts = torch.bincount(chosen.flatten(), minlength=experts).int()
    return chosen, counts


def eager(x: Tensor, experts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = experts.flatten().sort(stable=True).indices
    places = torch.arange(order.numel(), device=order.device)
    row_map = torch.empty_like(order).scatter(0, order, places)
    return x[order // experts.shape[1]], row_map.view_as(experts), F.pad(counts.cumsum(0), (1, 0))


def equal(got: Any, want: Any, args: Any) -> str | None:
    for name, a, b in zip(("rows", "map", "offsets"), got, want, strict=True):
        if not torch.equal(a, b.to(a.dtype)):
            return f"another {name}"
    return None


def cases() -> Iterator[Case]:
    for quick, (k, experts) in each(CHOICES):

        def make(device: torch.device, k=k, experts=experts) -> tuple[Any, ...]:
            return normal(device, TOKENS, WIDTH, dtype=BF16), *choice(device, TOKENS, k, experts)

        yield Case(
            "moe_permute",
            f"{short(BF16)} [{TOKENS}, {WIDTH}], {k} of {experts}",
            make,
            quick=quick,
            others=[Other("torch eager", eager, equal)],
            compiled=eager,
            compare_compiled=equal,
        )
