"""Distances between all rows of two sets: by which form, and the two walks of a search within a radius."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prequal.ops import pairwise_direct, pairwise_from_products_, pairwise_within_counts, pairwise_within_fill
from prequal.ops._rows import wide_of
from prequal.ops.pairwise_distance import (
    MOST_NEIGHBOURS,
    centre_of,
    check_norm,
    check_pair,
    check_radius,
    norms_of,
    pull_of_all,
    starts_of,
)
from prequal.registry import is_transformed, out_of_autocast, without_autocast

# From here on p = 2 is a matrix product. The direct form takes three operations of fp32 a coordinate and pair, a
# product one; where that outweighs the pass over the products that follows it was reasoned, not measured.
LEAST_CENTRED = 256
# A walk within a radius: so many blocks of 128 rows of a are wanted, and fewer rows of b than this are no segment.
# Of the sizes alone, so that the answer's layout is the same on every GPU. Not tuned.
WANTED_BLOCKS, TILE, LEAST_SEGMENT = 1024, 128, 1024


def pairwise_distance(a: Tensor, b: Tensor, *, p: float = 2.0, squared: bool = False) -> Tensor:
    """The p-norm of every difference of a row of a and a row of b.

    Args:
        a: [N, D], floating; the units of the coordinates.
        b: [M, D], of a's dtype and device.
        p: from 1, or infinity for the largest coordinate.
        squared: the squares of the norms; of p = 2 without a root.

    Returns:
        [N, M], float32 (float64 for float64), computed in that dtype.

    Of p other than 2, and of fewer than 256 coordinates, the direct form, `pairwise_direct`: from differences. Equal
    rows have a distance of exactly 0, none is negative, an offset of both sets does no harm, and squares of p = 2 are
    right to (D + 2) 2^-24 of their value.

    From 256 coordinates on, p = 2 is a matrix product of rows from which c, the mean of b, is subtracted: an offset of
    both sets does no harm here, either, and none is negative, but the distance of equal rows is not exactly 0. Rows
    with NaN or infinity, or whose squares overflow, are not in the mean, and spoil their own distances alone. With
    u = 2^-23, which allows for sums that are cut off rather than rounded, a square is off by at most
    ``e = (D + 8) u (|a - c| + |b - c|)^2``, and a distance d by at most ``sqrt(e)`` and ``e / d``; in float64 u is
    2^-52. The product is torch's: with TF32 switched on, it is what TF32 makes of it, and the bound does not hold.

    Gradients flow to a and b, at a distance of zero they are zero; those of p = 2 are two matrix products. In the
    centred form they differentiate the formula of distances, not its rounding.

    Raises:
        TypeError: a or b is no floating tensor, or of two dtypes; p is no number, squared no bool.
        ValueError: shapes that do not fit; p below 1; two devices.

    Source: the definition; the centred form is the law of cosines.
    """
    check_pair(a, b)
    check_norm(p, squared)
    if p != 2 or a.shape[1] < LEAST_CENTRED:
        return pairwise_direct(a, b, p, squared)
    transformed = not torch.compiler.is_dynamo_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None or is_transformed((a, b))
    )
    if transformed:
        return plain_centred(a, b, squared)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return Centred.apply(a, b, squared)
    return centred(a, b, squared)


def centred(a: Tensor, b: Tensor, squared: bool) -> Tensor:
    wide, centre = wide_of(a), centre_of(b)
    x, y = a.to(wide) - centre, b.to(wide) - centre
    with without_autocast(a.device):
        products = torch.mm(x, y.t())
    pairwise_from_products_(products, x.square().sum(1), y.square().sum(1), squared)
    return products


def plain_centred(a: Tensor, b: Tensor, squared: bool) -> Tensor:
    """As one formula: what torch's transforms are taken of."""
    wide = out_of_autocast(wide_of(a), a.device)
    centre = centre_of(b).to(wide)
    x, y = a.to(wide) - centre, b.to(wide) - centre
    squares = x.square().sum(1).unsqueeze(1) + y.square().sum(1) - 2 * (x @ y.t())
    return norms_of(squares.clamp(min=0), 2.0, squared).to(wide_of(a))


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, squared: bool) -> Tensor:
        distance = centred(a.detach(), b.detach(), squared)
        ctx.squared = squared
        ctx.save_for_backward(a, b, distance)
        return distance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b, distance = ctx.saved_tensors
        with without_autocast(a.device):
            found = pull_of_all(a, b, distance, grads[0], ctx.squared)
        return found["a"], found["b"], None


def segment_of(rows: int, columns: int) -> int:
    """How many rows of b a block walks over: so many that there are enough blocks, in whole tiles. Pure."""
    tiles = -(-rows // TILE)
    segments = max(1, min(-(-WANTED_BLOCKS // max(1, tiles)), columns // LEAST_SEGMENT))
    return max(1, -(-columns // segments // TILE)) * TILE


def pairwise_within(a: Tensor, b: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """All rows of b within a radius of each row of a, by Euclidean distance, as CSR; no [N, M] is in memory.

    Args:
        a: [N, D], floating; the units of the coordinates.
        b: [M, D], of a's dtype and device.
        radius: from 0, infinity allowed: a neighbour's squared distance is at most radius * radius. The radius is
            rounded to the dtype of distances, and so is its square.

    Returns:
        ptr: [N + 1], int64: neighbours of row i are those from ptr[i] and before ptr[i + 1]; ``ptr.diff()`` counts
            them.
        idx: [ptr[N]], int64, rows of b, ascending for each row of a. A row of a that is in b, too, is its neighbour.
        dist2: [ptr[N]], their **squared** distances (units²), as `pairwise_direct` computes them; float32, or float64
            for float64.

    Two walks over all pairs: one counts, the other fills. How many neighbours there are says how large the outputs are,
    so the call waits for the device in between, and cannot be part of a graph. `pairwise_within_counts` counts without
    waiting. A distance of NaN is within no radius. No gradient: ``(a[row] - b[idx]).square().sum(1)`` has one.

    Raises:
        TypeError: a or b is no floating tensor, or of two dtypes; radius is no number.
        ValueError: shapes that do not fit; radius negative or NaN; two devices.

    Source: the definition; counts, their running sum, and a second walk, as CSR matrices are built.
    """
    check_pair(a, b)
    check_radius(radius)
    with torch.no_grad():
        segment = segment_of(a.shape[0], b.shape[0])
        counts = pairwise_within_counts(a, b, radius, segment)
        starts, total = starts_of(counts)
        ptr = torch.nn.functional.pad(counts.sum(1).cumsum(0), (1, 0))
        found = int(total)
        # said for torch.compile, which knows no number that only the device has
        torch._check(found >= 0)
        torch._check(found <= MOST_NEIGHBOURS)
        idx, dist2 = pairwise_within_fill(a, b, radius, starts, found, segment)
    return ptr, idx, dist2
