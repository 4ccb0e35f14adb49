"""Layer normalisation over the last dimension, and its gradient."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal, over_rows, stored, wide_of
from .rms_norm import GRADIENT_TOLERANCE, bad_norms, needs_of
from .rms_norm import check as check_norm


def samples(device):
    x = normal(device)

    def call(*shape, dtype, parameter=None):
        parameter = dtype if parameter is None else parameter
        return x(*shape, dtype=dtype), x(shape[-1], dtype=parameter, of=1), x(shape[-1], dtype=parameter, of=2)

    yield Sample("quick", call(4, 128, dtype=torch.bfloat16))
    # more rows than a device works on at a time, of an odd width and of a cluster's
    yield Sample("many rows", call(3001, 1031, dtype=torch.bfloat16))
    yield Sample("many wide rows", call(151, 32771, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        yield Sample(f"{name} no weight", (x(3, 64, dtype=dtype),))
        yield Sample(f"{name} no bias", call(3, 72, dtype=dtype)[:2])
        yield Sample(f"{name} bias alone", (x(3, 72, dtype=dtype), None, x(72, dtype=dtype, of=1)))
        yield Sample(f"{name} fp32 weight", call(5, 257, dtype=dtype, parameter=torch.float32))
        for other in (torch.float16, torch.float64):
            both = call(3, 40, dtype=dtype, parameter=other)
            yield Sample(f"{name} {c.short(other)} weight and bias", both)
            yield Sample(f"{name} {c.short(other)} bias", (both[0], None, both[2]))
        for width in (1, 7, 31, 128, 257, 1031, 2056, 4095, 4096, 8191, 8193):
            yield Sample(f"{name} width {width}", call(3, width, dtype=dtype))
        for width in (16384, 32771, 65537, 131072, 262151):
            yield Sample(f"{name} wide {width}", call(2, width, dtype=dtype))
        yield Sample(f"{name} one row", call(333, dtype=dtype))
        yield Sample(f"{name} three dimensions", call(2, 3, 96, dtype=dtype))
        wide, weight, bias = call(6, 161, dtype=dtype)
        yield Sample(f"{name} strided rows", (wide[::2, :96], weight[:96], bias[1:97]))
        yield Sample(f"{name} far from zero", (wide + 64.0, weight, bias))
        yield Sample(f"{name} transposed", (x(64, 5, dtype=dtype).t(), weight[:64], bias[:64]))
        yield Sample(f"{name} permuted rows", (x(2, 3, 4, 32, dtype=dtype).transpose(0, 2),))
        yield Sample(f"{name} no rows", call(0, 64, dtype=dtype))
        yield Sample(f"{name} no columns", call(4, 0, dtype=dtype))
    special = x(4, 40)
    special[0, 3], special[1, 5], special[2] = torch.nan, torch.inf, 2.0
    yield Sample("nan, inf and a constant row", (special,))
    yield Sample("float64", (x(3, 50).double(),))


def gradient_samples(device):
    x = normal(device)

    def call(*shape, dtype, weight=None):
        weight = x(shape[-1], dtype=dtype if weight is None else weight, of=2)
        return x(*shape, dtype=dtype), x(*shape, dtype=dtype, of=1), weight

    yield Sample("quick", call(4, 128, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        yield Sample(f"{name} no weight", call(3, 64, dtype=dtype)[:2])
        yield Sample(f"{name} fp32 weight", call(5, 257, dtype=dtype, weight=torch.float32))
        for other in (torch.float16, torch.float64):
            yield Sample(f"{name} {c.short(other)} weight", call(3, 40, dtype=dtype, weight=other))
        grad, *rest = call(3, 40, dtype=dtype)
        yield Sample(f"{name} float64 gradient", (grad.double(), *rest))
        for width in (1, 7, 128, 257, 1031, 4095, 4096, 8191, 8192):
            yield Sample(f"{name} width {width}", call(37, width, dtype=dtype))
        for width in (16384, 32771, 65536, 65537, 131080):
            yield Sample(f"{name} wide {width}", call(3, width, dtype=dtype))
        yield Sample(f"{name} many rows", call(1031, 264, dtype=dtype))
        yield Sample(f"{name} many short rows", call(2053, 40, dtype=dtype))
        yield Sample(f"{name} one row", call(333, dtype=dtype))
        yield Sample(f"{name} no rows", call(0, 64, dtype=dtype))
        yield Sample(f"{name} no columns", call(4, 0, dtype=dtype))
        grad, values, weight = call(6, 161, dtype=dtype)
        yield Sample(f"{name} strided rows", (grad[::2, :96], values[1::2, 1:97], weight[:96]))
        yield Sample(f"{name} transposed", (x(64, 5, dtype=dtype).t(), x(64, 5, dtype=dtype, of=1).t()))
        for asked in ("weight_grad", "bias_grad"):
            yield Sample(f"{name} without {asked}", call(3, 160, dtype=dtype), {asked: False})
        yield Sample(f"{name} dx alone", call(3, 160, dtype=dtype), {"weight_grad": False, "bias_grad": False})
    yield Sample("float64", call(3, 50, dtype=torch.float64))


# As rms_norm, where the two paths' means differ by 2^-24 of the largest values summed: that is an absolute error of the
# normalised value, 1e-6 at values near 1 (and 64 times that in the sample that lies 64 away from zero, whose halves are
# rounded to 2^-2 and 2^-5 of their spread before either path sees them). The product with the weight and the sum with
# the bias cancel at most what they add.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 5e-5),
        torch.bfloat16: (2.0**-7, 5e-5),
        torch.float16: (2.0**-10, 5e-5),
        torch.float64: (1e-12, 1e-12),
    }
)


@op(samples=samples, contract=TOLERANCE)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer normalisation: ``(x - mean) * rsqrt(var + eps) * weight + bias``, over the last dimension.

    Args:
        x: [..., H], floating.
        weight: [H], floating, None for none. The kernel takes x's dtype and float32; of another the reference answers.
        bias: [H], floating, None for none; as weight.
        eps: added to the variance; same units as x².

    Returns:
        [..., H], contiguous, of x's dtype.

    Computed in float32 (float64 for float64) from the load to one rounding at the end. The variance is the mean of the
    squares about the mean, divided by H: no difference of large sums.

    The gradient is `layer_norm_backward`; second derivatives are those of its reference.

    Raises:
        TypeError: x, weight or bias is not a floating tensor.
        ValueError: x has no dimension; weight or bias is not [H]; the tensors are on two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). torch's own layer_norm rounds once, at the end,
    and so does this: there is no rounding in between to keep or to leave.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    wide = wide_of(x)
    y = x.to(wide)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return stored(y, x)


@layer_norm.check
def _(x, weight, bias, eps):
    check_norm(x, weight, eps)
    if bias is not None:
        c.is_tensor("bias", bias)
        c.same_device(x=x, bias=bias)
        c.is_floating("bias", bias)
        c.has_shape("bias", bias, (x.shape[-1],), " to match the last dimension of x")


layer_norm.kernel(needs=needs_of("x", parameters=("weight", "bias")))


@layer_norm.backward(saves=("x", "weight", "bias"))
def _(saved, kept, grad):
    weight, bias = saved["weight"], saved["bias"]
    dx, dweight, dbias = layer_norm_backward(
        grad,
        saved["x"],
        weight,
        saved["eps"],
        weight_grad="weight" in saved.wanted,
        bias_grad="bias" in saved.wanted,
    )
    return {"x": dx, "weight": dweight, "bias": dbias if bias is None else dbias.to(bias.dtype)}


@layer_norm.bad_calls
def _(device):
    yield from bad_norms(device)
    x = torch.ones(2, 8, device=device)
    yield BadCall((x, None, 3), TypeError, r"bias: expected a torch.Tensor, got int")
    yield BadCall((x, None, None, "small"), TypeError, r"eps: expected a float, got str")
    yield BadCall((x, x[0], x[0].long()), TypeError, r"bias: expected a floating dtype, got int64")
    yield BadCall((x, x[0], x), ValueError, r"bias: expected shape \[8\] .*, got \[2, 8\]")
    if device.type == "cuda":
        yield BadCall((x, x[0], x[0].cpu()), ValueError, r"bias: expected a tensor on cuda:\d like x, got cpu")


@op(samples=gradient_samples, contract=GRADIENT_TOLERANCE)
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_grad: bool = True,
    bias_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `layer_norm`: from that of the result to x's, weight's and bias's.

    Args:
        grad: [..., H], of the result, floating. The kernel takes x's dtype; of another the reference answers.
        x: [..., H], as the forward call had it.
        weight: [H] or None, as the forward call had it; the kernel takes x's dtype and float32.
        eps: as the forward call had it.
        weight_grad: False for a frozen weight.
        bias_grad: False for a frozen bias, or none.

    Returns:
        dx: [..., H], contiguous, of x's dtype: with ``xhat = (x - mean) * rstd`` and ``gw = grad * weight``,
            ``rstd * (gw - mean(gw, last) - xhat * mean(gw * xhat, last))``.
        dweight: [H], of weight's dtype (without one, x's): the sum over all rows of ``grad * xhat``; [0] without
            weight_grad.
        dbias: [H], of dweight's dtype: the sum over all rows of ``grad``; [0] without bias_grad.

    Nothing of the forward pass is kept but x: the row's figures are computed again from the same load. Sums over rows
    are taken in a fixed order, so two runs give the same bits.

    Raises:
        TypeError: not floating tensors.
        ValueError: x has no dimension; grad is not like x; weight is not [H]; two devices.

    Contract: Tolerance (GRADIENT_TOLERANCE of rms_norm, with its arithmetic). float32 inside, one rounding of each
    result.

    Source: the derivative of the formula of layer_norm.
    """
    wide = wide_of(x)
    g, values = grad.to(wide), x.to(wide)
    values = values - values.mean(-1, keepdim=True)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    xhat = values * rstd
    gw = g if weight is None else g * weight.to(wide)
    dx = rstd * (gw - gw.mean(-1, keepdim=True) - xhat * (gw * xhat).mean(-1, keepdim=True))
    dtype = x.dtype if weight is None else weight.dtype
    dweight = over_rows(g * xhat).to(dtype) if weight_grad else x.new_empty(0, dtype=dtype)
    dbias = over_rows(g).to(dtype) if bias_grad else x.new_empty(0, dtype=dtype)
    return stored(dx, x), dweight, dbias


