"""Rotary position embedding of queries and keys, fresh or in place; its gradient is the inverse rotation."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal, wide_of


def tables(device, rows, columns, dtype=torch.float32, base=10000.0):
    """cos and sin [rows, columns] of the usual frequencies."""
    frequency = base ** (-torch.arange(columns, dtype=torch.float64) / max(columns, 1))
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def doubled(*pair):
    """The tables of Hugging Face, [rows, 2 columns]."""
    return tuple(torch.cat((table, table), dim=-1) for table in pair)


def samples(device):
    x = normal(device)

    def heads(*shape, q=4, k=2, dim=64, dtype=torch.float32):
        return x(*shape, q, dim, dtype=dtype), x(*shape, k, dim, dtype=dtype, of=1)

    def call(*shape, dtype, table=None, **of):
        qk = heads(*shape, dtype=dtype, **of)
        return (*qk, *tables(device, shape[-1] + 3, qk[0].shape[-1] // 2, table or torch.float32))

    yield Sample("quick", call(7, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        for layout, named in (("half", {}), ("interleaved", {"interleaved": True})):
            of = f"{name} {layout}"
            yield Sample(f"{of}, batch", call(2, 5, dtype=dtype, q=8, k=2, dim=128), named)
            yield Sample(f"{of}, tables of the dtype", call(5, dtype=dtype, table=dtype), named)
            for other in (torch.float16, torch.float64):
                yield Sample(f"{of}, {c.short(other)} tables", call(5, dtype=dtype, table=other), named)
            exact = {**named, "exact_rounding": True}
            yield Sample(f"{of}, exact rounding", call(5, dtype=dtype, table=dtype), exact)
            yield Sample(f"{of}, exact rounding, fp32 tables", call(5, dtype=dtype), exact)
            yield Sample(f"{of}, inverse", call(5, dtype=dtype), {**named, "inverse": True})
            q, k = heads(5, dtype=dtype)
            yield Sample(f"{of}, doubled tables", (q, k, *doubled(*tables(device, 5, 32))), named)
            part = {**named, "rotary_dim": 32}
            yield Sample(f"{of}, partial", (q, k, *tables(device, 5, 16)), part)
            yield Sample(f"{of}, partial, odd", (q, k, *tables(device, 5, 5)), {**named, "rotary_dim": 10})
            yield Sample(f"{of}, nothing rotated", (q, k, *tables(device, 5, 0)), {**named, "rotary_dim": 0})
            for dim in (2, 6, 80, 96, 100, 256):
                yield Sample(f"{of}, {dim} wide", call(3, dtype=dtype, dim=dim, q=3, k=1), named)
            where = torch.tensor([3, 0, 7, 7, 4], device=device)
            yield Sample(f"{of}, positions", (q, k, *tables(device, 8, 32), where), named)
            yield Sample(f"{of}, int32 positions", (q, k, *tables(device, 8, 32), where.int()), named)
            outside = torch.tensor([3, -1, 8, 7, 2**40], device=device)
            yield Sample(f"{of}, positions outside", (q, k, *tables(device, 8, 32), outside), named)
            two = heads(2, 5, dtype=dtype)
            each = torch.stack((where, where.flip(0)))
            yield Sample(f"{of}, positions of a batch", (*two, *tables(device, 8, 32), each), named)
            yield Sample(f"{of}, positions for a batch", (*two, *tables(device, 8, 32), where), named)
            yield Sample(f"{of}, position_ids for a batch", (*two, *tables(device, 8, 32), where[None]), named)
            packed = x(6, 4 + 2 + 2, 64, dtype=dtype)
            yield Sample(f"{of}, packed qkv", (packed[:, :4], packed[:, 4:6], *tables(device, 6, 32)), named)
            packed = x(2, 6, 4 * 64 + 2 * 2 * 64, dtype=dtype)
            q, k = packed[..., :256].unflatten(-1, (4, 64)), packed[..., 256:384].unflatten(-1, (2, 64))
            yield Sample(f"{of}, packed qkv of a batch", (q, k, *tables(device, 6, 32)), named)
            q, k = x(2, 4, 6, 64, dtype=dtype), x(2, 2, 6, 64, dtype=dtype)
            heads_first = (q.transpose(1, 2), k.transpose(1, 2))
            yield Sample(f"{of}, heads first", (*heads_first, *tables(device, 6, 32)), named)
            q, k = x(5, 4, 65, dtype=dtype)[..., 1:], x(5, 2, 65, dtype=dtype, of=1)[..., 1:]
            yield Sample(f"{of}, misaligned", (q, k, *tables(device, 5, 32)), named)
            q, k = heads(5, dtype=dtype)
            cos, sin = tables(device, 5, 33)
            yield Sample(f"{of}, misaligned tables", (q, k, cos[:, 1:], sin[:, 1:]), named)
        yield Sample(f"{name} no tokens", call(0, dtype=dtype))
        yield Sample(f"{name} no keys", call(3, dtype=dtype, k=0))
        yield Sample(f"{name} many heads", call(3, dtype=dtype, q=96, k=8, dim=128))
        columns = x(5, 64, 4, dtype=dtype).mT, x(5, 64, 2, dtype=dtype).mT
        yield Sample(f"{name} not of unit stride", (*columns, *tables(device, 5, 32)))
    yield Sample("float64", call(3, dtype=torch.float64))


# Both paths compute ``x1 cos - x2 sin`` in fp32, the kernel with one rounding fewer (a fused multiply-add): 2^-23 of
# the larger product, an absolute error, since the difference may cancel: 1e-6 at values of a few. Then one rounding: 1
# ulp of a half. With exact_rounding both paths round alike, and have the same bits.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-6, 2e-6),
        torch.bfloat16: (2.0**-7, 2e-6),
        torch.float16: (2.0**-10, 2e-6),
        torch.float64: (1e-14, 1e-14),
    }
)


def rotated(x, cos, sin, rotary, interleaved, rounding):
    """[..., H, D], [..., 1, R/2] to [..., H, D], in the dtype that rows are computed in."""
    wide = x.to(cos.dtype)
    rest = wide[..., rotary:]
    if interleaved:
        first, second = wide[..., 0:rotary:2], wide[..., 1:rotary:2]
    else:
        first, second = wide[..., : rotary // 2], wide[..., rotary // 2 : rotary]
    one = rounding(first * cos) - rounding(second * sin)
    two = rounding(second * cos) + rounding(first * sin)
    turned = torch.stack((one, two), dim=-1).flatten(-2) if interleaved else torch.cat((one, two), dim=-1)
    return torch.cat((turned, rest), dim=-1).to(x.dtype).contiguous()


@op(samples=samples, contract=TOLERANCE)
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inverse: bool = False,
    exact_rounding: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding: each pair of a head is turned by its token's angle.

    Args:
        q: [tokens, heads, D] or [batch, tokens, heads, D], floating. Any strides with D contiguous: views of a packed
            qkv, or of heads-first [batch, heads, tokens, D] by ``transpose(1, 2)``, are read where they lie.
        k: like q, with its own number of heads.
        cos: [rows, rotary_dim / 2], floating: the cosine of each pair's angle, a row a position. The kernel takes q's
            dtype and float32; of another the reference answers.
            [rows, rotary_dim] is taken, too: the doubled table of Hugging Face, ``cat((half, half))``; its first half
            is read. A table that repeats each column in turn, as models of the interleaved layout have it, is another:
            give its ``[:, ::2]``.
        sin: like cos.
        positions: the row of the tables for each token, int32 or int64: [tokens] or [1, tokens] for every batch, as
            transformers' position_ids, or [batch, tokens]; for q without a batch, [tokens]. None: a token's own number
            in its sequence.
        interleaved: a pair is (x[2 i], x[2 i + 1]), as in GPT-J, instead of (x[i], x[i + rotary_dim / 2]), as in
            GPT-NeoX and Llama.
        rotary_dim: how much of each head is rotated, from its start; the rest is copied. None: all of it.
        inverse: turn back.
        exact_rounding: round each product to q's dtype before the sum, as the eager chain does where the tables are of
            q's dtype. (With float32 tables the eager chain rounds once, as the default here does.)

    Returns:
        (q, k) rotated: of their shapes and dtype, contiguous. ``(x1, x2)`` becomes
        ``(x1 cos - x2 sin, x2 cos + x1 sin)``. Where a position is outside of the tables the rotated part is NaN, and
        nothing outside is read.

    The gradients of q and k are the inverse rotation of theirs; cos and sin have gradients, too, by the reference.

    Raises:
        TypeError: q or cos is not a floating tensor; k is not of q's dtype, or sin not of cos's; positions are no
            integers.
        ValueError: shapes that do not fit; an odd rotary_dim; without positions, fewer rows than tokens; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic). Roundings of the eager chain that are kept: the
    last; with exact_rounding, all.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    wide = wide_of(q)
    rotary = q.shape[-1] if rotary_dim is None else rotary_dim
    cos_rows, sin_rows = (table[:, : rotary // 2].to(wide) for table in (cos, sin))
    if positions is None:
        tokens = q.shape[-3]
        cos_rows, sin_rows = cos_rows[:tokens], sin_rows[:tokens]
    elif len(cos) == 0:
        cos_rows = sin_rows = cos_rows.new_full((*positions.shape, rotary // 2), torch.nan)
    else:
        outside = ((positions < 0) | (positions >= len(cos)))[..., None]
        rows = positions.clamp(0, len(cos) - 1).long()
        cos_rows, sin_rows = (table[rows].masked_fill(outside, torch.nan) for table in (cos_rows, sin_rows))
    cos_rows, sin_rows = cos_rows.unsqueeze(-2), sin_rows.unsqueeze(-2)
    if inverse:
        sin_rows = -sin_rows

    def rounding(product: Tensor) -> Tensor:
        return product.to(q.dtype).to(wide) if exact_rounding and cos.dtype == q.dtype else product

    turned_q = rotated(q, cos_rows, sin_rows, rotary, interleaved, rounding)
    return turned_q, rotated(k, cos_rows, sin_rows, rotary, interleaved, rounding)


@rope.check
def check(q, k, cos, sin, positions, *, interleaved, rotary_dim, inverse, exact_rounding):
    for name, value in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        c.is_tensor(name, value)
    if positions is not None:
        c.is_tensor("positions", positions)
    for name, value in (("interleaved", interleaved), ("inverse", inverse), ("exact_rounding", exact_rounding)):
        c.is_bool(name, value)
    c.same_device(q=q, k=k, cos=cos, sin=sin, positions=positions)
    if q.dim() not in (3, 4):
        raise ValueError(f"q: expected shape [tokens, heads, D] or [batch, tokens, heads, D], got {list(q.shape)}")
    c.is_floating("q", q)
    if k.dim() != q.dim():
        raise ValueError(f"k: expected {q.dim()} dimensions like q, got {list(k.shape)}")
    if k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected the shape of q but for the heads, {list(q.shape)}, got {list(k.shape)}")
    c.same_dtype("k", k, "q", q)
    rotary = q.shape[-1]
    if rotary_dim is not None:
        if isinstance(rotary_dim, bool) or not hasattr(type(rotary_dim), "__index__"):
            raise TypeError(f"rotary_dim: expected an int, got {type(rotary_dim).__name__}")
        rotary = rotary_dim
    if not 0 <= rotary <= q.shape[-1] or rotary % 2:
        raise ValueError(f"rotary_dim: expected an even number from 0 to {q.shape[-1]}, got {rotary}")
    c.is_floating("cos", cos)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2 or table.shape[1] not in (rotary // 2, rotary):
            wanted = f"shape [rows, {rotary // 2}] or [rows, {rotary}]"
            raise ValueError(f"{name}: expected {wanted}, got {list(table.shape)}")
    c.same_dtype("sin", sin, "cos", cos)
    c.same_shape("sin", sin, "cos", cos)
    tokens = q.shape[-3]
    if positions is None:
        if cos.shape[0] < tokens:
            raise ValueError(f"cos: expected at least {tokens} rows, one a token, got {list(cos.shape)}")
        return
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions: expected int32 or int64, got {c.short(positions.dtype)}")
    batches = () if q.dim() == 3 else (1, q.shape[0])
    if list(positions.shape) not in ([tokens], *([n, tokens] for n in batches)):
        wanted = f"[{tokens}]" + (f", [1, {tokens}] or [{q.shape[0]}, {tokens}]" if batches else "")
        raise ValueError(f"positions: expected shape {wanted}, got {list(positions.shape)}")


NEEDS = (
    c.at_most("q", -1, 2048),
    c.at_most("q", -2, 65536),
    c.at_most("k", -2, 65536),
    c.dtype_in("q", *FLOATS),
    c.unit_stride("cos"),
    c.dtype_of_or("cos", "q", torch.float32),
    c.unit_stride("sin"),
    c.unit_stride("q"),
    c.unit_stride("k"),
)
rope.kernel(needs=NEEDS)


@rope.backward(of=("q", "k"), saves=("cos", "sin", "positions"))
def _(saved, kept, grad_q, grad_k):
    dq, dk = rope(
        grad_q,
        grad_k,
        saved["cos"],
        saved["sin"],
        saved["positions"],
        interleaved=saved["interleaved"],
        rotary_dim=saved["rotary_dim"],
        inverse=not saved["inverse"],
    )
    return {"q": dq, "k": dk}


@rope.bad_calls
def bad_calls(device):
    q, k = torch.ones(3, 4, 8, device=device), torch.ones(3, 2, 8, device=device)
    cos, sin = torch.ones(5, 4, device=device), torch.ones(5, 4, device=device)
    yield BadCall(([1.0], k, cos, sin), TypeError, r"q: expected a torch.Tensor, got list")
    yield BadCall((q, k, cos, sin, 3), TypeError, r"positions: expected a torch.Tensor, got int")
    yield BadCall((q.long(), k.long(), cos, sin), TypeError, r"q: expected a floating dtype, got int64")
    yield BadCall((q[0], k[0], cos, sin), ValueError, r"q: expected shape \[tokens, heads, D\] or .*, got \[4, 8\]")
    yield BadCall((q, k[None], cos, sin), ValueError, r"k: expected 3 dimensions like q, got \[1, 3, 2, 8\]")
    yield BadCall((q, k[1:], cos, sin), ValueError, r"k: expected the shape of q but for the heads, \[3, 4, 8\], got")
    yield BadCall((q, k.half(), cos, sin), TypeError, r"k: expected float32 like q, got float16")
    yield BadCall((q[..., :7], k[..., :7], cos, sin), ValueError, r"rotary_dim: expected an even number from 0 to 7")
    yield BadCall((q, k, cos[:, :3], sin), ValueError, r"cos: expected shape \[rows, 4\] or \[rows, 8\], got \[5, 3\]")
    yield BadCall((q, k, cos, sin[:4]), ValueError, r"sin: expected the shape \[5, 4\] of cos, got \[4, 4\]")
    yield BadCall((q, k, cos, sin.half()), TypeError, r"sin: expected float32 like cos, got float16")
    yield BadCall((q, k, cos[:2], sin[:2]), ValueError, r"cos: expected at least 3 rows, one a token, got \[2, 4\]")
    where = torch.zeros(3, device=device)
    yield BadCall((q, k, cos, sin, where), TypeError, r"positions: expected int32 or int64, got float32")
    yield BadCall((q, k, cos, sin, where.int()[1:]), ValueError, r"positions: expected shape \[3\], got \[2\]")
    yield BadCall((q, k, cos, sin, where.int()[None]), ValueError, r"positions: expected shape \[3\], got \[1, 3\]")
    three, each = (torch.ones(3, 3, n, 8, device=device) for n in (4, 2)), torch.zeros(2, 3, device=device).int()
    wanted = r"positions: expected shape \[3\], \[1, 3\] or \[3, 3\], got \[2, 3\]"
    yield BadCall((*three, cos, sin, each), ValueError, wanted)
    if device.type == "cuda":
        yield BadCall((q, k, cos.cpu(), sin), ValueError, r"cos: expected a tensor on cuda:\d like q, got cpu")


@op(samples=samples, contract=TOLERANCE, mutates=("q", "k"))
def rope_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inverse: bool = False,
    exact_rounding: bool = False,
) -> None:
    """`rope` in place: q and k are rotated where they lie, as in the views of a packed qkv.

    Args:
        q: [tokens, heads, D] or [batch, tokens, heads, D], floating; is rotated.
        k: like q, with its own number of heads; is rotated.
        cos: [rows, rotary_dim / 2], or doubled, as of rope.
        sin: like cos.
        positions: [tokens], [1, tokens] or [batch, tokens], int32 or int64, or None, as of rope.
        interleaved: a pair is (x[2 i], x[2 i + 1]), as of rope.
        rotary_dim: how much of each head is rotated; the rest is not touched.
        inverse: turn back.
        exact_rounding: round each product, as of rope.

    Returns:
        None: the results are in q and k. No memory is allocated.

    Raises:
        TypeError, ValueError: as rope.
        ValueError: q and k share memory, or elements of one of them do. Nothing is written then.
        RuntimeError: a gradient would have to be recorded: use rope for that.

    Contract: Tolerance; all as rope. Where tables or positions lie in q or k the reference answers, by what they were.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    turned_q, turned_k = rope.op.reference(
        q,
        k,
        cos,
        sin,
        positions,
        interleaved=interleaved,
        rotary_dim=rotary_dim,
        inverse=inverse,
        exact_rounding=exact_rounding,
    )
    q.copy_(turned_q)
    k.copy_(turned_k)


@rope_.check
def _(q, k, cos, sin, positions, **named):
    check(q, k, cos, sin, positions, **named)
    c.is_apart("q", q)
    c.is_apart("k", k)
    c.are_apart("k", k, "q", q)


@rope_.bad_calls
def _(device):
    yield from bad_calls(device)
    qkv = torch.ones(3, 8, 8, device=device)
    tables = torch.ones(5, 4, device=device), torch.ones(5, 4, device=device)
    shared = r"k: expected memory apart from that of q, which is written, got shared memory"
    yield BadCall((qkv, qkv, *tables), ValueError, shared)
    yield BadCall((qkv[:, :4], qkv[:, 3:], *tables), ValueError, shared)
    one = qkv[:, :1].expand(3, 4, 8)
    yield BadCall(
        (qkv[:, 1:], one, *tables), ValueError, r"k: expected a place of its own for every element, .* shared"
    )
    yield BadCall(
        (one, qkv[:, 1:], *tables), ValueError, r"q: expected a place of its own for every element, .* shared"
    )


rope_.kernel(needs=[*NEEDS, c.apart("q", "k", read=("cos", "sin", "positions"))])
