"""A search under torch.compile: one node of the graph, so that neither the number of tiles nor a size is part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from prequal.ops._rows import wide_of
from prequal.registry import LIBRARY, NAMESPACE

from .walk import rescored, searched

_SCHEMA = (
    "Tensor queries, Tensor corpus, SymInt k, SymInt rerank, str metric, Tensor? norms, Tensor? terms, "
    "SymInt first_index, SymInt? workspace"
)
_NAME = "cosine_topk_search"
LIBRARY.define(f"{_NAME}({_SCHEMA}) -> (Tensor, Tensor)")


def _fake(queries: Tensor, corpus: Tensor, k: int, *how: Any) -> tuple[Tensor, Tensor]:
    shape = (queries.shape[0], k)
    return queries.new_empty(shape, dtype=wide_of(queries)), queries.new_empty(shape, dtype=torch.int64)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    queries, corpus, _, _, ctx.metric, _, _, ctx.first_index, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(queries, corpus, output[1])


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Who asks for a gradient takes it of the rows found; this is for whoever is not seen to ask."""
    queries, corpus, idx = ctx.saved_tensors
    local = torch.where(idx < 0, -1, idx - ctx.first_index)

    def scores(queries: Tensor, corpus: Tensor) -> Tensor:
        return rescored(queries, corpus, local, ctx.metric, wide_of(queries))

    return (*torch.func.vjp(scores, queries, corpus)[1](grad), *[None] * 7)


def _vmapped(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    """One search an element of the batch."""
    found = [
        packet(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(column) for column in zip(*found, strict=True)), (0, 0)


LIBRARY.impl(_NAME, searched, "CompositeExplicitAutograd")
library.register_fake(f"{NAMESPACE}::{_NAME}", _fake, lib=LIBRARY)
library.register_autograd(f"{NAMESPACE}::{_NAME}", _gradient, setup_context=_setup, lib=LIBRARY)
library.register_vmap(f"{NAMESPACE}::{_NAME}", _vmapped, lib=LIBRARY)
packet = getattr(getattr(torch.ops, NAMESPACE), _NAME)
