"""rope against complex numbers and transformers' chain, in both layouts, fresh and in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal


def angles(rows, pairs):
    return np.arange(rows)[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)


def tables(device, rows, pairs, dtype=torch.float32):
    angle = torch.tensor(angles(rows, pairs))
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def heads(device, dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def transformers_chain(q, k, cos, sin):
    """apply_rotary_pos_emb of transformers: q [B, H, S, D], cos [B, S, D]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_is_a_complex_number_that_is_turned(device, interleaved):
    q, k = heads(device, torch.float64, 9, 3, 16), heads(device, torch.float64, 9, 2, 16, seed=1)
    got = prequal.rope(q, k, *tables(device, 9, 8, torch.float64), interleaved=interleaved)
    turn = np.exp(1j * angles(9, 8))[:, None]
    for x, y in zip((q, k), got, strict=True):
        x, y = x.cpu().numpy(), y.cpu().numpy()
        if interleaved:
            want, found = (x[..., 0::2] + 1j * x[..., 1::2]) * turn, y[..., 0::2] + 1j * y[..., 1::2]
        else:
            want, found = (x[..., :8] + 1j * x[..., 8:]) * turn, y[..., :8] + 1j * y[..., 8:]
        np.testing.assert_allclose(found, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_exact_rounding_has_the_bits_of_transformers_chain(device, dtype):
    q, k = heads(device, dtype, 2, 8, 31, 64), heads(device, dtype, 2, 2, 31, 64, seed=1)  # heads first
    cos, sin = (torch.cat((t, t), dim=-1) for t in tables(device, 31, 32, dtype))
    want = transformers_chain(q, k, cos[None], sin[None])
    got = prequal.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, exact_rounding=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.transpose(1, 2), b)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rest_of_a_head_is_left_alone(device, interleaved):
    q, k = heads(device, torch.bfloat16, 5, 4, 80), heads(device, torch.bfloat16, 5, 1, 80, seed=1)
    got = prequal.rope(q, k, *tables(device, 5, 16), interleaved=interleaved, rotary_dim=32)
    part = prequal.rope(q[..., :32], k[..., :32], *tables(device, 5, 16), interleaved=interleaved)
    for x, y, z in zip((q, k), got, part, strict=True):
        assert torch.equal(y[..., 32:], x[..., 32:])
        assert torch.equal(y[..., :32], z)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_choose_rows_and_outside_of_them_is_nan(device, dtype):
    q, k = heads(device, torch.float32, 5, 4, 32), heads(device, torch.float32, 5, 2, 32, seed=1)
    cos, sin = tables(device, 8, 16)
    where = torch.tensor([6, 0, 8, -1, 3], device=device, dtype=dtype)
    right = [0, 1, 4]
    got = prequal.rope(q, k, cos, sin, where)
    want = prequal.rope(q[right], k[right], cos[where[right].long()], sin[where[right].long()])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[right], b)
        assert a[[2, 3]].isnan().all()
        assert not a[right].isnan().any()


def test_a_table_without_rows_makes_all_of_it_nan(device):
    q = heads(device, torch.float32, 2, 4, 32)
    nothing = torch.empty(0, 16, device=device)
    got = prequal.rope(q, q, nothing, nothing, torch.zeros(2, device=device, dtype=torch.int64))
    assert all(x.isnan().all() for x in got)


def test_batches_may_share_positions_or_have_their_own(device):
    q, k = heads(device, torch.float32, 2, 5, 4, 32), heads(device, torch.float32, 2, 5, 1, 32, seed=1)
    cos, sin = tables(device, 8, 16)
    each = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 0, 6]], device=device)
    got = prequal.rope(q, k, cos, sin, each)
    for batch in range(2):
        want = prequal.rope(q[batch], k[batch], cos, sin, each[batch])
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[batch], b)
    shared = prequal.rope(q, k, cos, sin, each[0])
    for same in (each[:1], each[:1].expand(2, 5), each[:1].clone().as_strided((1, 5), (3, 1))):
        for a, b in zip(shared, prequal.rope(q, k, cos, sin, same), strict=True):
            assert torch.equal(a, b)
    if device.type == "cuda":
        assert prequal.stats()["rope"][str(device)] == {"fast": 7, "reference": {}}


