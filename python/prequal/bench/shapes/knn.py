"""knn and knn_gather: a label transfer over the distributions that tell search structures apart, and growth."""

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
# (distribution, in the quick list)
KINDS = (
    *(("volume", True), ("uniform, independent", False), ("smooth sphere", False)),
    *(("clustered", True), ("duplicates", False), ("one far outlier", False)),
)


def cloud(kind: str, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Queries [n, 3] and, unless the kind says otherwise, m of them as references."""
    generator = torch.Generator().manual_seed(0)
    if kind == "smooth sphere":
        points = F.normalize(torch.randn(n, 3, generator=generator), dim=1)
    elif kind == "clustered":
        centres = torch.rand(20, 3, generator=generator)
        points = centres[torch.arange(n) % 20] + 1e-3 * torch.randn(n, 3, generator=generator)
    elif kind == "duplicates":  # 512 places for all of them
        points = (8 * torch.rand(n, 3, generator=generator)).floor()
    elif kind == "Igea scan":
        import numpy as np

        points = torch.from_numpy(np.load(str(scan())).astype("float32"))
    else:
        points = torch.rand(n, 3, generator=generator)
    references = points[torch.randperm(len(points), generator=generator)[:m]].clone()
    if kind == "uniform, independent":
        references = torch.rand(m, 3, generator=generator)
    elif kind == "one far outlier":
        references[0] = 1e6
    return points, references


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

    def search(q: Tensor, r: Tensor, k: int) -> Tensor:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            index = LBVHIndex()
            index.build(cupy.from_dlpack(r))
            index.prepare_knn_default(k)
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


def cases() -> Iterator[Case]:
    others = [Other("torch.cdist + argmin", cdist, nearest_enough)]
    kinds = [*KINDS, *([("Igea scan", False)] if scan() else [])]
    for kind, quick in kinds:
        for k in (1, 8, 32):

            def make(device: torch.device, kind=kind, k=k) -> tuple[Any, ...]:
                return *(x.to(device) for x in cloud(kind, QUERIES, REFERENCES)), k

            yield Case(
                "knn",
                f"{kind}, k {k}, [{QUERIES}] to [{REFERENCES}]",
                make,
                quick=quick and k < 32 and (k == 1 or kind == "volume"),
                others=others,
                compiled=cdist if kind == "volume" and k == 1 else None,
                compare_compiled=nearest_enough,
                rows=ROWS,
            )
    for n in (10_000, 100_000, 1_000_000, 10_000_000):

        def grown(device: torch.device, n=n) -> tuple[Any, ...]:
            points = torch.rand(n, 3, device=device, generator=torch.Generator(device).manual_seed(1))
            return points, points, 1

        yield Case(
            "knn",
            f"volume, k 1, [{n}] to itself",
            grown,
            series="volume to itself, k 1",
            size=n,
            runs=100 if n <= 100_000 else 20,
            others=others if n <= 10_000 else (),
            rows=256,
            peers=n <= 1_000_000,
        )

    def labels(device: torch.device) -> tuple[Any, ...]:
        queries, references = (x.to(device) for x in cloud("volume", QUERIES, REFERENCES))
        return queries, references, torch.arange(REFERENCES, device=device)

    yield Case("knn_gather", f"volume, int64 labels, [{QUERIES}] to [{REFERENCES}]", labels, True, rows=ROWS)
