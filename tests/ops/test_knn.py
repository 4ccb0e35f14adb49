"""knn and knn_gather against SciPy's tree, and the rules where a tree has none: ties, broken points, too few points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

import prequal
import prequal.bench.shapes.knn  # declares the costs
from prequal.ops.knn import KINDS, cloud
from prequal.registry import Cost


def brute(queries, references, k):
    """(dist2, idx) in plain loops of float32, ties to the lower index."""
    q, r = queries.astype(np.float32), references.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        square = [(q[:, None, a] - r[None, :, a]) ** 2 for a in range(3)]
        d = (square[0] + square[1]) + square[2]
    broken = ~np.isfinite(r).all(1)[None, :] | ~np.isfinite(q).all(1)[:, None]
    order = np.lexsort((np.broadcast_to(np.arange(len(r)), d.shape), d, broken), axis=1)[:, :k]
    d2 = np.take_along_axis(d, order, 1)
    missing = np.take_along_axis(broken, order, 1)
    d2, order = np.where(missing, np.inf, d2), np.where(missing, -1, order)
    pad = ((0, 0), (0, k - d2.shape[1]))
    return np.pad(d2, pad, constant_values=np.inf), np.pad(order, pad, constant_values=-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 32])
def test_every_distribution_gives_the_brute_force_answer(device, kind, k):
    queries, references = cloud(device, 131, 1, kind), cloud(device, 997, 2, kind)
    dist2, idx = prequal.knn(queries, references, k)
    want_dist2, want_idx = brute(queries.cpu().numpy(), references.cpu().numpy(), k)
    np.testing.assert_array_equal(idx.cpu().numpy(), want_idx)
    np.testing.assert_array_equal(dist2.cpu().numpy(), want_dist2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scipys_tree_finds_no_nearer_neighbour(device, dtype):
    queries, references = cloud(device, 500, 1, "surface").to(dtype), cloud(device, 3001, 2, "surface").to(dtype)
    dist2, idx = prequal.knn(queries, references, 8)
    want, _ = cKDTree(references.cpu().double().numpy()).query(queries.cpu().double().numpy(), k=8)
    chosen = (queries.double()[:, None] - references.double()[idx]).norm(dim=2).cpu().numpy()
    slack = {torch.float32: 4 * 2.0**-24, torch.float64: 4 * 2.0**-53}[dtype]
    assert (chosen <= want * (1 + slack)).all()
    np.testing.assert_allclose(dist2.cpu().double().sqrt().numpy(), want, rtol=2 * slack)


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
points = st.lists(st.tuples(coordinate, coordinate, coordinate), max_size=40)


@settings(max_examples=150, deadline=None)
@given(points, points, st.integers(1, 32))
def test_any_points_whatever(queries, references, k):
    q, r = (np.array(x, dtype=np.float32).reshape(-1, 3) for x in (queries, references))
    dist2, idx = prequal.knn(torch.tensor(q), torch.tensor(r), k)
    want_dist2, want_idx = brute(q, r, k)
    np.testing.assert_array_equal(idx.numpy(), want_idx)
    np.testing.assert_array_equal(dist2.numpy(), want_dist2)


@pytest.mark.gpu
@settings(max_examples=150, deadline=None)
@given(points, points, st.integers(1, 32))
def test_any_points_whatever_on_the_gpu(queries, references, k):
    q, r = (torch.tensor(np.array(x, dtype=np.float32).reshape(-1, 3), device="cuda") for x in (queries, references))
    dist2, idx = prequal.knn(q, r, k)
    want_dist2, want_idx = brute(q.cpu().numpy(), r.cpu().numpy(), k)
    np.testing.assert_array_equal(idx.cpu().numpy(), want_idx)
    np.testing.assert_array_equal(dist2.cpu().numpy(), want_dist2)


def test_ties_go_to_the_lower_index(device):
    references = torch.zeros(100, 3, device=device)
    _, idx = prequal.knn(torch.ones(2, 3, device=device), references, 32)
    assert idx.tolist() == [list(range(32))] * 2


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


def test_gradients_of_the_distances_are_right_by_finite_differences():
    queries, references = cloud("cpu", 4, 1).double().requires_grad_(), cloud("cpu", 9, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda q, r: prequal.knn(q, r, 3)[0], (queries, references))
    assert torch.autograd.gradgradcheck(lambda q, r: prequal.knn(q, r, 3)[0], (queries, references))


def test_missing_neighbours_have_no_gradient(device):
    queries = torch.tensor([[0.0, 0.0, 0.0], [float("nan"), 0.0, 0.0]], device=device, requires_grad=True)
    references = torch.ones(1, 3, device=device, requires_grad=True)
    dist2, _ = prequal.knn(queries, references, 2)
    dist2[0, 0].backward()
    assert queries.grad.tolist() == [[-2.0, -2.0, -2.0], [0.0, 0.0, 0.0]]
    assert references.grad.tolist() == [[2.0, 2.0, 2.0]]


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


# ---- real scans and large clouds on the GPU ----------------------------------------------------------------------


@pytest.mark.gpu
def test_a_real_scan_gives_scipys_answer(cuda, test_data):
    scan = np.load(test_data / "igea_vertices.npy").astype(np.float32)
    references = scan[np.random.default_rng(0).choice(len(scan), 8000, replace=False)]
    _, idx = prequal.knn(torch.tensor(scan, device=cuda), torch.tensor(references, device=cuda), 4)
    want, _ = cKDTree(references.astype(np.float64)).query(scan.astype(np.float64), k=4)
    got = np.linalg.norm(scan[:, None].astype(np.float64) - references[idx.cpu().numpy()], axis=2)
    # 4 roundings of fp32 under a square root
    assert (got <= want * (1 + 4 * 2.0**-24) + 1e-30).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_cloud_agrees_with_the_reference_bit_for_bit(cuda, kind):
    queries, references = cloud(cuda, 2000, 1, kind), cloud(cuda, 300_007, 2, kind)
    got = prequal.knn(queries, references, 8)
    assert prequal.knn.op.contract.compare(got, prequal.knn.op.reference(queries, references, 8)) is None
    assert prequal.stats()["knn"][str(cuda)]["fast"] == 1


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
