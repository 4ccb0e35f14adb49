"""prequal.patch on the real classes of transformers, with random weights: what a model computes, says and keeps."""

from __future__ import annotations

import ast
import copy
import inspect
import pathlib
import pickle
import re
import subprocess
import sys
import traceback
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import prequal

transformers = pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama as llama  # noqa: E402

from prequal.integrations import forwards, patching, recognise  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# name: classes, and in how many modules of a model of two layers each op stands
FAMILIES = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {"rms_norm": 5, "swiglu": 2}),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"rms_norm": 5, "swiglu": 2}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"rms_norm": 9, "swiglu": 2}),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {"rms_norm": 5, "swiglu": 2}),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", {"rms_norm": 5, "geglu": 2}),
    "Gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"rms_norm": 9, "geglu": 2}),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"rms_norm": 13, "geglu": 2}),
}
# The norm that directly follows the add runs inside the fused op: one a layer
FUSED = 2
CPU = torch.device("cpu")

every_family = pytest.mark.parametrize("family", FAMILIES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make(family="Llama", dtype=torch.float32, device=CPU, **changes) -> nn.Module:
    """A model whose norms, too, have weights of their own: with those of a fresh model an offset would not be seen."""
    config, model, _ = FAMILIES[family]
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **changes}))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            centre = 1.0 if "norm" in name and not family.startswith("Gemma") else 0.0
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape, generator=generator))
    return made.to(device, dtype).eval()


def tokens(device=CPU) -> torch.Tensor:
    return torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)


@torch.no_grad()
def logits(model, **kwargs) -> torch.Tensor:
    return model(input_ids=tokens(next(model.parameters()).device), **kwargs).logits


def with_gradients(model) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    ids = tokens(next(model.parameters()).device)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"logits": out.logits.detach(), **found}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def rms(values) -> float:
    return float(torch.tensor(list(values)).square().mean().sqrt())


def calls() -> dict[str, int]:
    """Of each op since the last reset, on every path."""
    return {
        op: sum(row["fast"] + sum(row["reference"].values()) for row in devices.values())
        for op, devices in prequal.stats().items()
    }


def needs(op: str) -> set[str]:
    """That calls of the op did not meet, of the patch's own."""
    found = {reason.rpartition(":")[2] for row in prequal.stats().get(op, {}).values() for reason in row["reference"]}
    return found & set(forwards.NEEDS)


def expected_ops(family: str) -> dict[str, int]:
    return {"fused_add_rms_norm": 2, "rope": 2, **FAMILIES[family][2]}


def expected_calls(family: str) -> dict[str, int]:
    """Without gradients: what is gated is gated in place."""
    found = {op + "_" if op in ("swiglu", "geglu") else op: n for op, n in expected_ops(family).items()}
    return {**found, "rms_norm": found["rms_norm"] - FUSED}


def quietly(model, **kwargs):
    return prequal.patch(model, verbose=False, **kwargs)


# ---- the numbers -----------------------------------------------------------------------------------------------------


@every_dtype
@every_family
def test_a_patched_model_is_as_near_to_float64_as_the_model_was(family, dtype, device):
    """Logits and every gradient. Both round at every step, at other places: neither is the other's standard."""
    model = make(family, dtype, device)
    truth = with_gradients(copy.deepcopy(model).double())
    eager = with_gradients(model)
    quietly(model)
    patched = with_gradients(model)
    assert patched.keys() == truth.keys()
    assert all(patched[name].dtype == eager[name].dtype for name in truth)
    ours, theirs = ({name: distance(got[name], truth[name]) for name in truth} for got in (patched, eager))
    # A quarter, and for one small gradient a half of the worst, for the luck of rounding; and the last bits of float32
    slack = 1e-6 if dtype == torch.float32 else 0.0
    for name in truth:
        assert ours[name] <= 1.5 * max(theirs.values()) + slack, name
    assert ours["logits"] <= 1.25 * theirs["logits"] + slack
    assert rms(ours.values()) <= 1.25 * rms(theirs.values()) + slack


@every_family
def test_every_op_is_called_as_often_as_the_report_says(family):
    model = make(family)
    report = quietly(model)
    assert report.ops == expected_ops(family)
    prequal.reset_stats()
    logits(model)
    assert calls() == expected_calls(family)


@pytest.mark.gpu
@every_family
def test_on_a_gpu_the_fast_paths_serve(family, cuda):
    model = make(family, torch.bfloat16, cuda)
    quietly(model)
    logits(model)
    prequal.reset_stats()
    logits(model)
    got = {op: devices[str(cuda)] for op, devices in prequal.stats().items()}
    assert got == {op: {"fast": n, "reference": {}} for op, n in expected_calls(family).items()}


