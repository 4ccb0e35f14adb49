"""When something computed once from a parameter must be computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_kept: set[int] = set()  # addresses of memory that somebody computed from; one that is handed out again does no harm
_counts_fused_steps = False


def watch(tensor: torch.Tensor) -> None:
    """Count the writes of fused optimisers to this tensor's memory, which move no version of their own accord."""
    global _counts_fused_steps
    _kept.add(tensor.untyped_storage().data_ptr())
    if not _counts_fused_steps:
        register_optimizer_step_post_hook(torch.compiler.disable(_count_fused_step))  # type: ignore[no-untyped-call]
        _counts_fused_steps = True


def _count_fused_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """torch's foreach and single-tensor steps move the version of what they write; its fused ones do not."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.untyped_storage().data_ptr() in _kept:
                    torch.autograd.graph.increment_version(parameter)


@dataclass(frozen=True, slots=True)
class ParameterKey:
    """A tensor's memory and how often it was written: equal keys, equal values, while the tensor lives.

    Whoever keeps a key keeps the tensor too (or drops the key with it): freed memory is handed out again at the same
    address. Fused optimisers are counted for what `watch` was told of. A write through `.data`, by another library or
    by a kernel outside torch moves no version counter.
    """

    pointer: int
    version: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ParameterKey | None:
        """None for an inference tensor: nobody counts the writes to it, so nothing computed from it may be kept."""
        if tensor.is_inference():
            return None
        return cls(
            tensor.data_ptr(), tensor._version, tensor.dtype, tensor.device, tuple(tensor.shape), tuple(tensor.stride())
        )
