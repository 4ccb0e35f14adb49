"""Root-mean-square normalisation over the last dimension, and its gradient."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal, over_rows, stored, walks, wide_of

WIDEST = 2**30


def samples(device):
    x = normal(device)
    yield Sample("quick", (x(4, 128, dtype=torch.bfloat16), x(128, dtype=torch.bfloat16)))
    # more rows than a device works on at a time, of an odd width and of a cluster's
    yield Sample("many rows", (x(3001, 1031, dtype=torch.bfloat16), x(1031, dtype=torch.bfloat16)))
    yield Sample("many wide rows", (x(151, 32771, dtype=torch.bfloat16), x(32771, dtype=torch.bfloat16)))
    for dtype in FLOATS:
        name = c.short(dtype)
        yield Sample(f"{name} no weight", (x(3, 64, dtype=dtype),))
        yield Sample(f"{name} fp32 weight", (x(5, 257, dtype=dtype), x(257)))
        for other in (torch.float16, torch.float64):
            yield Sample(f"{name} {c.short(other)} weight", (x(3, 40, dtype=dtype), x(40, dtype=other)))
        yield Sample(f"{name} fp32 weight, whole words", (x(5, 1024, dtype=dtype), x(1024)))
        for width in (1, 7, 31, 128, 257, 1000, 1031, 2056, 4095, 4096, 4104, 8191, 8193):
            yield Sample(f"{name} width {width}", (x(3, width, dtype=dtype), x(width, dtype=dtype)))
        for width in (16384, 16411, 32768, 32771):
            yield Sample(f"{name} wide {width}", (x(2, width, dtype=dtype), x(width, dtype=dtype), 1e-5))
        for width in (65537, 131072, 262144, 262151):
            yield Sample(f"{name} very wide {width}", (x(2, width, dtype=dtype), x(width, dtype=dtype), 1e-5))
        yield Sample(f"{name} one row", (x(333, dtype=dtype), x(333, dtype=dtype)))
        yield Sample(f"{name} three dimensions", (x(2, 3, 96, dtype=dtype), x(96, dtype=dtype)))
        yield Sample(f"{name} strided rows", (x(6, 160, dtype=dtype)[::2, :96], x(96, dtype=dtype)))
        yield Sample(f"{name} misaligned", (x(4, 129, dtype=dtype)[:, 1:], x(129, dtype=dtype)[1:]))
        yield Sample(f"{name} misaligned, wide", (x(5, 4099, dtype=dtype)[:, 3:], x(4097, dtype=dtype)[1:]))
        yield Sample(f"{name} transposed", (x(64, 5, dtype=dtype).t(), x(64, dtype=dtype)))
        yield Sample(f"{name} permuted rows", (x(2, 3, 4, 32, dtype=dtype).transpose(0, 2), None))
        yield Sample(f"{name} no rows", (x(0, 64, dtype=dtype), x(64, dtype=dtype)))
        yield Sample(f"{name} no columns", (x(4, 0, dtype=dtype), x(0, dtype=dtype)))
        offset, exact = {"weight_offset": 1.0}, {"exact_rounding": True}
        yield Sample(f"{name} weight offset", (x(3, 160, dtype=dtype), x(160, dtype=dtype)), offset)
        yield Sample(f"{name} exact rounding", (x(3, 2049, dtype=dtype), x(2049, dtype=dtype)), exact)
    special = x(4, 40)
    special[0, 3], special[1, 5], special[2] = torch.nan, torch.inf, 0.0
    yield Sample("nan, inf and a zero row", (special, None, 0.0))
    yield Sample("float64", (x(3, 50).double(), None))


def gradient_samples(device):
    x = normal(device)

    def call(*shape, dtype, weight=torch.float16, added=False):
        weight = None if weight is None else x(shape[-1], dtype=weight, of=2)
        more = x(*shape, dtype=dtype, of=3) if added else None
        return x(*shape, dtype=dtype), x(*shape, dtype=dtype, of=1), weight, 1e-6, more

    yield Sample("quick", call(4, 128, dtype=torch.bfloat16, weight=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        yield Sample(f"{name} no weight", call(3, 64, dtype=dtype, weight=None))
        yield Sample(f"{name} fp32 weight", call(5, 257, dtype=dtype, weight=torch.float32))
        for width in (1, 7, 128, 257, 1031, 4095, 4096, 8191, 8192):
            yield Sample(f"{name} width {width}", call(37, width, dtype=dtype, weight=dtype))
        for width in (16384, 32771, 65536, 65537, 131080):
            yield Sample(f"{name} wide {width}", call(3, width, dtype=dtype, weight=dtype))
        for other in (torch.float16, torch.float64):
            yield Sample(f"{name} {c.short(other)} weight", call(3, 40, dtype=dtype, weight=other))
        grad, *rest = call(3, 40, dtype=dtype, weight=dtype)
        yield Sample(f"{name} float64 gradient", (grad.double(), *rest))
        yield Sample(f"{name} many rows", call(1031, 264, dtype=dtype, weight=dtype))
        yield Sample(f"{name} many short rows", call(2053, 40, dtype=dtype, weight=dtype))
        yield Sample(f"{name} added", call(19, 1032, dtype=dtype, weight=dtype, added=True))
        yield Sample(f"{name} added, odd", call(19, 1033, dtype=dtype, weight=dtype, added=True))
        yield Sample(f"{name} one row", call(333, dtype=dtype, weight=dtype))
        yield Sample(f"{name} three dimensions", call(2, 3, 96, dtype=dtype, weight=dtype))
        yield Sample(f"{name} no rows", call(0, 64, dtype=dtype, weight=dtype))
        yield Sample(f"{name} no columns", call(4, 0, dtype=dtype, weight=dtype))
        grad, values, weight, eps, _ = call(6, 161, dtype=dtype, weight=dtype)
        yield Sample(f"{name} strided rows", (grad[::2, :96], values[1::2, 1:97], weight[:96], eps))
        yield Sample(f"{name} transposed", (x(64, 5, dtype=dtype).t(), x(64, 5, dtype=dtype, of=1).t()))
        yield Sample(f"{name} weight offset", call(3, 160, dtype=dtype, weight=dtype), {"weight_offset": 1.0})
        yield Sample(f"{name} frozen weight", call(3, 160, dtype=dtype, weight=dtype), {"weight_grad": False})
    yield Sample("float64", call(3, 50, dtype=torch.float64, weight=torch.float64))


# Both paths compute in fp32. Their fp32 values differ by the order of the sum (at most 30 sequential additions and a
# tree of ten, halved by the square root: under 2e-6) and rsqrt's 2 ulp; that is the fp32 bound with a factor of 4 in
# hand. In a half dtype two fp32 values that close round to the same or to neighbouring numbers: 1 ulp, which relative
# to the value is 2^-7 for bf16 and 2^-10 for fp16, and twice that with exact_rounding, which rounds twice; below the
# normals of fp16, 2 steps of 2^-24.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-7),
        torch.bfloat16: (2.0**-6, 0.0),
        torch.float16: (2.0**-9, 2.0**-23),
        torch.float64: (1e-12, 1e-14),
    }
)

# dx is a difference of terms of the size of grad * rstd, and dweight a sum over M rows of terms near 1, so their errors
# do not shrink with the result: of dx, some 2^-24 * 8 of a term, 1e-6 at terms near 1. Of dweight, each path rounds
# about sqrt(M) terms' worth at each of some 40 + 30 sequential additions: 2^-24 * sqrt(16384) * 8 is 6e-5 at M =
# 16,384, and the largest of thousands of columns lies some five times further out. Halves are rounded once more: 1 ulp.
GRADIENT_TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 5e-4),
        torch.bfloat16: (2.0**-7, 5e-4),
        torch.float16: (2.0**-10, 5e-4),
        torch.float64: (1e-11, 1e-11),
    }
)


@op(samples=samples, contract=TOLERANCE)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    exact_rounding: bool = False,
) -> Tensor:
    """Root-mean-square normalisation: ``x * rsqrt(mean(x², last) + eps) * (weight + weight_offset)``.

    Args:
        x: [..., H], floating.
        weight: [H], floating, None for none. The kernel takes x's dtype and float32; of another the reference answers.
        eps: added to the mean square; same units as x².
        weight_offset: added to the weight in float32: 1 for the Gemma family's. Without a weight it means nothing.
        exact_rounding: round ``x * rsqrt(...)`` to x's dtype before the weight, as the eager chain of Llama's module
            does (Gemma's rounds once, as the default here does).

    Returns:
        [..., H], contiguous, of x's dtype.

    Computed in float32 (float64 for float64) from the load to one rounding at the end: the product with the weight is
    not rounded in between, which is more accurate than the eager chain of a typical model. Where x² overflows float32
    (|x| above 1.8e19) the row becomes 0, as in torch's own.

    The gradient is `rms_norm_backward`, that of the formula, whatever exact_rounding; second derivatives are those of
    its reference.

    Raises:
        TypeError: x or weight is not a floating tensor.
        ValueError: x has no dimension; weight is not [H]; the tensors are on two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). NaN and infinity propagate as in the formula.
    Roundings of the eager chain that are kept: the last; with exact_rounding, that of the normalised x, too. The sum is
    taken in another order than torch's, so eager's bits come back wherever its last bit does not decide.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    wide = wide_of(x)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if exact_rounding:
        y = y.to(x.dtype).to(wide)
    if weight is not None:
        y = y * (weight.to(wide) + weight_offset)
    return stored(y, x)


