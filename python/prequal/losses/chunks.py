"""How many rows of logits are in memory at once: pure functions."""

from __future__ import annotations

# Logits and their gradient lie in one buffer, of less than 300 MB. 8,192 rows of 131,072 classes in a half are eight
# chunks of 1,024 then: of 1,136, the most that fit, there would be as many, one of 240 and none of whole tiles.
LEAN_WORKSPACE_BYTES = 284 * 2**20
# Each chunk reads and writes the weight's gradient once. With 512 MiB a step of those sizes was as fast as with 1 GiB
# (41.3 and 41.4 ms, 40.8 and 42.0, in two runs). Sums in float32 take twice the traffic, and the memory for 1 GiB is
# needed anyway when the gradient is rounded at the end.
MOST_WORKSPACE_BYTES, MOST_BESIDE_WIDE_SUMS = 2**29, 2**30


def default_workspace(classes: int, width: int, itemsize: int, adds_weight_grad: bool, wide_sums: bool) -> int:
    """As much as the weight's gradient [classes, width] takes, where one is added up: chunks of `width` rows. At least
    the lean workspace, at most 512 MiB, or 1 GiB where the sums are wider than the weight."""
    wanted = classes * width * itemsize if adds_weight_grad else 0
    return max(LEAN_WORKSPACE_BYTES, min(MOST_BESIDE_WIDE_SUMS if wide_sums else MOST_WORKSPACE_BYTES, wanted))


def row_elements(classes: int, itemsize: int) -> int:
    """Elements from one row of logits to the next: every row begins at a multiple of 16 bytes."""
    step = 16 // itemsize
    return -(-classes // step) * step


def chunk_rows(tokens: int, classes: int, itemsize: int, max_workspace_bytes: int) -> int:
    """Rows of logits in the largest chunk: as few chunks as the workspace allows, at least a row each, of like size;
    of whole tiles of 128 rows, or of 16, where that still fits.

    Pure: of these four numbers alone.
    """
    most = max(1, max_workspace_bytes // max(1, row_elements(classes, itemsize) * itemsize))
    if tokens <= most:
        return tokens
    alike = -(-tokens // -(-tokens // most))
    for tile in (128, 16):
        rows = -(-alike // tile) * tile
        if rows <= most:
            return rows
    return alike


def chunks(tokens: int, rows: int) -> list[tuple[int, int]]:
    """(begin, end) of each, `rows` long. What is left over comes first: the gradient of the weight is rounded at every
    chunk, by as much as has been added up, and so by less."""
    if tokens == 0:
        return []
    first = (tokens - 1) % rows + 1
    return [(0, first), *((begin, begin + rows) for begin in range(first, tokens, rows))]
