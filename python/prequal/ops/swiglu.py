"""The gated activation of Llama's MLP, silu(gate) * up, and its gradient; gate and up apart or in one tensor."""

import torch
from torch import Tensor
from torch.nn import functional

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import op

from . import _gated as gated
from ._rows import stored, wide_of

EXACT = {"exact rounding": {"exact_rounding": True}}

# Both paths compute silu in fp32 to a few ulp (halves, by the special function units: to 2^-16 where |gate| is 80,
# where silu is 1e-33) and round once: fp32 1e-5 of the value; halves 1 ulp, 2^-7 and 2^-10 of the value, and one more
# with exact_rounding, which rounds twice. Where exp(-gate) passes 2^126 the fast division gives 0 for values below
# 1e-36 |up|.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-30),
        torch.bfloat16: (2.0**-6, 1e-30),
        torch.float16: (2.0**-9, 2.0**-23),
        torch.float64: (1e-12, 1e-14),
    }
)

# The slope of silu crosses zero at -1.28, as a difference of terms below 1: 2^-24 * 8 of grad * up stays there, 5e-7 at
# values near 1 and 5e-4 at the 30 * 30 of the samples' largest.
GRADIENT_TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 5e-4),
        torch.bfloat16: (2.0**-7, 5e-4),
        torch.float16: (2.0**-10, 5e-4),
        torch.float64: (1e-12, 1e-12),
    }
)


def derivatives(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Of gate and up, in the dtype that rows are computed in."""
    wide = wide_of(gate)
    d, g, u = grad.to(wide), gate.to(wide), up.to(wide)
    s = torch.sigmoid(g)
    return d * u * (s * (1.0 + g * (1.0 - s))), d * (g * s)


@op(samples=lambda device: gated.apart_samples(device, 2, EXACT), contract=TOLERANCE)
def swiglu(gate: Tensor, up: Tensor, *, exact_rounding: bool = False) -> Tensor:
    """``silu(gate) * up``, with ``silu(x) = x / (1 + exp(-x))``.

    Args:
        gate: [..., I], floating.
        up: [..., I], of gate's dtype.
        exact_rounding: round silu(gate) to the dtype before the product, as the eager chain does.

    Returns:
        [..., I], contiguous, of gate's dtype.

    Computed in float32 (float64 for float64) from the load to one rounding at the end, which is more accurate than the
    eager chain. Rows may be strided, as the halves of a packed tensor are; for those there is swiglu_packed, too.

    The gradient is `swiglu_backward`, that of the formula, whatever exact_rounding.

    Raises:
        TypeError: gate is not a floating tensor; up is not of its dtype.
        ValueError: gate has no dimension; up is not like gate; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). Roundings of the eager chain that are kept: the
    last; with exact_rounding, that of silu(gate), too.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """
    value = functional.silu(gate.to(wide_of(gate)))
    if exact_rounding:
        value = value.to(gate.dtype).to(value.dtype)
    return stored(value * up.to(value.dtype), gate)


@swiglu.check
def _(gate, up, *, exact_rounding):
    gated.check_apart(gate, up)
    c.is_bool("exact_rounding", exact_rounding)


swiglu.bad_calls(gated.bad_apart)
swiglu.kernel(needs=gated.APART)


@swiglu.backward
def _(saved, kept, grad):
    dgate, dup = swiglu_backward(grad, saved["gate"], saved["up"])
    return {"gate": dgate, "up": dup}


@op(samples=lambda device: gated.apart_samples(device, 2, EXACT), contract=TOLERANCE, mutates=("gate",))
def swiglu_(gate: Tensor, up: Tensor, *, exact_rounding: bool = False) -> Tensor:
    """`swiglu` in place: the result is written into gate.

    Args:
        gate: [..., I], floating; becomes the result.
        up: [..., I], of gate's dtype.
        exact_rounding: round silu(gate) to the dtype before the product, as of swiglu.

    Returns:
        gate. No memory is allocated.

    Raises:
        TypeError, ValueError: as swiglu.
        ValueError: gate and up share memory, or elements of gate do. Nothing is written then.
        RuntimeError: a gradient would have to be recorded: use swiglu for that.

    Contract: Tolerance; all as swiglu.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """
    return gate.copy_(swiglu.op.reference(gate, up, exact_rounding=exact_rounding))


@swiglu_.check
def _(gate, up, *, exact_rounding):
    gated.check_in_place(gate, up)
    c.is_bool("exact_rounding", exact_rounding)


swiglu_.bad_calls(gated.bad_in_place)
swiglu_.kernel(needs=gated.APART)


@op(samples=lambda device: gated.packed_samples(device, False, EXACT), contract=TOLERANCE)
def swiglu_packed(x: Tensor, *, interleaved: bool = False, exact_rounding: bool = False) -> Tensor:
    """`swiglu` of a gate and an up that one matrix product made.

    Args:
        x: [..., 2 I], floating: gate, then up.
        interleaved: x is gate 0, up 0, gate 1, up 1, ... instead.
        exact_rounding: round silu(gate) to the dtype before the product, as the eager chain does.

    Returns:
        [..., I], contiguous, of x's dtype.

    Raises:
        TypeError: x is not a floating tensor.
        ValueError: x has no dimension, or an odd last one.

    Contract: Tolerance; all as swiglu.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """
    return swiglu.op.reference(*gated.unpacked(x, interleaved), exact_rounding=exact_rounding)


@swiglu_packed.check
def _(x, *, interleaved, exact_rounding):
    gated.check_packed(x, interleaved)
    c.is_bool("exact_rounding", exact_rounding)


swiglu_packed.bad_calls(gated.bad_packed)
swiglu_packed.kernel(needs=gated.PACKED)


@swiglu_packed.backward
def _(saved, kept, grad):
    return {"x": swiglu_packed_backward(grad, saved["x"], interleaved=saved["interleaved"])}


@op(samples=lambda device: gated.apart_samples(device, 3, {}), contract=GRADIENT_TOLERANCE)
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `swiglu`: from that of the result to gate's and up's. silu is computed again, not kept.

    Args:
        grad: [..., I], of the result, floating. The kernel takes gate's dtype; of another the reference answers.
        gate: [..., I], as the forward call had it.
        up: [..., I], as the forward call had it.

    Returns:
        dgate: [..., I], contiguous, of gate's dtype: ``grad * up * s * (1 + gate * (1 - s))``, ``s = sigmoid(gate)``.
        dup: [..., I], contiguous, of gate's dtype: ``grad * silu(gate)``.

    Raises:
        TypeError, ValueError: as swiglu; grad is not like gate.

    Contract: Tolerance (GRADIENT_TOLERANCE in the source, with its arithmetic). float32 inside, one rounding.

    Source: the derivative of the formula of swiglu.
    """
    dgate, dup = derivatives(grad, gate, up)
    return stored(dgate, gate), stored(dup, gate)