@every_family
def test_unpatch_gives_back_the_bits_and_the_methods(family):
    model = make(family, torch.bfloat16)
    before = logits(model)
    kinds = {name: (type(module), module.forward.__func__) for name, module in model.named_modules()}
    quietly(model)
    assert any(type(module) is not kinds[name][0] for name, module in model.named_modules())
    report = prequal.unpatch(model)
    assert {name: (type(module), module.forward.__func__) for name, module in model.named_modules()} == kinds
    assert torch.equal(logits(model), before)
    assert len(report.replaced) == sum(
        type(module).__name__.endswith(("Norm", "MLP", "Attention", "Layer")) for module in model.modules()
    )
    assert not report.left
    prequal.reset_stats()
    logits(model)
    assert calls() == {}


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_every_number_of_key_and_value_heads_is_right(heads):
    model = make(num_key_value_heads=heads)
    before = logits(model)
    quietly(model)
    torch.testing.assert_close(logits(model), before)


@every_family
def test_generation_with_a_cache_goes_on_as_before(family):
    model = make(family)
    ids = tokens()
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    before = model.generate(ids, use_cache=True, **settings)
    quietly(model)
    prequal.reset_stats()
    assert torch.equal(model.generate(ids, use_cache=True, **settings), before)
    assert torch.equal(model.generate(ids, use_cache=False, **settings), before)
    assert calls()["rope"] == 2 * 2 * (before.shape[1] - ids.shape[1])


def test_sequences_with_positions_of_their_own_are_right():
    model = make()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    before = logits(model, **given)
    quietly(model)
    torch.testing.assert_close(logits(model, **given), before)


@every_dtype
@every_family
def test_exact_rounding_keeps_the_bits(family, dtype):
    """On the CPU, where the references add the squares up in the order in which the model's code does."""
    model = make(family, dtype)
    before = logits(model)
    report = quietly(model, exact_rounding=True)
    assert report.ops == expected_ops(family)
    assert torch.equal(logits(model), before)


@every_family
def test_exact_rounding_keeps_the_bits_of_float64_which_norms_round_to_float32(family):
    model = make(family, torch.float64)
    before = logits(model)
    quietly(model, exact_rounding=True)
    assert torch.equal(logits(model), before)
    assert needs("rms_norm") == needs("fused_add_rms_norm") == {"rounds"}


def test_autocast_goes_the_way_that_torch_promotes():
    """The stream is float32 and projections are bfloat16: what the ops would not promote, torch does."""
    model = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = with_gradients(model)
        quietly(model)
        prequal.reset_stats()
        after = with_gradients(model)
    assert needs("fused_add_rms_norm") == needs("rope") == {"alike"}
    assert needs("swiglu") == set()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert distance(after[name], value) < 0.05, name


def test_a_tensor_subclass_goes_the_way_that_it_has_rules_for():
    class Own(torch.Tensor):
        pass

    model = make()
    quietly(model)
    x = torch.randn(1, 5, 64)
    for op, module in (("rms_norm", model.model.norm), ("swiglu", model.model.layers[0].mlp)):
        want = module(x)
        prequal.reset_stats()
        got = module(x.as_subclass(Own))
        assert type(got) is Own
        assert calls() == {op: 1}
        assert needs(op) == {"alike"}
        torch.testing.assert_close(got.as_subclass(torch.Tensor), want)


@every_family
def test_a_norm_takes_its_argument_by_the_name_that_it_had(family):
    model = make(family)
    norm = model.model.norm
    (name,) = inspect.signature(norm.forward).parameters
    x = torch.randn(3, norm.weight.numel())
    before = norm(**{name: x})
    quietly(model)
    assert list(inspect.signature(norm.forward).parameters) == [name]
    torch.testing.assert_close(norm(**{name: x}), before)


def test_a_norm_with_wider_weights_promotes_as_before():
    model = make(dtype=torch.bfloat16)
    norm = model.model.norm.float()
    x = torch.randn(3, 64).bfloat16()
    before = norm(x)
    quietly(model)
    prequal.reset_stats()
    assert norm(x).dtype == before.dtype == torch.float32
    assert torch.equal(norm(x), before)
    assert calls() == {"rms_norm": 2}
    assert needs("rms_norm") == {"alike"}


def test_heads_that_attention_has_transposed_are_normalised_without_a_copy():
    norm = make("Gemma3").model.layers[0].self_attn.q_norm
    x = torch.randn(2, 7, 4, 16).transpose(1, 2)
    before = norm(x)
    quietly(nn.ModuleList([norm]))
    after = norm(x)
    torch.testing.assert_close(after, before)
    assert after.stride() == before.stride()


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_the_gate_is_overwritten_where_nobody_else_has_it(family):
    name = "geglu" if "geglu" in FAMILIES[family][2] else "swiglu"
    model = make(family)
    before = logits(model)
    quietly(model)
    prequal.reset_stats()
    torch.testing.assert_close(logits(model), before)
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=tokens()).logits, before)
    assert (calls().get(name), calls()[name + "_"]) == (None, 4)

    prequal.reset_stats()
    with_gradients(model)  # autograd needs the gate
    assert (calls()[name], calls().get(name + "_")) == (2, None)
    kept = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, output: kept.append(output))
    prequal.reset_stats()
    logits(model)
    assert (calls()[name], calls()[name + "_"]) == (1, 1)
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 3, 64)
    kept.clear()
    with torch.no_grad():
        mlp(x)
        assert torch.equal(kept[0], nn.functional.linear(x, mlp.gate_proj.weight))


