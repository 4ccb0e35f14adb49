"""Exact neighbours of points in the plane and in space: k nearest, their values, interpolation, within a radius."""

import ctypes
import itertools
import math

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Exact, Tolerance
from prequal.registry import BadCall, Sample, op

MAX_K = 128
# The reference compares every query with every reference, this many pairs at a time (a pair takes about 20 bytes).
PAIRS_AT_A_TIME = {"cpu": 1 << 20, "cuda": 1 << 26}
NOBODY = torch.iinfo(torch.int64).max
# Interpolation: squared distances below it count as it, so that a query on a reference has a finite weight.
NEAREST_DIST2 = 1e-16


# ---- samples: clouds that tell search structures apart -----------------------------------------------------------

KINDS = (
    *("volume", "surface", "clustered", "duplicates", "one point"),
    *("line", "outlier", "far from zero", "all scales", "broken"),
    *("plane x", "plane y", "plane z", "lattice", "sorted", "two ends"),
    *("subnormal", "underflowing", "overflowing", "huge", "signed zeros", "nearly equal"),
)


def cloud(device, points, seed=0, kind="volume", dim=3):
    """Sample clouds: the density of a real one is never even."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float32)

    x = rand(points, dim)
    if kind == "surface":
        x = torch.nn.functional.normalize(x - 0.5, dim=1)
    elif kind == "clustered":
        x = 1e-3 * x + 10.0 * rand(20, dim)[torch.arange(points) % 20]
    elif kind == "duplicates":
        x = (4 * x).floor()
    elif kind == "one point":
        x = torch.full_like(x, 0.25)
    elif kind == "line":
        x = x[:, :1] * torch.tensor([1.0, 2.0, 3.0][:dim], dtype=torch.float32)
    elif kind == "outlier" and points:
        x[0] = 1e6
    elif kind == "far from zero":
        x = x + 1e6
    elif kind == "all scales":
        x = 10.0 ** (40 * x - 20)
    elif kind == "broken" and points:
        x[:: max(1, points // 7)] = torch.tensor([torch.nan, torch.inf, -torch.inf][:dim])
    elif kind in ("plane x", "plane y", "plane z"):
        x[:, "xyz".index(kind[-1]) % dim] = -2.5
    elif kind == "lattice":  # whole numbers: up to 2^dim neighbours at exactly one distance
        side = max(1, math.ceil(points ** (1 / dim)))
        place = torch.randperm(points, generator=generator)
        x = torch.stack([place // side**axis % side for axis in range(dim)], dim=1).float() + 0.5 * (seed % 2)
    elif kind == "sorted":
        x = x[x[:, 0].argsort()]
    elif kind == "two ends":  # empty space between
        x = 1e-2 * x + (torch.arange(points) % 2 * 100).to(x.dtype)[:, None]
    elif kind == "subnormal":  # squares of differences are subnormal numbers
        x = x * 1e-20
    elif kind == "underflowing":  # coordinates are subnormal, and every distance is zero
        x = x * 1e-39
    elif kind == "overflowing":  # some distances are infinite
        x = x * 3e19
    elif kind == "huge":  # all are, and some differences
        x = (x - 0.5) * 6e38
    elif kind == "signed zeros":
        x = (3 * x - 1.5).round() * 0.5
        x = torch.where(rand(points, dim) > 0.5, x, -x)
    elif kind == "nearly equal":  # an ulp or a few apart
        x = 1.0 + (8 * x).floor() * 2.0**-23
    return x.to(device)


def offsets(device, lengths, dtype=torch.int64):
    """CSR pointers of segments of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype).to(device)


# (name, queries a segment, references a segment, k)
SEGMENTS: tuple[tuple[str, list[int], list[int], int], ...] = (
    ("one segment", [257], [503], 3),
    ("no segment", [], [], 2),
    ("empty segments", [10, 0, 20, 0, 33], [40, 7, 0, 0, 50], 4),
    ("only empty segments", [0, 0, 0], [0, 0, 0], 1),
    ("one-point segments", [1] * 64, [1] * 64, 2),
    ("many tiny segments", [i % 5 for i in range(400)], [3 * i % 7 for i in range(400)], 3),
    ("segments below k", [50, 50, 50, 1], [3, 0, 31, 33], 33),
    ("uneven segments", [300, 1, 500, 0], [9001, 33, 4097, 1], 8),
    ("many queries in segments", [5000, 0, 4100, 1], [60, 5, 170, 9], 6),
    ("segments around 1024", [31, 32, 33, 100], [1023, 1024, 1025, 2049], 17),
)


