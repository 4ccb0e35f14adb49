"""Spatial ops: a label transfer over the distributions that tell search structures apart, growth, ragged batches."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other, Peer
from prequal.registry import Cost


def searched(queries: Tensor, references: Tensor, query_ptr: Tensor | None, reference_ptr: Tensor | None) -> int:
    """The bytes of both point sets and their pointers, once; an index holds the references in another order."""
    read = [x for x in (queries, references, query_ptr, reference_ptr) if x is not None]
    return sum(x.numel() * x.element_size() for x in read)


def found(queries: Tensor, k: int) -> int:
    """The bytes of a distance and an index a neighbour."""
    return queries.shape[0] * k * ((8 if queries.element_size() == 8 else 4) + 8)


@prequal.knn.cost
def _(queries, references, k, query_ptr, reference_ptr, radius, index):
    # No FLOPs: how many pairs must be looked at depends on the points, and the search of the reference (all of them)
    # bounds nobody.
    return Cost(searched(queries, references, query_ptr, reference_ptr) + found(queries, k))


@prequal.radius.cost
def _(queries, references, r, max_neighbors, query_ptr, reference_ptr, index):
    read = searched(queries, references, query_ptr, reference_ptr)
    return Cost(read + found(queries, max_neighbors) + 8 * queries.shape[0])


@prequal.knn_gather.cost
def _(queries, references, values, query_ptr, reference_ptr, index):
    n, m = queries.shape[0], references.shape[0]
    row = math.prod(values.shape[1:]) * values.element_size()
    read = searched(queries, references, query_ptr, reference_ptr)
    return Cost(read + (min(n, m) + n) * row)  # several queries may ask for one row


@prequal.knn_interpolate.cost
def _(queries, references, values, k, query_ptr, reference_ptr, index):
    n, m = queries.shape[0], references.shape[0]
    row = math.prod(values.shape[1:]) * values.element_size()
    read = searched(queries, references, query_ptr, reference_ptr)
    return Cost(read + (min(n, m) + n) * row)  # one of the k rows at least must come from its own place


QUERIES, REFERENCES = 100_000, 8_000  # a mesh's vertices, labelled from a sample
ROWS = 1024  # queries that are compared with the reference, which looks at every pair
JITTER = 1e-3  # a fiftieth of the distance between 8,000 references in a unit cube
# (distribution, k, k in the quick list)
KINDS: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("volume + jitter", (1, 8, 32, 128), (1, 8)),
    ("uniform, independent", (1, 8), ()),
    ("smooth sphere", (1,), ()),
    ("clustered", (1, 8), (1,)),
    ("duplicates", (1,), ()),
    ("one far outlier", (1,), ()),
    ("queries far away", (1,), ()),
    ("all scales", (1, 8), (1,)),
    ("centre of a sphere", (1,), ()),
    ("Igea scan", (1, 8), (1,)),
)


def cloud(kind: str, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Queries [n, 3] (of a scan all its vertices) and references [m, 3], some of them or what the kind says."""
    generator = torch.Generator().manual_seed(0)
    if kind == "smooth sphere":
        points = F.normalize(torch.randn(n, 3, generator=generator), dim=1)
    elif kind == "centre of a sphere":  # every reference is as near as the next
        references = F.normalize(torch.randn(m, 3, generator=generator), dim=1)
        return JITTER * torch.randn(n, 3, generator=generator), references
    elif kind == "all scales":  # forty decades of distance from the origin, as many points in each
        direction = F.normalize(torch.randn(n, 3, generator=generator, dtype=torch.float64), dim=1)
        points = (direction * 10 ** (40 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 20)).float()
    elif kind == "clustered":
        centres = torch.rand(20, 3, generator=generator)
        points = centres[torch.arange(n) % 20] + 1e-3 * torch.randn(n, 3, generator=generator)
    elif kind == "duplicates":  # 512 places for all of them
        points = (8 * torch.rand(n, 3, generator=generator)).floor()
    elif kind == "Igea scan":
        import numpy as np

        points = torch.from_numpy(np.load(str(scan())).astype("float32"))
    elif kind == "uniform, independent":
        return torch.rand(n, 3, generator=generator), torch.rand(m, 3, generator=generator)
    else:  # what a labelled mesh looks like: every query is next to its reference
        references = torch.rand(m, 3, generator=generator)
        jitter = JITTER * torch.randn(n, 3, generator=generator)
        queries = references[torch.randint(m, (n,), generator=generator)] + jitter
        if kind == "one far outlier":  # a bounding box 10^6 times the cloud
            references[0] = 1e6
        elif kind == "queries far away":
            queries += 100.0
        return queries, references
    return points, points[torch.randperm(len(points), generator=generator)[:m]].clone()


