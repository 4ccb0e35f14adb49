"""How many queries and how many rows of the corpus a tile of scores has: pure functions."""

from __future__ import annotations

from prequal.ops.topk_products import MOST_KEPT, MOST_QUERY_BYTES, MOST_ROWS

# The tile is written by the matrix product and read once by topk_rows_: at its least it is below the size of the L2
# cache (H200: 60 MB, A100: 40), with room for the rows of the corpus that the product reads, so that it need not go to
# memory. But a tile took 66 us, the kernel 13 of them: 1,024 queries in a million rows, 245 tiles of 16 MiB, 16.2 ms,
# and torch 8.4. Not tuned.
LEAST_WORKSPACE_BYTES, MOST_WORKSPACE_BYTES = 2**24, 2**28
# More queries than this a tile make its rows of the corpus few, and each tile is a launch.
MOST_QUERIES = 1024
STEP = 128  # rows of the corpus: a matrix product's own tile

MOST_IN_ONE_PASS = 64  # queries


def in_one_pass(queries: int, width: int, corpus: int, k: int, itemsize: int) -> bool:
    """Whether `topk_products` searches, and not a matrix product with `topk_rows_` behind it: for few queries, where
    reading the corpus takes longer than multiplying, and where its kernel takes the call.

    Pure: of these five numbers alone.
    """
    if itemsize > 4 or k > MOST_KEPT or corpus > MOST_ROWS or width * itemsize > MOST_QUERY_BYTES:
        return False
    return queries <= MOST_IN_ONE_PASS


def default_workspace(queries: int, corpus: int, itemsize: int) -> int:
    """A twelfth of all scores in the dtype of the vectors, which torch's product makes: a tenth, with room for results.
    16 MiB at least, 256 at most.

    Pure: of these three numbers alone.
    """
    return max(LEAST_WORKSPACE_BYTES, min(MOST_WORKSPACE_BYTES, queries * corpus * itemsize // 12))


def tile_sizes(queries: int, corpus: int, itemsize: int, max_workspace_bytes: int) -> tuple[int, int]:
    """(queries, rows of the corpus) of the largest tile of scores of `itemsize` bytes: as many rows as fit the
    workspace beside at most 1,024 queries, in whole steps of 128 where those fit; at least one of each.

    Pure: of these four numbers alone.
    """
    scores = max(1, max_workspace_bytes // itemsize)
    rows = max(1, min(queries, MOST_QUERIES, max(1, scores // STEP)))
    most = max(1, scores // rows)
    if corpus <= most:
        return rows, max(1, corpus)
    return rows, most // STEP * STEP if most >= STEP else most


def parts(total: int, size: int) -> list[tuple[int, int]]:
    """(begin, end) of each, `size` long but for the last."""
    return [(begin, min(begin + size, total)) for begin in range(0, total, size)]