def ragged(device, queries, references, kind="volume", dim=3, dtype=torch.float32, pointer=torch.int64):
    """(queries, references, {pointers}): all segments are in one place, so that a neighbour of another one is wrong."""
    points = (cloud(device, sum(n), seed, kind, dim).to(dtype) for seed, n in ((1, queries), (2, references)))
    pointers = {
        "query_ptr": offsets(device, queries, pointer),
        "reference_ptr": offsets(device, references, pointer),
    }
    return *points, pointers


def samples(device):
    """Sizes around warps, blocks and tiles; each k bound; every distribution in both dimensions."""

    def clouds(n, m, kind="volume", dim=3, dtype=torch.float32):
        return tuple(cloud(device, count, seed, kind, dim).to(dtype) for seed, count in ((1, n), (2, m)))

    yield Sample("quick", (cloud(device, 257, 1), cloud(device, 503, 2), 3))
    for n, m, k in ((1, 1, 1), (5, 3, 8), (0, 10, 2), (10, 0, 2), (0, 0, 1), (1, 500, 128), (500, 1, 2), (7, 128, 128)):
        yield Sample(f"{n} to {m}, k {k}", (*clouds(n, m), k))
    for n, m, k in ((1031, 8, 4), (1031, 9, 5), (300, 8192, 1), (12289, 40, 33), (8193, 700, 1), (4097, 2050, 2)):
        yield Sample(f"{n} to {m}, k {k}", (*clouds(n, m), k))
    bounds = itertools.cycle((1, 2, 3, 8, 17, 32, 33, 64, 100, 128))
    for m in (31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049):
        k = next(bounds)
        yield Sample(f"{m} references, k {k}", (*clouds(97, m), k))
    for m in (4095, 4096, 4097, 8191, 8193, 12289, 16385, 33000):
        k = next(bounds)
        yield Sample(f"{m} references, k {k}", (*clouds(64, m), k))
    for n in (31, 32, 33, 127, 128, 129, 255, 1023, 1024, 1025):
        k = next(bounds)
        yield Sample(f"{n} queries, k {k}", (*clouds(n, 400, dim=2 + n % 2), k))

    small, large = itertools.cycle((1, 4, 40, 128, 2, 9, 33)), itertools.cycle((17, 1, 64, 3, 100, 8, 32))
    for kind in KINDS:
        yield Sample(f"{kind}, small", (cloud(device, 300, 1, kind), cloud(device, 1203, 2, kind), next(small)))
        yield Sample(f"{kind}, large", (cloud(device, 200, 3, kind), cloud(device, 9001, 4, kind), next(large)))
        yield Sample(f"{kind}, plane", (*clouds(211, 1500, kind, 2), next(small)))
    yield Sample("one point, ties by index", (*clouds(40, 5000, "one point"), 40))
    yield Sample("lattice, on it", (cloud(device, 200, 4, "lattice"), cloud(device, 4096, 2, "lattice"), 33))
    yield Sample("grid in the plane", (cloud(device, 200, 4, "lattice", 2), cloud(device, 4096, 2, "lattice", 2), 9))
    yield Sample("volume to clustered", (cloud(device, 400, 1), cloud(device, 8191, 2, "clustered"), 1))
    yield Sample("outlier to clustered", (cloud(device, 400, 1, "outlier"), cloud(device, 3000, 2, "clustered"), 5))
    yield Sample("surface, many references", (cloud(device, 100, 1, "surface"), cloud(device, 20011, 7, "surface"), 8))
    queries, references = clouds(150, 3001)
    for name, far in (("beside", 2.0), ("far from", 1e3), ("out of sight of", 1e7), ("beyond the squares of", 1e25)):
        yield Sample(f"queries {name} every reference", (queries + far, references, 6))
    yield Sample("a query on every reference", (references[:1000], references, 1))
    yield Sample("a cloud to itself", (references[:700], references[:700], 3))
    for kind, k in (("clustered", 8), ("broken", 2), ("lattice", 40), ("outlier", 1)):
        yield Sample(f"many queries, {kind}", (*clouds(9001, 211, kind, 2 + k % 2), k))
    yield Sample("more queries than references", (references, references[:33].flip(0), 32))

    wide = torch.cat((cloud(device, 300, 1), cloud(device, 300, 2)), dim=1)
    yield Sample("strided", (wide[::2, ::2], wide[1::2, 1:4], 2))
    yield Sample("strided plane", (wide[::3, ::4], wide[1::2, 1:5:3], 33))
    yield Sample("column-major", (cloud(device, 200, 1).t().contiguous().t(), cloud(device, 300, 2), 32))
    yield Sample("misaligned", (cloud(device, 901, 1).flatten()[1:-2].view(900, 3), wide.flatten()[3:].view(-1, 3), 4))
    yield Sample("one query for all rows", (cloud(device, 1, 1).expand(50, 3), references, 7))

    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        name = c.short(dtype)
        yield Sample(name, (*clouds(50, 70, dtype=dtype), 3))
        yield Sample(f"{name}, plane", (*clouds(97, 1025, dim=2, dtype=dtype), 33))
        yield Sample(f"{name}, more references", (*clouds(64, 5000, "surface", dtype=dtype), 1))
        yield Sample(f"{name}, strided", (wide.to(dtype)[::2, ::2], wide.to(dtype)[1::2, 1:4], 5))
        yield Sample(f"{name}, misaligned", (wide.to(dtype).flatten()[1:898].view(-1, 3), wide.to(dtype)[:, 1:4], 2))
        for kind in ("duplicates", "outlier", "broken", "clustered", "all scales", "one point", "overflowing"):
            yield Sample(f"{name}, {kind}", (*clouds(60, 700, kind, dtype=dtype), next(small)))
    double = cloud(device, 300, 1).double()
    yield Sample("float64, below the ulp of float32", (1.0 + 1e-9 * double[:50], 1.0 + 1e-9 * double, 4))
    yield Sample("float64, squares that overflow", (1e200 * double[:50], -1e200 * double, 4))
    yield Sample("float64, squares that vanish", (1e-200 * double[:50], 1e-200 * double, 4))

    for name, queried, referred, k in SEGMENTS:
        q, r, pointers = ragged(device, queried, referred)
        yield Sample(name, (q, r, k), pointers)
    several = ([60, 0, 1, 90, 33], [700, 5, 64, 0, 300])
    for kind in ("one point", "lattice", "broken", "clustered", "all scales"):
        q, r, pointers = ragged(device, *several, kind)
        yield Sample(f"segments, {kind}", (q, r, 9), pointers)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        q, r, pointers = ragged(device, *several, dim=2, dtype=dtype, pointer=torch.int32)
        yield Sample(f"segments in the plane, {c.short(dtype)}, int32 pointers", (q, r, 5), pointers)
    q, r, pointers = ragged(device, *several)
    yield Sample("segments within a radius", (q, r, 6), {**pointers, "radius": 0.2})
    scale, scales = (
        torch.cat([torch.full((n, 1), 10.0**i, dtype=torch.float32) for i, n in enumerate(lengths)]).to(device)
        for lengths in several
    )
    yield Sample("segments of many scales", (q * scale, r * scales, 4), pointers)
    pointers["query_ptr"] = pointers["query_ptr"].repeat_interleave(2)[::2]
    pointers["reference_ptr"] = pointers["reference_ptr"].to(torch.int32)
    yield Sample("segments, strided and mixed pointers", (q, r, 3), pointers)

    for k, limit in ((1, 0.05), (8, 0.1), (100, 0.3), (33, math.inf), (3, 1e30), (3, 1e-30), (5, 0.0), (2, 1e300)):
        yield Sample(f"radius {limit}, k {k}", (*clouds(130, 1203), k), {"radius": limit})
    yield Sample("radius 0 among duplicates", (*clouds(130, 1203, "duplicates"), 33), {"radius": 0})
    for limit in (1.0, 2.0**0.5, 3.0**0.5, 0.75**0.5):  # as far as neighbours on the lattice are, before its rounding
        name, queries = f"radius {limit:.3f} on a lattice", cloud(device, 150, 3 if limit < 1 else 4, "lattice")
        yield Sample(name, (queries, cloud(device, 1000, 2, "lattice"), 32), {"radius": limit})
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        arguments = (*clouds(70, 700, dim=2, dtype=dtype), 8)
        yield Sample(f"{c.short(dtype)} within a radius", arguments, {"radius": 0.1})
    yield Sample("radius inf beyond the squares", (*clouds(50, 500, "huge"), 3), {"radius": math.inf})


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
    yield Sample("plane", (cloud(device, 257, 1, dim=2), cloud(device, 1025, 2, dim=2), values(1025, 2)))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield Sample(f"{c.short(dtype)} points", (queries.to(dtype), points.to(dtype), values(503)))
    for name, queried, referred, _ in SEGMENTS:
        q, r, pointers = ragged(device, queried, referred)
        yield Sample(name, (q, r, values(sum(referred))), pointers)
    q, r, pointers = ragged(device, [60, 0, 1, 90], [70, 5, 0, 0], "broken", dim=2, pointer=torch.int32)
    yield Sample("broken segments in the plane, rows", (q, r, values(75, 3, dtype=torch.float16)), pointers)


