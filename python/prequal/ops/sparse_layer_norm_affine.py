"""Layer normalisation of tokens, modulated by the row of each token's batch (AdaLN on ragged batches)."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.registry import BadCall, op

from . import _sparse as sparse
from ._rows import stored, wide_of
from .layer_norm import TOLERANCE
from .rms_norm import GRADIENT_TOLERANCE

PLAIN: dict[str, dict[str, object]] = {"scale itself": {"add_one": False}, "large eps": {"eps": 0.5}}


@op(samples=lambda device: sparse.samples_of(device, "tmm", PLAIN, 3), contract=TOLERANCE)
def sparse_layer_norm_affine(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    eps: float = 1e-6,
    add_one: bool = True,
) -> Tensor:
    """``(x - mean) * rsqrt(var + eps) * (scale[b] + 1) + shift[b]``, with b the batch of the token.

    Args:
        x: [N, C], floating: the tokens of all batches.
        scale: [B, C], of x's dtype or float32; a row a batch. Slices of one modulation [B, 6 C] are read where they
            lie.
        shift: like scale.
        batch: [N], int32 or int64: the batch of each token, in any order. Either this or ptr is given.
        ptr: [B + 1], int32 or int64: tokens ptr[b] to ptr[b + 1] are those of batch b; empty batches are allowed.
        eps: added to the variance; same units as x².
        add_one: False: the scale is multiplied by as it is.

    Returns:
        [N, C], contiguous, of x's dtype. On the CPU a batch outside of 0 to B - 1, or offsets that do not rise from 0
        to N, are an error. On a GPU nobody waits to look: a token without a batch becomes NaN, and nothing outside is
        read.

    Computed in float32 (float64 for float64) from the load to one rounding at the end. Nothing of x's size is made of
    scale and shift.

    The gradient is `sparse_layer_norm_affine_backward`; second derivatives are those of its reference.

    Raises:
        TypeError: x is not a floating tensor; shift is not of scale's dtype; batch or ptr are not integers, both or
            neither are given.
        ValueError: shapes that do not fit; on the CPU, batches that do not exist; two devices.

    Contract: Tolerance (that of layer_norm, with its arithmetic). The eager chain rounds the normalised value, 1 +
    scale and their product as well; this rounds once.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016; Peebles and Xie, Scalable Diffusion Models with
    Transformers, 2023, for the modulation.
    """
    wide = wide_of(x)
    places = sparse.Places(batch, ptr, x.shape[0], scale.shape[0])
    y = x.to(wide)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    factor = places.of(scale, wide)
    return stored(y * (factor + 1.0 if add_one else factor) + places.of(shift, wide), x)


@sparse_layer_norm_affine.check
def _(x, scale, shift, batch, ptr, *, eps, add_one):
    sparse.check_tensors("x", x=x, scale=scale, shift=shift, batch=batch, ptr=ptr)
    c.is_number("eps", eps)
    c.is_bool("add_one", add_one)
    sparse.check_modulation("scale", scale, x)
    sparse.check_like("shift", shift, "scale", scale)
    sparse.check_batches(batch, ptr, x.shape[0], scale.shape[0])


sparse_layer_norm_affine.kernel(needs=sparse.needs(("x",), ("scale", "shift")))


@sparse_layer_norm_affine.backward(saves=("x", "scale", "batch", "ptr"))
def _(saved, kept, grad):
    dx, dscale, dshift = sparse_layer_norm_affine_backward(
        grad,
        saved["x"],
        saved["scale"],
        saved.get("batch"),
        saved.get("ptr"),
        eps=saved["eps"],
        add_one=saved["add_one"],
        scale_grad="scale" in saved.wanted,
        shift_grad="shift" in saved.wanted,
    )
    return {"x": dx, "scale": dscale, "shift": dshift}


@sparse_layer_norm_affine.bad_calls
def _(device):
    x, rows = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    at = torch.tensor([0, 1, 1, 0], device=device)
    yield BadCall(([1.0], rows, rows, at), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, 3, rows, at), TypeError, r"scale: expected a torch.Tensor, got int")
    yield BadCall((x, rows, rows, at), TypeError, r"eps: expected a float, got str", {"eps": "small"})
    yield BadCall((x, rows, rows, at), TypeError, r"add_one: expected a bool, got int", {"add_one": 1})
    yield BadCall((x.long(), rows, rows, at), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x, rows, rows.half(), at), TypeError, r"shift: expected float32 like scale, got float16")
    yield BadCall((x[0], rows, rows, at), ValueError, r"x: expected shape \[N, C\], got \[8\]")
    yield BadCall((x, rows[:, 1:], rows, at), ValueError, r"scale: expected shape \[B, 8\], got \[2, 7\]")
    yield BadCall((x, rows, rows[1:], at), ValueError, r"shift: expected the shape \[2, 8\] of scale, got \[1, 8\]")
    yield from sparse.bad_batches(device, lambda error, match, *of: BadCall((x, rows, rows, *of), error, match))


HALF: dict[str, dict[str, object]] = {
    "without scale_grad": {"scale_grad": False},
    "without shift_grad": {"shift_grad": False},
    "dx alone": {"scale_grad": False, "shift_grad": False},
    **PLAIN,
}


@op(samples=lambda device: sparse.samples_of(device, "ttm", HALF, 3), contract=GRADIENT_TOLERANCE)
def sparse_layer_norm_affine_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    eps: float = 1e-6,
    add_one: bool = True,
    scale_grad: bool = True,
    shift_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `sparse_layer_norm_affine`: from that of the result to x's, scale's and shift's.

    Args:
        grad: [N, C], of the result, of x's dtype.
        x: [N, C], as the forward call had it.
        scale: [B, C], as the forward call had it.
        batch: [N] or None, as the forward call had it.
        ptr: [B + 1] or None, as the forward call had it.
        eps: as the forward call had it.
        add_one: as the forward call had it.
        scale_grad: False for a scale that is not trained.
        shift_grad: False for a shift that is not trained.

    Returns:
        dx: [N, C], contiguous, of x's dtype: that of `layer_norm` with ``scale[b] + 1`` for a weight.
        dscale: [B, C], of scale's dtype: the sum over the tokens of a batch of ``grad * xhat``; [0, C] without
            scale_grad.
        dshift: [B, C], of scale's dtype: the sum over the tokens of a batch of ``grad``; [0, C] without shift_grad.

    Sums over tokens are taken in a fixed order, so two runs give the same bits. Tokens without a batch add nothing.

    Raises:
        TypeError, ValueError: as sparse_layer_norm_affine; grad is not like x.

    Contract: Tolerance (GRADIENT_TOLERANCE of rms_norm, with its arithmetic). float32 inside, one rounding of each
    result.

    Source: the derivative of the formula of sparse_layer_norm_affine.
    """
    wide = wide_of(x)
    places = sparse.Places(batch, ptr, x.shape[0], scale.shape[0])
    g, values = grad.to(wide), x.to(wide)
    values = values - values.mean(-1, keepdim=True)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    xhat = values * rstd
    factor = places.of(scale, wide)
    gw = g * (factor + 1.0 if add_one else factor)
    dx = rstd * (gw - gw.mean(-1, keepdim=True) - xhat * (gw * xhat).mean(-1, keepdim=True))
    nothing = scale.new_empty((0, x.shape[1]))
    dscale = places.sums(g * xhat).to(scale.dtype) if scale_grad else nothing
    dshift = places.sums(g).to(scale.dtype) if shift_grad else nothing.clone()
    return stored(dx, x), dscale, dshift


