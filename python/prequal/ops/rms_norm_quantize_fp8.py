"""RMS normalisation whose result is quantised to FP8 before it reaches memory."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from . import _fp8 as fp8
from ._rows import normal
from .rms_norm import bad_norms, needs_of, rms_norm
from .rms_norm import check as check_norm


def samples(device):
    x = normal(device)

    def call(*shape, dtype, weight=None):
        return x(*shape, dtype=dtype), x(shape[-1], dtype=weight or dtype, of=2), 1e-6

    yield Sample("quick", call(4, 160, dtype=torch.bfloat16))
    for name, options, named in fp8.producer_options():
        yield Sample(name, (*call(5, 264, dtype=torch.bfloat16), *options), named)
    for granularity in fp8.BY_ROW:
        for width in (1, 128, 1031, 4096, 8200, 32776):
            yield Sample(f"{granularity} width {width}", (*call(3, width, dtype=torch.bfloat16), granularity))
        for dtype in (torch.float32, torch.float16):
            name = f"{granularity} {c.short(dtype)}"
            yield Sample(f"{name}, fp32 weight", (*call(5, 1024, dtype=dtype, weight=torch.float32), granularity))
            yield Sample(f"{name}, misaligned", (x(4, 260, dtype=dtype)[:, 3:], None, 1e-6, granularity))
        yield Sample(f"{granularity} strided rows", (x(6, 300)[::2, :288], None, 1e-6, granularity))
        yield Sample(f"{granularity} many rows", (*call(2053, 136, dtype=torch.bfloat16), granularity))
        three = (*call(3, 5, 520, dtype=torch.float16), granularity)
        yield Sample(f"{granularity} three dimensions, weight offset", three, {"weight_offset": 1.0})
        yield Sample(f"{granularity} no columns", (*call(4, 0, dtype=torch.bfloat16), granularity))
        special = x(4, 264, dtype=torch.bfloat16)
        special[0, 3], special[1, 5], special[2] = torch.nan, torch.inf, 0.0
        yield Sample(f"{granularity} nan, inf and a zero row", (special, None, 0.0, granularity))
    yield Sample("no rows", call(0, 64, dtype=torch.bfloat16))
    yield Sample("transposed", (x(64, 5).t(),))
    yield Sample("float64", (x(3, 50).double(),))
    yield Sample("float16 weight", call(3, 40, dtype=torch.float32, weight=torch.half))


@op(samples=samples, contract=Tolerance(fp8.Q_AND_SCALE))
def rms_norm_quantize_fp8(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "token",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    weight_offset: float = 0.0,
    exact_rounding: bool = False,
    scale_upper_bound: float | None = None,
    ue8m0: bool = False,
    scale_layout: str = "row",
) -> tuple[Tensor, Tensor]:
    """``quantize_fp8(rms_norm(x, weight, eps), granularity, dtype)`` in one pass.

    Args:
        x: [..., H], floating.
        weight: [H], floating, None for none. The kernel takes x's dtype and float32; of another the reference answers.
        eps: as of rms_norm.
        granularity: "token" or "block_1x128", as of quantize_fp8.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        weight_offset: as of rms_norm.
        exact_rounding: as of rms_norm.
        scale_upper_bound: as of quantize_fp8.
        ue8m0: as of quantize_fp8.
        scale_layout: as of quantize_fp8.

    Returns:
        q: [..., H], contiguous, of `dtype`.
        scale: as of quantize_fp8.

    What is quantised is the result of rms_norm as that rounds it, to x's dtype. The kernels sum a row in the order of
    rms_norm's kernel, and the results have the bits of rms_norm's and quantize_fp8's kernels one after the other. Where
    rows are made of 16-byte words and have at most 16,384 columns (of float32 8,192), nothing but the results is
    written; of other rows the normalised values go through memory of x's size, by two kernels.

    There is no gradient: both results are detached.

    Raises:
        TypeError, ValueError: as rms_norm and quantize_fp8.

    Contract: Tolerance (Q_AND_SCALE in the source, with its arithmetic): a step of FP8, where the order of a sum
    decides the last bit of a normalised value.

    Source: as of rms_norm and quantize_fp8.
    """
    y = rms_norm.op.reference(
        x.detach(),
        None if weight is None else weight.detach(),
        eps,
        weight_offset=weight_offset,
        exact_rounding=exact_rounding,
    )
    return fp8.quantized(y, granularity, dtype, None, scale_upper_bound, ue8m0, scale_layout)


@rms_norm_quantize_fp8.check
def _(x, weight, eps, granularity, dtype, *, weight_offset, exact_rounding, scale_upper_bound, ue8m0, scale_layout):
    check_norm(x, weight, eps)
    c.is_number("weight_offset", weight_offset)
    c.is_bool("exact_rounding", exact_rounding)
    fp8.check_producer(granularity, dtype, scale_upper_bound, ue8m0, scale_layout)


@rms_norm_quantize_fp8.fake
def _(x, weight, eps, granularity, dtype, *, weight_offset, exact_rounding, scale_upper_bound, ue8m0, scale_layout):
    return fp8.fake_of(x, granularity, dtype, scale_layout)


@rms_norm_quantize_fp8.backward(constant=("x", "weight"))
def _(saved, kept, *grads):
    return {}


rms_norm_quantize_fp8.kernel(needs=needs_of("x"))


@rms_norm_quantize_fp8.bad_calls
def _(device):
    yield from bad_norms(device)
    x = torch.ones(2, 8, device=device)
    yield from fp8.bad_options((x, None, 1e-6), 3)
    yield BadCall(
        (x, None, 1e-6, "tensor"), ValueError, r"granularity: expected 'token' or 'block_1x128', got 'tensor'"
    )
