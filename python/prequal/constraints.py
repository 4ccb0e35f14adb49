"""What an op's arguments must be (a wrong call is an error) and what its kernel needs (the reference answers the rest).

The native side checks the same before a launch; these serve the reference path, tracing and `prequal.explain`, and they
read no environment. Messages name the argument, what was expected and what came.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Need:
    """Something the kernel needs of a call that is right in itself. `name` is what follows `unsupported_input:`."""

    name: str
    text: str
    holds: Callable[[Arguments], bool]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- needs -------------------------------------------------------------------------------------------------------


def dtype_in(argument: str, *dtypes: torch.dtype) -> Need:
    text = f"{argument} in {', '.join(short(dtype) for dtype in dtypes)}"
    return Need("dtype", text, lambda args: args[argument].dtype in dtypes)


def dtype_of_or(argument: str, other: str, *dtypes: torch.dtype) -> Need:
    text = f"{argument} of the dtype of {other}" + "".join(f" or {short(dtype)}" for dtype in dtypes)
    return Need(
        "dtype",
        text,
        lambda args: args[argument] is None or args[argument].dtype in (args[other].dtype, *dtypes),
    )


def at_most(argument: str, dim: int, limit: int) -> Need:
    return Need("size", f"{argument}.shape[{dim}] <= {limit:,}", lambda args: args[argument].shape[dim] <= limit)


def unit_stride(argument: str) -> Need:
    def holds(args: Arguments) -> bool:
        x = args[argument]
        return x is None or x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1

    return Need("unit_stride", f"{argument} contiguous in its last dimension", holds)


def row_contiguous(argument: str) -> Need:
    """Everything behind the first dimension lies together."""

    def holds(args: Arguments) -> bool:
        x = args[argument]
        step = 1
        for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
            if size == 0:
                return True
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    return Need("unit_stride", f"the rows of {argument} contiguous", holds)


def one_row_stride(argument: str) -> Need:
    """The leading dimensions collapse into one without a copy."""

    def holds(args: Arguments) -> bool:
        x = args[argument]
        if x is None:
            return True
        rows = [(n, s) for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
        return 0 in x.shape or all(s == n2 * s2 for (_, s), (n2, s2) in itertools.pairwise(rows))

    return Need("rows", f"one stride over all rows of {argument}", holds)


def apart(*written: str, read: Sequence[str] = ()) -> Need:
    """What is written shares no memory with itself or anything else, as far as strides can prove it."""

    def holds(args: Arguments) -> bool:
        others = [args[name] for name in read if args[name] is not None]
        tensors = [args[name] for name in written]
        return all(_is_apart(x) for x in tensors) and all(
            _are_apart(x, y) for i, x in enumerate(tensors) for y in (*tensors[i + 1 :], *others)
        )

    return Need("aliasing", f"{' and '.join(written)} in memory of their own", holds)


def _is_apart(x: Tensor) -> bool:
    if x.numel() == 0:
        return True
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * itemsize


def _are_apart(a: Tensor, b: Tensor) -> bool:
    """Two extents, or two slices beside each other in the rows of one packed tensor: overlap.h says the same."""
    if a.numel() == 0 or b.numel() == 0:
        return True
    if a.device.type == "meta" or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return True
    size = a.element_size()
    apart = b.data_ptr() - a.data_ptr()
    if apart >= _extent(a.shape, a.stride(), size) or -apart >= _extent(b.shape, b.stride(), b.element_size()):
        return True
    if a.dim() != b.dim() or size != b.element_size():
        return False
    outer = 0
    walks = [[s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True)] for x in (a, b)]
    while outer < a.dim() and a.shape[outer] == b.shape[outer] and walks[0][outer] == walks[1][outer]:
        outer += 1
    for dims in range(outer, 0, -1):
        steps = [s for s in walks[0][:dims] if s]
        if not steps or any(s % min(steps) for s in steps):
            continue
        step = min(steps) * size
        mine, theirs = (_extent(x.shape[dims:], x.stride()[dims:], size) for x in (a, b))
        if abs(apart) < step and mine <= apart % step <= step - theirs:
            return True
    return False


# ---- arguments ---------------------------------------------------------------------------------------------------


def is_tensor(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{argument}: expected a dense tensor, got one with layout {short_layout(value)}")


def short_layout(x: Tensor) -> str:
    return str(x.layout).removeprefix("torch.")


def same_device(**tensors: Tensor | None) -> None:
    present = [(name, x) for name, x in tensors.items() if x is not None]
    first_name, first = present[0]
    for name, x in present[1:]:
        if x.device != first.device:
            raise ValueError(f"{name}: expected a tensor on {first.device} like {first_name}, got {x.device}")


def has_shape(argument: str, x: Tensor, shape: Sequence[int | str], note: str = "") -> None:
    """Strings stand for any size; a final "..." for any further dimensions."""
    open_ended = bool(shape) and shape[-1] == "..."
    wanted = shape[:-1] if open_ended else shape
    fits = x.dim() >= len(wanted) if open_ended else x.dim() == len(wanted)
    if not fits or any(isinstance(w, int) and x.shape[i] != w for i, w in enumerate(wanted)):
        text = ", ".join(str(w) for w in shape)
        raise ValueError(f"{argument}: expected shape [{text}]{note}, got {list(x.shape)}")


def same_shape(argument: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.shape != y.shape:
        raise ValueError(f"{argument}: expected the shape {list(y.shape)} of {other}, got {list(x.shape)}")


def same_dtype(argument: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.dtype != y.dtype:
        raise TypeError(f"{argument}: expected {short(y.dtype)} like {other}, got {short(x.dtype)}")


def is_bool(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{argument}: expected a bool, got {type(value).__name__}")


def is_floating(argument: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{argument}: expected a floating dtype, got {short(x.dtype)}")


def in_range(argument: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{argument}: expected an int, got {type(value).__name__}")
    if not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{argument}: expected {low} to {high}, got {value}")


def is_number(argument: str, value: object) -> None:
    number = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
    if isinstance(value, bool | Tensor) or not number:
        raise TypeError(f"{argument}: expected a float, got {type(value).__name__}")