swiglu_backward.check(gated.check_apart_gradient)
swiglu_backward.bad_calls(gated.bad_apart_gradient)
swiglu_backward.kernel(needs=gated.APART_GRADIENT)


@op(samples=lambda device: gated.packed_samples(device, True, {}), contract=GRADIENT_TOLERANCE)
def swiglu_packed_backward(grad: Tensor, x: Tensor, *, interleaved: bool = False) -> Tensor:
    """The gradient of `swiglu_packed`: from that of the result to x's, in x's layout.

    Args:
        grad: [..., I], of the result, floating. The kernel takes x's dtype; of another the reference answers.
        x: [..., 2 I], as the forward call had it.
        interleaved: as the forward call had it.

    Returns:
        [..., 2 I], contiguous, of x's dtype.

    Raises:
        TypeError, ValueError: as swiglu_packed; grad is not of the result's shape.

    Contract: Tolerance; all as swiglu_backward.

    Source: the derivative of the formula of swiglu.
    """
    dgate, dup = derivatives(grad, *gated.unpacked(x, interleaved))
    return stored(gated.repacked(dgate, dup, interleaved), x)


@swiglu_packed_backward.check
def _(grad, x, *, interleaved):
    gated.check_packed_gradient(grad, x, interleaved)


swiglu_packed_backward.bad_calls(gated.bad_packed_gradient)
swiglu_packed_backward.kernel(needs=gated.PACKED_GRADIENT)
