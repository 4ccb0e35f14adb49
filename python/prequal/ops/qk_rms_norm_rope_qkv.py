"""Queries and keys of a packed qkv: each head normalised and turned by its token's angles. Fresh, or in place."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.constraints import Need
from prequal.registry import BadCall, Sample, op

from . import _heads as heads
from ._heads import TOLERANCE
from ._rows import FLOATS, normal, wide_of
from .rms_norm import GRADIENT_TOLERANCE


def voxels(device, tokens, side=64):
    """[N, 4] int32: two batches of voxels, in no order."""
    place = torch.randint(0, side, (tokens, 3), generator=torch.Generator().manual_seed(tokens), dtype=torch.int32)
    batch = torch.arange(tokens, dtype=torch.int32)[:, None] * 2 // max(tokens, 1)
    return torch.cat((batch, place), dim=1).to(device)


def call_samples(device, grads):
    """Calls of so many gradients [N, 3, H, D] and what follows them."""
    x = normal(device)

    def packed(*shape, dtype, of=0):
        return tuple(x(*shape, dtype=dtype, of=of + 10 * i) for i in range(grads + 1))

    def gammas(count, dim, dtype):
        return tuple((1.0 + 0.1 * x(count, dim, of=i)).to(dtype) for i in (1, 2))

    def by_coords(tokens, count, dim, *, dtype, gamma=None):
        qkv = packed(tokens, 3, count, dim, dtype=dtype)
        return (*qkv, *gammas(count, dim, gamma or dtype), None, None, voxels(device, tokens))

    def by_table(tokens, count, dim, *, dtype, gamma=None, table=torch.float32):
        turn = [t.to(table) for t in heads.voxel_angles(voxels(device, tokens), dim, 100.0, torch.float32)]
        return (*packed(tokens, 3, count, dim, dtype=dtype), *gammas(count, dim, gamma or dtype), *turn)

    yield Sample("quick", by_coords(4, 4, 64, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        for layout in ("interleaved", "half"):
            named = {"interleaved": layout == "interleaved"}
            of = f"{name} {layout}"
            # every width of one dtype, and what another one's code has of its own
            all_of_it = dtype == torch.bfloat16
            for dim in (2, 4, 6, 8, 16, 32, 48, 80, 96, 100, 128, 136, 192, 254, 256) if all_of_it else (2, 6, 64, 254):
                yield Sample(f"{of}, {dim} wide", by_coords(5, 3, dim, dtype=dtype), named)
            for dim in (2, 18, 64, 80, 128, 256) if all_of_it else (18, 128):
                yield Sample(f"{of}, {dim} wide, tables", by_table(5, 3, dim, dtype=dtype), named)
            for count in (1, 2, 5, 16, 130) if all_of_it else (5,):
                yield Sample(f"{of}, {count} heads", by_coords(7, count, 64, dtype=dtype), named)
            for tokens in (1, 2, 33, 1031) if all_of_it else (33,):
                yield Sample(f"{of}, {tokens} tokens", by_table(tokens, 6, 64, dtype=dtype), named)
            yield Sample(f"{of}, fp32 gamma", by_coords(9, 4, 64, dtype=dtype, gamma=torch.float32), named)
            yield Sample(f"{of}, fp32 gamma, odd", by_coords(9, 4, 54, dtype=dtype, gamma=torch.float32), named)
            yield Sample(f"{of}, tables of the dtype", by_table(9, 4, 64, dtype=dtype, table=dtype), named)
            yield Sample(f"{of}, tables of the dtype, odd", by_table(9, 4, 18, dtype=dtype, table=dtype), named)
            if not grads:
                exact = {**named, "exact_rounding": True}
                yield Sample(f"{of}, exact rounding", by_coords(9, 4, 64, dtype=dtype), exact)
                yield Sample(f"{of}, exact rounding, tables", by_table(9, 4, 64, dtype=dtype), exact)
                yield Sample(f"{of}, exact rounding, odd", by_table(9, 4, 30, dtype=dtype), exact)
            if layout == "half" and not all_of_it:
                continue
            args = by_coords(9, 4, 64, dtype=dtype)
            yield Sample(f"{of}, another base", args, {**named, "base": 100.0})
            yield Sample(f"{of}, large eps", args, {**named, "eps": 9.0})
            wide = tuple(t[:, :, 1:5, 8:72] for t in packed(9, 3, 6, 80, dtype=dtype))
            yield Sample(f"{of}, slices", (*wide, *args[grads + 1 :]), named)
            wide = tuple(t[:, :, :, 1:65] for t in packed(9, 3, 4, 66, dtype=dtype))
            yield Sample(f"{of}, misaligned", (*wide, *args[grads + 1 :]), named)
            turn = heads.voxel_angles(voxels(device, 9), 66, 100.0, torch.float32)
            tables = tuple(t[:, 1:] for t in turn)
            yield Sample(f"{of}, misaligned tables", (*args[: grads + 3], *tables), named)
            columns = tuple(t.mT for t in packed(9, 3, 64, 4, dtype=dtype))
            yield Sample(f"{of}, not of unit stride", (*columns, *args[grads + 1 :]), named)
            apart = (turn[0][:, :32].contiguous(), turn[1][:, 1:])
            yield Sample(f"{of}, tables of two strides", (*args[: grads + 3], *apart), named)
            every = torch.cat((args[-1], args[-1]), dim=1)[:, ::2]
            yield Sample(f"{of}, strided coordinates", (*args[:-1], every), named)
            far = voxels(device, 9, 2**24)
            yield Sample(f"{of}, coordinates of millions", (*args[:-1], far - 2**23), named)
        yield Sample(f"{name} no tokens", by_coords(0, 4, 64, dtype=dtype))
        yield Sample(f"{name} no heads", by_coords(4, 0, 64, dtype=dtype))
    yield Sample("too wide", by_coords(3, 2, 258, dtype=torch.bfloat16))
    yield Sample("float64", by_coords(3, 2, 20, dtype=torch.float64))
    if not grads:
        special = by_coords(4, 2, 16, dtype=torch.float32)
        special[0][0, 0, 0, 3], special[0][1, 1, 1, 5], special[0][2] = torch.nan, torch.inf, 0.0
        yield Sample("nan, inf and a zero token", special)


@op(samples=lambda device: call_samples(device, 0), contract=TOLERANCE)
def qk_rms_norm_rope_qkv(
    qkv: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    coords: Tensor | None = None,
    *,
    eps: float = 1e-12,
    interleaved: bool = True,
    exact_rounding: bool = False,
    base: float = 10000.0,
) -> Tensor:
    """``qkv`` with each head of q and k normalised, ``x / max(|x|, eps) * gamma * sqrt(D)``, and turned; v is copied.

    Args:
        qkv: [N, 3, H, D], floating, D even. Any strides with D contiguous.
        q_gamma: [H, D], of qkv's dtype or float32.
        k_gamma: like q_gamma.
        cos: [N, D/2], of qkv's dtype or float32: the cosine of each pair's angle, a row a token. Either tables or
            coords are given.
        sin: like cos.
        coords: [N, 4], int32: (batch, x, y, z) of each token's voxel. The first D/2/3 pairs (whole numbers) are turned
            by x, as many by y, as many by z, pair i of an axis by ``coordinate * base ** (-i / (D/2/3))``; what is left
            is not turned. The batch is not looked at. Coordinates beyond 2^24 are rounded to float32.
        eps: of the length |x|, same units as x; what is shorter counts as that long.
        interleaved: a pair is (x[2 i], x[2 i + 1]), as in the TRELLIS models, instead of (x[i], x[i + D/2]).
        exact_rounding: round the normalised value to qkv's dtype before it is turned, as the eager chain does.
        base: of the frequencies that coords are multiplied by.

    Returns:
        [N, 3, H, D], contiguous, of qkv's dtype.

    Computed in float32 (float64 for float64) from the load to one rounding at the end; with exact_rounding, two.

    This is the form to train with. Its gradient is `qk_rms_norm_rope_qkv_backward`, that of the formula, whatever
    exact_rounding; second derivatives, and the gradients of cos and sin, are those of the reference.

    Raises:
        TypeError: qkv is not a floating tensor; k_gamma is not of q_gamma's dtype, sin not of cos's; coords are not
            int32; both or neither of tables and coords are given.
        ValueError: shapes that do not fit; an odd D; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). Roundings of the eager chain that are kept: the
    last; with exact_rounding, all of its roundings to the dtype.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Su et al., RoFormer, 2021; the form of
    both as in Xiang et al., Structured 3D Latents for Scalable and Versatile 3D Generation, 2024.
    """
    wide = wide_of(qkv)
    if coords is not None:
        cos, sin = heads.voxel_angles(coords, qkv.shape[-1], base, wide)
    assert cos is not None
    assert sin is not None
    q, k, v = qkv.unbind(1)
    both = []
    for x, gamma in ((q, q_gamma), (k, k_gamma)):
        y = heads.normalised(x, gamma, eps, wide)
        if exact_rounding:
            y = y.to(qkv.dtype).to(wide)
        both.append(heads.turned(y, cos.to(wide), sin.to(wide), interleaved).to(qkv.dtype))
    return torch.stack((*both, v), dim=1)


@qk_rms_norm_rope_qkv.check
def check(qkv, q_gamma, k_gamma, cos, sin, coords, *, eps, interleaved, exact_rounding=False, base):
    for name, value in (("qkv", qkv), ("q_gamma", q_gamma), ("k_gamma", k_gamma)):
        c.is_tensor(name, value)
    for name, value in (("cos", cos), ("sin", sin)):
        if coords is None and value is None:
            raise TypeError(f"{name}: expected a torch.Tensor where coords is None, got NoneType")
        if coords is not None and value is not None:
            raise TypeError(f"{name}: expected None beside coords, got {type(value).__name__}")
        if value is not None:
            c.is_tensor(name, value)
    if coords is not None:
        c.is_tensor("coords", coords)
    c.is_number("eps", eps)
    c.is_number("base", base)
    c.is_bool("interleaved", interleaved)
    c.is_bool("exact_rounding", exact_rounding)
    c.same_device(qkv=qkv, q_gamma=q_gamma, k_gamma=k_gamma, cos=cos, sin=sin, coords=coords)
    c.is_floating("qkv", qkv)
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv: expected shape [N, 3, H, D], got {list(qkv.shape)}")
    heads.check_even("qkv", qkv)
    tokens, _, count, dim = qkv.shape
    heads.check_gammas(q_gamma, k_gamma, count, dim)
    if coords is not None:
        if coords.dtype != torch.int32:
            raise TypeError(f"coords: expected int32, got {c.short(coords.dtype)}")
        c.has_shape("coords", coords, (tokens, 4))
        return
    c.is_floating("cos", cos)
    c.has_shape("cos", cos, (tokens, dim // 2))
    c.same_shape("sin", sin, "cos", cos)
    c.same_dtype("sin", sin, "cos", cos)


def one_stride(args):
    cos, sin = args["cos"], args["sin"]
    return cos is None or cos.shape[0] <= 1 or cos.stride(0) == sin.stride(0)


TABLES = (
    c.unit_stride("cos"),
    c.unit_stride("sin"),
    Need("rows", "cos and sin of one stride from row to row", one_stride),
    c.dtype_of_or("cos", "qkv", torch.float32),
)
NEEDS = (*heads.needs("qkv"), *TABLES)
qk_rms_norm_rope_qkv.kernel(needs=NEEDS)


@qk_rms_norm_rope_qkv.backward(
    of=("qkv", "q_gamma", "k_gamma"), saves=("qkv", "q_gamma", "k_gamma", "cos", "sin", "coords")
)
def _(saved, kept, grad):
    dqkv, dq_gamma, dk_gamma = qk_rms_norm_rope_qkv_backward(
        grad,
        saved["qkv"],
        saved["q_gamma"],
        saved["k_gamma"],
        saved.get("cos"),
        saved.get("sin"),
        saved.get("coords"),
        eps=saved["eps"],
        interleaved=saved["interleaved"],
        base=saved["base"],
    )
    return {"qkv": dqkv, "q_gamma": dq_gamma, "k_gamma": dk_gamma}


def wrong(device, grads=0):
    qkv, gamma = torch.ones(3, 3, 2, 8, device=device), torch.ones(2, 8, device=device)
    table, coords = torch.ones(3, 4, device=device), torch.ones(3, 4, device=device, dtype=torch.int32)
    first = (qkv,) * grads

    def call(error, match, *args, **named):
        return BadCall((*first, *args), error, match, named)

    yield call(TypeError, r"qkv: expected a torch.Tensor, got list", [1.0], gamma, gamma, table, table)
    text = r"cos: expected a torch.Tensor where coords is None, got NoneType"
    yield call(TypeError, text, qkv, gamma, gamma)
    text = r"sin: expected a torch.Tensor where coords is None, got NoneType"
    yield call(TypeError, text, qkv, gamma, gamma, table)
    yield call(TypeError, r"cos: expected None beside coords, got Tensor", qkv, gamma, gamma, table, table, coords)
    yield call(TypeError, r"coords: expected int32, got int64", qkv, gamma, gamma, None, None, coords.long())
    yield call(TypeError, r"sin: expected float32 like cos, got float16", qkv, gamma, gamma, table, table.half())
    yield call(TypeError, r"eps: expected a float, got str", qkv, gamma, gamma, table, table, eps="small")
    yield call(TypeError, r"base: expected a float, got str", qkv, gamma, gamma, table, table, base="ten")
    yield call(TypeError, r"interleaved: expected a bool, got int", qkv, gamma, gamma, table, table, interleaved=1)
    if not grads:
        yield call(TypeError, r"qkv: expected a floating dtype, got int64", qkv.long(), gamma, gamma, table, table)
        text = r"qkv: expected shape \[N, 3, H, D\], got \[3, 2, 2, 8\]"
        yield call(ValueError, text, qkv[:, :2], gamma, gamma, table, table)
        text = r"qkv: expected an even D, got \[3, 3, 2, 7\]"
        yield call(ValueError, text, qkv[..., :7], gamma[:, :7], gamma[:, :7], table, table)
    yield call(ValueError, r"cos: expected shape \[3, 4\], got \[3, 3\]", qkv, gamma, gamma, table[:, 1:], table)
    yield call(
        ValueError, r"sin: expected the shape \[3, 4\] of cos, got \[2, 4\]", qkv, gamma, gamma, table, table[1:]
    )
    text = r"coords: expected shape \[3, 4\], got \[3, 3\]"
    yield call(ValueError, text, qkv, gamma, gamma, None, None, coords[:, 1:])
    if device.type == "cuda":
        text = r"k_gamma: expected a tensor on cuda:\d like \w+, got cpu"
        yield call(ValueError, text, qkv, gamma, gamma.cpu(), table, table)

    def of_gammas(error, match, q, k):
        q, k = (g.to(device) if isinstance(g, Tensor) else gamma if g is None else g for g in (q, k))
        return call(error, match, qkv, q, k, table, table)

    yield from heads.bad_gammas(of_gammas)


qk_rms_norm_rope_qkv.bad_calls(wrong)


@op(samples=lambda device: call_samples(device, 0), contract=TOLERANCE, mutates=("qkv",))
def qk_rms_norm_rope_qkv_inplace(
    qkv: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    coords: Tensor | None = None,
    *,
    eps: float = 1e-12,
    interleaved: bool = True,
    exact_rounding: bool = False,
    base: float = 10000.0,
) -> Tensor:
    """`qk_rms_norm_rope_qkv` in place: q and k are normalised and turned where they lie, v is not touched.

    Args:
        qkv: [N, 3, H, D], floating, D even; its q and k are written.
        q_gamma: [H, D], of qkv's dtype or float32.
        k_gamma: like q_gamma.
        cos: [N, D/2], of qkv's dtype or float32, or None beside coords, as of qk_rms_norm_rope_qkv.
        sin: like cos.
        coords: [N, 4], int32, (batch, x, y, z), or None beside tables, as of qk_rms_norm_rope_qkv.
        eps: of the length |x|, as of qk_rms_norm_rope_qkv.
        interleaved: a pair is (x[2 i], x[2 i + 1]), as of qk_rms_norm_rope_qkv.
        exact_rounding: round the normalised value, as of qk_rms_norm_rope_qkv.
        base: of the frequencies, as of qk_rms_norm_rope_qkv.

    Returns:
        qkv. No memory is allocated.

    Raises:
        TypeError, ValueError: as qk_rms_norm_rope_qkv.
        ValueError: elements of qkv share memory. Nothing is written then.
        RuntimeError: a gradient would have to be recorded: use qk_rms_norm_rope_qkv for that.

    Contract: Tolerance; all as qk_rms_norm_rope_qkv. Where gammas, tables or coordinates lie in qkv the reference
    answers, by what they were.

    Source: that of qk_rms_norm_rope_qkv.
    """
    done = qk_rms_norm_rope_qkv.op.reference(
        qkv,
        q_gamma,
        k_gamma,
        cos,
        sin,
        coords,
        eps=eps,
        interleaved=interleaved,
        exact_rounding=exact_rounding,
        base=base,
    )
    qkv[:, :2].copy_(done[:, :2])
    return qkv


@qk_rms_norm_rope_qkv_inplace.check
def _(qkv, q_gamma, k_gamma, cos, sin, coords, **named):
    check(qkv, q_gamma, k_gamma, cos, sin, coords, **named)
    c.is_apart("qkv", qkv)


@qk_rms_norm_rope_qkv_inplace.bad_calls
def _(device):
    yield from wrong(device)
    qkv, gamma = torch.ones(3, 3, 2, 8, device=device), torch.ones(2, 8, device=device)
    table = torch.ones(3, 4, device=device)
    own = r"qkv: expected a place of its own for every element, since it is written, got shared ones"
    for one in (qkv[:1], qkv[:, :1], qkv[:, :, :1], qkv[..., :1]):
        yield BadCall((one.expand(3, 3, 2, 8), gamma, gamma, table, table), ValueError, own)
    overlapping = torch.ones(128, device=device).as_strided((3, 3, 2, 8), (40, 16, 8, 1))
    yield BadCall((overlapping, gamma, gamma, table, table), ValueError, own)


qk_rms_norm_rope_qkv_inplace.kernel(needs=(*NEEDS, c.apart("qkv", read=("q_gamma", "k_gamma", "cos", "sin", "coords"))))


@op(samples=lambda device: call_samples(device, 1), contract=GRADIENT_TOLERANCE)
def qk_rms_norm_rope_qkv_backward(
    grad: Tensor,
    qkv: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    coords: Tensor | None = None,
    *,
    eps: float = 1e-12,
    interleaved: bool = True,
    base: float = 10000.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `qk_rms_norm_rope_qkv`: from that of the result to qkv's and those of the gammas.

    Args:
        grad: [N, 3, H, D], of the result, of qkv's dtype.
        qkv: [N, 3, H, D], as the forward call had it.
        q_gamma: [H, D], as the forward call had it.
        k_gamma: [H, D], as the forward call had it.
        cos: [N, D/2] or None, as the forward call had it.
        sin: [N, D/2] or None, as the forward call had it.
        coords: [N, 4] or None, as the forward call had it.
        eps: as the forward call had it.
        interleaved: as the forward call had it.
        base: as the forward call had it.

    Returns:
        dqkv: [N, 3, H, D], contiguous, of qkv's dtype: of v, grad; of q and k, with u the gradient turned back,
            ``xhat = x / |x|`` and ``gw = u * gamma * sqrt(D)``, ``(gw - xhat * sum(gw * xhat)) / |x|``. Of a head
            shorter than eps, ``gw / eps``.
        dq_gamma: [H, D], of q_gamma's dtype: the sum over all tokens of ``u * xhat * sqrt(D)``.
        dk_gamma: [H, D], of k_gamma's dtype.

    Nothing of the forward pass is kept but its arguments. Sums over tokens are taken in a fixed order, so two runs give
    the same bits.

    Raises:
        TypeError, ValueError: as qk_rms_norm_rope_qkv; grad is not like qkv.

    Contract: Tolerance (GRADIENT_TOLERANCE of rms_norm, with its arithmetic). float32 inside, one rounding of each
    result.

    Source: the derivative of the formula of qk_rms_norm_rope_qkv.
    """
    wide = wide_of(qkv)
    if coords is not None:
        cos, sin = heads.voxel_angles(coords, qkv.shape[-1], base, wide)
    assert cos is not None
    assert sin is not None
    grads, gammas = [], []
    for part, gamma in ((0, q_gamma), (1, k_gamma)):
        u = heads.turned(grad[:, part].to(wide), cos.to(wide), -sin.to(wide), interleaved)
        dx, dgamma = heads.normalised_gradient(u, qkv[:, part], gamma, eps, wide)
        grads.append(dx.to(qkv.dtype))
        gammas.append(dgamma.to(gamma.dtype))
    return torch.stack((*grads, grad[:, 2]), dim=1), gammas[0], gammas[1]