def test_position_ids_give_what_transformers_tables_by_position_give(device):
    """[1, T] for two sequences, with a gap: transformers makes cos [1, T, D] of it, and broadcasts."""
    q, k = heads(device, torch.float32, 2, 5, 4, 32), heads(device, torch.float32, 2, 5, 1, 32, seed=1)
    cos, sin = tables(device, 16, 16)
    position_ids = torch.tensor([[0, 1, 7, 8, 9]], device=device)
    doubled = [torch.cat((t, t), dim=-1)[position_ids] for t in (cos, sin)]
    want = transformers_chain(q.transpose(1, 2), k.transpose(1, 2), *doubled)
    for a, b in zip(prequal.rope(q, k, cos, sin, position_ids), want, strict=True):
        torch.testing.assert_close(a.transpose(1, 2), b)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_inverse_turns_back(device, interleaved):
    q, k = heads(device, torch.float64, 9, 3, 16), heads(device, torch.float64, 9, 2, 16, seed=1)
    cos, sin = tables(device, 9, 8, torch.float64)
    there = prequal.rope(q, k, cos, sin, interleaved=interleaved)
    for a, b in zip(prequal.rope(*there, cos, sin, interleaved=interleaved, inverse=True), (q, k), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_on_a_packed_qkv_has_the_bits_of_fresh_and_leaves_v(device, interleaved, dtype):
    qkv = heads(device, dtype, 2, 7, 8 + 2 + 2, 64)
    before = qkv.clone()
    q, k = qkv[:, :, :8], qkv[:, :, 8:10]
    want = prequal.rope(q, k, *tables(device, 7, 32), interleaved=interleaved)
    prequal.rope_(q, k, *tables(device, 7, 32), interleaved=interleaved)
    assert torch.equal(q, want[0])
    assert torch.equal(k, want[1])
    assert torch.equal(qkv[:, :, 10:], before[:, :, 10:])
    if device.type == "cuda":
        assert prequal.stats()["rope_"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_the_inverse_rotation(device, interleaved):
    q, k = heads(device, torch.float64, 5, 3, 16), heads(device, torch.float64, 5, 2, 16, seed=1)
    cos, sin = tables(device, 5, 4, torch.float64)
    named = {"interleaved": interleaved, "rotary_dim": 8}
    grads = heads(device, torch.float64, 5, 3, 16, seed=2), heads(device, torch.float64, 5, 2, 16, seed=3)
    asking = q.clone().requires_grad_(), k.clone().requires_grad_()
    got = torch.autograd.grad(prequal.rope(*asking, cos, sin, **named), asking, grads)
    asking = q.clone().requires_grad_(), k.clone().requires_grad_()
    want = torch.autograd.grad(prequal.rope.op.reference(*asking, cos, sin, **named), asking, grads)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_only_the_tables_are_saved_for_the_gradient(device):
    q, k = heads(device, torch.bfloat16, 5, 3, 16).requires_grad_(), heads(device, torch.bfloat16, 5, 2, 16, seed=1)
    cos, sin = tables(device, 5, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        prequal.rope(q, k, cos, sin)
    assert sorted(saved) == sorted([cos.data_ptr(), sin.data_ptr()])


def test_tables_have_gradients_by_the_reference():
    cpu = torch.device("cpu")
    q, k = heads(cpu, torch.float64, 3, 2, 8), heads(cpu, torch.float64, 3, 1, 8, seed=1)
    cos, sin = tables(cpu, 3, 4, torch.float64)
    every = [t.requires_grad_() for t in (q, k, cos, sin)]
    assert torch.autograd.gradcheck(prequal.rope, every)
    assert torch.autograd.gradgradcheck(lambda q, k: prequal.rope(q, k, cos.detach(), sin.detach()), (q, k))


@pytest.mark.gpu
@pytest.mark.large
def test_elements_past_two_to_the_31_are_reached(cuda):
    tokens = 2**31 // (32 * 128) + 5
    if torch.cuda.mem_get_info()[0] < 3 * tokens * 40 * 128 * 2:
        pytest.skip("not enough GPU memory")
    q = torch.ones(tokens, 32, 128, device=cuda, dtype=torch.bfloat16)
    k = torch.ones(tokens, 8, 128, device=cuda, dtype=torch.bfloat16)
    cos, sin = tables(cuda, 16, 64)
    where = torch.arange(tokens, device=cuda) % 16
    prequal.rope_(q, k, cos, sin, where)
    assert prequal.stats()["rope_"][str(cuda)] == {"fast": 1, "reference": {}}
    last = (
        torch.ones(3, 32, 128, device=cuda, dtype=torch.bfloat16),
        torch.ones(3, 8, 128, device=cuda, dtype=torch.bfloat16),
    )
    want = prequal.rope.op.reference(*last, cos, sin, where[-3:])
    assert prequal.rope.op.contract.compare((q[-3:], k[-3:]), want) is None


@pytest.mark.gpu
def test_a_position_outside_reads_nothing(cuda):
    q = torch.ones(4, 2, 64, device=cuda)
    cos, sin = tables(cuda, 4, 32)
    where = torch.tensor([0, 2**62, -(2**62), 4], device=cuda)
    got = prequal.rope(q, q.clone(), cos, sin, where)
    torch.cuda.synchronize()
    assert got[0][1:].isnan().all()
    assert not got[0][0].isnan().any()
