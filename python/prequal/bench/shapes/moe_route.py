"""moe_route: the routers of Mixtral, DeepSeek-V2-Lite, DeepSeek-V2 and DeepSeek-V3 at 32,768 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, normal, short
from prequal.registry import Cost

TOKENS = 32_768
CHOICES = ((256, 8), (8, 2), (64, 6), (160, 6), (128, 8), (512, 10))  # experts, and how many of them a token has
DEEPSEEK_V3 = 256, 8, 8, 4, 2.5  # experts, k, groups, those that are kept, scale


@prequal.moe_route.cost
def _(logits, k, *, score, renormalize, bias, groups, topk_groups, scale):
    # logits and bias read; a weight and an expert a choice, and the counts written
    read = logits.numel() * logits.element_size() + (0 if bias is None else bias.numel() * bias.element_size())
    size = 8 if logits.element_size() == 8 else 4
    return Cost(read + logits.shape[0] * k * (size + 4) + logits.shape[1] * 4)


def counted(experts: Tensor, count: int) -> Tensor:
    """torch.bincount waits for the GPU."""
    flat = experts.flatten()
    return torch.zeros(count, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def eager(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    weights, experts = logits.float().softmax(1).topk(k)
    return weights / weights.sum(1, keepdim=True), experts, counted(experts, logits.shape[1])


def eager_of_groups(
    logits: Tensor, k: int, *, score: str, bias: Tensor, groups: int, topk_groups: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores = logits.float().sigmoid()
    best = scores + bias
    two = best.unflatten(1, (groups, -1)).topk(2, dim=2).values.sum(2)
    closed = torch.ones_like(two, dtype=torch.bool).scatter(1, two.topk(topk_groups, dim=1).indices, False)
    closed = closed[:, :, None].expand(-1, -1, logits.shape[1] // groups).flatten(1)
    experts = best.masked_fill(closed, -torch.inf).topk(k).indices
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * scale
    return weights, experts, counted(experts, logits.shape[1])


def as_good(got: Any, want: Any, args: Any) -> str | None:
    """The same weights; among experts that are compared by equal values, another is as right."""
    logits, bias = args[0].float(), args[4]
    values = logits if bias is None else logits.sigmoid() + bias
    ours, theirs = (values.gather(1, experts.long()) for experts in (want[1], got[1]))
    wrong = int((~torch.isclose(theirs, ours, rtol=1e-5, atol=1e-6)).sum())
    if wrong:
        return f"{wrong} of {ours.numel()} experts are not as good"
    if not torch.allclose(got[0].float(), want[0], rtol=1e-4, atol=1e-6):
        return "other weights"
    return None if int(got[2].sum()) == int(want[2].sum()) else "other counts"


def cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for quick, (experts, k) in each(CHOICES):

            def make(device: torch.device, experts=experts, k=k, dtype=dtype) -> tuple[Any, ...]:
                return normal(device, TOKENS, experts, dtype=dtype), k

            yield Case(
                "moe_route",
                f"{short(dtype)} [{TOKENS}, {experts}], k {k}",
                make,
                quick=quick and dtype == torch.float32,
                others=[Other("torch eager", eager, as_good)],
                compiled=eager,
                compare_compiled=as_good,
            )

    experts, k, groups, kept, scale = DEEPSEEK_V3

    def make_of_groups(device: torch.device) -> tuple[Any, ...]:
        bias = torch.rand(experts, device=device, generator=torch.Generator(device).manual_seed(0))
        logits = normal(device, TOKENS, experts, dtype=torch.float32)
        return logits, k, "sigmoid", True, bias, groups, kept, scale

    yield Case(
        "moe_route",
        f"float32 [{TOKENS}, {experts}], k {k}, sigmoid and bias, {kept} of {groups} groups",
        make_of_groups,
        others=[Other("torch eager", eager_of_groups, as_good)],
        compiled=eager_of_groups,
        compare_compiled=as_good,
    )
