"""moe_route against NumPy and the routers of transformers, at ties, infinities and NaN, and its gradient."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import prequal
from prequal.ops._moe import spaced_logits

INF, NAN = float("inf"), float("nan")
SCORES = [(score, renormalize) for score in ("softmax", "sigmoid") for renormalize in (True, False)]


def by_numpy(logits, k, score, renormalize, bias=None, groups=None, topk_groups=None, scale=1.0):
    """One token after the other, in float64, with Python's sort."""
    weights, chosen = [], []
    for row in logits.double().cpu().numpy():
        scores = (
            np.exp(row - row.max()) / np.exp(row - row.max()).sum() if score == "softmax" else 1 / (1 + np.exp(-row))
        )
        best = scores if bias is None else scores + bias.double().cpu().numpy()
        allowed = range(len(row))
        if groups is not None:
            size = len(row) // groups
            two = [sum(sorted(best[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
            kept = sorted(range(groups), key=lambda g: -two[g])[:topk_groups]
            allowed = [e for e in allowed if e // size in kept]
        key = row if bias is None and groups is None else best
        experts = sorted(allowed, key=lambda e: -key[e])[:k]
        found = scores[experts]
        weights.append(scale * (found / found.sum() if renormalize else found))
        chosen.append(experts)
    counts = np.bincount(np.array(chosen).reshape(-1), minlength=logits.shape[1])
    return np.array(weights), np.array(chosen), counts


def is_right(found, want):
    weights, experts, counts = (x.cpu().numpy() for x in found)
    np.testing.assert_array_equal(experts, want[1])
    np.testing.assert_array_equal(counts, want[2])
    np.testing.assert_allclose(weights, want[0], rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize(("score", "renormalize"), SCORES)
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 2), (7, 7), (64, 6), (160, 6), (256, 8), (1024, 32), (517, 3)])
def test_it_is_what_numpy_says(device, experts, k, score, renormalize):
    logits = spaced_logits(device, 11, experts, torch.float32)
    found = prequal.moe_route(logits, k, score=score, renormalize=renormalize, scale=2.5)
    is_right(found, by_numpy(logits, k, score, renormalize, scale=2.5))
    if device.type == "cuda":
        assert prequal.stats()["moe_route"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("experts", "k", "groups", "kept"), [(256, 8, 8, 4), (160, 6, 8, 3), (12, 2, 4, 1), (33, 3, 11, 2)]
)
def test_groups_and_a_bias_are_what_numpy_says(device, experts, k, groups, kept, score):
    logits = spaced_logits(device, 11, experts, torch.float32, 1)
    bias = (torch.arange(experts) * 7 % experts / 16).to(device)
    what = {"bias": bias, "groups": groups, "topk_groups": kept}
    found = prequal.moe_route(logits, k, score=score, **what)
    is_right(found, by_numpy(logits, k, score, True, **what))


def test_samples_tell_paths_apart_that_choose_otherwise():
    """By a bias or groups: what is compared is further apart than the rounding of either path."""
    op = prequal.moe_route.op
    compared = 0
    for sample in op.samples(torch.device("cpu")):
        logits, k, score, _, bias, groups, kept, _ = op.bind(sample.args, sample.kwargs)
        if bias is None and groups is None:
            continue
        x = logits.double()
        best = (x.softmax(1) if score == "softmax" else x.sigmoid()) + (0 if bias is None else bias.double())
        largest = best[best.isfinite()].abs().max()
        gaps = []
        if groups is not None:
            size = x.shape[1] // groups
            two = best.unflatten(1, (groups, size)).sort(dim=2, descending=True).values[:, :, :2].sum(2)
            order = two.sort(dim=1, descending=True)
            if kept < groups:
                gaps.append(order.values[:, kept - 1] - order.values[:, kept])
            closed = torch.ones_like(two, dtype=torch.bool).scatter(1, order.indices[:, :kept], False)
            best = best.masked_fill(closed.repeat_interleave(size, 1), -INF)
        order = best.sort(dim=1, descending=True).values[:, : k + 1]
        gaps.append((order[:, :-1] - order[:, 1:]).flatten())
        assert torch.cat(gaps).min() > 8 * 2.0**-24 * largest, sample.name
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (13, 5), (64, 6), (256, 8), (1000, 32)])
def test_ties_go_to_the_lowest_experts(device, dtype, experts, k):
    logits = torch.zeros(5, experts, dtype=dtype, device=device)
    logits[1, ::2] = -0.0
    logits[2, 0] = -1.0
    logits[3, -1] = 1.0
    logits[4, k:] = 1.0
    weights, found, counts = prequal.moe_route(logits, k)
    first = list(range(k))
    assert found[0].tolist() == found[1].tolist() == first
    assert found[2].tolist() == (list(range(1, k + 1)) if k < experts else [*first[1:], 0])
    assert found[3].tolist() == [experts - 1, *first[:-1]]
    assert found[4].tolist() == list(range(k, experts))[:k] + first[: max(0, 2 * k - experts)]
    torch.testing.assert_close(weights[0], torch.full((k,), 1 / k, device=device))
    assert int(counts.sum()) == 5 * k


def near_ties(tokens, experts, values):
    """Floats that differ in their last bits alone, and many that do not differ; half of the rows negative."""
    steps = torch.randint(0, values, (tokens, experts), generator=torch.Generator().manual_seed(experts + values))
    logits = 1 + steps * 2.0**-23
    logits[1::2] *= -1
    return logits


NEAR = [(9, 3), (20, 5), (64, 6), (128, 8), (160, 6), (256, 8), (300, 8), (512, 10), (1024, 32)]


@pytest.mark.parametrize("values", [2, 40, 5000])
@pytest.mark.parametrize(("experts", "k"), NEAR)
def test_logits_are_told_apart_by_their_last_bits(device, experts, k, values):
    logits = near_ties(15, experts, values).to(device)
    is_right(prequal.moe_route(logits, k), by_numpy(logits, k, "softmax", True))


@pytest.mark.parametrize("values", [2, 40, 5000])
@pytest.mark.parametrize(("experts", "k"), NEAR)
def test_scores_are_told_apart_by_their_last_bits(device, experts, k, values):
    """The sigmoid of 0 is 1/2, and a sum of two steps of the bias has no rounding: nothing is excused."""
    logits = torch.zeros(5, experts, device=device)
    bias = (1 + 2 * (near_ties(1, experts, values)[0] - 1)).to(device)
    for groups, kept in ((None, None), (1, 1), (experts // 4, experts // 5), (experts // 2, experts // 3)):
        if groups and (groups > 32 or experts % groups or kept * (experts // groups) < k):
            continue
        what = {"bias": bias, "groups": groups, "topk_groups": kept}
        is_right(prequal.moe_route(logits, k, score="sigmoid", **what), by_numpy(logits, k, "sigmoid", True, **what))


@pytest.mark.parametrize("k", [2, 8, 10, 11, 16, 17])
@pytest.mark.parametrize("experts", [20, 64, 160, 256, 400])
def test_the_best_may_all_lie_together(device, experts, k):
    """Rows that rise or fall: the best are all of one lane or of a few. In a warp with them rows in no order, and a
    number of rows that leaves some of its teams without one."""
    falling = torch.arange(experts, 0, -1, device=device) / 8
    odd = spaced_logits(device, 1, experts, torch.float32)[0]
    logits = torch.stack([falling, odd, odd, falling.flip(0), odd, falling, falling.flip(0)])
    is_right(prequal.moe_route(logits, k), by_numpy(logits, k, "softmax", True))


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (20, 5), (64, 6), (160, 6), (256, 8), (384, 12)])
@pytest.mark.parametrize(("score", "renormalize"), SCORES)
def test_a_row_has_the_same_bits_beside_any_other(device, experts, k, score, renormalize):
    """Up to four tokens share a warp: rows in no order, each beside its like, rows of equals, and rows whose choice a
    kernel makes a second time."""
    odd = spaced_logits(device, 32, experts, torch.float32)
    alone, chosen, _ = prequal.moe_route(odd, k, score=score, renormalize=renormalize)
    for side, beside in itertools.product(range(4), (torch.zeros(1, experts), near_ties(128, experts, 40))):
        mixed = beside.repeat(128 // len(beside), 1).to(device)
        mixed[side::4] = odd
        weights, found, _ = prequal.moe_route(mixed, k, score=score, renormalize=renormalize)
        assert torch.equal(weights[side::4], alone)
        assert torch.equal(found[side::4], chosen)


@pytest.mark.parametrize("experts", [8, 64, 256])
@pytest.mark.parametrize(("score", "renormalize"), SCORES)
def test_rows_that_are_not_finite_have_the_stated_answer(device, experts, score, renormalize):
    logits = spaced_logits(device, 8, experts, torch.float32)
    finite = prequal.moe_route(logits, 3, score=score, renormalize=renormalize)
    odd = logits.clone()
    odd[1] = -INF
    odd[2] = -NAN
    odd[3, 5] = NAN
    odd[4, 2] = INF
    odd[5, 1:] = -INF
    odd[6] = -odd[6].abs() - 1e30
    weights, found, counts = prequal.moe_route(odd, 3, score=score, renormalize=renormalize)
    assert torch.equal(weights[[0, 7]], finite[0][[0, 7]])
    assert torch.equal(found[[0, 7]], finite[1][[0, 7]])
    assert found[1].tolist() == found[2].tolist() == [0, 1, 2]
    assert weights[1].isnan().all() if score == "softmax" else (weights[1] == 0).all()
    assert weights[2].isnan().all()
    assert int(found[3, 0]) == 5
    assert weights[3, 0].isnan()
    assert weights[3].isnan().all() == (score == "softmax" or renormalize)
    assert int(found[4, 0]) == 2
    assert weights[4].isnan().all() if score == "softmax" else weights[4, 0] > 0.3
    assert found[5].tolist() == [0, 1, 2]
    assert (weights[5, 1:] == 0).all()
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < experts for row in found.tolist())
    assert torch.equal(counts.long(), torch.bincount(found.flatten().long(), minlength=experts))


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_makes_a_whole_softmax_nan_leaves_a_bias_no_choice(device, value):
    logits = spaced_logits(device, 3, 16, torch.float32)
    bias = torch.linspace(0, 1, 16, device=device)
    want = prequal.moe_route(logits, 3, bias=bias)
    odd = logits.clone()
    odd[1, 9] = value
    weights, found, _ = prequal.moe_route(odd, 3, bias=bias)
    assert found[1].tolist() == [0, 1, 2]
    assert torch.equal(found[[0, 2]], want[1][[0, 2]])
    assert torch.equal(weights[[0, 2]], want[0][[0, 2]])
    _, found, _ = prequal.moe_route(odd, 3, score="sigmoid", bias=torch.zeros(16, device=device))
    assert int(found[1, 0]) == 9


def test_a_closed_expert_is_preferred_to_a_closed_group(device):
    """A bias of minus infinity is a value like others; of a group that is not kept nothing is chosen at all."""
    bias = torch.zeros(8, device=device)
    bias[4:7] = -INF
    bias[7] = 2.0
    logits = torch.zeros(3, 8, device=device)
    _, found, _ = prequal.moe_route(logits, 2, score="sigmoid", bias=bias, groups=2, topk_groups=1)
    assert found.tolist() == [[0, 1]] * 3
    bias[6] = 1.0
    _, found, _ = prequal.moe_route(logits, 4, score="sigmoid", bias=bias, groups=2, topk_groups=1)
    assert found.tolist() == [[7, 6, 4, 5]] * 3


def test_a_bias_moves_the_choice_and_not_the_weights(device):
    logits = spaced_logits(device, 9, 16, torch.float32)
    bias = torch.zeros(16, device=device)
    bias[3] = 10.0
    weights, found, _ = prequal.moe_route(logits, 4, score="sigmoid", renormalize=False, bias=bias)
    assert (found[:, 0] == 3).all()
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, found.long()))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_gradient_is_that_of_the_formula(score, renormalize):
    logits = spaced_logits(torch.device("cpu"), 4, 9, torch.float64).requires_grad_()

    def weights(x):
        return prequal.moe_route(x, 3, score=score, renormalize=renormalize, scale=1.5)[0]

    assert torch.autograd.gradcheck(weights, (logits,))
    assert torch.autograd.gradgradcheck(weights, (logits,))


@pytest.mark.parametrize(("score", "renormalize"), SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_the_references_and_the_same_twice(device, score, renormalize, dtype):
    what = {"score": score, "renormalize": renormalize, "bias": torch.linspace(0, 4, 32, device=device)}
    what |= {"groups": 4, "topk_groups": 2, "scale": 2.5}
    grad = torch.linspace(-1, 1, 21 * 4, device=device).view(21, 4)
    found = []
    for function in (prequal.moe_route, prequal.moe_route, prequal.moe_route.op.reference):
        logits = spaced_logits(device, 21, 32, dtype).requires_grad_()
        found += torch.autograd.grad(function(logits, 4, **what)[0], logits, grad)
    assert found[0].dtype == dtype
    assert torch.equal(found[0], found[1])
    rtol = 1e-4 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(found[0], found[2], rtol=rtol, atol=1e-6)


def test_a_bias_alone_asks_for_no_gradient(device):
    bias = torch.zeros(8, device=device, requires_grad=True)
    weights, _, _ = prequal.moe_route(torch.ones(3, 8, device=device), 2, bias=bias)
    assert not weights.requires_grad


@pytest.mark.parametrize("tokens", [1, 31, 4099, 100_003])
def test_counts_are_those_of_the_experts(device, tokens):
    for experts, k in ((8, 2), (256, 8)):
        logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens)).to(device)
        _, found, counts = prequal.moe_route(logits, k)
        assert counts.dtype == torch.int32
        assert torch.equal(counts.long(), torch.bincount(found.flatten().long(), minlength=experts))