def test_the_gate_is_not_overwritten_under_a_mode_or_another_forward_of_linear_layers(monkeypatch):
    model = make()
    quietly(model)

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Dispatches(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    for mode in (Functions, Dispatches):
        prequal.reset_stats()
        with mode():
            logits(model)
        assert calls().get("swiglu_") is None
    kept = []
    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: kept.append(plain(self, x)) or kept[-1])
    prequal.reset_stats()
    logits(model)
    assert calls().get("swiglu_") is None


def test_a_norm_with_a_call_of_its_own_is_called():
    model = make()
    norm = model.model.layers[0].post_attention_layernorm

    class Shifted(type(norm)):
        def __call__(self, x):
            return super().__call__(x) + 1

    norm.__class__ = Shifted
    before = logits(model)
    quietly(model)
    torch.testing.assert_close(logits(model), before)


def test_a_gated_op_that_is_switched_off_is_off_in_place_too():
    model = make()
    quietly(model)
    prequal.disable("swiglu")
    prequal.reset_stats()
    logits(model)
    assert calls()["swiglu"] == 2
    assert "swiglu_" not in calls()


class Peak(TorchDispatchMode):
    """Of the bytes that are alive and were made here. An op of prequal's counts as one step, as its kernel is one."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self.seen: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        old = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage(), old)
        return out

    def _count(self, memory, old):
        if memory._cdata in old or memory._cdata in self.seen:
            return
        key, size = memory._cdata, memory.nbytes()

        def gone(_):
            del self.seen[key]
            self.alive -= size

        self.seen[key] = weakref.ref(memory, gone)
        self.alive += size
        self.most = max(self.most, self.alive)


@torch.no_grad()
def peak_bytes(layer, rows: int) -> int:
    cos, sin = (torch.ones(1, rows, 16) for _ in range(2))
    x = torch.randn(1, rows, 64)
    layer(x, position_embeddings=(cos, sin))
    with Peak() as peak:
        layer(x, position_embeddings=(cos, sin))
    return peak.most


def test_the_peak_of_a_layer_is_gate_and_up_with_the_stream_and_its_norm(monkeypatch):
    """Llama-3-8B's proportions, I = 3.5 H. What is left cannot go: up is made of the norm while the gate waits."""
    monkeypatch.setattr(forwards, "_is_watched", lambda: False)  # the mode that counts keeps nothing
    layer, rows = make(intermediate_size=224).model.layers[0], 32
    narrow, wide = rows * 64 * 4, rows * 224 * 4
    assert peak_bytes(layer, rows) == 3 * wide + 2 * narrow
    quietly(layer)
    assert peak_bytes(layer, rows) == 2 * wide + 2 * narrow


# ---- training --------------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_still_checkpoints():
    model = make().train()
    quietly(model)
    want = with_gradients(model)
    for module in model.modules():  # as the enabling of every release does
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = lambda f, *args: torch.utils.checkpoint.checkpoint(
                f, *args, use_reentrant=False
            )
    prequal.reset_stats()
    model.config.use_cache = False
    got = with_gradients(model)
    assert calls()["swiglu"] == 2 * 2  # forward, and again in the backward pass
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_frozen_weights_get_no_gradient_and_the_others_do():
    model = make()
    quietly(model)
    frozen = [model.model.norm.weight, model.model.layers[0].post_attention_layernorm.weight]
    for weight in frozen:
        weight.requires_grad_(False)
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"model.norm.weight", "model.layers.0.post_attention_layernorm.weight"}


# ---- what stays ------------------------------------------------------------------------------------------------------


@every_family
def test_names_parameters_and_looks_stay(family):
    model = make(family)
    state = {name: value.data_ptr() for name, value in model.state_dict().items()}
    parameters, looks = list(model.parameters()), repr(model)
    modules = dict(model.named_modules())
    quietly(model)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == state
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert repr(model) == looks
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(isinstance(module, patching.original_class(type(module))) for module in model.modules())
    model.load_state_dict(make(family).state_dict())


def test_another_model_and_the_module_of_its_class_are_not_touched():
    other, before = make(), dict(vars(llama))
    want = logits(other)
    quietly(make())
    assert dict(vars(llama)) == before
    prequal.reset_stats()
    assert torch.equal(logits(other), want)
    assert calls() == {}


def test_hidden_states_and_attentions_are_recorded_as_before():
    model = make(attn_implementation="eager")
    wanted = {"output_hidden_states": True, "output_attentions": True, "input_ids": tokens()}
    with torch.no_grad():
        before = model(**wanted)
        quietly(model)
        after = model(**wanted)
    for kind in ("hidden_states", "attentions"):
        assert len(getattr(after, kind)) == len(getattr(before, kind)) > 0
        for got, want in zip(getattr(after, kind), getattr(before, kind), strict=True):
            torch.testing.assert_close(got, want)