def scan() -> pathlib.Path | None:
    folder = os.environ.get("PREQUAL_TEST_DATA")
    found = pathlib.Path(folder) / "igea_vertices.npy" if folder else None
    return found if found is not None and found.exists() else None


def nearest_enough(got: Any, want: Any, args: Any) -> str | None:
    """Others may rank by |q|² + |r|² - 2qr in fp32: their neighbour may be farther than the true one by the rounding of
    that sum, some 16 ulp of its largest term, and no more. Ranking in half precision is wrong by this standard."""
    queries, references = args[0], args[1]
    dist2, idx = want[0], got
    if tuple(idx.shape) != tuple(dist2.shape):
        return f"shape {list(idx.shape)}, expected {list(dist2.shape)}"
    if not bool(((idx >= 0) & (idx < references.shape[0])).all()):
        return "indices outside the references"
    theirs = (queries[:, None] - references[idx.long()]).square().sum(-1)
    # one far point must not excuse an error everywhere: the scale of each query and of its true neighbour
    scale = queries.square().sum(-1, keepdim=True) + dist2 + 1e-6
    wrong = int((theirs > dist2 + 2e-6 * scale).sum())
    return f"{wrong} of {theirs.numel()} neighbours are not the nearest" if wrong else None


def cdist(queries: Tensor, references: Tensor, k: int) -> Tensor:
    distance = torch.cdist(queries, references)
    return distance.argmin(1, keepdim=True) if k == 1 else distance.topk(k, largest=False).indices


