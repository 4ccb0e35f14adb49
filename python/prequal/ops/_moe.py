"""What the ops of mixtures of experts share: the data of their samples, and small pieces of their references."""

from __future__ import annotations

import torch
from torch import Tensor

from prequal import constraints as c

MOST_CHOSEN = 32  # experts a token
INTEGERS = (torch.int32, torch.int64)


def is_choice(name: str, x: Tensor) -> None:
    """[T, k] of integers."""
    if x.dtype not in INTEGERS:
        raise TypeError(f"{name}: expected int32 or int64, got {c.short(x.dtype)}")
    c.has_shape(name, x, ("T", "k"))


def fits_int32(name: str, x: Tensor) -> None:
    """[T, k]: each place of it has a number in int32."""
    if x.shape[0] * x.shape[1] > torch.iinfo(torch.int32).max:
        raise ValueError(f"{name}: expected T * k <= {torch.iinfo(torch.int32).max:,}, got {list(x.shape)}")


def spaced_logits(device: torch.device, tokens: int, experts: int, dtype: torch.dtype, of: int = 0) -> Tensor:
    """[T, E]: in each row every multiple of 1/64 about zero once, in an order of its own.

    No two of a row are equal in float32 or float16, nor, to 512 experts, in bfloat16: a path that rounds otherwise has
    no excuse to choose otherwise.
    """
    generator = torch.Generator().manual_seed(tokens + 1000 * experts + 100_000 * of)
    places = torch.rand(tokens, experts, generator=generator).argsort(1)
    return ((places - experts // 2).to(torch.float32) / 64).to(device, dtype)


def spread_choice(device: torch.device, tokens: int, k: int, experts: int, of: int = 0) -> Tensor:
    """[T, k] int32, distinct in a row, the lower experts more often."""
    generator = torch.Generator().manual_seed(tokens + 100 * k + 10_000 * experts + of)
    odds = torch.rand(tokens, experts, generator=generator) * torch.linspace(1.0, 0.5, experts)
    return odds.topk(k, dim=1).indices.to(torch.int32).to(device)


def counts_of(experts: Tensor, count: int) -> Tensor:
    """[T, k] to [E] int32: what moe_route says of such a choice."""
    flat = experts.reshape(-1).to(torch.int64)
    return torch.zeros(count, dtype=torch.int32, device=experts.device).scatter_add(
        0, flat, torch.ones_like(flat, dtype=torch.int32)
    )