def as_sets(weights, experts):
    """In the order of the experts: routers that do not sort have another one."""
    order = experts.long().sort(1)
    return order.values, weights.gather(1, order.indices)


def are_the_same(found, weights, experts):
    got, want = as_sets(*found[:2]), as_sets(weights, experts)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-7)


def test_it_is_the_router_of_deepseek_v3():
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(hidden_size=32, num_local_experts=64, n_group=8, topk_group=4)
    router = modeling.DeepseekV3TopkRouter(config)
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.uniform_(router.e_score_correction_bias, 0.0, 0.5)
    logits, weights, experts = router(torch.randn(64, 32))
    what = {"groups": 8, "topk_groups": 4, "scale": config.routed_scaling_factor}
    bias = router.e_score_correction_bias
    are_the_same(prequal.moe_route(logits, experts.shape[1], score="sigmoid", bias=bias, **what), weights, experts)


def test_it_is_the_router_of_mixtral():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    router = modeling.MixtralTopKRouter(modeling.MixtralConfig(hidden_size=32))
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(64, 32)
    _, weights, experts = router(hidden)
    are_the_same(prequal.moe_route(hidden @ router.weight.t(), experts.shape[1]), weights, experts)


def wide_random(device, tokens, experts, dtype):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)).to(device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 6), (160, 6), (256, 8), (1024, 32)])
def test_many_tokens_have_the_references_experts(cuda, dtype, experts, k):
    """32,768 rows with ties and near ties as they come: chosen by logits, so none is excused."""
    logits = wide_random(cuda, 32_768, experts, dtype)
    found, want = prequal.moe_route(logits, k), prequal.moe_route.op.reference(logits, k)
    assert prequal.moe_route.op.contract.compare(found, want) is None
    assert prequal.stats()["moe_route"][str(cuda)] == {"fast": 1, "reference": {}}


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "k"), [(64, 6), (160, 6), (256, 8), (512, 10)])
def test_many_near_ties_have_the_references_experts(cuda, experts, k):
    logits = near_ties(20_011, experts, 300).to(cuda)
    found, want = prequal.moe_route(logits, k), prequal.moe_route.op.reference(logits, k)
    assert prequal.moe_route.op.contract.compare(found, want) is None


