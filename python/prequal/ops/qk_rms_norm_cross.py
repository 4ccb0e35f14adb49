"""Queries and the keys of a packed kv, as cross-attention has them: each head normalised. Fresh, or in place."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.registry import BadCall, Sample, op

from . import _heads as heads
from ._heads import PLAIN_TOLERANCE
from ._rows import FLOATS, normal, wide_of
from .rms_norm import GRADIENT_TOLERANCE


def call_samples(device, gradient):
    x = normal(device)

    def call(tokens, context, count, dim, *, dtype, gamma=None):
        gammas = ((1.0 + 0.1 * x(count, dim, of=i)).to(gamma or dtype) for i in (1, 2))
        pair = [
            (x(tokens, count, dim, dtype=dtype, of=i), x(context, 2, count, dim, dtype=dtype, of=i)) for i in (3, 4)
        ]
        return (*(pair[1] if gradient else ()), *pair[0], *gammas)

    behind = 4 if gradient else 2
    yield Sample("quick", call(5, 3, 2, 64, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        # every width of one dtype, and what another one's code has of its own
        all_of_it = dtype == torch.bfloat16
        for dim in (2, 6, 8, 16, 30, 64, 80, 100, 128, 136, 254, 256) if all_of_it else (6, 64, 256):
            yield Sample(f"{name} {dim} wide", call(5, 7, 3, dim, dtype=dtype))
        for count in (1, 5, 16, 31, 130) if all_of_it else (5,):
            yield Sample(f"{name} {count} heads", call(9, 4, count, 64, dtype=dtype))
        for tokens, context in ((1, 33), (33, 1), (1031, 64), (64, 1031)) if all_of_it else ((33, 1),):
            yield Sample(f"{name} {tokens} tokens, {context} of context", call(tokens, context, 4, 32, dtype=dtype))
        yield Sample(f"{name} fp32 gamma", call(9, 4, 4, 64, dtype=dtype, gamma=torch.float32))
        yield Sample(f"{name} fp32 gamma, odd", call(9, 4, 4, 54, dtype=dtype, gamma=torch.float32))
        args = call(9, 4, 4, 64, dtype=dtype)
        yield Sample(f"{name} large eps", (*args, 9.0))
        for what, first in (("slices", 8), ("misaligned", 1)):
            wide = call(9, 4, 4, 80, dtype=dtype)[:behind]
            yield Sample(f"{name} {what}", (*(t[..., first : first + 64] for t in wide), *args[behind:]))
        turned = (t.mT for t in call(9, 4, 4, 4, dtype=dtype)[:behind])
        yield Sample(f"{name} not of unit stride", (*turned, *call(1, 1, 4, 4, dtype=dtype)[behind:]))
        yield Sample(f"{name} no tokens", call(0, 5, 4, 64, dtype=dtype))
        yield Sample(f"{name} no context", call(5, 0, 4, 64, dtype=dtype))
        yield Sample(f"{name} no heads", call(5, 5, 0, 64, dtype=dtype))
    yield Sample("float64", call(3, 4, 2, 20, dtype=torch.float64))


@op(samples=lambda device: call_samples(device, False), contract=PLAIN_TOLERANCE)
def qk_rms_norm_cross(
    q: Tensor, kv: Tensor, q_gamma: Tensor, k_gamma: Tensor, eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Each head of q, and of the k of kv, becomes ``x / max(|x|, eps) * gamma * sqrt(D)``; v is copied.

    Args:
        q: [N, H, D], floating, D even. Any strides with D contiguous.
        kv: [L, 2, H, D], of q's dtype; the keys and values of the context.
        q_gamma: [H, D], of q's dtype or float32.
        k_gamma: like q_gamma.
        eps: of the length |x|, same units as x; what is shorter counts as that long.

    Returns:
        q: [N, H, D], contiguous, of q's dtype.
        kv: [L, 2, H, D], contiguous, of q's dtype.

    Computed in float32 (float64 for float64) from the load to one rounding at the end, as the eager chain does.

    This is the form to train with. Its gradient is `qk_rms_norm_cross_backward`; second derivatives are those of its
    reference.

    Raises:
        TypeError: q is not a floating tensor; kv is not of its dtype, k_gamma not of q_gamma's.
        ValueError: shapes that do not fit; an odd D; two devices.

    Contract: Tolerance (PLAIN_TOLERANCE in the source, with its arithmetic).

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; the form as in Xiang et al., Structured 3D
    Latents for Scalable and Versatile 3D Generation, 2024.
    """
    wide = wide_of(q)
    new_q = heads.normalised(q, q_gamma, eps, wide).to(q.dtype).contiguous()
    new_k = heads.normalised(kv[:, 0], k_gamma, eps, wide).to(q.dtype)
    return new_q, torch.stack((new_k, kv[:, 1]), dim=1)


