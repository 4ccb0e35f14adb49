"""The gated activation of Gemma's MLP, gelu(gate) * up, and its gradient; gate and up apart or in one tensor."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, op

from . import _gated as gated
from ._rows import stored, wide_of

EXACT: dict[str, dict[str, Any]] = {
    "exact rounding": {"exact_rounding": True},
    "erf": {"approximate": "none"},
    "erf, exact rounding": {"approximate": "none", "exact_rounding": True},
}
ERF = {"erf": {"approximate": "none"}}
BETA, KAPPA = math.sqrt(2.0 / math.pi), 0.044715

# Both paths compute gelu in fp32 and round once: fp32 1e-5 of the value; halves 1 ulp, 2^-7 and 2^-10 of the value, and
# one more with exact_rounding, which rounds twice. 1 + erf (and with exact_rounding 1 + tanh) loses 2^-23 to
# cancellation where gate is negative: 2^-23 * 0.5 * |gate| * |up|, 1e-6 at values of a few and 5e-5 at the samples'
# largest, 30 times those.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 5e-5),
        torch.bfloat16: (2.0**-6, 5e-5),
        torch.float16: (2.0**-9, 5e-5),
        torch.float64: (1e-12, 1e-12),
    }
)

# The slope crosses zero at -0.75, as a difference of terms below 1: 2^-24 * 8 of grad * up stays there, 5e-7 at values
# near 1 and 5e-4 at the 30 * 30 of the samples' largest.
GRADIENT_TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-3),
        torch.bfloat16: (2.0**-7, 1e-3),
        torch.float16: (2.0**-10, 1e-3),
        torch.float64: (1e-12, 1e-12),
    }
)


def derivatives(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Of gate and up, in the dtype that rows are computed in."""
    wide = wide_of(gate)
    d, g, u = grad.to(wide), gate.to(wide), up.to(wide)
    if approximate == "tanh":
        s = torch.sigmoid(2.0 * BETA * (g + KAPPA * g * g * g))
        value = g * s
        slope = s + value * (1.0 - s) * (2.0 * BETA * (1.0 + 3.0 * KAPPA * g * g))
    else:
        cdf = 0.5 * (1.0 + torch.erf(g * math.sqrt(0.5)))
        value = g * cdf
        slope = cdf + g * (torch.exp(-0.5 * g * g) / math.sqrt(2.0 * math.pi))
    return d * u * slope, d * value


def is_form(approximate):
    if not isinstance(approximate, str):
        raise TypeError(f"approximate: expected a str, got {type(approximate).__name__}")
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate: expected 'tanh' or 'none', got {approximate!r}")


@op(samples=lambda device: gated.apart_samples(device, 2, EXACT), contract=TOLERANCE)
def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh", *, exact_rounding: bool = False) -> Tensor:
    """``gelu(gate) * up``.

    Args:
        gate: [..., I], floating.
        up: [..., I], of gate's dtype.
        approximate: "tanh" for ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))``, or "none" for
            ``0.5 x (1 + erf(x / sqrt(2)))``.
        exact_rounding: round gelu(gate) to the dtype before the product, as the eager chain does, and take torch's
            formula for "tanh", cancellation included.

    Returns:
        [..., I], contiguous, of gate's dtype.

    Computed in float32 (float64 for float64) from the load to one rounding at the end, which is more accurate than the
    eager chain. "tanh" is computed as ``x sigmoid(2 u)``, the same function without the cancellation of ``1 + tanh``.

    The gradient is `geglu_backward`, that of the formula, whatever exact_rounding.

    Raises:
        TypeError: gate is not a floating tensor; up is not of its dtype; approximate is not a str.
        ValueError: gate has no dimension; up is not like gate; two devices; approximate is neither of the two.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). Roundings of the eager chain that are kept: the
    last; with exact_rounding, that of gelu(gate), too.

    Source: Shazeer, GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
    """
    x = gate.to(wide_of(gate))
    if exact_rounding:
        value = functional.gelu(x, approximate=approximate).to(gate.dtype).to(x.dtype)
    elif approximate == "tanh":
        value = x * torch.sigmoid(2.0 * BETA * (x + KAPPA * x * x * x))
    else:
        value = functional.gelu(x)
    return stored(value * up.to(x.dtype), gate)


@geglu.check
def _(gate, up, approximate, *, exact_rounding):
    gated.check_apart(gate, up)
    is_form(approximate)
    c.is_bool("exact_rounding", exact_rounding)


@geglu.bad_calls
def _(device):
    x = torch.ones(2, 8, device=device)
    yield from gated.bad_apart(device)
    yield BadCall((x, x, "sigmoid"), ValueError, r"approximate: expected 'tanh' or 'none', got 'sigmoid'")
    yield BadCall((x, x, 1), TypeError, r"approximate: expected a str, got int")


geglu.kernel(needs=gated.APART)


@geglu.backward
def _(saved, kept, grad):
    dgate, dup = geglu_backward(grad, saved["gate"], saved["up"], saved["approximate"])
    return {"gate": dgate, "up": dup}


