"""Quantisation to FP8, with a scale for a tensor, a token or a block, and back."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Bitwise, Exact
from prequal.registry import BadCall, Sample, op

from . import _fp8 as fp8
from ._rows import FLOATS, normal, walks

E4M3, E5M2 = fp8.DTYPES


def special(x):
    """NaN, infinities, zeros and the smallest numbers, in rows of their own and among others. [12, 300]"""
    rows = x(12, 300)
    rows[0, 3], rows[1, 5], rows[1, 200], rows[2] = torch.nan, torch.inf, -torch.inf, 0.0
    rows[3], rows[4], rows[5] = torch.nan, torch.inf, 2.0**-149
    rows[6] *= 2.0**-140
    rows[7] *= 1e38
    rows[8, 7], rows[9] = -0.0, -0.0
    rows[10, ::2], rows[11, 5] = torch.nan, 2.0**-149
    return rows


def every_half(dtype):
    """[256, 256]: all of a half dtype's numbers."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)


def given(x, shape, granularity, layout="row"):
    """Scales of all sizes near one."""
    shape = fp8.scale_shape(shape, granularity, layout)
    return torch.exp2(2.0 * x(*shape, of=7)).to(torch.float32)


def samples(device):
    """Every width of one dtype, of the others what their code has of its own."""
    x = normal(device)
    yield Sample("quick", (x(4, 160, dtype=torch.bfloat16), "token"))
    for granularity in fp8.GRANULARITIES:
        for width in (1, 128, 257, 1031, 4096, 8200):
            yield Sample(f"{granularity} width {width}", (x(5, width, dtype=torch.bfloat16), granularity))
        for dtype, to in ((torch.float32, E4M3), (torch.float16, E5M2)):
            name = f"{granularity} {c.short(dtype)} to {c.short(to)}"
            yield Sample(f"{name}, whole words", (x(131, 264, dtype=dtype), granularity, to))
            yield Sample(f"{name}, misaligned", (x(130, 260, dtype=dtype)[:, 3:], granularity, to))
        yield Sample(f"{granularity} strided rows", (x(6, 300)[::2, :288], granularity))
        yield Sample(f"{granularity} many rows", (x(2053, 136, dtype=torch.bfloat16), granularity))
        yield Sample(f"{granularity} three dimensions", (x(3, 130, 96, dtype=torch.float16), granularity))
        yield Sample(f"{granularity} no rows", (x(0, 64), granularity))
        yield Sample(f"{granularity} no columns", (x(4, 0), granularity))
        yield Sample(f"{granularity} transposed", (x(64, 5).t(), granularity))
        yield Sample(f"{granularity} float64", (x(6, 300).double(), granularity))
        for dtype in fp8.DTYPES:
            yield Sample(f"{granularity} special values to {c.short(dtype)}", (special(x), granularity, dtype))
        yield Sample(f"{granularity} powers of two", (special(x), granularity), {"ue8m0": True})
        bounded = {"scale_upper_bound": 0.007, "ue8m0": True, "scale_layout": "column"}
        yield Sample(f"{granularity} bound, powers of two, column layout", (x(300, 520), granularity), bounded)
        yield Sample(f"{granularity} given", (x(130, 300), granularity), {"scale": given(x, (130, 300), granularity)})
        column = {"scale": given(x, (300, 520), granularity, "column"), "scale_layout": "column"}
        yield Sample(f"{granularity} given, column layout", (x(300, 520), granularity), column)
    for width in (16384, 32776, 70_001):
        yield Sample(f"token wide {width}", (x(3, width, dtype=torch.bfloat16), "token"))
    for width in (100, 128):  # one group a row
        yield Sample(f"token many rows of {width}", (x(2053, width, dtype=torch.bfloat16), "token"))
        bounded = {"scale_upper_bound": 0.007, "scale_layout": "column"}
        yield Sample(f"token rows of {width}, column layout", (x(300, width), "token"), bounded)
        shared = {"scale": given(x, (130, width), "token")}
        yield Sample(f"token rows of {width}, given", (x(260, width)[::2], "token"), shared)
    for numel in (32_768, 32_776):  # what a block holds, and a word more
        yield Sample(f"tensor of {numel}", (x(8, numel // 8, dtype=torch.bfloat16),))
    yield Sample("token permuted rows", (x(2, 3, 4, 32).transpose(0, 2), "token"))
    yield Sample("every bfloat16", (every_half(torch.bfloat16).to(device), "block_1x128"))
    every = [0.0, -0.0, torch.inf, -3.0, torch.nan, 2.0**-140, 2.0**-100, 3e38, 2.0**100, 1e-7, 5.0, -0.3]
    kinds = torch.tensor(every, dtype=torch.float32).reshape(12, 1).to(device)
    yield Sample("given scales of every kind", (special(x), "token"), {"scale": kinds})
    yield Sample("given scales apart", (x(12, 600), "token"), {"scale": kinds.abs().expand(12, 2)[:, :1]})
    yield Sample("given scales in float16", (x(12, 600), "token"), {"scale": kinds.half()})
    one = torch.full((), 0.01, dtype=torch.float32).to(device)
    yield Sample("a given scale of no dimension", (x(12, 600),), {"scale": one})


@op(samples=samples, contract=Bitwise())
def quantize_fp8(
    x: Tensor,
    granularity: str = "tensor",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scale: Tensor | None = None,
    scale_upper_bound: float | None = None,
    ue8m0: bool = False,
    scale_layout: str = "row",
) -> tuple[Tensor, Tensor]:
    """``q = x / scale`` rounded to FP8, with ``scale = amax / largest`` of each group, or the scales given.

    Args:
        x: [..., H], floating. float64 is rounded to float32 first.
        granularity: what shares a scale: "tensor", "token" (a row of H), "block_1x128" (128 columns of a row; the last
            block may be shorter) or "block_128x128" (of x [..., R, H], which then has two dimensions or more; the last
            blocks may be smaller).
        dtype: torch.float8_e4m3fn (largest number 448) or torch.float8_e5m2 (57,344).
        scale: None: found from x. Else given, of the shape below, or with "tensor" of one element; floating, taken as
            float32. The kernel takes contiguous float32.
        scale_upper_bound: the most that a scale that is found may be, at least 2^-126; what is too large then
            saturates. None for no bound.
        ue8m0: round a scale that is found up to a power of two (a bound down): its eight exponent bits are the scale in
            the UE8M0 format of MX and DeepSeek's kernels.
        scale_layout: "row" or "column": whether the blocks of columns are the scale's last dimension or its first.

    Returns:
        q: [..., H], contiguous, of `dtype`.
        scale: float32, contiguous, what q is to be multiplied by: [1] for "tensor", [..., 1] for "token",
            [..., ceil(H / 128)] for "block_1x128", [..., ceil(R / 128), ceil(H / 128)] for "block_128x128". In column
            layout the last of these dimensions comes first: of x [M, K] in blocks of 1x128, ``scale.t()`` is then the
            [M, K / 128] of strides (1, M) that ``torch._scaled_mm`` takes. A given scale comes back as a copy.

    The arithmetic, in float32, every operation rounded to nearest: amax is the largest finite |x| of the group, so NaN
    and infinity leave the others of their group unharmed. scale is ``amax / largest``, a division; 1 where amax is 0 (a
    group of zeros, or of nothing finite); at least 2^-126, so that 1 / scale is finite, whatever is subnormal. q is
    ``x / scale``, the division and not a product with 1 / scale, rounded to FP8 to nearest with ties to even. Beyond
    the largest number q is that number, infinity too. NaN becomes NaN, with the bits 0x7f. A zero keeps its sign.

    There is no gradient: both results are detached.

    Raises:
        TypeError: x or scale is not a floating tensor; another argument is of another type.
        ValueError: x has too few dimensions; scale is of another shape, or comes with scale_upper_bound or ue8m0; a
            word or a dtype is not one of those above; scale_upper_bound is below 2^-126; two devices.

    Contract: Bitwise, of q and of scale.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; the blocks are those of DeepSeek-V3, 2024.
    """
    return fp8.quantized(x, granularity, dtype, scale, scale_upper_bound, ue8m0, scale_layout)


@quantize_fp8.check
def _(x, granularity, dtype, *, scale, scale_upper_bound, ue8m0, scale_layout):
    c.is_tensor("x", x)
    fp8.check_options(granularity, dtype, scale_upper_bound, ue8m0, scale_layout, fp8.GRANULARITIES)
    if scale is not None:
        c.is_tensor("scale", scale)
    c.same_device(x=x, scale=scale)
    c.is_floating("x", x)
    fp8.check_rank("x", x, granularity)
    if scale is not None:
        fp8.check_scale(scale, "x", x, granularity, scale_layout)
        if scale_upper_bound is not None or ue8m0:
            which = "ue8m0" if scale_upper_bound is None else "scale_upper_bound"
            raise ValueError(f"{which}: expected none beside a scale that is given, got one")


@quantize_fp8.fake
def _(x, granularity, dtype, *, scale, scale_upper_bound, ue8m0, scale_layout):
    return fp8.fake_of(x, granularity, dtype, scale_layout)


@quantize_fp8.backward(constant=("x", "scale"))
def _(saved, kept, *grads):
    return {}


FLOAT_SCALE = [
    c.Need("dtype", "scale in float32", lambda args: args["scale"] is None or args["scale"].dtype == torch.float32),
    fp8.contiguous("scale"),
]
quantize_fp8.kernel(
    needs=[c.at_most("x", -1, fp8.WIDEST), c.dtype_in("x", *FLOATS), *FLOAT_SCALE, *walks("x")],
)


@quantize_fp8.bad_calls
def _(device):
    x = torch.ones(2, 8, device=device)
    one = torch.ones(1, device=device)
    yield BadCall(([1.0],), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x.long(),), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x[0, 0],), ValueError, r"x: expected at least one dimension, got a 0-dimensional tensor")
    text = r"x: expected at least two dimensions for 'block_128x128', got \[8\]"
    yield BadCall((x[0], "block_128x128"), ValueError, text)
    yield from fp8.bad_options((x,), 1)
    yield BadCall((x,), TypeError, r"scale: expected a torch.Tensor, got float", {"scale": 0.5})
    yield BadCall((x,), TypeError, r"scale: expected a floating dtype, got int64", {"scale": one.long()})
    for granularity, shape in (("tensor", r"\[1\]"), ("token", r"\[2, 1\]"), ("block_1x128", r"\[2, 1\]")):
        text = rf"scale: expected shape {shape} for {granularity} scales of x, got \[8\]"
        yield BadCall((x, granularity), ValueError, text, {"scale": x[0]})
    text = r"scale: expected shape \[1, 2\] for token scales of x, got \[2, 1\]"
    yield BadCall((x, "token"), ValueError, text, {"scale": x[:, :1].contiguous(), "scale_layout": "column"})
    text = r"expected none beside a scale that is given, got one"
    yield BadCall((x,), ValueError, f"scale_upper_bound: {text}", {"scale": one, "scale_upper_bound": 1.0})
    yield BadCall((x,), ValueError, f"ue8m0: {text}", {"scale": one, "ue8m0": True})
    if device.type == "cuda":
        yield BadCall((x,), ValueError, r"scale: expected a tensor on cuda:\d like x, got cpu", {"scale": one.cpu()})


# ---- and back ------------------------------------------------------------------------------------------------------


def dequantize_samples(device):
    x = normal(device)

    def call(shape, granularity, dtype=E4M3, layout="row"):
        return x(*shape).to(dtype), given(x, shape, granularity, layout), granularity

    yield Sample("quick", call((4, 160), "token"))
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for dtype in fp8.DTYPES:
        every = codes.view(dtype).reshape(8, 32).to(device)
        for out in FLOATS:
            yield Sample(f"every {c.short(dtype)} to {c.short(out)}", (every, given(x, (8, 32), "token"), "token", out))
    for granularity in fp8.GRANULARITIES:
        for shape in ((5, 257), (130, 1031), (300, 4096)):
            yield Sample(f"{granularity} {list(shape)}", call(shape, granularity))
        yield Sample(f"{granularity} three dimensions", call((3, 130, 96), granularity, E5M2))
        yield Sample(f"{granularity} no rows", call((0, 64), granularity))
        column = call((300, 520), granularity, layout="column")
        yield Sample(f"{granularity} column layout", column, {"scale_layout": "column"})
        part = x(130, 300).to(E4M3)[::2, 3:]
        yield Sample(f"{granularity} strided rows", (part, given(x, part.shape, granularity), granularity))
    q, scale, _ = call((6, 300), "token")
    yield Sample("to float64", (q, scale, "token", torch.float64))
    yield Sample("scale in float16", (q, scale.half(), "token"))
    yield Sample("transposed", (q[:, :6].t(), scale, "token"))
    yield Sample("no columns", call((4, 0), "block_1x128"))


@op(samples=dequantize_samples, contract=Exact(ties="to even"))
def dequantize_fp8(
    q: Tensor,
    scale: Tensor,
    granularity: str = "tensor",
    dtype: torch.dtype = torch.bfloat16,
    *,
    scale_layout: str = "row",
) -> Tensor:
    """``q * scale``, what `quantize_fp8` made, as numbers of another dtype again.

    Args:
        q: [..., H], floating; the kernel takes float8_e4m3fn and float8_e5m2.
        scale: of the shape that quantize_fp8 gives for q's, or with "tensor" of no dimension; floating, taken as
            float32. The kernel takes contiguous float32.
        granularity: as of quantize_fp8.
        dtype: of the result: float32, float16, bfloat16; float64 by the reference.
        scale_layout: as of quantize_fp8.

    Returns:
        [..., H], contiguous, of `dtype`: the product in float32, rounded to nearest once more.

    It has the product's gradient, of scale and of a q that is wider than FP8.

    Raises:
        TypeError: q or scale is not a floating tensor; another argument is of another type.
        ValueError: q has too few dimensions; scale is of another shape; a word or a dtype is not one of those above;
            two devices.

    Contract: Exact: the values of the reference; NaN stands where it has NaN, of whatever bits.

    Source: as of quantize_fp8.
    """
    by_row = fp8.by_row(scale.to(torch.float32).reshape(scale.shape or (1,)), granularity, scale_layout)
    return (q.to(torch.float32) * fp8.spread(by_row, q.shape, granularity)).to(dtype).contiguous()


@dequantize_fp8.check
def _(q, scale, granularity, dtype, *, scale_layout):
    c.is_tensor("q", q)
    c.is_tensor("scale", scale)
    fp8.one_of("granularity", granularity, fp8.GRANULARITIES)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {type(dtype).__name__}")
    if dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"dtype: expected float32, float16, bfloat16 or float64, got {c.short(dtype)}")
    fp8.one_of("scale_layout", scale_layout, fp8.LAYOUTS)
    c.same_device(q=q, scale=scale)
    c.is_floating("q", q)
    fp8.check_rank("q", q, granularity)
    fp8.check_scale(scale, "q", q, granularity, scale_layout)


