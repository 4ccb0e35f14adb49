"""Linear layers with a bias, and with ReLU behind it, through torch: the epilogues of cuBLASLt where they apply."""

import torch
import torch.nn.functional as F
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, HALVES, normal


def samples(device):
    x = normal(device)

    def call(*shape, out, dtype):
        weight = x(out, shape[-1], of=1) * max(shape[-1], 1) ** -0.5
        return x(*shape, dtype=dtype), weight.to(dtype), x(out, dtype=dtype, of=2)

    yield Sample("quick", call(4, 64, out=32, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        for rows, inner, out in ((1, 8, 8), (7, 128, 256), (33, 100, 36), (129, 257, 31), (300, 512, 1024)):
            yield Sample(f"{name} {rows} x {inner} to {out}", call(rows, inner, out=out, dtype=dtype))
        yield Sample(f"{name} one row", call(64, out=48, dtype=dtype))
        yield Sample(f"{name} three dimensions", call(2, 3, 64, out=48, dtype=dtype))
        wide, weight, bias = call(10, 80, out=48, dtype=dtype)
        yield Sample(f"{name} slices", (wide[::2, 8:72], weight[:, 8:72], bias))
        yield Sample(f"{name} misaligned", (wide[:, 1:65], weight[:, 3:67], bias))
        yield Sample(f"{name} transposed", (x(64, 9, dtype=dtype).t(), x(64, 48, dtype=dtype, of=1).t() * 0.125, bias))
        yield Sample(f"{name} every second of a bias", (wide, weight[:24], bias[::2]))
        yield Sample(f"{name} no rows", call(0, 64, out=48, dtype=dtype))
        yield Sample(f"{name} no columns", call(4, 0, out=48, dtype=dtype))
        yield Sample(f"{name} no outputs", call(4, 64, out=0, dtype=dtype))
    yield Sample("float64", call(3, 50, out=20, dtype=torch.float64))


# Both paths take fp32 sums of up to 512 products of values near 1 and 512^-1/2, and round them once, whatever the
# epilogue: ReLU changes no rounding. Sums in another order differ by 2 sqrt(512) 2^-24 = 3e-6 of values near 1; in a
# half that moves a value over the middle between two: 1 ulp.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (2.0**-7, 1e-5),
        torch.float16: (2.0**-10, 1e-5),
        torch.float64: (1e-12, 1e-12),
    }
)


@op(samples=samples, contract=TOLERANCE)
def linear_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x @ weight.T + bias``: torch's linear, which adds the bias in the product's epilogue, behind the gate.

    Args:
        x: [..., K], floating.
        weight: [M, K], of x's dtype, as torch.nn.Linear has it.
        bias: [M], of x's dtype.

    Returns:
        [..., M], contiguous, of x's dtype, under autocast too.

    The product is torch's on every path, and so is its choice of cuBLASLt's bias epilogue; prequal has no kernel here
    and adds the check and the count of a call. The gradient is three calls of torch's: two products, and the sum of
    grad over the rows for the bias (torch has no way to ask cuBLASLt for that sum in a product's epilogue).

    Raises:
        TypeError: x is not a floating tensor; weight or bias is not of its dtype.
        ValueError: shapes that do not fit; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). Both paths are one call of torch's.

    Source: the epilogues of cuBLASLt, CUBLASLT_EPILOGUE_BIAS.
    """
    return F.linear(x, weight, bias).contiguous()


@linear_bias.check
def check(x, weight, bias):
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        c.is_tensor(name, value)
    c.same_device(x=x, weight=weight, bias=bias)
    c.is_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a 0-dimensional tensor")
    c.has_shape("weight", weight, ("M", x.shape[-1]))
    c.same_dtype("weight", weight, "x", x)
    c.has_shape("bias", bias, (weight.shape[0],))
    c.same_dtype("bias", bias, "x", x)


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).contiguous()


linear_bias.kernel(needs=[c.dtype_in("x", *FLOATS)], through=product)


def gradients(saved, dh):
    """From that of x @ weight.T + bias."""
    x, weight = saved["x"], saved["weight"]
    rows = dh.reshape(-1, weight.shape[0])
    found = {}
    if "x" in saved.wanted:
        found["x"] = dh @ weight
    if "weight" in saved.wanted:
        found["weight"] = rows.t() @ x.reshape(-1, x.shape[-1])
    if "bias" in saved.wanted:
        found["bias"] = rows.sum(0)
    return found


@linear_bias.backward(saves=("x", "weight"))
def _(saved, kept, grad):
    return gradients(saved, grad)


@linear_bias.bad_calls
def bad_calls(device):
    x, weight, bias = torch.ones(3, 8, device=device), torch.ones(4, 8, device=device), torch.ones(4, device=device)
    yield BadCall(([1.0], weight, bias), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, 3, bias), TypeError, r"weight: expected a torch.Tensor, got int")
    yield BadCall((x, weight, None), TypeError, r"bias: expected a torch.Tensor, got NoneType")
    yield BadCall((x, weight.half(), bias), TypeError, r"weight: expected float32 like x, got float16")
    yield BadCall((x, weight, bias.half()), TypeError, r"bias: expected float32 like x, got float16")
    yield BadCall((x, weight[:, 1:], bias), ValueError, r"weight: expected shape \[M, 8\], got \[4, 7\]")
    yield BadCall((x, weight, bias[1:]), ValueError, r"bias: expected shape \[4\], got \[3\]")
    yield BadCall((x[0, 0], weight, bias), ValueError, r"x: expected at least one dimension, got a 0-dimensional")
    if device.type == "cuda":
        yield BadCall((x, weight, bias.cpu()), ValueError, r"bias: expected a tensor on cuda:\d like x, got cpu")


@op(samples=samples, contract=TOLERANCE)
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``relu(x @ weight.T + bias)``, in one kernel where cuBLASLt's epilogue serves.

    Args:
        x: [..., K], floating.
        weight: [M, K], of x's dtype, as torch.nn.Linear has it.
        bias: [M], of x's dtype.

    Returns:
        [..., M], contiguous, of x's dtype, under autocast too.

    The paths: *epilogue*, one kernel, where x is bfloat16 or float16 and K and M are multiples of 8. Elsewhere the
    chain's two kernels, the second in the memory of the first. Where the gate is closed: torch's linear, then its relu.
    The products are torch's on every path; prequal has no kernel here. There is no such op for SiLU: cuBLASLt has no
    SiLU epilogue, and torch's linear with a SiLU of ours behind it would be the two kernels of the chain.

    The gradient is that of the chain, from the result: where it is above zero, grad, else 0; then as `linear_bias`.

    Raises:
        TypeError: x is not a floating tensor; weight or bias is not of its dtype.
        ValueError: shapes that do not fit; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic).

    Source: the epilogues of cuBLASLt, CUBLASLT_EPILOGUE_RELU_BIAS.
    """
    return F.linear(x, weight, bias).relu().contiguous()


linear_relu.check(check)


def through_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # Of other widths the products behind the two calls may differ: linear_gelu's did, by 4 ulp.
    whole = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    if x.dtype in HALVES and whole and x.numel() and weight.numel():
        rows = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=False)
        return rows.view(*x.shape[:-1], weight.shape[0])
    return F.linear(x, weight, bias).relu_().contiguous()


linear_relu.kernel(needs=[c.dtype_in("x", *FLOATS)], through=through_torch)


@linear_relu.backward(saves=("x", "weight"), keeps=(0,))
def _(saved, kept, grad):
    return gradients(saved, torch.ops.aten.threshold_backward(grad, kept[0], 0))


linear_relu.bad_calls(bad_calls)
