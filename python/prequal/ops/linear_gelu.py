"""A linear layer with GELU behind it, through torch: the bias+GELU epilogue of cuBLASLt where it applies."""

import torch
import torch.nn.functional as F
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, HALVES, normal
from .geglu import is_form


def samples(device):
    x = normal(device)

    def call(*shape, out, dtype, bias=True):
        weight = x(out, shape[-1], of=1) * max(shape[-1], 1) ** -0.5
        return x(*shape, dtype=dtype), weight.to(dtype), x(out, dtype=dtype, of=2) if bias else None

    yield Sample("quick", call(4, 64, out=32, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        for rows, inner, out in ((1, 8, 8), (7, 128, 256), (33, 100, 36), (129, 257, 31), (300, 512, 1024)):
            yield Sample(f"{name} {rows} x {inner} to {out}", call(rows, inner, out=out, dtype=dtype))
        yield Sample(f"{name} no bias", call(7, 64, out=48, dtype=dtype, bias=False))
        yield Sample(f"{name} one row", call(64, out=48, dtype=dtype))
        yield Sample(f"{name} three dimensions", call(2, 3, 64, out=48, dtype=dtype))
        for what in (
            {"approximate": "none"},
            {"exact_rounding": True},
            {"approximate": "none", "exact_rounding": True},
        ):
            yield Sample(
                f"{name} {', '.join(f'{k} {v}' for k, v in what.items())}", call(9, 64, out=48, dtype=dtype), what
            )
        wide, weight, bias = call(10, 80, out=48, dtype=dtype)
        yield Sample(f"{name} slices", (wide[::2, 8:72], weight[:, 8:72], bias))
        yield Sample(f"{name} misaligned", (wide[:, 1:65], weight[:, 3:67], bias))
        yield Sample(f"{name} transposed", (x(64, 9, dtype=dtype).t(), x(64, 48, dtype=dtype, of=1).t() * 0.125, bias))
        yield Sample(f"{name} every second of a bias", (wide, weight[:24], bias[::2]))
        yield Sample(f"{name} no rows", call(0, 64, out=48, dtype=dtype))
        yield Sample(f"{name} no columns", call(4, 0, out=48, dtype=dtype))
        yield Sample(f"{name} no outputs", call(4, 64, out=0, dtype=dtype))
    yield Sample("float64", call(3, 50, out=20, dtype=torch.float64))


# The eager chain rounds h = x W^T + b to the dtype before GELU, the epilogue does not. A half's rounding moves h by at
# most u |h| (u = 2^-8 in bf16, 2^-11 in fp16), the result by 1.3 u of itself where h > 0 (|h gelu'(h) / gelu(h)| is
# below 1.3 there) and by 0.2 u where h < 0 (|h gelu'(h)|). Each path then rounds once: 3.3 u in all. A tanh of the
# hardware, right to 2^-11 of itself, adds 2^-12 |h|, 2^-9 at |h| = 8. In fp32 the two are the same two kernels.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (2.0**-6, 2.0**-9),
        torch.float16: (2.0**-9, 2.0**-9),
        torch.float64: (1e-12, 1e-12),
    }
)


@op(samples=samples, contract=TOLERANCE)
def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    approximate: str = "tanh",
    *,
    exact_rounding: bool = False,
) -> Tensor:
    """``gelu(x @ weight.T + bias)``, by one of three paths.

    Args:
        x: [..., K], floating.
        weight: [M, K], of x's dtype, as torch.nn.Linear has it.
        bias: [M], of x's dtype; None for none.
        approximate: "tanh" or "none", the form of GELU, as of torch.nn.functional.gelu.
        exact_rounding: keep the rounding of ``x @ weight.T + bias`` to x's dtype before GELU, and with it the bits of
            the eager chain.

    Returns:
        [..., M], contiguous, of x's dtype, under autocast too.

    The paths: *epilogue*, one kernel, where x is bfloat16 or float16, approximate is "tanh", there is a bias, and K and
    M are multiples of 8: the product is not rounded before GELU, and not written to memory. *Rounding preserved*, with
    exact_rounding and where the epilogue does not apply: the chain's two kernels, the second in the memory of the
    first, so that no second activation is allocated. *Sequential*, where the gate is closed: torch's linear, then its
    gelu.
    The products are torch's on every path; prequal has no kernel here.

    The gradient computes the product again (the epilogue does not keep it): three products in all, and a GELU gradient.
    It is that of the formula, whatever exact_rounding.

    Raises:
        TypeError: x is not a floating tensor; weight or bias is not of its dtype.
        ValueError: shapes that do not fit; another approximate; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). Bits are promised with exact_rounding alone, and
    by no contract: both paths call torch's linear on the same arguments.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
    """
    return F.gelu(F.linear(x, weight, bias), approximate=approximate).contiguous()


