"""Tokens in the order of their experts: each expert's rows lie together, so that one grouped product takes them all."""

import torch
import torch.nn.functional as F
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Exact
from prequal.registry import BadCall, Sample, op

from ._moe import INTEGERS, MOST_CHOSEN, counts_of, fits_int32, is_choice, spread_choice
from ._rows import FLOATS, normal
from .moe_route import MOST_EXPERTS
from .moe_unpermute import moe_unpermute


def samples(device):
    x = normal(device)

    def call(tokens, k, experts, width, dtype=torch.float32):
        chosen = spread_choice(device, tokens, k, experts)
        return x(tokens, width, dtype=dtype), chosen, counts_of(chosen, experts)

    yield Sample("quick", call(23, 4, 16, 64, torch.bfloat16))
    for tokens, k, experts, width in (
        *((1, 1, 1, 1), (3, 2, 2, 8), (97, 2, 8, 129), (31, 6, 64, 72), (1031, 8, 256, 16), (2500, 2, 8, 24)),
        *((17, 32, 33, 40), (5, 3, 1024, 2048), (4, 8, 160, 4100), (129, 1, 5, 3), (50, 5, 1021, 7)),
    ):
        yield Sample(f"{tokens} x {k} of {experts}, {width} wide", call(tokens, k, experts, width))
    for dtype in FLOATS:
        name = c.short(dtype)
        for width in (1, 2, 63, 64, 1030, 4096):
            yield Sample(f"{name} {width} wide", call(37, 3, 11, width, dtype))
        wide, chosen, counts = call(40, 4, 12, 80, dtype)
        yield Sample(f"{name} slices", (wide[::2, 8:72], chosen[::2], counts))
        yield Sample(f"{name} misaligned", (wide[:, 1:65], chosen, counts))
        yield Sample(f"{name} one row for all", (wide[:1].expand(40, 80), chosen, counts))
        yield Sample(f"{name} transposed", (x(80, 40, dtype=dtype).t(), chosen, counts))
    rows, chosen, counts = call(61, 4, 16, 48)
    yield Sample("int64", (rows, chosen.long(), counts.long()))
    yield Sample("a transposed choice", (rows, chosen.t().contiguous().t(), counts))
    yield Sample("every second choice", (rows, chosen[:, ::2], counts))
    dropped = chosen.clone()
    dropped[::3] = -1
    dropped[1, :2] = 16
    yield Sample("dropped", (rows, dropped, counts))
    yield Sample("all dropped", (rows, torch.full_like(chosen, -1), counts))
    yield Sample("one expert twice", (rows, chosen % 3, counts))
    for capacity in (0, 1, 7, 1000):
        yield Sample(f"capacity {capacity}", (rows, chosen, counts), {"capacity": capacity})
    yield Sample("dropped, capacity 5", (rows, dropped, counts), {"capacity": 5})
    many = call(5000, 4, 8, 8)
    yield Sample("many tokens, capacity 999", many, {"capacity": 999})
    yield Sample("no tokens", call(0, 4, 16, 48))
    yield Sample("no columns", call(7, 4, 16, 0))
    yield Sample("no experts", (rows, torch.zeros_like(chosen), counts[:0]))
    yield Sample("no choices", (rows, chosen[:, :0], counts))
    yield Sample("33 choices", (rows[:5], torch.arange(165, dtype=torch.int32, device=device).view(5, 33) % 16, counts))
    yield Sample("1,025 experts", call(9, 2, 1025, 8))
    yield Sample("int8 rows", (rows.to(torch.int8), chosen, counts))
    yield Sample("float64", (rows.double(), chosen, counts))
    yield Sample("FP8 rows", (rows.to(torch.float8_e4m3fn), dropped, counts))