def test_a_name_that_is_changed_later_in_the_classs_module_is_seen(monkeypatch):
    """The new forward has the globals of the old one: a snapshot would keep what they were."""
    model = make(attn_implementation="eager")
    quietly(model)
    seen = []
    before = llama.eager_attention_forward

    def watched(*args, **kwargs):
        seen.append(1)
        return before(*args, **kwargs)

    monkeypatch.setattr(llama, "eager_attention_forward", watched)
    logits(model)
    assert len(seen) == 2


def test_the_signature_and_the_place_in_the_file_stay():
    model = make()
    layer = model.model.layers[0]
    signature = inspect.signature(layer.forward)
    quietly(model)
    assert inspect.signature(layer.forward) == signature
    with pytest.raises(AttributeError, match="dtype") as caught:
        layer("not a tensor")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.filename == llama.__file__ and "input_layernorm" in (frame.line or "") for frame in frames)


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_is_patched_has_its_own_weights_and_can_be_unpatched_alone():
    model = make()
    quietly(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    prequal.reset_stats()
    assert not torch.allclose(logits(twin), logits(model))
    assert calls()["swiglu_"] == 4
    prequal.unpatch(twin)
    prequal.reset_stats()
    logits(twin)
    assert calls() == {}
    logits(model)
    assert calls() == expected_calls("Llama")


def test_a_pickle_comes_back_patched():
    model = make()
    quietly(model)
    again = pickle.loads(pickle.dumps(model))
    prequal.reset_stats()
    assert torch.equal(logits(again), logits(model))
    assert calls()["rope"] == 4
    assert type(again.model.norm) is type(model.model.norm)
    prequal.unpatch(again)
    assert type(again.model.norm) is llama.LlamaRMSNorm


def test_a_pickle_whose_class_is_another_now_comes_back_as_it_was(monkeypatch, caplog):
    model = make()
    quietly(model)
    data = pickle.dumps(model.model.norm)

    def forward(self, hidden_states):
        return hidden_states

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", forward)
    with caplog.at_level("WARNING", logger="prequal"):
        again = pickle.loads(data)
    assert type(again) is llama.LlamaRMSNorm
    assert "LlamaRMSNorm is loaded as it was before prequal.patch" in caplog.text


def test_a_pickle_whose_class_has_no_rotation_now_comes_back_as_it_was(monkeypatch, caplog):
    model = make()
    quietly(model)
    data = pickle.dumps(model.model.layers[0].self_attn)
    forward = inspect.unwrap(llama.LlamaAttention.forward)
    names = {name: value for name, value in forward.__globals__.items() if name != recognise.ROTARY}
    monkeypatch.setattr(llama.LlamaAttention, "forward", types.FunctionType(forward.__code__, names))
    with caplog.at_level("WARNING", logger="prequal"):
        again = pickle.loads(data)
    assert type(again) is llama.LlamaAttention
    assert "LlamaAttention is loaded as it was before prequal.patch" in caplog.text


def test_a_replica_uses_its_own_weights():
    """DataParallel copies a module's dictionary: a method bound in it would hold the first device's weights."""
    model = make()
    quietly(model)
    norm = model.model.norm
    replica = norm._replicate_for_data_parallel()
    replica.weight = 3 * norm.weight.detach()
    x = torch.randn(2, 64)
    torch.testing.assert_close(replica(x), 3 * norm(x))


def test_a_model_inside_of_others_is_found():
    model = make()
    outer = nn.DataParallel(nn.ModuleDict({"inner": model}))
    report = quietly(outer)
    assert report.ops == expected_ops("Llama")
    assert "module.inner.model.norm" in [entry.name for entry in report.replaced]
    assert len(prequal.unpatch(outer).replaced) == len(report.replaced)


def test_one_layer_alone_can_be_patched():
    layer = make().model.layers[0]
    assert quietly(layer).ops == {"fused_add_rms_norm": 1, "rms_norm": 2, "rope": 1, "swiglu": 1}


@every_family
def test_a_compiled_model_is_one_graph_and_says_the_same(family):
    model = make(family)
    quietly(model)
    want = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    try:
        torch.testing.assert_close(logits(compiled), want)
        assert type(model.model.layers[0]) is type(model.model.layers[1])  # what is compiled for one serves the other
    finally:
        torch._dynamo.reset()


# ---- hooks, and whoever else changes modules -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_an_exported_model_has_the_ops_and_says_the_same(family):
    model = make(family)
    before = logits(model)
    quietly(model)
    exported = torch.export.export(model, (), {"input_ids": tokens(), "use_cache": False})
    names = [str(node.target) for node in exported.graph.nodes]
    for op, number in {**expected_ops(family), "rms_norm": expected_calls(family)["rms_norm"]}.items():
        assert names.count(f"prequal.{op}.default") == number
    torch.testing.assert_close(exported.module()(input_ids=tokens(), use_cache=False).logits, before)


def test_hooks_of_every_module_see_what_they_saw():
    """A norm inside of the fused op, an activation inside of the product: with a hook they run by themselves again."""
    model = make()
    seen: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    logits(model)
    want, seen[:] = list(seen), []
    quietly(model)
    prequal.reset_stats()
    logits(model)
    assert sorted(seen) == sorted(want)
    assert needs("fused_add_rms_norm") == needs("swiglu") == {"bare"}


def test_a_hook_may_change_what_the_fused_norm_returns():
    model = make()
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda module, args, output: 2 * output)
    before = logits(model)
    quietly(model)
    torch.testing.assert_close(logits(model), before)


