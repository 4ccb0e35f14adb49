"""Graphs, sorted once for many rounds of message passing, that notice when their edges have changed."""

from __future__ import annotations

import abc
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import constraints as c
from .errors import StaleIndexError
from .ops.message_passing import INDICES, lengths_of, sorted_by
from .point_index import _key_of, _moved
from .runtime.parameter_cache import watch

T = TypeVar("T")
MOST_NODES = 1 << 62


class LastFew(Generic[T]):
    """What was made last, by key, for any number of threads: two that ask for the same at once may both make it."""

    def __init__(self, most: int = 8) -> None:
        self._most, self._lock = most, threading.Lock()
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        with self._lock:
            return self._made.get(key)

    def put(self, key: Hashable, made: T) -> T:
        """made, which is then the newest."""
        with self._lock:
            self._made[key] = made
            self._made.move_to_end(key)
            while len(self._made) > self._most:
                self._made.popitem(last=False)
        return made


_kept: LastFew[GraphPlan] = LastFew()


class _Sorted(abc.ABC):
    """Edges by target, as a CSR, and by source, as its transpose."""

    row_ptr: Tensor  # [N + 1]: where the edges of each target begin
    column: Tensor  # [E]: their sources
    edge: Tensor  # [E]: their places in the order of the edges
    t_row_ptr: Tensor  # [M + 1]: where the edges of each source begin
    t_column: Tensor  # [E]: their targets
    t_edge: Tensor  # [E]: their places in the order of the edges
    longest: int  # the greatest number of edges of a target
    t_longest: int  # and of a source
    in_order: bool  # edges came sorted by their targets: `edge` counts up
    _num_nodes: int
    _built: dict[str, Any]
    _memory: list[Tensor]

    @abc.abstractmethod
    def _edges(self) -> dict[str, tuple[Tensor, int]]:
        """By the names of the arguments: [2, E] each, and how many sources it counts through."""

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    def _keys(self) -> dict[str, Any]:
        return {name: _key_of(edges) for name, (edges, _) in self._edges().items()}

    def rebuild(self) -> None:
        """Sort the edges as they are now, on the current stream.

        Raises:
            ValueError: they name a node that is not there.
        """
        with torch.inference_mode(False):  # what is made under it could not be saved for a gradient
            self._sort()

    def _sort(self) -> None:
        all_edges, targets = self._edges(), self.num_nodes
        edges = sum(int(found.shape[1]) for found, _ in all_edges.values())
        nodes = sum(count for _, count in all_edges.values())
        # a sort takes as many passes as its keys have bytes
        dtype = torch.int32 if max(nodes, targets, edges) < torch.iinfo(torch.int32).max else torch.int64
        ends: list[Tensor] = []
        limits, sources, arrive, before = [], [], [], 0
        for name, (found, count) in all_edges.items():
            if found.shape[1]:  # as they are: a number that int32 cannot say may look right in it
                ends += found.aminmax(dim=1)
                limits += [(name, (count, targets))]
            keys = found.to(dtype)
            sources.append(keys[0] + before if before else keys[0])
            arrive.append(keys[1])
            before += count
        source = sources[0] if len(sources) == 1 else torch.cat(sources)
        target = arrive[0] if len(arrive) == 1 else torch.cat(arrive)
        by_target, by_source = sorted_by(target, source, targets, dtype), sorted_by(source, target, nodes, dtype)
        longest = [_greatest(row_ptr.diff()) for row_ptr in (by_target[0], by_source[0])]
        moved = _greatest((target[:-1] > target[1:]).to(torch.int8))
        told = torch.cat([x.reshape(-1).to(torch.int64) for x in (*longest, moved, *ends)]).tolist()
        for place, (name, both) in enumerate(limits):
            lows, highs = told[3 + 4 * place : 5 + 4 * place], told[5 + 4 * place : 7 + 4 * place]
            for low, high, limit in zip(lows, highs, both, strict=True):
                if low < 0 or high >= limit:
                    raise ValueError(f"{name}: expected nodes in 0 to {limit - 1}, got {low} to {high}")
        self.row_ptr, self.column, self.edge = by_target
        self.t_row_ptr, self.t_column, self.t_edge = by_source
        self.longest, self.t_longest, self.in_order = told[0], told[1], told[2] == 0
        # What `.data =` takes away is not freed while a key names its address: else other edges may come to lie there.
        self._memory = [found.detach() for found, _ in all_edges.values()]
        for found, _ in all_edges.values():
            if not found.is_inference():
                watch(found)
        self._built = self._keys()

    def check(self) -> None:
        """What every call does first. Reads no device memory.

        Raises:
            StaleIndexError: the edges are not what was sorted.
        """
        now = self._keys()
        for name, then in self._built.items():
            if now[name] != then:
                raise StaleIndexError(name, _moved(then, now[name]))

    def degree_bins(self) -> Tensor:
        """[64] int64, on the device: how many nodes have no edge that arrives, one, 2 to 3, 4 to 7, and so on."""
        lengths = lengths_of(self.row_ptr, self.edge.shape[0])
        bounds = torch.tensor([1 << i for i in range(63)], device=lengths.device)
        bins = torch.searchsorted(bounds, lengths, right=True)
        return torch.zeros(64, dtype=torch.int64, device=lengths.device).index_add(0, bins, torch.ones_like(bins))


