"""The search: in one pass, or tile by tile a matrix product and a merge; then what is computed again for a few."""

from __future__ import annotations

import torch
from torch import Tensor

from prequal.ops import row_norms, topk_products, topk_rows_
from prequal.ops._rows import wide_of
from prequal.ops.row_norms import inverse_of
from prequal.ops.topk_rows import best_of, nothing_yet, scores_of
from prequal.registry import out_of_autocast, without_autocast

from .chunks import default_workspace, in_one_pass, parts, tile_sizes

RERANK_WORKSPACE_BYTES = 2**24  # unless the caller says what it may be


def terms_of(norms: Tensor, metric: str) -> Tensor | None:
    """What `topk_rows_` asks of each row or column, from its norms."""
    if metric == "dot":
        return None
    return inverse_of(norms) if metric == "cosine" else norms.square()


def terms_of_rows(x: Tensor, metric: str) -> Tensor | None:
    """The same from the vectors [n, D]."""
    return None if metric == "dot" else row_norms(x, "inverse" if metric == "cosine" else "square")


TORCH_WIDENS = "dtype_out" in torch.ops.aten.mm.overloads()


def widens(x: Tensor) -> bool:
    """Whether torch multiplies halves and writes the sums as they are, in float32."""
    return TORCH_WIDENS and x.is_cuda and x.element_size() == 2


def inner_products(queries: Tensor, transposed: Tensor, out: Tensor) -> Tensor:
    """out [q, n] = queries [q, D] @ transposed [D, n], in out's dtype without a rounding in between."""
    if queries.shape[1] == 0:
        return out.zero_()
    if queries.dtype == out.dtype:
        return torch.mm(queries, transposed, out=out)
    if widens(queries):
        return torch.mm(queries, transposed, out_dtype=out.dtype, out=out)
    return torch.mm(queries.to(out.dtype), transposed.to(out.dtype), out=out)  # the tile of the corpus is copied


