"""A corpus whose norms are computed once, and that notices when its rows have changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.errors import StaleIndexError
from prequal.ops import row_norms
from prequal.ops._rows import FLOATS
from prequal.ops.topk_rows import is_metric
from prequal.point_index import _key_of, _moved
from prequal.runtime.parameter_cache import watch

from .topk import answer, check_call, check_group
from .walk import terms_of_rows


class CorpusIndex:
    """A corpus and what `cosine_topk` computes of it alone, kept between calls.

    Args:
        corpus: [C, D], float16, bfloat16, float32 or float64. Kept, not copied; so is the memory
            that it lies in, until a rebuild.
        metric: "cosine", "dot" or "l2", as in `prequal.cosine_topk`.

    Every answer is that of `prequal.cosine_topk` with these norms ("l2": with their squares before they are rounded to
    norms). Gradients are taken as it takes them, and flow to
    `corpus` too.

    A write to the corpus after the build makes the index stale: the next query raises `StaleIndexError`, which names
    what moved, and `rebuild()` is the remedy. What is noticed, and what is not (a write through `.data`, by another
    library, or to an inference tensor), is as of `prequal.KnnIndex`.

    A copy, and what comes out of a pickle, is built anew.

    Raises:
        TypeError, ValueError: not a right corpus or metric. Also a corpus inside a transform of torch.func.
    """

    norms: Tensor  # [C], float32 (float64 for float64)

    def __init__(self, corpus: Tensor, *, metric: str = "cosine") -> None:
        self.corpus = corpus
        self._metric = metric
        self.rebuild()

    @property
    def metric(self) -> str:
        return self._metric

    def rebuild(self) -> None:
        """Read the corpus as it is now, on the current stream."""
        corpus = self.corpus
        c.is_tensor("corpus", corpus)
        if corpus.dtype not in (*FLOATS, torch.float64):
            raise TypeError(f"corpus: expected float16, bfloat16, float32 or float64, got {c.short(corpus.dtype)}")
        c.has_shape("corpus", corpus, ("C", "D"))
        is_metric(self.metric)
        if torch._C._functorch.is_functorch_wrapped_tensor(corpus):
            raise TypeError("corpus: expected a tensor of no torch.func transform, got one")
        self.norms = row_norms(corpus.detach())
        self._terms = terms_of_rows(corpus.detach(), self.metric)
        self._memory = corpus.detach()  # as KnnIndex: what a key names the address of is not freed
        if not corpus.is_inference():
            watch(corpus)
        self._built = _key_of(corpus)

    def check(self) -> None:
        """What every query does first. Reads no device memory.

        Raises:
            StaleIndexError: corpus is not what was read.
        """
        now = _key_of(self.corpus)
        if now != self._built:
            raise StaleIndexError("corpus", _moved(self._built, now))

    def topk(
        self,
        queries: Tensor,
        k: int,
        *,
        rerank: int = 0,
        process_group: Any = None,
        first_index: int | None = None,
        max_workspace_bytes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`prequal.cosine_topk` of this corpus: (scores, idx), both [Q, k].

        Raises:
            StaleIndexError: see `CorpusIndex`. TypeError, ValueError: as `prequal.cosine_topk`.
        """
        self.check()
        check_call(queries, self.corpus, k, None, self.metric, rerank, first_index, max_workspace_bytes)
        check_group(process_group)
        how = (rerank, process_group, first_index, max_workspace_bytes)
        return answer(queries, self.corpus, k, self.metric, None, self._terms, *how)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _of, (self.corpus, self.metric)

    def __repr__(self) -> str:
        x = self.corpus
        return f"CorpusIndex({list(x.shape)} {c.short(x.dtype)} on {x.device}, {self.metric})"


def _of(corpus: Tensor, metric: str) -> CorpusIndex:
    return CorpusIndex(corpus, metric=metric)
