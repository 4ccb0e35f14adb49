"""Right and wrong calls of a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prequal import constraints as c
from prequal.ops._rows import wide_of

INTS = (torch.int32, torch.int64)


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """What autocast computes in; None where it is off, or has nothing to say."""
    kind = hidden.device.type
    on = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if on else None


def share_of(group: Any, own: int, vocabulary: tuple[int, int] | None) -> tuple[int, int]:
    """(first class of this rank, classes in all)."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("process_group: expected a group that this process is in, got one without it")
    if vocabulary is None:
        return rank * own, ranks * own
    if not (isinstance(vocabulary, tuple | list) and len(vocabulary) == 2 and all(map(_is_int, vocabulary))):
        raise TypeError(f"vocabulary: expected (first, classes), two ints, got {vocabulary!r}")
    first, classes = vocabulary
    if not 0 <= first <= first + own <= classes:
        raise ValueError(
            f"vocabulary: expected (first, classes) with {own} classes of this rank inside, got ({first}, {classes})"
        )
    return int(first), int(classes)


def _is_int(value: object) -> bool:
    return hasattr(type(value), "__index__") and not isinstance(value, bool | Tensor)


def check_accumulation(weight: Tensor, sums: torch.dtype | None) -> None:
    if sums is not None and weight.dtype != wide_of(weight):
        raise ValueError(
            f"weight_grad_dtype: expected None with accumulate_into_grad, which adds in {c.short(weight.dtype)}, "
            f"got {sums}"
        )
    if torch.is_grad_enabled() and weight.requires_grad:
        if not weight.is_leaf:
            raise ValueError(
                "accumulate_into_grad: expected a leaf for weight, got the result of an operation (a cast of autocast?)"
            )
        if weight.dtype == torch.float16:
            raise ValueError("accumulate_into_grad: expected float32 or bfloat16 for weight, got float16")
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise ValueError("accumulate_into_grad: expected no hooks on weight, which would not be called")


def check_call(
    hidden, weight, target, bias, class_weight, ignore_index, reduction, smoothing, z_loss, softcap, workspace
):
    for name, value in (("hidden", hidden), ("weight", weight), ("target", target)):
        c.is_tensor(name, value)
    c.is_floating("hidden", hidden)
    if hidden.dim() == 0:
        raise ValueError("hidden: expected at least one dimension, got a 0-dimensional tensor")
    c.has_shape("weight", weight, ("V", hidden.shape[-1]))
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one class, got shape " + str(list(weight.shape)))
    autocast = autocast_dtype(hidden) is not None
    if autocast:
        c.is_floating("weight", weight)
    else:
        c.same_dtype("weight", weight, "hidden", hidden)
    if target.dtype not in INTS:
        raise TypeError(f"target: expected int32 or int64, got {c.short(target.dtype)}")
    c.has_shape("target", target, hidden.shape[:-1])
    if bias is not None:
        c.is_tensor("bias", bias)
        c.has_shape("bias", bias, weight.shape[:1])
        if autocast:
            c.is_floating("bias", bias)
        else:
            c.same_dtype("bias", bias, "hidden", hidden)
    if class_weight is not None:
        c.is_tensor("class_weight", class_weight)
        c.is_floating("class_weight", class_weight)
        c.has_shape("class_weight", class_weight, weight.shape[:1])
    c.same_device(hidden=hidden, weight=weight, target=target, bias=bias, class_weight=class_weight)
    c.in_range("ignore_index", ignore_index, -(2**63), 2**63 - 1)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    for name, value in (("label_smoothing", smoothing), ("z_loss", z_loss)):
        c.is_number(name, value)
        if not 0 <= value < float("inf") or (name == "label_smoothing" and value > 1):
            most = "0 to 1" if name == "label_smoothing" else "a finite number >= 0"
            raise ValueError(f"{name}: expected {most}, got {value}")
    if softcap is not None:
        c.is_number("softcap", softcap)
        if not 0 < softcap < float("inf"):
            raise ValueError(f"softcap: expected None or a finite number > 0, got {softcap}")
        if hidden.dtype != torch.float64 and not 2.0**-126 <= softcap <= 2.0**127:
            raise ValueError(
                f"softcap: expected None or 2^-126 to 2^127, since it is computed with in float32, got {softcap}"
            )
    if workspace is not None:
        c.in_range("max_workspace_bytes", workspace, 1, 2**62)
