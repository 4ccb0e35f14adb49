"""The spatial ops against SciPy's tree, and the rules where a tree has none: ties, broken points, too few points,
segments, radii, a stale index."""

from __future__ import annotations

import copy
import itertools
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from torch import library

import prequal
import prequal.bench.shapes.knn  # declares the costs
from prequal.ops._clouds import KINDS, SEGMENTS, around_a_centre, cloud, offsets, ragged
from prequal.ops.knn import squared_radius
from prequal.registry import Cost


def brute(queries, references, k, limit=np.inf, dtype=np.float32):
    """(dist2, idx) in plain NumPy, ties to the lower index; none further than limit, a squared distance."""
    q, r = queries.astype(dtype), references.astype(dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        square = [(q[:, None, a] - r[None, :, a]) ** 2 for a in range(q.shape[1])]
        d = (square[0] + square[1]) + (square[2] if len(square) > 2 else dtype(0))
    broken = ~np.isfinite(r).all(1)[None, :] | ~np.isfinite(q).all(1)[:, None] | (d > limit)
    order = np.lexsort((np.broadcast_to(np.arange(len(r)), d.shape), d, broken), axis=1)[:, :k]
    d2 = np.take_along_axis(d, order, 1)
    missing = np.take_along_axis(broken, order, 1)
    d2, order = np.where(missing, np.inf, d2), np.where(missing, -1, order)
    pad = ((0, 0), (0, k - d2.shape[1]))
    return np.pad(d2, pad, constant_values=np.inf), np.pad(order, pad, constant_values=-1)


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 32, 128])
def test_every_distribution_gives_the_brute_force_answer(device, kind, k, dim):
    queries, references = cloud(device, 131, 1, kind, dim), cloud(device, 997, 2, kind, dim)
    dist2, idx = prequal.knn(queries, references, k)
    want_dist2, want_idx = brute(queries.cpu().numpy(), references.cpu().numpy(), k)
    np.testing.assert_array_equal(idx.cpu().numpy(), want_idx)
    np.testing.assert_array_equal(dist2.cpu().numpy(), want_dist2)


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_doubles_are_searched_in_double(device, kind, dim):
    queries, references = (cloud(device, n, i, kind, dim).double() / 3 for n, i in ((57, 1), (611, 2)))
    dist2, idx = prequal.knn(queries, references, 9)
    assert dist2.dtype == torch.float64
    want_dist2, want_idx = brute(queries.cpu().numpy(), references.cpu().numpy(), 9, dtype=np.float64)
    np.testing.assert_array_equal(idx.cpu().numpy(), want_idx)
    np.testing.assert_array_equal(dist2.cpu().numpy(), want_dist2)


# A difference is rounded once, its square once more, the sum of three squares twice: 2 + 1 + 2 roundings of dist2, half
# of that under the square root. The order may be wrong where two true distances are closer than both their errors.
DISTANCE_ULP = 5 / 2


SCIPYS_KINDS = ("volume", "surface", "clustered", "line", "two ends", "plane y", "far from zero")
SCIPYS_CASES = [
    pytest.param(kind, dtype, id=f"{kind}-{str(dtype).removeprefix('torch.')}")
    for kind in SCIPYS_KINDS
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if (kind, dtype) != ("far from zero", torch.float16)  # beyond its range, and a tree wants finite points
]


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(("kind", "dtype"), SCIPYS_CASES)
def test_scipys_tree_finds_no_nearer_neighbour(device, dtype, kind, dim):
    """The contract: rank by rank, the true distance of what was chosen is the true one, but for the rounding of dist2;
    and where the true distances are further apart than that, it is the same neighbour."""
    queries, references = (cloud(device, n, i, kind, dim).to(dtype) for n, i in ((300, 1), (2001, 2)))
    dist2, idx = prequal.knn(queries, references, 8)
    q, r = queries.cpu().double().numpy(), references.cpu().double().numpy()
    want, want_idx = cKDTree(r).query(q, k=9)
    slack = DISTANCE_ULP * 2.0 ** (-53 if dtype == torch.float64 else -24)

    chosen = np.linalg.norm(q[:, None] - r[idx.cpu().numpy()], axis=2)
    assert (chosen <= want[:, :8] * (1 + 2.01 * slack)).all()
    np.testing.assert_allclose(dist2.cpu().double().sqrt().numpy(), want[:, :8], rtol=2.01 * slack)
    apart = np.diff(want, axis=1, prepend=-1) > 4.04 * slack * want
    clear = apart[:, :8] & apart[:, 1:]
    assert (idx.cpu().numpy() == want_idx[:, :8])[clear].all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_measured_in_float32(device, dtype):
    queries, references = cloud(device, 40, 1).to(dtype), cloud(device, 60, 2).to(dtype)
    dist2, idx = prequal.knn(queries, references, 5)
    want_dist2, want_idx = brute(queries.float().cpu().numpy(), references.float().cpu().numpy(), 5)
    assert dist2.dtype == torch.float32
    np.testing.assert_array_equal(idx.cpu().numpy(), want_idx)
    np.testing.assert_array_equal(dist2.cpu().numpy(), want_dist2)


coordinate = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(width=32),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-42, 0.0, -0.0]),
)
radii = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0**0.5, 3.0**0.5, 1e-20, 1e19, float("inf")]))


@st.composite
def pairs_of_clouds(draw):
    dim = draw(st.sampled_from([2, 3]))
    points = st.lists(st.tuples(*(coordinate for _ in range(dim))), max_size=40)
    return tuple(np.array(draw(points), dtype=np.float32).reshape(-1, dim) for _ in range(2))


def any_points(clouds, k, radius, device):
    q, r = clouds
    dist2, idx = prequal.knn(torch.tensor(q, device=device), torch.tensor(r, device=device), k, radius=radius)
    limit = np.inf if radius is None else np.float32(radius) * np.float32(radius)
    want_dist2, want_idx = brute(q, r, k, limit)
    np.testing.assert_array_equal(idx.cpu().numpy(), want_idx)
    np.testing.assert_array_equal(dist2.cpu().numpy(), want_dist2)


@settings(max_examples=150, deadline=None)
@given(pairs_of_clouds(), st.integers(1, 48), radii)
def test_any_points_whatever(clouds, k, radius):
    any_points(clouds, k, radius, "cpu")


@pytest.mark.gpu
@settings(max_examples=150, deadline=None)
@given(pairs_of_clouds(), st.integers(1, 48), radii)
def test_any_points_whatever_on_the_gpu(clouds, k, radius):
    any_points(clouds, k, radius, "cuda")


def distinct(clouds):
    """Distances of every query that all differ, so that no tie is to be broken."""
    q, r = clouds
    dist2, _ = brute(q, r, len(r))
    return np.isfinite(dist2).all() and (np.diff(dist2, axis=1) > 0).all()


