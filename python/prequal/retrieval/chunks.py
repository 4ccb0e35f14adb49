"""How many queries and how many rows of the corpus a tile of scores has: pure functions."""

from __future__ import annotations

from functools import lru_cache

from prequal.ops.topk_products import MOST_KEPT, MOST_QUERY_BYTES, MOST_ROWS

# Measured on an H200, products of 1,024 queries and a million rows in bfloat16, written in float32, by the size of a
# tile: microseconds in all, calls from Python one after the other (a call takes 17 to 19 us at least).
#
#            16 MiB     32     64    128    256
# D    64     4,588  3,035  1,793  1,445  1,332
#     256     6,900  2,303  2,270  1,746  1,550
#   1,024     4,858  4,267  3,823  3,565  3,585
LEAST_WORKSPACE_BYTES, MOST_WORKSPACE_BYTES = 2**26, 2**28
LARGE_CORPUS = 500_000  # rows from which on memory counts for more: a tenth of what torch takes
# More queries than this a tile make its rows of the corpus few, and each tile is a launch.
MOST_QUERIES = 1024
STEP = 128  # rows of the corpus: a matrix product's own tile

# topk_products reads the corpus once for as many queries as lie in its shared memory (MOST_TOGETHER of halves, fewer of
# long vectors), and is one call from Python, where a product in tiles is three and more: of 1,000 rows, 16 queries took
# 42 us as a whole call in one pass, 95 in a tile, torch 79 (H200, bfloat16). Device time in microseconds, one call from
# a cold cache:
#
#   queries x rows x columns, k       one pass    tiles   torch's product and topk
#         16 x   100,000 x    64,  10       38      113     179
#         16 x   100,000 x 1,024, 128      130      132     166
#         65 x   100,000 x    64,   1      111      116     167
#        128 x   100,000 x 1,024, 128      645      174     253
#        128 x 1,000,000 x   256,  10      609        -   1,229
#        128 x 1,000,000 x 1,024,  10    1,527        -   1,604
#        128 x 1,000,000 x 1,024, 128    2,566        -   1,634
#
# A large corpus is many tiles, of two launches each: it is read twice where rows are short or queries few.
MOST_TOGETHER, SHARED_BYTES, SMALL_CORPUS = 64, 225_000, 16_368
MOST_IN_TWO_PASSES, MOST_LONG_ROWS_IN_TWO_PASSES, SHORT_ROW_BYTES = 128, 64, 512


def queries_in_a_pass(width: int, corpus: int, k: int, itemsize: int) -> int:
    """How many queries `topk_products` takes at a time, where a multiprocessor has the shared memory of sm_90."""
    queries = MOST_TOGETHER if itemsize == 2 else MOST_TOGETHER // 4  # floats are multiplied without tensor cores
    slots = 128 if k <= 64 and corpus > SMALL_CORPUS else 256  # of 8 bytes, in a query's list
    of_one = width * itemsize + slots * 8
    while queries > 8 and queries * of_one > SHARED_BYTES:
        queries //= 2
    return queries


@lru_cache(maxsize=256)
def in_one_pass(queries: int, width: int, corpus: int, k: int, itemsize: int) -> bool:
    """Whether `topk_products` searches, and not a matrix product with `topk_rows_` behind it: for few queries, where
    reading the corpus takes longer than multiplying, and where its kernel takes the call.

    Pure: of these five numbers alone.
    """
    if itemsize > 4 or k > MOST_KEPT or corpus > MOST_ROWS or width * itemsize > MOST_QUERY_BYTES:
        return False
    together = queries_in_a_pass(width, corpus, k, itemsize)
    if queries <= together:
        return True
    most = MOST_IN_TWO_PASSES if width * itemsize <= SHORT_ROW_BYTES else MOST_LONG_ROWS_IN_TWO_PASSES
    return corpus >= LARGE_CORPUS and queries <= min(2 * together, most)


@lru_cache(maxsize=256)
def default_workspace(queries: int, corpus: int, itemsize: int) -> int:
    """A twelfth of all scores in the dtype of the vectors, which torch's product makes: a tenth, with room for results;
    of a large corpus less the 4 bytes a row that norms may take, of another 64 MiB at least. 256 at most.

    Pure: of these three numbers alone.
    """
    twelfth = queries * corpus * itemsize // 12
    least = LEAST_WORKSPACE_BYTES if corpus < LARGE_CORPUS else 2**20
    return max(least, min(MOST_WORKSPACE_BYTES, twelfth - (0 if corpus < LARGE_CORPUS else 4 * corpus)))


@lru_cache(maxsize=256)
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
