"""Message passing against NumPy in float64 edge by edge, the plan and its staleness, hubs, ties, and gradients."""

from __future__ import annotations

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch

import prequal
from compiled_once import is_compiled_once
from prequal.graph import GraphPlan, SpatioTemporalPlan

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCES = ("sum", "mean", "max", "min", "softmax")
EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def random_graph(device, nodes, edges, *, hub=0, dtype=torch.int64, seed=0):
    """[2, E]: `hub` edges go to node 0 and as many come from node 1; nothing arrives at the last node but loops."""
    generator = torch.Generator().manual_seed(nodes + 10 * edges + seed)
    edge_index = torch.randint(0, nodes, (2, edges), generator=generator)
    edge_index[1, :hub], edge_index[0, hub : 2 * hub] = 0, min(1, nodes - 1)
    edge_index[1][edge_index[1] == nodes - 1] = 0
    return edge_index[:, torch.randperm(edges, generator=generator)].to(device, dtype)


def features(device, nodes, width, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(nodes + width + seed)
    return torch.randn(nodes, width, generator=generator).to(device, dtype)


def weights_of(device, edges, dtype=torch.float32):
    return (torch.rand(edges, generator=torch.Generator().manual_seed(edges)) + 0.1).to(device, dtype)


def by_numpy(x, edge_index, weight, reduce):
    """Node by node: the formulas as they are written."""
    x, (source, target) = x.detach().double().cpu().numpy(), edge_index.cpu().numpy()
    weight = np.ones(len(source)) if weight is None else weight.detach().double().cpu().numpy()
    y = np.zeros_like(x)
    for node in range(len(x)):
        mine = np.nonzero(target == node)[0]
        if not len(mine):
            continue
        messages = weight[mine, None] * x[source[mine]]
        if reduce == "softmax":
            share = np.exp(messages - messages.max(0))
            y[node] = (share * messages).sum(0) / share.sum(0)
        else:
            y[node] = getattr(messages, reduce)(0)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    ("nodes", "edges", "width", "hub"),
    [(1, 1, 1, 0), (7, 31, 8, 0), (101, 997, 33, 0), (60, 2500, 64, 800), (3, 1031, 5, 300), (50, 400, 1032, 0)],
)
def test_it_is_near_numpys_reduction_in_float64(device, nodes, edges, width, hub, reduce, dtype):
    edge_index, x = random_graph(device, nodes, edges, hub=hub), features(device, nodes, width, dtype)
    weight = weights_of(device, edges)
    got = prequal.message_passing(x, GraphPlan(edge_index, nodes), edge_weight=weight, reduce=reduce)
    want = by_numpy(x, edge_index, weight, reduce)
    # half an ulp of the result, and float32 sums of up to 1,300 messages of up to 5: as the op's own tolerance
    np.testing.assert_allclose(got.double().cpu().numpy(), want, rtol=1.01 * EPSILON[dtype] + 1e-5, atol=2e-4)
    if device.type == "cuda":
        assert prequal.stats()["message_passing_csr"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("reduce", REDUCES)
def test_a_node_at_which_nothing_arrives_gets_zeros(device, reduce):
    x = features(device, 5, 16) + 3
    plan = GraphPlan(torch.tensor([[4, 1], [0, 0]], device=device), 5)
    got = prequal.message_passing(x, plan, reduce=reduce)
    assert (got[0] != 0).all()
    assert torch.equal(got[1:], torch.zeros_like(got[1:]))


def test_duplicate_edges_and_loops_count_as_edges(device):
    edge_index = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]], device=device)
    x = torch.tensor([[1.0, 2.0], [10.0, 20.0]], device=device)
    plan = GraphPlan(edge_index, 2)
    assert prequal.message_passing(x, plan).tolist() == [[10.0, 20.0], [12.0, 24.0]]
    assert prequal.message_passing(x, plan, reduce="mean").tolist() == [[10.0, 20.0], [4.0, 8.0]]


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_arguments_are_places_in_edge_index_and_ties_go_to_the_first(device, reduce, dtype):
    edge_index = random_graph(device, 30, 700, hub=300, dtype=dtype)
    x = features(device, 30, 24).round()
    y, arg = prequal.message_passing(x, GraphPlan(edge_index, 30), reduce=reduce, return_arg=True)
    assert arg.dtype == torch.int64
    source, target = edge_index.long()
    for node in range(30):
        mine = (target == node).nonzero()[:, 0]
        if not len(mine):
            assert (arg[node] == -1).all()
            continue
        best = getattr(x[source[mine]], f"a{reduce}")(0)
        first = mine[(x[source[mine]] == best).int().argmax(0)]
        assert torch.equal(y[node], best)
        assert torch.equal(arg[node], first)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_the_first_nan_is_taken(device, reduce):
    x = torch.tensor([[1.0], [torch.nan], [5.0], [torch.nan]], device=device)
    edge_index = torch.tensor([[0, 3, 2, 1], [0, 0, 0, 0]], device=device)
    y, arg = prequal.message_passing(x, GraphPlan(edge_index, 4), reduce=reduce, return_arg=True)
    assert y[0].isnan().all()
    assert arg[0].tolist() == [1]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sums_are_float32s(device, reduce):
    """4,096 ones in float16 end at 2,048 where they are added in float16."""
    edge_index = torch.zeros(2, 4096, dtype=torch.int64, device=device)
    x = torch.ones(1, 8, device=device, dtype=torch.float16)
    got = prequal.message_passing(x, GraphPlan(edge_index, 1), reduce=reduce)
    assert (got == (4096 if reduce == "sum" else 1)).all()


