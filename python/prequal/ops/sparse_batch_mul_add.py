"""A gated residual on tokens of batches: multiply by the row of the token's batch, and add. Fresh, or in place."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, op

from . import _sparse as sparse
from ._rows import stored, wide_of
from .rms_norm import GRADIENT_TOLERANCE

# Both paths round the product to fp32, then the sum, then to the dtype: the same bits. The bounds are those of one
# fused multiply-add instead of the two, which a compiler of the reference may make: 2^-24 of a product of a few, and in
# a half 1 ulp where that moves a value over the middle between two.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-6, 2e-6),
        torch.bfloat16: (2.0**-7, 2e-6),
        torch.float16: (2.0**-10, 2e-6),
        torch.float64: (1e-14, 1e-14),
    }
)


def samples(device):
    """x, gate and residual, of letters in the order of the signature."""
    return sparse.samples_of(device, "tmt", {}, 3)


@op(samples=samples, contract=TOLERANCE)
def sparse_batch_mul_add(
    x: Tensor, gate: Tensor, residual: Tensor, batch: Tensor | None = None, ptr: Tensor | None = None
) -> Tensor:
    """``x * gate[b] + residual``, with b the batch of the token.

    Args:
        x: [N, C], floating: what a block adds to the stream, of the tokens of all batches.
        gate: [B, C], of x's dtype or float32; a row a batch. A slice of one modulation [B, 6 C] is read where it lies.
        residual: [N, C], of x's dtype; the stream.
        batch: [N], int32 or int64: the batch of each token, in any order. Either this or ptr is given.
        ptr: [B + 1], int32 or int64: tokens ptr[b] to ptr[b + 1] are those of batch b; empty batches are allowed.

    Returns:
        [N, C], contiguous, of x's dtype. On the CPU a batch outside of 0 to B - 1, or offsets that do not rise from 0
        to N, are an error. On a GPU nobody waits to look: a token without a batch becomes NaN, and nothing outside is
        read.

    Computed in float32 (float64 for float64) from the load to one rounding at the end. Nothing of x's size is made of
    the gate.

    The gradient is `sparse_batch_mul_add_backward`, and of residual the gradient as it comes; second derivatives are
    those of its reference.

    Raises:
        TypeError: x is not a floating tensor; residual is not of its dtype; batch or ptr are not integers, both or
            neither are given.
        ValueError: shapes that do not fit; on the CPU, batches that do not exist; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). The eager chain rounds the product to x's dtype
    as well; this rounds once.

    Source: Peebles and Xie, Scalable Diffusion Models with Transformers, 2023.
    """
    wide = wide_of(x)
    places = sparse.Places(batch, ptr, x.shape[0], gate.shape[0])
    return stored(x.to(wide) * places.of(gate, wide) + residual.to(wide), x)


@sparse_batch_mul_add.check
def check(x, gate, residual, batch, ptr):
    sparse.check_tensors("x", x=x, gate=gate, residual=residual, batch=batch, ptr=ptr)
    sparse.check_modulation("gate", gate, x)
    sparse.check_like("residual", residual, "x", x)
    sparse.check_batches(batch, ptr, x.shape[0], gate.shape[0])


NEEDS = sparse.needs(("x", "residual"), ("gate",))
sparse_batch_mul_add.kernel(needs=NEEDS)


@sparse_batch_mul_add.backward(saves=("x", "gate", "batch", "ptr"))
def _(saved, kept, grad):
    found = {"residual": grad}
    if "x" in saved.wanted or "gate" in saved.wanted:
        found["x"], found["gate"] = sparse_batch_mul_add_backward(
            grad,
            saved["x"],
            saved["gate"],
            saved.get("batch"),
            saved.get("ptr"),
            gate_grad="gate" in saved.wanted,
        )
    return found


@sparse_batch_mul_add.bad_calls
def bad_calls(device):
    x, rows = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    y = torch.ones(4, 8, device=device)
    at = torch.tensor([0, 1, 1, 0], device=device)
    yield BadCall(([1.0], rows, y, at), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, rows, 3, at), TypeError, r"residual: expected a torch.Tensor, got int")
    yield BadCall((x.long(), rows, y.long(), at), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x, rows, y.half(), at), TypeError, r"residual: expected float32 like x, got float16")
    yield BadCall((x[0], rows, y, at), ValueError, r"x: expected shape \[N, C\], got \[8\]")
    yield BadCall((x, rows, y[1:], at), ValueError, r"residual: expected the shape \[4, 8\] of x, got \[3, 8\]")
    yield BadCall((x, rows[0], y, at), ValueError, r"gate: expected shape \[B, 8\], got \[8\]")
    yield from sparse.bad_batches(device, lambda error, match, *of: BadCall((x, rows, y, *of), error, match))


@op(samples=samples, contract=TOLERANCE, mutates=("residual",))
def sparse_batch_mul_add_(
    x: Tensor, gate: Tensor, residual: Tensor, batch: Tensor | None = None, ptr: Tensor | None = None
) -> Tensor:
    """`sparse_batch_mul_add` in place: ``x * gate[b] + residual`` is written into residual.

    Args:
        x: [N, C], floating.
        gate: [B, C], of x's dtype or float32; a row a batch.
        residual: [N, C], of x's dtype; becomes the result.
        batch: [N] or None, as of sparse_batch_mul_add.
        ptr: [B + 1] or None, as of sparse_batch_mul_add.

    Returns:
        residual. No memory is allocated.

    Raises:
        TypeError, ValueError: as sparse_batch_mul_add.
        ValueError: x and residual share memory, or elements of residual do. Nothing is written then.
        RuntimeError: a gradient would have to be recorded: use sparse_batch_mul_add for that.

    Contract: Tolerance; all as sparse_batch_mul_add. Where gate, batch or ptr lie in residual the reference answers, by
    what they were.

    Source: Peebles and Xie, Scalable Diffusion Models with Transformers, 2023.
    """
    return residual.copy_(sparse_batch_mul_add.op.reference(x, gate, residual, batch, ptr))


@sparse_batch_mul_add_.check
def _(x, gate, residual, batch, ptr):
    check(x, gate, residual, batch, ptr)
    c.is_apart("residual", residual)
    c.are_apart("x", x, "residual", residual)


@sparse_batch_mul_add_.bad_calls
def _(device):
    yield from bad_calls(device)
    both, rows = torch.ones(5, 8, device=device), torch.ones(2, 8, device=device)
    at = torch.tensor([0, 1, 1, 0], device=device)
    shared = r"x: expected memory apart from that of residual, which is written, got shared memory"
    yield BadCall((both[1:], rows, both[1:], at), ValueError, shared)
    yield BadCall((both[1:], rows, both[:-1], at), ValueError, shared)
    yield BadCall((both[1:, :5], rows[:, :5], both[1:, 3:], at), ValueError, shared)
    one = torch.ones(1, 8, device=device).expand(4, 8)
    own = r"residual: expected a place of its own for every element, .* got shared ones"
    yield BadCall((both[1:], rows, one, at), ValueError, own)


sparse_batch_mul_add_.kernel(needs=(*NEEDS, c.apart("residual", read=("gate", "batch", "ptr"))))


@op(
    samples=lambda device: sparse.samples_of(device, "ttm", {"without gate_grad": {"gate_grad": False}}, 3),
    contract=GRADIENT_TOLERANCE,
)
def sparse_batch_mul_add_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    gate_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """The gradient of `sparse_batch_mul_add`: from that of the result to x's and gate's; residual's is grad itself.

    Args:
        grad: [N, C], of the result, of x's dtype.
        x: [N, C], as the forward call had it.
        gate: [B, C], as the forward call had it.
        batch: [N] or None, as the forward call had it.
        ptr: [B + 1] or None, as the forward call had it.
        gate_grad: False for a gate that is not trained.

    Returns:
        dx: [N, C], contiguous, of x's dtype: ``grad * gate[b]``.
        dgate: [B, C], of gate's dtype: the sum over the tokens of a batch of ``grad * x``; [0, C] without gate_grad.

    Sums over tokens are taken in a fixed order, so two runs give the same bits. Tokens without a batch add nothing.

    Raises:
        TypeError, ValueError: as sparse_batch_mul_add; grad is not like x.

    Contract: Tolerance (GRADIENT_TOLERANCE of rms_norm, with its arithmetic). float32 inside, one rounding of each
    result.

    Source: the derivative of the formula of sparse_batch_mul_add.
    """
    wide = wide_of(x)
    places = sparse.Places(batch, ptr, x.shape[0], gate.shape[0])
    g = grad.to(wide)
    dgate = places.sums(g * x.to(wide)).to(gate.dtype) if gate_grad else gate.new_empty((0, x.shape[1]))
    return stored(g * places.of(gate, wide), x), dgate


@sparse_batch_mul_add_backward.check
def _(grad, x, gate, batch, ptr, *, gate_grad):
    sparse.check_tensors("x", grad=grad, x=x, gate=gate, batch=batch, ptr=ptr)
    c.is_bool("gate_grad", gate_grad)
    sparse.check_like("grad", grad, "x", x)
    sparse.check_modulation("gate", gate, x)
    sparse.check_batches(batch, ptr, x.shape[0], gate.shape[0])


sparse_batch_mul_add_backward.kernel(needs=sparse.needs(("x", "grad"), ("gate",)))


@sparse_batch_mul_add_backward.bad_calls
def _(device):
    x, rows = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    at = torch.tensor([0, 1, 1, 0], device=device)
    yield BadCall((x, [1.0], rows, at), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x.half(), x, rows, at), TypeError, r"grad: expected float32 like x, got float16")
    yield BadCall((x[1:], x, rows, at), ValueError, r"grad: expected the shape \[4, 8\] of x, got \[3, 8\]")
    yield from sparse.bad_batches(device, lambda error, match, *of: BadCall((x, x, rows, *of), error, match))
