"""moe_permute against NumPy's stable sort, what it drops, what it does not trust, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo.testing

import prequal
from prequal.ops._moe import counts_of, spread_choice

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(device, tokens, k, experts, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens + width)
    x = torch.randn(tokens, width, generator=generator).to(device, dtype)
    chosen = spread_choice(device, tokens, k, experts)
    return x, chosen, counts_of(chosen, experts)


def normal(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def by_numpy(x, experts, count, capacity=None):
    """NumPy's stable sort; one expert after the other."""
    rows, flat = x.float().cpu().numpy(), experts.cpu().numpy().reshape(-1)
    k = experts.shape[1]
    row_map, offsets, out = np.full(flat.shape, -1), [0], np.zeros((len(flat), rows.shape[1]), np.float32)
    order = np.argsort(flat, kind="stable")
    for e in range(count):
        mine = order[flat[order] == e][:capacity]
        row_map[mine] = offsets[-1] + np.arange(len(mine))
        out[row_map[mine]] = rows[mine // k]
        offsets.append(offsets[-1] + len(mine))
    return out, row_map.reshape(-1, k), np.array(offsets)


@pytest.mark.parametrize("capacity", [None, 0, 1, 40])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "width"),
    [(1, 1, 1, 1), (2, 2, 2, 8), (257, 2, 8, 64), (1031, 8, 256, 33), (64, 32, 33, 7), (2999, 6, 64, 16)],
)
def test_it_is_a_stable_sort(device, tokens, k, experts, width, capacity):
    x, chosen, counts = inputs(device, tokens, k, experts, width)
    xp, row_map, offsets = prequal.moe_permute(x, chosen, counts, capacity=capacity)
    want = by_numpy(x, chosen, experts, capacity)
    np.testing.assert_array_equal(row_map.cpu().numpy(), want[1])
    np.testing.assert_array_equal(offsets.cpu().numpy(), want[2])
    np.testing.assert_array_equal(xp.cpu().numpy(), want[0])
    assert (row_map.dtype, offsets.dtype) == (torch.int32, torch.int64)
    if device.type == "cuda":
        assert prequal.stats()["moe_permute"][str(device)] == {"fast": 1, "reference": {}}


def test_offsets_are_the_running_sum_of_the_routers_counts(device):
    logits = torch.randn(501, 64, generator=torch.Generator().manual_seed(0)).to(device)
    _, experts, counts = prequal.moe_route(logits, 6)
    _, row_map, offsets = prequal.moe_permute(logits, experts, counts)
    assert torch.equal(offsets[1:], counts.long().cumsum(0))
    assert torch.equal(row_map.flatten().sort().values.long(), torch.arange(501 * 6, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 8, 130, 4096])