def test_a_forward_that_is_put_on_the_instance_later_is_called():
    model = make()
    quietly(model)
    layer = model.model.layers[0]
    called = []
    inner = layer.post_attention_layernorm.forward

    def around(x):
        called.append(1)
        return inner(x)

    layer.post_attention_layernorm.forward = around
    logits(model)
    assert called == [1]
    kind = type(layer.post_attention_layernorm)
    quietly(model)
    assert type(layer.post_attention_layernorm) is kind
    report = prequal.unpatch(model)
    assert [entry.name for entry in report.left] == ["model.layers.0.post_attention_layernorm"]
    assert "its forward is replaced on the instance" in str(report)
    del layer.post_attention_layernorm.forward
    assert len(prequal.unpatch(model).replaced) == 1


def test_a_module_whose_forward_is_on_the_instance_is_left():
    model = make()
    norm = model.model.norm
    norm.forward = norm.forward
    report = quietly(model)
    (entry,) = [entry for entry in report.left if entry.name == "model.norm"]
    assert entry.reason.startswith("its forward is replaced on the instance")


def test_a_module_that_gets_another_class_over_the_patch_is_left():
    model = make()
    quietly(model)
    norm = model.model.norm
    norm.__class__ = type("Wrapped", (type(norm),), {})
    for report in (quietly(model), prequal.unpatch(model)):
        (entry,) = [entry for entry in report.left if entry.name == "model.norm"]
        assert entry.reason == "its class was changed after it was patched"
    assert type(norm).__name__ == "Wrapped"


def test_a_norm_that_is_exchanged_later_is_called_and_not_guessed():
    class Doubling(nn.Module):
        weight = torch.ones(64)
        variance_epsilon = 1e-6

        def forward(self, x):
            return 2 * x

    plain, patched = make(), make()
    quietly(patched)
    for model in (plain, patched):
        model.model.layers[0].post_attention_layernorm = Doubling()
        model.model.layers[1].mlp.act_fn = nn.Tanh()
    prequal.reset_stats()
    torch.testing.assert_close(logits(patched), logits(plain))
    assert needs("fused_add_rms_norm") == needs("swiglu") == {"same_module"}


def test_an_activation_of_the_same_class_that_computes_something_else_is_not_taken_for_the_first():
    plain = make("Gemma")
    for layer in plain.model.layers:
        layer.mlp.act_fn = nn.GELU(approximate="tanh")
    patched = copy.deepcopy(plain)
    quietly(patched)
    for model in (plain, patched):
        model.model.layers[0].mlp.act_fn = nn.GELU()  # exchanged
        model.model.layers[1].mlp.act_fn.approximate = "none"  # changed
    x = 3 * torch.randn(5, 64)
    for one, other in zip(patched.model.layers, plain.model.layers, strict=True):
        torch.testing.assert_close(one.mlp(x), other.mlp(x))
    assert needs("geglu") == {"same_module"}


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_a_weight_that_the_norm_broadcasts_is_multiplied_by_the_models_own_code(family):
    model = make(family)
    for norm in (model.model.norm, model.model.layers[0].post_attention_layernorm):
        norm.weight = nn.Parameter(torch.tensor([1.3]))
    before = logits(model)
    quietly(model)
    torch.testing.assert_close(logits(model), before)
    assert needs("rms_norm") == needs("fused_add_rms_norm") == {"alike"}


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_strict_mode_reaches_into_a_patched_model():
    model = make()
    quietly(model)
    with prequal.strict(), pytest.raises(prequal.FallbackError, match="rms_norm on cpu"):
        logits(model)


