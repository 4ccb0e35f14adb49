"""The ops between all rows of two sets against NumPy: norms, ties, radii, segments, and what is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal
from prequal.ops.pairwise_distance import starts_of

INF, NAN = float("inf"), float("nan")


def normals(rows, width, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + rows)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)


def places(rows, width, seed=0, values=3):
    """Few places, so that many distances are equal; all of them are exact."""
    return torch.randint(0, values, (rows, width), generator=torch.Generator().manual_seed(seed + rows)).float()


def squares_by_numpy(a, b):
    return ((a.double().numpy()[:, None] - b.double().numpy()[None]) ** 2).sum(2)


def was_served(name, device):
    """On a GPU by the kernel, and by nothing else."""
    if device.type == "cuda":
        assert prequal.stats()[name][str(device)]["reference"] == {}


# ---- distances ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3.5, INF])
@pytest.mark.parametrize(
    ("n", "m", "width"), [(7, 5, 3), (1, 1, 1), (0, 4, 3), (4, 0, 3), (3, 2, 0), (129, 257, 17), (130, 128, 64)]
)
def test_distances_are_norms_of_differences(device, n, m, width, p, squared):
    a, b = normals(n, width), normals(m, width, 3)
    apart = a.double().numpy()[:, None] - b.double().numpy()[None]
    want = np.linalg.norm(apart, ord=p, axis=2) if width else np.zeros((n, m))
    got = prequal.pairwise_direct(a.to(device), b.to(device), p, squared)
    # width + 2 roundings of fp32 of a sum of terms that are not negative; four times that for a square and for powers
    rtol = 4 * (width + 2) * 2.0**-24
    np.testing.assert_allclose(got.cpu().numpy(), want**2 if squared else want, rtol=rtol)
    if p != 3.5:
        was_served("pairwise_direct", device)


@pytest.mark.parametrize("p", [1, 2, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equal_rows_are_at_zero_and_no_distance_is_negative(device, dtype, p):
    a = normals(300, 33, dtype=dtype).to(device)
    got = prequal.pairwise_direct(a, a, p)
    assert (got.diagonal() == 0).all()
    assert (got >= 0).all()
    assert torch.equal(got, got.t())


def test_an_offset_of_both_sets_changes_nothing(device):
    """Whole numbers: the offset is exact, so every bit of a distance must stay."""
    a, b = places(140, 5, values=100).to(device), places(150, 5, 1, values=100).to(device)
    want = prequal.pairwise_direct(a, b)
    assert torch.equal(prequal.pairwise_direct(a + 2.0**22, b + 2.0**22), want)


def test_nan_and_infinity_stand_where_numpy_has_them(device):
    a, b = normals(6, 4), normals(9, 4, 1)
    a[1, 2], a[3, 0], b[4, 1], b[5, 0] = NAN, INF, -INF, INF
    with np.errstate(invalid="ignore"):
        apart = a.double().numpy()[:, None] - b.double().numpy()[None]
    for p in (1, 2, INF):
        got = prequal.pairwise_direct(a.to(device), b.to(device), p).cpu().numpy()
        with np.errstate(invalid="ignore"):
            want = np.linalg.norm(apart, ord=p, axis=2)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, INF])
def test_the_gradient_at_a_distance_of_zero_is_zero(device, p, squared):
    a = normals(3, 4, dtype=torch.float64).to(device).requires_grad_()
    (grad,) = torch.autograd.grad(prequal.pairwise_direct(a, a.detach(), p, squared).diagonal().sum(), a)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, INF])
def test_gradients_are_those_of_finite_differences(p, squared):
    a, b = (normals(n, 4, n, torch.float64).requires_grad_() for n in (3, 5))

    def call(a, b):
        return prequal.pairwise_direct(a, b, p, squared)

    assert torch.autograd.gradcheck(call, (a, b))
    if p == 2:
        assert torch.autograd.gradgradcheck(call, (a, b))


@pytest.mark.gpu
@pytest.mark.large
def test_more_distances_than_32_bits_count(cuda):
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free memory")
    a = torch.arange(46_400, device=cuda, dtype=torch.float32).unsqueeze(1)
    got = prequal.pairwise_direct(a, a, 1.0)
    assert got.numel() > 2**31
    assert torch.equal(got[-1], a.flatten().flip(0))
    assert torch.equal(got[:, -2], (a.flatten() - 46_398).abs())
    was_served("pairwise_direct", cuda)


# ---- the nearest --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "m", "width"), [(17, 60, 3), (1, 1, 1), (129, 1025, 2), (3, 40_000, 4), (20_000, 3, 3), (200, 500, 0)]
)
def test_the_nearest_is_the_lowest_of_equals(device, n, m, width):
    a, b = places(n, width), places(m, width, 1)
    dist2, idx = prequal.pairwise_argmin(a.to(device), b.to(device))
    every = squares_by_numpy(a, b)
    assert idx.tolist() == every.argmin(1).tolist()
    assert dist2.tolist() == every.min(1).tolist()
    was_served("pairwise_argmin", device)


def test_the_nearest_among_many_is_nearest_in_float64(device):
    a, b = normals(300, 24), normals(5000, 24, 1)
    dist2, idx = (x.cpu().numpy() for x in prequal.pairwise_argmin(a.to(device), b.to(device)))
    every = squares_by_numpy(a, b)
    np.testing.assert_allclose(dist2, every.min(1), rtol=26 * 2.0**-24)
    found = np.take_along_axis(every, idx[:, None], 1)[:, 0]
    np.testing.assert_allclose(found, every.min(1), rtol=2 * 26 * 2.0**-24)


def test_infinity_comes_before_nan_and_nan_before_nobody(device):
    zero = torch.zeros(1, 1, device=device)

    def nearest(*values):
        dist2, idx = prequal.pairwise_argmin(zero, torch.tensor(values, device=device).view(-1, 1))
        return dist2.item(), idx.item()

    assert nearest(NAN, 4.0) == (16.0, 1)
    assert nearest(NAN, INF, -INF) == (INF, 1)
    assert nearest(1e30, INF) == (INF, 0)
    assert nearest(NAN, NAN)[1] == 0
    assert nearest() == (INF, -1)


def test_no_rows_have_no_nearest(device):
    dist2, idx = prequal.pairwise_argmin(torch.ones(0, 3, device=device), torch.ones(4, 3, device=device))
    assert dist2.shape == idx.shape == (0,)


def test_the_gradient_of_the_nearest_distance(device):
    a, b = normals(4, 3, dtype=torch.float64), normals(6, 3, 1, torch.float64)
    b[2] = a[1]
    a, b = (x.to(device).requires_grad_() for x in (a, b))
    dist2, idx = prequal.pairwise_argmin(a, b)
    to_a, to_b = torch.autograd.grad(dist2.sum(), (a, b))
    pull = 2 * (a - b[idx]).detach()
    torch.testing.assert_close(to_a, pull)
    torch.testing.assert_close(to_b, torch.zeros_like(b).index_add(0, idx, -pull))
    assert torch.equal(to_a[1], torch.zeros_like(to_a[1]))


# ---- those within a radius ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [1, 128, 130, 2**31])
@pytest.mark.parametrize("radius", [0.0, 1.0, 1.5, INF])
@pytest.mark.parametrize(("n", "m"), [(5, 9), (1, 1), (129, 700), (0, 5), (5, 0)])
def test_counts_and_rows_are_those_of_all_pairs_in_order(device, n, m, radius, segment):
    a, b = places(n, 3, values=5), places(m, 3, 1, values=5)
    near = squares_by_numpy(a, b) <= radius**2
    a, b = a.to(device), b.to(device)
    counts = prequal.pairwise_within_counts(a, b, radius, segment)
    width = min(segment, max(m, 1))
    want = [[int(near[i, j : j + width].sum()) for j in range(0, m, width)] for i in range(n)]
    assert counts.tolist() == want
    starts, total = starts_of(counts)
    idx, dist2 = prequal.pairwise_within_fill(a, b, radius, starts, int(total), segment)
    rows, columns = near.nonzero()
    assert idx.tolist() == columns.tolist()
    assert dist2.tolist() == squares_by_numpy(a.cpu(), b.cpu())[rows, columns].tolist()
    was_served("pairwise_within_counts", device)
    was_served("pairwise_within_fill", device)


def test_the_edge_of_the_radius_is_inside_and_nan_is_not(device):
    b = torch.tensor([[3.0], [3.0000002], [NAN], [-3.0], [INF]], device=device)
    zero = torch.zeros(1, 1, device=device)
    assert prequal.pairwise_within_counts(zero, b, 3.0).tolist() == [[2]]
    assert prequal.pairwise_within_counts(zero, b, INF).tolist() == [[4]]


def test_what_has_no_room_is_left_out_and_what_is_left_is_nobody(device):
    a = torch.zeros(3, 1, device=device)
    b = torch.tensor([[0.0], [9.0], [1.0], [2.0]], device=device)
    starts = torch.tensor([[-1], [3], [7]], device=device)
    idx, dist2 = prequal.pairwise_within_fill(a, b, 2.0, starts, 8)
    assert idx.tolist() == [2, 3, -1, 0, 2, 3, -1, 0]
    assert dist2.tolist() == [1.0, 4.0, INF, 0.0, 1.0, 4.0, INF, 0.0]


def test_neighbours_within_a_radius_have_no_gradient(device):
    a = torch.zeros(2, 1, device=device, requires_grad=True)
    starts = torch.tensor([[0], [2]], device=device)
    idx, dist2 = prequal.pairwise_within_fill(a, torch.zeros(2, 1, device=device), 1.0, starts, 4)
    assert idx.tolist() == [0, 1, 0, 1]
    assert not dist2.requires_grad


# ---- distances from inner products ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 1024), (33, 1029), (3000, 7)])
def test_products_become_distances(device, n, m):
    a, b = normals(n, 5), normals(m, 5, 1)
    args = (x.to(device) for x in (a @ b.t(), a.square().sum(1), b.square().sum(1)))
    got = prequal.pairwise_from_products_(*args, True)
    # a sum of terms up to |a|^2 + |b|^2, each right to some roundings
    scale = (a.norm(dim=1)[:, None] + b.norm(dim=1)).square().numpy()
    assert (np.abs(got.cpu().numpy() - squares_by_numpy(a, b)) <= 13 * 2.0**-23 * scale).all()
    assert (got >= 0).all()
    was_served("pairwise_from_products_", device)
