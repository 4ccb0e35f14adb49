"""What the spatial ops are tried on: clouds that tell search structures apart, in right calls and in wrong ones."""

import itertools
import math

import torch

from prequal import constraints as c
from prequal.registry import BadCall, Sample

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


def around_a_centre(device, queries, references, seed=0, share=3):
    """(queries, references): all references on a sphere, every `share`-th query near its centre, the others on it."""
    points = 2.0 * cloud(device, queries + references, seed, "surface")
    middle = 1e-3 * cloud(device, queries, seed + 1)
    inside = torch.arange(queries, device=points.device)[:, None] % share == 0
    return torch.where(inside, middle, points[:queries]), points[queries:].clone()


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
    for k in (1, 3, 8):  # most points are in reach: the grid's search gives up, of all queries of a warp or of some
        yield Sample(f"many references of all scales, k {k}", (*clouds(97, 2003, "all scales"), k))
        yield Sample(f"some from the centre of a sphere, k {k}", (*around_a_centre(device, 97, 2003), k))
    centred = around_a_centre(device, 97, 2003, share=32)
    yield Sample("few from the centre of a sphere, radius 1.9, k 2", (*centred, 2), {"radius": 1.9})
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
    yield Sample("some from the centre of a sphere", (*around_a_centre(device, 97, 2003), values(2003, 3)))
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
    yield Sample("some from the centre of a sphere", (*around_a_centre(device, 97, 2003), 2.0, 5))
    yield Sample("0 among duplicates", (*clouds(130, 1203, "duplicates"), 0, 20))
    yield Sample("nobody near", (cloud(device, 100, 1) + 5.0, cloud(device, 700, 2), 0.1, 5))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield Sample(c.short(dtype), (*clouds(100, 700, dtype=dtype), 0.1, 8))
    yield Sample("many references", (cloud(device, 60, 1, "surface"), cloud(device, 33000, 7, "surface"), 0.05, 100))
    yield Sample("many queries", (*clouds(9001, 211), 0.1, 8))
    for name, queried, referred, k in SEGMENTS:
        q, points, pointers = ragged(device, queried, referred)
        yield Sample(name, (q, points, 0.3, k), pointers)


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
    text = r"index: expected shape \[\d+\], as knn_index makes it of these references, got \[2\]"
    yield bad(ValueError, text, index=no_index[0])
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
