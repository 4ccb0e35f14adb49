"""qk_rms_norm_rope_qkv against complex numbers and the chain of the public sparse transformers, fresh and in place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prequal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(device, dtype, tokens, heads, dim, side=64, seed=0):
    generator = torch.Generator().manual_seed(seed + tokens + heads + dim)
    qkv = torch.randn(tokens, 3, heads, dim, generator=generator).to(device, dtype)
    gammas = ((1 + 0.1 * torch.randn(heads, dim, generator=generator)).to(device, dtype) for _ in range(2))
    coords = torch.randint(0, side, (tokens, 4), generator=generator, dtype=torch.int32).to(device)
    return qkv, *gammas, coords


def phases(coords, dim, base=10000.0):
    """exp(i angle) [N, D/2] as those models make it: an axis after the other, the rest padded with ones."""
    an_axis = dim // 2 // 3
    frequency = 1.0 / (base ** (np.arange(an_axis) / max(an_axis, 1)))
    angle = np.concatenate([np.outer(coords[:, axis], frequency) for axis in (1, 2, 3)], axis=1)
    return np.exp(1j * np.pad(angle, ((0, 0), (0, dim // 2 - angle.shape[1]))))


def exact(qkv, q_gamma, k_gamma, coords, interleaved=True):
    """In fp64, by complex numbers."""
    qkv, coords = qkv.double().cpu().numpy(), coords.cpu().numpy()
    turn = phases(coords, qkv.shape[-1])[:, None]
    out = qkv.copy()
    for part, gamma in enumerate((q_gamma, k_gamma)):
        x = qkv[:, part]
        y = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
        y = y * gamma.double().cpu().numpy() * math.sqrt(x.shape[-1])
        half = x.shape[-1] // 2
        z = y[..., 0::2] + 1j * y[..., 1::2] if interleaved else y[..., :half] + 1j * y[..., half:]
        z = z * turn
        if interleaved:
            out[:, part, :, 0::2], out[:, part, :, 1::2] = z.real, z.imag
        else:
            out[:, part, :, :half], out[:, part, :, half:] = z.real, z.imag
    return out


def sparse_transformer_chain(qkv, q_gamma, k_gamma, cos, sin):
    """What those models run: normalise in fp32, round, complex product in fp32, round, stack."""
    turn = torch.complex(cos.float(), sin.float())[:, None]
    both = []
    for x, gamma in zip(qkv.unbind(1), (q_gamma, k_gamma), strict=False):
        y = (F.normalize(x.float(), dim=-1) * gamma * x.shape[-1] ** 0.5).to(x.dtype)
        z = torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2)) * turn
        both.append(torch.view_as_real(z).flatten(-2).to(x.dtype))
    return torch.stack((*both, qkv[:, 2]), dim=1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [2, 6, 8, 64, 80, 128])
def test_fp64_is_a_normalised_complex_number_that_is_turned(device, interleaved, dim):
    qkv, q_gamma, k_gamma, coords = inputs(device, torch.float64, 9, 3, dim)
    got = prequal.qk_rms_norm_rope_qkv(qkv, q_gamma, k_gamma, coords=coords, interleaved=interleaved)
    want = exact(qkv, q_gamma, k_gamma, coords, interleaved)
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(16, 64), (3, 80), (1, 256), (5, 30), (24, 128)])
def test_it_is_rounded_once(device, dtype, heads, dim, interleaved):
    args = inputs(device, dtype, 37, heads, dim)
    got = prequal.qk_rms_norm_rope_qkv(*args[:3], coords=args[3], interleaved=interleaved)
    want = exact(*args, interleaved)
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert (np.abs(got.double().cpu().numpy() - want) <= 1.01 * bound * np.abs(want) + 2e-5).all()


def test_tables_and_coordinates_are_two_ways_to_the_same_angles(device):
    qkv, q_gamma, k_gamma, coords = inputs(device, torch.float32, 33, 4, 64)
    turn = phases(coords.cpu().numpy(), 64)
    cos, sin = (torch.tensor(t, device=device, dtype=torch.float32) for t in (turn.real, turn.imag))
    got = prequal.qk_rms_norm_rope_qkv(qkv, q_gamma, k_gamma, cos, sin)
    want = prequal.qk_rms_norm_rope_qkv(qkv, q_gamma, k_gamma, coords=coords)
    # an fp32 angle of 63 is right to 2^-19
    torch.testing.assert_close(got, want, rtol=0, atol=4 * 2.0**-18)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_rounding_is_the_chain_of_the_models(device, dtype):
    """The roundings are the chain's; the length may differ in its last bit, so a value in a thousand may, too."""
    qkv, q_gamma, k_gamma, coords = inputs(device, dtype, 257, 8, 64)
    turn = phases(coords.cpu().numpy(), 64)
    cos, sin = (torch.tensor(t, device=device, dtype=torch.float32) for t in (turn.real, turn.imag))
    want = sparse_transformer_chain(qkv, q_gamma, k_gamma, cos, sin)
    got = prequal.qk_rms_norm_rope_qkv(qkv, q_gamma, k_gamma, cos, sin, exact_rounding=True)
    once = prequal.qk_rms_norm_rope_qkv(qkv, q_gamma, k_gamma, cos, sin)
    assert torch.equal(got[:, 2], want[:, 2])
    assert (got != want).double().mean() < 1e-3
    assert (once != want).double().mean() > 1e-2, "the roundings in between are what exact_rounding is for"


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 50])
def test_in_place_has_the_bits_of_fresh_and_leaves_v_and_what_is_beside(device, dtype, dim, interleaved):
    wide, q_gamma, k_gamma, coords = inputs(device, dtype, 11, 6, dim)
    q_gamma, k_gamma = q_gamma[1:5], k_gamma[1:5]
    before, qkv = wide.clone(), wide[:, :, 1:5]
    named = {"coords": coords, "interleaved": interleaved}
    want = prequal.qk_rms_norm_rope_qkv(qkv, q_gamma, k_gamma, **named)
    assert prequal.qk_rms_norm_rope_qkv_inplace(qkv, q_gamma, k_gamma, **named) is qkv
    assert torch.equal(qkv, want)
    assert torch.equal(wide[:, 2], before[:, 2])
    assert torch.equal(wide[:, :, [0, 5]], before[:, :, [0, 5]])
    if device.type == "cuda":
        assert prequal.stats()["qk_rms_norm_rope_qkv_inplace"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("inside", ["q_gamma", "k_gamma", "cos", "sin", "coords"])
def test_what_lies_in_qkv_is_read_as_it_was(device, inside):
    qkv, q_gamma, k_gamma, coords = inputs(device, torch.float32, 4, 4, 64)
    given = {"q_gamma": q_gamma, "k_gamma": k_gamma}
    if inside == "coords":
        given["coords"] = qkv[1, 0, 0].view(torch.int32)[:16].view(4, 4).copy_(coords)
    else:
        turn = phases(coords.cpu().numpy(), 64)
        given["cos"], given["sin"] = (
            torch.tensor(t, device=device, dtype=torch.float32) for t in (turn.real, turn.imag)
        )
        given[inside] = qkv[1, 0].view(-1)[: given[inside].numel()].view(given[inside].shape).copy_(given[inside])
    want = prequal.qk_rms_norm_rope_qkv(qkv, **{name: x.clone() for name, x in given.items()})
    prequal.qk_rms_norm_rope_qkv_inplace(qkv, **given)
    op = prequal.qk_rms_norm_rope_qkv.op
    assert op.contract.compare(qkv, want) is None
    if device.type == "cuda":
        seen = prequal.stats()["qk_rms_norm_rope_qkv_inplace"][str(device)]
        assert seen == {"fast": 0, "reference": {"unsupported_input:aliasing": 1}}


def test_a_head_of_zeros_stays_zero_and_eps_bounds_the_length(device):
    qkv, q_gamma, k_gamma, coords = inputs(device, torch.float32, 4, 2, 16)
    qkv[0] = 0.0
    got = prequal.qk_rms_norm_rope_qkv(qkv, q_gamma, k_gamma, coords=coords)
    assert torch.equal(got[0], qkv[0])
    ones = torch.ones_like(q_gamma)
    got = prequal.qk_rms_norm_rope_qkv(qkv, ones, ones, coords=torch.zeros_like(coords), eps=100.0)
    torch.testing.assert_close(got[:, :2], qkv[:, :2] / 25.0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 50, 256])