@pytest.mark.gpu
def test_sigmoids_have_the_bits_of_torchs(cuda):
    """What a bias is added to: else two paths could choose otherwise at near ties of a row."""
    logits = torch.linspace(-120, 120, 1 << 20, device=cuda).view(-1, 8)
    weights, experts, _ = prequal.moe_route(logits, 8, score="sigmoid", renormalize=False)
    assert torch.equal(weights, logits.sigmoid().gather(1, experts.long()))
    bias = torch.zeros(64, device=cuda)
    weights, experts, _ = prequal.moe_route(logits.view(-1, 64), 32, score="sigmoid", renormalize=False, bias=bias)
    assert torch.equal(weights, logits.view(-1, 64).sigmoid().gather(1, experts.long()))


@pytest.mark.parametrize(("experts", "k"), [(8, 8), (32, 32), (256, 8)])
def test_scores_have_the_bits_of_torchs_sigmoids(device, experts, k):
    """Each less its own: all experts are at zero, and come in their order."""
    for logits in torch.linspace(-120, 120, 128 * experts, device=device).view(experts, 128).t().contiguous():
        _, found, _ = prequal.moe_route(logits[None], k, score="sigmoid", bias=-logits.sigmoid())
        assert found[0].tolist() == list(range(k))


@pytest.mark.gpu
def test_deepseeks_choice_among_many_tokens_is_the_references(cuda):
    logits = wide_random(cuda, 32_768, 256, torch.float32)
    bias = torch.rand(256, generator=torch.Generator().manual_seed(1)).to(cuda)
    what = {"score": "sigmoid", "bias": bias, "groups": 8, "topk_groups": 4, "scale": 2.5}
    found, want = prequal.moe_route(logits, 8, **what), prequal.moe_route.op.reference(logits, 8, **what)
    assert prequal.moe_route.op.contract.compare(found, want) is None


@pytest.mark.gpu
def test_counts_start_at_zero_in_every_replay(cuda):
    """They are made by atomics onto memory that the call clears itself."""
    logits = wide_random(cuda, 4099, 64, torch.float32)
    prequal.moe_route(logits, 6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls = [prequal.moe_route(logits, 6) for _ in range(20)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    want = torch.bincount(calls[0][1].flatten().long(), minlength=64)
    assert all(torch.equal(counts.long(), want) for _, _, counts in calls)


@pytest.mark.gpu
def test_calls_on_two_streams_do_not_share_counts(cuda):
    logits = [wide_random(cuda, 20_011 + i, 128, torch.float32) for i in range(4)]
    streams = [torch.cuda.Stream() for _ in logits]
    torch.cuda.synchronize()
    found = []
    for _, (x, stream) in itertools.product(range(5), zip(logits, streams, strict=True)):
        with torch.cuda.stream(stream):
            found.append((x, prequal.moe_route(x, 8)))
    torch.cuda.synchronize()
    for x, (_, experts, counts) in found:
        assert torch.equal(counts.long(), torch.bincount(experts.flatten().long(), minlength=128))
        assert int(counts.sum()) == 8 * len(x)
