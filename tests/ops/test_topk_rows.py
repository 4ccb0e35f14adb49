"""topk_rows_ against NumPy's sort, tile after tile, at ties, infinities and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal
from best_rows import by_numpy
from prequal.ops.topk_rows import METRICS, nothing_yet

INF, NAN = float("inf"), float("nan")


def walked(products, k, width, metric="dot", rows=None, columns=None):
    best, idx = nothing_yet(len(products), k, torch.float32, products.device)
    for begin in range(0, products.shape[1], width):
        tile = products[:, begin : begin + width]
        part = None if columns is None else columns[begin : begin + width]
        prequal.topk_rows_(best, idx, tile, rows, part, metric, first_index=begin)
    return best, idx


def is_right(found, want):
    best, idx = (x.cpu().numpy() for x in found)
    np.testing.assert_array_equal(idx, want[1])
    np.testing.assert_array_equal(best, want[0])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("columns", "k", "width"),
    [
        (1, 1, 1),
        (1000, 10, 1000),
        (1000, 10, 129),
        (5000, 128, 1024),
        (5, 9, 2),
        (40_000, 100, 40_000),
        (777, 256, 256),
    ],
)
def test_tiles_add_up_to_a_sort_of_all(device, columns, k, width, metric):
    generator = torch.Generator().manual_seed(columns)
    products, norms = (torch.randn(3, columns, generator=generator) for _ in range(2))
    rows, terms = norms[:, 0].abs(), norms[0].abs()
    z, r, t = products.numpy(), rows.numpy()[:, None], terms.numpy()
    want = {"dot": z, "cosine": z * t * r, "l2": np.minimum(2 * z - t - r, 0)}[metric]
    given = (None, None) if metric == "dot" else (rows.to(device), terms.to(device))
    is_right(walked(products.to(device), k, width, metric, *given), by_numpy(want, k))
    if device.type == "cuda":
        assert prequal.stats()["topk_rows_"][str(device)]["reference"] == {}


@pytest.mark.parametrize("values", [1, 2, 50])
def test_ties_go_to_the_lowest_index_across_tiles(device, values):
    steps = torch.randint(0, values, (4, 30_000), generator=torch.Generator().manual_seed(values))
    scores = steps.float()
    for width in (30_000, 4096, 501):
        is_right(walked(scores.to(device), 100, width), by_numpy(scores.numpy(), 100))


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_the_order_of_columns_does_not_matter(device, order):
    """Ascending, everything passes the filter; descending, nothing after the first."""
    scores = torch.arange(50_000, dtype=torch.float32).repeat(2, 1)
    scores = scores if order == "ascending" else scores.flip(1)
    is_right(walked(scores.to(device), 128, 20_000), by_numpy(scores.numpy(), 128))


def test_an_infinite_score_comes_before_an_empty_place_and_nan_before_all(device):
    products = torch.tensor([[-INF, NAN, INF, -INF, 0.0]], device=device)
    best, idx = walked(products, 7, 2)
    assert idx.tolist() == [[1, 2, 4, 0, 3, -1, -1]]
    assert best[0].isnan().tolist() == [True, *[False] * 6]
    assert best[0, 1:].tolist() == [INF, 0.0, *[-INF] * 4]


def test_zeros_of_both_signs_are_equal(device):
    products = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=device)
    assert walked(products, 4, 3)[1].tolist() == [[0, 1, 2, 3]]


def test_indices_pass_32_bits(device):
    best, idx = nothing_yet(1, 2, torch.float32, device)
    prequal.topk_rows_(best, idx, torch.tensor([[1.0, 3.0, 2.0]], device=device), first_index=2**40)
    assert idx.tolist() == [[2**40 + 1, 2**40 + 2]]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 600])
def test_segments_of_a_row_are_the_row(cuda, rows):
    """Few rows are cut into segments, many are not; both are the sort."""
    generator = torch.Generator(cuda).manual_seed(rows)
    products = torch.randn(rows, 300_001, device=cuda, generator=generator)
    best, idx = walked(products, 50, 150_000)
    want = products.sort(dim=1, descending=True, stable=True)
    assert torch.equal(idx, want.indices[:, :50])
    assert torch.equal(best, want.values[:, :50])