def test_the_gradients_are_those_of_fp64(device, dtype, dim, interleaved):
    qkv, q_gamma, k_gamma, coords = inputs(device, dtype, 33, 3, dim)
    grad = torch.randn(qkv.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    named = {"coords": coords, "interleaved": interleaved}
    asking = [t.clone().requires_grad_() for t in (qkv, q_gamma, k_gamma)]
    got = torch.autograd.grad(prequal.qk_rms_norm_rope_qkv(*asking, **named), asking, grad)
    wide = [t.double().requires_grad_() for t in (qkv, q_gamma, k_gamma)]
    want = torch.autograd.grad(prequal.qk_rms_norm_rope_qkv.op.reference(*wide, **named), wide, grad.double())
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).abs() <= 1.01 * bound * b.abs() + 1e-4).all()


def test_tables_have_gradients_by_the_reference_and_all_have_second_ones():
    cpu = torch.device("cpu")
    qkv, q_gamma, k_gamma, coords = inputs(cpu, torch.float64, 3, 2, 8)
    turn = phases(coords.numpy(), 8)
    every = [qkv, q_gamma, k_gamma, torch.tensor(turn.real.copy()), torch.tensor(turn.imag.copy())]
    every = [t.requires_grad_() for t in every]
    assert torch.autograd.gradcheck(prequal.qk_rms_norm_rope_qkv, every)
    assert torch.autograd.gradcheck(lambda *a: prequal.qk_rms_norm_rope_qkv(*a, coords=coords), every[:3])
    assert torch.autograd.gradgradcheck(lambda *a: prequal.qk_rms_norm_rope_qkv(*a, coords=coords), every[:3])