@op(samples=samples, contract=Exact(ties="the order of tokens"))
def moe_permute(
    x: Tensor, experts: Tensor, counts: Tensor, *, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of x, each once for every expert of its token, sorted by expert.

    Args:
        x: [T, H], of any dtype: a row a token. Rows in FP8 go like others, their scales ([T, 1], or [T, H / 128] of
            quantize_fp8's row layout) by a call of their own. The kernel takes float32, float16 and bfloat16.
        experts: [T, k], int32 or int64: the experts of each token, as `moe_route` chose them. What is not in 0 to
            E - 1 (-1, say) is dropped.
        counts: [E], int32 or int64: as `moe_route` counted. Its length says how many experts there are; its contents
            are counted again and not trusted.
        capacity: at most so many rows an expert, from 0; later ones are dropped. None: all.

    Returns:
        xp: [T * k, H], contiguous, of x's dtype: expert after expert, and of one expert in the order of the tokens (of
            one token in the order of its choices). However many rows are dropped, the shape is this one: rows from
            ``offsets[E]`` on are zero.
        row_map: [T, k], int32: the row of xp that a token's choice became; -1 where it was dropped.
        offsets: [E + 1], int64: expert e has the rows ``offsets[e]`` to ``offsets[e + 1]`` of xp.

    The host waits for nothing. `moe_unpermute` brings the rows back. x's gradient is that of xp, summed over the rows
    of a token in the order of its choices: `moe_unpermute` without weights.

    Raises:
        TypeError: not tensors; experts or counts not int32 or int64; capacity no int.
        ValueError: x not [T, H], experts not [T, k], counts not [E]; T * k beyond int32; a negative capacity; two
            devices.

    Contract: Exact: a stable sort and copies of rows; two runs and both paths give the same bits.

    Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022.
    """
    (tokens, k), count = experts.shape, counts.shape[0]
    n = tokens * k
    flat = experts.reshape(-1).to(torch.int64)
    flat = torch.where((flat >= 0) & (flat < count), flat, count)  # a last expert has what is dropped
    order = flat.sort(stable=True).indices
    sizes = torch.zeros(count + 1, dtype=torch.int64, device=x.device).scatter_add(0, flat, torch.ones_like(flat))
    kept = sizes if capacity is None else sizes.clamp(max=min(capacity, n))  # a number of any size is right
    offsets = F.pad(kept[:count].cumsum(0), (1, 0))

    expert = flat[order]
    rank = torch.arange(n, device=x.device) - (sizes.cumsum(0) - sizes)[expert]
    row = torch.where((expert < count) & (rank < kept[expert]), offsets[expert] + rank, n)
    row_map = torch.zeros_like(order).scatter(0, order, torch.where(row == n, -1, row))
    source = torch.full((n + 1,), -1, dtype=torch.int64, device=x.device).scatter(0, row, order)[:n]
    if n == 0:  # no token, or none of its choices
        xp = x.new_zeros((n, x.shape[1]))
    else:
        by_bits = (
            x.is_floating_point() and x.element_size() == 1
        )  # torch fills no FP8; and vmap knows no view as a dtype
        bits = x.view(torch.uint8) if by_bits else x
        xp = bits[source.clamp(min=0) // k].masked_fill((source < 0)[:, None], 0)
        xp = xp.view(x.dtype) if by_bits else xp
    return xp.contiguous(), row_map.view(tokens, k).to(torch.int32), offsets


@moe_permute.check
def _(x, experts, counts, *, capacity):
    for name, value in (("x", x), ("experts", experts), ("counts", counts)):
        c.is_tensor(name, value)
    c.same_device(x=x, experts=experts, counts=counts)
    c.has_shape("x", x, ("T", "H"))
    is_choice("experts", experts)
    c.has_shape("experts", experts, (x.shape[0], "k"))
    if counts.dtype not in INTEGERS:
        raise TypeError(f"counts: expected int32 or int64, got {c.short(counts.dtype)}")
    c.has_shape("counts", counts, ("E",))
    fits_int32("experts", experts)
    if capacity is not None:
        if isinstance(capacity, bool | Tensor) or not hasattr(type(capacity), "__index__"):
            raise TypeError(f"capacity: expected an int, got {type(capacity).__name__}")
        if capacity < 0:
            raise ValueError(f"capacity: expected a number from 0, got {capacity}")


moe_permute.kernel(
    needs=[
        c.at_most("counts", 0, MOST_EXPERTS),
        c.at_most("experts", 1, MOST_CHOSEN),
        c.unit_stride("x"),
        c.dtype_in("x", *FLOATS),
    ]
)


@moe_permute.backward(saves=(), keeps=(1,))
def _(saved, kept, grad_xp, grad_row_map, grad_offsets):
    return {"x": moe_unpermute(grad_xp, kept[0])}


@moe_permute.bad_calls
def _(device):
    x, experts = torch.ones(4, 8, device=device), torch.zeros(4, 2, dtype=torch.int32, device=device)
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    yield BadCall(([1.0], experts, counts), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x, 3, counts), TypeError, r"experts: expected a torch.Tensor, got int")
    yield BadCall((x, experts, 3), TypeError, r"counts: expected a torch.Tensor, got int")
    yield BadCall((x, experts.float(), counts), TypeError, r"experts: expected int32 or int64, got float32")
    yield BadCall((x, experts, counts.float()), TypeError, r"counts: expected int32 or int64, got float32")
    yield BadCall((x[0], experts, counts), ValueError, r"x: expected shape \[T, H\], got \[8\]")
    yield BadCall((x, experts[1:], counts), ValueError, r"experts: expected shape \[4, k\], got \[3, 2\]")
    yield BadCall((x, experts, counts[:, None]), ValueError, r"counts: expected shape \[E\], got \[3, 1\]")
    yield BadCall((x, experts, counts), TypeError, r"capacity: expected an int, got float", {"capacity": 1.5})
    negative = r"capacity: expected a number from 0, got -1"
    yield BadCall((x, experts, counts), ValueError, negative, {"capacity": -1})
    if device.type == "cuda":
        elsewhere = r"counts: expected a tensor on cuda:\d like x, got cpu"
        yield BadCall((x, experts, counts.cpu()), ValueError, elsewhere)
