"""geglu against torch's own chain and NumPy, apart and packed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prequal


def inputs(device, dtype, *shape, tensors=2):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(tensors)]


both_forms = pytest.mark.parametrize("form", ["tanh", "none"])


def packed(gate, up, interleaved):
    if interleaved:
        return torch.stack((gate, up), dim=-1).flatten(-2)
    return torch.cat((gate, up), dim=-1)


def test_fp64_agrees_with_numpy(device):
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 5, 33))
    erf = np.vectorize(math.erf)(gate / math.sqrt(2))
    tanh = np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    for form, inner in (("none", erf), ("tanh", tanh)):
        got = prequal.geglu(torch.tensor(gate, device=device), torch.tensor(up, device=device), form)
        np.testing.assert_allclose(got.cpu().numpy(), 0.5 * gate * (1 + inner) * up, rtol=1e-12, atol=1e-15)


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_agrees_with_fp64_within_the_rounding_of_the_dtype(device, dtype, form):
    gate, up = inputs(device, dtype, 7, 129)
    want = F.gelu(gate.double(), approximate=form) * up.double()
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert ((prequal.geglu(gate, up, form).double() - want).abs() <= 1.01 * bound * want.abs() + 2e-6).all()


@both_forms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_rounding_has_the_bits_of_the_eager_chain(device, dtype, form):
    gate, up = inputs(device, dtype, 64, 1024)
    want = F.gelu(gate, approximate=form) * up
    same = (prequal.geglu(gate, up, form, exact_rounding=True) == want).float().mean()
    assert same > 0.999  # the last bit of tanh and erf is the library's own
    assert (prequal.geglu(gate, up, form) == want).float().mean() < 0.95


@both_forms
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [1, 8, 33, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_gives_what_apart_gives_both_ways(device, interleaved, width, dtype, form):
    gate, up, grad = inputs(device, dtype, 5, width, tensors=3)
    x = packed(gate, up, interleaved)
    contract = prequal.geglu.op.contract  # not the bits: torch's exp of strided values has another last one
    got = prequal.geglu_packed(x, form, interleaved=interleaved)
    assert contract.compare(got, prequal.geglu(gate, up, form)) is None
    dx = prequal.geglu_packed_backward(grad, x, form, interleaved=interleaved)
    want = packed(*prequal.geglu_backward(grad, gate, up, form), interleaved)
    assert prequal.geglu_backward.op.contract.compare(dx, want) is None


@both_forms
def test_the_ends_of_the_range_are_zero_and_the_gate_itself(device, form):
    gate = torch.tensor([-1e30, -100.0, -0.0, 0.0, 100.0, 1e30, torch.nan], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        got = prequal.geglu(gate.to(dtype), torch.ones_like(gate).to(dtype), form)
        assert got[:4].eq(0).all()
        assert torch.equal(got[4:6], gate[4:6].to(dtype))
        assert got[6].isnan()


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gradient_agrees_with_that_of_fp64(device, dtype, form):
    gate, up, grad = inputs(device, dtype, 33, 129, tensors=3)
    asking = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    got = torch.autograd.grad(prequal.geglu(*asking, form), asking, grad)
    exact = [gate.double().requires_grad_(), up.double().requires_grad_()]
    want = torch.autograd.grad(F.gelu(exact[0], approximate=form) * exact[1], exact, grad.double())
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).abs() <= 1.01 * bound * b.abs() + 5e-6).all()


@both_forms
@pytest.mark.parametrize("interleaved", [False, True])
def test_double_backward_is_that_of_the_formula(interleaved, form):
    gate, up = (t.requires_grad_() for t in inputs(torch.device("cpu"), torch.float64, 2, 5))
    assert torch.autograd.gradcheck(lambda gate, up: prequal.geglu(gate, up, form), (gate, up))
    assert torch.autograd.gradgradcheck(lambda gate, up: prequal.geglu(gate, up, form), (gate, up))
    x = packed(gate, up, interleaved).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: prequal.geglu_packed(x, form, interleaved=interleaved), (x,))


def test_only_the_inputs_are_saved_for_the_gradient(device):
    gate, up = (t.requires_grad_() for t in inputs(device, torch.bfloat16, 6, 40))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        prequal.geglu(gate, up)
    assert sorted(saved) == sorted([gate.data_ptr(), up.data_ptr()])


@pytest.mark.gpu
def test_elements_past_two_to_the_31_are_reached(cuda):
    rows, width = 2**20 + 3, 2051
    if torch.cuda.mem_get_info()[0] < 4 * rows * width * 2:
        pytest.skip("not enough GPU memory")
    gate = torch.full((rows, width), 2.0, device=cuda, dtype=torch.bfloat16)
    up = torch.ones_like(gate)
    up[-1] = torch.linspace(-3, 3, width, device=cuda)
    got = prequal.geglu(gate, up)
    assert prequal.stats()["geglu"][str(cuda)] == {"fast": 1, "reference": {}}
    want = prequal.geglu.op.reference(gate[-2:], up[-2:])
    assert prequal.geglu.op.contract.compare(got[-2:], want) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shift", range(8))
def test_every_misalignment_gives_the_bits_of_the_aligned_one(cuda, shift):
    for width in (1, 31, 257, 4095, 10_001):
        gate, up, grad = (torch.randn(5, width + 8, device=cuda).bfloat16() for _ in range(3))
        views = [t[:, i : i + width] for t, i in ((grad, 0), (gate, shift), (up, 7 - shift))]
        whole = [t.clone() for t in views]
        assert torch.equal(prequal.geglu(*views[1:]), prequal.geglu(*whole[1:]))
        gradients = prequal.geglu_backward(*views), prequal.geglu_backward(*whole)
        assert prequal.geglu_backward.op.contract.compare(*gradients) is None
