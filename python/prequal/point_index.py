"""A search structure that is built once and asked often, and that notices when its points have moved."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .errors import StaleIndexError
from .runtime.parameter_cache import ParameterKey, watch


def _key_of(tensor: Tensor | None) -> ParameterKey | None:
    if tensor is None:
        return None
    key = ParameterKey.of(tensor)
    if key is None:  # an inference tensor: whether it was written, nobody knows
        place = (tensor.data_ptr(), 0, tensor.dtype, tensor.device, tuple(tensor.shape), tuple(tensor.stride()))
        key = ParameterKey(*place)
    return key


class KnnIndex:
    """References, indexed: `knn`, `knn_gather`, `knn_interpolate` and `radius` without building anything a call.

    Args:
        references: [M, D], floating, D 2 or 3. Kept, not copied; so is the memory that they lie in, until a rebuild.
        reference_ptr: [B + 1], int32 or int64, same device: segments of a ragged batch, as in `prequal.knn`. Every
            query then takes a `query_ptr`.

    Every answer is that of the plain op, bit for bit. Gradients are taken as the plain op takes them, and flow to
    `references` too.

    A write to the references (or to reference_ptr) after the build, an optimiser's step for example, makes the index
    stale: the next query raises `StaleIndexError`, which names what moved, and `rebuild()` is the remedy. What is
    noticed is what moves torch's version counter, and another memory, shape or dtype behind the same tensor. What is
    not: a write through `.data`, by another library, to a storage that was resized, or to an inference tensor (one made
    under `torch.inference_mode`), whose writes nobody counts; call `rebuild()` after those. Looking at the counter is
    Python's work: inside `torch.compile` it breaks the graph; there pass `index=index.structure` to the plain ops and
    mind staleness yourself.

    A copy, and what comes out of a pickle, is built anew.

    Raises:
        TypeError, ValueError: not right references or pointers; `prequal.knn_index` says which. Also references inside
            a transform of torch.func, where the plain ops serve.
    """

    structure: Tensor  # [bytes], uint8: what `prequal.knn_index` made of the references

    def __init__(self, references: Tensor, reference_ptr: Tensor | None = None) -> None:
        self.references = references
        self.reference_ptr = reference_ptr
        self.rebuild()

    def rebuild(self) -> None:
        """Index the references as they are now, on the current stream."""
        import prequal

        references = self.references
        if isinstance(references, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(references):
                raise TypeError(
                    "references: expected a tensor of no torch.func transform, got one; prequal.knn takes those"
                )
            references = references.detach()
        with torch.inference_mode(False):  # an inference tensor could not be saved for a backward pass later
            self.structure = prequal.knn_index(references, reference_ptr=self.reference_ptr)
        # What `.data =` takes away is not freed while a key names its address: else other points may come to lie there.
        self._memory = [tensor.detach() for tensor in (self.references, self.reference_ptr) if tensor is not None]
        for tensor in (self.references, self.reference_ptr):
            if tensor is not None and not tensor.is_inference():
                watch(tensor)
        self._built = self._keys()

    def _keys(self) -> dict[str, ParameterKey | None]:
        return {"references": _key_of(self.references), "reference_ptr": _key_of(self.reference_ptr)}

    def check(self) -> None:
        """What every query does first. Reads no device memory.

        Raises:
            StaleIndexError: references or reference_ptr are not what was indexed.
        """
        now = self._keys()
        if now == self._built:
            return
        for argument, then in self._built.items():
            if then != now[argument]:
                raise StaleIndexError(argument, _moved(then, now[argument]))

    def knn(
        self, queries: Tensor, k: int = 1, *, query_ptr: Tensor | None = None, radius: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """`prequal.knn` of these references: (dist2 [N, k], idx [N, k]).

        Raises:
            StaleIndexError: see `KnnIndex`. TypeError, ValueError: as `prequal.knn`.
        """
        import prequal

        return prequal.knn(queries, self.references, k, radius=radius, **self._segments(query_ptr))

    def knn_gather(self, queries: Tensor, values: Tensor, *, query_ptr: Tensor | None = None) -> Tensor:
        """`prequal.knn_gather` of these references: the rows [N, ...] of values.

        Raises:
            StaleIndexError: see `KnnIndex`. TypeError, ValueError: as `prequal.knn_gather`.
        """
        import prequal

        return prequal.knn_gather(queries, self.references, values, **self._segments(query_ptr))

    def knn_interpolate(
        self, queries: Tensor, values: Tensor, k: int = 3, *, query_ptr: Tensor | None = None
    ) -> Tensor:
        """`prequal.knn_interpolate` of these references: means [N, ...] of the rows of values.

        Raises:
            StaleIndexError: see `KnnIndex`. TypeError, ValueError: as `prequal.knn_interpolate`.
        """
        import prequal

        return prequal.knn_interpolate(queries, self.references, values, k, **self._segments(query_ptr))

    def radius(
        self, queries: Tensor, r: float, max_neighbors: int, *, query_ptr: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`prequal.radius` of these references: (dist2, idx [N, max_neighbors], counts [N]).

        Raises:
            StaleIndexError: see `KnnIndex`. TypeError, ValueError: as `prequal.radius`.
        """
        import prequal

        return prequal.radius(queries, self.references, r, max_neighbors, **self._segments(query_ptr))

    def _segments(self, query_ptr: Tensor | None) -> dict[str, Tensor | None]:
        self.check()
        return {"query_ptr": query_ptr, "reference_ptr": self.reference_ptr, "index": self.structure}

    def __reduce__(self) -> tuple[type[KnnIndex], tuple[Tensor, Tensor | None]]:
        return type(self), (self.references, self.reference_ptr)

    def __repr__(self) -> str:
        x = self.references
        segments = "" if self.reference_ptr is None else f", {len(self.reference_ptr) - 1} segments"
        dtype = str(x.dtype).removeprefix("torch.")
        return f"KnnIndex({list(x.shape)} {dtype} on {x.device}{segments}, {self.structure.numel():,} bytes)"


def _moved(then: ParameterKey | None, now: ParameterKey | None) -> dict[str, tuple[Any, Any]]:
    """What differs, by the name of the field."""
    if then is None or now is None:
        return {"presence": (then is not None, now is not None)}
    both = {field.name: (getattr(then, field.name), getattr(now, field.name)) for field in fields(then)}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}