tame = st.integers(-500, 500).map(lambda n: n / 7)
tame_clouds = st.tuples(
    *(st.lists(st.tuples(tame, tame, tame), min_size=n, max_size=25).map(np.float32) for n in (1, 2))
)


@settings(max_examples=60, deadline=None)
@given(tame_clouds, st.integers(1, 30), st.randoms(use_true_random=False))
def test_the_order_of_the_references_changes_nothing_but_their_names(clouds, k, random):
    assume(distinct(clouds))
    q, r = map(torch.tensor, clouds)
    order = list(range(len(r)))
    random.shuffle(order)
    dist2, idx = prequal.knn(q, r, k)
    shuffled_dist2, shuffled = prequal.knn(q, r[order], k)
    assert torch.equal(dist2, shuffled_dist2)
    back = torch.tensor([*order, -1])  # nobody stays nobody
    assert torch.equal(back[shuffled], idx)


@settings(max_examples=60, deadline=None)
@given(tame_clouds, st.integers(1, 30), st.integers(1, 25))
def test_more_references_are_never_further(clouds, k, some):
    q, r = map(torch.tensor, clouds)
    assert (prequal.knn(q, r, k)[0] <= prequal.knn(q, r[:some], k)[0]).all()


@settings(max_examples=60, deadline=None)
@given(tame_clouds, st.integers(1, 30), st.integers(1, 30))
def test_fewer_neighbours_are_the_first_of_more(clouds, k, more):
    q, r = map(torch.tensor, clouds)
    few, many = prequal.knn(q, r, k), prequal.knn(q, r, min(128, k + more))
    assert all(torch.equal(a, b[:, :k]) for a, b in zip(few, many, strict=True))


@settings(max_examples=60, deadline=None)
@given(tame_clouds, st.integers(1, 30), st.integers(0, 1000).map(lambda n: n / 13))
def test_a_radius_keeps_the_start_of_every_row(clouds, k, r):
    queries, references = map(torch.tensor, clouds)
    dist2, idx = prequal.knn(queries, references, k)
    inside = dist2 <= squared_radius(r, torch.float32)
    near, near_idx, counts = prequal.radius(queries, references, r, k)
    assert torch.equal(near, dist2.masked_fill(~inside, torch.inf))
    assert torch.equal(near_idx, idx.masked_fill(~inside, -1))
    assert torch.equal(counts, inside.sum(1))
    same_dist2, same_idx = prequal.knn(queries, references, k, radius=r)
    assert torch.equal(near, same_dist2)
    assert torch.equal(near_idx, same_idx)


@pytest.mark.parametrize("k", [32, 100, 128])
def test_ties_go_to_the_lower_index(device, k):
    references = torch.zeros(300, 3, device=device)
    _, idx = prequal.knn(torch.ones(2, 3, device=device), references, k)
    assert idx.tolist() == [list(range(k))] * 2


def test_the_shape_holds_when_there_are_too_few_references(device):
    dist2, idx = prequal.knn(torch.zeros(2, 3, device=device), torch.ones(3, 3, device=device), 5)
    assert idx.tolist() == [[0, 1, 2, -1, -1]] * 2
    assert dist2.tolist() == [[3.0, 3.0, 3.0, float("inf"), float("inf")]] * 2


def test_a_neighbour_too_far_for_float32_keeps_its_index(device):
    far = torch.full((1, 3), 3e38, device=device)
    dist2, idx = prequal.knn(-far, far, 2)
    assert idx.tolist() == [[0, -1]]
    assert dist2.tolist() == [[float("inf")] * 2]


def test_points_that_are_not_finite_are_nobodys_neighbours(device):
    bad = torch.tensor([[0.0, 0.0, float("nan")], [float("inf"), 0.0, 0.0], [1.0, 0.0, 0.0]], device=device)
    _, idx = prequal.knn(torch.zeros(1, 3, device=device), bad, 3)
    assert idx.tolist() == [[2, -1, -1]]
    dist2, idx = prequal.knn(bad[:2], torch.zeros(4, 3, device=device), 2)
    assert idx.tolist() == [[-1, -1]] * 2
    assert dist2.isinf().all()


def test_the_gradient_at_zero_distance_is_zero(device):
    queries = torch.zeros(2, 3, device=device, requires_grad=True)
    references = torch.zeros(4, 3, device=device, requires_grad=True)
    prequal.knn(queries, references, 3)[0].sum().backward()
    assert queries.grad.eq(0).all()
    assert references.grad.eq(0).all()


