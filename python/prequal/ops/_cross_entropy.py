"""What the loss of a chunk of logits is made of: the arithmetic of the kernels in torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
