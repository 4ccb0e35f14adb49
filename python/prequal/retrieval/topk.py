"""The k rows of a corpus that are closest to each query: the public function, and by which road a call goes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prequal import constraints as c
from prequal.ops._rows import FLOATS, wide_of
from prequal.ops.topk_rows import is_metric
from prequal.registry import is_transformed

from .graph_node import packet
from .walk import merged, plain_formula, rescored, searched

MOST_RESULTS = 128  # k, and of rerank


def cosine_topk(
    queries: Tensor,
    corpus: Tensor,
    k: int,
    *,
    corpus_norms: Tensor | None = None,
    metric: str = "cosine",
    rerank: int = 0,
    process_group: Any = None,
    first_index: int | None = None,
    max_workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best rows of a corpus for each query, without all of the scores ever being in memory.

    Args:
        queries: [Q, D], float16, bfloat16, float32 or float64.
        corpus: [C, D], of queries' dtype.
        k: results a query, 1 to 128. More than C is right.
        corpus_norms: [C], float32 (float64 for float64): the norms of corpus, if they are known; they are believed,
            under torch.func's transforms too, and have no gradient. "dot" has no use for them. `CorpusIndex` keeps
            them.
        metric: "cosine"; "dot", the inner product; "l2", minus the squared distance: of each the largest is the best.
        rerank: 0 to 128: so many more than k are looked for, and the scores of all those computed again in float64 from
            the vectors and rounded once; the k best by these are returned.
        process_group: corpus is this rank's shard; queries, k and the rest are the same on every rank, and so are the
            results: each rank's candidates are gathered and merged.
        first_index: the index of the first row; None for 0, and of a shard for the rows of the ranks before it, which
            asks every rank, and waits for the device.
        max_workspace_bytes: memory for scores, of which one is always made. None: a few queries are answered in one
            pass, which stores no scores; of more, a twelfth of what all scores would take in the dtype of the vectors,
            64 MiB at least of fewer than 500,000 rows, 256 at most. And 16 MiB where rerank computes them again.

    Returns:
        scores: [Q, k], float32 (float64 for float64), in descending order.
        idx: [Q, k], int64, rows of the corpus. Equal scores stand in the order of the rows. Where there are fewer than
            k rows, -inf and -1 come last.

    A vector of zeros (or of a norm below the smallest normal number) has a cosine of 0 with everything. A cosine may
    pass 1 by a rounding. NaN counts as larger than infinity. Norms and products are sums in float32 that are not
    scaled: what is said below holds for vectors whose norms, and the products of two of them, are from 1e-19 to 1e19.

    Scores are inner products summed in float32 (by cuBLAS, as torch's settings have it: of float32 with TF32 where that
    is on), and a step or two more, each rounded. With u = 2^-23, which allows for sums that are cut off rather than
    rounded, an inner product is off by at most ``e = (D + 2) u |q| |c|``; a cosine by ``(D + 8) u``; "l2" by twice e
    and ``(D + 4) u (|q|^2 + |c|^2)`` of the norms, which is much beside a small distance. Of rows that differ by less
    the order is not promised, and may be another with another workspace. With rerank it is promised by the exact
    scores, of every row whose exact score is above that of the last candidate by two such bounds; the scores returned
    are then right to a rounding of float32.

    Where a gradient is needed, it is that of the scores of the k rows computed once more, in float32 from the vectors
    and without corpus_norms, which takes Q k D elements; the scores themselves, and the choice, are those without a
    gradient. Not with a process_group. Under torch.func's transforms all scores are in memory at once.

    Raises:
        TypeError: queries or corpus is no such tensor, corpus of another dtype, norms of another; k, rerank or
            max_workspace_bytes is no int; metric is no str; process_group is none.
        ValueError: shapes that do not fit; a number out of range; another metric; two devices; a gradient or a
            transform of torch.func beside a process_group.

    Source: Johnson, Douze and Jegou, Billion-scale similarity search with GPUs, 2017.
    """
    check_call(queries, corpus, k, corpus_norms, metric, rerank, first_index, max_workspace_bytes)
    check_group(process_group)
    return answer(
        queries, corpus, k, metric, corpus_norms, None, rerank, process_group, first_index, max_workspace_bytes
    )


