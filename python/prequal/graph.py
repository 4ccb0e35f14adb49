"""A graph, sorted once for many rounds of message passing, that notices when its edges have changed."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from . import constraints as c
from .errors import StaleIndexError
from .ops.message_passing import INDICES, lengths_of, sorted_by
from .point_index import _key_of, _moved
from .runtime.parameter_cache import watch

_most_kept = 8
_kept: OrderedDict[tuple[int, int], GraphPlan] = OrderedDict()


class GraphPlan:
    """The edges of a graph by target, as a CSR, and by source, as its transpose.

    Args:
        edge_index: [2, E], int32 or int64: sources, then targets, as in torch_geometric. Kept, not copied.
        num_nodes: N, at most 2^62.

    It is built on edge_index's device by two stable sorts, with one wait of the host at the end: for whether all nodes
    are in 0 to N - 1, and for the greatest degrees, by which calls decide whether rows are shared out. The arrays are
    of int32 where N and E fit, else of int64.

    A write to edge_index after the build makes the plan stale: the next call raises `StaleIndexError`, and `rebuild()`
    is the remedy. What is noticed is what moves torch's version counter, and another memory, shape or dtype behind the
    same tensor; not a write through `.data`, by another library, or to an inference tensor.

    Raises:
        TypeError: edge_index is not a tensor of int32 or int64; num_nodes is not an int.
        ValueError: edge_index is not [2, E], or names a node outside 0 to N - 1; num_nodes is negative.
    """

    row_ptr: Tensor  # [N + 1]: where the edges of each target begin
    column: Tensor  # [E]: their sources
    edge: Tensor  # [E]: their places in edge_index
    t_row_ptr: Tensor  # [N + 1]: where the edges of each source begin
    t_column: Tensor  # [E]: their targets
    t_edge: Tensor  # [E]: their places in edge_index
    longest: int  # the greatest number of edges of a target
    t_longest: int  # and of a source

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        c.is_tensor("edge_index", edge_index)
        if edge_index.dtype not in INDICES:
            raise TypeError(f"edge_index: expected int32 or int64, got {c.short(edge_index.dtype)}")
        c.has_shape("edge_index", edge_index, (2, "E"))
        c.in_range("num_nodes", num_nodes, 0, 1 << 62)
        self.edge_index = edge_index
        self.num_nodes = int(num_nodes)
        self.rebuild()

    @classmethod
    def cached(cls, edge_index: Tensor, num_nodes: int) -> GraphPlan:
        """The plan of this tensor object in its present version: kept from an earlier call, or built.

        The last 8 are kept, and their tensors with them.

        Raises:
            TypeError, ValueError: as GraphPlan.
        """
        key = (id(edge_index), num_nodes)
        plan = _kept.get(key)
        if plan is None or plan.edge_index is not edge_index or plan._built != _key_of(edge_index):
            plan = _kept[key] = cls(edge_index, num_nodes)
        _kept.move_to_end(key)
        while len(_kept) > _most_kept:
            _kept.popitem(last=False)
        return plan

    def rebuild(self) -> None:
        """Sort the edges as they are now, on the current stream.

        Raises:
            ValueError: they name a node outside 0 to N - 1.
        """
        nodes, edges = self.num_nodes, int(self.edge_index.shape[1])
        source, target = self.edge_index[0], self.edge_index[1]
        dtype = torch.int32 if max(nodes, edges) < torch.iinfo(torch.int32).max else torch.int64
        by_target, by_source = sorted_by(target, source, nodes, dtype), sorted_by(source, target, nodes, dtype)
        longest = (_greatest(lengths_of(row_ptr, edges)) for row_ptr in (by_target[0], by_source[0]))
        ends = (source.amin(), source.amax(), target.amin(), target.amax()) if edges else ()
        told = torch.stack([x.to(torch.int64) for x in (*longest, *ends)]).tolist()
        if edges and (min(told[2:]) < 0 or max(told[2:]) >= nodes):
            raise ValueError(f"edge_index: expected nodes in 0 to {nodes - 1}, got {min(told[2:])} to {max(told[2:])}")
        self.row_ptr, self.column, self.edge = by_target
        self.t_row_ptr, self.t_column, self.t_edge = by_source
        self.longest, self.t_longest = told[0], told[1]
        if not self.edge_index.is_inference():
            watch(self.edge_index)
        self._built = _key_of(self.edge_index)

    def check(self) -> None:
        """What every call does first. Reads no device memory.

        Raises:
            StaleIndexError: edge_index is not what was sorted.
        """
        now = _key_of(self.edge_index)
        if now != self._built:
            raise StaleIndexError("edge_index", _moved(self._built, now))

    def degree_bins(self) -> Tensor:
        """[64] int64, on the device: how many nodes have no edge that arrives, one, 2 to 3, 4 to 7, and so on."""
        lengths = lengths_of(self.row_ptr, self.edge.shape[0])
        bounds = torch.tensor([1 << i for i in range(63)], device=lengths.device)
        bins = torch.searchsorted(bounds, lengths, right=True)
        return torch.zeros(64, dtype=torch.int64, device=lengths.device).index_add(0, bins, torch.ones_like(bins))

    def __reduce__(self) -> tuple[type[GraphPlan], tuple[Tensor, int]]:
        return type(self), (self.edge_index, self.num_nodes)

    def __repr__(self) -> str:
        where = f"{self.num_nodes} nodes, {self.edge.shape[0]} edges on {self.edge.device}"
        return f"GraphPlan({where}, {c.short(self.edge.dtype)}, most {self.longest} in and {self.t_longest} out)"


def _greatest(lengths: Tensor) -> Tensor:
    return lengths.amax() if lengths.numel() else lengths.new_zeros(())
