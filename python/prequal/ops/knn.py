"""Exact neighbours of points in the plane and in space: k nearest, their values, interpolation, within a radius."""

import ctypes
import itertools

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Exact, Tolerance
from prequal.registry import BadCall, op

from ._clouds import (
    WRONG_RADII,
    gather_samples,
    index_samples,
    interpolate_samples,
    radius_samples,
    samples,
    wrong_counts,
    wrong_searches,
)

MAX_K = 128
# The reference compares every query with every reference, this many pairs at a time (a pair takes about 20 bytes).
PAIRS_AT_A_TIME = {"cpu": 1 << 20, "cuda": 1 << 26}
NOBODY = torch.iinfo(torch.int64).max
# Interpolation: squared distances below it count as it, so that a query on a reference has a finite weight.
NEAREST_DIST2 = 1e-16


# ---- what the four share -----------------------------------------------------------------------------------------


def working_dtype(points: Tensor) -> torch.dtype:
    return torch.float64 if points.dtype == torch.float64 else torch.float32


def squared_length(dx: Tensor, dy: Tensor, dz: Tensor | None = None) -> Tensor:
    """((dx² + dy²) + dz²), each operation rounded once, as the kernel does."""
    plane = dx * dx + dy * dy
    return plane if dz is None else plane + dz * dz


def squared_radius(radius: float, dtype: torch.dtype) -> float:
    """The radius rounded to the dtype, its square rounded once more: what a squared distance is compared with."""
    if dtype == torch.float64:
        return float(radius) * float(radius)
    single = ctypes.c_float(radius).value  # a C cast: to nearest, to infinity beyond the range
    return ctypes.c_float(single * single).value  # exact in double