def test_large_messages_do_not_overflow_a_softmax(device):
    edge_index = torch.tensor([[0, 1, 2], [0, 0, 0]], device=device)
    x = torch.tensor([[1000.0], [999.0], [-1000.0]], device=device)
    got = prequal.message_passing(x, GraphPlan(edge_index, 3), reduce="softmax")
    share = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(got[0].item(), 1000 * share + 999 * (1 - share), rtol=1e-6)


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_first_and_second_are_those_of_finite_differences(reduce):
    edge_index = random_graph(torch.device("cpu"), 6, 25)
    plan = GraphPlan(edge_index, 6)
    x = features(edge_index.device, 6, 3).double().requires_grad_()
    weight = weights_of(edge_index.device, 25).double().requires_grad_()

    def call(x, weight):
        return prequal.message_passing(x, plan, edge_weight=weight, reduce=reduce)

    assert torch.autograd.gradcheck(call, (x, weight))
    assert torch.autograd.gradgradcheck(call, (x, weight))


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_with_and_without_a_plan_are_the_same(device, reduce):
    """Without the transpose the gradient sorts the edges; without `keep` it makes the state again."""
    plan = GraphPlan(random_graph(device, 40, 900, hub=300), 40)
    weight, grad = weights_of(device, 900).requires_grad_(), features(device, 40, 32, seed=1)
    x = features(device, 40, 32).requires_grad_()
    whole = prequal.message_passing(x, plan, edge_weight=weight, reduce=reduce)
    bare = prequal.message_passing_csr(x, plan.row_ptr, plan.column, plan.edge, weight, reduce=reduce)[0]
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), grad) for y in (whole, bare)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("width", "hub"), [(64, 0), (33, 700), (64, 700)])
def test_the_gradients_of_a_kernel_are_near_float64(device, dtype, reduce, width, hub):
    plan = GraphPlan(random_graph(device, 50, 2000, hub=hub), 50)
    x, grad = features(device, 50, width, dtype), features(device, 50, width, dtype, seed=1)
    weight = weights_of(device, 2000)
    found = []
    for wide in (False, True):
        inputs = [(y.double() if wide else y.clone()).requires_grad_() for y in (x, weight)]
        y = prequal.message_passing(inputs[0], plan, edge_weight=inputs[1], reduce=reduce)
        found.append(torch.autograd.grad(y, inputs, grad.to(y.dtype)))
    (dx, dweight), (want, want_weight) = found
    np.testing.assert_allclose(
        dx.double().cpu(), want.cpu(), rtol=1.01 * EPSILON[dtype] + 1e-5, atol=1e-3 if hub else 2e-4
    )
    np.testing.assert_allclose(dweight.double().cpu(), want_weight.cpu(), rtol=1e-5, atol=1e-3)