@sparse_layer_norm_affine_backward.check
def _(grad, x, scale, batch, ptr, *, eps, add_one, scale_grad, shift_grad):
    sparse.check_tensors("x", grad=grad, x=x, scale=scale, batch=batch, ptr=ptr)
    c.is_number("eps", eps)
    for name, value in (("add_one", add_one), ("scale_grad", scale_grad), ("shift_grad", shift_grad)):
        c.is_bool(name, value)
    sparse.check_like("grad", grad, "x", x)
    sparse.check_modulation("scale", scale, x)
    sparse.check_batches(batch, ptr, x.shape[0], scale.shape[0])


sparse_layer_norm_affine_backward.kernel(needs=sparse.needs(("x", "grad"), ("scale",)))


@sparse_layer_norm_affine_backward.bad_calls
def _(device):
    x, rows = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    at = torch.tensor([0, 1, 1, 0], device=device)
    yield BadCall((x, [1.0], rows, at), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x.half(), x, rows, at), TypeError, r"grad: expected float32 like x, got float16")
    yield BadCall((x[1:], x, rows, at), ValueError, r"grad: expected the shape \[4, 8\] of x, got \[3, 8\]")
    yield BadCall((x, x, rows[:, 1:], at), ValueError, r"scale: expected shape \[B, 8\], got \[2, 7\]")
    yield from sparse.bad_batches(device, lambda error, match, *of: BadCall((x, x, rows, *of), error, match))
