"""What the shape lists of the sparse 3-D ops share: token counts, batches, and chains as models write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prequal.bench.rows import normal
from prequal.contracts import Tolerance

# From the smallest to the largest asset of the published measurements of such a generator.
TOKENS = (30_227, 3_664, 13_400)
WIDTH, HEADS, DIM = 1024, 16, 64
BATCHES = 2  # with and without the condition

# The chain rounds the normalised value, 1 + scale and their product: three half steps, 2^-9 each, of a product that is
# up to 27 among millions, and that the shift may cancel; with a gate, one more of another such product, which the norm
# carries on. Ours rounds none of them.
CHAIN = Tolerance({torch.bfloat16: (2.0**-6, 0.5)})


def near_chain(got: Any, want: Any, args: Any) -> str | None:
    found = CHAIN.compare(got, want)
    return None if found is None else str(found)


def batches(device: torch.device, tokens: int, count: int = BATCHES) -> Tensor:
    """[N], int64, in runs of one length, as collated batches lie."""
    return torch.arange(tokens, device=device) * count // max(tokens, 1)


def offsets(device: torch.device, tokens: int, count: int = BATCHES) -> Tensor:
    """[B + 1], of the same runs."""
    return torch.searchsorted(batches(device, tokens, count), torch.arange(count + 1, device=device))


def rows(device: torch.device, count: int, width: int, dtype: torch.dtype, parts: int) -> tuple[Tensor, ...]:
    """That many [B, C]: slices of one modulation."""
    return normal(device, count, parts * width, dtype=dtype, seed=7).chunk(parts, dim=1)


def voxels(device: torch.device, tokens: int) -> Tensor:
    """[N, 4], int32: voxels of a 64^3 grid."""
    generator = torch.Generator(device).manual_seed(tokens)
    place = torch.randint(0, 64, (tokens, 3), device=device, generator=generator)
    return torch.cat((batches(device, tokens)[:, None], place), dim=1).int()
