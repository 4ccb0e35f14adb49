"""Distances from differences against NumPy's norms; zeros, offsets, ties and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prequal.retrieval.pairwise import pairwise_argmin, pairwise_distance

INF = float("inf")


def normals(rows, width, seed=0, dtype=torch.float64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + rows), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("budget", [1, 1000, 2**24])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3.5, INF])
@pytest.mark.parametrize(("n", "m", "width"), [(7, 5, 3), (1, 1, 1), (0, 4, 3), (4, 0, 3), (3, 2, 0)])
def test_distances_are_norms_of_differences(n, m, width, p, squared, budget):
    a, b = normals(n, width), normals(m, width, 3)
    apart = a.numpy()[:, None] - b.numpy()[None]
    want = np.linalg.norm(apart, ord=p, axis=2) if width else np.zeros((n, m))
    got = pairwise_distance(a, b, p=p, squared=squared, max_workspace_bytes=budget)
    np.testing.assert_allclose(got.numpy(), want**2 if squared else want, rtol=1e-13)


def test_equal_rows_are_at_zero_and_offsets_do_no_harm():
    a = (1000 + normals(20, 64)).float()
    got = pairwise_distance(a, a)
    assert (got.diagonal() == 0).all()
    assert (got >= 0).all()
    want = pairwise_distance(a.double(), a.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", [1, 2, 3, INF])
def test_the_gradient_at_a_distance_of_zero_is_zero(p):
    a = normals(3, 4).requires_grad_()
    (grad,) = torch.autograd.grad(pairwise_distance(a, a.detach(), p=p).diagonal().sum(), a)
    assert torch.equal(grad, torch.zeros_like(grad))
    b = normals(5, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: pairwise_distance(a, b, p=p), (a, b))


@pytest.mark.parametrize("budget", [1, 500, 2**24])
def test_the_nearest_is_the_lowest_of_equals(budget):
    grid = torch.randint(0, 3, (60, 3), generator=torch.Generator().manual_seed(1)).float()
    dist2, idx = pairwise_argmin(grid[:17], grid, max_workspace_bytes=budget)
    every = ((grid[:17, None] - grid) ** 2).sum(2).numpy()
    assert idx.tolist() == every.argmin(1).tolist()
    assert (dist2 == 0).all()


def test_the_nearest_of_nothing_and_of_nan():
    dist2, idx = pairwise_argmin(torch.ones(2, 3), torch.ones(0, 3))
    assert dist2.tolist() == [INF, INF]
    assert idx.tolist() == [-1, -1]
    rows = torch.tensor([[float("nan")], [4.0]])
    assert pairwise_argmin(torch.zeros(1, 1), rows)[1].tolist() == [1]
    assert pairwise_argmin(torch.zeros(0, 1), rows)[1].shape == (0,)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"a": [1.0]}, TypeError, r"a: expected a torch.Tensor, got list"),
        ({"a": torch.ones(2, 3, dtype=torch.int64)}, TypeError, r"a: expected a floating dtype, got int64"),
        ({"b": torch.ones(4, 2)}, ValueError, r"b: expected shape \[M, 3\], got \[4, 2\]"),
        ({"b": torch.ones(4, 3).half()}, TypeError, r"b: expected float32 like a, got float16"),
        ({"p": 0.5}, ValueError, r"p: expected a number from 1, got 0.5"),
        ({"p": "2"}, TypeError, r"p: expected a float, got str"),
        ({"squared": 1}, TypeError, r"squared: expected a bool, got int"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(change, error, match):
    with pytest.raises(error, match=match):
        pairwise_distance(**({"a": torch.ones(2, 3), "b": torch.ones(4, 3)} | change))
