"""What the FP8 ops share: shapes of scales, the reference's arithmetic, checks, needs and samples."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prequal import constraints as c
from prequal.registry import BadCall

BLOCK = 128
GRANULARITIES = ("tensor", "token", "block_1x128", "block_128x128")
BY_ROW = ("token", "block_1x128")  # what a fused producer has in hand
LAYOUTS = ("row", "column")
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SMALLEST_SCALE = 2.0**-126  # below it 1 / scale would not be finite
WIDEST = 2**30


def largest_of(dtype: torch.dtype) -> float:
    return 448.0 if dtype == torch.float8_e4m3fn else 57344.0


# ---- shapes --------------------------------------------------------------------------------------------------------


def blocks_of(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def scale_shape(shape: Sequence[int], granularity: str, layout: str) -> tuple[int, ...]:
    """Of the scales of a tensor of this shape: rows, then blocks of columns; in column layout these come first."""
    if granularity == "tensor":
        return (1,)
    lead = tuple(shape[:-1])
    if granularity == "block_128x128":
        lead = (*lead[:-1], blocks_of(lead[-1]))
    last = 1 if granularity == "token" else blocks_of(shape[-1])
    return (last, *lead) if layout == "column" else (*lead, last)


def by_column(scale: Tensor, granularity: str, layout: str) -> Tensor:
    """From row layout."""
    return scale.movedim(-1, 0).contiguous() if layout == "column" and granularity != "tensor" else scale


def by_row(scale: Tensor, granularity: str, layout: str) -> Tensor:
    """To row layout."""
    return scale.movedim(0, -1) if layout == "column" and granularity != "tensor" else scale


def spread(scale: Tensor, shape: Sequence[int], granularity: str) -> Tensor:
    """In row layout, to what broadcasts against the tensor."""
    if granularity in ("tensor", "token"):
        return scale
    scale = scale.unsqueeze(-1).expand(*scale.shape, BLOCK).flatten(-2)[..., : shape[-1]]
    if granularity == "block_128x128":
        scale = scale.unsqueeze(-2).expand(*scale.shape[:-1], BLOCK, scale.shape[-1]).flatten(-3, -2)
        scale = scale[..., : shape[-2], :]
    return scale


# ---- the arithmetic of the reference -------------------------------------------------------------------------------


def by_group(x: Tensor, granularity: str, reduce: Callable[..., Tensor]) -> Tensor:
    """`reduce` (torch.amax or torch.sum, to which zeros are added) over each group, in row layout."""
    if granularity == "tensor":
        return reduce(functional.pad(x.reshape(-1), (0, 1)), 0, keepdim=True)
    if granularity == "token":
        return reduce(functional.pad(x, (0, 1)), -1, keepdim=True)
    columns = blocks_of(x.shape[-1])
    found = functional.pad(x, (0, columns * BLOCK - x.shape[-1]))
    found = reduce(found.reshape(*x.shape[:-1], columns, BLOCK), -1)
    if granularity == "block_128x128":
        rows = blocks_of(x.shape[-2])
        found = functional.pad(found, (0, 0, 0, rows * BLOCK - x.shape[-2]))
        found = reduce(found.reshape(*x.shape[:-2], rows, BLOCK, columns), -2)
    return found


def amax_of(x: Tensor, granularity: str) -> Tensor:
    """The largest finite |x| of each group, in row layout; 0 where there is none."""
    return by_group(torch.where(x.isfinite(), x.abs(), 0.0), granularity, torch.amax)


def bound_of(scale_upper_bound: float | None, ue8m0: bool) -> float:
    """As float32, with ue8m0 rounded down to a power of two."""
    bound = math.inf if scale_upper_bound is None else ctypes.c_float(scale_upper_bound).value
    return 2.0 ** (math.frexp(bound)[1] - 1) if ue8m0 and bound < math.inf else bound


def scale_of(amax: Tensor, dtype: torch.dtype, scale_upper_bound: float | None, ue8m0: bool) -> Tensor:
    # by a tensor: torch divides by a Python number on a GPU as a product with its reciprocal, which rounds otherwise
    scale = torch.where(amax > 0, amax / torch.full_like(amax, largest_of(dtype)), 1.0).clamp(min=SMALLEST_SCALE)
    if ue8m0:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale.clamp(max=bound_of(scale_upper_bound, ue8m0))


def quantized(
    x: Tensor,
    granularity: str,
    dtype: torch.dtype,
    scale: Tensor | None,
    scale_upper_bound: float | None,
    ue8m0: bool,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """The reference: q and scale, detached."""
    wide = x.detach().to(torch.float32)
    if scale is None:
        found = scale_of(amax_of(wide, granularity), dtype, scale_upper_bound, ue8m0)
    else:
        found = by_row(scale.detach().to(torch.float32).reshape(scale.shape or (1,)), granularity, layout)
    value = wide / spread(found, x.shape, granularity)
    value = value.clamp(-largest_of(dtype), largest_of(dtype))
    value = value.masked_fill(value.isnan(), math.nan)  # one NaN, whatever its sign was
    return value.to(dtype).contiguous(), by_column(found, granularity, layout).clone(
        memory_format=torch.contiguous_format
    )


def fake_of(x: Tensor, granularity: str, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    shape = scale_shape(x.shape, granularity, layout)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


# ---- what a right call is ------------------------------------------------------------------------------------------


def one_of(argument: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{argument}: expected a str, got {type(value).__name__}")
    if value not in choices:
        names = [f"'{choice}'" for choice in choices]
        raise ValueError(f"{argument}: expected {', '.join(names[:-1])} or {names[-1]}, got '{value}'")


def is_fp8(argument: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{argument}: expected a torch.dtype, got {type(dtype).__name__}")
    if dtype not in DTYPES:
        raise ValueError(f"{argument}: expected float8_e4m3fn or float8_e5m2, got {c.short(dtype)}")


def check_options(
    granularity: Any, dtype: Any, scale_upper_bound: Any, ue8m0: Any, layout: Any, choices: Sequence[str]
) -> None:
    one_of("granularity", granularity, choices)
    is_fp8("dtype", dtype)
    if scale_upper_bound is not None:
        c.is_number("scale_upper_bound", scale_upper_bound)
        if not float(scale_upper_bound) >= SMALLEST_SCALE:
            raise ValueError(f"scale_upper_bound: expected at least 2^-126, got {scale_upper_bound}")
    c.is_bool("ue8m0", ue8m0)
    one_of("scale_layout", layout, LAYOUTS)


def check_rank(argument: str, x: Tensor, granularity: str) -> None:
    if x.dim() < 1:
        raise ValueError(f"{argument}: expected at least one dimension, got a 0-dimensional tensor")
    if granularity == "block_128x128" and x.dim() < 2:
        raise ValueError(f"{argument}: expected at least two dimensions for 'block_128x128', got {list(x.shape)}")


def check_scale(scale: Tensor, argument: str, x: Tensor, granularity: str, layout: str) -> None:
    """Of scales that are given."""
    c.is_floating("scale", scale)
    shape = scale_shape(x.shape, granularity, layout)
    if tuple(scale.shape) != shape and not (granularity == "tensor" and scale.dim() == 0):
        text = f"shape {list(shape)} for {granularity} scales of {argument}"
        raise ValueError(f"scale: expected {text}, got {list(scale.shape)}")


def contiguous(argument: str) -> c.Need:
    def holds(args: c.Arguments) -> bool:
        return args[argument] is None or args[argument].is_contiguous()

    return c.Need("unit_stride", f"{argument} contiguous", holds)


def bad_options(lead: tuple[Any, ...], first: int) -> Iterator[BadCall]:
    """Of (*lead, granularity, dtype, *, ...); `first` is the place of granularity."""
    lead = lead[:first]
    yield BadCall((*lead, 3), TypeError, r"granularity: expected a str, got int")
    yield BadCall((*lead, "row"), ValueError, r"granularity: expected 'to?.*', got 'row'")
    yield BadCall((*lead, "token", "e4m3"), TypeError, r"dtype: expected a torch.dtype, got str")
    text = r"dtype: expected float8_e4m3fn or float8_e5m2, got float16"
    yield BadCall((*lead, "token", torch.float16), ValueError, text)
    text = r"scale_upper_bound: expected at least 2\^-126, got 0"
    yield BadCall((*lead, "token"), ValueError, text, {"scale_upper_bound": 0.0})
    yield BadCall((*lead, "token"), TypeError, r"scale_upper_bound: expected a float", {"scale_upper_bound": "1"})
    yield BadCall((*lead, "token"), TypeError, r"ue8m0: expected a bool, got int", {"ue8m0": 1})
    text = r"scale_layout: expected 'row' or 'column', got 'columns'"
    yield BadCall((*lead, "token"), ValueError, text, {"scale_layout": "columns"})


# ---- fused producers -----------------------------------------------------------------------------------------------

# Of q, and of its scale, against the reference. The two paths make values that differ by the last bit of a half now and
# then (the order of a sum, exp): 2^-7 of the value for bf16, twice that with exact_rounding, which rounds twice. amax,
# and with it the scale, may differ by as much. Both together move x / scale by less than 2^-4, and a step of FP8 is at
# least 2^-4 (e4m3) or 2^-3 (e5m2) of the value, below the normals 2^-9 or 2^-16. So q differs by one step at most,
# 2^-3 or 2^-2 of the value. With ue8m0 a scale near a power of two may become another, by a factor of 2.
Q_AND_SCALE = {
    torch.float8_e4m3fn: (2.0**-3, 2.0**-9),
    torch.float8_e5m2: (2.0**-2, 2.0**-16),
    torch.float32: (2.0**-6, 0.0),
}


def check_producer(granularity: Any, dtype: Any, scale_upper_bound: Any, ue8m0: Any, layout: Any) -> None:
    check_options(granularity, dtype, scale_upper_bound, ue8m0, layout, BY_ROW)


def producer_options() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(name, granularity and dtype, keyword arguments) that the samples of every producer go through."""
    for granularity in BY_ROW:
        yield f"{granularity} e5m2", (granularity, DTYPES[1]), {"exact_rounding": True}
        yield f"{granularity} powers of two, column layout", (granularity,), {"ue8m0": True, "scale_layout": "column"}
        yield f"{granularity} bound", (granularity,), {"scale_upper_bound": 0.005}