def check(x, weight, eps):
    c.is_tensor("x", x)
    if weight is not None:
        c.is_tensor("weight", weight)
    c.is_number("eps", eps)
    c.same_device(x=x, weight=weight)
    if x.dim() < 1:
        raise ValueError("x: expected at least one dimension, got a 0-dimensional tensor")
    c.is_floating("x", x)
    if weight is not None:
        c.is_floating("weight", weight)
        c.has_shape("weight", weight, (x.shape[-1],), " to match the last dimension of x")


@rms_norm.check
def _(x, weight, eps, *, weight_offset, exact_rounding):
    check(x, weight, eps)
    c.is_number("weight_offset", weight_offset)
    c.is_bool("exact_rounding", exact_rounding)


def needs_of(*rows, parameters=("weight",), like=()):
    """A norm's: of its tensors [..., H], its parameters [H], and what must be of x's dtype."""
    return [
        c.at_most("x", -1, WIDEST),
        *(c.dtype_of_or(name, "x") for name in like),
        c.dtype_in("x", *FLOATS),
        *(need for name in parameters for need in (c.unit_stride(name), c.dtype_of_or(name, "x", torch.float32))),
        *walks(*rows),
    ]


rms_norm.kernel(needs=needs_of("x"))


@rms_norm.backward(saves=("x", "weight"))
def _(saved, kept, grad):
    dx, dweight = rms_norm_backward(
        grad,
        saved["x"],
        saved["weight"],
        saved["eps"],
        weight_offset=saved["weight_offset"],
        weight_grad="weight" in saved.wanted,
    )
    return {"x": dx, "weight": dweight}


