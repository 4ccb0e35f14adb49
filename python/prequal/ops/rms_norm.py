"""Root-mean-square normalisation over the last dimension."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op


def samples(device):
    def x(*shape, dtype=torch.float32):
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device, dtype)

    yield Sample("quick", (x(4, 128, dtype=torch.bfloat16), x(128, dtype=torch.bfloat16)))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = c.short(dtype)
        yield Sample(f"{name} no weight", (x(3, 64, dtype=dtype),))
        yield Sample(f"{name} fp32 weight", (x(5, 257, dtype=dtype), x(257)))
        for width in (1, 7, 31, 128, 1000, 1031, 4096, 4104, 8191):
            yield Sample(f"{name} width {width}", (x(3, width, dtype=dtype), x(width, dtype=dtype)))
        yield Sample(f"{name} wide", (x(2, 32768, dtype=dtype), x(32768, dtype=dtype), 1e-5))
        yield Sample(f"{name} very wide", (x(2, 65537, dtype=dtype), x(65537, dtype=dtype), 1e-5))
        yield Sample(f"{name} one row", (x(333, dtype=dtype), x(333, dtype=dtype)))
        yield Sample(f"{name} three dimensions", (x(2, 3, 96, dtype=dtype), x(96, dtype=dtype)))
        yield Sample(f"{name} strided rows", (x(6, 160, dtype=dtype)[::2, :96], x(96, dtype=dtype)))
        yield Sample(f"{name} misaligned", (x(4, 129, dtype=dtype)[:, 1:], x(129, dtype=dtype)[1:]))
        yield Sample(f"{name} transposed", (x(64, 5, dtype=dtype).t(), x(64, dtype=dtype)))
        yield Sample(f"{name} permuted rows", (x(2, 3, 4, 32, dtype=dtype).transpose(0, 2), None))
        yield Sample(f"{name} no rows", (x(0, 64, dtype=dtype), x(64, dtype=dtype)))
        yield Sample(f"{name} no columns", (x(4, 0, dtype=dtype), x(0, dtype=dtype)))
    special = x(4, 40)
    special[0, 3], special[1, 5], special[2] = torch.nan, torch.inf, 0.0
    yield Sample("nan, inf and a zero row", (special, None, 0.0))
    yield Sample("float64", (x(3, 50).double(), None))


# Both paths compute in fp32 and round once. Their fp32 values differ by the order of the sum (at most 30 sequential
# additions and a tree of ten, halved by the square root: under 2e-6) and rsqrt's 2 ulp; that is the fp32 bound with a
# factor of 4 in hand. In a half dtype two fp32 values that close round to the same or to neighbouring numbers: 1 ulp,
# which relative to the value is 2^-7 for bf16 and 2^-10 for fp16; below the normals of fp16, 2^-24 absolute.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-7),
        torch.bfloat16: (2.0**-7, 0.0),
        torch.float16: (2.0**-10, 2.0**-24),
        torch.float64: (1e-12, 1e-14),
    }
)


@op(samples=samples, contract=TOLERANCE)
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Root-mean-square normalisation: ``x * rsqrt(mean(x², last) + eps) * weight``.

    Args:
        x: [..., H], floating.
        weight: [H], of x's dtype or float32; None for none.
        eps: added to the mean square; same units as x².

    Returns:
        [..., H], contiguous, of x's dtype.

    Computed in float32 (float64 for float64) from the load to one rounding at the end: the product with the weight is
    not rounded in between, which is more accurate than the eager chain of a typical model. Where x² overflows float32
    (|x| above 1.8e19) the row becomes 0, as in torch's own.

    Raises:
        TypeError: x is not a floating tensor.
        ValueError: x has no dimension; weight is not [H]; the tensors are on two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). NaN and infinity propagate as in the formula.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    return y.to(x.dtype, memory_format=torch.contiguous_format).contiguous()


@rms_norm.check
def _(x, weight, eps):
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


rms_norm.kernel(
    needs=[
        c.dtype_in("x", torch.float32, torch.float16, torch.bfloat16),
        c.dtype_of_or("weight", "x", torch.float32),
        c.unit_stride("x"),
        c.unit_stride("weight"),
        c.one_row_stride("x"),
        c.at_most("x", -1, 2**31 - 1),
    ]
)


@rms_norm.bad_calls
def _(device):
    x = torch.ones(2, 8, device=device)
    yield BadCall(([1.0],), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, 3), TypeError, r"weight: expected a torch.Tensor, got int")
    yield BadCall((x, None, "small"), TypeError, r"eps: expected a float, got str")
    yield BadCall((x.long(),), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x, x[0].long()), TypeError, r"weight: expected a floating dtype, got int64")
    yield BadCall((x[0, 0],), ValueError, r"x: expected at least one dimension, got a 0-dimensional tensor")
    yield BadCall(
        (x, x[0, :7]), ValueError, r"weight: expected shape \[8\] to match the last dimension of x, got \[7\]"
    )
    yield BadCall((x, x), ValueError, r"weight: expected shape \[8\] .*, got \[2, 8\]")
    if device.type == "cuda":
        yield BadCall((x, x[0].cpu()), ValueError, r"weight: expected a tensor on cuda:\d like x, got cpu")
