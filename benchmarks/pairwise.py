"""pairwise_distance beside torch.cdist in both its modes: device time, the error on offset data, and memory.

Device time is that of CUDA events around one call, the L2 flushed before; candidates take turns. The error is the
largest distance from float64, of the first rows, of sets with an offset of both.

usage: python benchmarks/pairwise.py [--quick] [--offset 100] [--runs 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.device import Cuda
from prequal.bench.program import in_turns

ROUNDS = 5
ROWS = 256  # that are compared with float64
DIRECT, BY_PRODUCTS = "donot_use_mm_for_euclid_dist", "use_mm_for_euclid_dist"
# rows of a, rows of b, coordinates
SHAPES = (
    *((4096, 4096, 3), (4096, 4096, 16), (4096, 4096, 64), (4096, 4096, 128), (4096, 4096, 255), (4096, 4096, 256)),
    *((4096, 4096, 512), (4096, 4096, 1024), (16_384, 16_384, 3), (16_384, 16_384, 256), (1000, 1000, 256)),
    *((64, 1_000_000, 64), (64, 1_000_000, 256)),
)
QUICK = ((4096, 4096, 3), (4096, 4096, 64), (4096, 4096, 256))


def compare(shape: tuple[int, int, int], offset: float, runs: int, device: Cuda) -> dict[str, Any]:
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
        found[name] = {"largest_error": error}
    for name, row in in_turns(device, candidates, ROUNDS, math.ceil(runs / ROUNDS), walls=False).items():
        found[name] |= {"bytes": row["peak_bytes"], "us": row["device_us"]["median"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--offset", type=float, default=100.0)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json")
    given = parser.parse_args()
    device = Cuda()
    lines = []
    for shape in QUICK if given.quick else SHAPES:
        line = compare(shape, given.offset, given.runs, device)
        lines.append(line)
        print(json.dumps(line), flush=True)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"offset": given.offset, "stats": prequal.stats(), "cases": lines}, file)


if __name__ == "__main__":
    main()
