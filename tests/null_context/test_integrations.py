"""The null context in modules of the kinds of TRELLIS, Direct3D-S2 and Hunyuan3D 2.1: bits, refusals, patches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from generator_modules import (
    CrossAttention,
    DenseDenoiser,
    HunyuanDenoiser,
    MultiHeadAttention,
    SparseDenoiser,
    SparseTensor,
)

import prequal

LENGTH, CONTEXT = 19, 24
COUNTS = (5, 33)
PATHS = ("null_context", "null_context_projection")


def randomized(model, seed=0):
    """Every parameter of its own: biases of zero would make every null row zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1], 1) ** 0.5)
    return model.eval()


def noise(*shape, dtype=torch.float32, device="cpu", seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def same_bits(a, b):
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))
    )


def served():
    return {op: sum(row["fast"] for row in prequal.stats().get(op, {}).values()) for op in PATHS}


def by_path(report, calls):
    """What `served` says after so many calls. Which of the two paths has the bits is a GPU's own affair."""
    return {"null_context": calls * (report.path == "row"), PATHS[1]: calls * (report.path == "projection")}


def reasons(op="null_context"):
    return {reason: n for row in prequal.stats().get(op, {}).values() for reason, n in row["reference"].items()}


def cast(module, device, dtype):
    return randomized(module).to(device, dtype)


@torch.no_grad()
def guided(model, x, cond, null):
    """Serial guidance, as TRELLIS and Direct3D-S2 run it."""
    positive = model(x, 0.5, cond)
    return positive + 3.0 * (positive - model(x, 0.5, null))


# ---- dense: TRELLIS, and the dense stage of Direct3D-S2 --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_serial_guidance_of_a_dense_denoiser_keeps_its_bits(dtype, device):
    model = cast(DenseDenoiser(dtype=dtype), device, dtype)
    inputs = {n: noise(1, n, 32, device=device, dtype=dtype) for n in COUNTS}
    cond = noise(1, LENGTH, CONTEXT, device=device, dtype=dtype)
    before = {n: guided(model, x, cond, torch.zeros_like(cond)) for n, x in inputs.items()}
    context = prequal.patch_null_context(model)
    null = prequal.NullCondition.like(cond)
    report = context.qualify(null, runs=[lambda c, x=x: model(x, 0.5, c) for x in inputs.values()])
    assert report.path == "row" or (device.type == "cuda" and report.path == "projection"), report
    prequal.reset_stats()
    for n, x in inputs.items():
        assert same_bits(guided(model, x, cond, null), before[n])
    assert served() == by_path(report, 2 * len(COUNTS))
    assert reasons() == ({} if report.path == "row" else {"qualification_failed": 2 * len(COUNTS)})


def test_a_condition_that_the_model_casts_is_qualified_as_it_arrives():
    """TRELLIS takes conditions in float32 and casts them to the dtype of its blocks."""
    model = cast(DenseDenoiser(dtype=torch.bfloat16), "cpu", torch.bfloat16)
    x, cond = noise(1, 9, 32), noise(1, LENGTH, CONTEXT)
    before = guided(model, x, cond, torch.zeros_like(cond))
    context = prequal.patch_null_context(model)
    null = prequal.NullCondition.like(cond)
    assert context.qualify(null, runs=[lambda c: model(x, 0.5, c)]).path == "row"
    prequal.reset_stats()
    assert same_bits(guided(model, x, cond, null), before)
    assert served()["null_context"] == 2


def test_an_unqualified_patch_computes_what_the_model_did_and_says_so():
    model = cast(DenseDenoiser(dtype=torch.bfloat16), "cpu", torch.bfloat16)
    x, cond = noise(1, 9, 32), noise(1, LENGTH, CONTEXT)
    before = guided(model, x, cond, torch.zeros_like(cond))
    prequal.patch_null_context(model)
    assert same_bits(guided(model, x, cond, torch.zeros_like(cond)), before)
    assert prequal.stats() == {}  # a tensor is not the null context's business
    assert same_bits(guided(model, x, cond, prequal.NullCondition.like(cond)), before)
    assert reasons() == {"not_qualified": 2}


# ---- sparse stages ---------------------------------------------------------------------------------------------------


def sparse(tokens, channels=32, seed=3):
    coords = torch.randint(0, 8, (tokens, 4), generator=torch.Generator().manual_seed(seed))
    return SparseTensor(noise(tokens, channels, dtype=torch.bfloat16, seed=seed), coords)


def sparse_model(**more):
    model = randomized(SparseDenoiser(**more)).bfloat16()
    model.dtype = torch.bfloat16
    return model


@torch.no_grad()
def test_a_sparse_stage_with_a_dense_condition_keeps_its_bits():
    model, xs = sparse_model(), {n: sparse(n) for n in COUNTS}
    cond = noise(1, LENGTH, CONTEXT, dtype=torch.bfloat16)
    before = {n: model(x, 0.5, torch.zeros_like(cond)).feats for n, x in xs.items()}
    context = prequal.patch_null_context(model)
    null = prequal.NullCondition.like(cond)
    report = context.qualify(null, runs=[lambda c, x=x: model(x, 0.5, c) for x in xs.values()])
    assert report.path == "row", report
    prequal.reset_stats()
    for n, x in xs.items():
        assert same_bits(model(x, 0.5, null).feats, before[n])
    assert served()["null_context"] == 2 * len(COUNTS)


