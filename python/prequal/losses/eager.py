"""The loss in eager mode, for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tokens import above_tokens
from .walk import finish, passes


def grad_to_add_to(ctx: Any) -> Tensor | None:
    """The weight's .grad, where the gradient may be added to it at once."""
    if not (ctx.how.into_grad and ctx.wants[1]):
        return None
    weight, grad = ctx.leaf, ctx.leaf.grad
    if grad is None or grad.dtype != weight.dtype or grad.layout != torch.strided:
        return None
    if weight._backward_hooks or not _will_accumulate(ctx.next_functions[1][0]):
        return None
    return grad


def _will_accumulate(node: Any) -> bool:
    """Whether this backward pass gets to the node that adds to a .grad: backward(inputs=...) may not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad gives the gradient away
        return False


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
            found = tuple(None if x is None else Once.apply(x.requires_grad_()) for x in found)
        return (*found, None, None, None, None)

    @staticmethod
    def gradients(ctx, of_loss, of_lse):
        hidden, weight, bias, target, class_weight, lse = ctx.saved_tensors
        made, ctx.made = ctx.made, None  # what autograd is given is its own: a second walk computes again
        if of_loss is None and of_lse is None:
            return None, None, None
        if made is not None and of_lse is None:
            return finish(made, hidden, weight, above_tokens(ctx.how, target, of_loss))
        into = grad_to_add_to(ctx)
        *_, made = passes(ctx.how, hidden, weight, target, bias, class_weight, ctx.wants, lse, (of_loss, of_lse), into)
        if into is not None:
            made.weight = None
        return finish(made, hidden, weight, None)


class Once(torch.autograd.Function):
    """The gradient itself; its own gradient is an error. It does not depend on nothing, as it would else seem to."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "linear_cross_entropy: its gradient has no gradient of its own; torch.func's transforms have them all"
        )
