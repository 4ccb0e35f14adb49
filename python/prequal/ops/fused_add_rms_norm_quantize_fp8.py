"""The step of a residual stream whose normalised sum is quantised to FP8 before it reaches memory."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from . import _fp8 as fp8
from ._rows import normal
from .fused_add_rms_norm import bad_calls as bad_steps
from .fused_add_rms_norm import check as check_step
from .fused_add_rms_norm import fused_add_rms_norm
from .rms_norm import needs_of


def samples(device):
    x = normal(device)

    def call(*shape, dtype):
        weight = x(shape[-1], dtype=dtype, of=2)
        return x(*shape, dtype=dtype), x(*shape, dtype=dtype, of=1), weight, 1e-6

    yield Sample("quick", call(4, 160, dtype=torch.bfloat16))
    for name, options, named in fp8.producer_options():
        yield Sample(name, (*call(5, 264, dtype=torch.bfloat16), *options), named)
    for granularity in fp8.BY_ROW:
        for width in (1, 128, 1031, 4096, 8200, 32776):
            yield Sample(f"{granularity} width {width}", (*call(3, width, dtype=torch.bfloat16), granularity))
        for dtype in (torch.float32, torch.float16):
            wide, other, weight, eps = call(6, 300, dtype=dtype)
            apart = (wide[:, 3:259], other[:, 4:260], weight[:256])
            yield Sample(f"{granularity} {c.short(dtype)}, misaligned", (*apart, eps, granularity))
        yield Sample(f"{granularity} many rows", (*call(2053, 136, dtype=torch.bfloat16), granularity))
        three = (*call(3, 5, 520, dtype=torch.float16), granularity)
        yield Sample(f"{granularity} three dimensions, weight offset", three, {"weight_offset": 1.0})
        yield Sample(f"{granularity} no columns", (*call(4, 0, dtype=torch.bfloat16), granularity))
    yield Sample("no rows", call(0, 64, dtype=torch.bfloat16))
    yield Sample("transposed", (x(64, 5).t(), x(64, 5, of=1).t()))
    yield Sample("float64", (x(3, 50).double(), x(3, 50, of=1).double()))


# new_residual has the bits of the sum, of whatever dtype; the float32 bound is the scale's, and holds it, too.
CONTRACT = Tolerance({**fp8.Q_AND_SCALE, torch.float16: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)})


@op(samples=samples, contract=CONTRACT)
def fused_add_rms_norm_quantize_fp8(
    x: Tensor,
    residual: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """``new_residual = x + residual`` and ``quantize_fp8(rms_norm(new_residual, weight, eps), ...)`` in one pass.

    Args:
        x: [..., H], floating; what a block adds to the stream.
        residual: [..., H], of x's dtype; the stream.
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
        new_residual: [..., H], contiguous, of x's dtype: the sum, rounded once.

    What is quantised is the norm of new_residual as fused_add_rms_norm rounds it, to the bit of the kernels one after
    the other; which rows go through memory is as of rms_norm_quantize_fp8.

    There is no gradient: all results are detached.

    Raises:
        TypeError, ValueError: as fused_add_rms_norm and quantize_fp8.

    Contract: Tolerance (CONTRACT in the source): q and scale as rms_norm_quantize_fp8; new_residual has the bits of
    ``x + residual``.

    Source: as of fused_add_rms_norm and quantize_fp8.
    """
    y, total = fused_add_rms_norm.op.reference(
        x.detach(),
        residual.detach(),
        None if weight is None else weight.detach(),
        eps,
        weight_offset=weight_offset,
        exact_rounding=exact_rounding,
    )
    return *fp8.quantized(y, granularity, dtype, None, scale_upper_bound, ue8m0, scale_layout), total


@fused_add_rms_norm_quantize_fp8.check
def _(
    x,
    residual,
    weight,
    eps,
    granularity,
    dtype,
    *,
    weight_offset,
    exact_rounding,
    scale_upper_bound,
    ue8m0,
    scale_layout,
):
    check_step(x, residual, weight, eps, weight_offset=weight_offset, exact_rounding=exact_rounding)
    fp8.check_producer(granularity, dtype, scale_upper_bound, ue8m0, scale_layout)


@fused_add_rms_norm_quantize_fp8.fake
def _(x, residual, weight, eps, granularity, dtype, *, scale_layout, **others):
    return *fp8.fake_of(x, granularity, dtype, scale_layout), x.new_empty(x.shape)


@fused_add_rms_norm_quantize_fp8.backward(constant=("x", "residual", "weight"))
def _(saved, kept, *grads):
    return {}


fused_add_rms_norm_quantize_fp8.kernel(needs=needs_of("x", "residual"))


@fused_add_rms_norm_quantize_fp8.bad_calls
def _(device):
    yield from bad_steps(device)
    x, y = (torch.ones(2, 8, device=device) for _ in range(2))
    yield from fp8.bad_options((x, y, None, 1e-6), 4)
    text = r"granularity: expected 'token' or 'block_1x128', got 'tensor'"
    yield BadCall((x, y, None, 1e-6, "tensor"), ValueError, text)