def test_the_gradient_of_a_maximum_goes_to_its_argument(device):
    edge_index = torch.tensor([[0, 1, 2], [3, 3, 3]], device=device)
    x = torch.tensor([[1.0], [7.0], [7.0], [0.0]], device=device, requires_grad=True)
    prequal.message_passing(x, GraphPlan(edge_index, 4), reduce="max").sum().backward()
    assert x.grad.flatten().tolist() == [0.0, 1.0, 0.0, 0.0]


def test_only_the_gradients_that_are_asked_for_are_computed(device):
    plan = GraphPlan(random_graph(device, 9, 40), 9)
    x, weight = features(device, 9, 8).requires_grad_(), weights_of(device, 40)
    prequal.message_passing(x, plan, edge_weight=weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_no_value_in_the_indices_makes_a_call_read_outside(device):
    x, weight = features(device, 8, 16), weights_of(device, 300)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.int32, torch.int64):
        bound = torch.iinfo(dtype).max
        wild = [torch.randint(-bound, bound, (n,), generator=generator).to(device, dtype) for n in (7, 300, 300)]
        for reduce in REDUCES:
            y, _, _ = prequal.message_passing_csr(x, *wild, weight, reduce=reduce, keep=True, longest=1000)
            assert y.shape == (6, 16)
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- the plan ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_plan_has_every_edge_once_in_both_orders(device, dtype):
    edge_index = random_graph(device, 23, 211, dtype=dtype)
    plan = GraphPlan(edge_index, 23)
    for row_ptr, column, edge, key, other in (
        (plan.row_ptr, plan.column, plan.edge, edge_index[1], edge_index[0]),
        (plan.t_row_ptr, plan.t_column, plan.t_edge, edge_index[0], edge_index[1]),
    ):
        assert torch.equal(edge.sort().values.long(), torch.arange(211, device=device))
        rows = torch.repeat_interleave(torch.arange(23, device=device), row_ptr.diff().long())
        assert torch.equal(key[edge.long()].long(), rows)
        assert torch.equal(other[edge.long()].long(), column.long())
        assert all((part.diff() > 0).all() for part in edge.split(row_ptr.diff().tolist()))  # stable
    assert plan.longest == int(plan.row_ptr.diff().max())
    assert plan.t_longest == int(plan.t_row_ptr.diff().max())


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("hub", [0, 600])
def test_edges_that_come_in_order_have_the_bits_of_those_that_are_sorted(device, reduce, hub):
    edge_index, x = random_graph(device, 40, 1700, hub=hub), features(device, 40, 32).requires_grad_()
    weight = weights_of(device, 1700).requires_grad_()
    plan = GraphPlan(edge_index, 40)
    order = plan.edge.long()
    in_order, its_weight = GraphPlan(edge_index[:, order], 40), weight.detach()[order].requires_grad_()
    assert (plan.in_order, in_order.in_order) == (False, True)
    got = prequal.message_passing(x, in_order, edge_weight=its_weight, reduce=reduce)
    want = prequal.message_passing(x, plan, edge_weight=weight, reduce=reduce)
    assert torch.equal(got, want)
    grad = features(device, 40, 32, seed=1)
    dx, dweight = torch.autograd.grad(got, (x, its_weight), grad)
    want_dx, want_dweight = torch.autograd.grad(want, (x, weight), grad)
    # the transpose has them in another order
    torch.testing.assert_close(dx, want_dx, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(dweight, want_dweight[order], rtol=1e-5, atol=1e-3)


def test_arguments_of_edges_in_order_are_their_places(device):
    edge_index = torch.tensor([[2, 0, 1, 0], [0, 0, 2, 2]], device=device)
    plan = GraphPlan(edge_index, 3)
    assert plan.in_order
    y, arg = prequal.message_passing(
        torch.tensor([[1.0], [5.0], [3.0]], device=device), plan, reduce="max", return_arg=True
    )
    assert y.tolist() == [[3.0], [0.0], [5.0]]
    assert arg.tolist() == [[0], [-1], [2]]


def test_degree_bins_count_every_node(device):
    plan = GraphPlan(torch.tensor([[0] * 9, [1, 2, 2, 3, 3, 3, 3, 3, 4]], device=device), 6)
    bins = plan.degree_bins()
    assert bins[:5].tolist() == [2, 2, 1, 1, 0]
    assert bins.sum() == 6


def test_a_write_to_the_edges_makes_a_plan_stale_until_it_is_rebuilt(device):
    edge_index = random_graph(device, 9, 40)
    plan, x = GraphPlan(edge_index, 9), features(device, 9, 8)
    edge_index[1] = 3
    with pytest.raises(prequal.StaleIndexError, match=r"edge_index: .* rebuild"):
        prequal.message_passing(x, plan)
    plan.rebuild()
    torch.testing.assert_close(prequal.message_passing(x, plan)[3], x[edge_index[0]].sum(0), rtol=1e-5, atol=1e-4)


def test_the_memory_of_the_edges_is_kept_until_a_rebuild():
    """What `.data =` takes away would be handed out again, and other edges at the same address pass for the old."""
    array = np.zeros((2, 40), np.int64)
    kept = weakref.ref(array)
    edge_index = torch.from_numpy(array)
    del array
    plan = GraphPlan(edge_index, 9)
    edge_index.data = torch.ones(2, 40, dtype=torch.int64)
    assert kept() is not None
    plan.rebuild()
    assert kept() is None


def test_a_cached_plan_is_that_of_the_tensors_version(device):
    edge_index = random_graph(device, 9, 40)
    plan = GraphPlan.cached(edge_index, 9)
    assert GraphPlan.cached(edge_index, 9) is plan
    assert GraphPlan.cached(edge_index, 10) is not plan
    edge_index[0] = 0
    again = GraphPlan.cached(edge_index, 9)
    assert again is not plan
    again.check()


def test_a_plan_of_nothing_answers(device):
    nothing = torch.zeros(2, 0, dtype=torch.int64, device=device)
    for nodes in (0, 5):
        plan = GraphPlan(nothing, nodes)
        assert (plan.longest, plan.t_longest) == (0, 0)
        for reduce in REDUCES:
            assert torch.equal(
                prequal.message_passing(torch.ones(nodes, 4, device=device), plan, reduce=reduce),
                torch.zeros(nodes, 4, device=device),
            )


def test_copies_and_pickles_are_built_anew(device):
    plan = GraphPlan(random_graph(device, 9, 40), 9)
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert torch.equal(other.column, plan.column)
        other.check()
    assert repr(plan).startswith("GraphPlan(9 nodes, 40 edges on ")


@pytest.mark.parametrize(
    ("edge_index", "nodes", "error", "match"),
    [
        ([[0]], 1, TypeError, r"edge_index: expected a torch.Tensor, got list"),
        (torch.zeros(2, 3), 1, TypeError, r"edge_index: expected int32 or int64, got float32"),
        (torch.zeros(3, 2, dtype=torch.int64), 1, ValueError, r"edge_index: expected shape \[2, E\], got \[3, 2\]"),
        (torch.tensor([[0], [4]]), 4, ValueError, r"edge_index: expected nodes in 0 to 3, got 4 to 4"),
        (torch.tensor([[-1], [0]]), 4, ValueError, r"edge_index: expected nodes in 0 to 3, got -1 to -1"),
        (torch.tensor([[0, 1], [3, 9]]), 4, ValueError, r"edge_index: expected nodes in 0 to 3, got 3 to 9"),
        # 1 in the 32 bits that the plan keeps
        (torch.tensor([[2**32 + 1], [0]]), 4, ValueError, r"expected nodes in 0 to 3, got 4294967297 to 4294967297"),
        (torch.tensor([[0], [0]]), -1, ValueError, r"num_nodes: expected 0 to "),
        (torch.tensor([[0], [0]]), 1.5, TypeError, r"num_nodes: expected an int, got float"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(edge_index, nodes, error, match):
    with pytest.raises(error, match=match):
        GraphPlan(edge_index, nodes)


def test_a_wrong_call_by_plan_says_what_is_wrong(device):
    plan = GraphPlan(random_graph(device, 9, 40), 9)
    with pytest.raises(ValueError, match=r"x: expected shape \[9, F\], got \[8, 4\]"):
        prequal.message_passing(torch.ones(8, 4, device=device), plan)
    with pytest.raises(ValueError, match=r"return_arg: expected reduce 'max' or 'min', got 'sum'"):
        prequal.message_passing(torch.ones(9, 4, device=device), plan, return_arg=True)


# ---- two inputs --------------------------------------------------------------------------------------------------


def two_steps(device, nodes, before, spatial, temporal, *, hub=0):
    """Spatial edges among `nodes`, temporal ones from `before` others; `hub` of each kind go to node 0."""
    generator = torch.Generator().manual_seed(nodes + spatial)
    found = []
    for sources, edges in ((nodes, spatial), (before, temporal)):
        ends = torch.stack([torch.randint(0, n, (edges,), generator=generator) for n in (sources, nodes)])
        ends[1, :hub] = 0
        found.append(ends.to(device))
    return SpatioTemporalPlan(*found, nodes, before)


def as_one_graph(plan, x, previous):
    """The same messages in one graph of N + P nodes, of which the P have no edges that arrive."""
    shift = torch.tensor([[plan.num_nodes], [0]], device=x.device)
    edges = torch.cat((plan.spatial_edge_index, plan.temporal_edge_index + shift), 1)
    return torch.cat((x, previous)), edges


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    ("nodes", "before", "spatial", "temporal", "width", "hub"),
    [(1, 1, 1, 1, 1, 0), (53, 31, 400, 97, 33, 0), (40, 61, 1500, 1400, 64, 700), (7, 3, 0, 20, 8, 0)],
)
def test_two_inputs_are_near_numpys_reduction_over_both(
    device, nodes, before, spatial, temporal, width, hub, reduce, dtype
):
    plan = two_steps(device, nodes, before, spatial, temporal, hub=hub)
    x, previous = features(device, nodes, width, dtype), features(device, before, width, dtype, seed=1)
    weight = weights_of(device, spatial + temporal)
    got = prequal.spatiotemporal_message_passing(x, previous, plan, edge_weight=weight, reduce=reduce)
    everything, edges = as_one_graph(plan, x, previous)
    want = by_numpy(everything, edges, weight, reduce)[:nodes]
    # as of one input
    np.testing.assert_allclose(got.double().cpu().numpy(), want, rtol=1.01 * EPSILON[dtype] + 1e-5, atol=2e-4)
    if device.type == "cuda":
        assert prequal.stats()["message_passing_csr"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("hub", [0, 600])
def test_two_inputs_have_the_bits_and_gradients_of_their_concatenation(device, reduce, hub):
    plan = two_steps(device, 40, 30, 900, 800, hub=hub)
    x, previous = (features(device, n, 32, seed=n).requires_grad_() for n in (40, 30))
    weight, grad = weights_of(device, 1700).requires_grad_(), features(device, 40, 32, seed=2)
    two = prequal.spatiotemporal_message_passing(x, previous, plan, edge_weight=weight, reduce=reduce)
    everything, edges = as_one_graph(plan, x, previous)
    one = prequal.message_passing(everything, GraphPlan(edges, 70), edge_weight=weight, reduce=reduce)[:40]
    assert torch.equal(two, one)
    inputs = (x, previous, weight)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (two, one)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_of_two_inputs_are_those_of_finite_differences(reduce):
    plan = two_steps(torch.device("cpu"), 5, 4, 12, 9)
    x, previous = (features(torch.device("cpu"), n, 3).double().requires_grad_() for n in (5, 4))
    weight = weights_of(torch.device("cpu"), 21).double().requires_grad_()

    def call(x, previous, weight):
        return prequal.spatiotemporal_message_passing(x, previous, plan, edge_weight=weight, reduce=reduce)

    assert torch.autograd.gradcheck(call, (x, previous, weight))
    assert torch.autograd.gradgradcheck(call, (x, previous, weight))


def test_a_mean_of_two_inputs_is_by_all_edges_and_arguments_count_them_through(device):
    spatial, temporal = torch.tensor([[1], [0]], device=device), torch.tensor([[0, 0, 1], [0, 0, 1]], device=device)
    plan = SpatioTemporalPlan(spatial, temporal, 2)
    x, previous = torch.tensor([[1.0], [2.0]], device=device), torch.tensor([[5.0], [7.0]], device=device)
    assert prequal.spatiotemporal_message_passing(x, previous, plan, reduce="mean").tolist() == [[4.0], [7.0]]
    y, arg = prequal.spatiotemporal_message_passing(x, previous, plan, reduce="max", return_arg=True)
    assert y.tolist() == [[5.0], [7.0]]
    assert arg.tolist() == [[1], [3]]


def test_a_write_to_either_kind_of_edges_makes_a_plan_stale(device):
    x = features(device, 9, 8)
    for name in ("spatial_edge_index", "temporal_edge_index"):
        plan = two_steps(device, 9, 9, 30, 20)
        getattr(plan, name)[1] = 3
        with pytest.raises(prequal.StaleIndexError, match=rf"{name}: .* rebuild"):
            prequal.spatiotemporal_message_passing(x, x, plan)
        plan.rebuild()
        prequal.spatiotemporal_message_passing(x, x, plan)


def test_copies_and_pickles_of_both_kinds_are_built_anew(device):
    plan = two_steps(device, 9, 5, 30, 20)
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert torch.equal(other.column, plan.column)
        assert (other.num_nodes, other.num_previous) == (9, 5)
    assert repr(plan).startswith("SpatioTemporalPlan(9 nodes after 5, 30 + 20 edges on ")


@pytest.mark.parametrize(
    ("spatial", "temporal", "nodes", "error", "match"),
    [
        ([[0]], torch.zeros(2, 1, dtype=torch.int64), (1,), TypeError, r"spatial_edge_index: expected a torch.Tensor"),
        (
            torch.zeros(2, 1, dtype=torch.int64),
            torch.zeros(2, 1, dtype=torch.int32),
            (1,),
            TypeError,
            r"temporal_edge_index: expected int64 like spatial_edge_index, got int32",
        ),
        (
            torch.tensor([[3], [0]]),
            torch.tensor([[0], [0]]),
            (3, 9),
            ValueError,
            r"spatial_edge_index: expected nodes in 0 to 2, got 3 to 3",
        ),
        (
            torch.tensor([[0], [0]]),
            torch.tensor([[4], [0]]),
            (9, 4),
            ValueError,
            r"temporal_edge_index: expected nodes in 0 to 3, got 4 to 4",
        ),
        (torch.tensor([[0], [0]]), torch.tensor([[0], [0]]), (1, -1), ValueError, r"num_previous: expected 0 to "),
    ],
)
def test_a_wrong_plan_of_two_inputs_says_what_is_wrong(spatial, temporal, nodes, error, match):
    with pytest.raises(error, match=match):
        SpatioTemporalPlan(spatial, temporal, *nodes)


def test_a_wrong_call_of_two_inputs_says_what_is_wrong(device):
    plan, x = two_steps(device, 9, 5, 30, 20), torch.ones(9, 4, device=device)
    for previous, error, match in (
        (x, ValueError, r"previous: expected shape \[5, 4\], got \[9, 4\]"),
        (x[:5].half(), TypeError, r"previous: expected float32 like x, got float16"),
        ([1.0], TypeError, r"previous: expected a torch.Tensor, got list"),
    ):
        with pytest.raises(error, match=match):
            prequal.spatiotemporal_message_passing(x, previous, plan)
    with pytest.raises(ValueError, match=r"edge_weight: expected the shape \[50\] of column, got \[30\]"):
        prequal.spatiotemporal_message_passing(x, x[:5], plan, edge_weight=torch.ones(30, device=device))


@pytest.mark.parametrize("reduce", REDUCES)
def test_a_bipartite_plan_counts_sources_and_targets_apart(device, reduce):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.stack([torch.randint(0, n, (60,), generator=generator) for n in (31, 8)]).to(device)
    x = features(device, 31, 16).requires_grad_()
    got = prequal.message_passing(x, GraphPlan(edge_index, 8, 31), reduce=reduce)
    want = prequal.message_passing(x, GraphPlan(edge_index, 31), reduce=reduce)
    assert torch.equal(got, want[:8])
    for a, b in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_plan_that_inference_mode_built_serves_training(device):
    edge_index, x = random_graph(device, 9, 40), features(device, 9, 8).requires_grad_()
    with torch.inference_mode():
        plan = GraphPlan(edge_index, 9)
    prequal.message_passing(x, plan, reduce="max").sum().backward()
    assert x.grad is not None


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
def test_arrays_of_a_plan_are_compiled_once_for_every_size(device, reduce, asks):
    def call(x, weight, *arrays):
        return prequal.message_passing_csr(x, *arrays[:3], weight, *arrays[3:], reduce=reduce, keep=True)[:2]

    def sizes():
        for nodes, edges, width in ((7, 30, 4), (12, 61, 5), (20, 90, 9)):
            plan = GraphPlan(random_graph(device, nodes, edges), nodes)
            x, weight = features(device, nodes, width), weights_of(device, edges)
            arrays = (plan.row_ptr, plan.column, plan.edge, plan.t_row_ptr, plan.t_column, plan.t_edge)
            yield x.requires_grad_(asks), weight.requires_grad_(asks), *arrays

    is_compiled_once(call, sizes())


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("begin", [0, 1, 77, 127, 128, 129, 300])
@pytest.mark.parametrize("lengths", [(700, 3, 400), (2, 700, 0, 300), (0, 0, 300), (257,), (256, 900)])
def test_rows_that_begin_within_the_edges_are_those_of_the_rest(device, begin, lengths, reduce):
    """Some rows of a larger graph: row_ptr is a slice, all edges are there, and the first row may be a long one."""
    ends = begin + torch.tensor([0, *lengths]).cumsum(0)
    edges, width = int(ends[-1]) + 190, 24
    column = torch.randint(0, 50, (edges,), generator=torch.Generator().manual_seed(edges), dtype=torch.int32)
    x, column, row_ptr = features(device, 50, width), column.to(device), ends.to(device, torch.int32)
    weight = weights_of(device, edges)
    named = {"reduce": reduce, "keep": True, "longest": max(lengths)}
    y, arg, _ = prequal.message_passing_csr(x, row_ptr, column, None, weight, **named)
    rest = slice(begin, int(ends[-1]))
    want, its, _ = prequal.message_passing_csr.op.reference(
        x, row_ptr - begin, column[rest], None, weight[rest], reduce=reduce, keep=True
    )
    torch.testing.assert_close(y, want, rtol=1e-5, atol=2e-4)
    assert torch.equal(arg, torch.where(its < 0, -1, its + begin))


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", REDUCES)
def test_message_passing_has_the_same_bits_in_every_run(cuda, reduce):
    plan = GraphPlan(random_graph(cuda, 5003, 60_000, hub=20_000), 5003)
    x, grad = features(cuda, 5003, 64, torch.bfloat16), features(cuda, 5003, 64, torch.bfloat16, seed=1)
    weight = weights_of(cuda, 60_000)
    runs = []
    for _ in range(3):
        inputs = [y.clone().requires_grad_() for y in (x, weight)]
        y = prequal.message_passing(inputs[0], plan, edge_weight=inputs[1], reduce=reduce)
        runs.append((y, *torch.autograd.grad(y, inputs, grad)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", REDUCES)
def test_a_hub_of_a_million_edges_is_near_float64(cuda, reduce):
    edges = 1_000_003
    edge_index = random_graph(cuda, 2003, edges, hub=500_000)
    edge_index[1] = torch.where(edge_index[1] % 3 == 0, edge_index[1], 0)
    x, weight = features(cuda, 2003, 16), weights_of(cuda, edges)
    plan = GraphPlan(edge_index, 2003)
    got = prequal.message_passing(x, plan, edge_weight=weight, reduce=reduce)
    want = prequal.message_passing(x.double(), plan, edge_weight=weight.double(), reduce=reduce)
    # pieces of 128 edges, then 7,800 of them in turns of 32 teams: 2^-24 of partial sums below 5,000, 300 times
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2.0**-24 * 5000 * 300)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.float32), (33, torch.float32), (40, torch.bfloat16)])
def test_many_rows_and_their_gradients_are_near_float64(cuda, reduce, width, dtype):
    """More rows than get a warp each: several share one, long ones and empty ones beside each other."""
    nodes, edges = 40_009, 300_007
    plan = GraphPlan(random_graph(cuda, nodes, edges, hub=1500), nodes)
    x, grad = features(cuda, nodes, width, dtype), features(cuda, nodes, width, dtype, seed=1)
    weight = torch.exp2((8 * weights_of(cuda, edges)).floor() - 7)  # products are exact: both choose the same maximum
    found = []
    for wide in (False, True):

        def cast(y, wide=wide):
            return y.double() if wide else y.clone()

        inputs = [cast(y).requires_grad_() for y in (x, weight)]
        y = prequal.message_passing(inputs[0], plan, edge_weight=inputs[1], reduce=reduce)
        found.append((y, *torch.autograd.grad(y, inputs, cast(grad))))
    assert prequal.stats()["message_passing_csr"][str(cuda)]["fast"] > 0
    # half an ulp of the result; messages below 10, so that a softmax's gradients are sums of terms below 2 * 5 * 11
    # and, for a weight, of 64 of them below 5 * 5 * 11: 2^-21 of an exponential, 64 times in a random walk
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1.01 * EPSILON[dtype] + 1e-5, atol=5e-3)


@pytest.mark.gpu
def test_a_planned_call_is_captured_and_replayed_on_new_features(cuda):
    plan = GraphPlan(random_graph(cuda, 300, 4000, hub=900), 300)
    x = features(cuda, 300, 48)
    prequal.message_passing(x, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = prequal.message_passing(x, plan)
    x.copy_(features(cuda, 300, 48, seed=9))
    graph.replay()
    torch.testing.assert_close(y, prequal.message_passing(x, plan), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("longest", [0, 1025])
def test_edges_past_two_to_the_31_are_reached(cuda, longest):
    """Rows of 1,025 edges, whole and shared out. All come from node 0, those of the last row from node 1."""
    each = 1025
    rows = 2**31 // each + 3
    edges = rows * each
    if torch.cuda.mem_get_info(cuda)[0] < 12 * edges:
        pytest.skip("not enough GPU memory")
    column = torch.zeros(edges, dtype=torch.int64, device=cuda)
    column[-each:] = 1
    row_ptr = torch.arange(rows + 1, device=cuda) * each
    x = torch.tensor([[1.0] * 4, [3.0] * 4], device=cuda)
    total = prequal.message_passing_csr(x, row_ptr, column, longest=longest)[0]
    assert (total[:-1] == each).all()
    assert (total[-1] == 3 * each).all()
    most, arg, _ = prequal.message_passing_csr(x, row_ptr, column, reduce="max", keep=True, longest=longest)
    assert (most[-1] == 3).all()
    assert torch.equal(arg[:, 0], row_ptr[:-1])
    assert prequal.stats()["message_passing_csr"][str(cuda)] == {"fast": 2, "reference": {}}


def test_a_plan_is_of_no_transform_and_its_numbers_of_nodes_cannot_be_changed(device):
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]], device=device)
    with pytest.raises(TypeError, match=r"edge_index: expected a tensor of no torch\.func transform, got one"):
        torch.vmap(lambda e: prequal.GraphPlan(e, 3).row_ptr)(edges.expand(2, 2, 3))
    plan = prequal.GraphPlan(edges, 3)
    for name in ("num_nodes", "num_sources"):
        with pytest.raises(AttributeError):
            setattr(plan, name, 9)