@op(samples=lambda device: gated.apart_samples(device, 2, EXACT), contract=TOLERANCE, mutates=("gate",))
def geglu_(gate: Tensor, up: Tensor, approximate: str = "tanh", *, exact_rounding: bool = False) -> Tensor:
    """`geglu` in place: the result is written into gate.

    Args:
        gate: [..., I], floating; becomes the result.
        up: [..., I], of gate's dtype.
        approximate: "tanh" or "none", as of geglu.
        exact_rounding: round gelu(gate) to the dtype before the product, as of geglu.

    Returns:
        gate. No memory is allocated.

    Raises:
        TypeError, ValueError: as geglu.
        ValueError: gate and up share memory, or elements of gate do. Nothing is written then.
        RuntimeError: a gradient would have to be recorded: use geglu for that.

    Contract: Tolerance; all as geglu.

    Source: as geglu.
    """
    return gate.copy_(geglu.op.reference(gate, up, approximate, exact_rounding=exact_rounding))


@geglu_.check
def _(gate, up, approximate, *, exact_rounding):
    gated.check_in_place(gate, up)
    is_form(approximate)
    c.is_bool("exact_rounding", exact_rounding)


geglu_.bad_calls(gated.bad_in_place)
geglu_.kernel(needs=gated.APART)


@op(samples=lambda device: gated.packed_samples(device, False, EXACT), contract=TOLERANCE)
def geglu_packed(
    x: Tensor, approximate: str = "tanh", *, interleaved: bool = False, exact_rounding: bool = False
) -> Tensor:
    """`geglu` of a gate and an up that one matrix product made.

    Args:
        x: [..., 2 I], floating: gate, then up.
        approximate: "tanh" or "none", as of geglu.
        interleaved: x is gate 0, up 0, gate 1, up 1, ... instead.
        exact_rounding: round gelu(gate) to the dtype before the product, as the eager chain does.

    Returns:
        [..., I], contiguous, of x's dtype.

    Raises:
        TypeError: x is not a floating tensor; approximate is not a str.
        ValueError: x has no dimension, or an odd last one; approximate is neither "tanh" nor "none".

    Contract: Tolerance; all as geglu.

    Source: as geglu.
    """
    return geglu.op.reference(*gated.unpacked(x, interleaved), approximate, exact_rounding=exact_rounding)


@geglu_packed.check
def _(x, approximate, *, interleaved, exact_rounding):
    gated.check_packed(x, interleaved)
    is_form(approximate)
    c.is_bool("exact_rounding", exact_rounding)


geglu_packed.bad_calls(gated.bad_packed)
geglu_packed.kernel(needs=gated.PACKED)


@geglu_packed.backward
def _(saved, kept, grad):
    return {"x": geglu_packed_backward(grad, saved["x"], saved["approximate"], interleaved=saved["interleaved"])}


@op(samples=lambda device: gated.apart_samples(device, 3, ERF), contract=GRADIENT_TOLERANCE)
def geglu_backward(grad: Tensor, gate: Tensor, up: Tensor, approximate: str = "tanh") -> tuple[Tensor, Tensor]:
    """The gradient of `geglu`: from that of the result to gate's and up's. gelu is computed again, not kept.

    Args:
        grad: [..., I], of the result, floating. The kernel takes gate's dtype; of another the reference answers.
        gate: [..., I], as the forward call had it.
        up: [..., I], as the forward call had it.
        approximate: as the forward call had it.

    Returns:
        dgate: [..., I], contiguous, of gate's dtype: ``grad * up * gelu'(gate)``.
        dup: [..., I], contiguous, of gate's dtype: ``grad * gelu(gate)``.

    Raises:
        TypeError, ValueError: as geglu; grad is not like gate.

    Contract: Tolerance (GRADIENT_TOLERANCE in the source, with its arithmetic). float32 inside, one rounding.

    Source: the derivative of the formula of geglu.
    """
    dgate, dup = derivatives(grad, gate, up, approximate)
    return stored(dgate, gate), stored(dup, gate)


@geglu_backward.check
def _(grad, gate, up, approximate):
    gated.check_apart_gradient(grad, gate, up)
    is_form(approximate)


geglu_backward.bad_calls(gated.bad_apart_gradient)
geglu_backward.kernel(needs=gated.APART_GRADIENT)


@op(samples=lambda device: gated.packed_samples(device, True, ERF), contract=GRADIENT_TOLERANCE)
def geglu_packed_backward(grad: Tensor, x: Tensor, approximate: str = "tanh", *, interleaved: bool = False) -> Tensor:
    """The gradient of `geglu_packed`: from that of the result to x's, in x's layout.

    Args:
        grad: [..., I], of the result, floating. The kernel takes x's dtype; of another the reference answers.
        x: [..., 2 I], as the forward call had it.
        approximate: as the forward call had it.
        interleaved: as the forward call had it.

    Returns:
        [..., 2 I], contiguous, of x's dtype.

    Raises:
        TypeError, ValueError: as geglu_packed; grad is not of the result's shape.

    Contract: Tolerance; all as geglu_backward.

    Source: the derivative of the formula of geglu.
    """
    dgate, dup = derivatives(grad, *gated.unpacked(x, interleaved), approximate)
    return stored(gated.repacked(dgate, dup, interleaved), x)


@geglu_packed_backward.check
def _(grad, x, approximate, *, interleaved):
    gated.check_packed_gradient(grad, x, interleaved)
    is_form(approximate)


geglu_packed_backward.bad_calls(gated.bad_packed_gradient)
geglu_packed_backward.kernel(needs=gated.PACKED_GRADIENT)