@pytest.mark.parametrize("dim", [2, 3])
def test_gradients_of_the_distances_are_right_by_finite_differences(dim):
    inputs = tuple(cloud("cpu", n, i, dim=dim).double().requires_grad_() for n, i in ((4, 1), (9, 2)))
    segments = {"query_ptr": offsets("cpu", [1, 3]), "reference_ptr": offsets("cpu", [3, 6])}
    for search in (
        lambda q, r: prequal.knn(q, r, 3)[0],
        lambda q, r: prequal.knn(q, r, 3, **segments)[0],
        lambda q, r: prequal.knn(q, r, 2, radius=10.0)[0],
        lambda q, r: prequal.radius(q, r, 10.0, 3)[0],
    ):
        assert torch.autograd.gradcheck(search, inputs)
        assert torch.autograd.gradgradcheck(search, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_have_the_gradients_of_their_values_in_float32(device, dtype):
    halves = [cloud(device, n, i).to(dtype).requires_grad_() for n, i in ((30, 1), (40, 2))]
    singles = [x.detach().float().requires_grad_() for x in halves]
    for x, y in (halves, singles):
        prequal.knn(x, y, 4)[0].sum().backward()
    for half, single in zip(halves, singles, strict=True):
        assert half.grad.dtype == dtype
        torch.testing.assert_close(half.grad, single.grad.to(dtype), rtol=2.0**-7, atol=1e-5)


def test_the_second_derivative_at_zero_distance_is_that_of_a_square(device):
    query = torch.zeros(1, 3, device=device, requires_grad=True)
    reference = torch.zeros(1, 3, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(prequal.knn(query, reference)[0].sum(), query, create_graph=True)
    assert first.eq(0).all()
    second = torch.autograd.grad(first.sum(), (query, reference))
    assert second[0].tolist() == [[2.0, 2.0, 2.0]]
    assert second[1].tolist() == [[-2.0, -2.0, -2.0]]


@pytest.mark.gpu
def test_gradients_of_many_queries_to_few_references_have_the_same_bits_in_every_run(cuda):
    q, r, values = (cloud(cuda, n, i).requires_grad_() for n, i in ((20_011, 1), (7, 2), (7, 3)))

    def gradients():
        total = prequal.knn(q, r, 3)[0].sum() + prequal.knn_gather(q, r, values).sin().sum()
        total = total + prequal.knn_interpolate(q, r, values).cos().sum()
        return torch.autograd.grad(total, (q, r, values))

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


def test_missing_neighbours_have_no_gradient(device):
    queries = torch.tensor([[0.0, 0.0, 0.0], [float("nan"), 0.0, 0.0]], device=device, requires_grad=True)
    references = torch.ones(1, 3, device=device, requires_grad=True)
    dist2, _ = prequal.knn(queries, references, 2)
    dist2[0, 0].backward()
    assert queries.grad.tolist() == [[-2.0, -2.0, -2.0], [0.0, 0.0, 0.0]]
    assert references.grad.tolist() == [[2.0, 2.0, 2.0]]


def test_a_neighbour_that_overflows_spoils_no_gradient_where_none_is_asked_of_it(device):
    queries = torch.tensor([[-3e38, 0.0, 0.0], [1.0, 0.0, 0.0]], device=device, requires_grad=True)
    references = torch.tensor([[3e38, 1.0, 2.0], [-3e38, 1.0, 0.0]], device=device, requires_grad=True)
    dist2, idx = prequal.knn(queries, references, 3)
    assert idx.tolist() == [[1, 0, -1], [0, 1, -1]]
    dist2[0, 0].backward()
    assert queries.grad.tolist() == [[0.0, -2.0, 0.0], [0.0, 0.0, 0.0]]
    assert references.grad.tolist() == [[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    near, _, counts = prequal.radius(queries, references, 2.0, 2)
    assert counts.tolist() == [1, 0]
    (got,) = torch.autograd.grad(near[0, 0], queries)
    assert got.tolist() == [[0.0, -2.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_gradient_asked_of_a_neighbour_that_overflows_is_an_infinity_of_the_right_sign(device):
    query = torch.tensor([[-3e38, 0.0, 0.0]], device=device, requires_grad=True)
    references = torch.tensor([[3e38, 1.0, 2.0], [-3e38, 1.0, 0.0]], device=device, requires_grad=True)
    dist2, _ = prequal.knn(query, references, 2)
    for sign in (1.0, -1.0):
        to_query, to_references = torch.autograd.grad(sign * dist2[0, 1], (query, references), retain_graph=True)
        assert to_query.tolist() == [[-sign * np.inf, -2.0 * sign, -4.0 * sign]]
        assert to_references.tolist() == [[sign * np.inf, 2.0 * sign, 4.0 * sign], [0.0, 0.0, 0.0]]


def test_the_second_derivative_of_the_others_stays_beside_one_that_overflows(device):
    query = torch.tensor([[-3e38, 0.5, 0.0]], device=device, requires_grad=True)
    references = torch.tensor([[3e38, 1.0, 2.0], [-3e38, 1.0, 0.0]], device=device)
    weight = torch.tensor([1.0, 0.0], device=device, requires_grad=True)
    (first,) = torch.autograd.grad((prequal.knn(query, references, 2)[0] * weight)[0, 0], query, create_graph=True)
    assert first.tolist() == [[0.0, -1.0, 0.0]]
    to_query, to_weight = torch.autograd.grad(first[0, 1], (query, weight))
    assert to_query.tolist() == [[0.0, 2.0, 0.0]]
    assert to_weight.tolist() == [-1.0, 0.0]


# ---- segments ----------------------------------------------------------------------------------------------------


def segment_by_segment(search, queries, references, query_at, reference_at):
    """Plain calls, one a segment, their indices moved to the whole."""
    rows = []
    for (i, j), (start, stop) in zip(itertools.pairwise(query_at), itertools.pairwise(reference_at), strict=True):
        dist2, idx = search(queries[i:j], references[start:stop])[:2]
        rows.append((dist2, torch.where(idx < 0, idx, idx + start)))
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))


@pytest.mark.parametrize("kind", ["volume", "one point", "lattice", "broken", "clustered"])
@pytest.mark.parametrize(("queries", "references", "k"), [pytest.param(*s[1:], id=s[0]) for s in SEGMENTS if s[1]])
def test_a_segment_is_a_call_of_its_own(device, kind, queries, references, k):
    q, r, pointers = ragged(device, queries, references, kind)
    at = [pointers[name].tolist() for name in ("query_ptr", "reference_ptr")]
    want = segment_by_segment(lambda q, r: prequal.knn(q, r, k), q, r, *at)
    got = prequal.knn(q, r, k, **pointers)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    want = segment_by_segment(lambda q, r: prequal.radius(q, r, 0.25, k), q, r, *at)
    dist2, idx, counts = prequal.radius(q, r, 0.25, k, **pointers)
    assert torch.equal(dist2, want[0])
    assert torch.equal(idx, want[1])
    assert torch.equal(counts, (idx >= 0).sum(1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=8), st.integers(1, 12))
def test_segments_whose_bounds_are_not_read_give_the_same(lengths, k):
    """On a GPU no contents are read: the reference masks there, and takes slices on the CPU."""
    queries, references = ([pair[i] for pair in lengths] for i in range(2))
    q, r, pointers = ragged("cpu", queries, references)
    want = prequal.knn(q, r, k, **pointers)

    class Unread(torch.Tensor):
        pass

    got = prequal.knn.op.reference(q, r, k, **{name: x.as_subclass(Unread) for name, x in pointers.items()})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


bounds = st.lists(st.integers(-(2**40), 2**40) | st.integers(-3, 12), min_size=1, max_size=6)


def test_segments_on_the_host_are_searched_there_whatever_the_default_device_is():
    queries, references, pointers = ragged("cpu", [3, 4], [30, 40])
    want = prequal.knn(queries, references, 2, **pointers)
    torch.set_default_device("meta")
    try:
        got = prequal.knn(queries, references, 2, **pointers)
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@settings(max_examples=100, deadline=None)
@given(bounds, st.data())
def test_pointers_of_any_contents_read_nothing_out_of_bounds(query_at, data):
    size = len(query_at)
    reference_at = data.draw(st.lists(st.integers(-(2**40), 2**40) | st.integers(-3, 12), min_size=size, max_size=size))
    q, r = cloud("cpu", 9, 1), cloud("cpu", 11, 2)
    pointers = {"query_ptr": torch.tensor(query_at), "reference_ptr": torch.tensor(reference_at)}
    dist2, idx = prequal.knn.op.reference(q, r, 4, **pointers)
    assert ((idx >= -1) & (idx < 11)).all()
    assert torch.equal(idx < 0, dist2.isinf())


@pytest.mark.parametrize("dynamic", [False, True])
def test_ragged_searches_compile_without_a_graph_break(device, dynamic):
    def searches(q, r, k, limit, **pointers):
        return (
            *prequal.knn(q, r, k, radius=limit, **pointers),
            *prequal.radius(q, r, limit, k, **pointers),
            prequal.knn_gather(q, r, r, **pointers),
            prequal.knn_interpolate(q, r, r, k, **pointers),
        )

    torch.compiler.reset()
    compiled = torch.compile(searches, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for queries, references, k, limit in (([5, 6], [7, 8], 2, 0.5), ([50, 9, 0], [7, 18, 1], 4, 0.75)):
        q, r, pointers = ragged(device, queries, references)
        got, want = (f(q.requires_grad_(), r, k, limit, **pointers) for f in (compiled, searches))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        got, want = (torch.autograd.grad(x[0].masked_fill(x[1] < 0, 0).sum(), q)[0] for x in (got, want))
        torch.testing.assert_close(got, want)


def test_transforms_take_keyword_arguments_that_are_tensors(device):
    """torch itself gives a keyword-only tensor no vmap and no gradient."""
    q, r, pointers = ragged(device, [5, 6], [7, 8])
    other = offsets(device, [2, 9])
    dist2, idx = torch.vmap(lambda q, at: prequal.knn(q, r, 3, **pointers | {"query_ptr": at}))(
        torch.stack([q, q + 0.1]), torch.stack([pointers["query_ptr"], other])
    )
    want = prequal.knn(q + 0.1, r, 3, query_ptr=other, reference_ptr=pointers["reference_ptr"])
    assert torch.equal(dist2[1], want[0])
    assert torch.equal(idx[1], want[1])
    got = torch.func.grad(lambda q: prequal.knn(q, r, 3, **pointers)[0].sum())(q)
    q.requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(prequal.knn(q, r, 3, **pointers)[0].sum(), q)[0])
    for op, args in ((prequal.knn, (q, r, 3)), (prequal.radius, (q, r, 0.7, 3))):
        library.opcheck(op.op.packet.default, op.op.bind(args, pointers))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [[5, 9], [0, 20_000], [-7, 500], [0, 0], [257, 0], [2**40, 2**41], [-(2**40), 2**40]])
def test_wrong_pointers_on_the_gpu_are_never_out_of_bounds(cuda, wrong):
    q, r = cloud(cuda, 257, 1), cloud(cuda, 503, 2)
    wrong, right = torch.tensor(wrong, device=cuda), {name: offsets(cuda, [n]) for name, n in (("q", 257), ("r", 503))}
    for query_ptr, reference_ptr in ((wrong, right["r"]), (right["q"], wrong), (wrong, wrong)):
        dist2, idx = prequal.knn(q, r, 5, query_ptr=query_ptr, reference_ptr=reference_ptr)
        assert ((idx >= -1) & (idx < 503)).all()
        assert torch.equal(idx < 0, dist2.isinf())


@pytest.mark.gpu
def test_queries_outside_every_segment_have_no_neighbour(cuda):
    q, r = cloud(cuda, 100, 1), cloud(cuda, 200, 2)
    at = {"query_ptr": torch.tensor([10, 40, 60], device=cuda), "reference_ptr": offsets(cuda, [120, 80])}
    _, idx = prequal.knn(q, r, 3, **at)
    assert (idx[:10] == -1).all()
    assert (idx[60:] == -1).all()
    assert ((idx[10:40] >= 0) & (idx[10:40] < 120)).all()
    assert (idx[40:60] >= 120).all()
    none = torch.zeros(1, dtype=torch.int32, device=cuda)
    dist2, idx = prequal.knn(q, r, 3, query_ptr=none, reference_ptr=none)
    assert (idx == -1).all()
    assert dist2.isinf().all()


@pytest.mark.gpu
def test_a_captured_graph_follows_the_contents_of_its_pointers(cuda):
    q, r, pointers = ragged(cuda, [100, 0, 157], [300, 3, 200])
    graph = torch.cuda.CUDAGraph()
    prequal.knn(q, r, 4, **pointers)
    with torch.cuda.graph(graph):
        out = prequal.knn(q, r, 4, **pointers)
    pointers["query_ptr"].copy_(offsets(cuda, [7, 250, 0]))
    pointers["reference_ptr"].copy_(offsets(cuda, [1, 500, 2]))
    graph.replay()
    torch.cuda.synchronize()
    assert prequal.knn.op.contract.compare(out, prequal.knn.op.reference(q, r, 4, **pointers)) is None
    assert prequal.stats()["knn"][str(cuda)]["reference"] == {}


# ---- radius ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["volume", "surface", "clustered", "two ends"])
def test_scipys_tree_counts_as_many_within_the_radius(device, kind):
    queries, references = (cloud(device, n, i, kind).double() for n, i in ((200, 1), (900, 2)))
    dist2, idx, counts = prequal.radius(queries, references, 0.2, 128)
    q, r = queries.cpu().numpy(), references.cpu().numpy()
    want = cKDTree(r).query_ball_point(q, 0.2)
    assert counts.tolist() == [min(128, len(each)) for each in want]
    for row, count, each in zip(idx.tolist(), counts.tolist(), want, strict=True):
        assert set(row[:count]) <= set(each)
        assert set(row[count:]) <= {-1}
    assert torch.equal(dist2.isinf(), idx < 0)


def test_a_radius_is_rounded_and_so_is_its_square(device):
    """sqrt(2) rounds down in float32 and its square to 2 - 2^-23: the diagonal of a unit square is not within it."""
    queries = torch.zeros(1, 2, device=device)
    references = torch.tensor([[1.0, 0.0], [1.0, 1.0]], device=device)
    root = 2.0**0.5
    square = float(np.float32(root) * np.float32(root))
    assert prequal.radius(queries, references, root, 2)[2].item() == (2 if square >= 2 else 1)
    assert prequal.radius(queries, references, 1.0, 2)[1].tolist() == [[0, -1]]
    assert prequal.radius(queries, references, np.nextafter(np.float32(1), np.float32(0)).item(), 2)[2].item() == 0


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.1, 2.0**0.5, 1e-30, 1e19, 3e19, 1e39, 1e300, float("inf")])
def test_the_square_of_a_radius_is_numpys(value):
    with np.errstate(over="ignore", under="ignore"):
        for dtype, torch_dtype in ((np.float32, torch.float32), (np.float64, torch.float64)):
            assert squared_radius(value, torch_dtype) == float(dtype(value) * dtype(value))


def test_a_radius_of_zero_finds_what_is_in_the_same_place(device):
    points = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], device=device)
    dist2, idx, counts = prequal.radius(points, points, 0, 3)
    assert idx.tolist() == [[0, 1, -1], [0, 1, -1], [2, -1, -1]]
    assert counts.tolist() == [2, 2, 1]
    assert dist2[idx >= 0].eq(0).all()


