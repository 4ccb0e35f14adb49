"""cosine_topk and CorpusIndex beside torch's matrix product and topk: device time, and memory beyond inputs.

Device time is that of CUDA events around one call, the L2 flushed before; candidates take turns in an order drawn anew
for every round. Scores of torch are in the dtype of the vectors, ours in float32. Where they do not fit the memory, it
says so.

usage: python benchmarks/retrieval.py [--quick] [--dtype bfloat16] [--metric cosine] [--runs 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal

Search = Callable[[Tensor, int], tuple[Tensor, Tensor]]
FLUSH_BYTES = 256 * 2**20
WARM_UPS = 5
QUERIES, CORPUS, WIDTHS, RESULTS = (1, 16, 256, 1024), (1000, 32_000, 500_000, 1_000_000), (64, 256, 1024), (1, 10, 128)
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


def measure(search: Callable[[], Any], flush: Tensor) -> float:
    """One call, in microseconds."""
    flush.zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    search()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def memory(search: Callable[[], Any]) -> int:
    """The peak beyond what is there before, in bytes, outputs included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    search()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(
    shape: tuple[int, int, int, int], dtype: torch.dtype, metric: str, runs: int, flush: Tensor
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
            found[name] = {"bytes": memory(search), "recall": recall(search()[1], exact), "us": []}
        except torch.OutOfMemoryError:
            found[name] = "out of memory"
            del candidates[name]
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
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--metric", default="cosine", choices=["cosine", "dot", "l2"])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json")
    given = parser.parse_args()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    shapes = QUICK if given.quick else itertools.product(QUERIES, CORPUS, WIDTHS, RESULTS)
    lines = []
    for shape in shapes:
        line = compare(shape, getattr(torch, given.dtype), given.metric, given.runs, flush)
        lines.append(line)
        print(json.dumps(line), flush=True)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"dtype": given.dtype, "metric": given.metric, "stats": prequal.stats(), "cases": lines}, file)


if __name__ == "__main__":
    main()
