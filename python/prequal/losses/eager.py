"""The loss in eager mode, for autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .tokens import Loss
from .walk import finish, passes


def grad_to_add_to(how: Loss, weight: Tensor) -> Tensor | None:
    """The weight's .grad, where the gradient may be added to it at once."""
    if not how.into_grad:
        return None
    grad = weight.grad
    return grad if grad is not None and grad.dtype == weight.dtype and grad.layout == torch.strided else None


class ChunkedLoss(torch.autograd.Function):
    """The loss in eager mode: where one number weighs all tokens, the gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, class_weight, how, wants):
        late = how.reduction == "none" or how.into_grad
        loss, lse, made = passes(
            how, hidden, weight, target, bias, class_weight, (False, False, False) if late else wants
        )
        ctx.set_materialize_grads(False)
        ctx.how, ctx.wants = how, wants
        if how.into_grad:
            ctx.leaf = weight  # what is saved comes back as another tensor over the same memory
        if not late and hidden.dtype != torch.float16:
            # nothing is to be multiplied by but the upstream gradient, as a rule 1: float32 sums need not wait for it
            made.weight = None if made.weight is None else made.weight.to(weight.dtype)
        ctx.made = None if late else made
        ctx.save_for_backward(hidden, weight, bias, target, class_weight, lse)
        return loss, lse

    @staticmethod
    def backward(ctx, of_loss, of_lse):
        with torch.no_grad():
            found = ChunkedLoss.gradients(ctx, of_loss, of_lse)
        if torch.is_grad_enabled():  # somebody will differentiate again
            found = tuple(None if x is None else _Once.apply(x.requires_grad_()) for x in found)
        return (*found, None, None, None, None)

    @staticmethod
    def gradients(ctx, of_loss, of_lse):
        hidden, weight, bias, target, class_weight, lse = ctx.saved_tensors
        made, ctx.made = ctx.made, None  # what autograd is given is its own: a second walk computes again
        if of_loss is None and of_lse is None:
            return None, None, None
        if made is not None and of_lse is None:
            return finish(made, hidden, weight, of_loss)
        into = grad_to_add_to(ctx.how, ctx.leaf) if ctx.how.into_grad and ctx.wants[1] else None
        *_, made = passes(ctx.how, hidden, weight, target, bias, class_weight, ctx.wants, lse, (of_loss, of_lse), into)
        if into is not None:
            made.weight = None
        return finish(made, hidden, weight, None)


class _Once(torch.autograd.Function):
    """The gradient itself; its own gradient is an error. It does not depend on nothing, as it would else seem to."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "linear_cross_entropy: its gradient has no gradient of its own; torch.func's transforms have them all"
        )
