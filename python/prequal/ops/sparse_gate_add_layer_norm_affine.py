"""A step of a modulated residual stream on tokens of batches: gate and add, then normalise and modulate the sum."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.registry import BadCall, op

from . import _sparse as sparse
from ._rows import stored, wide_of
from .layer_norm import TOLERANCE
from .rms_norm import GRADIENT_TOLERANCE
from .sparse_batch_mul_add import sparse_batch_mul_add, sparse_batch_mul_add_backward
from .sparse_layer_norm_affine import PLAIN, sparse_layer_norm_affine, sparse_layer_norm_affine_backward


@op(samples=lambda device: sparse.samples_of(device, "tmtmm", PLAIN, 5), contract=TOLERANCE)
def sparse_gate_add_layer_norm_affine(
    h: Tensor,
    gate: Tensor,
    residual: Tensor,
    scale: Tensor,
    shift: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    eps: float = 1e-6,
    add_one: bool = True,
) -> tuple[Tensor, Tensor]:
    """``new_residual = h * gate[b] + residual`` and ``y = sparse_layer_norm_affine(new_residual, scale, shift, ...)``.

    Args:
        h: [N, C], floating: what a block adds to the stream, of the tokens of all batches.
        gate: [B, C], of h's dtype or float32; a row a batch.
        residual: [N, C], of h's dtype; the stream.
        scale: [B, C], of h's dtype or float32.
        shift: like scale.
        batch: [N], int32 or int64: the batch of each token, in any order. Either this or ptr is given.
        ptr: [B + 1], int32 or int64: tokens ptr[b] to ptr[b + 1] are those of batch b; empty batches are allowed.
        eps: added to the variance; same units as new_residual².
        add_one: False: the scale is multiplied by as it is.

    Returns:
        y: [N, C], contiguous, of h's dtype.
        new_residual: [N, C], contiguous, of h's dtype. On a GPU a token without a batch becomes NaN in both, as of
            sparse_layer_norm_affine.

    y is the norm of the new_residual that is returned, rounded as it is: what a later reader of the stream would
    compute, and what the gradient is taken of. Two round trips of the stream through memory become one.

    The gradient is `sparse_gate_add_layer_norm_affine_backward`; second derivatives are those of its reference.

    Raises:
        TypeError, ValueError: as sparse_batch_mul_add and sparse_layer_norm_affine.

    Contract: Tolerance (that of layer_norm, with its arithmetic); new_residual has the bits of sparse_batch_mul_add.

    Source: Peebles and Xie, Scalable Diffusion Models with Transformers, 2023; the fusion as fused_add_rms_norm's.
    """
    total = sparse_batch_mul_add.op.reference(h, gate, residual, batch, ptr)
    y = sparse_layer_norm_affine.op.reference(total, scale, shift, batch, ptr, eps=eps, add_one=add_one)
    return y, total


@sparse_gate_add_layer_norm_affine.check
def _(h, gate, residual, scale, shift, batch, ptr, *, eps, add_one):
    sparse.check_tensors("h", h=h, gate=gate, residual=residual, scale=scale, shift=shift, batch=batch, ptr=ptr)
    c.is_number("eps", eps)
    c.is_bool("add_one", add_one)
    sparse.check_modulation("gate", gate, h)
    sparse.check_like("residual", residual, "h", h)
    c.is_floating("scale", scale)
    c.same_shape("scale", scale, "gate", gate)
    sparse.check_like("shift", shift, "scale", scale)
    sparse.check_batches(batch, ptr, h.shape[0], gate.shape[0])


sparse_gate_add_layer_norm_affine.kernel(needs=sparse.needs(("h", "residual"), ("gate", "scale", "shift")))


@sparse_gate_add_layer_norm_affine.backward(saves=("h", "gate", "scale", "batch", "ptr"), keeps=(1,))
def _(saved, kept, grad, grad_total):
    dh, dresidual, dgate, dscale, dshift = sparse_gate_add_layer_norm_affine_backward(
        grad,
        grad_total,
        saved["h"],
        saved["gate"],
        kept[0],
        saved["scale"],
        saved.get("batch"),
        saved.get("ptr"),
        eps=saved["eps"],
        add_one=saved["add_one"],
        gate_grad="gate" in saved.wanted,
        scale_grad="scale" in saved.wanted,
        shift_grad="shift" in saved.wanted,
    )
    return {"h": dh, "gate": dgate, "residual": dresidual, "scale": dscale, "shift": dshift}


@sparse_gate_add_layer_norm_affine.bad_calls
def _(device):
    x, y, rows = torch.ones(4, 8, device=device), torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    at = torch.tensor([0, 1, 1, 0], device=device)
    yield BadCall(([1.0], rows, y, rows, rows, at), TypeError, r"h: expected a torch.Tensor, got list")
    yield BadCall((x, rows, y, 3, rows, at), TypeError, r"scale: expected a torch.Tensor, got int")
    yield BadCall((x, rows, y.half(), rows, rows, at), TypeError, r"residual: expected float32 like h, got float16")
    yield BadCall((x, rows, y, rows, rows.half(), at), TypeError, r"shift: expected float32 like scale, got float16")
    yield BadCall((x, rows, y, rows, rows, at), TypeError, r"eps: expected a float, got str", {"eps": "small"})
    yield BadCall((x, rows[:, 1:], y, rows, rows, at), ValueError, r"gate: expected shape \[B, 8\], got \[2, 7\]")
    text = r"scale: expected the shape \[2, 8\] of gate, got \[1, 8\]"
    yield BadCall((x, rows, y, rows[1:], rows, at), ValueError, text)

    def call(error, match, *of):
        return BadCall((x, rows, y, rows, rows, *of), error, match)

    yield from sparse.bad_batches(device, call)


HALF: dict[str, dict[str, object]] = {
    "without gate_grad": {"gate_grad": False},
    "without scale_grad": {"scale_grad": False},
    "tokens' gradients alone": {"gate_grad": False, "scale_grad": False, "shift_grad": False},
    **PLAIN,
}


@op(samples=lambda device: sparse.samples_of(device, "tttmtm", HALF, 6), contract=GRADIENT_TOLERANCE)
def sparse_gate_add_layer_norm_affine_backward(
    grad: Tensor,
    grad_total: Tensor,
    h: Tensor,
    gate: Tensor,
    total: Tensor,
    scale: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    eps: float = 1e-6,
    add_one: bool = True,
    gate_grad: bool = True,
    scale_grad: bool = True,
    shift_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of `sparse_gate_add_layer_norm_affine`, from those of y and new_residual.

    Args:
        grad: [N, C], of y, of h's dtype.
        grad_total: [N, C], of new_residual, of h's dtype.
        h: [N, C], as the forward call had it.
        gate: [B, C], as the forward call had it.
        total: [N, C], the new_residual that the forward call returned.
        scale: [B, C], as the forward call had it.
        batch: [N] or None, as the forward call had it.
        ptr: [B + 1] or None, as the forward call had it.
        eps: as the forward call had it.
        add_one: as the forward call had it.
        gate_grad: False for a gate that is not trained.
        scale_grad: False for a scale that is not trained.
        shift_grad: False for a shift that is not trained.

    Returns:
        dh: [N, C], contiguous, of h's dtype: ``dresidual * gate[b]``.
        dresidual: [N, C], contiguous, of h's dtype: that of the norm's argument and grad_total.
        dgate: [B, C], of gate's dtype: the sum over the tokens of a batch of ``dresidual * h``; [0, C] without
            gate_grad.
        dscale: [B, C], of scale's dtype, as of sparse_layer_norm_affine_backward.
        dshift: [B, C], of scale's dtype, as of sparse_layer_norm_affine_backward.

    dh and dgate are of the unrounded dresidual. Sums over tokens are taken in a fixed order, so two runs give the same
    bits.

    Raises:
        TypeError, ValueError: as sparse_gate_add_layer_norm_affine; grad, grad_total or total is not like h.

    Contract: Tolerance (GRADIENT_TOLERANCE of rms_norm, with its arithmetic). float32 inside, one rounding of each
    result.

    Source: the derivative of the formula of sparse_gate_add_layer_norm_affine.
    """
    wide = wide_of(h)
    of_norm, dscale, dshift = sparse_layer_norm_affine_backward.op.reference(
        grad.to(wide),
        total.to(wide),
        scale,
        batch,
        ptr,
        eps=eps,
        add_one=add_one,
        scale_grad=scale_grad,
        shift_grad=shift_grad,
    )
    dtotal = of_norm + grad_total.to(wide)
    dh, dgate = sparse_batch_mul_add_backward.op.reference(dtotal, h.to(wide), gate, batch, ptr, gate_grad=gate_grad)
    return stored(dh, h), stored(dtotal, h), dgate, dscale, dshift