@qk_rms_norm_rope_qkv_backward.check
def _(grad, qkv, q_gamma, k_gamma, cos, sin, coords, *, eps, interleaved, base):
    c.is_tensor("grad", grad)
    check(qkv, q_gamma, k_gamma, cos, sin, coords, eps=eps, interleaved=interleaved, base=base)
    c.same_device(grad=grad, qkv=qkv)
    c.same_shape("grad", grad, "qkv", qkv)
    c.same_dtype("grad", grad, "qkv", qkv)


qk_rms_norm_rope_qkv_backward.kernel(needs=(*heads.needs("qkv", "grad"), *TABLES))


@qk_rms_norm_rope_qkv_backward.bad_calls
def _(device):
    yield from wrong(device, grads=1)
    qkv, gamma = torch.ones(3, 3, 2, 8, device=device), torch.ones(2, 8, device=device)
    turn = (torch.ones(3, 4, device=device),) * 2
    yield BadCall((qkv.half(), qkv, gamma, gamma, *turn), TypeError, r"grad: expected float32 like qkv, got float16")
    text = r"grad: expected the shape \[3, 3, 2, 8\] of qkv, got \[2, 3, 2, 8\]"
    yield BadCall((qkv[1:], qkv, gamma, gamma, *turn), ValueError, text)