def interpolate_samples(device):
    points, queries, broken = cloud(device, 503, 2), cloud(device, 257, 1), cloud(device, 300, 5, "broken")

    def values(*shape, dtype=torch.float32):
        generator = torch.Generator().manual_seed(sum(shape))
        return (2.0 * torch.rand(*shape, generator=generator, dtype=torch.float32) - 1.0).to(device, dtype)

    yield Sample("quick", (queries, points, values(503, 4)))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        yield Sample(f"{c.short(dtype)} labels", (queries, points, values(503, dtype=dtype), 3))
        yield Sample(f"{c.short(dtype)} rows", (queries, points, values(503, 5, dtype=dtype), 8))
        yield Sample(f"{c.short(dtype)} points", (queries.to(dtype), points.to(dtype), values(503, 2), 4))
        yield Sample(f"{c.short(dtype)} alone", (queries.to(dtype), points.to(dtype), values(503, dtype=dtype), 33))
    for k in (1, 2, 17, 32, 64, 100, 128):
        yield Sample(f"k {k}", (queries, points, values(503, 3), k))
    for width in (1, 31, 32, 33, 64, 129, 256):
        yield Sample(f"rows of {width}", (queries[:65], points, values(503, width), 3))
    yield Sample("wide rows", (queries, points, values(503, 3, 11), 5))
    yield Sample("misaligned rows", (queries, points, values(503, 9, dtype=torch.float16)[:, 1:8], 3))
    yield Sample("column-major values", (queries, points, values(4, 503).t(), 3))
    yield Sample("rows of nothing", (queries, points, values(503, 0), 3))
    yield Sample("no queries", (queries[:0], points, values(503), 3))
    yield Sample("no references", (queries, points[:0], values(0, 2), 3))
    yield Sample("fewer references than k", (queries, points[:3], values(3, 2), 8))
    yield Sample("queries on references", (points[:200], points, values(503, 3), 4))
    yield Sample("broken points", (broken, broken.flip(0), values(300, 2), 5))
    yield Sample("plane", (cloud(device, 257, 1, dim=2), cloud(device, 1025, 2, dim=2), values(1025, 2), 6))
    for kind in ("clustered", "duplicates", "one point", "outlier", "far from zero", "all scales"):
        yield Sample(kind, (cloud(device, 150, 1, kind), cloud(device, 2003, 2, kind), values(2003, 3), 7))
    for kind in ("subnormal", "overflowing", "huge"):
        yield Sample(kind, (cloud(device, 150, 1, kind), cloud(device, 703, 2, kind), values(703, 3), 7))
    yield Sample("many references", (queries, cloud(device, 20011, 7, "surface"), values(20011, 3), 3))
    large = values(503, 3) * 1e30
    yield Sample("a large value on a reference", (points[:50], points, large.abs() + 1e30, 3))
    for name, queried, referred, k in SEGMENTS:
        q, r, pointers = ragged(device, queried, referred)
        yield Sample(name, (q, r, values(sum(referred), 2), k), pointers)
    q, r, pointers = ragged(device, [60, 0, 1, 90], [70, 5, 0, 0], "broken", dim=2, pointer=torch.int32)
    yield Sample("broken segments in the plane", (q, r, values(75, 3, dtype=torch.bfloat16)), pointers)


