"""qk_rms_norm_cross against torch's normalize, fresh and in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import prequal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(device, dtype, tokens, context, heads, dim):
    generator = torch.Generator().manual_seed(tokens + context + heads + dim)
    q = torch.randn(tokens, heads, dim, generator=generator).to(device, dtype)
    kv = torch.randn(context, 2, heads, dim, generator=generator).to(device, dtype)
    gammas = ((1 + 0.1 * torch.randn(heads, dim, generator=generator)).to(device, dtype) for _ in range(2))
    return q, kv, *gammas


def normalised(x, gamma):
    return F.normalize(x, dim=-1) * gamma * x.shape[-1] ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(16, 64), (3, 80), (1, 256), (5, 30), (12, 128)])
def test_it_is_rounded_once(device, dtype, heads, dim):
    q, kv, q_gamma, k_gamma = inputs(device, dtype, 37, 21, heads, dim)
    new_q, new_kv = prequal.qk_rms_norm_cross(q, kv, q_gamma, k_gamma)
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for got, x, gamma in ((new_q, q, q_gamma), (new_kv[:, 0], kv[:, 0], k_gamma)):
        want = normalised(x.double(), gamma.double())
        assert ((got.double() - want).abs() <= 1.01 * bound * want.abs() + 1e-6).all()
    assert torch.equal(new_kv[:, 1], kv[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 50])
def test_in_place_has_the_bits_of_fresh_and_leaves_v(device, dtype, dim):
    q, kv, q_gamma, k_gamma = inputs(device, dtype, 9, 13, 4, dim)
    values = kv[:, 1].clone()
    want = prequal.qk_rms_norm_cross(q, kv, q_gamma, k_gamma)
    assert prequal.qk_rms_norm_cross_inplace(q, kv, q_gamma, k_gamma) is None
    assert torch.equal(q, want[0])
    assert torch.equal(kv, want[1])
    assert torch.equal(kv[:, 1], values)
    if device.type == "cuda":
        assert prequal.stats()["qk_rms_norm_cross_inplace"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("inside", ["q", "kv"])
@pytest.mark.parametrize("which", ["q_gamma", "k_gamma"])
def test_a_gamma_in_what_is_written_is_read_as_it_was(device, inside, which):
    q, kv, q_gamma, k_gamma = inputs(device, torch.float32, 9, 13, 4, 64)
    gammas = {"q_gamma": q_gamma, "k_gamma": k_gamma, which: q[3] if inside == "q" else kv[3, 0]}
    want = prequal.qk_rms_norm_cross(q, kv, **{name: gamma.clone() for name, gamma in gammas.items()})
    prequal.qk_rms_norm_cross_inplace(q, kv, **gammas)
    op = prequal.qk_rms_norm_cross.op
    assert op.contract.compare((q, kv), want) is None
    if device.type == "cuda":
        seen = prequal.stats()["qk_rms_norm_cross_inplace"][str(device)]
        assert seen == {"fast": 0, "reference": {"unsupported_input:aliasing": 1}}


def test_the_parts_of_one_qkv_are_apart(device):
    """Strided past each other: their ranges of addresses meet, their elements do not."""
    qkv = inputs(device, torch.float32, 9, 14, 4, 64)[1].view(-1)[: 9 * 3 * 4 * 64].view(9, 3, 4, 64)
    gamma = torch.ones(4, 64, device=device)
    q, kv = qkv[:, 0], qkv[:, 1:]
    want = prequal.qk_rms_norm_cross(q, kv, gamma, gamma)
    prequal.qk_rms_norm_cross_inplace(q, kv, gamma, gamma)
    assert torch.equal(q, want[0])
    assert torch.equal(kv, want[1])
    if device.type == "cuda":
        assert prequal.stats()["qk_rms_norm_cross_inplace"][str(device)] == {"fast": 1, "reference": {}}


def test_a_head_of_zeros_stays_zero(device):
    q, kv, q_gamma, k_gamma = inputs(device, torch.float32, 3, 3, 2, 16)
    q[1], kv[2, 0] = 0.0, 0.0
    new_q, new_kv = prequal.qk_rms_norm_cross(q, kv, q_gamma, k_gamma)
    assert torch.equal(new_q[1], q[1])
    assert torch.equal(new_kv[2, 0], kv[2, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 50, 256])
def test_the_gradients_are_those_of_fp64(device, dtype, dim):
    every = inputs(device, dtype, 33, 17, 3, dim)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).to(device, dtype) for x in every[:2]]
    asking = [t.clone().requires_grad_() for t in every]
    got = torch.autograd.grad(prequal.qk_rms_norm_cross(*asking), asking, grads)
    q, kv, q_gamma, k_gamma = wide = [t.double().requires_grad_() for t in every]
    outputs = normalised(q, q_gamma), torch.stack((normalised(kv[:, 0], k_gamma), kv[:, 1]), dim=1)
    want = torch.autograd.grad(outputs, wide, [g.double() for g in grads])
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).abs() <= 1.01 * bound * b.abs() + 1e-4).all()


def test_double_backward_is_that_of_the_formula():
    every = [t.requires_grad_() for t in inputs(torch.device("cpu"), torch.float64, 3, 2, 2, 6)]
    assert torch.autograd.gradcheck(prequal.qk_rms_norm_cross, every)
    assert torch.autograd.gradgradcheck(prequal.qk_rms_norm_cross, every)
