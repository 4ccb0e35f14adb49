"""What the loss of a chunk of logits is made of: the arithmetic of the kernels in torch, and the sizes of chunks."""

from __future__ import annotations

import torch
from torch import Tensor

# Logits and their gradient lie in one buffer, of less than 300 MB. 8,192 rows of 131,072 classes in a half are eight
# chunks of 1,024 then: of 1,136, the most that fit, there would be as many, one of 240 and none of whole tiles.
WORKSPACE_BYTES = 284 * 2**20


def row_elements(classes: int, itemsize: int) -> int:
    """Elements from one row of logits to the next: every row begins at a multiple of 16 bytes."""
    step = 16 // itemsize
    return -(-classes // step) * step


def chunk_rows(tokens: int, classes: int, itemsize: int, max_workspace_bytes: int) -> int:
    """Rows of logits in the largest chunk: as few chunks as the workspace allows, at least a row each, of like size;
    of whole tiles of 128 rows, or of 16, where that still fits.

    Pure: of these four numbers alone.
    """
    most = max(1, max_workspace_bytes // max(1, row_elements(classes, itemsize) * itemsize))
    if tokens <= most:
        return tokens
    alike = -(-tokens // -(-tokens // most))
    for tile in (128, 16):
        rows = -(-alike // tile) * tile
        if rows <= most:
            return rows
    return alike


def chunks(tokens: int, rows: int) -> list[tuple[int, int]]:
    """(begin, end) of each, `rows` long. What is left over comes first: the gradient of the weight is rounded at every
    chunk, by as much as has been added up, and so by less."""
    if tokens == 0:
        return []
    first = (tokens - 1) % rows + 1
    return [(0, first), *((begin, begin + rows) for begin in range(first, tokens, rows))]


def capped(z: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(z / softcap) if softcap else z


def local_classes(target: Tensor, first_class: int, classes: int) -> tuple[Tensor, Tensor]:
    """(place of the target in this slice, clamped to it; whether it is one of the slice's)."""
    local = target - first_class
    inside = (local >= 0) & (local < classes)
    return local.clamp(0, max(classes - 1, 0)), inside


def statistics(logits: Tensor, target: Tensor, class_weight: Tensor | None, first_class: int, softcap: float) -> Tensor:
    """[n, V] in the dtype of computation to [n, 4]: see `cross_entropy_stats`."""
    z = capped(logits, softcap)
    largest = z.amax(1)
    # a row of -inf alone: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN
    total = torch.exp(z - torch.where(largest == -torch.inf, 0.0, largest).unsqueeze(1)).sum(1)
    largest = torch.where(total.isnan() & (largest != torch.inf), torch.nan, largest)
    place, inside = local_classes(target, first_class, z.shape[1])
    picked = torch.where(inside, z.gather(1, place.unsqueeze(1)).squeeze(1), 0.0)
    mean = (z if class_weight is None else z * class_weight).mean(1)
    return torch.stack((largest, total, picked, mean), 1)


def logsumexp(stats: Tensor) -> Tensor:
    """[n, 4] to [n]."""
    return stats[:, 0] + torch.log(stats[:, 1])


def gradient(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    coefficients: Tensor,
    class_weight: Tensor | None,
    first_class: int,
    softcap: float,
) -> Tensor:
    """[n, V] in the dtype of computation to the same: see `cross_entropy_gradient_`."""
    z = capped(logits, softcap)
    of_lse, of_square, of_target, of_all = (column.unsqueeze(1) for column in coefficients.unbind(1))
    p = torch.exp(z - lse.unsqueeze(1))
    found = p * (of_lse + of_square * lse.unsqueeze(1))
    found = found - (of_all if class_weight is None else of_all * class_weight)
    place, inside = local_classes(target, first_class, z.shape[1])
    found = found.scatter_add(1, place.unsqueeze(1), -torch.where(inside.unsqueeze(1), of_target, 0.0))
    if softcap:
        found = found * (1.0 - (z / softcap).square())
    return torch.where((coefficients == 0).all(1, keepdim=True), 0.0, found)
