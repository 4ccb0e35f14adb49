"""The loss under torch.compile and dispatch modes: one node of the graph forward, and one backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library

from prequal.ops._rows import wide_of
from prequal.registry import LIBRARY, NAMESPACE

from .checks import check_call
from .eager import Once
from .tokens import Loss, above_tokens
from .walk import finish, finished, passes

_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, int ignore_index, str reduction, "
    "float label_smoothing, float z_loss, float softcap, bool wide_weight_grad, int workspace, bool checked, "
    "bool return_lse, bool[] wants"
)
_OF_LOSS = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "wide_weight_grad", "workspace")
FORWARD = "linear_cross_entropy_forward"
_BACKWARD = "linear_cross_entropy_backward"
LIBRARY.define(f"{FORWARD}({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define(f"{_BACKWARD}({_SCHEMA}, Tensor lse, Tensor? grad_loss, Tensor? grad_lse) -> (Tensor, Tensor, Tensor)")


def _loss_of(weight: Tensor, plain: tuple[Any, ...]) -> tuple[Loss, bool, tuple[bool, bool, bool]]:
    *of_loss, checked, return_lse, wants = plain
    named: dict[str, Any] = dict(zip(_OF_LOSS, of_loss, strict=True))
    how = Loss(**named, first_class=0, classes=weight.shape[0], checked=checked)
    return how, return_lse, tuple(wants)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _forward_op(hidden, weight, target, bias, class_weight, *plain):
    how, _, wants = _loss_of(weight, plain)
    wants = (False, False, False) if how.reduction == "none" else wants
    loss, lse, made = passes(how, hidden, weight, target, bias, class_weight, wants)
    assert loss is not None
    assert lse is not None
    if made.weight is not None and hidden.dtype != torch.float16:
        made.weight = made.weight.to(weight.dtype)
    scale = torch.ones(2, dtype=lse.dtype, device=lse.device)
    if made.factor is not None:
        scale = torch.cat((made.factor, made.factor / made.weight_scale))
    outputs = (_or_empty(made.hidden, hidden), _or_empty(made.weight, weight), _or_empty(made.bias, lse))
    return (loss, lse, *outputs, scale)


def _shapes_of(hidden, weight, bias, how, wants, wide):
    late = how.reduction == "none"
    kept = wide if how.wide_weight_grad and hidden.dtype == torch.float16 else weight.dtype
    return (
        hidden.new_empty(hidden.shape if wants[0] and not late else (0,)),
        weight.new_empty(weight.shape if wants[1] and not late else (0,), dtype=kept),
        weight.new_empty(weight.shape[:1] if wants[2] and not late else (0,), dtype=wide),
    )


def _forward_fake(hidden, weight, target, bias, class_weight, *plain):
    how, _, wants = _loss_of(weight, plain)
    numbers = (how.ignore_index, how.reduction, how.label_smoothing, how.z_loss, how.softcap or None, how.workspace)
    check_call(hidden, weight, target, bias, class_weight, *numbers)
    wide = wide_of(hidden)
    lse = hidden.new_empty(hidden.shape[:1], dtype=wide)
    loss = lse if how.reduction == "none" else lse.new_empty(())
    loss = torch.empty_like(loss)
    return (loss, lse, *_shapes_of(hidden, weight, bias, how, wants, wide), lse.new_empty(2))


def _backward_op(hidden, weight, target, bias, class_weight, *plain):
    lse, grad_loss, grad_lse = plain[-3:]
    how, _, wants = _loss_of(weight, plain[:-3])
    how = replace(how, checked=False)
    _, _, made = passes(how, hidden, weight, target, bias, class_weight, wants, lse, (grad_loss, grad_lse))
    of_hidden, of_weight, of_bias = finish(made, hidden, weight, None)
    return _or_empty(of_hidden, hidden), _or_empty(of_weight, weight), _or_empty(of_bias, weight)


def _backward_fake(hidden, weight, target, bias, class_weight, *plain):
    _, _, wants = _loss_of(weight, plain[:-3])
    return (
        hidden.new_empty(hidden.shape if wants[0] else (0,)),
        weight.new_empty(weight.shape if wants[1] else (0,)),
        weight.new_empty(weight.shape[:1] if wants[2] else (0,)),
    )


def _setup(ctx, inputs, output):
    hidden, weight, target, bias, class_weight, *plain = inputs
    _, lse, of_hidden, of_weight, of_bias, scale = output
    how, return_lse, _ = _loss_of(weight, tuple(plain))
    still = [of_hidden, of_weight, of_bias, scale, *([] if return_lse else [lse])]
    ctx.mark_non_differentiable(*still)
    ctx.late, ctx.plain = how.reduction == "none" or return_lse, tuple(plain)
    ctx.save_for_backward(hidden, weight, target, bias, class_weight, lse, of_hidden, of_weight, of_bias, scale)


def _walk(ctx, of_loss, of_lse, *unused):
    hidden, weight, target, bias, class_weight, lse, of_hidden, of_weight, of_bias, scale = ctx.saved_tensors
    wants = ctx.plain[-1]
    if ctx.late:
        grad_lse = of_lse if ctx.plain[-2] else None
        packet = getattr(getattr(torch.ops, NAMESPACE), _BACKWARD)
        found = packet(hidden, weight, target, bias, class_weight, *ctx.plain, lse, of_loss, grad_lse)
    else:
        factor = above_tokens(_loss_of(weight, ctx.plain)[0], target, of_loss).to(scale.dtype) * scale
        found = (
            finished(of_hidden, hidden, factor[:1], True),
            finished(of_weight, weight, factor[1:], True),
            finished(of_bias, weight, factor[:1], True),
        )
    found = tuple(x if asks else None for x, asks in zip(found, wants, strict=True))
    if torch.is_grad_enabled():  # somebody will differentiate again: not where a graph is made
        found = tuple(None if x is None else Once.apply(x.detach().requires_grad_()) for x in found)
    dh, dw, db = found
    return (dh, dw, None, db, None, *(None for _ in ctx.plain))


LIBRARY.impl(FORWARD, _forward_op, "CompositeExplicitAutograd")
LIBRARY.impl(_BACKWARD, _backward_op, "CompositeExplicitAutograd")
library.register_fake(f"{NAMESPACE}::{FORWARD}", _forward_fake, lib=LIBRARY)
library.register_fake(f"{NAMESPACE}::{_BACKWARD}", _backward_fake, lib=LIBRARY)
library.register_autograd(f"{NAMESPACE}::{FORWARD}", _walk, setup_context=_setup, lib=LIBRARY)