def test_an_infinite_radius_is_none(device):
    q, r = cloud(device, 50, 1, "huge"), cloud(device, 60, 2, "huge")
    plain = prequal.knn(q, r, 7)
    for limited in (prequal.knn(q, r, 7, radius=float("inf")), prequal.radius(q, r, float("inf"), 7)[:2]):
        assert all(torch.equal(a, b) for a, b in zip(limited, plain, strict=True))


def test_gradients_within_a_radius_are_of_who_is_there(device):
    query = torch.zeros(1, 2, device=device, requires_grad=True)
    references = torch.tensor([[1.0, 0.0], [3.0, 0.0]], device=device, requires_grad=True)
    dist2, _, counts = prequal.radius(query, references, 2.0, 2)
    assert not counts.requires_grad
    dist2[0, 0].backward()
    assert query.grad.tolist() == [[-2.0, 0.0]]
    assert references.grad.tolist() == [[2.0, 0.0], [0.0, 0.0]]


# ---- knn_gather --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 5), (0,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float64])
def test_the_value_is_that_of_the_nearest(device, dtype, shape):
    queries, references = cloud(device, 70, 1), cloud(device, 90, 2)
    values = torch.randint(0, 100, (90, *shape), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    nearest = prequal.knn(queries, references)[1][:, 0]
    assert torch.equal(prequal.knn_gather(queries, references, values), values[nearest])


@pytest.mark.parametrize(
    ("dtype", "nothing"),
    [(torch.int64, -1), (torch.int8, -1), (torch.uint8, 255), (torch.bool, False), (torch.float32, None)],
)
def test_without_a_neighbour_the_row_is_no_label(device, dtype, nothing):
    queries = torch.tensor([[0.0, 0.0, 0.0], [float("nan"), 0.0, 0.0]], device=device)
    values = torch.ones(2, 3, device=device, dtype=dtype)
    got = prequal.knn_gather(queries, torch.zeros(2, 3, device=device), values)
    assert torch.equal(got[0], values[0])
    assert got[1].isnan().all() if nothing is None else (got[1] == nothing).all()


def test_the_gradient_of_the_values_is_the_count_of_their_queries(device):
    queries = cloud(device, 50, 1)
    values = torch.ones(7, 2, device=device, requires_grad=True)
    references = cloud(device, 7, 2)
    prequal.knn_gather(queries, references, values).sum().backward()
    count = torch.bincount(prequal.knn(queries, references)[1][:, 0], minlength=7)
    assert values.grad.tolist() == [[n, n] for n in count.float().tolist()]


def test_gradients_of_gathered_and_interpolated_values_are_right_by_finite_differences():
    queries, references = cloud("cpu", 6, 1).double(), cloud("cpu", 9, 2).double()
    values = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda v: prequal.knn_gather(queries, references, v),
        lambda v: prequal.knn_interpolate(queries, references, v, 4),
        lambda v: prequal.knn_interpolate(queries, references[:2], v[:2], 4),
    ):
        assert torch.autograd.gradcheck(function, (values,))
        assert torch.autograd.gradgradcheck(function, (values,))