def bad_norms(device):
    """Of (x, weight, ...)."""
    x = torch.ones(2, 8, device=device)
    yield BadCall(([1.0],), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, 3), TypeError, r"weight: expected a torch.Tensor, got int")
    yield BadCall((x.long(),), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x, x[0].long()), TypeError, r"weight: expected a floating dtype, got int64")
    yield BadCall((x[0, 0],), ValueError, r"x: expected at least one dimension, got a 0-dimensional tensor")
    text = r"weight: expected shape \[8\] to match the last dimension of x, got"
    yield BadCall((x, x[0, :7]), ValueError, rf"{text} \[7\]")
    yield BadCall((x, x), ValueError, rf"{text} \[2, 8\]")
    if device.type == "cuda":
        yield BadCall((x, x[0].cpu()), ValueError, r"weight: expected a tensor on cuda:\d like x, got cpu")


@rms_norm.bad_calls
def _(device):
    yield from bad_norms(device)
    x = torch.ones(2, 8, device=device)
    yield BadCall((x, None, "small"), TypeError, r"eps: expected a float, got str")


@op(samples=gradient_samples, contract=GRADIENT_TOLERANCE)
def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    added: Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    weight_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """The gradient of `rms_norm`, and with `added` of `fused_add_rms_norm`: of x and weight from that of the result.

    Args:
        grad: [..., H], of the result, floating. The kernel takes x's dtype; of another the reference answers.
        x: [..., H], as the forward call had it.
        weight: [H] or None, as the forward call had it; the kernel takes x's dtype and float32.
        eps: as the forward call had it.
        added: [..., H] or None, floating, as grad; added to dx before its rounding. Where x is a residual stream that
            goes on besides the norm, the gradient that comes from there.
        weight_offset: as the forward call had it.
        weight_grad: False for a frozen weight.

    Returns:
        dx: [..., H], contiguous, of x's dtype: with ``xhat = x * rstd`` and ``gw = grad * (weight + weight_offset)``,
            ``rstd * (gw - xhat * mean(gw * xhat, last)) + added``.
        dweight: [H], of weight's dtype (without one, x's): the sum over all rows of ``grad * xhat``; [0] without
            weight_grad.

    Nothing of the forward pass is kept but x: the row's figures are computed again from the same load. Sums over rows
    are taken in a fixed order, so two runs give the same bits.

    Raises:
        TypeError: not floating tensors.
        ValueError: x has no dimension; grad or added are not like x; weight is not [H]; two devices.

    Contract: Tolerance (GRADIENT_TOLERANCE in the source, with its arithmetic). float32 inside, one rounding of each
    result.

    Source: the derivative of the formula of rms_norm.
    """
    wide = wide_of(x)
    g, values = grad.to(wide), x.to(wide)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    xhat = values * rstd
    gw = g if weight is None else g * (weight.to(wide) + weight_offset)
    dx = rstd * (gw - xhat * (gw * xhat).mean(-1, keepdim=True))
    if added is not None:
        dx = dx + added.to(wide)
    dtype = x.dtype if weight is None else weight.dtype
    dweight = over_rows(g * xhat).to(dtype) if weight_grad else x.new_empty(0, dtype=dtype)
    return stored(dx, x), dweight


