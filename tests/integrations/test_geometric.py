"""prequal.patch_geometric on the real classes of torch_geometric: what layers compute, keep, and hand back."""

from __future__ import annotations

import concurrent.futures
import copy
import logging
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn

import prequal

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, while torch_geometric is imported
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv
    from torch_geometric.nn.aggr import SoftmaxAggregation

from prequal.integrations import geometric

# torch_geometric's own, on a GPU: another package would be faster
pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")

NODES, EDGES, WIDTH = 37, 200, 24

LAYERS = {
    "GCN": lambda: GCNConv(WIDTH, 16),
    "GCN improved": lambda: GCNConv(WIDTH, 16, improved=True),
    "GCN cached": lambda: GCNConv(WIDTH, 16, cached=True),
    "GCN as it is": lambda: GCNConv(WIDTH, 16, normalize=False),
    "GCN max": lambda: GCNConv(WIDTH, 16, aggr="max"),
    "SAGE mean": lambda: SAGEConv(WIDTH, 16),
    "SAGE max": lambda: SAGEConv(WIDTH, 16, aggr="max"),
    "SAGE min": lambda: SAGEConv(WIDTH, 16, aggr="min", project=True),
    "SAGE sum": lambda: SAGEConv(WIDTH, 16, aggr="add", normalize=True),
    "SAGE softmax": lambda: SAGEConv(WIDTH, 16, aggr=SoftmaxAggregation()),
    "GIN": lambda: GINConv(nn.Linear(WIDTH, 16), train_eps=True),
}
every_layer = pytest.mark.parametrize("layer", LAYERS)


def layer_of(name, device):
    torch.manual_seed(0)
    return LAYERS[name]().to(device)


def graph(device, nodes=NODES, edges=EDGES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, nodes, (2, edges), generator=generator)
    edge_index[1][edge_index[1] == 3] = 4  # nothing arrives at 3
    return torch.randn(nodes, WIDTH, generator=generator).to(device), edge_index.to(device)


def calls():
    return sum(
        row["fast"] + sum(row["reference"].values()) for row in prequal.stats().get("message_passing_csr", {}).values()
    )


def everything(layer, x, *rest):
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, *rest)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_alike(got, want):
    # float32 sums of up to 20 messages in two orders, and products of them: some ulps of values up to 100
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every_layer
def test_a_patched_layer_computes_what_it_did_and_so_do_its_gradients(device, layer):
    x, edge_index = graph(device)
    layer = layer_of(layer, device)
    want = everything(layer, x, edge_index)
    before = calls()
    report = prequal.patch_geometric(layer)
    assert report.ops == {"message_passing": 1}
    assert_alike(everything(layer, x, edge_index), want)
    assert_alike(everything(layer, x, edge_index), want)  # with edges that are kept
    assert calls() == before + 2
    assert prequal.unpatch_geometric(layer) == [""]
    assert calls() == before + 2
    assert_alike(everything(layer, x, edge_index), want)


def test_edge_weights_get_their_gradient(device):
    x, edge_index = graph(device)
    layer = layer_of("GCN", device)
    weight = (torch.arange(EDGES, device=device) % 5 + 1.0).requires_grad_()
    want = torch.autograd.grad(layer(x, edge_index, weight).square().sum(), weight)
    prequal.patch_geometric(layer)
    before = calls()
    torch.testing.assert_close(
        torch.autograd.grad(layer(x, edge_index, weight).square().sum(), weight), want, rtol=1e-4, atol=1e-4
    )
    assert calls() == before + 1


@pytest.mark.parametrize("targets", [1, 20, 60])
def test_sources_and_targets_may_be_others(device, targets):
    x, _ = graph(device)
    generator = torch.Generator().manual_seed(1)
    ends = [torch.randint(0, n, (90,), generator=generator) for n in (NODES, targets)]
    edge_index, own = torch.stack(ends).to(device), x.repeat(2, 1)[:targets]
    layer = layer_of("SAGE mean", device)
    want, bare = layer((x, own), edge_index), layer((x, None), edge_index, size=(NODES, targets))
    prequal.patch_geometric(layer)
    before = calls()
    torch.testing.assert_close(layer((x, own), edge_index), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer((x, None), edge_index, size=(NODES, targets)), bare, rtol=1e-4, atol=1e-5)
    assert calls() == before + 2


@pytest.mark.parametrize("name", ["GCN", "SAGE mean"])
def test_a_write_to_the_edges_is_seen(device, name):
    x, edge_index = graph(device)
    layer = layer_of(name, device)
    other = copy.deepcopy(layer)
    prequal.patch_geometric(layer)
    layer(x, edge_index)
    edge_index[0] = edge_index[0].flip(0)
    torch.testing.assert_close(layer(x, edge_index), other(x, edge_index), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["GCN", "GIN"])
