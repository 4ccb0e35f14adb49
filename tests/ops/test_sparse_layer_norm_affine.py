"""sparse_layer_norm_affine against NumPy and the eager chain, and where batches have edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prequal

BOUND = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def inputs(device, dtype, tokens, width, batches=3):
    generator = torch.Generator().manual_seed(tokens + width)
    x = torch.randn(tokens, width, generator=generator).to(device, dtype)
    scale, shift = (torch.randn(batches, width, generator=generator).to(device, dtype) for _ in range(2))
    batch = torch.randint(0, batches, (tokens,), generator=generator).to(device)
    return x, scale, shift, batch


def chain(x, scale, shift, batch, eps=1e-6):
    return F.layer_norm(x, (x.shape[1],), None, None, eps) * (1 + scale[batch]) + shift[batch]


@pytest.mark.parametrize("add_one", [True, False])
def test_fp64_agrees_with_numpy(device, add_one):
    rng = np.random.default_rng(0)
    x, scale, shift = rng.normal(size=(7, 33)), rng.normal(size=(2, 33)), rng.normal(size=(2, 33))
    batch = np.array([0, 1, 1, 0, 0, 1, 0])
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    want = y * (scale[batch] + add_one) + shift[batch]
    got = prequal.sparse_layer_norm_affine(
        *(torch.tensor(v, device=device) for v in (x, scale, shift, batch)), add_one=add_one
    )
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("width", [1, 8, 129, 1024, 4096, 4097, 20000])
def test_it_agrees_with_the_chain_in_fp64_within_one_rounding(device, dtype, width):
    x, scale, shift, batch = inputs(device, dtype, 7, width)
    got = prequal.sparse_layer_norm_affine(x, scale, shift, batch)
    want = chain(x.double(), scale.double(), shift.double(), batch)
    assert ((got.double() - want).abs() <= 1.01 * BOUND[dtype] * want.abs() + 1e-5).all()


def test_offsets_say_what_a_sorted_list_says(device):
    x, scale, shift, _ = inputs(device, torch.float32, 9, 40, 5)
    ptr = torch.tensor([0, 0, 4, 4, 8, 9], device=device)
    batch = torch.tensor([1, 1, 1, 1, 3, 3, 3, 3, 4], device=device)
    got = prequal.sparse_layer_norm_affine(x, scale, shift, ptr=ptr)
    assert torch.equal(got, prequal.sparse_layer_norm_affine(x, scale, shift, batch))
    assert torch.equal(got, prequal.sparse_layer_norm_affine(x, scale, shift, ptr=ptr.int()))


def test_batches_are_looked_at_where_there_is_nothing_to_read():
    x, rows = torch.ones(4, 8), torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"ptr: expected offsets that rise from 0 to 0, got \[0, 0, 5\]"):
        prequal.sparse_layer_norm_affine(x[:0], rows, rows, ptr=torch.tensor([0, 0, 5]))
    with pytest.raises(ValueError, match=r"batch: expected no tokens where there are no batches, got 4"):
        prequal.sparse_layer_norm_affine(x, rows[:0], rows[:0], torch.zeros(4, dtype=torch.int64))
    for none in ({"ptr": torch.tensor([0, 0, 0])}, {"batch": torch.zeros(0, dtype=torch.int64)}):
        assert prequal.sparse_layer_norm_affine(x[:0], rows, rows, **none).shape == (0, 8)


def test_rows_of_one_modulation_are_read_where_they_lie(device):
    x, _, _, batch = inputs(device, torch.bfloat16, 9, 48, 3)
    six = torch.randn(3, 6 * 48, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    parts = six.chunk(6, dim=1)
    got = prequal.sparse_layer_norm_affine(x, parts[4], parts[1], batch)
    want = prequal.sparse_layer_norm_affine(x, parts[4].contiguous(), parts[1].contiguous(), batch)
    assert torch.equal(got, want)
    if device.type == "cuda":
        assert prequal.stats()["sparse_layer_norm_affine"][str(device)] == {"fast": 2, "reference": {}}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("width", [64, 129, 1024, 5000])
def test_the_gradients_are_those_of_fp64(device, dtype, width):
    x, scale, shift, batch = inputs(device, dtype, 33, width)
    grad = torch.randn(33, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    asking = [t.clone().requires_grad_() for t in (x, scale, shift)]
    got = torch.autograd.grad(prequal.sparse_layer_norm_affine(*asking, batch), asking, grad)
    exact = [t.double().requires_grad_() for t in (x, scale, shift)]
    want = torch.autograd.grad(chain(*exact, batch), exact, grad.double())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).abs() <= 1.01 * BOUND[dtype] * b.abs() + 5e-5).all()


@pytest.mark.parametrize("asked", ["scale", "shift", "neither"])
def test_only_the_gradients_that_are_asked_for_are_computed(device, asked):
    x, scale, shift, batch = inputs(device, torch.float32, 5, 24)
    x.requires_grad_()
    scale.requires_grad_(asked == "scale")
    shift.requires_grad_(asked == "shift")
    prequal.sparse_layer_norm_affine(x, scale, shift, batch).square().sum().backward()
    assert x.grad is not None
    assert (scale.grad is not None) == (asked == "scale")
    assert (shift.grad is not None) == (asked == "shift")


def test_a_batch_without_tokens_has_a_gradient_of_zero(device):
    x, scale, shift, _ = inputs(device, torch.float32, 5, 24)
    scale.requires_grad_()
    ptr = torch.tensor([0, 2, 2, 5], device=device)
    prequal.sparse_layer_norm_affine(x, scale, shift, ptr=ptr).square().sum().backward()
    assert torch.equal(scale.grad[1], torch.zeros(24, device=device))
    assert (scale.grad[[0, 2]] != 0).all()


def test_double_backward_is_that_of_the_formula():
    x, scale, shift, batch = inputs(torch.device("cpu"), torch.float64, 4, 5, 2)
    every = [t.requires_grad_() for t in (x, scale, shift)]
    assert torch.autograd.gradcheck(lambda *args: prequal.sparse_layer_norm_affine(*args, batch), every)
    assert torch.autograd.gradgradcheck(lambda *args: prequal.sparse_layer_norm_affine(*args, batch), every)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 65])
def test_a_token_without_a_batch_is_nan_and_nothing_outside_is_read(cuda, width):
    x, scale, shift, _ = inputs(cuda, torch.float32, 6, width, 2)
    batch = torch.tensor([0, -1, 2, 1, 2**40, -(2**62)], device=cuda)
    got = prequal.sparse_layer_norm_affine(x, scale, shift, batch)
    torch.cuda.synchronize()
    right = [0, 3]
    assert torch.equal(got[right], prequal.sparse_layer_norm_affine(x[right], scale, shift, batch[right]))
    assert got[[1, 2, 4, 5]].isnan().all()
    op = prequal.sparse_layer_norm_affine.op
    assert op.contract.compare(got, op.reference(x, scale, shift, batch)) is None
    ptr = torch.tensor([1, 3, 5], device=cuda)
    got = prequal.sparse_layer_norm_affine(x, scale, shift, ptr=ptr)
    assert got[[0, 5]].isnan().all()
    assert not got[1:5].isnan().any()


@pytest.mark.gpu
def test_a_token_without_a_batch_adds_nothing_to_gradients(cuda):
    x, scale, _, _ = inputs(cuda, torch.float32, 5, 64, 2)
    batch = torch.tensor([0, 7, 1, -1, 1], device=cuda)
    right = [0, 2, 4]
    got = prequal.sparse_layer_norm_affine_backward(x, x, scale, batch)
    want = prequal.sparse_layer_norm_affine_backward(x[right], x[right], scale, batch[right])
    torch.testing.assert_close(got[1], want[1])
    torch.testing.assert_close(got[2], want[2])
    assert got[0][[1, 3]].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["runs", "any"])
@pytest.mark.parametrize("batches", [1, 2, 64])
def test_the_gradient_of_many_tokens_is_deterministic_and_right(cuda, order, batches):
    tokens, width = 30_227, 1024
    generator = torch.Generator(cuda).manual_seed(batches)
    grad, x = (torch.randn(tokens, width, device=cuda, generator=generator).bfloat16() for _ in range(2))
    scale = torch.randn(batches, width, device=cuda, generator=generator)
    batch = torch.randint(0, batches, (tokens,), device=cuda, generator=generator)
    if order == "runs":
        batch = batch.sort().values
    first, second = (prequal.sparse_layer_norm_affine_backward(grad, x, scale, batch) for _ in range(2))
    assert prequal.stats()["sparse_layer_norm_affine_backward"][str(cuda)] == {"fast": 2, "reference": {}}
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    wide = prequal.sparse_layer_norm_affine_backward.op.reference(grad.double(), x.double(), scale.double(), batch)
    torch.testing.assert_close(first[0].double(), wide[0], rtol=2.0**-8, atol=1e-4)
    for a, b in zip(first[1:], wide[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.large
def test_rows_past_two_to_the_31_elements_are_reached(cuda):
    tokens, width = (2**31 // 1024) + 3, 1024
    if torch.cuda.mem_get_info()[0] < 3 * tokens * width * 2:
        pytest.skip("not enough GPU memory")
    x = torch.zeros(tokens, width, device=cuda, dtype=torch.bfloat16)
    x[-1] = torch.linspace(-1, 1, width, device=cuda)
    rows = torch.ones(2, width, device=cuda, dtype=torch.bfloat16)
    ptr = torch.tensor([0, 5, tokens], device=cuda)
    got = prequal.sparse_layer_norm_affine(x, rows, rows, ptr=ptr)
    assert prequal.stats()["sparse_layer_norm_affine"][str(cuda)]["fast"] == 1
    op = prequal.sparse_layer_norm_affine.op
    last = torch.zeros(2, dtype=torch.int64, device=cuda)
    assert op.contract.compare(got[-2:], op.reference(x[-2:], rows, rows, last)) is None
