"""swiglu against torch's own chain and NumPy, apart and packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prequal


def inputs(device, dtype, *shape, tensors=2):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(tensors)]


def packed(gate, up, interleaved):
    if interleaved:
        return torch.stack((gate, up), dim=-1).flatten(-2)
    return torch.cat((gate, up), dim=-1)


def test_fp64_agrees_with_numpy(device):
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 5, 33))
    got = prequal.swiglu(torch.tensor(gate, device=device), torch.tensor(up, device=device))
    np.testing.assert_allclose(got.cpu().numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_agrees_with_fp64_within_the_rounding_of_the_dtype(device, dtype):
    gate, up = inputs(device, dtype, 7, 129)
    want = F.silu(gate.double()) * up.double()
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert ((prequal.swiglu(gate, up).double() - want).abs() <= 1.01 * bound * want.abs() + 2.0**-25).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_rounding_has_the_bits_of_the_eager_chain(device, dtype):
    gate, up = inputs(device, dtype, 64, 1024)
    want = F.silu(gate) * up
    assert torch.equal(prequal.swiglu(gate, up, exact_rounding=True), want)
    assert not torch.equal(prequal.swiglu(gate, up), want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [1, 8, 33, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_gives_what_apart_gives_both_ways(device, interleaved, width, dtype):
    gate, up, grad = inputs(device, dtype, 5, width, tensors=3)
    x = packed(gate, up, interleaved)
    contract = prequal.swiglu.op.contract  # not the bits: torch's exp of strided values has another last one
    got = prequal.swiglu_packed(x, interleaved=interleaved)
    assert contract.compare(got, prequal.swiglu(gate, up)) is None
    dx = prequal.swiglu_packed_backward(grad, x, interleaved=interleaved)
    want = packed(*prequal.swiglu_backward(grad, gate, up), interleaved)
    assert prequal.swiglu_backward.op.contract.compare(dx, want) is None


def test_the_ends_of_the_range_are_what_the_formula_makes_of_them(device):
    for dtype in (torch.float32, torch.bfloat16):
        gate = torch.tensor([-torch.inf, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, torch.inf, torch.nan], device=device)
        got = prequal.swiglu(gate.to(dtype), torch.ones_like(gate).to(dtype))
        want = F.silu(gate.to(dtype))
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gradient_agrees_with_that_of_fp64(device, dtype):
    gate, up, grad = inputs(device, dtype, 33, 129, tensors=3)
    asking = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    got = torch.autograd.grad(prequal.swiglu(*asking), asking, grad)
    exact = [gate.double().requires_grad_(), up.double().requires_grad_()]
    want = torch.autograd.grad(F.silu(exact[0]) * exact[1], exact, grad.double())
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).abs() <= 1.01 * bound * b.abs() + 5e-6).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_double_backward_is_that_of_the_formula(interleaved):
    gate, up = (t.requires_grad_() for t in inputs(torch.device("cpu"), torch.float64, 2, 5))
    assert torch.autograd.gradcheck(prequal.swiglu, (gate, up))
    assert torch.autograd.gradgradcheck(prequal.swiglu, (gate, up))
    x = packed(gate, up, interleaved).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: prequal.swiglu_packed(x, interleaved=interleaved), (x,))


def test_only_the_inputs_are_saved_for_the_gradient(device):
    gate, up = (t.requires_grad_() for t in inputs(device, torch.bfloat16, 6, 40))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        prequal.swiglu(gate, up)
    assert sorted(saved) == sorted([gate.data_ptr(), up.data_ptr()])


@pytest.mark.gpu
def test_elements_past_two_to_the_31_are_reached(cuda):
    rows, width = 2**20 + 3, 2051
    if torch.cuda.mem_get_info()[0] < 4 * rows * width * 2:
        pytest.skip("not enough GPU memory")
    gate = torch.full((rows, width), 2.0, device=cuda, dtype=torch.bfloat16)
    up = torch.ones_like(gate)
    up[-1] = torch.linspace(-3, 3, width, device=cuda)
    got = prequal.swiglu(gate, up)
    assert prequal.stats()["swiglu"][str(cuda)] == {"fast": 1, "reference": {}}
    want = prequal.swiglu.op.reference(gate[-2:], up[-2:])
    assert prequal.swiglu.op.contract.compare(got[-2:], want) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shift", range(8))
def test_every_misalignment_gives_the_bits_of_the_aligned_one(cuda, shift):
    for width in (1, 31, 257, 4095, 10_001):
        gate, up, grad = (torch.randn(5, width + 8, device=cuda).bfloat16() for _ in range(3))
        views = [t[:, i : i + width] for t, i in ((grad, 0), (gate, shift), (up, 7 - shift))]
        whole = [t.clone() for t in views]
        assert torch.equal(prequal.swiglu(*views[1:]), prequal.swiglu(*whole[1:]))
        gradients = prequal.swiglu_backward(*views), prequal.swiglu_backward(*whole)
        assert prequal.swiglu_backward.op.contract.compare(*gradients) is None