@dequantize_fp8.fake
def _(q, scale, granularity, dtype, *, scale_layout):
    return q.new_empty(q.shape, dtype=dtype)


@dequantize_fp8.backward(saves=("q", "scale"))
def _(saved, kept, grad):
    q, scale, granularity = saved["q"], saved["scale"], saved["granularity"]
    grad = grad.to(torch.float32)
    by_row = fp8.by_row(scale.to(torch.float32).reshape(scale.shape or (1,)), granularity, saved["scale_layout"])
    found = {"q": (grad * fp8.spread(by_row, q.shape, granularity)).to(q.dtype)}
    if "scale" in saved.wanted:
        by_row = fp8.by_group(grad * q.to(torch.float32), granularity, torch.sum)
        found["scale"] = fp8.by_column(by_row, granularity, saved["scale_layout"]).to(scale.dtype).reshape(scale.shape)
    return found


dequantize_fp8.kernel(
    needs=[
        c.at_most("q", -1, fp8.WIDEST),
        c.dtype_in("q", *fp8.DTYPES),
        c.Need("dtype", "dtype float32, float16 or bfloat16", lambda args: args["dtype"] in FLOATS),
        *FLOAT_SCALE,
        *walks("q"),
    ]
)


@dequantize_fp8.bad_calls
def _(device):
    q = torch.ones(2, 8, device=device).to(E4M3)
    one = torch.ones(1, device=device)
    yield BadCall(([1.0], one), TypeError, r"q: expected a torch.Tensor, got list")
    yield BadCall((q, 0.5), TypeError, r"scale: expected a torch.Tensor, got float")
    yield BadCall((one.long(), one), TypeError, r"q: expected a floating dtype, got int64")
    yield BadCall((q, one.long()), TypeError, r"scale: expected a floating dtype, got int64")
    yield BadCall((q, one, "row"), ValueError, r"granularity: expected 'tensor', .*, got 'row'")
    yield BadCall((q, one, "tensor", torch.int8), ValueError, r"dtype: expected float32, .*, got int8")
    yield BadCall((q, one, "tensor", "half"), TypeError, r"dtype: expected a torch.dtype, got str")
    yield BadCall((q[0, 0], one), ValueError, r"q: expected at least one dimension, got a 0-dimensional tensor")
    text = r"scale: expected shape \[2, 1\] for token scales of q, got \[1\]"
    yield BadCall((q, one, "token"), ValueError, text)
    text = r"scale_layout: expected 'row' or 'column', got 'columns'"
    yield BadCall((q, one), ValueError, text, {"scale_layout": "columns"})
    if device.type == "cuda":
        yield BadCall((q, one.cpu()), ValueError, r"scale: expected a tensor on cuda:\d like q, got cpu")