# ---- knn_interpolate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("kind", ["volume", "surface", "clustered", "duplicates", "outlier"])
@pytest.mark.parametrize("k", [1, 3, 40])
def test_interpolation_is_the_mean_by_inverse_squares_of_scipys_distances(device, kind, k, dim):
    queries, references = (cloud(device, n, i, kind, dim).double() for n, i in ((90, 1), (200, 2)))
    values = torch.linspace(-1, 1, 600, dtype=torch.float64, device=device).view(200, 3)
    got = prequal.knn_interpolate(queries, references, values, k)
    idx = prequal.knn(queries, references, k)[1].cpu().numpy()  # ties are not the tree's
    q, r = queries.cpu().numpy(), references.cpu().numpy()
    distance = np.linalg.norm(q[:, None] - r[idx], axis=2)
    np.testing.assert_allclose(distance, cKDTree(r).query(q, k=[*range(1, k + 1)])[0], rtol=1e-12, atol=1e-12)
    weights = 1 / np.maximum(distance**2, 1e-16)
    want = (weights[..., None] * values.cpu().numpy()[idx]).sum(1) / weights.sum(1)[:, None]
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("points", [torch.float16, torch.float32, torch.float64])
def test_interpolation_answers_in_the_dtype_of_the_values(device, points, dtype):
    q, r = cloud(device, 20, 1).to(points), cloud(device, 30, 2).to(points)
    values = torch.rand(30, 4, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    got = prequal.knn_interpolate(q, r, values)
    assert got.dtype == dtype
    precise = prequal.knn_interpolate(q.double(), r.double(), values.double())
    eps = torch.finfo(dtype).eps if dtype != torch.float64 or points == torch.float64 else 1e-6
    torch.testing.assert_close(got.double(), precise, rtol=2 * eps + 1e-6, atol=1e-6)


def test_on_a_reference_the_value_is_nearly_its_own(device):
    references = cloud(device, 300, 2)
    values = torch.linspace(0, 1, 300, device=device)
    torch.testing.assert_close(prequal.knn_interpolate(references, references, values), values, rtol=1e-6, atol=1e-6)


def test_of_one_neighbour_the_value_is_its_own_bit_for_bit(device):
    q, r = cloud(device, 70, 1, "all scales"), cloud(device, 90, 2, "all scales")
    values = torch.rand(90, 3, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(prequal.knn_interpolate(q, r, values, 1), prequal.knn_gather(q, r, values))


def test_equal_distances_weigh_the_same_infinite_ones_too(device):
    values = torch.tensor([1.0, 3.0], device=device)
    for far in (1.0, 1e-25, 1e25, 3e38):
        references = torch.tensor([[far, 0.0], [-far, 0.0]], device=device)
        assert prequal.knn_interpolate(torch.zeros(1, 2, device=device), references, values, 2).tolist() == [2.0]


def test_beyond_the_squares_only_the_near_weigh(device):
    references = torch.tensor([[1e10, 0.0], [1e25, 0.0]], device=device)
    values = torch.tensor([5.0, 7.0], device=device)
    assert prequal.knn_interpolate(torch.zeros(1, 2, device=device), references, values, 2).tolist() == [5.0]


def test_who_is_missing_is_left_out_of_the_mean(device):
    references = torch.tensor([[1.0, 0.0, 0.0], [torch.nan, 0.0, 0.0], [0.0, 1.0, 0.0]], device=device)
    values = torch.tensor([1.0, torch.nan, 2.0], device=device)
    queries = torch.tensor([[0.0, 0.0, 0.0], [0.0, torch.inf, 0.0]], device=device)
    near, nobody = prequal.knn_interpolate(queries, references, values, 5).tolist()
    assert near == 1.5
    assert nobody != nobody
    assert prequal.knn_interpolate(queries[:1], references[:0], values[:0]).isnan().all()


def test_interpolation_has_no_gradient_to_the_points(device):
    inputs = [cloud(device, n, i).requires_grad_() for n, i in ((5, 1), (9, 2))]
    values = torch.ones(9, 2, device=device, requires_grad=True)
    prequal.knn_interpolate(*inputs, values).sum().backward()
    assert [x.grad for x in inputs] == [None, None]
    assert values.grad.sum().item() == pytest.approx(10.0, rel=1e-5)  # every mean has weights that sum to 1


# ---- KnnIndex ----------------------------------------------------------------------------------------------------


def every_query(of, queries, values, query_ptr=None, **more):
    """All that an index answers, by the index or by the plain ops."""
    return (
        *of("knn")(queries, k=5, radius=0.4, query_ptr=query_ptr, **more),
        of("knn_gather")(queries, values=values, query_ptr=query_ptr, **more),
        of("knn_interpolate")(queries, values=values, k=4, query_ptr=query_ptr, **more),
        *of("radius")(queries, r=0.3, max_neighbors=6, query_ptr=query_ptr, **more),
    )


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [2, 3])
def test_an_index_answers_as_the_plain_ops_do(device, segmented, dtype, dim):
    queries, references, pointers = ragged(device, [60, 0, 140], [900, 5, 600], dim=dim, dtype=dtype)
    pointers = pointers if segmented else {"query_ptr": None, "reference_ptr": None}
    values = torch.linspace(0, 1, 1505, device=device)
    index = prequal.KnnIndex(references, pointers["reference_ptr"])
    got = every_query(lambda name: getattr(index, name), queries, values, pointers["query_ptr"])
    want = every_query(lambda name: getattr(prequal, name), queries, values, references=references, **pointers)
    for a, b in zip(got, want, strict=True):
        assert prequal.contracts.Bitwise().compare(a, b) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_an_index_on_the_gpu_answers_fast_and_the_same(cuda, kind):
    queries, references = cloud(cuda, 3000, 1, kind), cloud(cuda, 20_011, 2, kind)
    index = prequal.KnnIndex(references)
    prequal.reset_stats()
    for k in (1, 8, 33):
        got, want = index.knn(queries, k), prequal.knn(queries, references, k)
        assert prequal.knn.op.contract.compare(got, want) is None
    assert prequal.stats()["knn"][str(cuda)] == {"fast": 6, "reference": {}}


@pytest.mark.gpu
def test_an_index_is_asked_inside_a_captured_graph(cuda):
    queries, references = cloud(cuda, 300, 1), cloud(cuda, 5000, 2)
    index = prequal.KnnIndex(references)
    index.knn(queries, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = index.knn(queries, 3)
    queries.copy_(queries.flip(0) + 0.1)
    graph.replay()
    torch.cuda.synchronize()
    assert prequal.knn.op.contract.compare(out, prequal.knn.op.reference(queries, references, 3)) is None


def moved_in_place(index):
    with torch.no_grad():
        index.references += 1.0


def moved_by_an_optimiser(index):
    index.references.grad = torch.ones_like(index.references)
    torch.optim.SGD([index.references], lr=0.1).step()


def another_memory(index):
    index.references.data = index.references.detach().clone()


def another_shape(index):
    index.references.data = index.references.detach()[:50]


@pytest.mark.parametrize(
    ("move", "what"),
    [
        (moved_in_place, "version"),
        (moved_by_an_optimiser, "version"),
        (another_memory, "pointer"),
        (another_shape, "shape"),
    ],
)
def test_a_stale_index_says_what_moved_and_can_be_rebuilt(device, move, what):
    references = cloud(device, 100, 2).requires_grad_()
    queries = cloud(device, 10, 1)
    index = prequal.KnnIndex(references)
    index.knn(queries, 2)
    move(index)
    for ask in (
        lambda: index.knn(queries, 2),
        lambda: index.knn_gather(queries, references.detach()),
        lambda: index.knn_interpolate(queries, references.detach()),
        lambda: index.radius(queries, 1.0, 3),
    ):
        with pytest.raises(prequal.StaleIndexError, match=rf"references: .*{what}.*rebuild\(\)") as caught:
            ask()
        assert caught.value.argument == "references"
        assert what in caught.value.moved
    index.rebuild()
    got, want = index.knn(queries, 2), prequal.knn(queries, references, 2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_memory_of_the_points_is_kept_until_a_rebuild():
    """What `.data =` takes away would be handed out again, and other points at the same address pass for the old."""
    array = np.zeros((100, 3), np.float32)
    kept = weakref.ref(array)
    references = torch.from_numpy(array)
    del array
    index = prequal.KnnIndex(references)
    references.data = torch.ones(100, 3)
    assert kept() is not None
    index.rebuild()
    assert kept() is None


@pytest.mark.gpu
def test_other_points_in_memory_that_was_given_away_are_noticed(cuda):
    references, queries = cloud(cuda, 20_000, 2), cloud(cuda, 10, 1)
    index = prequal.KnnIndex(references)
    for _ in range(4):
        references.data = references.detach() + 1.0
        with pytest.raises(prequal.StaleIndexError, match=r"references: .*pointer"):
            index.knn(queries, 2)


def test_an_index_built_in_inference_mode_is_asked_with_gradients_outside(device):
    references, queries = cloud(device, 100, 2), cloud(device, 10, 1).requires_grad_()
    values = cloud(device, 100, 3).requires_grad_()
    with torch.inference_mode():
        index = prequal.KnnIndex(references)
    inputs = (queries, values)
    for got, want in (
        (index.knn(queries, 2)[0], prequal.knn(queries, references, 2)[0]),
        (index.radius(queries, 1.0, 2)[0], prequal.radius(queries, references, 1.0, 2)[0]),
        (index.knn_gather(queries, values), prequal.knn_gather(queries, references, values)),
        (index.knn_interpolate(queries, values), prequal.knn_interpolate(queries, references, values)),
    ):
        for a, b in zip(
            torch.autograd.grad(got.sum(), inputs, allow_unused=True),
            torch.autograd.grad(want.sum(), inputs, allow_unused=True),
            strict=True,
        ):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


def test_a_write_to_the_pointers_makes_an_index_stale(device):
    queries, references, pointers = ragged(device, [3, 4], [30, 40])
    index = prequal.KnnIndex(references, pointers["reference_ptr"])
    pointers["reference_ptr"][1] += 1
    with pytest.raises(prequal.StaleIndexError, match=r"reference_ptr: .*\(version \d+ when built"):
        index.knn(queries, query_ptr=pointers["query_ptr"])


def test_reading_and_differentiating_leave_an_index_fresh(device):
    references = cloud(device, 100, 2).requires_grad_()
    queries = cloud(device, 10, 1).requires_grad_()
    index = prequal.KnnIndex(references)
    for _ in range(2):
        index.knn(queries, 3)[0].sum().backward()
    got = torch.autograd.grad(index.knn(queries, 3)[0].sum(), (queries, references))
    want = torch.autograd.grad(prequal.knn(queries, references, 3)[0].sum(), (queries, references))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert index.references is references


def test_writes_to_an_inference_tensor_are_not_noticed(device):
    with torch.inference_mode():
        references, queries = cloud(device, 100, 2), cloud(device, 10, 1)
        index = prequal.KnnIndex(references)
        before = index.knn(queries, 2)
        references.add_(0.0)
        assert all(torch.equal(a, b) for a, b in zip(before, index.knn(queries, 2), strict=True))
        references.add_(1.0)
        index.rebuild()
        want = prequal.knn(queries, references, 2)
        assert all(torch.equal(a, b) for a, b in zip(index.knn(queries, 2), want, strict=True))


def test_a_copy_of_an_index_is_built_anew(device):
    queries, references, pointers = ragged(device, [3, 4], [30, 40])
    index = prequal.KnnIndex(references, pointers["reference_ptr"])
    want = index.knn(queries, 2, query_ptr=pointers["query_ptr"])
    for again in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert again.references is not references
        got = again.knn(queries, 2, query_ptr=pointers["query_ptr"])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_index_of_segments_wants_queries_in_segments(device):
    queries, references, pointers = ragged(device, [3, 4], [30, 40])
    with pytest.raises(TypeError, match=r"query_ptr: expected a torch.Tensor beside reference_ptr, got NoneType"):
        prequal.KnnIndex(references, pointers["reference_ptr"]).knn(queries)
    with pytest.raises(TypeError, match=r"reference_ptr: expected a torch.Tensor beside query_ptr, got NoneType"):
        prequal.KnnIndex(references).knn(queries, query_ptr=pointers["query_ptr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1, 100, 8000, 40_000])
def test_an_index_of_other_references_is_noticed_by_its_size(device, dtype, size):
    """On whatever path: small clouds are searched without it."""
    queries, references = cloud(device, 10, 1).to(dtype), cloud(device, size, 2).to(dtype)
    other = prequal.knn_index(cloud(device, size + 100, 3).to(dtype))
    right = prequal.knn_index(references)
    got, want = prequal.knn(queries, references, 2, index=right), prequal.knn(queries, references, 2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    values = torch.arange(size, device=device, dtype=dtype)
    for call in (
        lambda: prequal.knn(queries, references, 2, index=other),
        lambda: prequal.knn(queries[:0], references, 2, index=other),
        lambda: prequal.knn_gather(queries, references, values, index=other),
        lambda: prequal.knn_interpolate(queries, references, values, index=other),
        lambda: prequal.radius(queries, references, 1.0, 3, index=other),
    ):
        says = rf"index: expected shape \[{right.numel()}\], as knn_index makes it of these references, got"
        with pytest.raises(ValueError, match=says):
            call()


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_an_index_notices_the_step_of_a_fused_optimiser(device, cls):
    references = torch.nn.Parameter(cloud(device, 100, 2))
    index = prequal.KnnIndex(references)
    references.grad = torch.ones_like(references)
    cls([references], lr=0.5, fused=True).step()
    with pytest.raises(prequal.StaleIndexError, match=r"references: .*version 0 when built, 1 now"):
        index.knn(cloud(device, 10, 1))


def test_an_index_of_a_transformed_tensor_is_refused_in_words(device):
    queries, references = cloud(device, 10, 1), cloud(device, 100, 2)
    with pytest.raises(TypeError, match=r"references: expected a tensor of no torch.func transform"):
        torch.func.grad(lambda r: prequal.KnnIndex(r).knn(queries)[0].sum())(references)


def test_a_gradient_of_complex_values_is_refused_and_not_lost(device):
    queries, references = cloud(device, 10, 1), cloud(device, 100, 2)
    values = torch.randn(100, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(3)).to(device)
    assert prequal.knn_gather(queries, references, values).dtype == torch.complex64
    with pytest.raises(TypeError, match=r"knn_gather: values: expected a real dtype .* got complex64"):
        prequal.knn_gather(queries, references, values.requires_grad_())


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*nested tensors:UserWarning")
def test_tensors_that_hold_no_plain_numbers_are_refused_in_words():
    queries = cloud("cpu", 10, 1)
    coded = torch.quantize_per_tensor(torch.rand(10), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"values: expected a dense tensor of plain numbers, got a quantized one"):
        prequal.knn_gather(queries, queries, coded)
    with pytest.raises(TypeError, match=r"queries: expected a dense tensor of plain numbers, got a nested one"):
        prequal.knn(torch.nested.nested_tensor([queries, queries]), queries)
    with pytest.raises(TypeError, match=r"k: expected an int, got Tensor"):
        prequal.knn(queries, queries, torch.tensor(1))


def test_an_index_says_what_it_holds():
    _, references, pointers = ragged("cpu", [3, 4], [30, 40], dtype=torch.float16)
    text = repr(prequal.KnnIndex(references, pointers["reference_ptr"]))
    assert text.startswith("KnnIndex([70, 3] float16 on cpu, 2 segments, ")


def test_an_index_in_a_compiled_function_still_notices(device):
    queries, references = cloud(device, 10, 1), cloud(device, 100, 2)
    index = prequal.KnnIndex(references)
    compiled = torch.compile(lambda q: index.knn(q, 2)[0].sum(), backend="eager")
    torch.testing.assert_close(compiled(queries), prequal.knn(queries, references, 2)[0].sum())
    references += 1.0
    with pytest.raises(prequal.StaleIndexError):
        compiled(queries)
    plain = torch.compile(lambda q, r, index: prequal.knn(q, r, 2, index=index)[1], backend="eager", fullgraph=True)
    index.rebuild()
    assert torch.equal(plain(queries, references, index.structure), prequal.knn(queries, references, 2)[1])


# ---- real scans and large clouds on the GPU ----------------------------------------------------------------------


@pytest.mark.gpu
def test_a_real_scan_gives_scipys_answer(cuda, test_data):
    scan = np.load(test_data / "igea_vertices.npy").astype(np.float32)
    references = scan[np.random.default_rng(0).choice(len(scan), 8000, replace=False)]
    _, idx = prequal.knn(torch.tensor(scan, device=cuda), torch.tensor(references, device=cuda), 4)
    want, _ = cKDTree(references.astype(np.float64)).query(scan.astype(np.float64), k=4)
    got = np.linalg.norm(scan[:, None].astype(np.float64) - references[idx.cpu().numpy()], axis=2)
    assert (got <= want * (1 + 2.01 * DISTANCE_ULP * 2.0**-24) + 1e-30).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_cloud_agrees_with_the_reference_bit_for_bit(cuda, kind):
    queries, references = cloud(cuda, 2000, 1, kind), cloud(cuda, 300_007, 2, kind)
    got = prequal.knn(queries, references, 8)
    assert prequal.knn.op.contract.compare(got, prequal.knn.op.reference(queries, references, 8)) is None
    assert prequal.stats()["knn"][str(cuda)]["fast"] == 1


def hard_clouds(cuda, n):
    """(name, queries, references) of which a search on the grid gives up, of all queries, some, or one in a warp."""
    scales = [cloud(cuda, count, seed, "all scales") for seed, count in ((1, n), (2, 8000))]
    yield "all scales", *scales
    generator = torch.Generator().manual_seed(3)
    away = torch.nn.functional.normalize(torch.randn(n + 8000, 3, generator=generator), dim=1)
    away = 1.0 + away * 10 ** (-7 * torch.rand(n + 8000, 1, generator=generator))
    yield "scales around one", away[:n].to(cuda), away[n:].to(cuda)
    for share in (1, 2, 5, 11, 32):  # lanes to a query that gives up: 1, 2, 4, 8 or 16, 32
        yield f"one in {share} from the centre of a sphere", *around_a_centre(cuda, n, 8000, share=share)
    everywhere, line = cloud(cuda, n, 4), cloud(cuda, 8192, 5, "line") / 3
    yield "everywhere to a line", everywhere, line
    broken, references = around_a_centre(cuda, n, 3001, share=2)
    broken[::5], references[::7] = torch.nan, torch.inf
    yield "broken", broken, references
    copies = torch.cat([references[:1500], references[:40].repeat(150, 1)])
    yield "duplicates", broken, copies


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 31, 33, 1000, 20_011])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_searches_that_give_up_agree_with_the_reference_bit_for_bit(cuda, k, n):
    bitwise = prequal.contracts.Bitwise()
    for name, q, r in hard_clouds(cuda, n):
        prequal.reset_stats()
        got, want = prequal.knn(q, r, k), prequal.knn.op.reference(q, r, k)
        assert bitwise.compare(got, want) is None, name
        limit = float(want[0][:, 0].nan_to_num(posinf=1.0).median().sqrt())
        got, want = prequal.knn(q, r, k, radius=limit), prequal.knn.op.reference(q, r, k, radius=limit)
        assert bitwise.compare(got, want) is None, name
        got = prequal.radius(q, r, limit, k)
        assert torch.equal(got[2], (want[1] >= 0).sum(1)), name
        for values in (torch.arange(len(r), device=cuda), torch.arange(7.0 * len(r), device=cuda).view(-1, 7)):
            got, want = prequal.knn_gather(q, r, values), prequal.knn_gather.op.reference(q, r, values)
            assert prequal.knn_gather.op.contract.compare(got, want) is None, name  # which takes one NaN for another
        assert prequal.stats()["knn"][str(cuda)] == {"fast": 2, "reference": {}}
        assert prequal.stats()["knn_gather"][str(cuda)] == {"fast": 2, "reference": {}}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_searches_of_halves_that_give_up_agree_with_the_reference_bit_for_bit(cuda, dtype):
    for dim in (2, 3):
        q, r = (x[:, :dim].to(dtype) for x in around_a_centre(cuda, 1000, 8000))
        r = torch.nn.functional.normalize(r.float(), dim=1).to(dtype)  # in the plane, a circle
        got, want = prequal.knn(q, r, 8), prequal.knn.op.reference(q, r, 8)
        assert prequal.contracts.Bitwise().compare(got, want) is None


@pytest.mark.gpu
def test_a_search_that_gives_up_is_captured_and_follows_its_points(cuda):
    q, r = around_a_centre(cuda, 1000, 8000)
    prequal.knn(q, r, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prequal.knn(q, r, 3)
    for share in (1, 7):
        new_q, new_r = around_a_centre(cuda, 1000, 8000, seed=share, share=share)
        q.copy_(new_q)
        r.copy_(new_r)
        graph.replay()
        torch.cuda.synchronize()
        assert prequal.knn.op.contract.compare(out, prequal.knn.op.reference(q, r, 3)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 33, 128])
def test_many_segments_agree_with_the_reference_bit_for_bit(cuda, k):
    lengths = [n % 97 for n in range(0, 5000, 7)]
    q, r, pointers = ragged(cuda, lengths, lengths[::-1])
    got = prequal.knn(q, r, k, **pointers)
    assert prequal.knn.op.contract.compare(got, prequal.knn.op.reference(q, r, k, **pointers)) is None
    assert prequal.stats()["knn"][str(cuda)]["fast"] == 1


@pytest.mark.gpu
@pytest.mark.large
def test_an_answer_of_more_than_two_to_the_31_neighbours(cuda):
    n, k = 2**31 // 128 + 1000, 128
    free, _ = torch.cuda.mem_get_info(cuda)
    if free < 1.5 * n * k * 12:
        pytest.skip(f"{free / 2**30:.0f} GiB of GPU memory are free, of {1.5 * n * k * 12 / 2**30:.0f}")
    references = cloud(cuda, 500, 2)
    queries = cloud(cuda, 1009, 1).repeat(n // 1009 + 1, 1)[:n]
    dist2, idx = prequal.knn(queries, references, k)
    assert prequal.stats()["knn"][str(cuda)]["fast"] == 1
    want_dist2, want_idx = prequal.knn.op.reference(queries[:1009], references, k)
    for start in (
        0,
        n // 1009 * 1009 - 1009 * 3,
        n // 1009 * 1009 - 1009,
    ):  # the queries repeat, the last of them past 2^31
        assert torch.equal(idx[start : start + 1009], want_idx)
        assert torch.equal(dist2[start : start + 1009], want_dist2)
    assert torch.equal(idx[n // 1009 * 1009 :], want_idx[: n % 1009])


def test_the_declared_cost_is_both_clouds_and_the_answer_once():
    def cost(op, *args, **kwargs):
        return op.op.cost_of(op.op.bind(args, kwargs))

    q, r = torch.ones(6, 3), torch.ones(10, 3)
    at = {"query_ptr": torch.tensor([0, 6]), "reference_ptr": torch.tensor([0, 10])}
    assert cost(prequal.knn, q, r, 2) == Cost(12 * 16 + 6 * 2 * 12)
    assert cost(prequal.knn, q, r, 2, **at) == Cost(12 * 16 + 6 * 2 * 12 + 32)
    assert cost(prequal.knn, q.double(), r.double(), 2) == Cost(24 * 16 + 6 * 2 * 16)
    assert cost(prequal.knn, q[:, :2].half(), r[:, :2].half(), 2) == Cost(4 * 16 + 6 * 2 * 12)
    assert cost(prequal.radius, q, r, 1.0, 2) == Cost(12 * 16 + 6 * 2 * 12 + 6 * 8)
    labels = torch.ones(10, 5, dtype=torch.int16)
    assert cost(prequal.knn_gather, q, r, labels) == Cost(12 * 16 + 10 * 12)
    assert cost(prequal.knn_gather, r, q, labels[:6]) == Cost(12 * 16 + 10 * (6 + 10))
    assert cost(prequal.knn_interpolate, q, r, labels.float(), 3) == Cost(12 * 16 + 20 * 12)


@pytest.mark.parametrize("op", ["knn_gather", "knn_interpolate"])
def test_points_alone_ask_for_no_gradient(op, device):
    points, references, values = (torch.rand(n, d, device=device) for n, d in ((6, 3), (9, 3), (9, 2)))
    points.requires_grad_()
    references.requires_grad_()
    for function in (getattr(prequal, op), getattr(torch.ops.prequal, op)):
        assert not function(points, references, values).requires_grad
        values.requires_grad_()
        assert function(points, references, values).requires_grad
        values.requires_grad_(False)
