"""message_passing by plan: uniform graphs of 2,000 to 500,000 nodes, a power law's, and the form with two inputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.rows import normal, short
from prequal.contracts import Tolerance
from prequal.graph import GraphPlan, SpatioTemporalPlan
from prequal.registry import Cost

BF16, F32 = torch.bfloat16, torch.float32
FORWARD = ("row_ptr", "column", "edge")
TRANSPOSE = ("t_row_ptr", "t_column", "t_edge")


def index_bytes(*indices: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in indices if x is not None)


@prequal.message_passing_csr.cost
def _(
    x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, previous, *, reduce, keep, longest, t_longest
):
    # x read once and y written, row_ptr and column once; edge only where weights are looked up by it. What is gathered
    # again, E rows of F in all, comes from L2 where x fits there.
    rows, width = row_ptr.shape[0] - 1, x.shape[1]
    looked_up = (edge, edge_weight) if edge_weight is not None else ()
    nodes = x.shape[0] + (0 if previous is None else previous.shape[0])
    moved = (nodes + rows) * width * x.element_size() + index_bytes(row_ptr, column, *looked_up)
    if keep and reduce in ("max", "min"):
        moved += rows * width * row_ptr.element_size()
    if keep and reduce == "softmax":
        moved += 2 * rows * width * 4
    return Cost(moved, 2 * column.shape[0] * width)


@prequal.message_passing_csr_backward.cost
def _(
    grad, x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, arg, state, previous, *, reduce, **named
):
    # grad read and dx written; x where softmax or the weights' gradient asks for it; what the forward call kept
    asks = edge_weight is not None and named["weight_grad"]
    own = x.numel() + (0 if previous is None else previous.numel())
    moved = (grad.numel() + own) * x.element_size() + index_bytes(t_row_ptr, t_column, arg, state)
    if asks or reduce == "softmax":
        moved += own * x.element_size()
    moved += index_bytes(t_edge, edge_weight) if edge_weight is not None else 0
    if asks:
        moved += index_bytes(edge_weight)
    return Cost(moved, (4 if asks else 2) * column.shape[0] * x.shape[1])


def uniform(device: torch.device, nodes: int, edges: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(nodes + edges)
    return torch.randint(0, nodes, (2, edges), device=device, generator=generator)


def power_law(device: torch.device, nodes: int, edges: int) -> Tensor:
    """Sources and targets of rank N u^2, u uniform: a node of rank r is drawn with a probability like r^(-1/2)."""
    generator = torch.Generator(device).manual_seed(nodes + edges)
    u = torch.rand(2, edges, device=device, generator=generator)
    return (nodes * u**2).long().clamp(max=nodes - 1)


def power_law_in_order(device: torch.device, nodes: int, edges: int) -> Tensor:
    """The same, sorted by target: weights are read as they lie."""
    found = power_law(device, nodes, edges)
    return found[:, found[1].argsort(stable=True)]


def at_places(edge_weight: Tensor, edge: Tensor | None) -> Tensor:
    return edge_weight if edge is None else edge_weight[edge]


def gathered(x: Tensor, row_ptr: Tensor, column: Tensor, edge: Tensor | None, edge_weight: Tensor | None) -> Any:
    """(rows [E], messages [E, F]) as eager code has them. The rows are what it starts from: they are not timed."""
    messages = x[column]
    return messages if edge_weight is None else messages * at_places(edge_weight, edge)[:, None].to(x.dtype)


class Prepared:
    """What another library has in the place of our plan, made once for a graph."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], Any] = {}

    def of(self, key: tuple[Tensor | None, ...], make: Any) -> Any:
        place = tuple(0 if x is None else x.data_ptr() for x in key)
        if place not in self.known:
            self.known.clear()
            self.known[place] = make()
        return self.known[place]


_targets, _matrices = Prepared(), Prepared()


def targets(row_ptr: Tensor, column: Tensor) -> Tensor:
    nodes = torch.arange(row_ptr.shape[0] - 1, device=row_ptr.device)
    return _targets.of((row_ptr, column), lambda: torch.repeat_interleave(nodes, row_ptr.diff().long()))


def by_index_add(x, row_ptr, column, edge=None, edge_weight=None, *rest):
    out = x.new_zeros((row_ptr.shape[0] - 1, x.shape[1]))
    return out.index_add(0, targets(row_ptr, column), gathered(x, row_ptr, column, edge, edge_weight))


def by_scatter_reduce(reduce, x, row_ptr, column, edge=None, edge_weight=None, *rest):
    kind = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}[reduce]
    messages = gathered(x, row_ptr, column, edge, edge_weight)
    at = targets(row_ptr, column)[:, None].expand_as(messages)
    out = x.new_zeros((row_ptr.shape[0] - 1, x.shape[1]))
    return out.scatter_reduce(0, at, messages, kind, include_self=False)


def by_sparse_csr(x, row_ptr, column, edge=None, edge_weight=None, *rest):
    def make() -> Tensor:
        values = torch.ones_like(column, dtype=x.dtype) if edge_weight is None else at_places(edge_weight, edge)
        values = values.to(x.dtype)
        return torch.sparse_csr_tensor(row_ptr, column, values, (row_ptr.shape[0] - 1, x.shape[0]))

    return _matrices.of((row_ptr, column, edge_weight, x), make) @ x


def geometric() -> Any:
    from torch_geometric.utils import segment

    def answer(x, row_ptr, column, edge=None, edge_weight=None, *rest):
        return segment(gathered(x, row_ptr, column, edge, edge_weight), row_ptr.long(), "sum")

    return answer


