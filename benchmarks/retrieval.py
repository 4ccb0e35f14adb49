"""cosine_topk and CorpusIndex beside torch's matrix product and topk: device time, and memory beyond inputs.

Device time is that of CUDA events around one call, the L2 flushed before; candidates take turns. Scores of torch are in
the dtype of the vectors, ours in float32. Where they do not fit the memory, it says so.

usage: python benchmarks/retrieval.py [--quick] [--dtype bfloat16] [--metric cosine] [--runs 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.device import Cuda
from prequal.bench.program import in_turns

Search = Callable[[Tensor, int], tuple[Tensor, Tensor]]
ROUNDS = 5
QUERIES, CORPUS, WIDTHS, RESULTS = (1, 16, 128, 1024), (1000, 100_000, 1_000_000), (64, 256, 1024), (1, 10, 128)
QUICK = ((1, 1_000_000, 256, 10), (1024, 1000, 64, 1), (1024, 1_000_000, 256, 10), (16, 500_000, 1024, 128))


def by_torch(metric: str, corpus: Tensor) -> Search:
    """What is of the corpus alone is computed before, and not timed: our index has it too."""
    rows = F.normalize(corpus) if metric == "cosine" else corpus
    squares = corpus.square().sum(1)

    def search(queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if metric == "dot":
            return (queries @ rows.t()).topk(k)
        if metric == "cosine":
            return (F.normalize(queries) @ rows.t()).topk(k)
        scores, idx = torch.addmm(squares, queries, rows.t(), beta=-1, alpha=2).topk(k)
        return scores - queries.square().sum(1, keepdim=True), idx

    return search


def recall(idx: Tensor, want: Tensor) -> float:
    """The share of the rows wanted that were found."""
    return (idx.unsqueeze(2) == want.unsqueeze(1)).any(2).float().mean().item()


def compare(
    shape: tuple[int, int, int, int], dtype: torch.dtype, metric: str, runs: int, device: Cuda
) -> dict[str, Any]:
    queries, rows, width, k = shape
    generator = torch.Generator("cuda").manual_seed(rows + width)
    q = torch.randn(queries, width, device="cuda", generator=generator).to(dtype)
    corpus = torch.randn(rows, width, device="cuda", generator=generator).to(dtype)
    index = prequal.CorpusIndex(corpus, metric=metric)
    candidates: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "prequal": partial(prequal.cosine_topk, q, corpus, k, metric=metric),
        "prequal, index": partial(index.topk, q, k),
        "prequal, index, rerank 32": partial(index.topk, q, k, rerank=32),
        "torch": partial(by_torch(metric, corpus), q, k),
    }
    exact = index.topk(q, k, rerank=128)[1]
    found: dict[str, Any] = {"queries": queries, "corpus": rows, "width": width, "k": k}
    for name, search in list(candidates.items()):
        try:
            found[name] = {"recall": recall(search()[1], exact)}
        except torch.OutOfMemoryError:
            found[name] = "out of memory"
            del candidates[name]
    for name, row in in_turns(device, candidates, ROUNDS, math.ceil(runs / ROUNDS), walls=False).items():
        found[name] |= {"bytes": row["peak_bytes"], "us": row["device_us"]["median"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--metric", default="cosine", choices=["cosine", "dot", "l2"])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json")
    given = parser.parse_args()
    device = Cuda()
    shapes = QUICK if given.quick else itertools.product(QUERIES, CORPUS, WIDTHS, RESULTS)
    lines = []
    for shape in shapes:
        line = compare(shape, getattr(torch, given.dtype), given.metric, given.runs, device)
        lines.append(line)
        print(json.dumps(line), flush=True)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"dtype": given.dtype, "metric": given.metric, "stats": prequal.stats(), "cases": lines}, file)


if __name__ == "__main__":
    main()
