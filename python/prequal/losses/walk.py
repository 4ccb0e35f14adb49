"""From hidden states, weight and targets to loss and gradients, chunk by chunk, each matrix product once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from prequal.ops import _cross_entropy as ce
from prequal.ops._rows import wide_of
from prequal.ops.cross_entropy import (
    cross_entropy_chunk_,
    cross_entropy_gradient_,
    cross_entropy_stats,
    scale_unless_one_,
)
from prequal.registry import without_autocast

from .chunks import chunk_rows, chunks, row_elements
from .tokens import Loss, Tokens


@dataclass
class Gradients:
    """What chunks add up to. `factor`, [1] or None, is still to be multiplied by."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    factor: Tensor | None = None
    weight_scale: float = 1.0  # the weight's is larger than `factor` says by this


def wide_product(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """``out = beta out + a @ b``, out in float32 and a and b in a half, without rounding in between."""
    if a.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):  # torch 2.9 and later
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, out=out)
    else:  # a and b, of one chunk, are copied
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)


def scaled_for_fp16(coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """(coefficients of 1 at most, [1] what they are still to be multiplied by).

    p / N is below fp16's smallest number, 6e-8, at sizes of every day: the gradient of the logits is computed from
    these, and the rest multiplied in at the end.
    """
    # a token whose upstream gradient is inf or NaN keeps it for itself
    peak = torch.nan_to_num(coefficients.abs().flatten(), nan=0.0, posinf=0.0)
    largest = torch.cat((peak, peak.new_zeros(1))).amax()
    factor = torch.where(largest > 0, largest, 1.0).reshape(1)
    return coefficients / factor, factor


def passes(
    how: Loss,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    wants: tuple[bool, bool, bool],
    lse: Tensor | None = None,
    grads: tuple[Tensor | None, Tensor | None] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Gradients]:
    """(loss, lse, gradients) of hidden [N, H], weight [V, H], target [N]: chunk by chunk, each product once.

    lse and grads: of a backward pass, with the gradients of the loss and of lse. into: what the weight's gradient is
    added to.
    """
    tokens, width = hidden.shape
    classes, wide = weight.shape[0], wide_of(hidden)
    if class_weight is not None:
        class_weight = class_weight.to(wide)
    of = Tokens(how, target, class_weight, wide)
    of_all = class_weight if how.label_smoothing else None  # the kernels need weights for the sum over all classes

    made = Gradients()
    coefficients = None
    chunks_are_wide = how.wide_weight_grad and weight.dtype != wide
    if any(wants):
        of_loss, of_lse = grads or (None, None)
        upstream = of.upstream(1.0) if grads is None else of.upstream(0.0 if of_loss is None else of_loss)
        coefficients = of.coefficients(upstream, of_lse)
        if hidden.dtype == torch.float16:
            coefficients, made.factor = scaled_for_fp16(coefficients)
            if not chunks_are_wide:
                # N rows of at most 1 each add up to 1024 at most, which leaves 64 for the hidden state below 65504
                made.weight_scale = 1.0 / (1 << max(0, (tokens - 1) // 1024).bit_length())
        if wants[0]:
            made.hidden = hidden.new_empty((tokens, width))
        if wants[1]:
            made.weight = into if into is not None else weight.new_empty(weight.shape)
            if into is None and chunks_are_wide:
                made.weight = weight.new_empty(weight.shape, dtype=wide)
        if wants[2]:
            made.bias = weight.new_zeros(classes, dtype=wide)
    stats = hidden.new_empty((tokens, 4), dtype=wide) if lse is None else None

    # ranks meet at every chunk: all have as many, of an even share of the vocabulary
    share = classes if how.group is None else -(-how.classes // dist.get_world_size(how.group))
    rows = chunk_rows(tokens, share, hidden.element_size(), how.workspace)
    buffer = hidden.new_empty((rows, row_elements(classes, hidden.element_size())))[:, :classes]
    product = weight.t()
    first = into is None
    with without_autocast(hidden.device):
        for begin, end in chunks(tokens, rows):
            x, y, logits = hidden[begin:end], target[begin:end], buffer[: end - begin]
            if bias is None:
                torch.mm(x, product, out=logits)
            else:
                torch.addmm(bias, x, product, out=logits)

            place = {"first_class": how.first_class, "softcap": how.softcap}
            if coefficients is None:
                assert stats is not None
                stats[begin:end] = joined(how, cross_entropy_stats(logits, y, of_all, **place), classes)
                continue
            c4 = coefficients[begin:end]
            if lse is not None or stats is None:
                assert lse is not None
                cross_entropy_gradient_(logits, lse[begin:end], y, c4, of_all, **place)
            elif how.group is None:
                cross_entropy_chunk_(logits, stats[begin:end], y, c4, of_all, **place)
            else:
                whole = joined(how, cross_entropy_stats(logits, y, of_all, **place), classes)
                stats[begin:end] = whole
                cross_entropy_gradient_(logits, ce.logsumexp(whole), y, c4, of_all, **place)

            if made.hidden is not None:
                torch.mm(logits, weight, out=made.hidden[begin:end])
            if made.weight is not None:
                if made.weight.dtype != logits.dtype:
                    wide_product(made.weight, logits.t(), x, 0 if first else 1)
                else:
                    torch.addmm(
                        made.weight,
                        logits.t(),
                        x,
                        beta=0 if first else 1,
                        alpha=made.weight_scale,
                        out=made.weight,
                    )
            if made.bias is not None:
                made.bias += logits.sum(0, dtype=wide)
            first = False
        if tokens == 0 and made.weight is not None and into is None:
            made.weight.zero_()
        if made.hidden is not None:
            how.summed(made.hidden)
    if stats is None:
        return None, None, made
    losses, lse = of.losses(stats)
    return of.reduced(losses), lse, made


def joined(how: Loss, stats: Tensor, classes: int) -> Tensor:
    """[n, 4] of this rank's slice of the vocabulary, of so many classes, to [n, 4] of all of it."""
    if how.group is None:
        return stats
    # a NaN is told by the sums: what the largest of NaN and a number is, backends differ about
    own = torch.where(stats[:, 0].isnan(), -torch.inf, stats[:, 0])
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=how.group)
    scale = torch.exp(own - torch.where(largest == -torch.inf, 0.0, largest))
    # NaN times exp(-inf) is NaN
    sums = torch.stack((stats[:, 1] * scale, stats[:, 2], stats[:, 3] * (classes / how.classes)), 1)
    dist.all_reduce(sums, group=how.group)
    return torch.cat((largest.unsqueeze(1), sums), 1)


def finished(grad: Tensor | None, like: Tensor, factor: Tensor | None, functional: bool) -> Tensor | None:
    """The gradient times a factor, in like's dtype."""
    if grad is None:
        return None
    if factor is None:
        return grad.to(like.dtype)
    if functional:
        return (grad.to(factor.dtype) * factor).to(like.dtype)
    return scale_unless_one_(grad, factor).to(like.dtype)


def finish(
    made: Gradients, hidden: Tensor, weight: Tensor, grad: Tensor | None, functional: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, with what is still to be multiplied by: `grad` too, where it is given."""
    factor = made.factor
    if grad is not None:
        above = grad.to(wide_of(hidden)).reshape(1)
        factor = above if factor is None else above * factor
    of_weight = factor if made.weight_scale == 1.0 or factor is None else factor / made.weight_scale
    return (
        finished(made.hidden, hidden, factor, functional),
        finished(made.weight, weight, of_weight, functional),
        finished(made.bias, weight, factor, functional),
    )