def test_another_layout_is_turned_by_the_models_own_code_and_counted():
    helper = forwards.rotary(llama.apply_rotary_pos_emb, False)
    q, k, table = torch.randn(2, 7, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(1, 7, 16)
    got = helper(q, k, table, table, unsqueeze_dim=2)
    for a, b in zip(got, llama.apply_rotary_pos_emb(q, k, table, table, unsqueeze_dim=2), strict=True):
        assert torch.equal(a, b)
    assert needs("rope") == {"layout"}
    with prequal.strict(), pytest.raises(prequal.FallbackError, match="unsupported_input:layout"):
        helper(q, k, table, table, unsqueeze_dim=2)


def test_tables_that_the_model_broadcasts_are_turned_by_the_models_own_code_and_counted():
    plain, patched = make(), make()
    quietly(patched)
    for positions in ([[3]], [[3], [5]]):
        prequal.reset_stats()
        named = {"position_ids": torch.tensor(positions)}
        torch.testing.assert_close(logits(patched, **named), logits(plain, **named))
        assert needs("rope") == {"layout"}
    helper = forwards.rotary(llama.apply_rotary_pos_emb, False)
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    for shape in ((3, 5, 16), (1, 1, 16), (3, 1, 16)):
        table = torch.randn(shape)
        for a, b in zip(helper(q, k, table, table), llama.apply_rotary_pos_emb(q, k, table, table), strict=True):
            assert torch.equal(a, b)
    more = torch.randn(1, 6, 16)
    with pytest.raises(RuntimeError, match="must match"):  # as before the patch: not the first five rows
        helper(q, k, more, more)


def test_a_disabled_op_answers_by_its_reference_and_is_counted():
    model = make()
    quietly(model)
    before = logits(model)
    for context, gated in ((prequal.reference("rms_norm", "rope"), "swiglu_"), (prequal.reference(), "swiglu")):
        prequal.reset_stats()
        with context:
            torch.testing.assert_close(logits(model), before)
        expected = expected_calls("Llama")
        expected[gated] = expected.pop("swiglu_")
        assert calls() == expected
        assert all(row["cpu"]["fast"] == 0 for row in prequal.stats().values())


@pytest.mark.gpu
def test_a_disabled_op_is_off_in_a_patched_model_on_a_gpu(cuda):
    model = make(dtype=torch.bfloat16, device=cuda)
    quietly(model)
    logits(model)
    prequal.disable("rope")
    prequal.reset_stats()
    logits(model)
    assert prequal.stats()["rope"][str(cuda)] == {"fast": 0, "reference": {"disabled_by_flag": 2}}
    assert prequal.stats()["swiglu_"][str(cuda)] == {"fast": 2, "reference": {}}


# ---- which ops -------------------------------------------------------------------------------------------------------


def test_only_the_ops_that_are_asked_for_come_in():
    model = make()
    report = quietly(model, ops=["rope", "fused_add_rms_norm"])
    assert report.ops == {"fused_add_rms_norm": 2, "rope": 2}
    prequal.reset_stats()
    logits(model)
    assert calls() == {"fused_add_rms_norm": 2, "rope": 2}
    text = str(report)
    assert "5 × LlamaRMSNorm: rms_norm was not asked for" in text
    assert "2 × LlamaMLP: swiglu was not asked for" in text


def test_patching_twice_is_patching_once():
    model = make()
    first = quietly(model)
    classes = [type(module) for module in model.modules()]
    second = quietly(model)
    assert [type(module) for module in model.modules()] == classes
    assert second == first


def test_a_second_patch_is_what_holds():
    model = make()
    quietly(model)
    quietly(model, ops=["swiglu"])
    prequal.reset_stats()
    logits(model)
    assert calls() == {"swiglu_": 2}
    assert type(model.model.norm) is llama.LlamaRMSNorm
    quietly(model)
    prequal.reset_stats()
    logits(model)
    assert calls() == expected_calls("Llama")
    prequal.unpatch(model)
    assert not prequal.unpatch(model).replaced


# ---- the report ------------------------------------------------------------------------------------------------------


def test_the_report_is_printed_and_names_what_was_left_and_why(capsys):
    model = make(hidden_act="relu")
    report = prequal.patch(model)
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    for line in (
        "prequal.patch of LlamaForCausalLM: 9 of ",
        "2 × LlamaDecoderLayer: fused_add_rms_norm (a residual add whose norm is in another module stays torch's)",
        "2 × LlamaAttention: rope  [model.layers.0.self_attn and 1 more]",
        "5 × LlamaRMSNorm: rms_norm",
        "2 × LlamaMLP: no op for the activation ReLU",
        "1 × LlamaRotaryEmbedding: it computes the tables",
        "15 × Linear",
        ": nothing that these ops compute",
    ):
        assert line in printed
    prequal.unpatch(model)
    assert capsys.readouterr().out == ""
    prequal.unpatch(model, verbose=True)
    assert capsys.readouterr().out.startswith("prequal.unpatch of LlamaForCausalLM: 0 of 0")


def test_a_model_with_nothing_known_is_an_error_that_says_what_it_has():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match=r"model: expected modules of .*got none in Sequential") as caught:
        prequal.patch(model)
    assert "1 × Linear" in str(caught.value)
    with pytest.raises(ValueError, match="something to replace for geglu, got none in LlamaForCausalLM"):
        prequal.patch(make(), ops=["geglu"])


def test_a_norm_of_torchs_own_is_left_and_the_report_says_why():
    model = nn.Sequential(make(), nn.RMSNorm(64), nn.LayerNorm(64), nn.ReLU())
    report = quietly(model)
    reasons = {entry.module: entry.reason for entry in report.left}
    assert reasons["RMSNorm"] == reasons["LayerNorm"] == patching.TORCHS_NORM
    assert reasons["ReLU"] == patching.NOTHING
    assert "1 × RMSNorm: a norm of torch's own: only the code of transformers' models is replaced  [1]" in str(report)


@pytest.mark.parametrize("function", [prequal.patch, prequal.unpatch])
def test_what_is_no_module_is_an_error(function):
    with pytest.raises(TypeError, match=rf"{function.__name__}: model: expected a torch.nn.Module, got str"):
        function("gpt2")


