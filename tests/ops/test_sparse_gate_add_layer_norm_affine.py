"""The fused pair against its two halves, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import prequal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(device, dtype, tokens, width, batches=3):
    generator = torch.Generator().manual_seed(tokens + width)
    h, residual = (torch.randn(tokens, width, generator=generator).to(device, dtype) for _ in range(2))
    gate, scale, shift = (torch.randn(batches, width, generator=generator).to(device, dtype) for _ in range(3))
    batch = torch.randint(0, batches, (tokens,), generator=generator).to(device)
    return h, gate, residual, scale, shift, batch


def chain(h, gate, residual, scale, shift, batch):
    total = h * gate[batch] + residual
    return F.layer_norm(total, (h.shape[1],), None, None, 1e-6) * (1 + scale[batch]) + shift[batch], total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 129, 1024, 4096, 4097, 20000])
def test_it_is_the_sum_and_the_norm_of_the_sum_as_it_is_stored(device, dtype, width):
    h, gate, residual, scale, shift, batch = inputs(device, dtype, 7, width)
    y, total = prequal.sparse_gate_add_layer_norm_affine(h, gate, residual, scale, shift, batch)
    assert torch.equal(total, prequal.sparse_batch_mul_add(h, gate, residual, batch))
    want = prequal.sparse_layer_norm_affine(total, scale, shift, batch)
    assert prequal.sparse_layer_norm_affine.op.contract.compare(y, want) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 129, 1024, 5000])
def test_the_gradients_are_those_of_fp64(device, dtype, width):
    *args, batch = inputs(device, dtype, 33, width)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(33, width, generator=generator).to(device, dtype) for _ in range(2)]
    asking = [t.clone().requires_grad_() for t in args]
    outputs = prequal.sparse_gate_add_layer_norm_affine(*asking, batch)
    got = torch.autograd.grad(outputs, asking, grads)
    exact = [t.double().requires_grad_() for t in args]
    # the norm is of the sum as it was stored
    rounding = (outputs[1].double() - chain(*exact, batch)[1]).detach()
    exact[2] = (exact[2].detach() + rounding).requires_grad_()
    want = torch.autograd.grad(chain(*exact, batch), exact, [g.double() for g in grads])
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).abs() <= 1.01 * bound * b.abs() + 2e-4).all()


def test_a_gradient_of_one_output_alone(device):
    *args, batch = inputs(device, torch.float32, 9, 40)
    for place in (0, 1):
        asking = [t.clone().requires_grad_() for t in args]
        got = torch.autograd.grad(
            prequal.sparse_gate_add_layer_norm_affine(*asking, batch)[place].sum(), asking, allow_unused=True
        )
        exact = [t.double().requires_grad_() for t in args]
        want = torch.autograd.grad(chain(*exact, batch)[place].sum(), exact, allow_unused=True)
        for a, b in zip(got, want, strict=True):
            b = torch.zeros_like(a) if b is None else b.to(a.dtype)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_double_backward_is_that_of_the_formula():
    *args, batch = inputs(torch.device("cpu"), torch.float64, 4, 5, 2)
    every = [t.requires_grad_() for t in args]
    assert torch.autograd.gradcheck(lambda *a: prequal.sparse_gate_add_layer_norm_affine(*a, batch), every)
    assert torch.autograd.gradgradcheck(lambda *a: prequal.sparse_gate_add_layer_norm_affine(*a, batch), every)


@pytest.mark.gpu
def test_the_gradient_of_many_tokens_is_deterministic(cuda):
    generator = torch.Generator(cuda).manual_seed(0)
    grad, more, h, total = (torch.randn(30_227, 1024, device=cuda, generator=generator).bfloat16() for _ in range(4))
    gate, scale = (torch.randn(3, 1024, device=cuda, generator=generator) for _ in range(2))
    ptr = torch.tensor([0, 9_000, 9_001, 30_227], device=cuda)
    op = prequal.sparse_gate_add_layer_norm_affine_backward
    first, second = (op(grad, more, h, gate, total, scale, ptr=ptr) for _ in range(2))
    assert prequal.stats()[op.op.name][str(cuda)] == {"fast": 2, "reference": {}}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wide = op.op.reference(*(t.double() for t in (grad, more, h, gate, total, scale)), ptr=ptr)
    for a, b in zip(first[2:], wide[2:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=5e-3)
