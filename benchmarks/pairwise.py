"""pairwise_distance beside torch.cdist in both its modes: device time, the error on offset data, and memory.

Device time is that of CUDA events around one call, the L2 flushed before; candidates take turns in an order drawn anew
for every round. The error is the largest distance from float64, of the first rows, of sets with an offset of both.

usage: python benchmarks/pairwise.py [--quick] [--offset 100] [--runs 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import prequal

FLUSH_BYTES = 256 * 2**20
WARM_UPS = 5
ROWS = 256  # that are compared with float64
DIRECT, BY_PRODUCTS = "donot_use_mm_for_euclid_dist", "use_mm_for_euclid_dist"
# rows of a, rows of b, coordinates
SHAPES = (
    *((4096, 4096, 3), (4096, 4096, 16), (4096, 4096, 64), (4096, 4096, 128), (4096, 4096, 255), (4096, 4096, 256)),
    *((4096, 4096, 512), (4096, 4096, 1024), (16_384, 16_384, 3), (16_384, 16_384, 256), (1000, 1000, 256)),
    *((64, 1_000_000, 64), (64, 1_000_000, 256)),
)
QUICK = ((4096, 4096, 3), (4096, 4096, 64), (4096, 4096, 256))


def measure(call: Callable[[], Any], flush: Tensor) -> float:
    """One call, in microseconds."""
    flush.zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def memory(call: Callable[[], Any]) -> int:
    """The peak beyond what is there before, in bytes, outputs included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(shape: tuple[int, int, int], offset: float, runs: int, flush: Tensor) -> dict[str, Any]:
    n, m, width = shape
    generator = torch.Generator("cuda").manual_seed(n + m + width)
    a, b = (torch.randn(rows, width, device="cuda", generator=generator) + offset for rows in (n, m))
    exact = torch.cdist(a[:ROWS].double(), b.double(), compute_mode=DIRECT)
    candidates: dict[str, Callable[[], Tensor]] = {
        "prequal": partial(prequal.pairwise_distance, a, b),
        "prequal, from differences": partial(prequal.pairwise_direct, a, b),
        "torch.cdist, from differences": partial(torch.cdist, a, b, compute_mode=DIRECT),
        "torch.cdist, by products": partial(torch.cdist, a, b, compute_mode=BY_PRODUCTS),
    }
    found: dict[str, Any] = {"a": n, "b": m, "width": width, "offset": offset}
    for name, call in candidates.items():
        error = (call()[:ROWS].double() - exact).abs().amax().item()
        found[name] = {"bytes": memory(call), "largest_error": error, "us": []}
    for round_ in range(WARM_UPS + runs):
        order = list(candidates)
        random.Random(round_).shuffle(order)
        for name in order:
            taken = measure(candidates[name], flush)
            if round_ >= WARM_UPS:
                found[name]["us"].append(taken)
    for name in candidates:
        found[name]["us"] = round(statistics.median(found[name]["us"]), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--offset", type=float, default=100.0)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json")
    given = parser.parse_args()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    lines = []
    for shape in QUICK if given.quick else SHAPES:
        line = compare(shape, given.offset, given.runs, flush)
        lines.append(line)
        print(json.dumps(line), flush=True)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"offset": given.offset, "stats": prequal.stats(), "cases": lines}, file)


if __name__ == "__main__":
    main()