def test_wrong_names_of_ops_are_errors_with_a_hint():
    model = make()
    with pytest.raises(
        ValueError, match=r"ops: expected names out of rms_norm, .*got 'swi_glu'; did you mean swiglu\?"
    ):
        prequal.patch(model, ops=["swi_glu"])
    with pytest.raises(TypeError, match="ops: expected names of ops in a list, got the text 'rope'"):
        prequal.patch(model, ops="rope")
    with pytest.raises(TypeError, match="ops: expected names of ops in a list, got int"):
        prequal.patch(model, ops=3)
    with pytest.raises(ValueError, match=r"ops: expected names out of rms_norm, .*got none"):
        prequal.patch(model, ops=[])
    with pytest.raises(TypeError, match=r"exact_rounding: expected a bool, got str"):
        prequal.patch(model, exact_rounding="no")
    for function in (prequal.patch, prequal.unpatch):
        with pytest.raises(TypeError, match=r"verbose: expected a bool, got str"):
            function(model, verbose="no")
    assert type(model.model.norm) is llama.LlamaRMSNorm


# ---- what is not of a known form -------------------------------------------------------------------------------------


class NearlyRMSNorm(nn.Module):
    """Like Llama's, with the eps outside of the root."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x / (torch.sqrt(variance) + self.variance_epsilon)
        return self.weight * x.to(dtype)


def test_a_norm_of_another_arithmetic_is_left_whatever_its_name():
    model = make()
    model.model.layers[0].post_attention_layernorm = NearlyRMSNorm()
    before = logits(model)
    report = quietly(model)
    assert "1 × NearlyRMSNorm: its forward is no RMS norm of a form that is known" in str(report)
    assert "post_attention_layernorm: its forward is no RMS norm" in str(report)
    assert report.ops["fused_add_rms_norm"] == 1
    torch.testing.assert_close(logits(model), before)


def test_another_rotation_is_left(monkeypatch):
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        return q, k

    monkeypatch.setattr(llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    report = quietly(make())
    assert "rope" not in report.ops
    assert "2 × LlamaAttention: its apply_rotary_pos_emb is no rotation of a form that is known" in str(report)


@pytest.mark.parametrize(
    "parameters",
    ["q, k, sin, cos, unsqueeze_dim=1", "k, q, cos, sin, unsqueeze_dim=1", "q, k, cos, sin, unsqueeze_dim=2"],
)
def test_a_rotation_of_the_same_statements_with_another_signature_is_left(tmp_path, monkeypatch, parameters):
    source = inspect.getsource(inspect.unwrap(llama.apply_rotary_pos_emb))
    (function,) = ast.parse(source).body
    function.args = ast.parse(f"def f({parameters}): pass").body[0].args
    function.decorator_list = []
    path = tmp_path / "rotation.py"
    path.write_text(ast.unparse(function))
    names = {"rotate_half": llama.rotate_half}
    exec(compile(path.read_text(), str(path), "exec"), names)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", names["apply_rotary_pos_emb"])
    report = quietly(make())
    assert "rope" not in report.ops
    assert "2 × LlamaAttention: its apply_rotary_pos_emb is no rotation of a form that is known" in str(report)


def test_a_forward_without_source_is_left():
    names: dict = {}
    exec("def forward(self, x):\n    return self.weight * x", names)
    cls = type("QuietRMSNorm", (nn.Module,), {"forward": names["forward"], "__module__": "elsewhere"})
    model = make()
    model.extra = cls()
    assert "1 × QuietRMSNorm: the source of its forward cannot be read" in str(quietly(model))


class Rewritten(nn.Module):
    """Every step in another dress: what must be found, and what must not."""

    def __init__(self):
        super().__init__()
        self.norm = llama.LlamaRMSNorm(8)
        self.act = nn.SiLU()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, other):
        x = x + other  # exchanged summands
        other = x
        x = self.norm(x)
        x = self.act(self.a(x)) * self.b(x)
        if x.sum() > 0:
            x = other + x
            other = x
            x = self.norm(x)
        x = other + x
        x = self.norm(x)
        other = x
        return x, other


def test_steps_are_found_by_what_they_do_and_in_no_other_order():
    assert recognise.steps_of(Rewritten) == recognise.Steps(("norm", "norm"), ("act", "a", "b"))
    assert recognise.lone_adds(Rewritten) == 1
    plain = Rewritten()
    model = copy.deepcopy(plain)
    report = quietly(model)
    assert report.ops == {"fused_add_rms_norm": 1, "swiglu": 1, "rms_norm": 1}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x, other = torch.randn(2, 3, 8, generator=generator)
        torch.testing.assert_close(model(x, other), plain(x, other))


@pytest.mark.parametrize(
    "body",
    [
        "x = self.act(self.a(x)) * self.b(other)",  # two inputs
        "x = self.act(self.a(x)) + self.b(x)",
        "x = self.act(self.a(x), 2) * self.b(x)",
        "x = x + other\n    other = other\n    x = self.norm(x)",
        "x = x - other\n    other = x\n    x = self.norm(x)",
        "x = x + other\n    other = x\n    x = self.norm(x, 1)",
        "x += other\n    other = x\n    x = self.norm(x)",
    ],
)
def test_what_only_looks_like_a_step_is_none(body):
    (node,) = ast.parse(f"def forward(self, x, other):\n    {body}\n    return x").body
    assert not recognise._replace(node, recognise.Steps())


def test_importing_prequal_and_patching_import_no_transformers():
    code = (
        "import sys, prequal; prequal.patch, prequal.unpatch; import prequal.integrations;"
        "assert not any(name.partition('.')[0] == 'transformers' for name in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_the_families_that_the_documentation_names_are_tested():
    page = pathlib.Path(__file__).parents[2] / "docs" / "patch.md"
    named = re.findall(r"^\| (\w+) \| `rms_norm`.* (\d) a layer \| `(swiglu|geglu)`.* `rope`", page.read_text(), re.M)
    assert {(family, int(fused) * 2, gated) for family, fused, gated in named} == {
        (family, FUSED, "geglu" if "geglu" in ops else "swiglu") for family, (_, _, ops) in FAMILIES.items()
    }


# ---- the head and the loss -------------------------------------------------------------------------------------------

HEAD = ["linear_cross_entropy"]


def loss_and_gradients(model, **named) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = tokens(next(model.parameters()).device)
    labels = ids.clone()
    labels[0, :3] = -100
    out = model(input_ids=ids, labels=labels, **named)
    out.loss.backward()
    return {"loss": out.loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@every_dtype
@every_family
def test_head_and_loss_in_training_are_as_near_to_float64_as_the_model_was(family, dtype, device):
    model = make(family, dtype, device).train()
    truth = loss_and_gradients(copy.deepcopy(model).double())
    eager = loss_and_gradients(model)
    assert quietly(model, ops=HEAD).ops == {"linear_cross_entropy": 1}
    patched = loss_and_gradients(model)
    assert calls()["cross_entropy_chunk_"] == 1
    assert patched.keys() == truth.keys()
    if dtype == torch.float32:
        for name in truth:
            assert distance(patched[name], truth[name]) < 1e-4, name
    else:
        far = {name: (distance(patched[name], truth[name]), distance(eager[name], truth[name])) for name in truth}
        assert rms(ours for ours, _ in far.values()) <= 1.1 * rms(theirs for _, theirs in far.values())


def test_a_number_of_items_and_shifted_labels_are_those_of_the_loss(device):
    model = make(device=device).train()
    shifted = torch.roll(tokens(device), -2, 1)
    every = ({"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": shifted})
    wants = [loss_and_gradients(model, **named) for named in every]
    quietly(model, ops=HEAD)
    for named, want in zip(every, wants, strict=True):
        got = loss_and_gradients(model, **named)
        assert calls()["cross_entropy_chunk_"] == 1
        prequal.reset_stats()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)


def test_logits_are_there_where_they_are_asked_for(device):
    model = make(device=device)
    ids = tokens(device)
    want = logits(model)
    quietly(model, ops=HEAD)
    assert torch.equal(logits(model), want)
    assert torch.equal(model(input_ids=ids, labels=ids).logits, want)  # in evaluation
    model.train()
    assert torch.equal(model(input_ids=ids).logits, want)
    out = model(input_ids=ids, labels=ids)
    assert out.logits is None
    assert out.loss.requires_grad


def test_the_head_and_the_loss_are_left_where_nobody_asks_for_them():
    model = make()
    assert "linear_cross_entropy" not in quietly(model).ops
    assert quietly(model, ops=[*HEAD, "rope"]).ops == {"linear_cross_entropy": 1, "rope": 2}
    prequal.unpatch(model)
    assert type(model) is llama.LlamaForCausalLM


def ignoring_zero(folder):
    """The loss of transformers, which leaves out another label where none is given."""
    loss = transformers.loss.loss_utils.ForCausalLMLoss
    path = folder / "loss.py"
    path.write_text(inspect.getsource(loss).replace("ignore_index: int = -100", "ignore_index: int = 0"))
    names = dict(loss.__globals__)
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert names["ForCausalLMLoss"](torch.zeros(1, 3, 4), torch.zeros(1, 3).long(), 4).isnan()
    return names["ForCausalLMLoss"]


def test_another_loss_or_head_goes_the_way_it_went(device, tmp_path):
    model = make(device=device).train()
    quietly(model, ops=HEAD)
    ids = tokens(device)

    def half(logits, labels, vocab_size, **kwargs):
        return 0.5 * logits.sum()

    model.loss_function = half
    assert model(input_ids=ids, labels=ids).logits is not None
    assert needs("cross_entropy_chunk_") == {forwards.LOSS}
    prequal.reset_stats()
    model.loss_function = of_zero = ignoring_zero(tmp_path)
    ids[0, :3] = 0
    assert model(input_ids=ids, labels=ids).loss == of_zero(model(input_ids=ids).logits, ids, 64)
    assert needs("cross_entropy_chunk_") == {forwards.LOSS}
    prequal.reset_stats()
    model.lm_head.register_forward_hook(lambda module, args, out: out)
    assert model(input_ids=ids, labels=ids).logits is not None
    assert needs("cross_entropy_chunk_") == {forwards.BARE}
