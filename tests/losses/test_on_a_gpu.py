"""The loss by its kernels: their answers, their memory, nothing that waits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from formula_of_the_loss import OPTIONS, chosen, data, error, every_reduction, with_gradients

import prequal
from prequal.losses.chunks import row_elements

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.gpu
@every_dtype
@every_reduction
@pytest.mark.parametrize("choice", [(), ("softcap",), tuple(OPTIONS)], ids=["plain", "softcap", "everything"])
@pytest.mark.parametrize("classes", [1000, 50_257])
def test_the_kernels_give_the_answer_of_the_references(classes, choice, reduction, dtype, cuda):
    inputs = data(cuda, tokens=300, width=64, classes=classes, dtype=dtype)
    named = chosen(choice, cuda, classes, dtype)
    named |= {
        "reduction": reduction,
        "max_workspace_bytes": 64 * row_elements(classes, dtype.itemsize) * dtype.itemsize,
    }
    got = with_gradients(prequal.linear_cross_entropy, *inputs, **named)
    assert sum(sum(row["reference"].values()) for op in prequal.stats().values() for row in op.values()) == 0
    with prequal.reference():
        want = with_gradients(prequal.linear_cross_entropy, *inputs, **named)
    for a, b in zip(got, want, strict=True):  # a logit's gradient may be rounded the other way: a half's last bit
        assert error(a, b.double()) < {torch.float32: 1e-5, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_reduction
def test_no_host_synchronisation_forward_or_backward(reduction, cuda):
    hidden, weight, target = data(cuda, tokens=100, dtype=torch.bfloat16)
    named = {
        "reduction": reduction,
        "max_workspace_bytes": 30 * 48,
        **chosen(tuple(OPTIONS), cuda, dtype=torch.bfloat16),
    }
    upstream = torch.ones(100 if reduction == "none" else (), device=cuda)
    with_gradients(prequal.linear_cross_entropy, hidden, weight, target, upstream=upstream, **named)
    try:
        torch.cuda.set_sync_debug_mode("error")
        with_gradients(prequal.linear_cross_entropy, hidden, weight, target, upstream=upstream, **named)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_graph_replays_on_new_inputs(cuda):
    hidden, weight, target = data(cuda, tokens=100, dtype=torch.bfloat16)
    for _ in range(2):
        prequal.linear_cross_entropy(hidden, weight, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = prequal.linear_cross_entropy(hidden, weight, target)
    hidden.copy_(hidden.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss, prequal.linear_cross_entropy(hidden, weight, target))


@pytest.mark.gpu
@pytest.mark.parametrize("sums", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_captured_training_step_replays_on_new_inputs(dtype, sums, cuda):
    hidden, weight, target = data(cuda, tokens=100, dtype=dtype)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    named = {"max_workspace_bytes": 30 * 48, "weight_grad_dtype": sums}

    def step():
        loss = prequal.linear_cross_entropy(hidden, weight, target, **named)
        return (loss.detach(), *torch.autograd.grad(2 * loss, (hidden, weight)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    with torch.no_grad():
        hidden.copy_(hidden.flip(0).clone())
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_logits_of_512_tokens_take_a_31st_of_eagers(cuda):
    hidden, weight, target = data(cuda, tokens=512, width=64, classes=128_256, dtype=torch.bfloat16)

    def peak(call):
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    ours = peak(lambda: prequal.linear_cross_entropy(hidden, weight, target, max_workspace_bytes=4 * 2**20))
    assert 31 * ours <= peak(lambda: F.cross_entropy(F.linear(hidden, weight), target))


@pytest.mark.gpu
@pytest.mark.parametrize("sums", [None, torch.float32])
def test_memory_beyond_inputs_and_gradients_is_the_workspace(sums, cuda):
    """And in float32 what is added up there; 4 MiB are for the numbers of each token."""
    tokens, width, classes, workspace = 4096, 512, 32_000, 32 * 2**20
    hidden, weight, target = data(cuda, tokens=tokens, width=width, classes=classes, dtype=torch.bfloat16)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def step():
        hidden.grad = weight.grad = None
        loss = prequal.linear_cross_entropy(
            hidden, weight, target, max_workspace_bytes=workspace, weight_grad_dtype=sums
        )
        loss.backward()

    step()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    beyond = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
    assert beyond <= workspace + 4 * 2**20 + (0 if sums is None else 4 * weight.numel())


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("sums", [None, torch.float32])
def test_the_default_workspace_is_no_more_than_the_weights_gradient_or_what_its_sums_need(sums, cuda):
    """Sums in float32 have the logits where the narrow gradient is made at the end."""
    tokens, width, classes = 8192, 4096, 65_536
    hidden, weight, target = data(cuda, tokens=tokens, width=width, classes=classes, dtype=torch.bfloat16)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def step():
        prequal.linear_cross_entropy(hidden, weight, target, weight_grad_dtype=sums).backward()

    step()  # cuBLAS takes its own workspace from torch's memory at a stream's first product
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    beyond = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
    assert beyond <= (2 if sums is None else 4) * weight.numel() + 4 * 2**20
