"""layer_norm against torch's own and NumPy, and where its formula has edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prequal


def inputs(device, dtype, rows, width):
    generator = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight, bias = (torch.randn(width, generator=generator).to(device, dtype) for _ in range(2))
    return x, weight, bias


def test_fp64_agrees_with_numpy(device):
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(size=(5, 33)), rng.normal(size=33), rng.normal(size=33)
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias
    got = prequal.layer_norm(*(torch.tensor(v, device=device) for v in (x, weight, bias)))
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 64, 129, 4096, 4097])
def test_it_agrees_with_torch_within_the_rounding_of_the_dtype(device, dtype, width):
    x, weight, bias = inputs(device, dtype, 7, width)
    got = prequal.layer_norm(x, weight, bias)
    want = F.layer_norm(x.double(), (width,), weight.double(), bias.double())
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert ((got.double() - want).abs() <= 1.01 * bound * want.abs() + 5e-6).all()


def test_a_row_far_from_zero_keeps_its_digits(device):
    """Sums of squares would lose them: 4096 squared is 2^24 times the variance."""
    x = 4096.0 + torch.linspace(-1, 1, 1024, device=device).repeat(3, 1)
    want = F.layer_norm(x.double(), (1024,))
    torch.testing.assert_close(prequal.layer_norm(x).double(), want, rtol=0, atol=1e-3)


def test_a_constant_row_becomes_the_bias_and_eps_zero_makes_it_nan(device):
    x, bias = torch.full((2, 16), 3.0, device=device), torch.arange(16.0, device=device)
    assert torch.equal(prequal.layer_norm(x, None, bias), bias.expand(2, 16))
    assert prequal.layer_norm(x, None, None, 0.0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 129, 4096, 4095])
def test_the_gradient_agrees_with_that_of_fp64(device, dtype, width):
    x, weight, bias = inputs(device, dtype, 33, width)
    grad = torch.randn(33, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    asking = [t.clone().requires_grad_() for t in (x, weight, bias)]
    got = torch.autograd.grad(prequal.layer_norm(*asking), asking, grad)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    want = torch.autograd.grad(F.layer_norm(exact[0], (width,), *exact[1:]), exact, grad.double())
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).abs() <= 1.01 * bound * b.abs() + 3e-5).all()


@pytest.mark.parametrize("asked", ["weight", "bias", "both", "neither"])
def test_only_the_gradients_that_are_asked_for_are_computed(device, asked):
    x, weight, bias = inputs(device, torch.float32, 5, 24)
    x.requires_grad_()
    weight.requires_grad_(asked in ("weight", "both"))
    bias.requires_grad_(asked in ("bias", "both"))
    prequal.layer_norm(x, weight, bias).square().sum().backward()
    assert x.grad is not None
    assert (weight.grad is not None) == (asked in ("weight", "both"))
    assert (bias.grad is not None) == (asked in ("bias", "both"))


def test_a_bias_of_another_dtype_has_a_gradient_of_that_dtype(device):
    x, weight, bias = inputs(device, torch.bfloat16, 5, 24)
    bias = bias.float().requires_grad_()
    prequal.layer_norm(x, weight, bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 5.0))


def test_double_backward_is_that_of_the_formula():
    x, weight, bias = (t.requires_grad_() for t in inputs(torch.device("cpu"), torch.float64, 2, 5))
    assert torch.autograd.gradcheck(prequal.layer_norm, (x, weight, bias))
    assert torch.autograd.gradgradcheck(prequal.layer_norm, (x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 1031, 4096, 4095, 8192, 65536, 131072])
def test_the_gradient_of_many_rows_is_deterministic_and_right(cuda, width):
    rows = 40_000_000 // width
    generator = torch.Generator(cuda).manual_seed(width)
    grad, x = (torch.randn(rows, width, device=cuda, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(width, device=cuda, generator=generator)
    first, second = (prequal.layer_norm_backward(grad, x, weight) for _ in range(2))
    assert prequal.stats()["layer_norm_backward"][str(cuda)] == {"fast": 2, "reference": {}}
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    op = prequal.layer_norm_backward.op
    assert op.contract.compare(first, op.reference(grad, x, weight)) is None


@pytest.mark.gpu
@pytest.mark.large
def test_rows_past_two_to_the_31_elements_are_reached(cuda):
    rows, width = (2**31 // 4095) + 3, 4095
    if torch.cuda.mem_get_info()[0] < 3 * rows * width * 2:
        pytest.skip("not enough GPU memory")
    x = torch.zeros(rows, width, device=cuda, dtype=torch.bfloat16)
    x[-1] = torch.linspace(-1, 1, width, device=cuda)
    got = prequal.layer_norm(x)
    assert prequal.stats()["layer_norm"][str(cuda)]["fast"] == 1
    assert prequal.layer_norm.op.contract.compare(got[-2:], prequal.layer_norm.op.reference(x[-2:])) is None
