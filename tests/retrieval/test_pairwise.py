"""pairwise_distance by both forms against float64, the centred one within its bound; pairwise_within against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal
from compiled_once import is_compiled_once
from prequal.ops.pairwise_distance import centre_of
from prequal.retrieval import pairwise

INF = float("inf")
WIDE = pairwise.LEAST_CENTRED


def normals(rows, width, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed + rows)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(device, dtype)


def exact(a, b, p=2.0):
    return torch.cdist(a.double(), b.double(), p=p, compute_mode="donot_use_mm_for_euclid_dist")


def bound_of(a, b):
    """e of the docstring, of squares."""
    centre = centre_of(b).double()
    u = 2.0**-52 if a.dtype == torch.float64 else 2.0**-23
    sizes = torch.linalg.vector_norm(a.double() - centre, dim=1)[:, None]
    return (a.shape[1] + 8) * u * (sizes + torch.linalg.vector_norm(b.double() - centre, dim=1)).square()


def served():
    return set(prequal.stats())


def test_width_and_norm_choose_the_form(device):
    narrow, wide = (normals(5, width, device=device) for width in (WIDE - 1, WIDE))
    for p, x, op in (
        (2, narrow, "pairwise_direct"),
        (1, wide, "pairwise_direct"),
        (2, wide, "pairwise_from_products_"),
    ):
        prequal.reset_stats()
        y = x.flip(0) + 1
        torch.testing.assert_close(prequal.pairwise_distance(x, y, p=p), exact(x, y, p).float())
        assert served() == {op}


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
@pytest.mark.parametrize(
    ("n", "m", "width"), [(1, 1, WIDE), (130, 257, WIDE), (40, 33, 1023), (0, 5, WIDE), (5, 0, WIDE)]
)
def test_the_centred_form_keeps_its_bound(device, n, m, width, offset):
    for dtype in (torch.float32, torch.float64, torch.float16):
        a, b = ((x + offset).to(dtype) for x in (normals(n, width, 1), normals(m, width, 2)))
        squares, want = exact(a, b).square(), bound_of(a, b)
        if n and m:
            want = want + 2.0**-50 * squares  # of float64 itself, where that is what is tried
        a, b = a.to(device), b.to(device)
        found = prequal.pairwise_distance(a, b, squared=True).cpu().double()
        assert ((found - squares).abs() <= want).all()
        assert (found >= 0).all()
        distance = prequal.pairwise_distance(a, b).cpu().double()
        # and the root's own rounding
        assert ((distance - squares.sqrt()).abs() <= want.sqrt() + 2.0**-23 * distance).all()


def test_on_offset_data_the_error_is_a_tenth_of_that_of_cdist(device):
    a, b = (normals(n, 512, n, device=device) + 100.0 for n in (200, 300))
    want = exact(a, b)
    theirs = (torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist").double() - want).abs().max()
    ours = (prequal.pairwise_distance(a, b).double() - want).abs().max()
    assert 10 * ours <= theirs


def test_autocast_does_not_round_the_product(device):
    a, b = normals(20, WIDE, 1, device=device), normals(30, WIDE, 2, device=device)
    want = prequal.pairwise_distance(a, b)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(prequal.pairwise_distance(a, b), want)


@pytest.mark.parametrize("squared", [False, True])
def test_gradients_of_the_centred_form_are_those_of_finite_differences(squared):
    a, b = (normals(n, WIDE, n, torch.float64).requires_grad_() for n in (2, 3))

    def call(a, b):
        return prequal.pairwise_distance(a, b, squared=squared)

    assert torch.autograd.gradcheck(call, (a, b))
    assert torch.autograd.gradgradcheck(call, (a[:1, :].detach().requires_grad_(), b[:1].detach().requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_both_forms_agree(device, dtype):
    found = []
    for function in (prequal.pairwise_distance, prequal.pairwise_direct):
        a, b = (normals(n, WIDE, n, dtype, device).requires_grad_() for n in (20, 30))
        distance = function(a, b)
        weight = torch.linspace(-1, 1, distance.numel(), device=device).view_as(distance)
        found.append(torch.autograd.grad(distance, (a, b), weight))
    for x, y in zip(*found, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_rows_that_are_equal_ask_for_no_infinite_gradient(device):
    a = normals(6, WIDE, device=device).requires_grad_()
    (grad,) = torch.autograd.grad(prequal.pairwise_distance(a, a).sum(), a)
    assert torch.isfinite(grad).all()
    zeros = torch.zeros(3, WIDE, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(prequal.pairwise_distance(zeros, zeros.detach()).sum(), zeros)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_it_compiles_and_is_transformed(device):
    a, b = normals(4, WIDE, 1, torch.float64, device), normals(5, WIDE, 2, torch.float64, device)
    want = prequal.pairwise_distance(a, b)
    compiled = torch.compile(prequal.pairwise_distance, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), want)
    grad = torch.func.grad(lambda x: prequal.pairwise_distance(x, b).sum())(a)
    x = a.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(prequal.pairwise_distance(x, b).sum(), x)[0])
    stacked = torch.vmap(prequal.pairwise_distance)(torch.stack([a, a + 1]), torch.stack([b, b]))
    torch.testing.assert_close(stacked[1], prequal.pairwise_distance(a + 1, b))


SIZES = ((4, 40, 8), (5, 77, 12), (31, 9, 7))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", ["pairwise_direct", "pairwise_argmin", "pairwise_distance"])
def test_it_is_compiled_once_for_every_size(device, name, asks):
    for more in (0, WIDE) if name == "pairwise_distance" else (0,):
        sizes = [(n, m, width + more) for n, m, width in SIZES]
        sets = [(normals(n, width, 1, device=device), normals(m, width, 2, device=device)) for n, m, width in sizes]
        is_compiled_once(getattr(prequal, name), [tuple(x.requires_grad_(asks) for x in pair) for pair in sets])


def test_a_search_within_a_radius_is_compiled_once_for_every_size(device):
    sets = [(normals(n, width, 1, device=device), normals(m, width, 2, device=device)) for n, m, width in SIZES]
    is_compiled_once(lambda a, b: prequal.pairwise_within(a, b, 3.0), sets)


# ---- rows that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), INF, -INF, 1e38, 1e20])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("of", ["a", "b"])
def test_a_row_that_is_not_finite_spoils_its_own_distances_alone(device, of, offset, value):
    """Nor one whose squares overflow: the others are right to the bound that they have without it."""
    a, b = (normals(n, WIDE, n, device=device) + offset for n in (20, 30))
    x, y = a.clone(), b.clone()
    (x if of == "a" else y)[3, 7] = value
    keep = torch.arange(20 if of == "a" else 30, device=device) != 3
    rows, columns = (a[keep], b) if of == "a" else (a, b[keep])
    squares, bound = exact(rows, columns).square(), bound_of(rows, columns)
    transformed = torch.vmap(lambda row: prequal.pairwise_distance(row[None], y, squared=True)[0])(x)
    for found in (prequal.pairwise_distance(x, y, squared=True), transformed):
        kept = found[keep] if of == "a" else found[:, keep]
        assert ((kept.double() - squares).abs() <= bound).all()
        spoiled = found[3] if of == "a" else found[:, 3]
        assert not spoiled.isfinite().any()


def test_without_a_finite_row_there_is_a_distance_to_none(device):
    a, b = normals(3, WIDE, device=device), torch.full((2, WIDE), INF, device=device)
    assert not prequal.pairwise_distance(a, b).isfinite().any()
    assert not prequal.pairwise_distance(b, a).isfinite().any()


# ---- within a radius ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(1, 1), (50, 60), (0, 7), (7, 0), (300, 5000), (2, 9000)])
def test_neighbours_are_those_of_all_pairs(device, n, m):
    a, b = (normals(rows, 3, 7 * rows, device=device) for rows in (n, m))
    ptr, idx, dist2 = prequal.pairwise_within(a, b, 0.7)
    squares = prequal.pairwise_direct(a, b, 2.0, True)
    near = (squares <= float(np.float32(0.7) * np.float32(0.7))).cpu().numpy()
    assert ptr.tolist() == [0, *near.sum(1).cumsum().tolist()]
    assert idx.tolist() == near.nonzero()[1].tolist()
    assert torch.equal(dist2.cpu(), squares.cpu()[torch.from_numpy(near)])


def test_segments_are_whole_tiles_that_cover_all_rows():
    for rows in (0, 1, 128, 129, 10**5, 10**9):
        for columns in (0, 1, 127, 128, 1024, 100_003, 2**31 - 1):
            segment = pairwise.segment_of(rows, columns)
            assert segment % pairwise.TILE == 0
            assert segment >= 1
            assert -(-columns // segment) <= 2 * pairwise.WANTED_BLOCKS


@pytest.mark.parametrize(
    ("function", "change", "error", "match"),
    [
        ("distance", {"a": [1.0]}, TypeError, r"a: expected a torch.Tensor, got list"),
        ("distance", {"a": torch.ones(2, 3).long()}, TypeError, r"a: expected a floating dtype, got int64"),
        ("distance", {"b": torch.ones(4, 2)}, ValueError, r"b: expected shape \[M, 3\], got \[4, 2\]"),
        ("distance", {"b": torch.ones(4, 3).half()}, TypeError, r"b: expected float32 like a, got float16"),
        ("distance", {"p": 0.5}, ValueError, r"p: expected a number from 1, got 0.5"),
        ("distance", {"p": "2"}, TypeError, r"p: expected a float, got str"),
        ("distance", {"squared": 1}, TypeError, r"squared: expected a bool, got int"),
        ("within", {"radius": -1}, ValueError, r"radius: expected a number from 0, got -1"),
        ("within", {"radius": None}, TypeError, r"radius: expected a float, got NoneType"),
        ("within", {"b": torch.ones(4, 2), "radius": 1}, ValueError, r"b: expected shape \[M, 3\], got \[4, 2\]"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(function, change, error, match):
    with pytest.raises(error, match=match):
        getattr(prequal, f"pairwise_{function}")(**({"a": torch.ones(2, 3), "b": torch.ones(4, 3)} | change))