def test_rows_are_copied_bit_for_bit(device, dtype, width):
    """NaN payloads and the sign of zero are bits of a row, too."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    generator = torch.Generator().manual_seed(width)
    top = torch.iinfo(bits)
    x = torch.randint(top.min, top.max, (97, width), generator=generator).to(device, bits).view(dtype)
    chosen = spread_choice(device, 97, 3, 11)
    xp, row_map, _ = prequal.moe_permute(x, chosen, counts_of(chosen, 11))
    for j in range(3):
        assert torch.equal(xp.view(bits)[row_map[:, j].long()], x.view(bits))


@pytest.mark.parametrize("capacity", [None, 4])
def test_a_layer_is_compiled_once_for_every_number_of_tokens(device, capacity):
    def layer(x, logits):
        weights, experts, counts = prequal.moe_route(logits, 2, score="sigmoid", groups=4, topk_groups=2)
        xp, row_map, _ = prequal.moe_permute(x, experts, counts, capacity=capacity)
        return prequal.moe_unpermute(xp * 2, row_map, weights)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for tokens in (5, 9, 64):
        given = [normal(device, tokens, width).requires_grad_() for width in (6, 8)]
        grad = normal(device, tokens, 6, seed=1)
        got, want = compiled(*given), layer(*given)
        torch.testing.assert_close(got, want)
        for a, b in zip(*(torch.autograd.grad(y, given, grad) for y in (got, want)), strict=True):
            torch.testing.assert_close(a, b)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("capacity", [None, 2])
def test_rows_in_fp8_and_their_scales_go_where_the_rows_would(device, dtype, capacity):
    x, chosen, counts = inputs(device, 37, 3, 11, 300)
    chosen[::5] = -1
    q, scale = prequal.quantize_fp8(x, "block_1x128", dtype)
    want = prequal.moe_permute(x, chosen, counts, capacity=capacity)
    q, row_map, offsets = prequal.moe_permute(q, chosen, counts, capacity=capacity)
    assert q.dtype == dtype
    assert torch.equal(row_map, want[1])
    assert torch.equal(offsets, want[2])
    scale = prequal.moe_permute(scale, chosen, counts, capacity=capacity)[0]
    left = int(offsets[-1])
    assert q.view(torch.uint8)[left:].eq(0).all()
    again = prequal.quantize_fp8(want[0][:left], "block_1x128", dtype)
    assert torch.equal(q[:left].view(torch.uint8), again[0].view(torch.uint8))
    assert torch.equal(scale[:left], again[1])


def test_a_capacity_is_an_int_of_any_size(device):
    x, chosen, counts = inputs(device, 9, 2, 4, 8)
    want = prequal.moe_permute(x, chosen, counts)
    for a, b in zip(prequal.moe_permute(x, chosen, counts, capacity=10**30), want, strict=True):
        assert torch.equal(a, b)


def test_a_capacity_is_no_tensor():
    x, chosen, counts = inputs(torch.device("cpu"), 9, 2, 4, 8)
    with pytest.raises(TypeError, match="capacity: expected an int, got Tensor"):
        prequal.moe_permute(x, chosen, counts, capacity=counts[0])


def test_what_is_no_expert_is_dropped_and_rows_behind_the_last_are_zero(device):
    x, chosen, counts = inputs(device, 200, 4, 16, 40)
    x[:] = torch.nan
    chosen[::2] = -1
    chosen[1, 0], chosen[3, 1] = 16, torch.iinfo(torch.int32).max
    chosen[5, 2] = torch.iinfo(torch.int32).min
    xp, row_map, offsets = prequal.moe_permute(x, chosen, counts)
    kept = int(offsets[-1])
    assert kept == 100 * 4 - 3
    assert (row_map[::2] == -1).all()
    assert int(row_map[1, 0]) == int(row_map[3, 1]) == int(row_map[5, 2]) == -1
    assert xp[:kept].isnan().all()
    assert (xp[kept:] == 0).all()


@pytest.mark.parametrize("lie", [0, 1, 10**6, -5])
def test_the_contents_of_counts_are_not_trusted(device, lie):
    x, chosen, counts = inputs(device, 300, 4, 16, 40)
    want = prequal.moe_permute(x, chosen, counts)
    for a, b in zip(prequal.moe_permute(x, chosen, torch.full_like(counts, lie)), want, strict=True):
        assert torch.equal(a, b)


def test_an_expert_that_a_token_has_twice_has_two_of_its_rows(device):
    x, chosen, counts = inputs(device, 30, 4, 16, 8)
    chosen[:] = 5
    _, row_map, offsets = prequal.moe_permute(x, chosen, counts)
    assert row_map.flatten().tolist() == list(range(120))
    assert offsets.tolist() == [0] * 6 + [120] * 11


@pytest.mark.parametrize("capacity", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gradient_is_the_sum_of_a_tokens_rows(device, dtype, capacity):
    x, chosen, counts = inputs(device, 61, 3, 8, 48, dtype)
    chosen[7] = -1
    x.requires_grad_()
    xp, row_map, _ = prequal.moe_permute(x, chosen, counts, capacity=capacity)
    grad = torch.randn(xp.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    (got,) = torch.autograd.grad(xp, x, grad)
    kept = (row_map >= 0)[..., None]
    rows = grad[row_map.clamp(min=0).long()].double() * kept
    step = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    torch.testing.assert_close(got.double(), rows.sum(1), rtol=2 * step, atol=1e-5)
    assert (got[7] == 0).all()


def test_the_gradient_can_be_differentiated():
    x, chosen, counts = inputs(torch.device("cpu"), 5, 2, 4, 3)
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: prequal.moe_permute(x, chosen, counts, capacity=2)[0], (x,))
    assert torch.autograd.gradgradcheck(lambda x: prequal.moe_permute(x, chosen, counts)[0], (x,))


@pytest.mark.parametrize("k", [2, 8])
def test_unpermute_brings_rows_back(device, k):
    x, chosen, counts = inputs(device, 300, k, 16, 72, torch.bfloat16)
    xp, row_map, _ = prequal.moe_permute(x, chosen, counts)
    weights = torch.full((300, k), 1 / k, device=device)
    assert torch.equal(prequal.moe_unpermute(xp, row_map, weights), x)  # exact in float32


def test_more_choices_than_int32_numbers_are_an_error_before_anything_is_made(device):
    one = torch.zeros(1, 1, device=device)
    x, chosen = one.expand(1 << 30, 1), one.int().expand(1 << 30, 2)
    with pytest.raises(ValueError, match=r"experts: expected T \* k <= 2,147,483,647, got \[1073741824, 2\]"):
        prequal.moe_permute(x, chosen, torch.zeros(2, dtype=torch.int32, device=device))


@pytest.mark.gpu
@pytest.mark.large
def test_rows_beyond_two_to_the_31_elements_are_moved(cuda):
    """8,192 tokens of 8 choices and 36,000 columns: 2.4e9 elements of xp."""
    x, chosen, counts = inputs(cuda, 8192, 8, 64, 36_000, torch.bfloat16)
    xp, row_map, offsets = prequal.moe_permute(x, chosen, counts)
    assert int(offsets[-1]) == 8192 * 8
    for token in (0, 4095, 8191):
        for row in row_map[token].tolist():
            assert torch.equal(xp[row], x[token])
    last = int((row_map == 8192 * 8 - 1).nonzero()[0, 0])
    assert torch.equal(xp[-1], x[last])


@pytest.mark.gpu
def test_a_replayed_graph_counts_anew(cuda):
    x, chosen, counts = inputs(cuda, 4099, 6, 64, 32)
    prequal.moe_permute(x, chosen, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls = [prequal.moe_permute(x, chosen, counts) for _ in range(5)]
    for seed in range(3):
        chosen.copy_(spread_choice(cuda, 4099, 6, 64, of=seed))
        graph.replay()
        torch.cuda.synchronize()
        want = prequal.moe_permute.op.reference(x, chosen, counts)
        for found in calls:
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
