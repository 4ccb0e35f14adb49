"""moe_unpermute against NumPy in float64, its one order of summation, what is dropped, and its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(device, tokens, k, width, dtype=torch.float32, rows=None):
    generator = torch.Generator().manual_seed(tokens + width)
    rows = tokens * k if rows is None else rows
    yp = torch.randn(rows, width, generator=generator).to(device, dtype)
    order = torch.randperm(max(rows, tokens * k), generator=generator)[: tokens * k].view(tokens, k)
    row_map = torch.where(order < rows, order, -1).to(device, torch.int32)
    return yp, row_map, torch.rand(tokens, k, generator=generator).softmax(1).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "k", "width"), [(1, 1, 1), (7, 2, 8), (129, 8, 129), (33, 6, 1024), (5, 32, 40), (3, 5, 4097)]
)
def test_it_is_near_numpys_sum_in_float64(device, tokens, k, width, dtype):
    yp, row_map, weights = inputs(device, tokens, k, width, dtype, rows=tokens * k - tokens // 2)
    got = prequal.moe_unpermute(yp, row_map, weights)
    rows, at = yp.double().cpu().numpy(), row_map.cpu().numpy()
    taken = np.where((at >= 0)[..., None], rows[np.maximum(at, 0)], 0.0)
    want = (weights.double().cpu().numpy()[..., None] * taken).sum(1)
    step = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    np.testing.assert_allclose(got.double().cpu().numpy(), want, rtol=1.01 * step, atol=1e-5)
    if device.type == "cuda":
        assert prequal.stats()["moe_unpermute"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("width", [8, 129, 4096])
def test_the_order_of_the_choices_is_the_order_of_the_sum(device, width):
    """1, then 2^24, then -2^24: the sum from the left is 0, another one is 1."""
    yp = torch.tensor([1.0, 2.0**24, -(2.0**24)], device=device)[:, None].repeat(1, width)
    row_map = torch.tensor([[0, 1, 2], [1, 2, 0]], device=device)
    got = prequal.moe_unpermute(yp, row_map)
    assert (got[0] == 0).all()
    assert (got[1] == 1).all()


def test_what_is_dropped_adds_nothing_whatever_it_weighs(device):
    yp, row_map, weights = inputs(device, 20, 4, 24)
    yp[7] = torch.nan
    row_map[row_map == 7] = -1
    row_map[3] = torch.tensor([-1, 80, 1 << 30, -(1 << 30)])
    weights[row_map < 0] = torch.nan
    got = prequal.moe_unpermute(yp, row_map, weights)
    assert got.isfinite().all()
    assert (got[3] == 0).all()


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_weights_of_either_dtype_are_read(device, weights_dtype):
    yp, row_map, weights = inputs(device, 33, 6, 72, torch.bfloat16)
    weights = weights.to(weights_dtype)
    got = prequal.moe_unpermute(yp, row_map, weights)
    want = (weights.double()[..., None] * yp.double()[row_map.long()]).sum(1)
    torch.testing.assert_close(got.double(), want, rtol=1.01 * 2.0**-8, atol=1e-5)


@pytest.mark.parametrize("rows", [None, 60, 400])
def test_the_gradients_are_those_of_the_formula(device, rows):
    """With dropped choices and with rows of nobody."""
    yp, row_map, weights = inputs(device, 31, 4, 48, rows=rows)
    yp, weights = yp.double().requires_grad_(), weights.double().requires_grad_()
    grad = torch.randn(31, 48, generator=torch.Generator().manual_seed(1)).to(device).double()
    got = torch.autograd.grad(prequal.moe_unpermute(yp, row_map, weights), (yp, weights), grad)
    kept = row_map >= 0
    taken = yp[row_map.clamp(min=0).long()] * kept[..., None]
    want = torch.autograd.grad((weights[..., None] * taken).sum(1), (yp, weights), grad)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 129])
def test_the_gradients_of_a_kernel_are_near_float64(device, dtype, width):
    yp, row_map, weights = inputs(device, 31, 4, width, dtype, rows=100)
    grad = torch.randn(31, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    dyp, dweights = prequal.moe_unpermute_backward(grad, yp, row_map, weights)
    kept, at = row_map >= 0, row_map.clamp(min=0).long()
    want = torch.zeros(100, width, dtype=torch.float64, device=device)
    want[row_map[kept].long()] = (weights.double()[..., None] * grad.double()[:, None])[kept]
    step = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    torch.testing.assert_close(dyp.double(), want, rtol=2.01 * step, atol=1e-6)
    dots = (grad.double()[:, None] * yp.double()[at]).sum(2) * kept
    torch.testing.assert_close(dweights.double(), dots, rtol=1e-5, atol=1e-4)


def test_second_derivatives_are_those_of_the_reference():
    yp, row_map, weights = inputs(torch.device("cpu"), 4, 2, 3, rows=6)
    inputs_of = (yp.double().requires_grad_(), weights.double().requires_grad_())
    assert torch.autograd.gradcheck(lambda y, w: prequal.moe_unpermute(y, row_map, w), inputs_of)
    assert torch.autograd.gradgradcheck(lambda y, w: prequal.moe_unpermute(y, row_map, w), inputs_of)


def test_only_the_gradients_that_are_asked_for_are_computed(device):
    yp, row_map, weights = inputs(device, 9, 2, 16)
    yp.requires_grad_()
    prequal.moe_unpermute(yp, row_map, weights).sum().backward()
    assert yp.grad is not None
    assert weights.grad is None


@pytest.mark.gpu
def test_an_unpermuted_layer_has_the_same_bits_in_every_run(cuda):
    yp, row_map, weights = inputs(cuda, 4099, 8, 256, torch.bfloat16)
    grad = torch.randn(4099, 256, generator=torch.Generator().manual_seed(1)).to(cuda, torch.bfloat16)
    runs = [
        (prequal.moe_unpermute(yp, row_map, weights), *prequal.moe_unpermute_backward(grad, yp, row_map, weights))
        for _ in range(3)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_sums_that_nearly_cancel_are_no_error_of_the_eager_ones_beside_which_it_is_measured():
    """It rounds weights and products; another row is an error still."""
    from prequal.bench.shapes.moe_unpermute import eager, near_sums

    yp = torch.tensor([[6.0], [-6.03125]], dtype=torch.bfloat16).expand(2, 8).contiguous()
    row_map, weights = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[0.5009, 0.4991]])
    want = prequal.moe_unpermute.op.reference(yp, row_map, weights)
    assert not torch.equal(eager(yp, row_map, weights), want)
    assert near_sums(eager(yp, row_map, weights), want, ()) is None
    assert near_sums(eager(yp, torch.zeros_like(row_map), weights), want, ()) is not None
