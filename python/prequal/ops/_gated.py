"""What swiglu and geglu share: samples, checks, needs and the packing of gate and up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.registry import BadCall, Sample

from ._rows import FLOATS, normal, walks

WIDTHS = (1, 7, 31, 128, 1000, 4095, 4097, 8192)


def apart_samples(device: torch.device, tensors: int, kwargs: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    """Calls of so many tensors [..., I] of one shape."""
    x = normal(device)

    def call(*shape: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(x(*shape, dtype=dtype, of=i) for i in range(tensors))

    yield Sample("quick", call(4, 128, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        for width in WIDTHS:
            yield Sample(f"{name} width {width}", call(3, width, dtype=dtype))
        yield Sample(f"{name} one row", call(333, dtype=dtype))
        yield Sample(f"{name} three dimensions", call(2, 3, 96, dtype=dtype))
        yield Sample(f"{name} strided rows", tuple(y[::2, :96] for y in call(6, 160, dtype=dtype)))
        yield Sample(
            f"{name} odd strided rows", tuple(y[:, i : 4097 + i] for i, y in enumerate(call(5, 4103, dtype=dtype)))
        )
        packed = x(6, 2 * 72, dtype=dtype)
        others = call(6, 72, dtype=dtype)[: tensors - 2]
        yield Sample(f"{name} halves of one tensor", (*others, *packed.chunk(2, dim=-1)))
        yield Sample(f"{name} misaligned", tuple(y[:, 1:] for y in call(4, 129, dtype=dtype)))
        yield Sample(f"{name} transposed", tuple(y.t() for y in call(64, 5, dtype=dtype)))
        yield Sample(f"{name} permuted rows", tuple(y.transpose(0, 2) for y in call(2, 3, 4, 32, dtype=dtype)))
        yield Sample(f"{name} large and small", tuple(30.0 * y for y in call(4, 1024, dtype=dtype)))
        yield Sample(f"{name} no rows", call(0, 64, dtype=dtype))
        yield Sample(f"{name} no columns", call(4, 0, dtype=dtype))
        if tensors == 3:
            grad, *rest = call(3, 40, dtype=dtype)
            yield Sample(f"{name} float64 gradient", (grad.double(), *rest))
        for what, named in kwargs.items():
            yield Sample(f"{name} {what}", call(3, 1032, dtype=dtype), named)
    yield Sample("float64", call(3, 50, dtype=torch.float64))


def packed_samples(device: torch.device, gradient: bool, kwargs: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    """Calls of x [..., 2 I], behind the gradient [..., I] where there is one."""
    x = normal(device)

    def call(*shape: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        both = x(*shape[:-1], 2 * shape[-1], dtype=dtype)
        return (x(*shape, dtype=dtype, of=1), both) if gradient else (both,)

    yield Sample("quick", call(4, 64, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        for layout, named in (("halves", {}), ("interleaved", {"interleaved": True})):
            for width in WIDTHS:
                yield Sample(f"{name} {layout}, width {width}", call(3, width, dtype=dtype), named)
            yield Sample(f"{name} {layout}, one row", call(333, dtype=dtype), named)
            yield Sample(f"{name} {layout}, three dimensions", call(2, 3, 96, dtype=dtype), named)
            strided = tuple(y[::2, 1:-1] for y in call(6, 161, dtype=dtype)[:-1])
            both = x(6, 320, dtype=dtype)[1::2, 1:-1]
            yield Sample(f"{name} {layout}, strided rows", (*strided, both), named)
            yield Sample(
                f"{name} {layout}, transposed",
                (*(y.mT for y in call(2, 64, 64, dtype=dtype)[:-1]), x(2, 128, 64, dtype=dtype).mT),
                named,
            )
            yield Sample(f"{name} {layout}, no rows", call(0, 64, dtype=dtype), named)
            yield Sample(f"{name} {layout}, no columns", call(4, 0, dtype=dtype), named)
            for what, more in kwargs.items():
                yield Sample(f"{name} {layout}, {what}", call(3, 1032, dtype=dtype), {**named, **more})
    yield Sample("float64", call(3, 50, dtype=torch.float64))


# ---- packing -------------------------------------------------------------------------------------------------------


def unpacked(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up, each [..., I]."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def repacked(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """[..., 2 I] of the layout that `unpacked` takes apart."""
    if interleaved:
        return torch.stack((gate, up), dim=-1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return torch.cat((gate, up), dim=-1)


# ---- what a right call is ----------------------------------------------------------------------------------------


def has_rows(argument: str, x: Tensor) -> None:
    if x.dim() < 1:
        raise ValueError(f"{argument}: expected at least one dimension, got a 0-dimensional tensor")


def check_apart(gate: Any, up: Any) -> None:
    c.is_tensor("gate", gate)
    c.is_tensor("up", up)
    c.same_device(gate=gate, up=up)
    has_rows("gate", gate)
    c.is_floating("gate", gate)
    c.same_shape("up", up, "gate", gate)
    c.same_dtype("up", up, "gate", gate)


def check_in_place(gate: Any, up: Any) -> None:
    check_apart(gate, up)
    c.is_apart("gate", gate)
    c.are_apart("up", up, "gate", gate)


def check_packed(x: Any, interleaved: Any) -> None:
    c.is_tensor("x", x)
    has_rows("x", x)
    c.is_floating("x", x)
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected an even last dimension, gate and up, got {list(x.shape)}")
    c.is_bool("interleaved", interleaved)


def check_apart_gradient(grad: Any, gate: Any, up: Any) -> None:
    c.is_tensor("grad", grad)
    check_apart(gate, up)
    c.same_device(grad=grad, gate=gate, up=up)
    _check_grad(grad, gate.shape, "gate")


def check_packed_gradient(grad: Any, x: Any, interleaved: Any) -> None:
    c.is_tensor("grad", grad)
    check_packed(x, interleaved)
    c.same_device(grad=grad, x=x)
    _check_grad(grad, (*x.shape[:-1], x.shape[-1] // 2), "the result")


def _check_grad(grad: Tensor, shape: tuple[int, ...], other: str) -> None:
    c.is_floating("grad", grad)
    if grad.shape != shape:
        raise ValueError(f"grad: expected the shape {list(shape)} of {other}, got {list(grad.shape)}")


APART = [c.dtype_in("gate", *FLOATS), *walks("gate", "up")]
PACKED = [c.dtype_in("x", *FLOATS), *walks("x")]
APART_GRADIENT = [c.dtype_of_or("grad", "gate"), c.dtype_in("gate", *FLOATS), *walks("grad", "gate", "up")]
PACKED_GRADIENT = [c.dtype_of_or("grad", "x"), c.dtype_in("x", *FLOATS), *walks("grad", "x")]


# ---- wrong calls ---------------------------------------------------------------------------------------------------


def bad_apart(device: torch.device, lead: tuple[Any, ...] = ()) -> Iterator[BadCall]:
    """Of (*lead, gate, up)."""
    x = torch.ones(2, 8, device=device)
    yield BadCall((*lead, x, 3), TypeError, r"up: expected a torch.Tensor, got int")
    yield BadCall((*lead, x.long(), x.long()), TypeError, r"gate: expected a floating dtype, got int64")
    yield BadCall((*lead, x, x.half()), TypeError, r"up: expected float32 like gate, got float16")
    yield BadCall((*lead, x, x[0]), ValueError, r"up: expected the shape \[2, 8\] of gate, got \[8\]")
    yield BadCall((*lead, x[0, 0], x[0, 0]), ValueError, r"gate: expected at least one dimension, got a 0-dim")
    if device.type == "cuda":
        first = "grad" if lead else "gate"
        yield BadCall((*lead, x, x.cpu()), ValueError, rf"up: expected a tensor on cuda:\d like {first}, got cpu")


def bad_in_place(device: torch.device) -> Iterator[BadCall]:
    yield from bad_apart(device)
    x = torch.ones(3, 8, device=device)
    shared = r"up: expected memory apart from that of gate, which is written, got shared memory"
    yield BadCall((x, x), ValueError, shared)
    yield BadCall((x[1:], x[:-1]), ValueError, shared)
    yield BadCall((x[:, :5], x[:, 3:]), ValueError, shared)
    one = torch.ones(1, 8, device=device).expand(3, 8)
    yield BadCall((one, x), ValueError, r"gate: expected a place of its own for every element, .* got shared ones")


def bad_packed(device: torch.device, lead: tuple[Any, ...] = ()) -> Iterator[BadCall]:
    """Of (*lead, x)."""
    x = torch.ones(2, 8, device=device)
    yield BadCall((*lead, [1.0]), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((*lead, x.long()), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((*lead, x[:, :7]), ValueError, r"x: expected an even last dimension, gate and up, got \[2, 7\]")
    yield BadCall((*lead, x[0, 0]), ValueError, r"x: expected at least one dimension, got a 0-dimensional tensor")


def bad_apart_gradient(device: torch.device) -> Iterator[BadCall]:
    x = torch.ones(2, 8, device=device)
    yield from bad_apart(device, (x,))
    yield BadCall((x[0], x, x), ValueError, r"grad: expected the shape \[2, 8\] of gate, got \[8\]")


def bad_packed_gradient(device: torch.device) -> Iterator[BadCall]:
    x = torch.ones(2, 8, device=device)
    yield from bad_packed(device, (x[:, :4],))
    yield BadCall((x, x), ValueError, r"grad: expected the shape \[2, 4\] of the result, got \[2, 8\]")
