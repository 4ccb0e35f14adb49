"""What the experts made of a token's rows, added up where the token was. Without atomics, forward and backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._moe import MOST_CHOSEN, fits_int32, is_choice
from ._rows import FLOATS, normal, stored, wide_of


def samples_of(device, backward):
    """(yp, row_map, weights), and before them the gradient of the result where it is asked for."""
    x = normal(device)

    def call(tokens, k, width, dtype=torch.float32, *, rows=None, weights=torch.float32):
        rows = tokens * k if rows is None else rows
        generator = torch.Generator().manual_seed(tokens + 10 * k + rows)
        order = torch.randperm(max(rows, tokens * k), generator=generator)[: tokens * k].view(tokens, k)
        row_map = torch.where(order < rows, order, -1).to(device, torch.int32)
        share = None
        if weights is not None:
            share = torch.rand(tokens, k, generator=generator).softmax(1).to(device, weights)
        found = x(rows, width, dtype=dtype), row_map, share
        return (x(tokens, width, dtype=dtype, of=1), *found) if backward else found

    yield Sample("quick", call(13, 4, 64, torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        for tokens, k, width in (
            *((1, 1, 1), (3, 2, 8), (97, 2, 129), (31, 6, 72), (300, 8, 16), (5, 32, 40), (4, 3, 4096), (2, 5, 4100)),
            *((7, 7, 1030), (1025, 1, 3)),
        ):
            yield Sample(f"{name} {tokens} x {k}, {width} wide", call(tokens, k, width, dtype))
        yield Sample(f"{name} no weights", call(31, 6, 72, dtype, weights=None))
        yield Sample(f"{name} weights like yp", call(31, 6, 72, dtype, weights=dtype))
        yield Sample(f"{name} dropped", call(31, 6, 72, dtype, rows=100))
        yield Sample(f"{name} rows of nobody", call(31, 6, 72, dtype, rows=500))
        *before, wide, row_map, weights = call(40, 4, 80, dtype)
        parts = [y[:, 8:72] for y in before]
        yield Sample(f"{name} slices", (*parts, wide[:, 8:72], row_map, weights))
        parts = [y[:, 1:65] for y in before]
        yield Sample(f"{name} misaligned", (*parts, wide[:, 1:65], row_map, weights))
        turned = x(80, 160, dtype=dtype).t()
        yield Sample(f"{name} transposed", (*before, turned, row_map, weights))
    *before, rows, row_map, weights = call(61, 4, 48)
    far = row_map.long()
    far[3, 1], far[7] = 1 << 40, -(1 << 40)
    yield Sample("int64, far outside", (*before, rows, far, weights))
    by_choice = [y.t().contiguous().t() for y in (row_map, weights)]
    yield Sample("a transposed map", (*before, rows, *by_choice))
    yield Sample("all dropped", (*before, rows, torch.full_like(row_map, -1), weights))
    yield Sample("no rows", (*before, rows[:0], row_map, weights))
    yield Sample("no tokens", (*(y[:0] for y in before), rows, row_map[:0], weights[:0]))
    yield Sample("no columns", (*(y[:, :0] for y in before), rows[:, :0], row_map, weights))
    yield Sample("no choices", (*before, rows, row_map[:, :0], weights[:, :0]))
    yield Sample("33 choices", call(5, 33, 8))
    yield Sample("float64", call(5, 3, 8, torch.float64, weights=torch.float64))
    yield Sample("float64 weights", call(5, 3, 8, weights=torch.float64))
    if backward:
        yield Sample("without weights_grad", call(31, 6, 72), {"weights_grad": False})


def samples(device):
    return samples_of(device, False)


# Both paths multiply, round to fp32, add, round, in the order of the choices, and round once to the dtype: the same
# bits. The bounds are those of fused multiply-adds instead, which a compiler of the reference may make: 2^-24 of each
# of 32 products of a few, and in a half 1 ulp where that moves a value over the middle between two.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-6, 1e-5),
        torch.bfloat16: (2.0**-7, 1e-5),
        torch.float16: (2.0**-10, 1e-5),
        torch.float64: (1e-14, 1e-14),
    }
)


def rows_of(row_map: Tensor, yp: Tensor) -> tuple[Tensor, Tensor]:
    """[T, k] of rows that exist, and which of them are meant."""
    at = row_map.to(torch.int64)
    there = (at >= 0) & (at < yp.shape[0])
    return torch.where(there, at, 0), there


@op(samples=samples, contract=TOLERANCE)
def moe_unpermute(yp: Tensor, row_map: Tensor, weights: Tensor | None = None) -> Tensor:
    """``y[t] = sum(weights[t, j] * yp[row_map[t, j]])`` over the k choices j of token t.

    Args:
        yp: [R, H], floating: what the experts made of the rows of `moe_permute`, in their order; R is T * k there.
        row_map: [T, k], int32 or int64: the rows of a token, as moe_permute says. A choice that is not in 0 to R - 1
            (-1) is dropped: it adds nothing, whatever its weight. The others are distinct.
        weights: [T, k], float32 or of yp's dtype: as `moe_route` says. None: all are 1.

    Returns:
        [T, H], contiguous, of yp's dtype. A token all of whose choices are dropped gets zeros.

    Summed in float32 (float64 for float64) in the order of the choices, rounded once at the end: no atomics, the same
    bits in every run.

    The gradient of yp and weights is `moe_unpermute_backward`; second derivatives are those of its reference. A row
    that is named twice is read twice; its gradient is then that of one of the two, on a GPU.

    Raises:
        TypeError: not tensors; yp or weights not floating; row_map not int32 or int64.
        ValueError: yp not [R, H], row_map not [T, k], weights not like it; T * k beyond int32; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic).

    Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022.
    """
    wide = wide_of(yp)
    rows = yp.to(wide) if yp.shape[0] else F.pad(yp.to(wide), (0, 0, 0, 1))
    at, there = rows_of(row_map, yp)
    total = rows.new_zeros((row_map.shape[0], yp.shape[1]))
    for j in range(row_map.shape[1]):
        part = rows[at[:, j]]
        if weights is not None:
            part = weights[:, j : j + 1].to(wide) * part
        total = total + part.masked_fill(~there[:, j : j + 1], 0)
    return stored(total, yp)


def check(yp, row_map, weights, **before):
    for name, value in {**before, "yp": yp, "row_map": row_map}.items():
        c.is_tensor(name, value)
    if weights is not None:
        c.is_tensor("weights", weights)
    c.same_device(**before, yp=yp, row_map=row_map, weights=weights)
    c.is_floating("yp", yp)
    c.has_shape("yp", yp, ("R", "H"))
    is_choice("row_map", row_map)
    fits_int32("row_map", row_map)
    if weights is not None:
        c.is_floating("weights", weights)
        c.same_shape("weights", weights, "row_map", row_map)


@moe_unpermute.check
def _(yp, row_map, weights):
    check(yp, row_map, weights)


@moe_unpermute.fake
def _(yp, row_map, weights):
    return yp.new_empty((row_map.shape[0], yp.shape[1]))


NEEDS = (
    c.at_most("yp", 1, 1 << 30),
    c.at_most("row_map", 1, MOST_CHOSEN),
    c.unit_stride("yp"),
    c.dtype_of_or("weights", "yp", torch.float32),
    c.dtype_in("yp", *FLOATS),
)
moe_unpermute.kernel(needs=NEEDS)


@moe_unpermute.backward
def _(saved, kept, grad):
    weights = saved.get("weights")
    asks = "weights" in saved.wanted
    dyp, dweights = moe_unpermute_backward(grad, saved["yp"], saved["row_map"], weights, weights_grad=asks)
    return {"yp": dyp, "weights": dweights} if asks else {"yp": dyp}


@moe_unpermute.bad_calls
def bad_calls(device):
    yp, row_map = torch.ones(8, 6, device=device), torch.zeros(4, 2, dtype=torch.int32, device=device)
    weights = torch.ones(4, 2, device=device)
    yield BadCall(([1.0], row_map, weights), TypeError, r"yp: expected a torch.Tensor, got list")
    yield BadCall((yp, 3, weights), TypeError, r"row_map: expected a torch.Tensor, got int")
    yield BadCall((yp, row_map, 3), TypeError, r"weights: expected a torch.Tensor, got int")
    yield BadCall((yp.long(), row_map, weights), TypeError, r"yp: expected a floating dtype, got int64")
    yield BadCall((yp, row_map.float(), weights), TypeError, r"row_map: expected int32 or int64, got float32")
    yield BadCall((yp, row_map, weights.long()), TypeError, r"weights: expected a floating dtype, got int64")
    yield BadCall((yp[0], row_map, weights), ValueError, r"yp: expected shape \[R, H\], got \[6\]")
    yield BadCall((yp, row_map[0], weights), ValueError, r"row_map: expected shape \[T, k\], got \[2\]")
    like = r"weights: expected the shape \[4, 2\] of row_map, got \[3, 2\]"
    yield BadCall((yp, row_map, weights[1:]), ValueError, like)
    if device.type == "cuda":
        elsewhere = r"weights: expected a tensor on cuda:\d like yp, got cpu"
        yield BadCall((yp, row_map, weights.cpu()), ValueError, elsewhere)


# dyp is a product, rounded to fp32 and to the dtype: the same on both paths. A weight's gradient is a sum of H products
# in some order: as the sums of rms_norm's gradient, 2^-24 sqrt(H) of its terms, to 4,100 of them of up to 20.
GRADIENT_TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 5e-4),
        torch.bfloat16: (2.0**-7, 5e-4),
        torch.float16: (2.0**-10, 5e-4),
        torch.float64: (1e-11, 1e-11),
    }
)


@op(samples=lambda device: samples_of(device, True), contract=GRADIENT_TOLERANCE)
def moe_unpermute_backward(
    grad: Tensor, yp: Tensor, row_map: Tensor, weights: Tensor | None = None, *, weights_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """The gradient of `moe_unpermute`: from that of the result to yp's and weights'.

    Args:
        grad: [T, H], of the result, of yp's dtype.
        yp: [R, H], as the forward call had it.
        row_map: [T, k], as the forward call had it.
        weights: [T, k] or None, as the forward call had it.
        weights_grad: False where weights has no gradient: yp is not read then.

    Returns:
        dyp: [R, H], contiguous, of yp's dtype: ``weights[t, j] * grad[t]`` in row ``row_map[t, j]``; zeros in rows of
            nobody.
        dweights: [T, k], of weights' dtype: the dot product of ``grad[t]`` and ``yp[row_map[t, j]]``; 0 for what is
            dropped. [0, k] without weights, or without weights_grad.

    Sums are taken in a fixed order, so two runs give the same bits.

    Raises:
        TypeError, ValueError: as moe_unpermute; grad is not [T, H] or not of yp's dtype.

    Contract: Tolerance (GRADIENT_TOLERANCE in the source, with its arithmetic).

    Source: the derivative of the formula of moe_unpermute.
    """
    wide = wide_of(yp)
    at, there = rows_of(row_map, yp)
    g = grad.to(wide)[:, None, :]
    shares = g if weights is None else weights.to(wide)[:, :, None] * g
    shares = shares.expand(*row_map.shape, yp.shape[1]).masked_fill(~there[:, :, None], 0)
    nobody = yp.shape[0]
    where = torch.where(there, at, nobody).reshape(-1)
    dyp = g.new_zeros((nobody + 1, yp.shape[1])).index_add(0, where, shares.flatten(0, 1))[:nobody]
    if weights is None or not weights_grad:
        empty = torch.float32 if weights is None else weights.dtype
        return stored(dyp, yp), grad.new_empty((0, row_map.shape[1]), dtype=empty)
    rows = yp.to(wide) if nobody else F.pad(yp.to(wide), (0, 0, 0, 1))
    dots = (g * rows[at]).sum(2).masked_fill(~there, 0)
    return stored(dyp, yp), dots.to(weights.dtype)


@moe_unpermute_backward.check
def _(grad, yp, row_map, weights, *, weights_grad):
    check(yp, row_map, weights, grad=grad)
    c.is_bool("weights_grad", weights_grad)
    c.has_shape("grad", grad, (row_map.shape[0], yp.shape[1]))
    c.same_dtype("grad", grad, "yp", yp)


moe_unpermute_backward.kernel(needs=(*NEEDS, c.unit_stride("grad")))


@moe_unpermute_backward.bad_calls
def _(device):
    yp, row_map = torch.ones(8, 6, device=device), torch.zeros(4, 2, dtype=torch.int32, device=device)
    weights, grad = torch.ones(4, 2, device=device), torch.ones(4, 6, device=device)
    yield BadCall(([1.0], yp, row_map, weights), TypeError, r"grad: expected a torch.Tensor, got list")
    yield BadCall((grad.half(), yp, row_map, weights), TypeError, r"grad: expected float32 like yp, got float16")
    yield BadCall((grad[1:], yp, row_map, weights), ValueError, r"grad: expected shape \[4, 6\], got \[3, 6\]")
    asks = {"weights_grad": 1}
    yield BadCall((grad, yp, row_map, weights), TypeError, r"weights_grad: expected a bool, got int", asks)
    for call in bad_calls(device):
        if isinstance(call.args[0], torch.Tensor) and call.args[0].is_floating_point() and call.args[0].dim() == 2:
            yield BadCall((grad, *call.args), call.error, call.match.replace("like yp", "like grad"))
