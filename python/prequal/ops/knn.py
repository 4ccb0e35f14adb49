"""Exact k nearest neighbours of points in space."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Exact
from prequal.registry import BadCall, Sample, op

MAX_K = 32
# The reference compares every query with every reference, this many pairs at a time (a pair takes about 20 bytes).
PAIRS_AT_A_TIME = {"cpu": 1 << 20, "cuda": 1 << 26}
NOBODY = torch.iinfo(torch.int64).max


def cloud(device, points, seed=0, kind="volume"):
    """Sample clouds: the density of a real one is never even."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(points, 3, generator=generator, dtype=torch.float32)
    if kind == "surface":
        x = torch.nn.functional.normalize(x - 0.5, dim=1)
    elif kind == "clustered":
        x = 1e-3 * x + 10.0 * torch.rand(20, 3, generator=generator, dtype=torch.float32)[torch.arange(points) % 20]
    elif kind == "duplicates":
        x = (4 * x).floor()
    elif kind == "one point":
        x = torch.full_like(x, 0.25)
    elif kind == "line":
        x = x[:, :1] * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float32)
    elif kind == "outlier" and points:
        x[0] = 1e6
    elif kind == "far from zero":
        x = x + 1e6
    elif kind == "all scales":
        x = 10.0 ** (40 * x - 20)
    elif kind == "broken" and points:
        x[:: max(1, points // 7)] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return x.to(device)


KINDS = (
    *("volume", "surface", "clustered", "duplicates", "one point"),
    *("line", "outlier", "far from zero", "all scales", "broken"),
)


def samples(device):
    yield Sample("quick", (cloud(device, 257, 1), cloud(device, 503, 2), 3))
    for n, m, k in ((1, 1, 1), (5, 3, 8), (0, 10, 2), (10, 0, 2), (1031, 8, 4), (1031, 9, 5), (300, 8192, 1)):
        yield Sample(f"{n} to {m}, k {k}", (cloud(device, n, 1), cloud(device, m, 2), k))
    for kind in KINDS:
        yield Sample(f"{kind}, small", (cloud(device, 700, 1, kind), cloud(device, 2003, 2, kind), 4))
        yield Sample(f"{kind}, large", (cloud(device, 500, 3, kind), cloud(device, 9001, 4, kind), 17))
    yield Sample("volume to clustered", (cloud(device, 400, 1), cloud(device, 8191, 2, "clustered"), 1))
    wide = torch.cat((cloud(device, 300, 1), cloud(device, 300, 2)), dim=1)
    yield Sample("strided", (wide[::2, ::2], wide[1::2, 1:4], 2))
    yield Sample("column-major", (cloud(device, 200, 1).t().contiguous().t(), cloud(device, 300, 2), 32))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield Sample(c.short(dtype), (cloud(device, 50, 1).to(dtype), cloud(device, 70, 2).to(dtype), 3))


def gather_samples(device):
    points, queries, broken = cloud(device, 503, 2), cloud(device, 257, 1), cloud(device, 300, 5, "broken")
    generator = torch.Generator().manual_seed(0)

    def values(*shape, dtype=torch.int64):
        return torch.randint(0, 100, shape, generator=generator).to(device, dtype)

    yield Sample("quick", (queries, points, values(503)))
    for dtype in (torch.uint8, torch.bool, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float64):
        yield Sample(f"{c.short(dtype)} labels", (queries, points, values(503, dtype=dtype)))
        yield Sample(f"{c.short(dtype)} rows", (queries, points, values(503, 5, dtype=dtype)))
    yield Sample("wide rows", (queries, points, values(503, 3, 11, dtype=torch.float32)))
    yield Sample("misaligned rows", (queries, points, values(503, 9, dtype=torch.int16)[:, 1:8]))
    yield Sample("column-major values", (queries, points, values(4, 503).t()))
    yield Sample("rows of nothing", (queries, points, values(503, 0)))
    for dtype in (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
        yield Sample(f"{c.short(dtype)} labels", (broken, points, values(503).to(dtype)))
    yield Sample("complex values", (queries, points, values(503, dtype=torch.complex64)))
    yield Sample("no queries", (queries[:0], points, values(503)))
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.float32):
        yield Sample(f"no references, {c.short(dtype)}", (queries, points[:0], values(0, 2, dtype=dtype)))
    yield Sample("broken points", (broken, broken.flip(0), values(300, dtype=torch.float32)))
    yield Sample("many references", (queries, cloud(device, 20011, 7, "surface"), values(20011)))


def squared_length(dx: Tensor, dy: Tensor, dz: Tensor) -> Tensor:
    """((dx² + dy²) + dz²), each operation rounded once, as the kernel does."""
    return (dx * dx + dy * dy) + dz * dz


@op(samples=samples, contract=Exact(ties="the lower reference index"))
def knn(queries: Tensor, references: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    """Exact k nearest references of every query, by squared Euclidean distance.

    Args:
        queries: [N, 3], floating; the units of the coordinates.
        references: [M, 3], same dtype and device.
        k: neighbours a query, 1 to 32.

    Returns:
        dist2: [N, k], **squared** distances (units²), nearest first; float32, or float64 for float64.
        idx: [N, k], int64, rows of references.

    Distances are direct differences, ``((dx² + dy²) + dz²)``, each operation rounded once, in float32 (float64 for
    float64): no expansion, no cancellation. The shape is [N, k] whatever M is: where k > M, and for a query that is not
    finite, idx is -1 and dist2 is inf. A reference that is not finite is nobody's neighbour. A true neighbour so far
    away that its dist2 overflows has dist2 inf and its index.

    Gradients of dist2 flow to both point sets.

    Raises:
        TypeError: not tensors, not floating, or of two dtypes; k is not an int.
        ValueError: not [N, 3] and [M, 3]; k outside 1 to 32; the tensors are on two devices.

    Contract: Exact. Ties go to the lower reference index. Two runs and both paths give the same bits.

    Source: bounding-volume search over points sorted along a curve; after the grid-hash kNN it replaces.
    """
    n, m = queries.shape[0], references.shape[0]
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    found = min(k, m)
    if n == 0 or found == 0:
        nothing = queries.new_zeros((n, k), dtype=wide)
        return nothing + torch.inf, torch.full_like(nothing, -1, dtype=torch.int64)

    q, r = queries.to(wide), references.to(wide)
    step = max(1, PAIRS_AT_A_TIME.get(queries.device.type, 1 << 20) // m)
    idx = torch.cat([nearest_indices(q[start : start + step], r, found) for start in range(0, n, step)])

    # Again for the chosen ones: the same operations, so the same bits, and differentiable.
    missing = idx < 0
    difference = (q[:, None, :] - r[idx.clamp(min=0)]).masked_fill(missing[..., None], 0.0)
    dist2 = squared_length(*difference.unbind(-1)).masked_fill(missing, torch.inf)
    padding = (0, k - found)
    pad = torch.nn.functional.pad
    return pad(dist2, padding, value=torch.inf), pad(idx, padding, value=-1)


def nearest_indices(q: Tensor, r: Tensor, found: int) -> Tensor:
    """[N, found] int64: of float32 or float64 points, nearest first, ties to the lower index, -1 for nobody."""
    q, r = q.detach(), r.detach()
    near = squared_length(*(q[:, None, axis] - r[None, :, axis] for axis in range(3)))
    broken = ~torch.isfinite(r).all(dim=1) | ~torch.isfinite(q).all(dim=1)[:, None]
    if near.dtype == torch.float32:
        # One integer a pair: the bits of a non-negative float keep its order, and the index breaks the ties.
        column = torch.arange(r.shape[0], device=r.device)
        key = ((near.view(torch.int32).to(torch.int64) << 32) | column).masked_fill(broken, NOBODY)
        best = key.amin(dim=1, keepdim=True) if found == 1 else key.topk(found, largest=False).values
        return (best & 0xFFFFFFFF).masked_fill(best == NOBODY, -1)
    # NaN sorts behind infinity; a stable sort keeps the lower index first
    values, idx = near.masked_fill(broken, torch.nan).sort(dim=1, stable=True)
    return idx[:, :found].masked_fill(values[:, :found].isnan(), -1)


@knn.check
def _(queries, references, k):
    _check_points(queries, references)
    c.in_range("k", k, 1, MAX_K)


def _check_points(queries, references, **others):
    for name, x in {"queries": queries, "references": references, **others}.items():
        c.is_tensor(name, x)
    c.same_device(queries=queries, references=references, **others)
    c.is_floating("queries", queries)
    if references.dtype != queries.dtype:
        raise TypeError(f"references: expected {c.short(queries.dtype)} like queries, got {c.short(references.dtype)}")
    c.has_shape("queries", queries, ("N", 3))
    c.has_shape("references", references, ("M", 3))


@knn.fake
def _(queries, references, k):
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    shape = (queries.shape[0], k)
    return queries.new_empty(shape, dtype=wide), queries.new_empty(shape, dtype=torch.int64)


@knn.backward
def _(args, kept, grad_dist2, grad_idx):
    """d dist2 / d query = 2 (query - reference); the neighbours themselves do not move. Zero at zero distance."""
    queries, references = args["queries"], args["references"]
    (idx,) = kept
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    nobody = idx < 0
    at = idx.clamp(min=0)
    q, r = queries.to(wide), references.to(wide)
    if references.shape[0] == 0:
        return {"queries": torch.zeros_like(queries), "references": torch.zeros_like(references)}
    difference = (q[:, None, :] - r[at]).masked_fill(nobody[..., None], 0.0)
    pull = 2.0 * grad_dist2.masked_fill(nobody, 0.0)[..., None] * difference
    to_references = torch.zeros_like(r).index_add(0, at.flatten(), -pull.reshape(-1, 3))
    return {"queries": pull.sum(1).to(queries.dtype), "references": to_references.to(references.dtype)}


POINT_NEEDS = [
    c.dtype_in("queries", torch.float32),
    c.at_most("queries", 0, 0x7FFFFFF0),
    c.at_most("references", 0, 0x7FFFFFF0),
]
knn.kernel(needs=POINT_NEEDS)


@op(samples=gather_samples, contract=Exact(ties="the lower reference index"))
def knn_gather(queries: Tensor, references: Tensor, values: Tensor) -> Tensor:
    """The value of every query's nearest reference: label transfer, in one call.

    Args:
        queries: [N, 3], floating; the units of the coordinates.
        references: [M, 3], same dtype and device.
        values: [M, ...], any dtype, same device: a row a reference.

    Returns:
        [N, ...], contiguous, of values' dtype: ``values[knn(queries, references, 1)[1][:, 0]]``.

    A query without a neighbour (not finite, or no finite reference) gets a row that no label is: NaN for floating
    dtypes, -1 for signed integers, the largest value for unsigned ones, False for bool.

    Gradients flow to values.

    Raises:
        TypeError: not tensors, or points not floating or of two dtypes.
        ValueError: not [N, 3], [M, 3] and [M, ...]; the tensors are on two devices.

    Contract: Exact, as `knn`.

    Source: as `knn`.
    """
    nearest = knn.op.reference(queries, references, 1)[1][:, 0]
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
def _(queries, references, values):
    _check_points(queries, references, values=values)
    note = ", a row a reference"
    c.has_shape("values", values, (references.shape[0], "..."), note)


@knn_gather.fake
def _(queries, references, values):
    return values.new_empty((queries.shape[0], *values.shape[1:]))


@knn_gather.backward
def _(args, kept, grad):
    queries, references, values = args["queries"], args["references"], args["values"]
    nearest = knn(queries.detach(), references.detach(), 1)[1][:, 0]
    total = values.new_zeros(values.shape, dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
    if references.shape[0]:
        missing = (nearest < 0).view(-1, *(1 for _ in values.shape[1:]))
        total = total.index_add(0, nearest.clamp(min=0), grad.to(total.dtype).masked_fill(missing, 0.0))
    return {"values": total.to(values.dtype)}


VALUE_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
knn_gather.kernel(needs=[*POINT_NEEDS, c.dtype_in("values", *VALUE_DTYPES), c.row_contiguous("values")])


@knn.bad_calls
def _(device):
    points = torch.ones(4, 3, device=device)
    yield BadCall((points.tolist(), points), TypeError, r"queries: expected a torch.Tensor, got list")
    yield BadCall((points, None), TypeError, r"references: expected a torch.Tensor, got NoneType")
    yield BadCall((points.long(), points), TypeError, r"queries: expected a floating dtype, got int64")
    yield BadCall((points, points.half()), TypeError, r"references: expected float32 like queries, got float16")
    yield BadCall((points[:, :2], points), ValueError, r"queries: expected shape \[N, 3\], got \[4, 2\]")
    yield BadCall((points, points[0]), ValueError, r"references: expected shape \[M, 3\], got \[3\]")
    yield BadCall((points, points, 0), ValueError, r"k: expected 1 to 32, got 0")
    yield BadCall((points, points, 33), ValueError, r"k: expected 1 to 32, got 33")
    yield BadCall((points, points, 1.5), TypeError, r"k: expected an int, got float")
    yield BadCall((points, points, True), TypeError, r"k: expected an int, got bool")
    if device.type == "cuda":
        yield BadCall(
            (points, points.cpu()), ValueError, r"references: expected a tensor on cuda:\d like queries, got cpu"
        )


@knn_gather.bad_calls
def _(device):
    points = torch.ones(4, 3, device=device)
    yield BadCall((points, points, [1]), TypeError, r"values: expected a torch.Tensor, got list")
    yield BadCall(
        (points, points, points[:3]), ValueError, r"values: expected shape \[4, ...\], a row a reference, got"
    )
    yield BadCall((points[0], points, points), ValueError, r"queries: expected shape \[N, 3\], got \[3\]")
    if device.type == "cuda":
        yield BadCall((points, points, points.cpu()), ValueError, r"values: expected a tensor on cuda:\d like queries")
