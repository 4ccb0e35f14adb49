"""fused_add_rms_norm against the two steps it is made of, fresh and in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import prequal
from prequal.registry import OPS


def inputs(device, dtype, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    x, residual = (torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(2))
    return x, residual, torch.randn(shape[-1], generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 129, 512, 4096])
def test_the_sum_has_the_bits_of_an_addition_and_y_is_its_norm(device, dtype, width):
    """Within the contract of the norm: how many threads share a row, and so the order of its sum, is each op's own."""
    x, residual, weight = inputs(device, dtype, 5, width)
    y, total = prequal.fused_add_rms_norm(x, residual, weight)
    assert torch.equal(total, x + residual)
    assert OPS["rms_norm"].contract.compare(y, prequal.rms_norm(total, weight)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 129, 512, 4096])
def test_in_place_has_the_bits_of_fresh(device, dtype, width):
    x, residual, weight = inputs(device, dtype, 5, width)
    y, total = prequal.fused_add_rms_norm(x, residual, weight, 1e-5, weight_offset=1.0)
    prequal.fused_add_rms_norm_(x, residual, weight, 1e-5, weight_offset=1.0)
    assert torch.equal(x, y)
    assert torch.equal(residual, total)


def test_fp64_agrees_with_torchs_own(device):
    x, residual, weight = inputs(device, torch.float64, 3, 7)
    y, _ = prequal.fused_add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (7,), weight, 1e-6), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("used", ["both", "y", "stream"])
def test_the_gradient_joins_what_comes_through_the_norm_and_through_the_stream(device, used):
    x, residual, weight = (t.requires_grad_() for t in inputs(device, torch.float32, 6, 40))
    y, total = prequal.fused_add_rms_norm(x, residual, weight)
    loss = {
        "both": lambda y, t: (y * y).sum() + t.sin().sum(),
        "y": lambda y, t: (y * y).sum(),
        "stream": lambda y, t: t.sin().sum(),
    }
    got = torch.autograd.grad(loss[used](y, total), (x, residual, weight), allow_unused=True, materialize_grads=True)
    stream = x + residual
    want = torch.autograd.grad(
        loss[used](F.rms_norm(stream, (40,), weight, 1e-6), stream),
        (x, residual, weight),
        allow_unused=True,
        materialize_grads=True,
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[0], got[1])


def test_the_stream_is_saved_for_the_gradient_and_not_what_made_it(device):
    x, residual, weight = (t.requires_grad_() for t in inputs(device, torch.bfloat16, 6, 40))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        _, total = prequal.fused_add_rms_norm(x, residual, weight)
    assert sorted(saved) == sorted([weight.data_ptr(), total.data_ptr()])


def test_double_backward_is_that_of_the_formula():
    x, residual, weight = (t.requires_grad_() for t in inputs(torch.device("cpu"), torch.float64, 2, 5))
    assert torch.autograd.gradcheck(prequal.fused_add_rms_norm, (x, residual, weight))
    assert torch.autograd.gradgradcheck(prequal.fused_add_rms_norm, (x, residual, weight))


def test_a_weight_in_memory_that_is_written_counts_as_it_was(device):
    x, residual, _ = inputs(device, torch.float32, 4, 64)
    with prequal.reference("fused_add_rms_norm"):  # the reference answers below, and the bits are its own
        want = prequal.fused_add_rms_norm(x, residual, x[2])
    prequal.fused_add_rms_norm_(x, residual, x[2])
    assert torch.equal(x, want[0])
    assert torch.equal(residual, want[1])
    if device.type == "cuda":
        assert prequal.stats()["fused_add_rms_norm_"][str(device)]["reference"] == {"unsupported_input:aliasing": 1}


def test_rows_of_one_tensor_in_turn_are_apart(device):
    """Their extents interleave, and no element is in both."""
    both, _, weight = inputs(device, torch.float32, 10, 64)
    want = prequal.fused_add_rms_norm(both[::2], both[1::2], weight)
    prequal.fused_add_rms_norm_(both[::2], both[1::2], weight)
    assert torch.equal(both[::2], want[0])
    assert torch.equal(both[1::2], want[1])
    if device.type == "cuda":
        assert prequal.stats()["fused_add_rms_norm_"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 4095, 16384, 100_001])
def test_in_place_on_rows_of_a_packed_tensor_touches_nothing_else(cuda, width):
    packed = torch.randn(33, 2 * width + 5, device=cuda).bfloat16()
    x, residual = packed[:, 1 : 1 + width], packed[:, width + 3 : 2 * width + 3]
    between = packed[:, [0, width + 1, width + 2, -2, -1]].clone()
    y, total = prequal.fused_add_rms_norm(x, residual)
    prequal.fused_add_rms_norm_(x, residual)
    assert torch.equal(x, y)
    assert torch.equal(residual, total)
    assert torch.equal(packed[:, [0, width + 1, width + 2, -2, -1]], between)
    for name in ("fused_add_rms_norm", "fused_add_rms_norm_"):
        assert prequal.stats()[name][str(cuda)] == {"fast": 1, "reference": {}}