@qk_rms_norm_cross.check
def check(q, kv, q_gamma, k_gamma, eps):
    for name, value in (("q", q), ("kv", kv), ("q_gamma", q_gamma), ("k_gamma", k_gamma)):
        c.is_tensor(name, value)
    c.is_number("eps", eps)
    c.same_device(q=q, kv=kv, q_gamma=q_gamma, k_gamma=k_gamma)
    c.is_floating("q", q)
    if q.dim() != 3:
        raise ValueError(f"q: expected shape [N, H, D], got {list(q.shape)}")
    heads.check_even("q", q)
    _, count, dim = q.shape
    c.has_shape("kv", kv, ("L", 2, count, dim))
    c.same_dtype("kv", kv, "q", q)
    heads.check_gammas(q_gamma, k_gamma, count, dim)


NEEDS = heads.needs("q", "kv")
qk_rms_norm_cross.kernel(needs=NEEDS)


@qk_rms_norm_cross.backward
def _(saved, kept, grad_q, grad_kv):
    names = ("q", "kv", "q_gamma", "k_gamma")
    found = qk_rms_norm_cross_backward(grad_q, grad_kv, *(saved[name] for name in names), saved["eps"])
    return dict(zip(names, found, strict=True))


def wrong(device, gradient=False):
    q, kv = torch.ones(3, 2, 8, device=device), torch.ones(5, 2, 2, 8, device=device)
    gamma = torch.ones(2, 8, device=device)
    first = (q, kv) if gradient else ()

    def call(error, match, *args):
        return BadCall((*first, *args), error, match)

    yield call(TypeError, r"q: expected a torch.Tensor, got list", [1.0], kv, gamma, gamma)
    yield call(TypeError, r"kv: expected a torch.Tensor, got int", q, 3, gamma, gamma)
    yield call(TypeError, r"kv: expected float32 like q, got float16", q, kv.half(), gamma, gamma)
    yield call(TypeError, r"eps: expected a float, got str", q, kv, gamma, gamma, "small")
    yield call(ValueError, r"q: expected shape \[N, H, D\], got \[2, 8\]", q[0], kv, gamma, gamma)
    yield call(ValueError, r"kv: expected shape \[L, 2, 2, 8\], got \[5, 2, 1, 8\]", q, kv[:, :, :1], gamma, gamma)
    text = r"q: expected an even D, got \[3, 2, 7\]"
    yield call(ValueError, text, q[..., :7], kv[..., :7], gamma[:, :7], gamma[:, :7])
    if device.type == "cuda":
        yield call(ValueError, r"kv: expected a tensor on cuda:\d like \w+, got cpu", q, kv.cpu(), gamma, gamma)

    def of_gammas(error, match, *given):
        these = (g.to(device) if isinstance(g, Tensor) else gamma if g is None else g for g in given)
        return call(error, match, q, kv, *these)

    yield from heads.bad_gammas(of_gammas)


qk_rms_norm_cross.bad_calls(wrong)


@op(samples=lambda device: call_samples(device, False), contract=PLAIN_TOLERANCE, mutates=("q", "kv"))
def qk_rms_norm_cross_inplace(q: Tensor, kv: Tensor, q_gamma: Tensor, k_gamma: Tensor, eps: float = 1e-12) -> None:
    """`qk_rms_norm_cross` in place: q, and the k of kv, are normalised where they lie; v is not touched.

    Args:
        q: [N, H, D], floating, D even; is written.
        kv: [L, 2, H, D], of q's dtype; its k is written.
        q_gamma: [H, D], of q's dtype or float32.
        k_gamma: like q_gamma.
        eps: of the length |x|, as of qk_rms_norm_cross.

    Returns:
        None: the results are in q and kv. No memory is allocated.

    Raises:
        TypeError, ValueError: as qk_rms_norm_cross.
        ValueError: q and kv share memory, or elements of one of them do. Nothing is written then.
        RuntimeError: a gradient would have to be recorded: use qk_rms_norm_cross for that.

    Contract: Tolerance; all as qk_rms_norm_cross. Where a gamma lies in q or kv the reference answers, by what it was.

    Source: that of qk_rms_norm_cross.
    """
    new_q, new_kv = qk_rms_norm_cross.op.reference(q, kv, q_gamma, k_gamma, eps)
    q.copy_(new_q)
    kv[:, 0].copy_(new_kv[:, 0])


@qk_rms_norm_cross_inplace.check
def _(q, kv, q_gamma, k_gamma, eps):
    check(q, kv, q_gamma, k_gamma, eps)
    c.is_apart("q", q)
    c.is_apart("kv", kv)
    c.are_apart("kv", kv, "q", q)