def brute_force(queries: Tensor, references: Tensor, k: int) -> Tensor:
    """As tuned as plain torch gets: |r|² - 2qr by one GEMM, in pieces that stay in the L2 cache."""
    rows = max(64, (1 << 23) // max(1, len(references)))
    square = references.square().sum(1)
    found = []
    for piece in queries.split(rows):
        score = torch.addmm(square, piece, references.t(), alpha=-2.0)
        found.append(score.argmin(1, keepdim=True) if k == 1 else score.topk(k, largest=False).indices)
    return torch.cat(found)


def squares(queries: Tensor, references: Tensor) -> Tensor:
    """[N, M] by direct differences, as the op takes them."""
    x, y, z = (queries[:, None, axis] - references[None, :, axis] for axis in range(3))
    return (x * x + y * y) + z * z


def radius_by_topk(queries: Tensor, references: Tensor, r: float, max_neighbors: int) -> tuple[Tensor, Tensor, Tensor]:
    dist2, idx = squares(queries, references).topk(max_neighbors, largest=False)
    outside = dist2 > r * r
    return dist2.masked_fill(outside, torch.inf), idx.masked_fill(outside, -1), (~outside).sum(1)


def as_far(got: Any, want: Any, args: Any) -> str | None:
    """The same distances and counts: among equals, another neighbour is as right."""
    if not torch.allclose(got[0], want[0], rtol=1e-6, atol=0.0):
        return "other distances"
    wrong = int((got[2] != want[2]).sum())
    return f"{wrong} of {want[2].numel()} counts differ" if wrong else None


def interpolate_by_topk(queries: Tensor, references: Tensor, values: Tensor, k: int) -> Tensor:
    dist2, idx = squares(queries, references).topk(k, largest=False)
    weights = 1.0 / dist2.clamp(min=1e-16)
    return (weights[..., None] * values[idx]).sum(1) / weights.sum(1, keepdim=True)


def gather_by_cdist(queries: Tensor, references: Tensor, values: Tensor) -> Tensor:
    return values[torch.cdist(queries, references).argmin(1)]


def nearly(got: Any, want: Any, args: Any) -> str | None:
    return None if torch.allclose(got, want, rtol=1e-4, atol=1e-4) else "other means"


def nearly_all(got: Any, want: Any, args: Any) -> str | None:
    """cdist errs by its cancellation: some labels of another neighbour that is as near are not held against it."""
    wrong = int((got != want).sum())
    return f"{wrong} of {want.numel()} labels differ" if wrong > 1e-3 * want.numel() else None


SEGMENTS, SEGMENT_QUERIES, SEGMENT_REFERENCES = 32, 4096, 1024  # as the levels of a point network have them


def cdist_in_a_batch(queries: Tensor, references: Tensor, k: int, query_ptr: Tensor, reference_ptr: Tensor) -> Tensor:
    """Where all segments happen to be of one size."""
    q, r = queries.view(SEGMENTS, -1, 3), references.view(SEGMENTS, -1, 3)
    idx = torch.cdist(q, r).topk(k, largest=False).indices
    return (idx + reference_ptr[:-1, None, None]).flatten(0, 1)


def torch_cluster() -> Any:
    from torch_cluster import knn

    return lambda q, r, k: knn(r, q, k)[1].view(len(q), k)


def torchbvh() -> Any:
    import torchbvh as tb

    def search(q: Tensor, r: Tensor, k: int) -> Tensor:
        with tb.BVH(r) as bvh:
            return bvh.knn(q, k=k)[0]

    return search


def torch_kdtree() -> Any:
    from torch_kdtree import build_kd_tree

    return lambda q, r, k: build_kd_tree(r).query(q, nr_nns_searches=k)[1].view(len(q), k)


def pytorch3d() -> Any:
    from pytorch3d.ops import knn_points

    return lambda q, r, k: knn_points(q[None], r[None], K=k).idx[0]


def cupyx() -> Any:
    import cupy
    from cupyx.scipy.spatial import KDTree

    def search(q: Tensor, r: Tensor, k: int) -> Tensor:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            found = KDTree(cupy.from_dlpack(r)).query(cupy.from_dlpack(q), k)[1]
        return torch.from_dlpack(found).view(len(q), k)

    return search


def cupy_knn() -> Any:
    import cupy
    from cupy_knn import LBVHIndex

    prepared: dict[int, Any] = {}  # its code for k is made at run time: once, not in every call

    def search(q: Tensor, r: Tensor, k: int) -> Tensor:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            if k not in prepared:
                prepared[k] = LBVHIndex()
                prepared[k].prepare_knn_default(k)
            index = prepared[k]
            index.build(cupy.from_dlpack(r))
            found = index.query_knn(cupy.from_dlpack(q))[0]
        return torch.from_dlpack(found.astype(cupy.int64)).view(len(q), k)

    return search


def k_of_torchbvh(args: Any) -> str | None:
    return None if args[2] in (4, 8, 16) else "takes k of 4, 8 and 16"


PEERS = (
    Peer("torchbvh", "knn", torchbvh, nearest_enough, k_of_torchbvh),
    Peer("cupyx", "knn", cupyx, nearest_enough),
    Peer("cupy_knn", "knn", cupy_knn, nearest_enough),
    Peer("torch_kdtree", "knn", torch_kdtree, nearest_enough),
    Peer("torch_cluster", "knn", torch_cluster, nearest_enough),
    Peer("pytorch3d", "knn", pytorch3d, nearest_enough),
)


BRUTE_FORCE_UP_TO = 100_000  # a million times a million take it seconds a call


def cases() -> Iterator[Case]:
    others = [Other("torch.cdist + argmin", cdist, nearest_enough)]
    brute = Other("torch brute force", brute_force, nearest_enough)  # twice as slow: once is enough
    size = f"[{QUERIES}] to [{REFERENCES}]"
    for kind, every_k, quick in KINDS:
        if kind == "Igea scan" and scan() is None:
            continue
        for k in every_k:

            def make(device: torch.device, kind=kind, k=k) -> tuple[Any, ...]:
                return *(x.to(device) for x in cloud(kind, QUERIES, REFERENCES)), k

            first = kind == "volume + jitter" and k == 1
            yield Case(
                "knn",
                f"{kind}, k {k}, {size if kind != 'Igea scan' else f'all vertices to [{REFERENCES}]'}",
                make,
                quick=k in quick,
                others=[*others, brute] if first else others,
                compiled=cdist if first else None,
                compare_compiled=nearest_enough,
                rows=ROWS,
            )
    yield from growing()
    yield from ragged_batches()
    yield from of_an_index()

    def labels(device: torch.device) -> tuple[Any, ...]:
        queries, references = (x.to(device) for x in cloud("volume + jitter", QUERIES, REFERENCES))
        return queries, references, torch.arange(REFERENCES, device=device)

    eager = [Other("torch.cdist + argmin", gather_by_cdist, nearly_all)]
    yield Case("knn_gather", f"volume + jitter, int64 labels, {size}", labels, True, others=eager, rows=ROWS)

    for k, width in ((3, 64), (8, 3)):

        def features(device: torch.device, k=k, width=width) -> tuple[Any, ...]:
            queries, references = (x.to(device) for x in cloud("uniform, independent", QUERIES, REFERENCES))
            values = torch.rand(REFERENCES, width, generator=torch.Generator().manual_seed(1)).to(device)
            return queries, references, values, k

        name = f"interpolated, uniform, k {k}, {size}, rows of {width}"
        eager = [Other("torch, direct differences + topk", interpolate_by_topk, nearly)]
        yield Case("knn_interpolate", name, features, k == 3, others=eager, rows=ROWS)

    for kind, r, most in (("uniform, independent", 0.1, 32), ("clustered", 1e-3, 32)):

        def ball(device: torch.device, kind=kind, r=r, most=most) -> tuple[Any, ...]:
            return *(x.to(device) for x in cloud(kind, QUERIES, REFERENCES)), r, most

        name = f"within {r:g}, {kind}, at most {most}, {size}"
        eager = [Other("torch, direct differences + topk", radius_by_topk, as_far)]
        yield Case("radius", name, ball, kind != "clustered", others=eager, rows=ROWS)


def growing() -> Iterator[Case]:
    """Against N = M, and against M alone."""
    brute = Other("torch brute force", brute_force, nearest_enough)
    for k in (1, 8):
        for n in (10_000, 100_000, 1_000_000, 10_000_000):

            def grown(device: torch.device, n=n, k=k) -> tuple[Any, ...]:
                generator = torch.Generator(device).manual_seed(1)
                return *(torch.rand(n, 3, device=device, generator=generator) for _ in range(2)), k

            yield Case(
                "knn",
                f"uniform, k {k}, [{n}] to as many others",
                grown,
                series=f"N = M, k {k}",
                size=n,
                runs=100 if n <= 100_000 else 20,
                others=[brute] if n <= BRUTE_FORCE_UP_TO else (),
                rows=256,
                peers=n <= 1_000_000,
            )
    for m in (1_000, 32_000, 100_000, 1_000_000):

        def against(device: torch.device, m=m) -> tuple[Any, ...]:
            return *(x.to(device) for x in cloud("volume + jitter", QUERIES, m)), 1

        yield Case(
            "knn",
            f"volume + jitter, k 1, [{QUERIES}] to [{m}]",
            against,
            series=f"N = {QUERIES:,}, over M, k 1",
            size=m,
            others=[brute] if m <= BRUTE_FORCE_UP_TO else (),
            rows=256,
        )


def ragged_batches() -> Iterator[Case]:
    def batch(device: torch.device) -> tuple[Any, ...]:
        n, m = SEGMENTS * SEGMENT_QUERIES, SEGMENTS * SEGMENT_REFERENCES
        queries, references = (x.to(device) for x in cloud("uniform, independent", n, m))
        at = torch.arange(SEGMENTS + 1, device=device)
        return queries, references, 3, at * SEGMENT_QUERIES, at * SEGMENT_REFERENCES

    yield Case(
        "knn",
        f"{SEGMENTS} segments, uniform, k 3, [{SEGMENT_QUERIES}] to [{SEGMENT_REFERENCES}] each",
        batch,
        others=[Other("torch.cdist + topk, in a batch", cdist_in_a_batch, nearest_enough)],
        peers=False,
    )


def of_an_index() -> Iterator[Case]:
    """What a query costs where the structure is there already."""
    if not hasattr(prequal, "knn_index"):
        return
    for n, m, k in ((QUERIES, REFERENCES, 1), (1_000, 1_000_000, 8)):

        def asked(device: torch.device, n=n, m=m, k=k) -> tuple[Any, ...]:
            queries, references = (x.to(device) for x in cloud("uniform, independent", n, m))
            return queries, references, k, None, None, None, prequal.knn_index(references)

        yield Case("knn", f"indexed, uniform, k {k}, [{n}] to [{m}]", asked, peers=False, rows=ROWS)