# Others add in x's dtype. In bfloat16, some 10 to 30 messages: each sum below 16 is rounded by at most 2^-5, 10 times
# in one direction or 30 in a random walk; another edge or no weight is an error near 1, in every second value. In
# float32, up to some 10,000 messages at the hub: 2^-24 of 100, 100 times.
OTHERS = Tolerance({F32: (1e-4, 1e-3), BF16: (2.0**-6, 0.5)})


def near_sums(got: Any, want: Any, args: Any) -> str | None:
    found = OTHERS.compare(got, want[0])
    return None if found is None else str(found)


GRAPHS = (
    # name, nodes, edges a node, width, dtype, how, reduce, weighted
    ("uniform", 2_000, 10, 64, F32, uniform, "sum", True),
    ("uniform", 2_000, 50, 64, F32, uniform, "sum", True),
    ("uniform", 2_000, 5, 64, F32, uniform, "sum", False),
    ("uniform", 20_000, 20, 64, F32, uniform, "sum", True),
    ("uniform", 50_000, 10, 128, BF16, uniform, "sum", True),
    ("uniform", 50_000, 10, 128, F32, uniform, "sum", True),
    ("uniform", 50_000, 50, 64, F32, uniform, "mean", False),
    ("uniform", 500_000, 5, 64, BF16, uniform, "sum", False),
    ("uniform", 500_000, 5, 64, F32, uniform, "sum", True),
    ("uniform", 500_000, 20, 128, BF16, uniform, "max", False),
    ("uniform", 500_000, 50, 32, F32, uniform, "sum", True),
    ("uniform", 50_000, 10, 64, F32, uniform, "softmax", True),
    ("power law", 100_000, 20, 64, F32, power_law, "sum", True),
    ("power law", 100_000, 20, 64, F32, power_law, "max", False),
    ("power law in order", 100_000, 20, 64, F32, power_law_in_order, "sum", True),
)

PEERS = (Peer("torch_geometric", "message_passing_csr", geometric, near_sums),)


def cases() -> Iterator[Case]:
    for place, (kind, nodes, degree, width, dtype, how, reduce, weighted) in enumerate(GRAPHS):

        def graph(device, nodes=nodes, degree=degree, width=width, dtype=dtype, how=how, weighted=weighted):
            plan = GraphPlan(how(device, nodes, nodes * degree), nodes)
            weight = normal(device, nodes * degree, dtype=F32).abs() if weighted else None
            csr = [plan.row_ptr, plan.column, None if plan.in_order else plan.edge]
            transpose = [getattr(plan, name) for name in TRANSPOSE]
            return plan, normal(device, nodes, width, dtype=dtype), csr, weight, transpose

        def make(device: torch.device, graph=graph) -> tuple[Any, ...]:
            _, x, csr, weight, transpose = graph(device)
            return (x, *csr, weight, *transpose)

        def make_gradient(device: torch.device, graph=graph, reduce=reduce) -> tuple[Any, ...]:
            plan, x, csr, weight, transpose = graph(device)
            named = {"reduce": reduce, "keep": True, "longest": plan.longest}
            _, arg, state = prequal.message_passing_csr(x, *csr, weight, **named)
            return (normal(device, *x.shape, dtype=x.dtype, seed=1), x, *csr, weight, *transpose, arg, state)

        others = []
        if reduce == "sum":
            others += [Other("index_add", by_index_add, near_sums), Other("torch.sparse CSR", by_sparse_csr, near_sums)]
        if reduce != "softmax":
            others.append(Other("scatter_reduce", partial(by_scatter_reduce, reduce), near_sums))
        what = f"{reduce}, {kind}, {nodes} nodes, {degree} edges each, {short(dtype)} {width} wide"
        # rows are shared out where they are long, as a plan says; its number is not needed to the edge
        cut = 0 if how is uniform else 1 << 20
        yield Case(
            "message_passing_csr",
            what,
            make,
            quick=place == 0,
            others=others,
            peers=reduce == "sum",
            named={"reduce": reduce, "longest": cut, "t_longest": cut},
        )
        yield Case(
            "message_passing_csr_backward",
            f"{what}, backward",
            make_gradient,
            quick=place == 0,
            named={"reduce": reduce, "t_longest": cut},
        )

    yield from two_inputs()


def two_inputs() -> Iterator[Case]:
    """50,000 nodes, 10 spatial edges each, and one temporal edge from each node's own past."""
    nodes, degree, width = 50_000, 10, 64

    def make(device: torch.device) -> tuple[Any, ...]:
        own = torch.arange(nodes, device=device).expand(2, -1)
        plan = SpatioTemporalPlan(uniform(device, nodes, nodes * degree), own, nodes)
        x, previous = (normal(device, nodes, width, dtype=F32, seed=seed) for seed in range(2))
        csr, transpose = ([getattr(plan, name) for name in names] for names in (FORWARD, TRANSPOSE))
        return (x, *csr, None, *transpose, previous)

    def concatenated(x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, previous):
        return by_index_add(torch.cat((x, previous)), row_ptr, column, edge, edge_weight)

    def concatenated_sparse(x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, previous):
        def matrix() -> Tensor:
            shape = (row_ptr.shape[0] - 1, x.shape[0] + previous.shape[0])
            return torch.sparse_csr_tensor(row_ptr, column, torch.ones_like(column, dtype=x.dtype), shape)

        return _matrices.of((row_ptr, column, previous), matrix) @ torch.cat((x, previous))

    yield Case(
        "message_passing_csr",
        f"sum, two inputs, {nodes} nodes, {degree} + 1 edges each, {short(F32)} {width} wide",
        make,
        others=[
            Other("cat, index_add", concatenated, near_sums),
            Other("cat, torch.sparse CSR", concatenated_sparse, near_sums),
        ],
        peers=False,
        named={"reduce": "sum"},
    )