def test_edges_that_inference_mode_sorted_serve_training(device, name):
    x, edge_index = graph(device)
    layer = layer_of(name, device)
    want = everything(layer, x, edge_index)
    prequal.patch_geometric(layer)
    with torch.inference_mode():
        layer(x, edge_index)
    assert_alike(everything(layer, x, edge_index), want)


@pytest.mark.parametrize("name", ["GCN", "SAGE mean", "GIN"])
def test_edges_that_were_made_in_inference_mode_are_never_kept(device, name):
    layer = layer_of(name, device)
    other = copy.deepcopy(layer)
    prequal.patch_geometric(layer)
    with torch.inference_mode():
        x, edge_index = graph(device)
        layer(x, edge_index)
        edge_index.copy_(edge_index.flip(1).roll(1, 0))
        torch.testing.assert_close(layer(x, edge_index), other(x, edge_index), rtol=1e-4, atol=1e-5)


def test_plans_and_norms_are_kept_by_any_number_of_threads(device):
    layer = layer_of("GCN", device)
    prequal.patch_geometric(layer)
    x, first = graph(device)
    edges = [first.roll(i, 1) for i in range(24)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(layer, x, edges[i % 24]) for i in range(600)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)


def test_copies_and_pickles_are_patched_and_a_state_dict_is_as_before(device):
    x, edge_index = graph(device)
    layer = layer_of("GCN", device)
    names = list(layer.state_dict())
    prequal.patch_geometric(layer)
    assert list(layer.state_dict()) == names
    want = layer(x, edge_index)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        before = calls()
        torch.testing.assert_close(other(x, edge_index), want, rtol=0, atol=0)
        assert calls() == before + 1
        assert isinstance(other, GCNConv)


def test_what_is_not_covered_is_the_layers_own_and_says_why(device, caplog, monkeypatch):
    x, edge_index = graph(device)
    layer = layer_of("SAGE mean", device)
    want = layer(x, edge_index)
    prequal.patch_geometric(layer)
    monkeypatch.setattr(geometric, "_told", set())
    caplog.set_level(logging.WARNING, "prequal")
    before = calls()
    for _ in range(2):
        # int16 edges cannot index in torch, so the layer's own answer is an error, as before
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            layer(x, edge_index.short())
    hook = layer.register_message_forward_hook(lambda module, inputs, output: output)
    torch.testing.assert_close(layer(x, edge_index), want)  # a scatter of torch's own: on a GPU in any order
    hook.remove()
    assert calls() == before
    said = [record.getMessage() for record in caplog.records]
    assert sum("edge_index is no plain tensor of int32 or int64" in line for line in said) == 1
    assert sum("it is explained, or has hooks inside" in line for line in said) == 1


def test_layers_that_are_not_known_are_left(device):
    class Other(SAGEConv):
        def message(self, x_j):
            return 2 * x_j

    model = nn.ModuleList(
        [
            GCNConv(WIDTH, 16),
            GATConv(WIDTH, 16),
            Other(WIDTH, 16),
            SAGEConv(WIDTH, 16, aggr="std"),
            GINConv(nn.Linear(WIDTH, 16), flow="target_to_source"),
            SAGEConv(WIDTH, 16, aggr=SoftmaxAggregation(t=0.5)),
        ]
    )
    classes = [type(module) for module in model]
    report = prequal.patch_geometric(model)
    assert [entry.name for entry in report.replaced] == ["0"]
    reasons = {entry.name: entry.reason for entry in report.left}
    assert reasons["3"] == "its aggregation is StdAggregation"
    assert reasons["4"] == "its flow is target_to_source"
    assert reasons["5"].startswith("its softmax")
    assert [type(module) for module in model][1:] == classes[1:]
    assert prequal.unpatch_geometric(model) == ["0"]
    assert [type(module) for module in model] == classes


def test_wrong_models_say_what_is_wrong():
    with pytest.raises(TypeError, match=r"patch_geometric: model: expected a torch.nn.Module, got int"):
        prequal.patch_geometric(3)
    with pytest.raises(TypeError, match=r"unpatch_geometric: model: expected a torch.nn.Module, got int"):
        prequal.unpatch_geometric(3)
    with pytest.raises(ValueError, match=r"model: expected GCNConv, SAGEConv or GINConv .* got none in Linear"):
        prequal.patch_geometric(nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_layer
def test_on_a_gpu_the_kernel_answers(cuda, layer, dtype):
    x, edge_index = graph(cuda)
    layer = layer_of(layer, cuda)
    want = layer(x, edge_index)
    prequal.patch_geometric(layer)
    layer.to(dtype)
    if hasattr(layer, "_cached_edge_index"):
        layer._cached_edge_index = None  # it was of float32
    got = layer(x.to(dtype), edge_index)
    # weights, inputs, messages and outputs rounded to halves: 2^-8 each of terms up to 5, a few dozen of them
    limit = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.4}[dtype]
    torch.testing.assert_close(got.float(), want, rtol=limit, atol=limit)
    assert prequal.stats()["message_passing_csr"][str(cuda)] == {"fast": 1, "reference": {}}
