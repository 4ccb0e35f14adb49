"""What a call asks for, and what each token has in it: its loss, by the statistics of its logits, its coefficients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prequal.ops import _cross_entropy as ce
from prequal.ops._rows import wide_of


@dataclass(frozen=True)
class Loss:
    """What a call asks for, besides its tensors."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float
    wide_weight_grad: bool  # chunks of the weight's gradient are added in float32
    workspace: int
    first_class: int
    classes: int  # of the whole vocabulary
    checked: bool = False
    group: Any = None  # a ProcessGroup where the vocabulary is spread
    into_grad: bool = False

    def summed(self, x: Tensor) -> Tensor:
        """In place, over the ranks."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x


class Tokens:
    """Of each token: whether it counts, and what its class weighs. [N] each."""

    def __init__(self, how: Loss, target: Tensor, class_weight: Tensor | None, wide: torch.dtype) -> None:
        self.how = how
        self.ignored = target == how.ignore_index
        self.outside = ~self.ignored & ((target < 0) | (target >= how.classes))
        if how.checked and bool(self.outside.any()):
            found = int(target[self.outside][0])
            raise ValueError(
                f"target: expected classes 0 to {how.classes - 1} or ignore_index {how.ignore_index}, got {found}"
            )
        counts = ~(self.ignored | self.outside)
        self.all_weights: Tensor | float = float(how.classes)
        self.weight = counts.to(wide)
        if class_weight is not None:
            place, inside = ce.local_classes(target, how.first_class, class_weight.shape[0])
            self.weight = how.summed(torch.where(inside & counts, class_weight[place], 0.0))
            self.all_weights = how.summed(class_weight.sum())
        # of nothing but ignored tokens, or of nothing: 0 / 0
        self.count = self.weight.sum() if how.reduction == "mean" else None

    def only(self, value: Tensor) -> Tensor:
        """Zero where a token is ignored, NaN where its target is no class: never a number that looks right."""
        value = torch.where(self.outside, torch.nan, value)
        return torch.where(self.ignored, 0.0, value)

    def losses(self, stats: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 4] to the loss of each token and lse, [N] each."""
        how = self.how
        lse = ce.logsumexp(stats)
        # lse - z with the largest taken off first: of logits near 1,000 in float32 a loss was off by 3e-7, by 3e-5 else
        own = stats[:, 0] - stats[:, 2] + torch.log(stats[:, 1])
        value = (1.0 - how.label_smoothing) * self.weight * own
        if how.label_smoothing:
            value = value + how.label_smoothing * (self.all_weights / how.classes * lse - stats[:, 3])
        if how.z_loss:
            value = value + how.z_loss * lse.square()
        return self.only(value), lse

    def reduced(self, losses: Tensor) -> Tensor:
        if self.how.reduction == "none":
            return losses
        total = losses.sum()
        return total if self.count is None else total / self.count

    def upstream(self, grad: Tensor | float) -> Tensor:
        """From the gradient of the result to that of each token's loss, [N]."""
        if not isinstance(grad, Tensor):  # filled in there: a copy of a number of the host's is waited for
            grad = torch.full((), grad, dtype=self.weight.dtype, device=self.weight.device)
        each = grad.to(self.weight.dtype)
        each = each if self.count is None else each / self.count
        return self.only(each.expand(self.weight.shape))

    def coefficients(self, upstream: Tensor, of_lse: Tensor | None) -> Tensor:
        """[N, 4], as of cross_entropy_gradient_."""
        how = self.how
        kept = (1.0 - how.label_smoothing) * self.weight
        spread = how.label_smoothing / how.classes
        first = upstream * (kept + spread * self.all_weights)
        if of_lse is not None:
            first = first + of_lse
        columns = (first, 2.0 * how.z_loss * upstream, upstream * kept, spread * upstream)
        return torch.stack(columns, 1)


def above_tokens(how: Loss, target: Tensor, grad: Tensor) -> Tensor:
    """The gradient of one loss for all tokens. Where none of them counts it is 0, as each token's is: what is divided
    by their number has one of inf."""
    return torch.where((target == how.ignore_index).all(), 0.0, grad)


def plain_formula(
    how: Loss, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(loss, lse) with all logits in memory: for what torch differentiates by itself, as functorch's transforms."""
    wide = wide_of(hidden)
    logits = torch.nn.functional.linear(hidden, weight, bias).to(wide)
    class_weight = None if class_weight is None else class_weight.to(wide)
    of = Tokens(replace(how, checked=False), target, class_weight, wide)
    of_all = class_weight if how.label_smoothing else None
    z = ce.capped(logits, how.softcap)
    place, _ = ce.local_classes(target, 0, z.shape[1])
    weighted = (z if of_all is None else z * of_all).mean(1)
    largest = z.detach().amax(1)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    total = torch.exp(z - largest.unsqueeze(1)).sum(1)
    stats = torch.stack((largest, total, z.gather(1, place.unsqueeze(1)).squeeze(1), weighted), 1)
    losses, lse = of.losses(stats)
    return of.reduced(losses), lse