@sparse_gate_add_layer_norm_affine_backward.check
def _(grad, grad_total, h, gate, total, scale, batch, ptr, *, eps, add_one, gate_grad, scale_grad, shift_grad):
    tensors = {"grad": grad, "grad_total": grad_total, "h": h, "gate": gate, "total": total, "scale": scale}
    sparse.check_tensors("h", **tensors, batch=batch, ptr=ptr)
    c.is_number("eps", eps)
    asked = {"add_one": add_one, "gate_grad": gate_grad, "scale_grad": scale_grad, "shift_grad": shift_grad}
    for name, value in asked.items():
        c.is_bool(name, value)
    for name in ("grad", "grad_total", "total"):
        sparse.check_like(name, tensors[name], "h", h)
    sparse.check_modulation("gate", gate, h)
    c.is_floating("scale", scale)
    c.same_shape("scale", scale, "gate", gate)
    sparse.check_batches(batch, ptr, h.shape[0], gate.shape[0])


sparse_gate_add_layer_norm_affine_backward.kernel(
    needs=sparse.needs(("h", "grad", "grad_total", "total"), ("gate", "scale"))
)


@sparse_gate_add_layer_norm_affine_backward.bad_calls
def _(device):
    x, rows = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    at = torch.tensor([0, 1, 1, 0], device=device)
    yield BadCall((x, x, [1.0], rows, x, rows, at), TypeError, r"h: expected a torch.Tensor, got list")
    yield BadCall((x, x, x, rows, x.half(), rows, at), TypeError, r"total: expected float32 like h, got float16")
    yield BadCall((x[1:], x, x, rows, x, rows, at), ValueError, r"grad: expected the shape \[4, 8\] of h, got \[3, 8\]")

    def call(error, match, *of):
        return BadCall((x, x, x, rows, x, rows, *of), error, match)

    yield from sparse.bad_batches(device, call)