def is_readable(pointer: Tensor) -> bool:
    """A plain tensor in the host's memory, under no mode or transform: its contents are there to be looked at."""
    return (
        type(pointer) is Tensor
        and pointer.device.type == "cpu"
        and not torch.compiler.is_dynamo_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def partition(pointer: Tensor, rows: int) -> list[int] | None:
    """The contents, where they cut 0..rows into segments; else None."""
    at = pointer.tolist()
    good = at[0] == 0 and at[-1] == rows and all(a <= b for a, b in itertools.pairwise(at))
    return at if good else None


def segment_bounds(rows: int, query_ptr: Tensor, reference_ptr: Tensor, references: int) -> tuple[Tensor, Tensor]:
    """([rows, 1], [rows, 1]): the references of each query's segment, from and before; none outside every segment.

    No contents are trusted: whatever the pointers say, both are within 0..references.
    """
    query = torch.arange(rows, device=query_ptr.device)
    # the last segment that starts at or before the query: empty segments before it start there, too
    segment = torch.searchsorted(query_ptr.to(torch.int64).contiguous(), query, right=True) - 1
    segments = query_ptr.shape[0] - 1
    outside = (segment < 0) | (segment >= segments)
    segment = segment.clamp(0, max(segments - 1, 0))
    at = reference_ptr.to(torch.int64).clamp(0, references)
    first = at[segment].masked_fill(outside, 0)
    last = at[(segment + 1).clamp(max=segments)].masked_fill(outside, 0)
    return first[:, None], last[:, None]


def all_nearest(
    q: Tensor,
    r: Tensor,
    k: int,
    query_ptr: Tensor | None,
    reference_ptr: Tensor | None,
    limit: float | None,
) -> Tensor:
    """[N, min(k, M)] int64: `nearest_indices` of every query, PAIRS_AT_A_TIME."""
    n, m = q.shape[0], r.shape[0]
    found = min(k, m)
    step = max(1, PAIRS_AT_A_TIME.get(q.device.type, 1 << 20) // m)
    starts = range(0, n, step)
    if query_ptr is None or reference_ptr is None:
        return torch.cat([nearest_indices(q[i : i + step], r, found, limit=limit) for i in starts])

    if is_readable(query_ptr) and is_readable(reference_ptr):
        query_at, reference_at = partition(query_ptr, n), partition(reference_ptr, m)
        if query_at is not None and reference_at is not None:  # only pairs of one segment
            idx = torch.full((n, found), -1, dtype=torch.int64, device=q.device)
            cuts = zip(itertools.pairwise(query_at), itertools.pairwise(reference_at), strict=True)
            for (i, j), (start, stop) in cuts:
                if i < j and start < stop:
                    near = all_nearest(q[i:j], r[start:stop], k, None, None, limit)
                    idx[i:j, : near.shape[1]] = torch.where(near < 0, -1, near + start)
            return idx

    first, last = segment_bounds(n, query_ptr, reference_ptr, m)
    return torch.cat(
        [nearest_indices(q[i : i + step], r, found, (first[i : i + step], last[i : i + step]), limit) for i in starts]
    )


def nearest_indices(
    q: Tensor, r: Tensor, found: int, bounds: tuple[Tensor, Tensor] | None = None, limit: float | None = None
) -> Tensor:
    """[N, found] int64: of float32 or float64 points, nearest first, ties to the lower index, -1 for nobody.

    Of the references from bounds[0] and before bounds[1] ([N, 1] each), no further than limit (a squared distance).
    """
    q, r = q.detach(), r.detach()
    near = squared_length(*(q[:, None, axis] - r[None, :, axis] for axis in range(q.shape[1])))
    broken = ~torch.isfinite(r).all(dim=1) | ~torch.isfinite(q).all(dim=1)[:, None]
    column = torch.arange(r.shape[0], device=r.device)
    if bounds is not None:
        broken = broken | (column < bounds[0]) | (column >= bounds[1])
    if limit is not None:
        broken = broken | (near > limit)
    if near.dtype == torch.float32:
        # One integer a pair: the bits of a non-negative float keep its order, and the index breaks the ties.
        key = ((near.view(torch.int32).to(torch.int64) << 32) | column).masked_fill(broken, NOBODY)
        best = key.amin(dim=1, keepdim=True) if found == 1 else key.topk(found, largest=False).values
        return (best & 0xFFFFFFFF).masked_fill(best == NOBODY, -1)
    # NaN sorts behind infinity; a stable sort keeps the lower index first
    values, idx = near.masked_fill(broken, torch.nan).sort(dim=1, stable=True)
    return idx[:, :found].masked_fill(values[:, :found].isnan(), -1)


def _check_points(queries, references, query_ptr, reference_ptr, index, **others):
    points = {"queries": queries, "references": references}
    optional = {"query_ptr": query_ptr, "reference_ptr": reference_ptr, "index": index}
    for name, x in {**points, **others, **optional}.items():
        if name not in optional or x is not None:
            c.is_tensor(name, x)
    c.same_device(**points, **others, **optional)
    c.is_floating("queries", queries)
    if references.dtype != queries.dtype:
        raise TypeError(f"references: expected {c.short(queries.dtype)} like queries, got {c.short(references.dtype)}")
    if queries.dim() != 2 or queries.shape[1] not in (2, 3):
        raise ValueError(f"queries: expected shape [N, 2] or [N, 3], got {list(queries.shape)}")
    c.has_shape("references", references, ("M", queries.shape[1]))
    _check_pointers(queries, references, query_ptr, reference_ptr)
    if index is not None:
        if index.dtype != torch.uint8:
            raise TypeError(f"index: expected uint8, as knn_index makes it, got {c.short(index.dtype)}")
        c.has_shape("index", index, ("bytes",))
        if index.shape[0] != (wanted := index_bytes(references)):
            text = f"shape [{wanted}], as knn_index makes it of these references"
            raise ValueError(f"index: expected {text}, got {list(index.shape)}")


def _check_pointers(queries, references, query_ptr, reference_ptr):
    for name, x, other, other_name in (
        ("query_ptr", query_ptr, reference_ptr, "reference_ptr"),
        ("reference_ptr", reference_ptr, query_ptr, "query_ptr"),
    ):
        if x is None and other is not None:
            raise TypeError(f"{name}: expected a torch.Tensor beside {other_name}, got NoneType")
    if query_ptr is None:
        return
    _check_pointer("query_ptr", query_ptr, queries.shape[0])
    _check_pointer("reference_ptr", reference_ptr, references.shape[0], query_ptr)


def _check_pointer(name, pointer, rows, like=None):
    if pointer is None:
        return
    if pointer.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {c.short(pointer.dtype)}")
    if pointer.dim() != 1 or pointer.shape[0] == 0:
        raise ValueError(f"{name}: expected shape [B + 1], got {list(pointer.shape)}")
    if like is not None:
        c.has_shape(name, pointer, (like.shape[0],), " like query_ptr")
    if is_readable(pointer) and partition(pointer, rows) is None:
        raise ValueError(f"{name}: expected offsets that rise from 0 to {rows}, got {pointer.tolist()[:8]}")


def _check_radius(name, value):
    c.is_number(name, value)
    if not value >= 0:
        raise ValueError(f"{name}: expected a number from 0, got {value}")


# ---- knn ---------------------------------------------------------------------------------------------------------


@op(samples=samples, contract=Exact(ties="the lower reference index"))
def knn(
    queries: Tensor,
    references: Tensor,
    k: int = 1,
    *,
    query_ptr: Tensor | None = None,
    reference_ptr: Tensor | None = None,
    radius: float | None = None,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact k nearest references of every query, by squared Euclidean distance.

    Args:
        queries: [N, D], floating, D 2 or 3; the units of the coordinates.
        references: [M, D], same dtype and device.
        k: neighbours a query, 1 to 128.
        query_ptr: [B + 1], int32 or int64, same device: queries ``query_ptr[b]`` to ``query_ptr[b + 1]`` are segment b
            of a ragged batch, and see the references of segment b alone. Segments may be empty.
        reference_ptr: [B + 1], int32 or int64, same device: the same of the references. Both pointers or neither.
        radius: keep only neighbours with ``dist2 <= radius * radius``; from 0, infinity allowed. The radius is rounded
            to the dtype of dist2, and so is its square.
        index: what `knn_index` made of these references (and this reference_ptr); without it, the structure is built
            in the call. `KnnIndex` keeps one and notices when it goes stale; here one of other references is noticed
            only by its size, which counts them in thirty-twos.

    Returns:
        dist2: [N, k], **squared** distances (units²), nearest first; float32, or float64 for float64.
        idx: [N, k], int64, rows of references (of all of them, not of a segment).

    Distances are direct differences, ``((dx² + dy²) + dz²)``, or ``dx² + dy²`` where D is 2, each operation rounded
    once, in float32 (float64 for float64; halves are exact in float32): no expansion, no cancellation. The shape is
    [N, k] whatever M is: where there are fewer than k neighbours, and for a query that is not finite, idx is -1 and
    dist2 is inf. A reference that is not finite is nobody's neighbour. A true neighbour so far away that its dist2
    overflows has dist2 inf and its index.

    Pointers on a GPU are not read by the host, so their contents are not checked there: a query outside every segment
    has no neighbour, and nothing is read out of bounds. On the CPU, contents that do not cut up all rows raise.

    Gradients of dist2 flow to both point sets, twice if asked, and are zero at zero distance and where idx is -1. Where
    a difference of coordinates overflows, its gradient is an infinity of that sign (NaN where two of them cancel); a
    neighbour of which no gradient is asked adds exactly zero all the same. Under a transform of torch.func the
    reference is differentiated, and a zero that meets such a difference is NaN.

    Raises:
        TypeError: not tensors, not floating, or of two dtypes; k is not an int; a pointer without the other, or not of
            int32 or int64; an index that is not uint8.
        ValueError: not [N, D] and [M, D]; k outside 1 to 128; the tensors are on two devices; pointers of two lengths,
            or (on the CPU) not rising from 0 to the number of rows; a radius that is negative or NaN; an index of
            another size than knn_index makes of these references.

    Contract: Exact. Ties go to the lower reference index. Two runs and both paths give the same bits.

    Source: bounding-volume search over points sorted along a curve; after the grid-hash kNN it replaces.
    """
    n, m = queries.shape[0], references.shape[0]
    wide = working_dtype(queries)
    if n == 0 or m == 0:
        nothing = queries.new_zeros((n, k), dtype=wide)
        return nothing + torch.inf, torch.full_like(nothing, -1, dtype=torch.int64)

    q, r = queries.to(wide), references.to(wide)
    limit = None if radius is None else squared_radius(radius, wide)
    idx = all_nearest(q, r, k, query_ptr, reference_ptr, limit)

    # Again for the chosen ones: the same operations, so the same bits, and differentiable.
    missing = idx < 0
    difference = (q[:, None, :] - r[idx.clamp(min=0)]).masked_fill(missing[..., None], 0.0)
    dist2 = squared_length(*difference.unbind(-1)).masked_fill(missing, torch.inf)
    padding = (0, k - idx.shape[1])
    pad = torch.nn.functional.pad
    return pad(dist2, padding, value=torch.inf), pad(idx, padding, value=-1)


@knn.check
def _(queries, references, k, query_ptr, reference_ptr, radius, index):
    _check_points(queries, references, query_ptr, reference_ptr, index)
    c.in_range("k", k, 1, MAX_K)
    if radius is not None:
        _check_radius("radius", radius)


@knn.fake
def _(queries, references, k, query_ptr, reference_ptr, radius, index):
    shape = (queries.shape[0], k)
    return queries.new_empty(shape, dtype=working_dtype(queries)), queries.new_empty(shape, dtype=torch.int64)


def sums_by_place(total, at, rows):
    """total with rows[i] added at at[i]: the same bits in every run (index_add is of atomics on a GPU)."""
    return total.index_put((at,), rows, accumulate=True)


def pull_of_distances(queries, references, idx, grad_dist2):
    """d dist2 / d query = 2 (query - reference); the neighbours themselves do not move. Zero at zero distance.

    Nothing asked of a neighbour is nothing, also where the difference overflows: 0 * inf would be the whole row's NaN.
    """
    wide = working_dtype(queries)
    nobody = idx < 0
    at = idx.clamp(min=0)
    q, r = queries.to(wide), references.to(wide)
    if references.shape[0] == 0:
        return {"queries": torch.zeros_like(queries), "references": torch.zeros_like(references)}
    asked = grad_dist2.masked_fill(nobody, 0.0)[..., None]
    difference = (q[:, None, :] - r[at]).masked_fill(nobody[..., None], 0.0)
    # only what is not finite: the others' second derivative by the incoming gradient is there at zero, too
    difference = difference.masked_fill((asked == 0) & ~torch.isfinite(difference), 0.0)
    pull = 2.0 * asked * difference
    to_references = sums_by_place(torch.zeros_like(r), at.flatten(), -pull.reshape(-1, r.shape[1]))
    return {"queries": pull.sum(1).to(queries.dtype), "references": to_references.to(references.dtype)}


@knn.backward
def _(args, kept, grad_dist2, grad_idx):
    return pull_of_distances(args["queries"], args["references"], kept[0], grad_dist2)


POINTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_POINTS = 0x7FFFFFF0
POINT_NEEDS = [
    c.dtype_in("queries", *POINTS),
    c.at_most("queries", 0, MOST_POINTS),
    c.at_most("references", 0, MOST_POINTS),
]
knn.kernel(needs=POINT_NEEDS)


# ---- knn_gather --------------------------------------------------------------------------------------------------


@op(samples=gather_samples, contract=Exact(ties="the lower reference index"))
def knn_gather(
    queries: Tensor,
    references: Tensor,
    values: Tensor,
    *,
    query_ptr: Tensor | None = None,
    reference_ptr: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """The value of every query's nearest reference: label transfer, in one call.

    Args:
        queries: [N, D], floating, D 2 or 3; the units of the coordinates.
        references: [M, D], same dtype and device.
        values: [M, ...], any dtype, same device: a row a reference. Where a gradient is wanted, a real one.
        query_ptr: [B + 1], int32 or int64: segments of a ragged batch, as in `knn`.
        reference_ptr: [B + 1], the same of the references. Both or neither.
        index: what `knn_index` made of these references, as in `knn`.

    Returns:
        [N, ...], contiguous, of values' dtype: ``values[knn(queries, references, 1)[1][:, 0]]``.

    A query without a neighbour (not finite, no finite reference, none in its segment) gets a row that no label is: NaN
    for floating dtypes, -1 for signed integers, the largest value for unsigned ones, False for bool.

    Gradients flow to values of float16, bfloat16, float32 and float64.

    Raises:
        TypeError: not tensors, or points not floating or of two dtypes; pointers or an index as `knn` refuses them;
            complex values that require a gradient.
        ValueError: not [N, D], [M, D] and [M, ...]; the tensors are on two devices; pointers as `knn` refuses them.

    Contract: Exact, as `knn`.

    Source: as `knn`.
    """
    segments = {"query_ptr": query_ptr, "reference_ptr": reference_ptr}
    nearest = knn.op.reference(queries, references, 1, **segments)[1][:, 0]
    missing = (nearest < 0).view(-1, *(1 for _ in values.shape[1:]))
    # torch indexes some dtypes (unsigned ones, fp8) on no GPU; their bits it does
    as_bits = values.dtype not in (*DIFFERENTIABLE, torch.bool) and not values.is_complex()
    source = values.view(SAME_WIDTH[values.itemsize]) if as_bits else values
    if references.shape[0] == 0:
        rows = source.new_zeros((queries.shape[0], *values.shape[1:]))
    else:
        rows = source[nearest.clamp(min=0)]
    rows = rows.masked_fill(missing, no_value(values.dtype)).contiguous()
    return rows.view(values.dtype) if as_bits else rows


SAME_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DIFFERENTIABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def no_value(dtype):
    """What no label looks like: NaN, False, or every bit set (-1, the largest unsigned number, fp8's NaN)."""
    if dtype.is_complex:
        return complex("nan+nanj")
    return float("nan") if dtype in DIFFERENTIABLE else False if dtype == torch.bool else -1


@knn_gather.check
def _(queries, references, values, query_ptr, reference_ptr, index):
    _check_points(queries, references, query_ptr, reference_ptr, index, values=values)
    note = ", a row a reference"
    c.has_shape("values", values, (references.shape[0], "..."), note)


@knn_gather.fake
def _(queries, references, values, query_ptr, reference_ptr, index):
    return values.new_empty((queries.shape[0], *values.shape[1:]))


def searched(args):
    """The optional arguments of a search, as a gradient repeats it."""
    return {name: args[name] for name in ("query_ptr", "reference_ptr", "index")}


@knn_gather.backward(constant=("queries", "references"))
def _(args, kept, grad):
    queries, references, values = args["queries"], args["references"], args["values"]
    nearest = knn(queries.detach(), references.detach(), 1, **searched(args))[1][:, 0]
    total = values.new_zeros(values.shape, dtype=working_dtype(values))
    if references.shape[0]:
        missing = (nearest < 0).view(-1, *(1 for _ in values.shape[1:]))
        total = sums_by_place(total, nearest.clamp(min=0), grad.to(total.dtype).masked_fill(missing, 0.0))
    return {"values": total.to(values.dtype)}


VALUE_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
knn_gather.kernel(needs=[*POINT_NEEDS, c.dtype_in("values", *VALUE_DTYPES), c.row_contiguous("values")])


# ---- knn_interpolate ---------------------------------------------------------------------------------------------

# Of one path, with u = 2^-24: a weight has two roundings, a product one, the sums of k <= 128 terms 127 each, the
# quotient one: (2 * 127 + 6) u = 1.6e-5 of the weighted mean of |value|, which is at most the largest |value|. Two
# paths may differ by twice that: rtol for what does not cancel, atol for values to 1 that do. A half rounds once more:
# 1 ulp, 2^-7 of the value for bf16 and 2^-10 for fp16. In float64, u = 2^-53.
INTERPOLATED = Tolerance(
    {
        torch.float32: (3.2e-5, 3.2e-5),
        torch.float16: (2.0**-10 + 3.2e-5, 3.2e-5),
        torch.bfloat16: (2.0**-7 + 3.2e-5, 3.2e-5),
        torch.float64: (6e-14, 6e-14),
    }
)


@op(samples=interpolate_samples, contract=INTERPOLATED)
def knn_interpolate(
    queries: Tensor,
    references: Tensor,
    values: Tensor,
    k: int = 3,
    *,
    query_ptr: Tensor | None = None,
    reference_ptr: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """Values between references: the mean of the k nearest, weighted by inverse squared distance.

    Args:
        queries: [N, D], floating, D 2 or 3; the units of the coordinates.
        references: [M, D], same dtype and device.
        values: [M, ...], floating, same device: a row a reference.
        k: neighbours a query, 1 to 128.
        query_ptr: [B + 1], int32 or int64: segments of a ragged batch, as in `knn`.
        reference_ptr: [B + 1], the same of the references. Both or neither.
        index: what `knn_index` made of these references, as in `knn`.

    Returns:
        [N, ...], contiguous, of values' dtype: ``sum(w * values) / sum(w)`` with ``w = 1 / max(dist2, 1e-16)``, over
        the k nearest.

    Computed in float32; in float64 where values or points are float64. Both sums run from the nearest to the furthest,
    and the weights are taken relative to the nearest one's, ``w = d[0] / d`` with ``d = max(dist2, 1e-16)``, which
    changes nothing but that no weight overflows or all vanish: the nearest weighs 1. Equal distances weigh the same,
    infinite ones too: a neighbour whose dist2 overflows weighs nothing beside a nearer one, and where all of them
    overflow the result is their plain mean. Neighbours that do not exist (fewer than k references) are left out. A
    query without any neighbour (not finite, no finite reference, none in its segment) gets NaN.

    Gradients flow to values, and not to the points.

    Raises:
        TypeError: not tensors, points or values not floating, points of two dtypes; k is not an int; pointers or an
            index as `knn` refuses them.
        ValueError: not [N, D], [M, D] and [M, ...]; k outside 1 to 128; the tensors are on two devices; pointers as
            `knn` refuses them.

    Contract: Tolerance, for values of up to 1 in magnitude: the neighbours and their distances are exact, the sums of
    at most 128 terms are not.

    Source: the interpolation of PointNet++, as torch_geometric's knn_interpolate defines it.
    """
    segments = {"query_ptr": query_ptr, "reference_ptr": reference_ptr}
    n, m = queries.shape[0], references.shape[0]
    if m == 0:
        return values.new_full((n, *values.shape[1:]), torch.nan)
    dist2, idx = knn.op.reference(queries.detach(), references.detach(), k, **segments)
    source = values.to(interpolation_dtype(queries, values))
    total = source.new_zeros((n, *values.shape[1:]))
    weights = inverse_distance_weights(dist2, idx, source.dtype)
    norm = torch.zeros_like(weights[:, 0])
    for weight, at in zip(weights.unbind(1)[:m], idx.unbind(1)[:m], strict=True):
        missing = as_column(at < 0, values)
        total = total + as_column(weight, values) * source[at.clamp(min=0)].masked_fill(missing, 0.0)
        norm = norm + weight
    return (total / as_column(norm, values)).to(values.dtype)


def interpolation_dtype(points, values):
    return torch.float64 if torch.float64 in (points.dtype, values.dtype) else torch.float32


def inverse_distance_weights(dist2, idx, dtype):
    """[N, k]: relative to the nearest, 0 where there is no neighbour."""
    distance = dist2.to(dtype).clamp(min=NEAREST_DIST2)
    nearest = distance[:, :1]
    weights = torch.where(distance == nearest, 1.0, nearest / distance)  # also where both are infinite
    return weights.masked_fill(idx < 0, 0.0)


def as_column(x, values):
    """[N] against the rows of [N, ...]."""
    return x.view(-1, *(1 for _ in values.shape[1:]))


@knn_interpolate.check
def _(queries, references, values, k, query_ptr, reference_ptr, index):
    _check_points(queries, references, query_ptr, reference_ptr, index, values=values)
    c.is_floating("values", values)
    c.has_shape("values", values, (references.shape[0], "..."), ", a row a reference")
    c.in_range("k", k, 1, MAX_K)


@knn_interpolate.fake
def _(queries, references, values, k, query_ptr, reference_ptr, index):
    return values.new_empty((queries.shape[0], *values.shape[1:]))


@knn_interpolate.backward(constant=("queries", "references"))
def _(args, kept, grad):
    """Every neighbour's share of the mean; the weights are made again."""
    queries, references, values = args["queries"], args["references"], args["values"]
    if references.shape[0] == 0:
        return {"values": torch.zeros_like(values)}
    dist2, idx = knn(queries.detach(), references.detach(), args["k"], **searched(args))
    total = values.new_zeros(values.shape, dtype=interpolation_dtype(queries, values))
    weights = inverse_distance_weights(dist2, idx, total.dtype)
    norm = torch.zeros_like(weights[:, 0])
    for weight in weights.unbind(1):
        norm = norm + weight
    grad = grad.to(total.dtype)
    for weight, at in zip(weights.unbind(1), idx.unbind(1), strict=True):
        share = (as_column(weight / norm, values) * grad).masked_fill(as_column(at < 0, values), 0.0)
        total = sums_by_place(total, at.clamp(min=0), share)
    return {"values": total.to(values.dtype)}


knn_interpolate.kernel(needs=[*POINT_NEEDS, c.dtype_in("values", *DIFFERENTIABLE), c.row_contiguous("values")])


# ---- radius ------------------------------------------------------------------------------------------------------


@op(samples=radius_samples, contract=Exact(ties="the lower reference index"))
def radius(
    queries: Tensor,
    references: Tensor,
    r: float,
    max_neighbors: int,
    *,
    query_ptr: Tensor | None = None,
    reference_ptr: Tensor | None = None,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest references within a radius of every query, in a shape that does not depend on the data.

    Args:
        queries: [N, D], floating, D 2 or 3; the units of the coordinates.
        references: [M, D], same dtype and device.
        r: the radius, from 0, infinity allowed: neighbours have ``dist2 <= r * r``. It is rounded to the dtype of
            dist2, and so is its square.
        max_neighbors: how many are kept of each query's, 1 to 128: the nearest ones.
        query_ptr: [B + 1], int32 or int64: segments of a ragged batch, as in `knn`.
        reference_ptr: [B + 1], the same of the references. Both or neither.
        index: what `knn_index` made of these references, as in `knn`.

    Returns:
        dist2: [N, max_neighbors], **squared** distances (units²), nearest first, then inf; float32, or float64 for
            float64.
        idx: [N, max_neighbors], int64, rows of references, then -1.
        counts: [N], int64: how many of the row are neighbours, at most max_neighbors.

    The same search as ``knn(queries, references, max_neighbors, radius=r)``, and its rules for points that are not
    finite. Gradients of dist2 flow to both point sets, as there.

    Raises:
        TypeError: not tensors, not floating, or of two dtypes; r is not a number; max_neighbors is not an int; pointers
            or an index as `knn` refuses them.
        ValueError: not [N, D] and [M, D]; r negative or NaN; max_neighbors outside 1 to 128; the tensors are on two
            devices; pointers as `knn` refuses them.

    Contract: Exact, as `knn`.

    Source: as `knn`.
    """
    segments = {"query_ptr": query_ptr, "reference_ptr": reference_ptr}
    dist2, idx = knn.op.reference(queries, references, max_neighbors, **segments, radius=r)
    return dist2, idx, (idx >= 0).sum(1)


@radius.check
def _(queries, references, r, max_neighbors, query_ptr, reference_ptr, index):
    _check_points(queries, references, query_ptr, reference_ptr, index)
    _check_radius("r", r)
    c.in_range("max_neighbors", max_neighbors, 1, MAX_K)


@radius.fake
def _(queries, references, r, max_neighbors, query_ptr, reference_ptr, index):
    shape = (queries.shape[0], max_neighbors)
    dist2 = queries.new_empty(shape, dtype=working_dtype(queries))
    return dist2, queries.new_empty(shape, dtype=torch.int64), queries.new_empty(shape[:1], dtype=torch.int64)


@radius.backward
def _(args, kept, grad_dist2, grad_idx, grad_counts):
    return pull_of_distances(args["queries"], args["references"], kept[0], grad_dist2)


radius.kernel(needs=POINT_NEEDS)


# ---- wrong calls ------------------------------------------------------------------------------------------------


@knn.bad_calls
def _(device):
    points = torch.ones(4, 3, device=device)
    yield from wrong_searches(device)
    yield from wrong_counts("k", lambda k: (points, points, k))
    for value, error, text in WRONG_RADII:
        yield BadCall((points, points), error, f"radius: {text}", {"radius": value})


@knn_gather.bad_calls
def _(device):
    points = torch.ones(4, 3, device=device)
    yield from wrong_searches(device, points)
    yield BadCall((points, points, [1]), TypeError, r"values: expected a torch.Tensor, got list")
    yield BadCall(
        (points, points, points[:3]), ValueError, r"values: expected shape \[4, ...\], a row a reference, got"
    )
    if device.type == "cuda":
        yield BadCall((points, points, points.cpu()), ValueError, r"values: expected a tensor on cuda:\d like queries")


@knn_interpolate.bad_calls
def _(device):
    points = torch.ones(4, 3, device=device)
    yield from wrong_searches(device, points)
    yield from wrong_counts("k", lambda k: (points, points, points, k))
    yield BadCall((points, points, [1]), TypeError, r"values: expected a torch.Tensor, got list")
    yield BadCall((points, points, points.long()), TypeError, r"values: expected a floating dtype, got int64")
    text = r"values: expected shape \[4, ...\], a row a reference, got"
    yield BadCall((points, points, points[:3]), ValueError, text)
    if device.type == "cuda":
        yield BadCall((points, points, points.cpu()), ValueError, r"values: expected a tensor on cuda:\d like queries")


@radius.bad_calls
def _(device):
    points = torch.ones(4, 3, device=device)
    yield from wrong_searches(device, 1.0, 4)
    yield from wrong_counts("max_neighbors", lambda most: (points, points, 1.0, most))
    for value, error, text in WRONG_RADII:
        yield BadCall((points, points, value, 4), error, f"r: {text}")


# ---- the search structure ------------------------------------------------------------------------------------------

FAN, KNOTS, KEY_BITS = 32, 1024, 30  # as in include/prequal/knn_tree.h
NO_INDEX = 2**31 - 1


@op(samples=index_samples, contract=Exact(ties="the lower reference index"))
def knn_index(references: Tensor, *, reference_ptr: Tensor | None = None) -> Tensor:
    """The search structure of a point cloud, for the `index` of `knn` and its kin. `prequal.KnnIndex` keeps one.

    Args:
        references: [M, D], floating, D 2 or 3.
        reference_ptr: [B + 1], int32 or int64: segments of a ragged batch, as in `knn`.

    Returns:
        [bytes], uint8, some 17 bytes a reference (33 for float64): leaves of 32 references that are neighbours on a
        Morton curve of their ranks along the axes, then groups of 32 bounding boxes, level by level. Its layout is that
        of this version and no other's: made to be passed on, not stored.

    Raises:
        TypeError: not tensors, or not floating; a pointer that is neither int32 nor int64.
        ValueError: not [M, 2] or [M, 3]; a pointer as `knn` refuses it.

    Contract: Exact: the same bytes by both paths.

    Source: bounding-volume search over points sorted along a curve; after the grid-hash kNN it replaces.
    """
    m, dims = references.shape
    wide = working_dtype(references)
    if m == 0:
        return references.new_empty(0, dtype=torch.uint8)
    xyz = torch.nn.functional.pad(references.detach().to(wide), (0, 3 - dims))
    order = curve_order(xyz, dims, reference_ptr)

    # leaves: whole ones, filled up with points that are nobody's neighbour
    boxes = -(-m // FAN)
    pad = boxes * FAN - m
    exists = torch.nn.functional.pad(torch.isfinite(xyz).all(1)[order], (0, pad))
    at = torch.nn.functional.pad(xyz[order], (0, 0, 0, pad)).masked_fill(~exists[:, None], 0.0)
    index = torch.nn.functional.pad(order, (0, pad)).masked_fill(~exists, -1)
    label = index.to(torch.int64 if wide == torch.float64 else torch.int32)
    parts = [torch.cat([as_bytes(at), as_bytes(label[:, None])], 1).flatten()]

    at = at + 0.0  # -0 as 0: a box has one zero
    low, high = (at.masked_fill(~exists[:, None], limit) for limit in (torch.inf, -torch.inf))
    lowest, highest = index.masked_fill(~exists, NO_INDEX), index
    low, high = low.view(-1, FAN, 3).amin(1), high.view(-1, FAN, 3).amax(1)
    lowest, highest = lowest.view(-1, FAN).amin(1), highest.view(-1, FAN).amax(1)
    while True:
        groups = -(-boxes // FAN)
        fill = (0, groups * FAN - boxes)
        low, high = (
            torch.nn.functional.pad(x, (0, 0, *fill), value=limit).view(groups, FAN, 3)
            for x, limit in ((low, torch.inf), (high, -torch.inf))
        )
        lowest = torch.nn.functional.pad(lowest, fill, value=NO_INDEX).view(groups, FAN)
        highest = torch.nn.functional.pad(highest, fill, value=-1).view(groups, FAN)
        group = [as_bytes(x.transpose(1, 2).reshape(groups, -1)) for x in (low, high)]
        group += [as_bytes(x.to(torch.int32)) for x in (lowest, highest)]
        parts.append(torch.cat(group, 1).flatten())
        if boxes <= FAN:
            return torch.cat(parts)
        boxes = groups
        low, high, lowest, highest = low.amin(1), high.amax(1), lowest.amin(1), highest.amax(1)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def curve_order(xyz: Tensor, dims: int, reference_ptr: Tensor | None) -> Tensor:
    """[M] int64: the references along a Morton curve of their ranks; of a batch, segment by segment."""
    m = xyz.shape[0]
    exists = torch.isfinite(xyz).all(1)
    row = torch.arange(KNOTS, device=xyz.device)
    sample = row if m <= KNOTS else row * m // KNOTS
    there = (sample < m) & exists[sample.clamp(max=m - 1)]
    knots = xyz[sample.clamp(max=m - 1)].masked_fill(~there[:, None], torch.inf).sort(0).values

    key = torch.zeros(m, dtype=torch.int64, device=xyz.device)
    for axis in range(dims):
        rank = torch.searchsorted(knots[:, axis].contiguous(), xyz[:, axis].contiguous(), right=True)
        rank = rank.clamp(max=KNOTS - 1)
        for bit in range(10):
            key = key | ((rank >> bit) & 1) << (bit * dims + axis)
    if dims == 2:
        key = key << 10
    key = key.masked_fill(~exists, 2**KEY_BITS - 1)
    if reference_ptr is not None:
        ends = reference_ptr.to(torch.int64)[1:].contiguous()
        key = key | torch.searchsorted(ends, torch.arange(m, device=xyz.device), right=True) << KEY_BITS
    bits = 8
    while bits < KEY_BITS and 1 << bits < m:
        bits += 8
    return (key >> (KEY_BITS - min(bits, KEY_BITS))).sort(stable=True).indices


@knn_index.check
def _(references, reference_ptr):
    c.is_tensor("references", references)
    if reference_ptr is not None:
        c.is_tensor("reference_ptr", reference_ptr)
    c.same_device(references=references, reference_ptr=reference_ptr)
    c.is_floating("references", references)
    if references.dim() != 2 or references.shape[1] not in (2, 3):
        raise ValueError(f"references: expected shape [M, 2] or [M, 3], got {list(references.shape)}")
    _check_pointer("reference_ptr", reference_ptr, references.shape[0])


def index_bytes(references: Tensor) -> int:
    """Leaves, then levels of groups: of points and boxes of this many, whatever they are."""
    boxes = -(-references.shape[0] // FAN)
    size = 8 if references.dtype == torch.float64 else 4
    total = boxes * FAN * 4 * size
    while boxes > 0:
        total += -(-boxes // FAN) * FAN * (6 * size + 8)
        if boxes <= FAN:
            break
        boxes = -(-boxes // FAN)
    return total


@knn_index.fake
def _(references, reference_ptr):
    return references.new_empty(index_bytes(references), dtype=torch.uint8)


knn_index.kernel(needs=[c.dtype_in("references", *POINTS), c.at_most("references", 0, MOST_POINTS)])


@knn_index.bad_calls
def _(device):
    points = torch.ones(4, 3, device=device)
    at = torch.tensor([0, 4], device=device)

    def bad(error, match, references=points, **kwargs):
        return BadCall((references,), error, match, kwargs)

    yield bad(TypeError, r"references: expected a torch.Tensor, got list", points.tolist())
    yield bad(TypeError, r"references: expected a floating dtype, got int64", points.long())
    for shape in ((4,), (4, 1), (1, 4, 3)):
        text = rf"references: expected shape \[M, 2\] or \[M, 3\], got \[{', '.join(str(n) for n in shape)}\]"
        yield bad(ValueError, text, torch.ones(shape, device=device))
    yield bad(TypeError, r"reference_ptr: expected int32 or int64, got float32", reference_ptr=at.float())
    yield bad(ValueError, r"reference_ptr: expected shape \[B \+ 1\], got \[0\]", reference_ptr=at[:0])
    if device.type == "cuda":
        text = r"reference_ptr: expected a tensor on cuda:\d like references, got cpu"
        yield bad(ValueError, text, reference_ptr=at.cpu())
