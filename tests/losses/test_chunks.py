"""How many rows of logits are in memory at once."""

from __future__ import annotations

import itertools

from prequal.losses.chunks import LEAN_WORKSPACE_BYTES, chunk_rows, chunks, default_workspace, row_elements


def test_chunks_fit_the_workspace_and_are_as_few_as_it_allows():
    for tokens, classes, itemsize, budget in itertools.product(
        (0, 1, 127, 128, 129, 8192, 10_007), (1, 7, 32_000, 131_072, 262_147), (2, 4, 8), (1, 2**20, 2**28, 2**40)
    ):
        rows = chunk_rows(tokens, classes, itemsize, budget)
        row = row_elements(classes, itemsize) * itemsize
        assert row % 16 == 0
        assert classes * itemsize <= row < classes * itemsize + 16
        assert rows * row <= budget or rows <= 1
        found = chunks(tokens, rows)
        assert [i for begin, end in found for i in range(begin, end)] == list(range(tokens))
        assert len(found) == -(-tokens // max(1, budget // row)), "no more chunks than the workspace asks for"
        sizes = [end - begin for begin, end in found]
        alike = -(-tokens // max(1, len(found)))
        assert rows == alike or (rows % 16 == 0 and rows < alike + 128), "of like size, but for whole tiles"
        assert all(size == rows for size in sizes[1:])
        assert all(0 < size <= rows for size in sizes[:1])


def test_the_logits_of_the_bar_have_eight_chunks_in_less_than_300_megabytes():
    rows = chunk_rows(8192, 131_072, 2, LEAN_WORKSPACE_BYTES)
    assert rows == 1024
    assert len(chunks(8192, rows)) == 8
    assert rows * 131_072 * 2 < 299e6


def test_four_mebibytes_hold_a_32nd_of_the_logits_of_512_tokens():
    rows = chunk_rows(512, 128_256, 2, 4 * 2**20)
    assert rows == 16
    assert 31 * rows * row_elements(128_256, 2) <= 512 * 128_256


def test_the_default_workspace_is_the_weights_gradient_within_bounds():
    assert default_workspace(131_072, 4096, 2, True, False) == 2**29
    assert default_workspace(131_072, 4096, 2, True, True) == 2**30
    assert default_workspace(131_072, 4096, 2, False, False) == LEAN_WORKSPACE_BYTES
    assert default_workspace(128_256, 1536, 2, True, False) == 128_256 * 1536 * 2
    assert default_workspace(262_144, 16_384, 2, True, True) == 2**30
    assert default_workspace(50_257, 768, 2, True, True) == LEAN_WORKSPACE_BYTES
    assert chunk_rows(8192, 131_072, 2, default_workspace(131_072, 4096, 2, True, False)) == 2048
