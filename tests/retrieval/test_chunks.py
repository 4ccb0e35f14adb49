"""Tiles of scores: pure functions of four numbers."""

from __future__ import annotations

import itertools

import pytest

from prequal.retrieval.chunks import (
    LARGE_CORPUS,
    LEAST_WORKSPACE_BYTES,
    MOST_QUERIES,
    MOST_WORKSPACE_BYTES,
    STEP,
    default_workspace,
    in_one_pass,
    parts,
    queries_in_a_pass,
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


def test_the_default_and_norms_are_less_than_a_tenth_of_all_scores_of_a_large_corpus():
    for queries, corpus, itemsize in itertools.product((*SIZES, 300, 1024), (*SIZES, LARGE_CORPUS), (2, 4, 8)):
        found = default_workspace(queries, corpus, itemsize)
        assert found <= MOST_WORKSPACE_BYTES
        if corpus < LARGE_CORPUS:
            assert found >= LEAST_WORKSPACE_BYTES
        else:
            assert found == 2**20 or 10 * (found + 4 * corpus) < queries * corpus * itemsize
    assert len(parts(1_000_000, tile_sizes(1024, 1_000_000, 4, default_workspace(1024, 1_000_000, 2))[1])) == 25


def test_one_pass_is_for_what_its_kernel_takes():
    assert in_one_pass(1, 256, 1_000_000, 10, 2)
    assert in_one_pass(16, 1024, 1000, 128, 4)
    assert not in_one_pass(1, 256, 1_000_000, 129, 2)
    assert not in_one_pass(1, 3073, 1_000_000, 10, 2)
    assert not in_one_pass(1, 256, 2**30 + 1, 10, 2)
    assert not in_one_pass(1, 256, 1_000_000, 10, 8)
    assert not in_one_pass(100_000, 1024, 1_000_000, 10, 2)


def test_one_pass_is_for_queries_that_lie_together_and_a_large_corpus_is_read_twice_for_some_more():
    sizes = itertools.product((0, 1, 64, 256, 1024, 1536), (1, 1000, 100_000, LARGE_CORPUS), (1, 64, 65, 128), (2, 4))
    for width, corpus, k, itemsize in sizes:
        together = queries_in_a_pass(width, corpus, k, itemsize)
        assert together in (8, 16, 32, 64)
        twice = min(2 * together, 128 if width * itemsize <= 512 else 64) if corpus == LARGE_CORPUS else 0
        assert in_one_pass(max(together, twice), width, corpus, k, itemsize)
        assert not in_one_pass(max(together, twice) + 1, width, corpus, k, itemsize)
    assert queries_in_a_pass(1024, 100_000, 10, 2) == 64
    assert queries_in_a_pass(1024, 100_000, 128, 2) == 32
    assert queries_in_a_pass(1024, 1000, 10, 2) == 32
    assert queries_in_a_pass(64, 100_000, 10, 4) == 16