@qk_rms_norm_cross_inplace.bad_calls
def _(device):
    yield from wrong(device)
    qkv, gamma = torch.ones(5, 3, 2, 8, device=device), torch.ones(2, 8, device=device)
    q, kv = qkv[:, 0], qkv[:, 1:]
    shared = r"kv: expected memory apart from that of q, which is written, got shared memory"
    yield BadCall((kv[:, 0], kv, gamma, gamma), ValueError, shared)
    yield BadCall((kv[:, 1], kv, gamma, gamma), ValueError, shared)
    yield BadCall((kv[1:, 0], kv[:2], gamma, gamma), ValueError, shared)
    for one in (kv[:1].expand(3, 2, 2, 8), kv[:, :1].expand(5, 2, 2, 8)):
        yield BadCall(
            (q, one, gamma, gamma), ValueError, r"kv: expected a place of its own for every element, .* shared"
        )
    one = q[:, :1].expand(5, 2, 8)
    yield BadCall((one, kv, gamma, gamma), ValueError, r"q: expected a place of its own for every element, .* shared")


qk_rms_norm_cross_inplace.kernel(needs=(*NEEDS, c.apart("q", "kv", read=("q_gamma", "k_gamma"))))


@op(samples=lambda device: call_samples(device, True), contract=GRADIENT_TOLERANCE)
def qk_rms_norm_cross_backward(
    grad_q: Tensor, grad_kv: Tensor, q: Tensor, kv: Tensor, q_gamma: Tensor, k_gamma: Tensor, eps: float = 1e-12
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of `qk_rms_norm_cross`: from those of its results to those of its arguments.

    Args:
        grad_q: [N, H, D], of the first result, of q's dtype.
        grad_kv: [L, 2, H, D], of the second result, of q's dtype.
        q: [N, H, D], as the forward call had it.
        kv: [L, 2, H, D], as the forward call had it.
        q_gamma: [H, D], as the forward call had it.
        k_gamma: [H, D], as the forward call had it.
        eps: as the forward call had it.

    Returns:
        dq: [N, H, D], contiguous, of q's dtype: with ``xhat = x / |x|`` and ``gw = grad * gamma * sqrt(D)``,
            ``(gw - xhat * sum(gw * xhat)) / |x|``; of a head shorter than eps, ``gw / eps``.
        dkv: [L, 2, H, D], contiguous, of q's dtype: of k likewise, of v the gradient as it comes.
        dq_gamma: [H, D], of q_gamma's dtype: the sum over all tokens of ``grad * xhat * sqrt(D)``.
        dk_gamma: [H, D], of k_gamma's dtype.

    Sums over tokens are taken in a fixed order, so two runs give the same bits.

    Raises:
        TypeError, ValueError: as qk_rms_norm_cross; grad_q is not like q, or grad_kv not like kv.

    Contract: Tolerance (GRADIENT_TOLERANCE of rms_norm, with its arithmetic). float32 inside, one rounding of each
    result.

    Source: the derivative of the formula of qk_rms_norm_cross.
    """
    wide = wide_of(q)
    dq, dq_gamma = heads.normalised_gradient(grad_q, q, q_gamma, eps, wide)
    dk, dk_gamma = heads.normalised_gradient(grad_kv[:, 0], kv[:, 0], k_gamma, eps, wide)
    dkv = torch.stack((dk.to(q.dtype), grad_kv[:, 1]), dim=1)
    return dq.to(q.dtype).contiguous(), dkv, dq_gamma.to(q_gamma.dtype), dk_gamma.to(k_gamma.dtype)


@qk_rms_norm_cross_backward.check
def _(grad_q, grad_kv, q, kv, q_gamma, k_gamma, eps):
    c.is_tensor("grad_q", grad_q)
    c.is_tensor("grad_kv", grad_kv)
    check(q, kv, q_gamma, k_gamma, eps)
    c.same_device(grad_q=grad_q, grad_kv=grad_kv, q=q)
    for name, grad, other, x in (("grad_q", grad_q, "q", q), ("grad_kv", grad_kv, "kv", kv)):
        c.same_shape(name, grad, other, x)
        c.same_dtype(name, grad, other, x)


qk_rms_norm_cross_backward.kernel(needs=heads.needs("q", "grad_q", "grad_kv", "kv"))


@qk_rms_norm_cross_backward.bad_calls
def _(device):
    q, kv = torch.ones(3, 2, 8, device=device), torch.ones(5, 2, 2, 8, device=device)
    gamma = torch.ones(2, 8, device=device)
    for call in wrong(device, gradient=True):
        if "kv: expected a tensor" not in call.match and "even" not in call.match and "N, H, D" not in call.match:
            yield call
    text = r"grad_q: expected the shape \[3, 2, 8\] of q, got \[2, 2, 8\]"
    yield BadCall((q[1:], kv, q, kv, gamma, gamma), ValueError, text)
    text = r"grad_kv: expected float32 like kv, got float16"
    yield BadCall((q, kv.half(), q, kv, gamma, gamma), TypeError, text)
