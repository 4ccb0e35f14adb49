"""Messages along the edges of a graph, reduced where they arrive: by rows of a CSR; backward, of its transpose."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal, stored, wide_of

if TYPE_CHECKING:
    from prequal.graph import GraphPlan, SpatioTemporalPlan

INDICES = (torch.int32, torch.int64)
REDUCES = ("sum", "mean", "max", "min", "softmax")
WIDEST_ROW = 1 << 20
MOST_EDGES = 0xFFFFFFFF  # places in a row are kept in 32 bits


# ---- the CSR -----------------------------------------------------------------------------------------------------


def sorted_by(key: Tensor, other: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(row_ptr [rows + 1], column [E], edge [E]): edges by `key`, in their own order where it is equal.

    A key that is `rows` or more is no row's. No host sync, and no atomics.
    """
    found, order = key.sort(stable=True)
    starts = torch.arange(rows + 1, device=key.device, dtype=key.dtype)
    row_ptr = torch.searchsorted(found, starts, out_int32=dtype == torch.int32)
    return row_ptr, other[order].to(dtype), order.to(dtype)


def edges_of(row_ptr: Tensor, column: Tensor, edge: Tensor | None, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each place of a CSR: its row (one past the last: nobody's), its column, its edge; int64 [E] each."""
    edges, rows = column.shape[0], row_ptr.shape[0] - 1
    place = torch.arange(edges, device=column.device)
    to = column.to(torch.int64)
    number = place if edge is None else edge.to(torch.int64)
    if rows == 0:
        return torch.zeros_like(place), torch.zeros_like(place), torch.zeros_like(place)
    ends = row_ptr.to(torch.int64).clamp(0, edges)
    row = (torch.searchsorted(ends[:-1].contiguous(), place, right=True) - 1).clamp(min=0)
    there = (ends[row] <= place) & (place < ends[row + 1])
    there = there & (to >= 0) & (to < columns) & (number >= 0) & (number < edges)
    return torch.where(there, row, rows), torch.where(there, to, 0), torch.where(there, number, 0)


def lengths_of(row_ptr: Tensor, edges: int) -> Tensor:
    """[N + 1] to [N] int64: how many edges a row has."""
    ends = row_ptr.to(torch.int64).clamp(0, edges)
    return (ends[1:] - ends[:-1]).clamp(min=0)


def transposed(row_ptr: Tensor, column: Tensor, edge: Tensor | None, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same edges by their column: (t_row_ptr [M + 1], t_column [E], t_edge [E])."""
    row, to, number = edges_of(row_ptr, column, edge, columns)
    nobodys = row == row_ptr.shape[0] - 1
    t_row_ptr, t_column, order = sorted_by(torch.where(nobodys, columns, to), row, columns, row_ptr.dtype)
    return t_row_ptr, t_column, number[order.long()].to(row_ptr.dtype)


# ---- samples -----------------------------------------------------------------------------------------------------


def graph(
    device: torch.device, rows: int, columns: int, edges: int, *, dtype: torch.dtype = torch.int32, hub: int = 0
) -> dict[str, Tensor]:
    """A CSR of random edges and its transpose; `hub` of the edges go to row 0, and as many more come from column 0."""
    generator = torch.Generator().manual_seed(rows + 10 * columns + 100 * edges)
    target = torch.randint(0, max(rows, 1), (edges,), generator=generator)
    source = torch.randint(0, max(columns, 1), (edges,), generator=generator)
    target[:hub], source[hub : 2 * hub] = 0, 0
    if rows > 2:
        target[target == 1] = 2  # an isolated one
    mixed = torch.randperm(edges, generator=generator)
    source, target = source[mixed], target[mixed]
    forward, backward = sorted_by(target, source, rows, dtype), sorted_by(source, target, columns, dtype)
    names = ("row_ptr", "column", "edge", "t_row_ptr", "t_column", "t_edge")
    return {name: x.to(device) for name, x in zip(names, (*forward, *backward), strict=True)}


def samples_of(device, backward):
    """Calls of the op, or of its gradient."""
    x = normal(device)

    def call(
        rows,
        columns,
        edges,
        width,
        dtype=torch.float32,
        *,
        reduce="sum",
        weight=torch.float32,
        hub=0,
        split=None,
        **named,
    ):
        csr = graph(device, rows, columns, edges, dtype=named.pop("indices", torch.int32), hub=hub)
        generator = torch.Generator().manual_seed(edges)
        share = None
        if weight is not None:
            share = (torch.rand(edges, generator=generator, dtype=torch.float32) - 0.25).to(device, weight)
        features = x(columns, width, dtype=dtype)
        named["split"] = split
        longest = {"longest": 1 << 20, "t_longest": 1 << 20} if hub else {}
        return finished(features, csr, share, {"reduce": reduce, **longest, **named})

    def finished(features, csr, share, named):
        """Rows of features from named["split"] on are a second input."""
        split, previous = named.pop("split", None), None
        if split is not None:
            features, previous = features[:split], features[split:]
        before = (features, csr["row_ptr"], csr["column"], csr["edge"], share)
        transpose = (csr["t_row_ptr"], csr["t_column"], csr["t_edge"])
        if not backward:
            return (*before, *transpose, previous), {"keep": True, **named}
        y, arg, state = message_passing_csr.op.reference(*before, previous=previous, reduce=named["reduce"], keep=True)
        grad = x(*y.shape, dtype=features.dtype, of=1)
        named.pop("longest", None)
        return (grad, *before, *transpose, arg, state, previous), named

    yield Sample("quick", *call(37, 41, 150, 16))
    for reduce in REDUCES:
        for dtype in FLOATS:
            name = f"{reduce} {c.short(dtype)}"
            for rows, columns, edges, width in (
                *((1, 1, 1, 1), (3, 2, 7, 8), (97, 89, 513, 129), (61, 67, 300, 64), (7, 5, 40, 1030)),
                *((33, 31, 129, 3), (260, 4, 90, 24)),
            ):
                yield Sample(
                    f"{name} {rows} of {columns}, {edges} edges, {width} wide",
                    *call(rows, columns, edges, width, dtype, reduce=reduce),
                )
            yield Sample(f"{name} no weights", *call(61, 67, 300, 40, dtype, reduce=reduce, weight=None))
            yield Sample(f"{name} weights like x", *call(61, 67, 300, 40, dtype, reduce=reduce, weight=dtype))
            yield Sample(f"{name} hubs", *call(50, 60, 2600, 24, dtype, reduce=reduce, hub=900))
            yield Sample(f"{name} ragged hubs", *call(5, 6, 1283, 7, dtype, reduce=reduce, hub=600))
        for dtype in FLOATS:
            two = f"{reduce} {c.short(dtype)} two inputs"
            yield Sample(two, *call(61, 67, 300, 40, dtype, reduce=reduce, split=31))
            yield Sample(f"{two}, ragged", *call(97, 89, 513, 129, dtype, reduce=reduce, split=88))
            yield Sample(f"{two}, hubs", *call(50, 60, 2600, 24, dtype, reduce=reduce, hub=900, split=1))
        yield Sample(f"{reduce} two inputs, the first empty", *call(7, 9, 40, 8, reduce=reduce, split=0))
        yield Sample(f"{reduce} two inputs, the second empty", *call(7, 9, 40, 8, reduce=reduce, split=9))
        yield Sample(f"{reduce} int64", *call(61, 67, 300, 40, reduce=reduce, indices=torch.int64))
        yield Sample(f"{reduce} int64 hubs", *call(9, 8, 1500, 36, reduce=reduce, indices=torch.int64, hub=700))
        yield Sample(f"{reduce} hubs that nobody announced", *call(9, 8, 1500, 36, reduce=reduce, hub=700, longest=0))
        yield Sample(f"{reduce} no edges", *call(5, 6, 0, 8, reduce=reduce))
        yield Sample(f"{reduce} no rows", *call(0, 6, 0, 8, reduce=reduce))
        yield Sample(f"{reduce} no nodes", *call(0, 0, 0, 8, reduce=reduce))
        yield Sample(f"{reduce} no features", *call(5, 6, 12, 0, reduce=reduce))
        yield Sample(f"{reduce} float64", *call(15, 16, 60, 8, torch.float64, reduce=reduce, weight=torch.float64))
        csr, generator = graph(device, 40, 45, 200), torch.Generator().manual_seed(1)
        share = torch.rand(400, generator=generator, dtype=torch.float32).to(device)
        wide = x(45, 80)
        for what, part in (
            ("slices", wide[:, 8:72]),
            ("misaligned", wide[:, 1:65]),
            ("transposed", x(64, 45).t()),
            ("every other row", x(90, 64)[::2]),
        ):
            yield Sample(f"{reduce} {what}", *finished(part, csr, share[::2], {"reduce": reduce}))
            yield Sample(
                f"{reduce} two inputs, {what}", *finished(part, csr, share[::2], {"reduce": reduce, "split": 20})
            )
        far = {**csr, "column": csr["column"].clone(), "t_row_ptr": csr["t_row_ptr"].clone()}
        far["column"][7], far["column"][11] = -1, 1 << 30
        far.update(
            zip(
                ("t_row_ptr", "t_column", "t_edge"),
                transposed(far["row_ptr"], far["column"], far["edge"], 45),
                strict=True,
            )
        )
        yield Sample(f"{reduce} columns outside", *finished(wide, far, share[::2], {"reduce": reduce}))
        ties = torch.ones(45, 16, device=device, dtype=torch.float32)
        yield Sample(f"{reduce} equal messages", *finished(ties, csr, None, {"reduce": reduce}))


FORWARD = ("row_ptr", "column", "edge")
TRANSPOSE = ("t_row_ptr", "t_column", "t_edge")


def samples(device):
    return samples_of(device, False)


# The kernel sums in fp32, the reference in fp64. The longest row of the samples has some 1,200 messages below 5 in
# size, whose partial sums stay below 100: 2^-24 * 100 * sqrt(1,200) = 2e-4. A half is rounded once at the end: 1 ulp
# where the sums lie on two sides of the middle. max and min select: their messages are one rounding of one product on
# both paths. An exponential on a GPU is off by 2^-21 of itself for the few units that messages are apart.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 2e-4),
        torch.bfloat16: (2.0**-7, 2e-4),
        torch.float16: (2.0**-10, 2e-4),
        torch.float64: (1e-12, 1e-12),
    }
)


# ---- forward -----------------------------------------------------------------------------------------------------


@op(samples=samples, contract=TOLERANCE)
def message_passing_csr(
    x: Tensor,
    row_ptr: Tensor,
    column: Tensor,
    edge: Tensor | None = None,
    edge_weight: Tensor | None = None,
    t_row_ptr: Tensor | None = None,
    t_column: Tensor | None = None,
    t_edge: Tensor | None = None,
    previous: Tensor | None = None,
    *,
    reduce: str = "sum",
    keep: bool = False,
    longest: int = 0,
    t_longest: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``y[i] = reduce over the places p of row i of edge_weight[edge[p]] * x[column[p]]``: message passing over a CSR.

    `message_passing` calls it with the arrays of a `GraphPlan`.

    Args:
        x: [M, F], floating: features of the nodes that messages come from.
        row_ptr: [N + 1], int32 or int64, rising within 0 to E: where each row's edges begin. Edges before the first
            and behind the last are no row's, as where it is a slice.
        column: [E], of row_ptr's dtype: where a message comes from. What is not in 0 to M - 1 (M + P - 1 with previous)
            is left out; for the mean it counts as an edge.
        edge: [E], of row_ptr's dtype, a permutation: the edge at each place, by whose number edge_weight and arguments
            know it. None: the place itself.
        edge_weight: [E], float32 or of x's dtype. None: all are 1.
        t_row_ptr: [M + 1] ([M + P + 1]), of row_ptr's dtype: the same edges by column, for the gradient. Where it,
            t_column or t_edge is None, the gradient sorts the edges.
        t_column: [E], of row_ptr's dtype: the row of each place there.
        t_edge: [E], of row_ptr's dtype: the edge of each place there.
        previous: [P, F], of x's dtype: a second input. Column M + j is its row j, so that one reduction takes messages
            from both; nothing is concatenated.
        reduce: "sum", "mean" (by the number of edges of the row), "max", "min", or "softmax": the mean of the
            messages, column by column, each with the weight exp(message), as in GENConv.
        keep: return what the gradients of max, min and softmax need, too.
        longest: the length of the longest row where it is known: rows above 256 are then shared out. A wrong number
            costs time and no correctness.
        t_longest: the same of t_row_ptr.

    Returns:
        y: [N, F], contiguous, of x's dtype. A row without edges gets zeros.
        arg: [N, F], of row_ptr's dtype, of max and min with `keep`, else [0, F]: the edge whose message was taken, of
            equal ones the first of the row; -1 without edges. A NaN counts as the greatest, and as the least.
        state: [2, N, F], float32 (float64 for float64), of softmax with `keep`, else [0, N, F]: the logarithm of the
            sum of exponentials, and y before it is rounded. It has no gradient.

    Summed in float32 (float64 for float64, and by the reference), in an order that depends on the graph, F and dtype
    alone, rounded once at the end. Duplicate edges are edges of their own. Messages of softmax are finite.

    The gradient of x, edge_weight and previous is `message_passing_csr_backward`. That of max and min goes to the edge
    in arg.

    Raises:
        TypeError: not tensors; x or edge_weight not floating; previous not of x's dtype; an index not int32 or int64,
            or of two dtypes.
        ValueError: x not [M, F]; previous not [P, F]; row_ptr not [N + 1]; column, edge and edge_weight not [E]; an
            unknown reduce; two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic); arg is equal.

    Source: Gilmer et al., Neural Message Passing for Quantum Chemistry, 2017; softmax: Li et al., DeeperGCN, 2020.
    """
    y, arg, state = reduced(both(x, previous), row_ptr, column, edge, edge_weight, reduce, keep)
    return y, arg, state.detach() if reduce == "softmax" and keep else state


def both(x: Tensor, previous: Tensor | None) -> Tensor:
    """[M + P, F]: what columns count through."""
    return x if previous is None else torch.cat((x, previous))


def summed_at(place: Tensor, values: Tensor, count: int) -> Tensor:
    """[E, ...] to [count + 1, ...]: the values of each place added up, those of nobody in the last.

    In float64, so that the contract holds a kernel against the sum and not against the order of another one.
    """
    total = values.new_zeros((count + 1, *values.shape[1:]), dtype=torch.float64)
    # index_add is of atomics on a GPU
    return total.index_put((place,), values.to(torch.float64), accumulate=True).to(values.dtype)


def reduced(
    x: Tensor,
    row_ptr: Tensor,
    column: Tensor,
    edge: Tensor | None,
    edge_weight: Tensor | None,
    reduce: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference, with a state that has a gradient: second derivatives need it."""
    wide, rows, edges = wide_of(x), row_ptr.shape[0] - 1, column.shape[0]
    row, to, number = edges_of(row_ptr, column, edge, x.shape[0])
    messages = (x.to(wide) if x.shape[0] else F.pad(x.to(wide), (0, 0, 0, 1)))[to]
    if edge_weight is not None:
        messages = edge_weight.to(wide)[number][:, None] * messages
    messages = messages.masked_fill((row == rows)[:, None], 0)
    nothing = messages.new_zeros((rows + 1, x.shape[1]))
    no_arg = row_ptr.new_empty((0, x.shape[1]))

    def summed(values: Tensor) -> Tensor:
        return summed_at(row, values, rows)

    def greatest(values: Tensor) -> Tensor:
        lowest = torch.full_like(nothing, -torch.inf)
        return lowest.scatter_reduce(0, row[:, None].expand_as(values), values, "amax")

    if reduce in ("sum", "mean"):
        y = summed(messages)[:rows]
        if reduce == "mean":
            y = y / lengths_of(row_ptr, edges).clamp(min=1)[:, None]
        return stored(y, x), no_arg, y[None][:0].clone()

    if reduce == "softmax":
        top = greatest(messages.detach())
        parts = (messages - top[row]).exp()
        total = summed(parts)[:rows]
        none = total == 0
        y = (summed(parts * messages)[:rows] / total.masked_fill(none, 1)).masked_fill(none, 0)
        lse = (top[:rows] + total.log()).masked_fill(none, 0)
        kept = torch.stack((lse, y)) if keep else y[None][:0].clone()
        return stored(y, x), no_arg, kept

    signed = messages.detach() if reduce == "max" else -messages.detach()
    best = greatest(signed)[row]
    taken = (signed == best) | signed.isnan()
    place = torch.arange(edges, device=x.device)[:, None]
    first = torch.full_like(nothing, edges, dtype=torch.int64).scatter_reduce(
        0, row[:, None].expand_as(messages), torch.where(taken, place, edges), "amin"
    )[:rows]
    y = F.pad(messages, (0, 0, 0, 1)).gather(0, first)
    arg = F.pad(number, (0, 1), value=-1)[first].to(row_ptr.dtype) if keep else no_arg
    return stored(y, x), arg, y[None][:0].clone()


def check_indices(name: str, value: Tensor, row_ptr: Tensor, shape: tuple[int | str, ...]) -> None:
    if value.dtype not in INDICES:
        raise TypeError(f"{name}: expected int32 or int64, got {c.short(value.dtype)}")
    c.same_dtype(name, value, "row_ptr", row_ptr)
    c.has_shape(name, value, shape)


def check_graph(x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, previous, reduce, **others):
    """What the op and its gradient ask alike."""
    named = {"x": x, "row_ptr": row_ptr, "column": column}
    optional = {"edge": edge, "edge_weight": edge_weight}
    optional |= {"t_row_ptr": t_row_ptr, "t_column": t_column, "t_edge": t_edge, "previous": previous}
    for name, value in {**others, **named, **{n: v for n, v in optional.items() if v is not None}}.items():
        c.is_tensor(name, value)
    if not isinstance(reduce, str):
        raise TypeError(f"reduce: expected a str, got {type(reduce).__name__}")
    c.same_device(**others, **named, **optional)
    if reduce not in REDUCES:
        raise ValueError(f"reduce: expected 'sum', 'mean', 'max', 'min' or 'softmax', got {reduce!r}")
    c.is_floating("x", x)
    c.has_shape("x", x, ("M", "F"))
    nodes = x.shape[0]
    if previous is not None:
        c.same_dtype("previous", previous, "x", x)
        c.has_shape("previous", previous, ("P", x.shape[1]))
        nodes += previous.shape[0]
    check_indices("row_ptr", row_ptr, row_ptr, ("N + 1",))
    if row_ptr.shape[0] == 0:
        raise ValueError("row_ptr: expected shape [N + 1], got [0]")
    check_indices("column", column, row_ptr, ("E",))
    if edge is not None:
        check_indices("edge", edge, row_ptr, ("E",))
        c.same_shape("edge", edge, "column", column)
    if edge_weight is not None:
        c.is_floating("edge_weight", edge_weight)
        c.has_shape("edge_weight", edge_weight, ("E",))
        c.same_shape("edge_weight", edge_weight, "column", column)
    if t_row_ptr is not None and t_column is not None and t_edge is not None:
        check_indices("t_row_ptr", t_row_ptr, row_ptr, (nodes + 1,))
        for name, value in (("t_column", t_column), ("t_edge", t_edge)):
            check_indices(name, value, row_ptr, ("E",))
            c.same_shape(name, value, "column", column)


def is_length(name: str, value: object) -> None:
    c.in_range(name, value, 0, (1 << 63) - 1)


@message_passing_csr.check
def _(
    x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, previous, *, reduce, keep, longest, t_longest
):
    c.is_bool("keep", keep)
    is_length("longest", longest)
    is_length("t_longest", t_longest)
    check_graph(x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, previous, reduce)


NEEDS = (
    c.dtype_of_or("edge_weight", "x", torch.float32),
    c.at_most("x", 1, WIDEST_ROW),
    c.at_most("column", 0, MOST_EDGES),
    *(c.unit_stride(name) for name in ("x", "row_ptr", "column", "edge", "previous")),
    c.dtype_in("x", *FLOATS),
)
message_passing_csr.kernel(needs=NEEDS)


@message_passing_csr.backward(keeps=(1, 2))
def _(saved, kept, grad, grad_arg, grad_state):
    x, reduce, weight, previous = saved["x"], saved["reduce"], saved.get("edge_weight"), saved.get("previous")
    row_ptr, column, edge = saved["row_ptr"], saved["column"], saved.get("edge")
    transpose = [saved.get(name) for name in TRANSPOSE]
    if any(part is None for part in transpose):
        nodes = x.shape[0] + (0 if previous is None else previous.shape[0])
        transpose = list(transposed(row_ptr, column, edge, nodes))
    arg, state = kept
    if reduce in ("max", "min", "softmax") and not saved["keep"]:
        with torch.no_grad():
            named = {"reduce": reduce, "keep": True, "longest": saved["longest"]}
            _, arg, state = message_passing_csr(x, row_ptr, column, edge, weight, previous=previous, **named)
    if reduce == "softmax" and torch.is_grad_enabled():  # the gradient is differentiated: its state moves with x
        state = reduced(both(x, previous), row_ptr, column, edge, weight, reduce, True)[2]
    asks = "edge_weight" in saved.wanted
    named = {"reduce": reduce, "weight_grad": asks, "t_longest": saved["t_longest"]}
    dboth, dweight = message_passing_csr_backward(
        grad, x, row_ptr, column, edge, weight, *transpose, arg, state, previous, **named
    )
    found = {"x": dboth[: x.shape[0]]}
    if previous is not None:
        found["previous"] = dboth[x.shape[0] :]
    return {**found, "edge_weight": dweight} if asks else found


@message_passing_csr.bad_calls
def bad_calls(device):
    csr = graph(device, 4, 5, 9)
    x, weight = torch.ones(5, 6, device=device), torch.ones(9, device=device)
    row_ptr, column, edge = (csr[name] for name in FORWARD)

    def bad(error, match, **changed):
        args: dict[str, Any] = {"x": x, "row_ptr": row_ptr, "column": column, "edge": edge, "edge_weight": weight}
        args |= {name: csr.get(name) for name in (*TRANSPOSE, "previous")}
        named = {name: value for name, value in changed.items() if name not in args}
        return BadCall(tuple({**args, **{n: v for n, v in changed.items() if n in args}}.values()), error, match, named)

    yield bad(TypeError, r"x: expected a torch.Tensor, got list", x=[1.0])
    yield bad(TypeError, r"row_ptr: expected a torch.Tensor, got int", row_ptr=3)
    yield bad(TypeError, r"edge_weight: expected a torch.Tensor, got int", edge_weight=3)
    yield bad(TypeError, r"x: expected a floating dtype, got int64", x=x.long())
    yield bad(TypeError, r"row_ptr: expected int32 or int64, got float32", row_ptr=row_ptr.float())
    yield bad(TypeError, r"column: expected int32 or int64, got int16", column=column.short())
    yield bad(TypeError, r"column: expected int32 like row_ptr, got int64", column=column.long())
    yield bad(TypeError, r"edge: expected int32 like row_ptr, got int64", edge=edge.long())
    yield bad(TypeError, r"t_column: expected int32 like row_ptr, got int64", t_column=csr["t_column"].long())
    yield bad(TypeError, r"edge_weight: expected a floating dtype, got int64", edge_weight=weight.long())
    yield bad(ValueError, r"x: expected shape \[M, F\], got \[6\]", x=x[0])
    yield bad(ValueError, r"row_ptr: expected shape \[N \+ 1\], got \[0\]", row_ptr=row_ptr[:0])
    yield bad(ValueError, r"column: expected shape \[E\], got \[1, 9\]", column=column[None])
    yield bad(ValueError, r"edge: expected the shape \[9\] of column, got \[8\]", edge=edge[1:])
    yield bad(ValueError, r"edge_weight: expected the shape \[9\] of column, got \[8\]", edge_weight=weight[1:])
    yield bad(ValueError, r"t_row_ptr: expected shape \[6\], got \[5\]", t_row_ptr=csr["t_row_ptr"][1:])
    yield bad(TypeError, r"previous: expected a torch.Tensor, got int", previous=3)
    yield bad(TypeError, r"previous: expected float32 like x, got float16", previous=x.half())
    yield bad(ValueError, r"previous: expected shape \[P, 6\], got \[5, 5\]", previous=x[:, 1:])
    yield bad(ValueError, r"t_row_ptr: expected shape \[11\], got \[6\]", previous=x)
    yield bad(ValueError, r"reduce: expected 'sum', .* got 'mul'", reduce="mul")
    yield bad(TypeError, r"keep: expected a bool, got int", keep=1)
    yield bad(TypeError, r"longest: expected an int, got float", longest=1.5)
    if device.type == "cuda":
        yield bad(ValueError, r"edge_weight: expected a tensor on cuda:\d like x, got cpu", edge_weight=weight.cpu())


# ---- backward ----------------------------------------------------------------------------------------------------

# dx as the forward call; a softmax's terms are up to 1 + 5 times as large. A weight's gradient is a sum of F products,
# up to 1,030 of them of up to 20 (softmax: 6 times that): 2^-24 * 100 * 6 * sqrt(1,030) = 1e-3.
GRADIENT_TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-3),
        torch.bfloat16: (2.0**-7, 1e-3),
        torch.float16: (2.0**-10, 1e-3),
        torch.float64: (1e-11, 1e-11),
    }
)


@op(samples=lambda device: samples_of(device, True), contract=GRADIENT_TOLERANCE)
def message_passing_csr_backward(
    grad: Tensor,
    x: Tensor,
    row_ptr: Tensor,
    column: Tensor,
    edge: Tensor | None,
    edge_weight: Tensor | None,
    t_row_ptr: Tensor,
    t_column: Tensor,
    t_edge: Tensor,
    arg: Tensor,
    state: Tensor,
    previous: Tensor | None = None,
    *,
    reduce: str = "sum",
    weight_grad: bool = True,
    t_longest: int = 0,
) -> tuple[Tensor, Tensor]:
    """The gradient of `message_passing_csr`: from that of y to those of x and edge_weight, through the transposed CSR.

    Args:
        grad: [N, F], of y, of x's dtype.
        x: [M, F], as the forward call had it.
        row_ptr: [N + 1], as the forward call had it.
        column: [E], as the forward call had it.
        edge: [E] or None, as the forward call had it.
        edge_weight: [E] or None, as the forward call had it.
        t_row_ptr: [M + 1] ([M + P + 1]): the same edges by column.
        t_column: [E]: the row of each place there.
        t_edge: [E]: the edge of each place there.
        arg: [N, F], as the forward call with `keep` says for max and min; else anything, [0, F].
        state: [2, N, F], as it says for softmax; else anything, [0, N, F].
        previous: [P, F] or None, as the forward call had it.
        reduce: as the forward call had it.
        weight_grad: False where edge_weight has no gradient: it is not computed then.
        t_longest: the length of the longest row of t_row_ptr where it is known.

    Returns:
        dx: [M, F] ([M + P, F]: of x, then of previous), contiguous, of x's dtype; zeros where no edge comes from.
        dweight: [E], of edge_weight's dtype, 0 for an edge that is left out. [0] without edge_weight or weight_grad.

    Sums are taken in float32 in an order that depends on the graph, F and the dtype alone: no atomics.

    Raises:
        TypeError, ValueError: as message_passing_csr; grad, arg or state is not of the shape or dtype said above.

    Contract: Tolerance (GRADIENT_TOLERANCE in the source, with its arithmetic).

    Source: the derivative of the formula of message_passing_csr.
    """
    x = both(x, previous)
    wide, rows, edges = wide_of(x), row_ptr.shape[0] - 1, column.shape[0]
    row, to, number = edges_of(row_ptr, column, edge, x.shape[0])
    nobodys = (row == rows)[:, None]
    own = (x.to(wide) if x.shape[0] else F.pad(x.to(wide), (0, 0, 0, 1)))[to]
    weight = own.new_ones((edges, 1)) if edge_weight is None else edge_weight.to(wide)[number][:, None]

    def arriving(values: Tensor) -> Tensor:
        return F.pad(values, (0, 0, 0, 1))[row]

    pull = arriving(grad.to(wide))
    if reduce == "mean":
        pull = pull / F.pad(lengths_of(row_ptr, edges), (0, 1)).clamp(min=1)[row][:, None]
    elif reduce in ("max", "min"):
        pull = pull.masked_fill(arriving(arg.to(torch.int64)) != number[:, None], 0)
    elif reduce == "softmax":
        message = weight * own
        pull = pull * (message - arriving(state[0])).exp() * (1 + message - arriving(state[1]))
    pull = pull.masked_fill(nobodys, 0)
    at = torch.where(nobodys[:, 0], x.shape[0], to)
    dx = summed_at(at, weight * pull, x.shape[0])[: x.shape[0]]
    if edge_weight is None or not weight_grad:
        return stored(dx, x), grad.new_empty((0,), dtype=torch.float32 if edge_weight is None else edge_weight.dtype)
    dots = (pull * own).sum(1)
    dweight = summed_at(torch.where(nobodys[:, 0], edges, number), dots, edges)[:edges]
    return stored(dx, x), dweight.to(edge_weight.dtype).contiguous()


@message_passing_csr_backward.check
def _(
    grad, x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, arg, state, previous, *, reduce,
    weight_grad, t_longest,
):  # fmt: skip
    c.is_bool("weight_grad", weight_grad)
    is_length("t_longest", t_longest)
    for name, value in (("t_row_ptr", t_row_ptr), ("t_column", t_column), ("t_edge", t_edge)):
        c.is_tensor(name, value)
    tensors = {"grad": grad, "arg": arg, "state": state}
    check_graph(x, row_ptr, column, edge, edge_weight, t_row_ptr, t_column, t_edge, previous, reduce, **tensors)
    shape = (row_ptr.shape[0] - 1, x.shape[1])
    c.same_dtype("grad", grad, "x", x)
    c.has_shape("grad", grad, shape)
    if reduce in ("max", "min"):
        c.same_dtype("arg", arg, "row_ptr", row_ptr)
        c.has_shape("arg", arg, shape)
    if reduce == "softmax":
        c.has_shape("state", state, (2, *shape))


def _contiguous(args: Mapping[str, Any]) -> bool:
    return args["arg"].is_contiguous() and args["state"].is_contiguous()


def _state_of_float32(args: Mapping[str, Any]) -> bool:
    return args["reduce"] != "softmax" or args["state"].dtype == torch.float32


message_passing_csr_backward.kernel(
    needs=(
        c.dtype_of_or("edge_weight", "x", torch.float32),
        c.Need("dtype", "state of softmax in float32", _state_of_float32),
        c.at_most("x", 1, WIDEST_ROW),
        c.at_most("column", 0, MOST_EDGES),
        *(
            c.unit_stride(name)
            for name in ("x", "grad", "row_ptr", "column", "edge", "t_row_ptr", "t_column", "t_edge", "previous")
        ),
        c.Need("contiguous", "arg and state contiguous", _contiguous),
        c.dtype_in("x", *FLOATS),
    )
)


@message_passing_csr_backward.bad_calls
def _(device):
    csr = graph(device, 4, 5, 9)
    x, grad = torch.ones(5, 6, device=device), torch.ones(4, 6, device=device)
    names = ("row_ptr", "column", "edge", "edge_weight", "t_row_ptr", "t_column", "t_edge")
    rest = [csr.get(name) for name in names]
    arg, state = torch.zeros(4, 6, device=device, dtype=torch.int32), torch.zeros(2, 4, 6, device=device)
    yield BadCall(([1.0], x, *rest, arg, state), TypeError, r"grad: expected a torch.Tensor, got list")
    yield BadCall((grad, x, *rest[:-1], 3, arg, state), TypeError, r"t_edge: expected a torch.Tensor, got int")
    yield BadCall((grad.half(), x, *rest, arg, state), TypeError, r"grad: expected float32 like x, got float16")
    yield BadCall((grad[1:], x, *rest, arg, state), ValueError, r"grad: expected shape \[4, 6\], got \[3, 6\]")
    most, soft = {"reduce": "max"}, {"reduce": "softmax"}
    yield BadCall((grad, x, *rest, arg[1:], state), ValueError, r"arg: expected shape \[4, 6\], got \[3, 6\]", most)
    yield BadCall((grad, x, *rest, arg.long(), state), TypeError, r"arg: expected int32 like row_ptr, got int64", most)
    yield BadCall(
        (grad, x, *rest, arg, state[1:]), ValueError, r"state: expected shape \[2, 4, 6\], got \[1, 4, 6\]", soft
    )
    asks = {"weight_grad": 1}
    yield BadCall((grad, x, *rest, arg, state), TypeError, r"weight_grad: expected a bool, got int", asks)


# ---- with a plan -------------------------------------------------------------------------------------------------


def message_passing(
    x: Tensor, plan: "GraphPlan", *, edge_weight: Tensor | None = None, reduce: str = "sum", return_arg: bool = False
) -> Any:
    """Messages ``edge_weight[e] * x[source[e]]`` of all edges, reduced at their targets: `message_passing_csr` by plan.

    Args:
        x: [N, F] ([M, F] of a bipartite plan), floating: features of the nodes that messages come from.
        plan: a `GraphPlan`, of tensors on x's device.
        edge_weight: [E], float32 or of x's dtype, in the order of plan.edge_index. None: all are 1.
        reduce: "sum", "mean", "max", "min", or "softmax": ``sum(p * m)`` over the messages m at a node, column by
            column, with ``p = exp(m) / sum(exp(m))``, as torch_geometric's SoftmaxAggregation with t = 1 has it. The
            edges' weights are in m. Attention whose edges have one logit each is a sum by edge_weight.
        return_arg: of max and min, the argument indices, too.

    Returns:
        [N, F], of x's dtype; zeros for a node at which no edge arrives. With return_arg (that, [N, F] int64): the edge
        whose message was taken, of equal ones the first in edge_index; -1 without edges.

    Deterministic, forward and backward: no atomics on floats. Differentiable in x and edge_weight.

    Raises:
        StaleIndexError: plan.edge_index was written since the plan was built.
        TypeError, ValueError: as message_passing_csr; x has not as many rows as the plan has sources; return_arg of a
            reduce that has none.
    """
    plan.check()
    c.is_tensor("x", x)
    c.has_shape("x", x, (plan.num_sources, "F"))
    return by_plan(x, None, plan, edge_weight, reduce, return_arg)


def spatiotemporal_message_passing(
    x: Tensor,
    previous: Tensor,
    plan: "SpatioTemporalPlan",
    *,
    edge_weight: Tensor | None = None,
    reduce: str = "sum",
    return_arg: bool = False,
) -> Any:
    """Messages along spatial edges from x and along temporal ones from previous, in one reduction at each node of now.

    ``y[i] = reduce over both kinds of edges e at i of edge_weight[e] * (x or previous)[source[e]]``: for sums, what
    arrives from neighbours now and from the step before; a mean is by all edges of both kinds, a maximum of both.

    Args:
        x: [N, F], floating: features of now.
        previous: [P, F], of x's dtype: features of the step before.
        plan: a `SpatioTemporalPlan`, of tensors on x's device.
        edge_weight: [S + T], float32 or of x's dtype: spatial edges, then temporal ones. None: all are 1.
        reduce: as message_passing.
        return_arg: of max and min, the argument indices, too.

    Returns:
        [N, F], of x's dtype; zeros for a node at which no edge arrives. With return_arg (that, [N, F] int64): the edge
        whose message was taken, below S a spatial one; of equal ones the first; -1 without edges.

    One launch forward, and one for the gradients of x and previous together, where no node has more than 256 edges; the
    two inputs are read where they are. Deterministic; differentiable in x, previous and edge_weight.

    Raises:
        StaleIndexError: the plan's edges were written since it was built.
        TypeError, ValueError: as message_passing_csr; x or previous has not as many rows as the plan says; return_arg
            of a reduce that has none.
    """
    plan.check()
    c.is_tensor("x", x)
    c.is_tensor("previous", previous)
    c.has_shape("x", x, (plan.num_nodes, "F"))
    c.has_shape("previous", previous, (plan.num_previous, x.shape[1]))
    return by_plan(x, previous, plan, edge_weight, reduce, return_arg)


def by_plan(
    x: Tensor,
    previous: Tensor | None,
    plan: "GraphPlan | SpatioTemporalPlan",
    edge_weight: Tensor | None,
    reduce: str,
    return_arg: bool,
) -> Any:
    if return_arg and reduce not in ("max", "min"):
        raise ValueError(f"return_arg: expected reduce 'max' or 'min', got {reduce!r}")
    inputs = [value for value in (x, previous, edge_weight) if isinstance(value, Tensor)]
    learns = torch.is_grad_enabled() and any(value.requires_grad for value in inputs)
    edge = None if plan.in_order else plan.edge
    y, arg, _ = message_passing_csr(
        x,
        *(plan.row_ptr, plan.column, edge, edge_weight, plan.t_row_ptr, plan.t_column, plan.t_edge, previous),
        reduce=reduce,
        keep=bool(return_arg or learns),
        longest=plan.longest,
        t_longest=plan.t_longest,
    )
    return (y, arg.to(torch.int64)) if return_arg else y
