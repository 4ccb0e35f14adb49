"""What an op's arguments must be (a wrong call is an error) and what its kernel needs (the reference answers the rest).

The native side checks the same before a launch; these serve the reference path, tracing and `prequal.explain`, and they
read no environment. Messages name the argument, what was expected and what came.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

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


def apart(*written: str, read: Sequence[str]) -> Need:
    """What is written shares no memory with what is only read: else the kernel reads what it has written."""

    def holds(args: Arguments) -> bool:
        others = [args[name] for name in read if args[name] is not None]
        return all(_are_apart(args[name], y) for name in written for y in others)

    text = f"{' and '.join(written)} in other memory than {' and '.join(read)}"
    return Need("aliasing", text, holds)


# ---- arguments ---------------------------------------------------------------------------------------------------


def is_tensor(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument}: expected a torch.Tensor, got {type(value).__name__}")
    if value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized"
        raise TypeError(f"{argument}: expected a dense tensor of plain numbers, got a {kind} one")
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
    open_ended = len(shape) > 0 and shape[-1] == "..."  # torch 2.11 does not trace bool() of a tuple
    wanted = shape[:-1] if open_ended else shape
    fits = x.dim() >= len(wanted) if open_ended else x.dim() == len(wanted)
    if not fits or any(not isinstance(w, str) and x.shape[i] != w for i, w in enumerate(wanted)):
        text = ", ".join(str(w) for w in shape)
        raise ValueError(f"{argument}: expected shape [{text}]{note}, got {list(x.shape)}")


def same_shape(argument: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.shape != y.shape:
        raise ValueError(f"{argument}: expected the shape {list(y.shape)} of {other}, got {list(x.shape)}")


def same_dtype(argument: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.dtype != y.dtype:
        raise TypeError(f"{argument}: expected {short(y.dtype)} like {other}, got {short(x.dtype)}")


def is_apart(argument: str, x: Tensor) -> None:
    """Of what is written: no two of its elements share memory."""
    if not _is_apart(x):
        raise ValueError(
            f"{argument}: expected a place of its own for every element, since it is written, got shared ones"
        )


def are_apart(argument: str, x: Tensor, written: str, y: Tensor) -> None:
    """Of what is written or read beside what is written: they share no memory."""
    if not _are_apart(x, y):
        raise ValueError(
            f"{argument}: expected memory apart from that of {written}, which is written, got shared memory"
        )


def is_bool(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{argument}: expected a bool, got {type(value).__name__}")


def is_floating(argument: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{argument}: expected a floating dtype, got {short(x.dtype)}")


def in_range(argument: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool | Tensor) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{argument}: expected an int, got {type(value).__name__}")
    if not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{argument}: expected {low} to {high}, got {value}")


def is_number(argument: str, value: object) -> None:
    number = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
    if isinstance(value, bool | Tensor) or not number:
        raise TypeError(f"{argument}: expected a float, got {type(value).__name__}")


# ---- memory: overlap.h says the same ---------------------------------------------------------------------------------

PATIENCE = 10_000  # places that a search looks at before it counts as one that found something


def _first_byte(x: Tensor) -> int | None:
    """None of what has no memory of its own, traced or wrapped: the call is checked again when it runs."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return None if x.device.type == "meta" or isinstance(x, FakeTensor) else x.data_ptr() or None


def _is_apart(x: Tensor) -> bool:
    """Two elements share memory where the steps from one to the other add up to nothing: one or more in some dimension,
    and any number, forwards or backwards, in those after it."""
    if _first_byte(x) is None or x.numel() == 0:
        return True
    dims = [(stride, size - 1) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    for i, (stride, most) in enumerate(dims):
        back = sum(step * times for step, times in dims[i + 1 :])
        walks = [(stride, most - 1), *((step, 2 * times) for step, times in dims[i + 1 :])]
        if stride == 0 or _reach(back - stride, walks):
            return False
    return True


def _are_apart(a: Tensor, b: Tensor) -> bool:
    first, second = _first_byte(a), _first_byte(b)
    if first is None or second is None or a.numel() == 0 or b.numel() == 0:
        return True
    walks = [
        (stride * x.element_size(), size - 1) for x in (a, b) for stride, size in zip(x.stride(), x.shape, strict=True)
    ]
    mine, theirs = (
        x.element_size() * (1 + sum(n * step for step, n in zip(x.stride(), (n - 1 for n in x.shape), strict=True)))
        for x in (a, b)
    )
    if first + mine <= second or second + theirs <= first:
        return True
    # a byte of a is one of b: b's walks are gone back from its last byte, so that all of them go one way
    walks.append((1, a.element_size() - 1 + b.element_size() - 1))
    return not _reach(second - first + theirs - 1, walks)


def _reach(target: int, walks: Iterable[tuple[int, int]]) -> bool:
    """Whether walks of (step, at most so many times) can add up to the target."""
    most: dict[int, int] = {}
    for step, times in walks:
        if step and times:
            most[step] = most.get(step, 0) + times
    order = sorted(most.items(), reverse=True)
    patience = PATIENCE

    def reach(target: int, first: int) -> bool:
        nonlocal patience
        if target == 0:
            return True
        if target < 0 or first == len(order):
            return False
        step, times = order[first]
        narrower = order[first + 1 :]
        rest = sum(step * times for step, times in narrower)
        divisor = math.gcd(*(step for step, _ in narrower))
        for n in range(min(times, target // step), max(0, -((rest - target) // step)) - 1, -1):
            patience -= 1
            left = target - n * step
            if patience < 0 or left == 0 or (divisor and left % divisor == 0 and reach(left, first + 1)):
                return True
        return False

    return reach(target, 0)
