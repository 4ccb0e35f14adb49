"""The step of a residual stream: add, and normalise the sum. Fresh results, or in place."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal
from .rms_norm import TOLERANCE, needs_of, rms_norm, rms_norm_backward
from .rms_norm import check as check_norm


def samples(device):
    x = normal(device)

    def call(*shape, dtype, weight=None):
        weight = x(shape[-1], dtype=dtype if weight is None else weight, of=2)
        return x(*shape, dtype=dtype), x(*shape, dtype=dtype, of=1), weight

    yield Sample("quick", call(4, 128, dtype=torch.bfloat16))
    # more rows than a device works on at a time, of an odd width and of a cluster's
    yield Sample("many rows", call(3001, 1031, dtype=torch.bfloat16))
    yield Sample("many wide rows", call(151, 32771, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        yield Sample(f"{name} no weight", call(3, 64, dtype=dtype)[:2])
        yield Sample(f"{name} fp32 weight", call(5, 257, dtype=dtype, weight=torch.float32))
        for other in (torch.float16, torch.float64):
            yield Sample(f"{name} {c.short(other)} weight", call(3, 40, dtype=dtype, weight=other))
        for width in (1, 7, 128, 1031, 4095, 4096, 8191, 8192):
            yield Sample(f"{name} width {width}", call(3, width, dtype=dtype))
        for width in (16384, 32771, 65537, 131072, 262151):
            yield Sample(f"{name} wide {width}", (*call(2, width, dtype=dtype), 1e-5))
        yield Sample(f"{name} one row", call(333, dtype=dtype))
        yield Sample(f"{name} three dimensions", call(2, 3, 96, dtype=dtype))
        wide, other, weight = call(6, 161, dtype=dtype)
        yield Sample(f"{name} strided rows", (wide[::2, :96], other[1::2, 1:97], weight[:96]))
        yield Sample(f"{name} slices of one tensor", (wide[:, :80], wide[:, 81:], weight[:80]))
        for width in (1031, 4095, 32771):  # in place, two outputs that begin at different places of a word
            wide, other, weight = call(19, width + 5, dtype=dtype)
            apart = (wide[:, 1 : width + 1], other[:, 2 : width + 2], weight[:width])
            yield Sample(f"{name} {width} of rows that begin differently", apart)
        yield Sample(f"{name} transposed", (x(64, 5, dtype=dtype).t(), x(64, 5, dtype=dtype, of=1).t()))
        yield Sample(f"{name} no rows", call(0, 64, dtype=dtype))
        yield Sample(f"{name} no columns", call(4, 0, dtype=dtype))
        yield Sample(f"{name} weight offset", call(3, 160, dtype=dtype), {"weight_offset": 1.0})
        yield Sample(f"{name} exact rounding", call(3, 2049, dtype=dtype), {"exact_rounding": True})
    yield Sample("float64", (x(3, 50).double(), x(3, 50, of=1).double()))


@op(samples=samples, contract=TOLERANCE)
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    exact_rounding: bool = False,
) -> tuple[Tensor, Tensor]:
    """``new_residual = x + residual`` and ``y = rms_norm(new_residual, weight, eps)``.

    Args:
        x: [..., H], floating; what a block adds to the stream.
        residual: [..., H], of x's dtype; the stream.
        weight: [H], floating, None for none. The kernel takes x's dtype and float32; of another the reference answers.
        eps: added to the mean square; same units as x².
        weight_offset: added to the weight in float32: 1 for the Gemma family's.
        exact_rounding: as of rms_norm: round the normalised sum to x's dtype before the weight.

    Returns:
        y: [..., H], contiguous, of x's dtype.
        new_residual: [..., H], contiguous, of x's dtype.

    y is the norm of the new_residual that is returned, rounded as it is: what a later reader of the stream would
    compute, and what the gradient is taken of.

    Raises:
        TypeError: x or weight is not a floating tensor; residual is not of x's dtype.
        ValueError: x has no dimension; residual is not like x; weight is not [H]; the tensors are on two devices.

    Contract: Tolerance (rms_norm's, with its arithmetic); new_residual has the bits of ``x + residual``. Roundings of
    the eager chain that are kept: of the sum, and the last; with exact_rounding, that of the normalised sum, too.

    Source: rms_norm's; the fusion as in vLLM.
    """
    total = (x + residual).contiguous()
    y = rms_norm.op.reference(total, weight, eps, weight_offset=weight_offset, exact_rounding=exact_rounding)
    return y, total


@fused_add_rms_norm.check
def check(x, residual, weight, eps, *, weight_offset, exact_rounding):
    c.is_tensor("residual", residual)
    check_norm(x, weight, eps)
    c.is_number("weight_offset", weight_offset)
    c.is_bool("exact_rounding", exact_rounding)
    c.same_device(x=x, residual=residual, weight=weight)
    c.same_shape("residual", residual, "x", x)
    c.same_dtype("residual", residual, "x", x)


NEEDS = needs_of("x", "residual")
fused_add_rms_norm.kernel(needs=NEEDS)


@fused_add_rms_norm.backward(saves=("weight",), keeps=(1,))
def _(saved, kept, grad, grad_total):
    dtotal, dweight = rms_norm_backward(
        grad,
        kept[0],
        saved["weight"],
        saved["eps"],
        grad_total,
        weight_offset=saved["weight_offset"],
        weight_grad="weight" in saved.wanted,
    )
    return {"x": dtotal, "residual": dtotal, "weight": dweight}


@fused_add_rms_norm.bad_calls
def bad_calls(device):
    x = torch.ones(2, 8, device=device)
    y = torch.ones(2, 8, device=device)
    yield BadCall(([1.0], x), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, 3), TypeError, r"residual: expected a torch.Tensor, got int")
    yield BadCall((x, y, None, "small"), TypeError, r"eps: expected a float, got str")
    yield BadCall((x.long(), y.long()), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x, y.half()), TypeError, r"residual: expected float32 like x, got float16")
    yield BadCall((x, y[0]), ValueError, r"residual: expected the shape \[2, 8\] of x, got \[8\]")
    yield BadCall((x, y, x[0, :7]), ValueError, r"weight: expected shape \[8\] .*, got \[7\]")
    yield BadCall((x[0, 0], y[0, 0]), ValueError, r"x: expected at least one dimension, got a 0-dimensional tensor")
    if device.type == "cuda":
        yield BadCall((x, y.cpu()), ValueError, r"residual: expected a tensor on cuda:\d like x, got cpu")


@op(samples=samples, contract=TOLERANCE, mutates=("x", "residual"))
def fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    exact_rounding: bool = False,
) -> None:
    """`fused_add_rms_norm` in place: ``x + residual`` is written into residual, and its norm into x.

    Args:
        x: [..., H], floating; becomes y.
        residual: [..., H], of x's dtype; becomes new_residual.
        weight: [H], floating, None for none. The kernel takes x's dtype and float32; of another the reference answers.
        eps: added to the mean square; same units as x².
        weight_offset: added to the weight in float32: 1 for the Gemma family's.
        exact_rounding: as of rms_norm: round the normalised sum to x's dtype before the weight.

    Returns:
        None: the results are in x and residual. No memory is allocated.

    Raises:
        TypeError, ValueError: as fused_add_rms_norm.
        ValueError: x and residual share memory, or elements of one of them do. Nothing is written then.
        RuntimeError: a gradient would have to be recorded: use fused_add_rms_norm for that.

    Contract: Tolerance (rms_norm's, with its arithmetic); as fused_add_rms_norm. Where the weight lies in x or residual
    the reference answers, by the weight as it was.

    Source: rms_norm's; the fusion as in vLLM.
    """
    y, total = fused_add_rms_norm.op.reference(
        x, residual, weight, eps, weight_offset=weight_offset, exact_rounding=exact_rounding
    )
    x.copy_(y)
    residual.copy_(total)


@fused_add_rms_norm_.check
def _(x, residual, weight, eps, *, weight_offset, exact_rounding):
    check(x, residual, weight, eps, weight_offset=weight_offset, exact_rounding=exact_rounding)
    c.is_apart("x", x)
    c.is_apart("residual", residual)
    c.are_apart("residual", residual, "x", x)


@fused_add_rms_norm_.bad_calls
def _(device):
    yield from bad_calls(device)
    both = torch.ones(3, 8, device=device)
    shared = r"residual: expected memory apart from that of x, which is written, got shared memory"
    yield BadCall((both, both), ValueError, shared)
    yield BadCall((both[:2], both[1:]), ValueError, shared)
    yield BadCall((both[:, :5], both[:, 3:]), ValueError, shared)
    one = torch.ones(1, 8, device=device).expand(3, 8)
    yield BadCall((both, one), ValueError, r"residual: expected a place of its own for every element, .* got shared")
    yield BadCall((one, both), ValueError, r"x: expected a place of its own for every element, .* got shared")


fused_add_rms_norm_.kernel(needs=[*NEEDS, c.apart("x", "residual", read=("weight",))])