@torch.no_grad()
def test_the_positional_embedding_of_direct3d_s2_is_found_by_the_check_itself():
    """Its sparse stage embeds the positions of a zero condition too: the value rows differ."""
    model, x = sparse_model(sparse_conditions=True), sparse(9)
    coords = sparse(LENGTH, seed=4).coords
    zeros = torch.zeros(LENGTH, CONTEXT, dtype=torch.bfloat16)
    before = model(x, 0.5, SparseTensor(zeros, coords)).feats
    context = prequal.patch_null_context(model)
    null = prequal.NullCondition.like(zeros)
    report = context.qualify(null, runs=[lambda c: model(x, 0.5, SparseTensor(c, coords))])
    assert (report.path, report.reason) == ("reference", "unsupported_input:value_rows")
    assert "raw bits must be equal" in report.detail
    prequal.reset_stats()
    assert same_bits(model(x, 0.5, SparseTensor(null, coords)).feats, before)
    assert served() == dict.fromkeys(PATHS, 0)
    assert reasons() == {"unsupported_input:materialized": 1}


@torch.no_grad()
def test_a_symbolic_condition_that_does_not_arrive_is_refused():
    """Its zeros pass here: no embedding, only a projection that needs values. Then no layer would ever see a symbol."""
    model, x = sparse_model(sparse_conditions=True), sparse(9)
    model.frequencies.zero_()
    coords = sparse(LENGTH, seed=4).coords
    context = prequal.patch_null_context(model)
    null = prequal.NullCondition((LENGTH, CONTEXT), torch.bfloat16)
    report = context.qualify(null, runs=[lambda c: model(x, 0.5, SparseTensor(c, coords))])
    assert (report.path, report.reason) == ("reference", "unsupported_input:materialized")


# ---- Hunyuan3D 2.1 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qkv_bias", [False, True], ids=["no_bias", "bias"])
@torch.no_grad()
def test_batched_guidance_of_hunyuan_keeps_its_bits(qkv_bias, device):
    model = cast(HunyuanDenoiser(qkv_bias=qkv_bias), device, torch.float16)
    halves = {n: noise(1, n, 32, device=device, dtype=torch.float16) for n in COUNTS}
    cond = noise(1, LENGTH, CONTEXT, device=device, dtype=torch.float16)

    def run(half, null):
        return model(torch.cat([half, half]), 0.5, {"main": torch.cat([cond, null], dim=0)})

    before = {n: run(half, torch.zeros_like(cond)) for n, half in halves.items()}
    context = prequal.patch_null_context(model)
    report = context.qualify(
        prequal.GuidedCondition(cond),
        runs=[lambda c, h=half: model(torch.cat([h, h]), 0.5, {"main": c}) for half in halves.values()],
    )
    assert report.path in ("row", "projection"), report
    prequal.reset_stats()
    for n, half in halves.items():
        assert same_bits(run(half, prequal.NullCondition.like(cond)), before[n])  # torch.cat of the two is symbolic
    assert served() == by_path(report, 2 * len(COUNTS))


def test_values_of_hunyuan_are_pieces_of_keys_and_values():
    """What it attends with: with plain to_v the projection of a null condition is another row."""
    module = randomized(CrossAttention(32, CONTEXT, 4))
    from prequal.integrations.cross_attention import hunyuan3d

    layer = hunyuan3d(module)
    zeros = torch.zeros(1, LENGTH, CONTEXT)
    rows = layer.values(zeros)[0]
    want = module(noise(1, 3, 32), zeros)
    torch.testing.assert_close(layer.project(rows[:3])[None], want, rtol=1e-5, atol=1e-6)
    plain = module.out_proj(module.to_v(zeros)[0, :3])
    assert not torch.allclose(plain[None], want, rtol=1e-2)


def test_a_decoupled_attention_is_left_with_its_reason():
    with pytest.raises(ValueError, match=r"attn2\.0: decoupled: a second attention"):
        prequal.patch_null_context(HunyuanDenoiser(with_decoupled_ca=True))


# ---- patches ---------------------------------------------------------------------------------------------------------


def test_a_patch_takes_cross_attentions_alone_and_unpatch_gives_back_the_classes():
    model = DenseDenoiser()
    classes = {name: type(module) for name, module in model.named_modules()}
    context = prequal.patch_null_context(model)
    assert list(context.layers) == ["cross_attn.0", "cross_attn.1"]
    changed = {name for name, module in model.named_modules() if type(module) is not classes[name]}
    assert changed == set(context.layers)
    assert all(isinstance(module, classes[name]) for name, module in model.named_modules())
    assert prequal.unpatch_null_context(model) == list(context.layers)
    assert {name: type(module) for name, module in model.named_modules()} == classes