def check_call(queries, corpus, k, norms, metric, rerank, first_index, workspace):
    for name, x in (("queries", queries), ("corpus", corpus)):
        c.is_tensor(name, x)
        if x.dtype not in (*FLOATS, torch.float64):
            raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {c.short(x.dtype)}")
    c.has_shape("queries", queries, ("Q", "D"))
    c.has_shape("corpus", corpus, ("C", queries.shape[1]))
    c.same_dtype("corpus", corpus, "queries", queries)
    c.in_range("k", k, 1, MOST_RESULTS)
    is_metric(metric)
    if norms is not None:
        c.is_tensor("corpus_norms", norms)
        if norms.dtype != wide_of(queries):
            wide = c.short(wide_of(queries))
            raise TypeError(f"corpus_norms: expected {wide} for {c.short(queries.dtype)}, got {c.short(norms.dtype)}")
        c.has_shape("corpus_norms", norms, (corpus.shape[0],))
    c.same_device(queries=queries, corpus=corpus, corpus_norms=norms)
    c.in_range("rerank", rerank, 0, MOST_RESULTS)
    if first_index is not None:
        c.in_range("first_index", first_index, 0, 2**62)
    if workspace is not None:
        c.in_range("max_workspace_bytes", workspace, 1, 2**62)


def check_group(group: Any) -> None:
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"process_group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")


def answer(queries, corpus, k, metric, norms, terms, rerank, group, first_index, workspace):
    """Of a right call. terms: [C], what the metric asks of each row of the corpus, where it is known."""
    compiling = torch.compiler.is_dynamo_compiling()
    asks = requires_grad if compiling else anywhere_requires_grad
    wanted = torch.is_grad_enabled() and (asks(queries) or asks(corpus))
    differentiated = not compiling and is_transformed((queries, corpus))
    transformed = differentiated or (not compiling and torch._C._functorch.peek_interpreter_stack() is not None)
    wanted = wanted or differentiated
    if group is not None and (wanted or transformed):
        raise ValueError("process_group: expected tensors without a gradient and no transform where a corpus is spread")
    if first_index is None:
        first_index = 0 if group is None else rows_before(corpus, group)
    if norms is not None and (norms.requires_grad or transformed):
        norms = norms.detach()
    # no_grad is a part of what a small call takes in Python: only where something would be recorded
    with torch.no_grad() if wanted else nullcontext():
        q, rows = (queries.detach(), corpus.detach()) if wanted else (queries, corpus)
        by = packet if compiling else plain_formula if transformed else searched
        scores, idx = by(q, rows, k, rerank, metric, norms, terms, first_index, workspace)
        if group is not None:
            scores, idx = of_all_ranks(scores, idx, k, group)
    if wanted:
        local = torch.where(idx < 0, -1, idx - first_index)
        scores = with_gradient_of(rescored(queries, corpus, local, metric, wide_of(queries)), scores)
    return scores, idx


def with_gradient_of(again: Tensor, scores: Tensor) -> Tensor:
    """The scores as they are, in their order, with the gradient of others; what is not finite has none."""
    return scores + torch.where(again.isfinite(), again - again.detach(), 0.0)


def requires_grad(x: Tensor) -> bool:
    return x.requires_grad


def anywhere_requires_grad(x: Tensor) -> bool:
    """Also outside of the transforms of torch.func that it is in."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def rows_before(corpus: Tensor, group: Any) -> int:
    """How many rows the ranks before this one have."""
    own = torch.tensor([corpus.shape[0]], dtype=torch.int64, device=corpus.device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group=group)
    return int(torch.cat(sizes)[: dist.get_rank(group)].sum())


def of_all_ranks(scores: Tensor, idx: Tensor, k: int, group: Any) -> tuple[Tensor, Tensor]:
    """[Q, k] of each rank to [Q, k] of all: two gathers of k candidates a query and rank."""
    ranks = dist.get_world_size(group)

    def of_all(x: Tensor) -> Tensor:
        every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(every, x.contiguous(), group=group)
        return torch.cat(every, 1)

    return merged(of_all(scores), of_all(idx), k)