SAMPLE_RADII = {"clustered": 1e-3, "far from zero": 0.25, "all scales": 1.0, "two ends": 1e-2, "surface": 0.2} | {
    "subnormal": 1e-20,
    "overflowing": 1e19,
    "huge": 1e38,
    "nearly equal": 2.0**-22,
}


def radius_samples(device):
    def clouds(n, m, kind="volume", dim=3, dtype=torch.float32):
        return tuple(cloud(device, count, seed, kind, dim).to(dtype) for seed, count in ((1, n), (2, m)))

    yield Sample("quick", (*clouds(257, 503), 0.15, 8))
    for n, m in ((1, 1), (0, 10), (10, 0), (5, 3)):
        yield Sample(f"{n} to {m}", (*clouds(n, m), 10.0, 4))
    for r, most in ((0.0, 1), (0.05, 32), (0.1, 2), (0.2, 64), (0.3, 128), (math.inf, 33), (1e30, 17), (1e-30, 3)):
        yield Sample(f"{r} of a volume, {most}", (*clouds(130, 2049), r, most))
    for kind in KINDS:
        r = SAMPLE_RADII.get(kind, 0.5)
        yield Sample(kind, (*clouds(150, 1203, kind), r, 16))
        yield Sample(f"{kind}, plane", (*clouds(150, 803, kind, 2), r, 40))
    for r in (1.0, 2.0**0.5, 3.0**0.5, 0.75**0.5):  # as far as neighbours on the lattice are, before its rounding
        queries = cloud(device, 150, 3 if r < 1 else 4, "lattice")
        yield Sample(f"{r:.3f} on a lattice", (queries, cloud(device, 1000, 2, "lattice"), r, 32))
    yield Sample("0 among duplicates", (*clouds(130, 1203, "duplicates"), 0, 20))
    yield Sample("nobody near", (cloud(device, 100, 1) + 5.0, cloud(device, 700, 2), 0.1, 5))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield Sample(c.short(dtype), (*clouds(100, 700, dtype=dtype), 0.1, 8))
    yield Sample("many references", (cloud(device, 60, 1, "surface"), cloud(device, 33000, 7, "surface"), 0.05, 100))
    yield Sample("many queries", (*clouds(9001, 211), 0.1, 8))
    for name, queried, referred, k in SEGMENTS:
        q, points, pointers = ragged(device, queried, referred)
        yield Sample(name, (q, points, 0.3, k), pointers)


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
            idx = torch.full((n, found), -1, dtype=torch.int64)
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
    c.has_shape("references", references, ("M", int(queries.shape[1])))
    _check_pointers(queries, references, query_ptr, reference_ptr)
    if index is not None:
        if index.dtype != torch.uint8:
            raise TypeError(f"index: expected uint8, as knn_index makes it, got {c.short(index.dtype)}")
        c.has_shape("index", index, ("bytes",))


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
        c.has_shape(name, pointer, (int(like.shape[0]),), " like query_ptr")
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
            in the call. `KnnIndex` keeps one and notices when it goes stale.

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

    Gradients of dist2 flow to both point sets, twice if asked, and are zero at zero distance and where idx is -1.

    Raises:
        TypeError: not tensors, not floating, or of two dtypes; k is not an int; a pointer without the other, or not of
            int32 or int64; an index that is not uint8.
        ValueError: not [N, D] and [M, D]; k outside 1 to 128; the tensors are on two devices; pointers of two lengths,
            or (on the CPU) not rising from 0 to the number of rows; a radius that is negative or NaN.

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