def test_a_copy_and_a_pickle_are_not_patched_and_take_symbols_as_zeros():
    model = cast(DenseDenoiser(dtype=torch.bfloat16), "cpu", torch.bfloat16)
    x, cond = noise(1, 9, 32), noise(1, LENGTH, CONTEXT)
    before = guided(model, x, cond, torch.zeros_like(cond))
    null = prequal.NullCondition.like(cond)
    prequal.patch_null_context(model).qualify(null, runs=[lambda c: model(x, 0.5, c)])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.cross_attn[0]) is MultiHeadAttention
        prequal.reset_stats()
        assert same_bits(guided(other, x, cond, null), before)
        assert served()["null_context"] == 0
        assert reasons() == {"unsupported_input:materialized": 2}


def test_arguments_by_name_are_understood():
    module = randomized(MultiHeadAttention(32, 4, CONTEXT)).bfloat16()
    x, cond = noise(1, 9, 32, dtype=torch.bfloat16), noise(1, LENGTH, CONTEXT, dtype=torch.bfloat16)
    null = prequal.NullCondition.like(cond)
    want = module(x, torch.zeros_like(cond))
    context = prequal.patch_null_context(module)
    assert context.qualify(null, shapes=[(1, 9)]).path == "row"
    with torch.no_grad():
        assert same_bits(module(x, context=null), want)
        assert served()["null_context"] == 1
        assert same_bits(module(x, context=null, indices=torch.arange(9)), want)
    assert reasons() == {"unsupported_input:arguments": 1}


class Steered(MultiHeadAttention):
    """More arguments, of every kind that a signature may have."""

    def forward(self, x, context=None, indices=None, offset=None, *, gain=None, **more):
        y = super().forward(x, context)
        for value in (offset, *more.values()):
            y = y if value is None else y + value
        return y if gain is None else y * gain


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), {"gain": 2.0}),
        ((), {"offset": 3.0}),
        ((), {"bias": 3.0}),
        ((None, 3.0), {}),
        ((None, 3.0), {"gain": 2.0}),
    ],
    ids=["keyword only", "behind one left out", "of no name", "two by place", "by place and name"],
)
@torch.no_grad()
def test_no_argument_of_a_patched_module_is_lost(args, named):
    module = randomized(Steered(32, 4, CONTEXT)).bfloat16()
    x, cond = noise(1, 9, 32, dtype=torch.bfloat16), noise(1, LENGTH, CONTEXT, dtype=torch.bfloat16)
    null = prequal.NullCondition.like(cond)
    calls = [lambda c: module(x, c, *args, **named)]
    if not args:
        calls += [lambda c: module(x, context=c, **named), lambda c: module(context=c, x=x, **named)]
    want = [(call(cond), call(torch.zeros_like(cond))) for call in calls]
    context = prequal.patch_null_context(module)
    assert context.qualify(null, shapes=[(1, 9)]).path == "row"
    for call, (full, empty) in zip(calls, want, strict=True):
        assert same_bits(call(cond), full)
        assert same_bits(call(null), empty)
    assert reasons() == {"unsupported_input:arguments": len(calls)}
    for call in calls:
        assert context.qualify(null, runs=[call]).reason == "unsupported_input:arguments"


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: prequal.patch_null_context(3), TypeError, "model: expected a torch.nn.Module, got int"),
        (lambda: prequal.patch_null_context(torch.nn.ReLU()), ValueError, "got none in ReLU"),
        (lambda: prequal.patch_null_context(DenseDenoiser(), kinds=["flux"]), ValueError, "kinds: .*got 'flux'"),
        (lambda: prequal.patch_null_context(DenseDenoiser(), kinds="trellis"), TypeError, "names in a list"),
        (lambda: prequal.patch_null_context(DenseDenoiser(), kinds=["hunyuan3d"]), ValueError, "got none"),
        (lambda: prequal.unpatch_null_context(None), TypeError, "model: expected a torch.nn.Module"),
    ],
)
def test_wrong_patches_name_argument_expected_and_got(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_second_patch_is_refused():
    model = DenseDenoiser()
    prequal.patch_null_context(model)
    with pytest.raises(ValueError, match=r"cross_attn\.0 is patched already"):
        prequal.patch_null_context(model)


@torch.no_grad()
def test_under_compile_patched_modules_are_traced_as_the_reference():
    module = randomized(MultiHeadAttention(32, 4, CONTEXT)).bfloat16()
    x, cond = noise(1, 9, 32, dtype=torch.bfloat16), noise(1, LENGTH, CONTEXT, dtype=torch.bfloat16)
    null = prequal.NullCondition.like(cond)
    want = [module(x, cond), module(x, torch.zeros_like(cond))]
    context = prequal.patch_null_context(module)
    assert context.qualify(null, shapes=[(1, 9)]).path == "row"
    prequal.reset_stats()
    torch._dynamo.reset()
    try:
        compiled = torch.compile(module, backend="eager")
        got = [compiled(x, cond), compiled(x, null)]
    finally:
        torch._dynamo.reset()
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert prequal.stats() == {}
