"""topk_products against NumPy's sort of the products: ties, worst orders, more queries than a launch takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal
from best_rows import by_numpy
from compiled_once import is_compiled_once
from prequal.ops.topk_rows import METRICS

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def integers(rows, width, dtype, device, seed=0, most=2):
    """Small whole numbers: products have no rounding, and many are equal."""
    generator = torch.Generator().manual_seed(seed + rows)
    return torch.randint(-most, most + 1, (rows, width), generator=generator).to(device, dtype)


def is_right(found, want):
    scores, idx = (x.cpu().numpy() for x in found)
    np.testing.assert_array_equal(idx, want[1])
    np.testing.assert_array_equal(scores, want[0])


def products_of(queries, corpus):
    return queries.double().cpu().numpy() @ corpus.double().cpu().numpy().T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "corpus", "width", "k"),
    [(1, 1, 1, 1), (1, 5, 8, 9), (3, 1000, 33, 10), (17, 4097, 64, 128), (70, 500, 16, 5), (8, 20_001, 24, 65)],
)
def test_it_is_a_sort_of_all_products(device, queries, corpus, width, k, dtype):
    q, rows = integers(queries, width, dtype, device), integers(corpus, width, dtype, device, 3)
    is_right(prequal.topk_products(q, rows, k), by_numpy(products_of(q, rows), k))
    if device.type == "cuda":
        assert prequal.stats()["topk_products"][str(device)]["reference"] == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_distances_of_whole_numbers_are_exact(device, dtype):
    q, rows = integers(9, 40, dtype, device), integers(3001, 40, dtype, device, 3)
    a, b = (x.double().cpu().numpy() for x in (q, rows))
    want = by_numpy(-((a[:, None] - b[None]) ** 2).sum(2), 30)
    is_right(prequal.topk_products(q, rows, 30, None, "l2"), want)
    is_right(prequal.topk_products(q, rows, 30, rows.float().square().sum(1), "l2"), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_closest_to_itself_by_cosine(device, dtype):
    rows = torch.randn(2000, 100, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    scores, idx = prequal.topk_products(rows[500:520], rows, 3, None, "cosine")
    assert idx[:, 0].tolist() == list(range(500, 520))
    assert ((scores[:, 0] - 1).abs() <= 108 * 2.0**-23).all()
    assert (scores[:, 1] < 0.9).all()


@pytest.mark.parametrize("order", ["ascending", "descending", "equal"])
def test_the_order_of_rows_does_not_matter(device, order):
    """Ascending, every score passes the best so far; equal ones belong to the first rows."""
    values = torch.arange(2048.0)
    values = {"ascending": values, "descending": values.flip(0), "equal": values * 0 + 7}[order]
    rows = values.repeat_interleave(10).unsqueeze(1).repeat(1, 8).to(device)
    q = torch.ones(11, 8, device=device)
    is_right(prequal.topk_products(q, rows, 128), by_numpy(products_of(q, rows), 128))


def test_an_infinite_score_comes_before_an_empty_place_and_nan_before_all(device):
    rows = torch.tensor([[-INF], [NAN], [INF], [-INF], [0.0]], device=device)
    scores, idx = prequal.topk_products(torch.ones(1, 1, device=device), rows, 7)
    assert idx.tolist() == [[1, 2, 4, 0, 3, -1, -1]]
    assert scores[0].isnan().tolist() == [True, *[False] * 6]
    assert scores[0, 1:].tolist() == [INF, 0.0, *[-INF] * 4]


def test_indices_pass_32_bits(device):
    rows = torch.tensor([[1.0], [3.0], [2.0]], device=device)
    _, idx = prequal.topk_products(torch.ones(1, 1, device=device), rows, 2, first_index=2**40)
    assert idx.tolist() == [[2**40 + 1, 2**40 + 2]]


@pytest.mark.parametrize("metric", METRICS)
def test_terms_that_are_known_are_those_that_it_makes(device, metric):
    q, rows = (torch.randn(n, 48, generator=torch.Generator().manual_seed(n)).to(device) for n in (5, 900))
    plain = prequal.topk_products(q, rows, 20, None, metric)
    terms = None if metric == "dot" else prequal.row_norms(rows, {"cosine": "inverse", "l2": "square"}[metric])
    known = prequal.topk_products(q, rows, 20, terms, metric)
    for a, b in zip(plain[0], known[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("known", [False, True])
def test_gradients_are_those_of_the_scores_of_the_rows_found(device, metric, known):
    q, rows = (torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).double().to(device) for n in (4, 30))
    q.requires_grad_(), rows.requires_grad_()
    terms = torch.linspace(0.5, 1, 30, dtype=torch.float64, device=device) if known and metric != "dot" else None
    for k in (5, 40):
        got, want = (
            torch.autograd.grad(f(q, rows, k, terms, metric)[0][:, :5].square().sum(), (q, rows))
            for f in (prequal.topk_products, prequal.topk_products.op.reference)
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("metric", "known"), [("dot", False), ("cosine", False), ("cosine", True), ("l2", True)])
def test_it_is_compiled_once_for_every_size(device, metric, known, asks):
    def sizes():
        for queries, corpus, width in ((4, 40, 8), (5, 77, 12), (31, 9, 7)):
            q, rows = (integers(n, width, torch.float64, device, 9) + 0.5 for n in (queries, corpus))
            terms = torch.linspace(0.5, 2, corpus, dtype=torch.float64, device=device) if known else None
            yield q.requires_grad_(asks), rows.requires_grad_(asks), terms

    is_compiled_once(lambda q, rows, terms: prequal.topk_products(q, rows, 5, terms, metric), sizes())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "corpus", "k"), [(1, 1_000_003, 10), (16, 300_001, 128), (64, 100_001, 64)])
def test_a_large_corpus_is_the_sort_of_its_products(cuda, queries, corpus, k, dtype):
    q, rows = integers(queries, 64, dtype, cuda), integers(corpus, 64, dtype, cuda, 3)
    want = (q.float() @ rows.float().t()).sort(dim=1, descending=True, stable=True)
    scores, idx = prequal.topk_products(q, rows, k)
    assert torch.equal(idx, want.indices[:, :k])
    assert torch.equal(scores, want.values[:, :k])


@pytest.mark.gpu
def test_runs_are_equal_whatever_the_order_of_arrival(cuda):
    q, rows = (torch.randn(n, 64, device=cuda).bfloat16() for n in (16, 200_000))
    first = prequal.topk_products(q, rows, 100, None, "cosine")
    for _ in range(20):
        again = prequal.topk_products(q, rows, 100, None, "cosine")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 32, 64, 128])
def test_everything_passes_where_scores_ascend(cuda, k):
    """Sixteen warps add to a list without end, and sort it as they come."""
    rows = torch.arange(2**19, device=cuda, dtype=torch.float32).unsqueeze(1).repeat(1, 8)
    q = torch.ones(16, 8, device=cuda) * 2.0**-3
    scores, idx = prequal.topk_products(q, rows, k)
    want = torch.arange(2**19 - 1, 2**19 - 1 - k, -1, device=cuda)
    assert torch.equal(idx, want.expand(16, k))
    assert torch.equal(scores, want.float().expand(16, k))