def pull_of_distances(queries, references, idx, grad_dist2):
    """d dist2 / d query = 2 (query - reference); the neighbours themselves do not move. Zero at zero distance."""
    wide = working_dtype(queries)
    nobody = idx < 0
    at = idx.clamp(min=0)
    q, r = queries.to(wide), references.to(wide)
    if references.shape[0] == 0:
        return {"queries": torch.zeros_like(queries), "references": torch.zeros_like(references)}
    difference = (q[:, None, :] - r[at]).masked_fill(nobody[..., None], 0.0)
    pull = 2.0 * grad_dist2.masked_fill(nobody, 0.0)[..., None] * difference
    to_references = torch.zeros_like(r).index_add(0, at.flatten(), -pull.reshape(-1, r.shape[1]))
    return {"queries": pull.sum(1).to(queries.dtype), "references": to_references.to(references.dtype)}


@knn.backward
def _(args, kept, grad_dist2, grad_idx):
    return pull_of_distances(args["queries"], args["references"], kept[0], grad_dist2)


POINT_NEEDS = [
    c.dtype_in("queries", torch.float16, torch.bfloat16, torch.float32, torch.float64),
    c.at_most("queries", 0, 0x7FFFFFF0),
    c.at_most("references", 0, 0x7FFFFFF0),
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
        values: [M, ...], any dtype, same device: a row a reference.
        query_ptr: [B + 1], int32 or int64: segments of a ragged batch, as in `knn`.
        reference_ptr: [B + 1], the same of the references. Both or neither.
        index: what `knn_index` made of these references, as in `knn`.

    Returns:
        [N, ...], contiguous, of values' dtype: ``values[knn(queries, references, 1)[1][:, 0]]``.

    A query without a neighbour (not finite, no finite reference, none in its segment) gets a row that no label is: NaN
    for floating dtypes, -1 for signed integers, the largest value for unsigned ones, False for bool.

    Gradients flow to values.

    Raises:
        TypeError: not tensors, or points not floating or of two dtypes; pointers or an index as `knn` refuses them.
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
        total = total.index_add(0, nearest.clamp(min=0), grad.to(total.dtype).masked_fill(missing, 0.0))
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
        total = total.index_add(0, at.clamp(min=0), share)
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


# ---- wrong calls -------------------------------------------------------------------------------------------------


def wrong_searches(device, *rest):
    """What every op here refuses of points, pointers and index; `rest` are its other arguments."""
    points = torch.ones(4, 3, device=device)
    at = torch.tensor([0, 4], device=device)
    both = {"query_ptr": at, "reference_ptr": at}

    def bad(error, match, queries=points, references=points, **kwargs):
        return BadCall((queries, references, *rest), error, match, kwargs)

    yield bad(TypeError, r"queries: expected a torch.Tensor, got list", points.tolist())
    yield bad(TypeError, r"references: expected a torch.Tensor, got NoneType", points, None)
    yield bad(TypeError, r"queries: expected a floating dtype, got int64", points.long())
    yield bad(TypeError, r"references: expected float32 like queries, got float16", points, points.half())
    for shape in ((4,), (4, 1), (1, 4, 3), (3, 4)):
        queries = torch.ones(shape, device=device)
        text = rf"queries: expected shape \[N, 2\] or \[N, 3\], got \[{', '.join(str(n) for n in shape)}\]"
        yield bad(ValueError, text, queries)
    yield bad(ValueError, r"references: expected shape \[M, 3\], got \[3\]", points, points[0])
    yield bad(ValueError, r"references: expected shape \[M, 2\], got \[4, 3\]", points[:, :2])
    yield bad(TypeError, r"query_ptr: expected a torch.Tensor, got list", query_ptr=[0, 4], reference_ptr=at)
    yield bad(TypeError, r"query_ptr: expected a torch.Tensor beside reference_ptr, got NoneType", reference_ptr=at)
    yield bad(TypeError, r"reference_ptr: expected a torch.Tensor beside query_ptr, got NoneType", query_ptr=at)
    for name in both:
        yield bad(TypeError, rf"{name}: expected int32 or int64, got float32", **both | {name: at.float()})
        yield bad(ValueError, rf"{name}: expected shape \[B \+ 1\], got \[0\]", **both | {name: at[:0]})
        yield bad(ValueError, rf"{name}: expected shape \[B \+ 1\], got \[1, 2\]", **both | {name: at[None]})
    text = r"reference_ptr: expected shape \[2\] like query_ptr, got \[3\]"
    yield bad(ValueError, text, query_ptr=at, reference_ptr=torch.tensor([0, 2, 4], device=device))
    yield bad(TypeError, r"index: expected a torch.Tensor, got bytes", index=b"")
    yield bad(TypeError, r"index: expected uint8, as knn_index makes it, got int64", index=at)
    no_index = torch.zeros(2, 2, dtype=torch.uint8, device=device)
    yield bad(ValueError, r"index: expected shape \[bytes\], got \[2, 2\]", index=no_index)
    if device.type == "cuda":
        where = r"expected a tensor on cuda:\d like queries, got cpu"
        yield bad(ValueError, f"references: {where}", points, points.cpu())
        for name in both:
            yield bad(ValueError, f"{name}: {where}", **both | {name: at.cpu()})
        yield bad(ValueError, f"index: {where}", index=no_index[0].cpu())
    else:
        for wrong in ([0, 3], [1, 4], [0, 5], [0, 3, 2, 4], [0, -1, 4]):
            text = rf"query_ptr: expected offsets that rise from 0 to 4, got \[{', '.join(str(n) for n in wrong)}\]"
            good = torch.tensor([0, *(4 for _ in wrong[1:])], device=device)
            yield bad(ValueError, text, query_ptr=torch.tensor(wrong, device=device), reference_ptr=good)
        text = r"reference_ptr: expected offsets that rise from 0 to 4, got \[0, 3\]"
        yield bad(ValueError, text, query_ptr=at, reference_ptr=at.clamp(max=3))


def wrong_counts(name, call):
    """Of an argument from 1 to 128."""
    yield BadCall(call(0), ValueError, rf"{name}: expected 1 to 128, got 0")
    yield BadCall(call(129), ValueError, rf"{name}: expected 1 to 128, got 129")
    yield BadCall(call(1.5), TypeError, rf"{name}: expected an int, got float")
    yield BadCall(call(True), TypeError, rf"{name}: expected an int, got bool")


WRONG_RADII = (
    (-0.5, ValueError, "expected a number from 0, got -0.5"),
    (math.nan, ValueError, "expected a number from 0, got nan"),
    (-math.inf, ValueError, "expected a number from 0, got -inf"),
    (True, TypeError, "expected a float, got bool"),
    ("1", TypeError, "expected a float, got str"),
)


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


def index_samples(device):
    yield Sample("quick", (cloud(device, 503, 2),))
    for m in (0, 1, 31, 32, 33, 1023, 1024, 1025, 12289, 33000):
        yield Sample(f"{m} points", (cloud(device, m, 3),))
    for kind in KINDS:
        yield Sample(kind, (cloud(device, 1201, 4, kind),))
    for dim in (2, 3):
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            yield Sample(f"{dim} dimensions, {c.short(dtype)}", (cloud(device, 1201, 5, dim=dim).to(dtype),))
    yield Sample("strided", (cloud(device, 700, 6, dim=3).repeat(1, 2)[::2, 1:4],))
    for name, _, lengths, _ in SEGMENTS:
        pointer = offsets(device, lengths, torch.int32)
        yield Sample(name, (cloud(device, sum(lengths), 7),), {"reference_ptr": pointer})
    pointer = offsets(device, [300, 0, 7, 900])
    yield Sample("segments, doubles", (cloud(device, 1207, 7).double(),), {"reference_ptr": pointer})


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


@knn_index.fake
def _(references, reference_ptr):
    boxes = -(-references.shape[0] // FAN)
    size = 8 if references.dtype == torch.float64 else 4
    total = boxes * FAN * 4 * size
    while boxes > 0:
        total += -(-boxes // FAN) * FAN * (6 * size + 8)
        if boxes <= FAN:
            break
        boxes = -(-boxes // FAN)
    return references.new_empty(total, dtype=torch.uint8)


knn_index.kernel(
    needs=[
        c.dtype_in("references", torch.float16, torch.bfloat16, torch.float32, torch.float64),
        c.at_most("references", 0, 0x7FFFFFF0),
    ]
)


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