def all_products(queries: Tensor, corpus: Tensor, wide: torch.dtype) -> Tensor:
    """[Q, C], of one tile: without a buffer to be cut (a microsecond or two) where rows begin at 16 bytes anyway."""
    count = corpus.shape[0]
    step = 16 // wide.itemsize
    if count % step == 0 and queries.shape[1] > 0:
        if queries.dtype == wide:
            return torch.mm(queries, corpus.t())
        if widens(queries):
            return torch.mm(queries, corpus.t(), out_dtype=wide)
    products = queries.new_empty((queries.shape[0], -(-count // step) * step), dtype=wide)[:, :count]
    return inner_products(queries, corpus.t(), products)


def search(
    queries: Tensor,
    corpus: Tensor,
    k: int,
    metric: str,
    norms: Tensor | None,
    terms: Tensor | None,
    first_index: int,
    max_workspace_bytes: int | None,
) -> tuple[Tensor, Tensor]:
    """(scores, idx), both [Q, k]: of queries [Q, D] and corpus [C, D].

    norms and terms: [C], what is known of the corpus; terms are those of the metric, and norms are not looked at then.
    max_workspace_bytes: None where the search may choose its way.
    """
    wide = wide_of(queries)
    if terms is None and norms is not None:
        terms = terms_of(norms, metric)
    if max_workspace_bytes is None:
        lie_together = queries.stride(1) == 1 and corpus.stride(1) == 1
        if lie_together and in_one_pass(queries.shape[0], queries.shape[1], corpus.shape[0], k, queries.element_size()):
            return topk_products(queries, corpus, k, terms, metric, first_index=first_index)
        max_workspace_bytes = default_workspace(queries.shape[0], corpus.shape[0], queries.element_size())
    if not corpus.shape[0]:
        return nothing_yet(queries.shape[0], k, wide, queries.device)
    best = queries.new_empty((queries.shape[0], k), dtype=wide)
    idx = queries.new_empty((queries.shape[0], k), dtype=torch.int64)
    if terms is None:
        terms = terms_of_rows(corpus, metric)
    row_terms = terms_of_rows(queries, metric)
    rows, columns = tile_sizes(queries.shape[0], corpus.shape[0], wide.itemsize, max_workspace_bytes)
    if rows >= queries.shape[0] and columns >= corpus.shape[0]:
        with without_autocast(queries.device):
            products = all_products(queries, corpus, wide)
            topk_rows_(best, idx, products, row_terms, terms, metric, first_index=first_index, fresh=True)
        return best, idx
    step = 16 // wide.itemsize
    buffer = queries.new_empty((rows, -(-columns // step) * step), dtype=wide)  # every row begins at 16 bytes
    # cut once, all at once: of a large corpus each tile takes a few tens of microseconds, and as much in Python
    tiles = [tile.t() for tile in corpus.split(columns)]
    terms_of_tiles = [None] * len(tiles) if terms is None else terms.split(columns)
    some_queries = queries.split(rows)
    some_row_terms = [None] * len(some_queries) if row_terms is None else row_terms.split(rows)
    groups = zip(some_queries, best.split(rows), idx.split(rows), some_row_terms, strict=True)
    with without_autocast(queries.device):
        for some, to, places, some_terms in groups:
            whole, first = buffer[: some.shape[0], :columns], first_index
            for tile, column_terms in zip(tiles, terms_of_tiles, strict=True):
                count = tile.shape[1]
                products = inner_products(some, tile, whole if count == columns else whole[:, :count])
                fresh = first == first_index
                topk_rows_(to, places, products, some_terms, column_terms, metric, first_index=first, fresh=fresh)
                first += count
    return best, idx


def searched(
    queries: Tensor,
    corpus: Tensor,
    k: int,
    rerank: int,
    metric: str,
    norms: Tensor | None,
    terms: Tensor | None,
    first_index: int,
    workspace: int | None,
) -> tuple[Tensor, Tensor]:
    """(scores, idx), both [Q, k]: a search, and where it is asked for the scores in float64 after it."""
    scores, idx = search(queries, corpus, k + rerank, metric, norms, terms, first_index, workspace)
    return reranked(queries, corpus, idx, k, metric, first_index, workspace) if rerank else (scores, idx)


def rescored(queries: Tensor, corpus: Tensor, idx: Tensor, metric: str, dtype: torch.dtype) -> Tensor:
    """[Q, k]: the scores of these rows of the corpus, computed in `dtype` from the vectors; -inf where idx is negative.
    With gradients."""
    # a corpus without rows gets one, so that its gradient and that of queries are there, and zero
    rows = corpus if corpus.shape[0] else torch.nn.functional.pad(corpus, (0, 0, 0, 1))
    picked, q = rows[idx.clamp(min=0)].to(dtype), queries.to(dtype)
    if metric == "l2":
        scores = -(picked - q.unsqueeze(1)).square().sum(2)
    else:
        scores = (picked * q.unsqueeze(1)).sum(2)
        if metric == "cosine":
            tiny = torch.finfo(wide_of(queries)).tiny  # of the search, whatever the dtype here
            for norms in (torch.linalg.vector_norm(picked, dim=2), torch.linalg.vector_norm(q, dim=1).unsqueeze(1)):
                scores = scores * torch.where(norms < tiny, 0.0, 1.0 / norms.clamp(min=tiny))
    return torch.where(idx < 0, -torch.inf, scores)


def reranked(
    queries: Tensor, corpus: Tensor, idx: Tensor, k: int, metric: str, first_index: int, workspace: int | None
) -> tuple[Tensor, Tensor]:
    """The k best of the rows idx [Q, m], by scores computed in float64 and rounded once."""
    wide, m = wide_of(queries), idx.shape[1]
    rows = max(1, (workspace or RERANK_WORKSPACE_BYTES) // max(1, m * queries.shape[1] * 8))
    local = torch.where(idx < 0, -1, idx - first_index)
    with without_autocast(queries.device):
        scores = [
            rescored(queries[a:b], corpus, local[a:b], metric, torch.float64).to(wide)
            for a, b in parts(queries.shape[0], rows)
        ]
    every = torch.cat(scores) if scores else queries.new_empty((0, m), dtype=wide)
    return merged(every, idx, k)


def merged(scores: Tensor, idx: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """[Q, m] both to [Q, k]: ties to the lowest index, empty places last."""
    order = idx.sort(dim=1, stable=True).indices
    return best_of(scores.gather(1, order), idx.gather(1, order), k)


def plain_formula(
    queries: Tensor,
    corpus: Tensor,
    k: int,
    rerank: int,
    metric: str,
    norms: Tensor | None,
    terms: Tensor | None,
    first_index: int,
    workspace: int | None,
) -> tuple[Tensor, Tensor]:
    """What `searched` answers, from all scores at once: what torch's transforms are taken of."""
    wide = wide_of(queries)
    inner = out_of_autocast(wide, queries.device)
    q, rows = queries.to(inner), corpus.to(inner)
    of_rows = terms_of(torch.linalg.vector_norm(q, dim=1), metric)
    if terms is None:
        terms = terms_of(torch.linalg.vector_norm(rows, dim=1) if norms is None else norms, metric)
    scores = scores_of(q @ rows.t(), of_rows, terms, metric).to(wide)
    idx = torch.arange(first_index, first_index + corpus.shape[0], device=queries.device).expand(scores.shape)
    best, empty = nothing_yet(queries.shape[0], k + rerank, wide, queries.device)
    scores, idx = best_of(torch.cat((scores, best), 1), torch.cat((idx, empty), 1), k + rerank)
    return reranked(queries, corpus, idx, k, metric, first_index, workspace) if rerank else (scores, idx)