def test_in_place_says_which_op_has_the_gradient(device):
    qkv, q_gamma, k_gamma, coords = inputs(device, torch.float32, 3, 2, 8)
    with pytest.raises(RuntimeError, match=r"has no gradient; call qk_rms_norm_rope_qkv, or this under"):
        prequal.qk_rms_norm_rope_qkv_inplace(qkv.requires_grad_(), q_gamma, k_gamma, coords=coords)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(30_227, 16, 64), (3_664, 16, 64), (1_000, 12, 128)])
def test_the_gradient_of_many_tokens_is_deterministic_and_right(cuda, tokens, heads, dim):
    qkv, q_gamma, k_gamma, coords = inputs(cuda, torch.bfloat16, tokens, heads, dim)
    grad = torch.randn(qkv.shape, device=cuda, generator=torch.Generator(cuda).manual_seed(1)).bfloat16()
    args = (grad, qkv, q_gamma.float(), k_gamma.float())
    first, second = (prequal.qk_rms_norm_rope_qkv_backward(*args, coords=coords) for _ in range(2))
    assert prequal.stats()["qk_rms_norm_rope_qkv_backward"][str(cuda)] == {"fast": 2, "reference": {}}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wide = prequal.qk_rms_norm_rope_qkv_backward.op.reference(*(t.double() for t in args), coords=coords)
    torch.testing.assert_close(first[0].double(), wide[0], rtol=2.0**-8, atol=2e-4)
    for a, b in zip(first[1:], wide[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.large
def test_elements_past_two_to_the_31_are_reached(cuda):
    tokens = 2**31 // (3 * 16 * 64) + 5
    if torch.cuda.mem_get_info()[0] < 2 * tokens * 3 * 16 * 64 * 2:
        pytest.skip("not enough GPU memory")
    qkv = torch.ones(tokens, 3, 16, 64, device=cuda, dtype=torch.bfloat16)
    gamma = torch.ones(16, 64, device=cuda, dtype=torch.bfloat16)
    coords = (torch.arange(4 * tokens, device=cuda) % 61).int().view(tokens, 4)
    last = qkv[-3:].clone()
    prequal.qk_rms_norm_rope_qkv_inplace(qkv, gamma, gamma, coords=coords)
    assert prequal.stats()["qk_rms_norm_rope_qkv_inplace"][str(cuda)] == {"fast": 1, "reference": {}}
    op = prequal.qk_rms_norm_rope_qkv.op
    want = op.reference(last, gamma, gamma, coords=coords[-3:])
    assert op.contract.compare(qkv[-3:], want) is None