@rms_norm_backward.check
def _(grad, x, weight, eps, added, *, weight_offset, weight_grad):
    c.is_tensor("grad", grad)
    check(x, weight, eps)
    if added is not None:
        c.is_tensor("added", added)
    c.is_number("weight_offset", weight_offset)
    c.is_bool("weight_grad", weight_grad)
    c.same_device(grad=grad, x=x, weight=weight, added=added)
    for name, value in (("grad", grad), ("added", added)):
        if value is not None:
            c.is_floating(name, value)
            c.same_shape(name, value, "x", x)


rms_norm_backward.kernel(needs=needs_of("grad", "x", "added", like=("grad", "added")))


@rms_norm_backward.bad_calls
def _(device):
    x = torch.ones(2, 8, device=device)
    yield BadCall((x, [1.0]), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, x, 3), TypeError, r"weight: expected a torch.Tensor, got int")
    yield BadCall((x, x.long()), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x[0], x), ValueError, r"grad: expected the shape \[2, 8\] of x, got \[8\]")
    yield BadCall((x, x, x[0, :7]), ValueError, r"weight: expected shape \[8\] .*, got \[7\]")
    yield BadCall((x, x, None, 1e-6, x[0]), ValueError, r"added: expected the shape \[2, 8\] of x, got \[8\]")
    yield BadCall((x[0, 0], x[0, 0]), ValueError, r"x: expected at least one dimension, got a 0-dimensional tensor")
    if device.type == "cuda":
        yield BadCall((x, x.cpu()), ValueError, r"x: expected a tensor on cuda:\d like grad, got cpu")
