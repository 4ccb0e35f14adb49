"""sparse_batch_mul_add, fresh and in place, against exact arithmetic, and where batches have edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(device, dtype, tokens, width, batches=3):
    generator = torch.Generator().manual_seed(tokens + width)
    x, residual = (torch.randn(tokens, width, generator=generator).to(device, dtype) for _ in range(2))
    gate = torch.randn(batches, width, generator=generator).to(device, dtype)
    batch = torch.randint(0, batches, (tokens,), generator=generator).to(device)
    return x, gate, residual, batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 129, 1024, 1536, 4097, 20000])
def test_it_is_rounded_once(device, dtype, width):
    """The sum of a product in fp64 is exact enough to say which number of the dtype is nearest."""
    x, gate, residual, batch = inputs(device, dtype, 7, width)
    got = prequal.sparse_batch_mul_add(x, gate, residual, batch)
    exact = x.double() * gate.double()[batch] + residual.double()
    step = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert ((got.double() - exact).abs() <= 1.001 * step * exact.abs() + 1e-6).all()


def test_fp64_agrees_with_numpy(device):
    rng = np.random.default_rng(0)
    x, gate, residual = rng.normal(size=(7, 33)), rng.normal(size=(2, 33)), rng.normal(size=(7, 33))
    batch = np.array([0, 1, 1, 0, 0, 1, 0])
    got = prequal.sparse_batch_mul_add(*(torch.tensor(v, device=device) for v in (x, gate, residual, batch)))
    np.testing.assert_allclose(got.cpu().numpy(), x * gate[batch] + residual, rtol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 129, 1024, 4097, 40000])
def test_in_place_has_the_bits_of_fresh(device, dtype, width):
    x, gate, residual, batch = inputs(device, dtype, 37, width)
    want = prequal.sparse_batch_mul_add(x, gate, residual, batch)
    assert prequal.sparse_batch_mul_add_(x, gate, residual, batch) is residual
    assert torch.equal(residual, want)
    if device.type == "cuda":
        assert prequal.stats()["sparse_batch_mul_add_"][str(device)] == {"fast": 1, "reference": {}}


def test_in_place_on_a_slice_leaves_what_is_beside_it(device):
    x, gate, wide, batch = inputs(device, torch.bfloat16, 9, 70)
    before, residual = wide.clone(), wide[:, 3:66]
    want = prequal.sparse_batch_mul_add(x[:, :63], gate[:, 1:64], residual, batch)
    prequal.sparse_batch_mul_add_(x[:, :63], gate[:, 1:64], residual, batch)
    assert torch.equal(wide[:, 3:66], want)
    assert torch.equal(wide[:, :3], before[:, :3])
    assert torch.equal(wide[:, 66:], before[:, 66:])


@pytest.mark.parametrize("inside", ["gate", "batch", "ptr"])
def test_what_lies_in_the_residual_is_read_as_it_was(device, inside):
    x, gate, residual, batch = inputs(device, torch.float32, 9, 64)
    where = {"batch": batch}
    if inside == "gate":
        gate = residual[4:7]
    elif inside == "batch":
        where = {"batch": residual[2].view(torch.int64)[:9].copy_(batch)}
    else:
        where = {"ptr": residual[2].view(torch.int32)[:4].copy_(torch.tensor([0, 3, 3, 9]))}
    want = prequal.sparse_batch_mul_add(
        x, gate.clone(), residual.clone(), **{name: given.clone() for name, given in where.items()}
    )
    prequal.sparse_batch_mul_add_(x, gate, residual, **where)
    assert torch.equal(residual, want)
    if device.type == "cuda":
        seen = prequal.stats()["sparse_batch_mul_add_"][str(device)]
        assert seen == {"fast": 0, "reference": {"unsupported_input:aliasing": 1}}


def test_columns_side_by_side_in_one_tensor_are_apart(device):
    _, gate, both, batch = inputs(device, torch.float32, 9, 128)
    x, residual = both.chunk(2, dim=1)
    want = prequal.sparse_batch_mul_add(x, gate[:, :64], residual, batch)
    prequal.sparse_batch_mul_add_(x, gate[:, :64], residual, batch)
    assert torch.equal(residual, want)
    if device.type == "cuda":
        assert prequal.stats()["sparse_batch_mul_add_"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 129, 1024, 5000])
def test_the_gradients_are_those_of_fp64(device, dtype, width):
    x, gate, residual, batch = inputs(device, dtype, 33, width)
    grad = torch.randn(33, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    asking = [t.clone().requires_grad_() for t in (x, gate, residual)]
    got = torch.autograd.grad(prequal.sparse_batch_mul_add(*asking, batch), asking, grad)
    exact = [t.double().requires_grad_() for t in (x, gate, residual)]
    want = torch.autograd.grad(exact[0] * exact[1][batch] + exact[2], exact, grad.double())
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).abs() <= 1.01 * bound * b.abs() + 1e-5).all()


def test_a_residual_alone_costs_no_kernel(device):
    x, gate, residual, batch = inputs(device, torch.float32, 5, 24)
    prequal.sparse_batch_mul_add(x, gate, residual.requires_grad_(), batch).sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))
    assert "sparse_batch_mul_add_backward" not in prequal.stats()


def test_double_backward_is_that_of_the_formula():
    x, gate, residual, batch = inputs(torch.device("cpu"), torch.float64, 4, 5, 2)
    every = [t.requires_grad_() for t in (x, gate, residual)]
    assert torch.autograd.gradcheck(lambda *args: prequal.sparse_batch_mul_add(*args, batch), every)
    assert torch.autograd.gradgradcheck(lambda *args: prequal.sparse_batch_mul_add(*args, batch), every)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 65])
def test_a_token_without_a_batch_is_nan_and_nothing_outside_is_read(cuda, width):
    x, gate, residual, _ = inputs(cuda, torch.float32, 5, width, 2)
    batch = torch.tensor([0, -1, 2, 1, 2**40], device=cuda)
    got = prequal.sparse_batch_mul_add(x, gate, residual, batch)
    torch.cuda.synchronize()
    assert got[[1, 2, 4]].isnan().all()
    assert not got[[0, 3]].isnan().any()


@pytest.mark.gpu
def test_the_gradient_of_many_tokens_is_deterministic_and_right(cuda):
    generator = torch.Generator(cuda).manual_seed(0)
    grad, x = (torch.randn(30_227, 1024, device=cuda, generator=generator).bfloat16() for _ in range(2))
    gate = torch.randn(3, 1024, device=cuda, generator=generator)
    batch = torch.randint(0, 3, (30_227,), device=cuda, generator=generator)
    first, second = (prequal.sparse_batch_mul_add_backward(grad, x, gate, batch) for _ in range(2))
    assert prequal.stats()["sparse_batch_mul_add_backward"][str(cuda)] == {"fast": 2, "reference": {}}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wide = prequal.sparse_batch_mul_add_backward.op.reference(grad.double(), x.double(), gate.double(), batch)
    torch.testing.assert_close(first[1].double(), wide[1], rtol=1e-5, atol=2e-3)
