"""When something computed once from a parameter must be computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ParameterKey:
    """A tensor's memory and how often it was written: equal keys, equal values, while the tensor lives.

    Whoever keeps a key keeps the tensor too (or drops the key with it): freed memory is handed out again at the same
    address. A write through `.data`, by another library or by a kernel outside torch moves no version counter.
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
