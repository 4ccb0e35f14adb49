"""What the row ops share: the data of their samples, and small pieces of their references."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prequal import constraints as c

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


def normal(device: torch.device, seed: int = 0) -> Callable[..., Tensor]:
    """Makes normal tensors; the same numbers for the same shape, seed and place in the order of calls of one shape."""

    def make(*shape: int, dtype: torch.dtype = torch.float32, of: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed + 100_000 * of)
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device, dtype)

    return make


def wide_of(x: Tensor) -> torch.dtype:
    """What a row is computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def stored(y: Tensor, x: Tensor) -> Tensor:
    """Rounded to x's dtype, contiguous."""
    return y.to(x.dtype, memory_format=torch.contiguous_format).contiguous()


def over_rows(y: Tensor) -> Tensor:
    """[..., H] to [H]: the sum over all rows; of a single row, the row."""
    return y.unsqueeze(0).sum(dim=tuple(range(y.dim())))


def walks(*names: str) -> list[c.Need]:
    """Whole rows, one stride apart."""
    return [need(name) for name in names for need in (c.unit_stride, c.one_row_stride)]
