"""The loss of a language model's head with exact gradients: the public function, and by which road a call goes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prequal import constraints as c
from prequal.registry import NAMESPACE, is_transformed, needs_dispatcher

from .checks import autocast_dtype, check_accumulation, check_call, share_of
from .chunks import default_workspace
from .eager import ChunkedLoss
from .graph_node import FORWARD
from .tokens import Loss, plain_formula
from .walk import passes


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    return_lse: bool = False,
    weight_grad_dtype: torch.dtype | None = None,
    accumulate_into_grad: bool = False,
    max_workspace_bytes: int | None = None,
    checked: bool = False,
    process_group: Any = None,
    vocabulary: tuple[int, int] | None = None,
) -> Any:
    """Cross-entropy of ``hidden @ weight.T + bias``, without all of the logits ever being in memory.

    Args:
        hidden: [..., H], floating.
        weight: [V, H], of hidden's dtype.
        target: [...], int32 or int64: classes, or ignore_index.
        bias: [V], of hidden's dtype, or None.
        ignore_index: tokens of this target have no loss and no gradient, and do not count in the mean.
        reduction: "mean" over the tokens that count (with class_weight over their weights), "sum" or "none".
        label_smoothing: 0 to 1: this share of the target is spread over all classes.
        z_loss: what lse squared is multiplied by and added to each token's loss.
        softcap: logits z become ``softcap * tanh(z / softcap)``; None: they stay.
        class_weight: [V], floating, without a gradient of its own; or None.
        return_lse: return lse as well.
        weight_grad_dtype: what the chunks of the weight's gradient are added in: None for weight's dtype, or
            torch.float32, which takes 4 bytes an element of weight more while it runs.
        accumulate_into_grad: the weight's gradient is added to an existing ``weight.grad`` in the backward pass, and no
            second one is made; the logits are computed twice for it. Not with float16, hooks on weight, or
            torch.compile, and with weight_grad_dtype only where weight is of that dtype.
        max_workspace_bytes: memory for logits; one row is always made. None: as much as weight takes where it needs a
            gradient, at most 512 MiB (with sums wider than weight, 1 GiB); else, and at least, 284 MiB. Of a vocabulary
            that is spread, for an even share of it; the same number on every rank.
        checked: wait for the device and raise where a target is no class. On the CPU that is always so.
        process_group: weight, bias and class_weight are this rank's slice of a vocabulary spread over the group; hidden
            and target are the same on every rank. So are the results, and the gradient of hidden.
        vocabulary: (first class of this rank, classes in all); default: slices of one size in the order of ranks.

    Returns:
        the loss, a scalar or of target's shape, float32 (float64 for float64). With return_lse a pair with lse of
        target's shape, ``log sum exp`` of each row's logits, which has a gradient too.

    Each token's loss is ``(1 - s) w[y] (lse - z[y]) + s / V sum_j w[j] (lse - z[j]) + z_loss lse^2``. The mean of
    nothing but ignored tokens is NaN, their sum 0, and the gradients of both are 0. Without `checked`, on a GPU, a
    target that is neither a class nor ignore_index makes its token's loss and gradient NaN; nothing outside is read.

    Where a gradient is needed and the loss is one number, gradients are computed in the forward pass, with three matrix
    products in all. With reduction="none", accumulate_into_grad, or a gradient of lse the backward pass computes the
    logits again. Second derivatives are an error. Under torch.func's transforms all logits are made.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    tensors = (hidden, weight, target, bias, class_weight)
    check_call(*tensors, ignore_index, reduction, label_smoothing, z_loss, softcap, max_workspace_bytes)
    for name, value in (
        ("return_lse", return_lse),
        ("checked", checked),
        ("accumulate_into_grad", accumulate_into_grad),
    ):
        c.is_bool(name, value)
    if weight_grad_dtype not in (None, torch.float32):
        raise ValueError(f"weight_grad_dtype: expected None or torch.float32, got {weight_grad_dtype}")
    if process_group is None and vocabulary is not None:
        raise ValueError(f"vocabulary: expected None without a process_group, got {vocabulary}")
    first, classes = 0, weight.shape[0]
    if process_group is not None:
        first, classes = share_of(process_group, weight.shape[0], vocabulary)
    if (dtype := autocast_dtype(hidden)) is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if max_workspace_bytes is None:
        share = classes if process_group is None else -(-classes // dist.get_world_size(process_group))
        adds = torch.is_grad_enabled() and weight.requires_grad
        wide = weight_grad_dtype == torch.float32 and weight.element_size() < 4
        max_workspace_bytes = default_workspace(share, weight.shape[1], weight.element_size(), adds, wide)
    how = Loss(
        ignore_index,
        reduction,
        float(label_smoothing),
        float(z_loss),
        0.0 if softcap is None else float(softcap),
        weight_grad_dtype == torch.float32,
        max_workspace_bytes,
        first,
        classes,
        checked or not hidden.is_cuda,
        process_group,
        accumulate_into_grad,
    )

    if accumulate_into_grad:
        check_accumulation(weight, weight_grad_dtype)
    # -1 would stand for any number of tokens where H is 0
    flat, target_flat = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1).long()
    if class_weight is not None:
        class_weight = class_weight.detach()

    loss, lse = _answer(how, flat, weight, target_flat, bias, class_weight, return_lse)
    if reduction == "none":
        loss = loss.view(target.shape)
    return (loss, lse.view(target.shape)) if return_lse else loss


def _answer(how, hidden, weight, target, bias, class_weight, return_lse):
    grad = torch.is_grad_enabled()
    wants = (
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    if not torch.compiler.is_dynamo_compiling():
        args = tuple(x for x in (hidden, weight, target, bias, class_weight) if x is not None)
        transformed = torch._C._functorch.peek_interpreter_stack() is not None or is_transformed(args)
        if how.group is not None and (transformed or needs_dispatcher(args)):
            raise ValueError("process_group: expected plain tensors and no transform where a vocabulary is spread")
        if transformed:
            return plain_formula(how, hidden, weight, target, bias, class_weight)
        if not needs_dispatcher(args):
            if any(wants):
                return ChunkedLoss.apply(hidden, weight, bias, target, class_weight, how, wants)
            with torch.no_grad():
                return passes(how, hidden, weight, target, bias, class_weight, wants)[:2]
    if how.group is not None or how.into_grad:
        raise ValueError("process_group, accumulate_into_grad: expected neither under torch.compile or a dispatch mode")
    packet = getattr(getattr(torch.ops, NAMESPACE), FORWARD)
    return packet(
        hidden,
        weight,
        target,
        bias,
        class_weight,
        how.ignore_index,
        how.reduction,
        how.label_smoothing,
        how.z_loss,
        how.softcap,
        how.wide_weight_grad,
        how.workspace,
        how.checked,
        return_lse,
        list(wants),
    )[:2]