@layer_norm_backward.check
def _(grad, x, weight, eps, *, weight_grad, bias_grad):
    c.is_tensor("grad", grad)
    check_norm(x, weight, eps)
    c.is_bool("weight_grad", weight_grad)
    c.is_bool("bias_grad", bias_grad)
    c.same_device(grad=grad, x=x, weight=weight)
    c.is_floating("grad", grad)
    c.same_shape("grad", grad, "x", x)


layer_norm_backward.kernel(needs=needs_of("grad", "x", like=("grad",)))


@layer_norm_backward.bad_calls
def _(device):
    x = torch.ones(2, 8, device=device)
    yield BadCall((x, [1.0]), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, x, 3), TypeError, r"weight: expected a torch.Tensor, got int")
    yield BadCall((x, x.long()), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x[0], x), ValueError, r"grad: expected the shape \[2, 8\] of x, got \[8\]")
    yield BadCall((x, x, x[0, :7]), ValueError, r"weight: expected shape \[8\] .*, got \[7\]")
    yield BadCall((x[0, 0], x[0, 0]), ValueError, r"x: expected at least one dimension, got a 0-dimensional tensor")
    if device.type == "cuda":
        yield BadCall((x, x.cpu()), ValueError, r"x: expected a tensor on cuda:\d like grad, got cpu")
