"""The gated activation of Llama's MLP, quantised to FP8 before it reaches memory."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from . import _fp8 as fp8
from . import _gated as gated
from ._rows import normal
from .swiglu import swiglu


def samples(device):
    x = normal(device)

    def call(*shape, dtype):
        return x(*shape, dtype=dtype), x(*shape, dtype=dtype, of=1)

    yield Sample("quick", (*call(4, 160, dtype=torch.bfloat16), "token"))
    for name, options, named in fp8.producer_options():
        yield Sample(name, (*call(5, 264, dtype=torch.bfloat16), *options), named)
    for granularity in fp8.BY_ROW:
        for width in (1, 128, 1031, 8200, 14336, 32776):
            yield Sample(f"{granularity} width {width}", (*call(3, width, dtype=torch.bfloat16), granularity))
        for dtype in (torch.float32, torch.float16):
            name = f"{granularity} {c.short(dtype)}"
            wide = tuple(y[:, i : 257 + i] for i, y in enumerate(call(6, 300, dtype=dtype)))
            yield Sample(f"{name}, misaligned", (*wide, granularity))
            yield Sample(f"{name}, halves of one tensor", (*x(6, 512, dtype=dtype).chunk(2, dim=-1), granularity))
        yield Sample(f"{granularity} many rows", (*call(2053, 136, dtype=torch.bfloat16), granularity))
        yield Sample(f"{granularity} three dimensions", (*call(3, 5, 256, dtype=torch.float16), granularity))
        yield Sample(f"{granularity} no columns", (*call(4, 0, dtype=torch.bfloat16), granularity))
        special = x(4, 264, dtype=torch.bfloat16)
        special[0, 3], special[1, 5], special[2] = torch.nan, torch.inf, 0.0
        yield Sample(f"{granularity} nan, inf and a zero row", (special, x(4, 264, dtype=torch.bfloat16), granularity))
    yield Sample("no rows", call(0, 64, dtype=torch.bfloat16))
    yield Sample("transposed", (x(64, 5).t(), x(64, 5, of=1).t()))
    yield Sample("float64", (x(3, 50).double(), x(3, 50, of=1).double()))


@op(samples=samples, contract=Tolerance(fp8.Q_AND_SCALE))
def swiglu_quantize_fp8(
    gate: Tensor,
    up: Tensor,
    granularity: str = "token",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    exact_rounding: bool = False,
    scale_upper_bound: float | None = None,
    ue8m0: bool = False,
    scale_layout: str = "row",
) -> tuple[Tensor, Tensor]:
    """``quantize_fp8(swiglu(gate, up), granularity, dtype)`` in one pass.

    Args:
        gate: [..., I], floating; it may be a half of a packed tensor, as ``x.chunk(2, dim=-1)`` gives them.
        up: [..., I], of gate's dtype.
        granularity: "token" or "block_1x128", as of quantize_fp8.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        exact_rounding: as of swiglu.
        scale_upper_bound: as of quantize_fp8.
        ue8m0: as of quantize_fp8.
        scale_layout: as of quantize_fp8.

    Returns:
        q: [..., I], contiguous, of `dtype`.
        scale: as of quantize_fp8.

    What is quantised is the result of swiglu as that rounds it, to gate's dtype: the results have the bits of swiglu's
    and quantize_fp8's kernels one after the other.

    There is no gradient: both results are detached.

    Raises:
        TypeError, ValueError: as swiglu and quantize_fp8.

    Contract: Tolerance (Q_AND_SCALE in the source, with its arithmetic): a step of FP8, where swiglu's last bit may
    differ from its reference's.

    Source: as of swiglu and quantize_fp8.
    """
    y = swiglu.op.reference(gate.detach(), up.detach(), exact_rounding=exact_rounding)
    return fp8.quantized(y, granularity, dtype, None, scale_upper_bound, ue8m0, scale_layout)


@swiglu_quantize_fp8.check
def _(gate, up, granularity, dtype, *, exact_rounding, scale_upper_bound, ue8m0, scale_layout):
    gated.check_apart(gate, up)
    c.is_bool("exact_rounding", exact_rounding)
    fp8.check_producer(granularity, dtype, scale_upper_bound, ue8m0, scale_layout)


@swiglu_quantize_fp8.fake
def _(gate, up, granularity, dtype, *, exact_rounding, scale_upper_bound, ue8m0, scale_layout):
    return fp8.fake_of(gate, granularity, dtype, scale_layout)


@swiglu_quantize_fp8.backward(constant=("gate", "up"))
def _(saved, kept, *grads):
    return {}


swiglu_quantize_fp8.kernel(needs=[c.at_most("gate", -1, fp8.WIDEST), *gated.APART])


@swiglu_quantize_fp8.bad_calls
def _(device):
    yield from gated.bad_apart(device)
    x, y = (torch.ones(2, 8, device=device) for _ in range(2))
    yield from fp8.bad_options((x, y), 2)
    yield BadCall((x, y, "tensor"), ValueError, r"granularity: expected 'token' or 'block_1x128', got 'tensor'")
