"""Tiles of scores: pure functions of four numbers."""

from __future__ import annotations

import itertools

import pytest

from prequal.retrieval.chunks import (
    LEAST_WORKSPACE_BYTES,
    MOST_QUERIES,
    MOST_WORKSPACE_BYTES,
    STEP,
    default_workspace,
    parts,
    tile_sizes,
)

SIZES = (0, 1, 2, 127, 128, 1023, 1025, 1_000_003, 100_000_000)


@pytest.mark.parametrize("budget", [1, 4, 100, 4096, 2**20, LEAST_WORKSPACE_BYTES, 2**40])
def test_a_tile_fits_its_workspace_or_is_one_score(budget):
    for queries, corpus, itemsize in itertools.product(SIZES, SIZES, (4, 8)):
        rows, columns = tile_sizes(queries, corpus, itemsize, budget)
        assert rows >= 1
        assert columns >= 1
        assert rows * columns * itemsize <= budget or rows == columns == 1
        assert rows <= MOST_QUERIES
        assert columns == max(1, corpus) or columns % STEP == 0 or columns < STEP


def test_the_workspace_is_used():
    """Of a large corpus, all but a step of it."""
    for queries in (1, 3, 64, 1024, 5000):
        rows, columns = tile_sizes(queries, 100_000_000, 4, LEAST_WORKSPACE_BYTES)
        assert rows * (columns + STEP) * 4 > LEAST_WORKSPACE_BYTES


def test_the_default_is_less_than_a_tenth_of_all_scores_where_these_are_large():
    for queries, corpus, itemsize in itertools.product(SIZES, SIZES, (2, 4, 8)):
        found = default_workspace(queries, corpus, itemsize)
        assert LEAST_WORKSPACE_BYTES <= found <= MOST_WORKSPACE_BYTES
        assert found == LEAST_WORKSPACE_BYTES or 10 * found < queries * corpus * itemsize
    assert len(parts(1_000_000, tile_sizes(1024, 1_000_000, 4, default_workspace(1024, 1_000_000, 2))[1])) == 25


@pytest.mark.parametrize(("total", "size"), [(0, 3), (1, 3), (3, 3), (4, 3), (1000, 7)])
def test_parts_are_all_in_order(total, size):
    found = parts(total, size)
    assert [i for begin, end in found for i in range(begin, end)] == list(range(total))