@linear_gelu.check
def _(x, weight, bias, approximate, *, exact_rounding):
    for name, value in (("x", x), ("weight", weight)):
        c.is_tensor(name, value)
    if bias is not None:
        c.is_tensor("bias", bias)
    is_form(approximate)
    c.is_bool("exact_rounding", exact_rounding)
    c.same_device(x=x, weight=weight, bias=bias)
    c.is_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a 0-dimensional tensor")
    c.has_shape("weight", weight, ("M", x.shape[-1]))
    c.same_dtype("weight", weight, "x", x)
    if bias is not None:
        c.has_shape("bias", bias, (weight.shape[0],))
        c.same_dtype("bias", bias, "x", x)


def through_torch(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, exact_rounding: bool) -> Tensor:
    """The first two paths, of a right call on a GPU."""
    # Of other widths the two differ by more than the contract's arithmetic allows: [33, 100] to 36 in bfloat16 by 4 ulp
    # (H200, torch 2.11).
    whole = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    fusable = approximate == "tanh" and not exact_rounding and x.dtype in HALVES and whole
    if bias is not None and fusable and x.numel() and weight.numel():
        rows = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
        return rows.view(*x.shape[:-1], weight.shape[0])
    return torch.ops.aten.gelu_(F.linear(x, weight, bias), approximate=approximate).contiguous()


linear_gelu.kernel(needs=[c.dtype_in("x", *FLOATS)], through=through_torch)


@linear_gelu.backward
def _(saved, kept, grad):
    x, weight, bias = saved["x"], saved["weight"], saved["bias"]
    dh = torch.ops.aten.gelu_backward(grad, F.linear(x, weight, bias), approximate=saved["approximate"])
    rows = dh.reshape(-1, weight.shape[0])
    found = {}
    if "x" in saved.wanted:
        found["x"] = dh @ weight
    if "weight" in saved.wanted:
        found["weight"] = rows.t() @ x.reshape(-1, x.shape[-1])
    if "bias" in saved.wanted:
        found["bias"] = rows.sum(0)
    return found


@linear_gelu.bad_calls
def _(device):
    x, weight, bias = torch.ones(3, 8, device=device), torch.ones(4, 8, device=device), torch.ones(4, device=device)
    yield BadCall(([1.0], weight, bias), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, 3, bias), TypeError, r"weight: expected a torch.Tensor, got int")
    yield BadCall((x, weight, bias, 3), TypeError, r"approximate: expected a str, got int")
    yield BadCall((x, weight, bias), TypeError, r"exact_rounding: expected a bool, got int", {"exact_rounding": 1})
    yield BadCall((x, weight.half(), bias), TypeError, r"weight: expected float32 like x, got float16")
    yield BadCall((x, weight, bias.half()), TypeError, r"bias: expected float32 like x, got float16")
    yield BadCall((x, weight, bias, "fast"), ValueError, r"approximate: expected 'tanh' or 'none', got 'fast'")
    yield BadCall((x, weight[:, 1:], bias), ValueError, r"weight: expected shape \[M, 8\], got \[4, 7\]")
    yield BadCall((x, weight, bias[1:]), ValueError, r"bias: expected shape \[4\], got \[3\]")
    yield BadCall((x[0, 0], weight, bias), ValueError, r"x: expected at least one dimension, got a 0-dimensional")
    if device.type == "cuda":
        yield BadCall((x, weight, bias.cpu()), ValueError, r"bias: expected a tensor on cuda:\d like x, got cpu")