class GraphPlan(_Sorted):
    """The edges of a graph by target, as a CSR, and by source, as its transpose.

    Args:
        edge_index: [2, E], int32 or int64: sources, then targets, as in torch_geometric. Kept, not copied; so is the
            memory that it lies in, until a rebuild.
        num_nodes: N, at most 2^62: nodes, or targets where sources are others.
        num_sources: M, of a bipartite graph: how many nodes messages come from. None: they are the N nodes.

    It is built on edge_index's device by two stable sorts, with one wait of the host at the end: for whether all nodes
    are there, for the greatest degrees, by which calls decide whether rows are shared out, and for whether the edges
    came in order. The arrays are of int32 where N, M and E fit, else of int64.

    Where the edges come sorted by their targets, `in_order` says so, and calls read edge_weight as it lies instead of
    looking each up. ``edge_index[:, plan.edge]`` and ``edge_weight[plan.edge]`` are sorted so.

    A write to edge_index after the build makes the plan stale: the next call raises `StaleIndexError`, and `rebuild()`
    is the remedy. What is noticed is what moves torch's version counter, and another memory, shape or dtype behind the
    same tensor; not a write through `.data`, by another library, or to an inference tensor.

    Raises:
        TypeError: edge_index is not a tensor of int32 or int64; num_nodes or num_sources is not an int.
        ValueError: edge_index is not [2, E], or names a node that is not there; num_nodes or num_sources is negative.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, num_sources: int | None = None) -> None:
        _check_edges("edge_index", edge_index)
        c.in_range("num_nodes", num_nodes, 0, MOST_NODES)
        if num_sources is not None:
            c.in_range("num_sources", num_sources, 0, MOST_NODES)
        self.edge_index = edge_index
        self._num_nodes = int(num_nodes)
        self._num_sources = self._num_nodes if num_sources is None else int(num_sources)
        self.rebuild()

    @property
    def num_sources(self) -> int:
        return self._num_sources

    @classmethod
    def cached(cls, edge_index: Tensor, num_nodes: int, num_sources: int | None = None) -> GraphPlan:
        """The plan of this tensor object in its present version: kept from an earlier call, or built.

        The last 8 are kept, and their tensors with them.

        Raises:
            TypeError, ValueError: as GraphPlan.
        """
        key = (id(edge_index), num_nodes, num_sources)
        plan = _kept.get(key)
        if plan is None or plan.edge_index is not edge_index or plan._built != plan._keys():
            plan = cls(edge_index, num_nodes, num_sources)
        return _kept.put(key, plan)

    def _edges(self) -> dict[str, tuple[Tensor, int]]:
        return {"edge_index": (self.edge_index, self.num_sources)}

    def __reduce__(self) -> tuple[type[GraphPlan], tuple[Tensor, int, int]]:
        return type(self), (self.edge_index, self.num_nodes, self.num_sources)

    def __repr__(self) -> str:
        of = "" if self.num_sources == self.num_nodes else f" of {self.num_sources} sources"
        where = f"{self.num_nodes} nodes{of}, {self.edge.shape[0]} edges on {self.edge.device}"
        return f"GraphPlan({where}, {c.short(self.edge.dtype)}, most {self.longest} in and {self.t_longest} out)"


class SpatioTemporalPlan(_Sorted):
    """Two sets of edges as one CSR: between the nodes of now, and from those of the step before to those of now.

    Args:
        spatial_edge_index: [2, S], int32 or int64: sources and targets among the nodes of now. Kept, not copied.
        temporal_edge_index: [2, T], of its dtype and device: sources among the nodes of before, targets of now.
        num_nodes: N, the nodes of now.
        num_previous: P, the nodes of before. None: N.

    Edges are numbered through: the S spatial ones, then the T temporal ones. It is built, and becomes stale by a write
    to either of the two, as a `GraphPlan`.

    Raises:
        TypeError: not tensors of int32 or int64, or of two dtypes; num_nodes or num_previous is not an int.
        ValueError: not [2, E], on two devices, or naming a node that is not there; a negative number of nodes.
    """

    def __init__(
        self,
        spatial_edge_index: Tensor,
        temporal_edge_index: Tensor,
        num_nodes: int,
        num_previous: int | None = None,
    ) -> None:
        _check_edges("spatial_edge_index", spatial_edge_index)
        _check_edges("temporal_edge_index", temporal_edge_index)
        c.same_dtype("temporal_edge_index", temporal_edge_index, "spatial_edge_index", spatial_edge_index)
        c.same_device(spatial_edge_index=spatial_edge_index, temporal_edge_index=temporal_edge_index)
        c.in_range("num_nodes", num_nodes, 0, MOST_NODES)
        if num_previous is not None:
            c.in_range("num_previous", num_previous, 0, MOST_NODES)
        self.spatial_edge_index = spatial_edge_index
        self.temporal_edge_index = temporal_edge_index
        self._num_nodes = int(num_nodes)
        self._num_previous = self._num_nodes if num_previous is None else int(num_previous)
        self.rebuild()

    @property
    def num_previous(self) -> int:
        return self._num_previous

    def _edges(self) -> dict[str, tuple[Tensor, int]]:
        return {
            "spatial_edge_index": (self.spatial_edge_index, self.num_nodes),
            "temporal_edge_index": (self.temporal_edge_index, self.num_previous),
        }

    def __reduce__(self) -> tuple[type[SpatioTemporalPlan], tuple[Tensor, Tensor, int, int]]:
        edges = self.spatial_edge_index, self.temporal_edge_index
        return type(self), (*edges, self.num_nodes, self.num_previous)

    def __repr__(self) -> str:
        spatial, temporal = self.spatial_edge_index.shape[1], self.temporal_edge_index.shape[1]
        where = f"{self.num_nodes} nodes after {self.num_previous}, {spatial} + {temporal} edges on {self.edge.device}"
        most = f"most {self.longest} in and {self.t_longest} out"
        return f"SpatioTemporalPlan({where}, {c.short(self.edge.dtype)}, {most})"


def _check_edges(name: str, edges: Tensor) -> None:
    c.is_tensor(name, edges)
    if torch._C._functorch.is_functorch_wrapped_tensor(edges):
        raise TypeError(f"{name}: expected a tensor of no torch.func transform, got one")
    if edges.dtype not in INDICES:
        raise TypeError(f"{name}: expected int32 or int64, got {c.short(edges.dtype)}")
    c.has_shape(name, edges, (2, "E"))


def _greatest(lengths: Tensor) -> Tensor:
    return lengths.amax() if lengths.numel() else lengths.new_zeros(())
