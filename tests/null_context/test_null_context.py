"""NullContext on a cross-attention whose products round as a test tells them to: every refusal by a real mismatch."""

from __future__ import annotations

import copy
import operator
import pathlib
import threading

import pytest
import torch
from generator_modules import MultiHeadAttention
from torch import nn
from torch.nn import functional as F

import prequal
from prequal.null_context.condition import NEEDS
from prequal.null_context.layer import numerics_of
from prequal.runtime.telemetry import Counted

matmul = torch.backends.cuda.matmul
LENGTH, CONTEXT, WIDTH = 11, 24, 32
ROW, PROJECTION = "null_context", "null_context_projection"
# A wish to see a product round otherwise: rows of the product -> whether this one does.
NEVER = staticmethod(lambda rows: False)


class Product(nn.Linear):
    """A Linear whose last bit depends on how many rows it multiplies, as a library's choice of kernel may make it."""

    odd = NEVER

    def forward(self, x):
        y = super().forward(x)
        rows = x.shape[:-1].numel()
        if not self.odd(rows):
            return y
        bits = y.contiguous().view(torch.int16 if y.element_size() == 2 else torch.int32)
        return (bits ^ 1).view(y.dtype)


class Attention(MultiHeadAttention):
    """Masks and dropout besides; and, where asked for, joint attention: the queries' own tokens share the softmax."""

    joint = False

    def __init__(self, dropout=0.0):
        super().__init__(WIDTH, 4, CONTEXT)
        self.to_out = Product(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, context=None, valid=None):
        batch, tokens, _ = x.shape
        q = self.to_q(x).reshape(batch, tokens, self.num_heads, -1)
        k, v = self.to_kv(context).reshape(batch, context.shape[1], 2, self.num_heads, -1).unbind(2)
        if self.joint:
            k, v = torch.cat([k, q], 1), torch.cat([v, q], 1)
        mask = None if valid is None else valid[:, None, None, :]
        parts = (part.transpose(1, 2) for part in (q, k, v))
        h = F.scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=self.drop.p if self.training else 0.0)
        return self.to_out(h.transpose(1, 2).reshape(batch, tokens, -1))


def noise(*shape, dtype=torch.bfloat16, device="cpu", seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def attention(odd=None, dtype=torch.bfloat16, device="cpu", dropout=0.0, seed=0):
    module = Attention(dropout)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(noise(*parameter.shape, dtype=torch.float32, seed=seed + i) / parameter.shape[-1] ** 0.5)
    if odd is not None:
        module.to_out.odd = odd
    return module.to(device, dtype).eval()


def layer_of(module, **more):
    return prequal.CrossAttention(module, "to_out", lambda c: module.to_kv(c)[..., WIDTH:], WIDTH, **more)


def context_of(*modules, canonical_rows=(1, 8, 64), **more):
    layers = {str(i): layer_of(module, **more) for i, module in enumerate(modules)}
    return prequal.NullContext(layers, canonical_rows=canonical_rows)


def condition(guidance="serial", dtype=torch.bfloat16, device="cpu", length=LENGTH, batch=1, **more):
    cond = noise(batch, length, CONTEXT, dtype=dtype, device=device, seed=9)
    return prequal.NullCondition.like(cond, **more) if guidance == "serial" else prequal.GuidedCondition(cond, **more)


def qualified(module=None, guidance="serial", shapes=((1, 5), (1, 20)), device="cpu", **more):
    module = attention(device=device) if module is None else module
    context = context_of(module)
    report = context.qualify(condition(guidance, device=device), shapes=shapes, **more)
    assert report.path == "row", report
    prequal.reset_stats()
    return context


def same_bits(a, b):
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))
    )


@torch.no_grad()
def answered(context, guidance="serial", tokens=7, layer="0", batch=1, **more):
    """One call, its answer held against the reference."""
    symbol = condition(guidance, batch=batch, **more)
    x = noise(batch * (2 if guidance == "batched" else 1), tokens, WIDTH, dtype=symbol.dtype, device=symbol.device)
    got = context.answer(layer, x, symbol)
    zeros = symbol.materialize()
    want = context.layers[layer].reference(x, zeros, symbol.valid)
    assert same_bits(got, want)
    return got


def counted():
    """(path that served, or the reasons) of the calls since the last reset."""
    stats = prequal.stats()
    fast = {op for op in (ROW, PROJECTION) for row in stats.get(op, {}).values() if row["fast"]}
    reasons = {reason for row in stats.get(ROW, {}).values() for reason in row["reference"]}
    return fast, reasons


both = pytest.mark.parametrize("guidance", ["serial", "batched"])


# ---- the row ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_answer_has_the_bits_of_the_reference(guidance, dtype, device):
    module = attention(dtype=dtype, device=device)
    context = context_of(module, canonical_rows=(1, 8, 64, 256))
    cond = condition(guidance, dtype=dtype, device=device)
    report = context.qualify(cond, shapes=[(1, 5), (1, 67)])
    assert report.path in ("row", "projection"), report
    prequal.reset_stats()
    for tokens in (5, 67):
        answered(context, guidance, tokens, dtype=dtype, device=device)
    served, _ = counted()
    assert served == {ROW if report.path == "row" else PROJECTION}


def test_the_row_is_a_view_that_allocates_nothing():
    module = attention()
    context = qualified(module)
    module.requires_grad_(False)
    row = context.row("0", noise(1, 7, WIDTH), condition())
    assert row.shape == (1, 7, WIDTH)
    assert row.stride() == (0, 0, 1)
    assert row.untyped_storage().nbytes() == WIDTH * 2  # bf16
    other = context.row("0", noise(1, 9, WIDTH), condition())
    assert other.data_ptr() == row.data_ptr()


@pytest.mark.gpu
def test_the_row_is_served_inside_a_graph_capture(cuda):
    context = qualified(device=cuda)
    x, symbol = noise(1, 7, WIDTH, device=cuda), condition(device=cuda)
    want = context.layers["0"].reference(x, symbol.materialize())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        got = x + context.answer("0", x, symbol)
    graph.replay()
    assert same_bits(got, x + want)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add(1)  # torch warns of an empty graph
        with pytest.raises(RuntimeError, match="expected no graph capture"):
            context.qualify(symbol, shapes=[(1, 5)])


@both
def test_several_sequences_and_padded_conditions_are_answered(guidance):
    module = attention()
    context = context_of(module)
    valid = torch.ones(3, LENGTH, dtype=torch.bool)
    valid[1, 4:] = False
    symbol = condition(guidance, batch=3, valid=valid)
    report = context.qualify(symbol, shapes=[(3, 5)])
    assert report.path == "row", report
    prequal.reset_stats()
    answered(context, guidance, 5, batch=3, valid=valid)
    assert counted() == ({ROW}, set())


class Masked(Attention):
    """Where it has a mask its product rounds otherwise, as that of another kernel of attention may."""

    def forward(self, x, context=None, valid=None):
        self.to_out.odd = NEVER if valid is None else lambda rows: rows > 1
        return super().forward(x, context, valid)


@both
def test_a_mask_is_served_only_where_one_was_run(guidance):
    module = attention()
    module.__class__ = Masked
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    context = qualified(module, guidance)
    answered(context, guidance, valid=valid)
    assert counted() == (set(), {"unsupported_input:condition"})
    run = context.qualify(condition(guidance, valid=valid), shapes=[(1, 7)])
    assert run.canonical_rows != 1
    assert "row made at 1" in run.layers[0].mismatches


@both
@torch.no_grad()
def test_a_run_looks_at_the_valid_tokens_of_its_condition(guidance):
    module = attention()
    context = context_of(module)
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    valid[0, 3:] = False
    x = noise(2 if guidance == "batched" else 1, 7, WIDTH)
    report = context.qualify(condition(guidance, valid=valid), runs=[lambda c: context.answer("0", x, c)])
    assert report.path == "row", report
    prequal.reset_stats()
    answered(context, guidance, valid=valid)
    assert counted() == ({ROW}, set())
    prequal.reset_stats()
    answered(context, guidance)
    assert counted() == (set(), {"unsupported_input:condition"})


def test_conditions_are_checked_at_their_valid_positions_only():
    """An invalid token may have any value row: its weight is zero."""
    module = attention()
    layer = prequal.CrossAttention(module, "to_out", lambda c: _spoilt(module.to_kv(c)[..., WIDTH:]), WIDTH)
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    valid[0, -1] = False
    context = prequal.NullContext({"0": layer})
    assert context.qualify(condition(valid=valid), shapes=[(1, 5)]).path == "row"
    assert context.qualify(condition(), shapes=[(1, 5)]).reason == "unsupported_input:value_rows"


def _spoilt(values):
    values[..., -1, :] += 1
    return values


# ---- the search, and the order of paths ------------------------------------------------------------------------------


def test_the_smallest_row_count_that_passes_is_taken():
    """As on the article's GPU: few rows are multiplied otherwise than many."""
    module = attention(odd=lambda rows: rows < 8)
    context = context_of(module, canonical_rows=(256, 1, 8, 4, 64))
    report = context.qualify(condition(), shapes=[(1, 20)])
    assert (report.path, report.canonical_rows) == ("row", 8)
    assert set(report.layers[0].mismatches) == {"row made at 1", "row made at 4"}
    assert "1 ulp apart" in report.layers[0].mismatches["row made at 1"]
    answered(context, tokens=20)


def test_one_number_of_rows_is_the_only_candidate():
    report = context_of(attention(), canonical_rows=256).qualify(condition(), shapes=[(1, 20)])
    assert report.canonical_rows == 256


@both
def test_where_no_row_count_passes_the_projection_serves(guidance):
    """Every candidate rounds otherwise than the reference's products; those of the reference's shape do not."""
    module = attention(odd=lambda rows: rows in (1, 8, 64))
    context = context_of(module)
    report = context.qualify(condition(guidance), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("projection", "qualification_failed")
    assert "row made at 1" in report.detail
    prequal.reset_stats()
    answered(context, guidance, 20)
    assert counted() == ({PROJECTION}, {"qualification_failed"})


def test_where_the_conditional_slice_moves_the_projection_serves():
    """N rows alone round otherwise than the first N of 2N: the candidates are right, and may not serve."""
    module = attention(odd=lambda rows: rows == 20)
    context = context_of(module)
    report = context.qualify(condition("batched"), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("projection", "qualification_failed")
    assert set(report.layers[0].mismatches) == {"conditional slice"}
    prequal.reset_stats()
    answered(context, "batched", 20)
    assert counted() == ({PROJECTION}, {"qualification_failed"})
    # the conditional branch of serial guidance is a call of its own and does not change
    assert context.qualify(condition(), shapes=[(1, 19)]).path == "row"


def test_where_the_attention_itself_depends_on_the_batch_the_reference_serves():
    """Queries of N rows round otherwise than of 2N: neither the slice nor the projection has the reference's bits."""
    module = attention()
    module.to_q = _as_product(module.to_q, lambda rows: rows == 20)
    with torch.no_grad():
        for parameter in module.to_q.parameters():
            parameter.mul_(4)  # so that one bit of a query reaches the attention's result
    context = context_of(module)
    report = context.qualify(condition("batched"), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("reference", "qualification_failed")
    assert set(report.layers[0].mismatches) == {"conditional slice", "projection of the value row"}
    prequal.reset_stats()
    answered(context, "batched", 20)
    assert counted() == (set(), {"qualification_failed"})


def _as_product(linear, odd):
    made = Product(linear.in_features, linear.out_features).to(linear.weight.dtype)
    made.load_state_dict(linear.state_dict())
    made.odd = odd
    return made


def test_every_layer_and_every_shape_must_pass():
    good, bad = attention(), attention(odd=lambda rows: rows == 20, seed=5)
    context = context_of(good, bad)
    assert context.qualify(condition(), shapes=[(1, 19)]).path == "row"
    report = context.qualify(condition(), shapes=[(1, 19), (1, 20)])
    assert (report.path, report.reason) == ("projection", "qualification_failed")
    assert report.detail.startswith("1: row made at 1")
    assert not report.layers[0].mismatches
    for layer in ("0", "1"):
        prequal.reset_stats()
        answered(context, tokens=20, layer=layer)
        assert counted() == ({PROJECTION}, {"qualification_failed"})


def test_layers_need_one_row_count_in_common():
    few, many = attention(odd=lambda rows: rows == 1), attention(odd=lambda rows: rows == 8, seed=5)
    report = context_of(few, many, canonical_rows=(1, 8)).qualify(condition(), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("projection", "qualification_failed")
    assert context_of(few, many, canonical_rows=(1, 8, 64)).qualify(condition(), shapes=[(1, 20)]).canonical_rows == 64


# ---- applicability ---------------------------------------------------------------------------------------------------


def test_value_rows_that_differ_are_found():
    module = attention()
    moved = torch.linspace(0, 1, LENGTH)[:, None].to(torch.bfloat16)
    forward = module.to_kv.forward
    module.to_kv.forward = lambda c: forward(c) + moved  # a position in the values
    report = context_of(module).qualify(condition(), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("reference", "unsupported_input:value_rows")
    assert "0: output 0 at" in report.detail


def test_joint_attention_is_found_undeclared_and_refused_declared():
    module = attention()
    module.joint = True
    report = context_of(module).qualify(condition(), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("reference", "unsupported_input:one_row")
    report = context_of(module, joint=True).qualify(condition(), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("reference", "unsupported_input:joint")


def test_dropout_is_refused_at_qualification_and_at_a_call():
    module = attention(dropout=0.3)
    context = context_of(module)
    module.train()
    assert context.qualify(condition(), shapes=[(1, 20)]).reason == "unsupported_input:dropout"
    module.eval()
    assert context.qualify(condition(), shapes=[(1, 20)]).path == "row"
    module.train()
    prequal.reset_stats()
    with torch.no_grad():
        assert context.row("0", noise(1, 20, WIDTH), condition()) is None
    assert counted() == (set(), {"unsupported_input:dropout"})


class Dropping(Attention):
    """Its dropout is a function of a number, which no submodule tells of."""

    def forward(self, x, context=None, valid=None):
        return F.dropout(super().forward(x, context, valid), 0.5, self.training)


def test_a_module_that_begins_training_after_its_qualification_is_refused():
    module = attention()
    module.__class__ = Dropping
    context = qualified(module)
    module.train()
    with torch.no_grad():
        assert context.row("0", noise(1, 7, WIDTH), condition()) is None
    assert counted() == (set(), {"unsupported_input:dropout"})
    prequal.reset_stats()
    module.eval()
    answered(context)
    assert counted() == ({ROW}, set())


class Scaled(Attention):
    """An attribute that is no parameter: of the queries, and so of what the conditional half attends to."""

    def forward(self, x, context=None, valid=None):
        return super().forward(x * self.scale, context, valid)


@torch.no_grad()
def test_the_projection_is_of_the_module_as_it_is_now():
    module = attention(odd=lambda rows: rows in (1, 8, 64))
    module.__class__, module.scale = Scaled, 1.0
    context = context_of(module.train())
    module.eval()
    module.scale = 0.5
    assert context.qualify(condition("batched"), shapes=[(1, 20)]).path == "projection"
    answered(context, "batched", tokens=20)
    module.scale = 0.25
    prequal.reset_stats()
    answered(context, "batched", tokens=20)
    assert counted() == ({PROJECTION}, {"qualification_failed"})


def test_a_condition_without_a_valid_token_is_refused():
    none = torch.zeros(1, LENGTH, dtype=torch.bool)
    module = attention()
    report = context_of(module).qualify(condition(valid=none), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("reference", "unsupported_input:valid_tokens")
    context = qualified(module)
    with torch.no_grad():
        assert context.row("0", noise(1, 7, WIDTH), condition(valid=none)) is None
    assert counted() == (set(), {"unsupported_input:valid_tokens"})


def test_a_run_under_autocast_vouches_for_nothing():
    context = context_of(attention())
    with torch.autocast("cpu", torch.bfloat16):
        report = context.qualify(condition(), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("reference", "unsupported_input:autocast")


def test_inference_tensors_are_not_vouched_for():
    with torch.inference_mode():
        module = attention()
    report = context_of(module).qualify(condition(), shapes=[(1, 20)])
    assert (report.path, report.reason) == ("reference", "unsupported_input:counted_writes")


def test_a_case_without_rows_vouches_for_nothing():
    module = attention()
    with pytest.raises(ValueError, match="shapes: expected positive leading dimensions"):
        context_of(module).qualify(condition(), shapes=[(1, 0)])


# ---- calls that are another case than the qualified ones -------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "more"),
    [
        ("rows", {"tokens": 4}),
        ("rows", {"tokens": 21}),
        ("condition", {"batch": 2}),
        ("condition", {"length": LENGTH + 1}),
    ],
)
@both
def test_shapes_outside_those_that_were_run_are_refused(guidance, need, more):
    context = qualified(guidance=guidance)
    answered(context, guidance, **more)
    assert counted() == (set(), {f"unsupported_input:{need}"})


def test_counts_between_are_served_and_with_exact_shapes_refused():
    context = qualified()
    answered(context, tokens=7)
    assert counted() == ({ROW}, set())
    context = qualified(exact_shapes=True)
    answered(context, tokens=20)
    answered(context, tokens=7)
    assert counted() == ({ROW}, {"unsupported_input:rows"})


def test_gradients_autocast_hooks_transforms_and_other_dtypes_are_refused():
    module = attention()
    context = qualified(module)
    x, symbol = noise(1, 7, WIDTH), condition()

    def refused(need, call=lambda: context.row("0", x, symbol)):
        prequal.reset_stats()
        assert call() is None
        assert counted() == (set(), {f"unsupported_input:{need}"})

    refused("grad")
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            refused("autocast")
        handle = module.to_out.register_forward_hook(lambda *args: None)
        refused("bare")
        handle.remove()
        refused("layout", lambda: context.row("0", x.float(), symbol))
        refused("layout", lambda: context.row("0", x[..., 1:], symbol))
        refused("condition", lambda: context.row("0", x, symbol.float()))
        with torch.utils._python_dispatch.TorchDispatchMode():
            refused("transform")
        assert context.row("0", x, symbol) is not None


def test_an_odd_batch_is_no_batched_guidance():
    context = qualified(guidance="batched")
    with torch.no_grad():
        assert context.row("0", noise(3, 7, WIDTH), condition("batched")) is None
    assert counted() == (set(), {"unsupported_input:layout"})


def test_one_kind_of_guidance_is_not_the_other():
    context = qualified(guidance="batched")
    answered(context, "serial")
    assert counted() == (set(), {"not_qualified"})


def test_every_need_is_described():
    assert all(text and not text.endswith(".") for text in NEEDS.values())


# ---- what ends a qualification ---------------------------------------------------------------------------------------


def _reload(module):
    module.load_state_dict(copy.deepcopy(module.state_dict()))


def _step(module):
    with torch.no_grad():
        module.to_kv.bias.add_(1)


def _exchange_parameter(module):
    module.to_out.weight = nn.Parameter(module.to_out.weight.detach().clone())


def _exchange_memory(module):
    module.to_out.weight.data = module.to_out.weight.data.clone()


def _exchange_module(module):
    module.to_out = copy.deepcopy(module.to_out)


def _relayout(module):
    module.to_out.weight.data = module.to_out.weight.data.t().contiguous().t()


def _threads(module):
    torch.set_num_threads(torch.get_num_threads() + 1)


def _precision(module):
    torch.set_float32_matmul_precision("medium")


CHANGES = {
    "a weight reload": (_reload, "version"),
    "a step": (_step, "bias: version was"),
    "another parameter": (_exchange_parameter, "weight was exchanged"),
    "other memory": (_exchange_memory, "pointer"),
    "another layout": (_relayout, "stride"),
    "another submodule": (_exchange_module, "to_out was exchanged"),
    "another number of threads": (_threads, "numeric flags of torch moved"),
    "another precision": (_precision, "numeric flags of torch moved"),
}


def _bias_comes(module):
    module.to_kv.bias = nn.Parameter(noise(2 * WIDTH))


def _parameter_comes(module):
    module.to_out.register_parameter("extra", nn.Parameter(noise(WIDTH)))


def _submodule_comes(module):
    module.add_module("adapter", nn.Linear(WIDTH, WIDTH))


@both
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_bias_comes, "bias was exchanged"),
        (_parameter_comes, "extra was added"),
        (_submodule_comes, "adapter was added"),
    ],
)
def test_what_comes_to_a_module_ends_the_qualification(change, said, guidance, caplog):
    module = attention()
    module.to_kv.bias = None
    context = qualified(module, guidance)
    change(module)
    prequal.runtime_state.telemetry._said.clear()
    with caplog.at_level("WARNING", "prequal"):
        answered(context, guidance)
    assert counted() == (set(), {"not_qualified"})
    assert said in caplog.text


@pytest.fixture
def restored_flags():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@both
@pytest.mark.parametrize("change", CHANGES)
def test_what_moves_ends_the_qualification_until_the_next(change, guidance, restored_flags, caplog):
    module = attention()
    context = qualified(module, guidance)
    answered(context, guidance)
    assert counted() == ({ROW}, set())
    apply, said = CHANGES[change]
    apply(module)
    prequal.reset_stats()
    prequal.runtime_state.telemetry._said.clear()  # what was logged once is not logged again
    with caplog.at_level("WARNING", "prequal"):
        answered(context, guidance)
    assert counted() == (set(), {"not_qualified"})
    assert said in caplog.text
    if change != "another submodule":  # the adapter was made of the old one
        assert context.qualify(condition(guidance), shapes=[(1, 5), (1, 20)]).path == "row"
        prequal.reset_stats()
        answered(context, guidance)
        assert counted() == ({ROW}, set())


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("tokens", [1, 5], ids=["one token", "a token of five"])
def test_a_write_into_the_cached_row_ends_the_qualification(tokens, inference):
    context = context_of(attention())
    with torch.inference_mode(inference), torch.no_grad():
        assert context.qualify(condition(), shapes=[(1, 1), (1, 5)]).path == "row"
        context.row("0", noise(1, tokens, WIDTH), condition())[:, :1].add_(1)
        prequal.reset_stats()
        answered(context, tokens=tokens)
        assert counted() == (set(), {"not_qualified"})
        assert context.check() == {"serial": "0: the cached row was written to"}
        assert context.qualify(condition(), shapes=[(1, 1), (1, 5)]).path == "row"
        prequal.reset_stats()
        answered(context, tokens=tokens)
        assert counted() == ({ROW}, set())


@both
def test_a_condition_of_another_batch_is_not_answered_for(guidance):
    context = qualified(guidance=guidance)
    with torch.no_grad():
        x = noise(1 if guidance == "serial" else 2, 7, WIDTH)
        assert context.row("0", x, condition(guidance, batch=2)) is None
    assert counted() == (set(), {"unsupported_input:condition"})


def test_a_cast_ends_the_qualification():
    module = attention()
    context = qualified(module)
    module.float()
    with torch.no_grad():
        x = noise(1, 7, WIDTH)
        assert context.row("0", x, condition()) is None
    assert counted() == (set(), {"not_qualified"})


@pytest.mark.gpu
def test_a_move_to_another_device_ends_the_qualification(cuda):
    module = attention()
    context = qualified(module)
    module.to(cuda)
    with torch.no_grad():
        assert context.row("0", noise(1, 7, WIDTH), condition()) is None
        assert context.row("0", noise(1, 7, WIDTH, device=cuda), condition(device=cuda)) is None
    assert counted() == (set(), {"not_qualified", "unsupported_input:condition"})


@pytest.mark.parametrize(
    ("read", "write"),
    [
        (lambda: matmul.allow_bf16_reduced_precision_reduction, lambda on: _set(matmul, "bf16", on)),
        (lambda: matmul.allow_fp16_reduced_precision_reduction, lambda on: _set(matmul, "fp16", on)),
        (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
        (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
        (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    ],
    ids=["bf16 reduction", "fp16 reduction", "flash", "mem_efficient", "math"],
)
def test_what_a_gpu_may_multiply_and_attend_with_is_looked_at(read, write):
    """Flags of torch alone: they can be read and set where there is no GPU."""
    where, before = torch.device("cuda", 0), read()
    then = numerics_of(where)
    write(not before)
    try:
        assert numerics_of(where) != then
    finally:
        write(before)
    assert numerics_of(where) == then


def _set(matmul, half, on):
    setattr(matmul, f"allow_{half}_reduced_precision_reduction", on)


def test_check_compares_the_whole_fingerprint():
    context = qualified()
    assert context.check() == {}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not before)
    try:
        assert "are_deterministic_algorithms_enabled: was" in context.check()["serial"]
    finally:
        torch.use_deterministic_algorithms(before)
    assert context.report("serial") is None
    answered(context)
    assert counted() == (set(), {"not_qualified"})


def test_a_run_that_raises_leaves_the_null_context_closed():
    context = qualified()

    def broken(condition):
        raise RuntimeError("out of memory, say")

    with pytest.raises(RuntimeError, match="out of memory"):
        context.qualify(condition(), runs=[broken])
    assert context.report("serial") is None
    assert not context.is_looking_on


def test_a_run_that_does_not_reach_a_layer_does_not_qualify_it():
    report = context_of(attention()).qualify(condition(), runs=[lambda c: None])
    assert (report.path, report.reason) == ("reference", "unsupported_input:materialized")


# ---- flags, counters, strict mode ------------------------------------------------------------------------------------


def test_flags_turn_off_the_row_and_then_the_projection():
    context = qualified()
    prequal.disable(ROW)
    answered(context)
    assert counted() == ({PROJECTION}, {"disabled_by_flag"})
    prequal.reset_stats()
    prequal.disable(PROJECTION)
    answered(context)
    assert counted() == (set(), {"disabled_by_flag"})
    prequal.enable("all")
    prequal.reset_stats()
    with prequal.reference():
        answered(context)
    assert counted() == (set(), {"disabled_by_flag"})


def test_in_strict_mode_a_refusal_raises():
    context = qualified()
    with prequal.strict():
        answered(context)
        with pytest.raises(prequal.FallbackError, match=r"null_context on cpu: .*unsupported_input:rows"):
            answered(context, tokens=100)
    assert prequal.stats()[ROW] == {"cpu": {"fast": 1, "reference": {}}}  # no reference answered


def test_exporters_see_its_calls():
    context = qualified()
    fast = Counted(ROW, "cpu", "fast", "")
    before = prequal.runtime_state.telemetry.totals().get(fast, 0)
    answered(context)
    assert prequal.stats()[ROW] == {"cpu": {"fast": 1, "reference": {}}}
    prequal.reset_stats()
    assert prequal.runtime_state.telemetry.totals()[fast] == before + 1  # resets do not take it back


def test_an_unknown_path_is_no_flag():
    with pytest.raises(prequal.UnknownOpError, match="did you mean null_context"):
        prequal.disable("null_contex")


def test_leave_one_out_finds_the_null_context():
    from prequal.bench.ablate import ablate

    context = qualified()
    x, symbol = noise(1, 7, WIDTH), condition()

    @torch.no_grad()
    def workload():
        context.answer("0", x, symbol)

    assert [row.op for row in ablate(workload, rounds=6).rows] == [ROW]


def test_threads_are_served_while_another_one_qualifies():
    """A qualification looks on in its own thread only: other threads' calls are no cases of it."""
    module = attention()
    context = prequal.patch_null_context(module)
    null = condition()
    assert context.qualify(null, shapes=[(1, 5), (1, 20)]).path == "row"
    inside, done = threading.Event(), threading.Event()
    seen = []

    def run(cond):
        module(noise(1, 20, WIDTH), cond)
        inside.set()
        assert done.wait(60)

    def other():
        assert inside.wait(60)
        with torch.no_grad():
            seen.append(context.is_looking_on)
            module(noise(1, 3, WIDTH), torch.zeros(1, LENGTH, CONTEXT, dtype=torch.bfloat16))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    report = context.qualify(null, runs=[run])
    thread.join(60)
    assert seen == [False]
    assert report.shapes == ((1, 20),)


# ---- conditions ------------------------------------------------------------------------------------------------------


def test_casts_and_moves_keep_a_condition_symbolic():
    for symbol in (condition(), condition("batched")):
        for made in (
            symbol.to(torch.float16),
            symbol.to("cpu", torch.float16),
            symbol.to(torch.zeros(1, dtype=torch.float16)),
            symbol.type(torch.float16),
            symbol.half().clone().detach().contiguous(),
        ):
            assert type(made) is type(symbol)
            assert made.dtype == made.materialize().dtype == torch.float16
            assert made.shape == made.materialize().shape == symbol.shape
        assert symbol.dtype == torch.bfloat16
    assert prequal.stats() == {}


def test_the_valid_tokens_of_a_condition_are_where_it_is():
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    for symbol in (condition(valid=valid), condition("batched", valid=valid)):
        assert symbol.to("meta").valid.device == torch.device("meta")
        assert symbol.half().valid is not None
    assert prequal.NullCondition((1, LENGTH, CONTEXT), device="meta", valid=valid).valid.device.type == "meta"


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda:1")], ids=str)
def test_a_condition_goes_to_the_device_that_a_tensor_would_go_to(device):
    assert condition().cuda(device).device == torch.device("cuda:1")


def test_a_condition_is_compared_element_by_element():
    null, zeros = condition(), torch.zeros(1, LENGTH, CONTEXT, dtype=torch.bfloat16)
    for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        for other in (0, 1, zeros - 1):
            assert same_bits(compare(null, other), compare(zeros, other))
            assert same_bits(compare(other, null), compare(other, zeros))
    assert same_bits(abs(null), zeros)
    assert same_bits(null // 2, zeros)
    assert same_bits(null % 2, zeros)
    assert {null: 1}[null] == 1


def test_everything_else_gets_the_zeros_counted():
    null, zeros = condition(), torch.zeros(1, LENGTH, CONTEXT, dtype=torch.bfloat16)
    weight = noise(3, CONTEXT)
    for got, want in (
        (F.linear(null, weight), F.linear(zeros, weight)),
        (null + 1, zeros + 1),
        (1 + null, zeros + 1),
        (zeros * null, zeros),
        (null @ weight.t(), zeros @ weight.t()),
        (null[:, :3], zeros[:, :3]),
        (null.unsqueeze(1), zeros.unsqueeze(1)),
        (torch.cat([null, zeros, null]), torch.cat([zeros] * 3)),
        (torch.cat([zeros, null], dim=1), torch.cat([zeros] * 2, dim=1)),
    ):
        assert same_bits(got, want)
    (row,) = prequal.stats()[ROW].values()
    assert row == {"fast": 0, "reference": {"unsupported_input:materialized": 10}}
    assert (len(null), null.ndim, null.dim(), null.size(1), null.numel()) == (1, 3, 3, LENGTH, LENGTH * CONTEXT)
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        null.no_such  # noqa: B018


def test_a_concatenation_of_condition_and_null_is_symbolic():
    cond = noise(2, LENGTH, CONTEXT)
    for pair in (torch.cat([cond, prequal.NullCondition.like(cond)]), torch.cat((cond, condition(batch=2)), dim=0)):
        assert isinstance(pair, prequal.GuidedCondition)
        assert same_bits(pair.materialize(), torch.cat([cond, torch.zeros_like(cond)]))
    other = torch.cat([cond, prequal.NullCondition.like(cond[:1])])  # of another length: values
    assert isinstance(other, torch.Tensor)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: prequal.NullCondition((3,)), ValueError, r"shape: expected \[B, L, Dc\] or \[L, Dc\], got \[3\]"),
        (lambda: prequal.NullCondition((1, -3, 2)), ValueError, r"shape: expected no negative size, got \[1, -3, 2\]"),
        (lambda: prequal.NullCondition((1, 3, 2), "float32"), TypeError, "dtype: expected a torch.dtype, got str"),
        (lambda: prequal.NullCondition.like(3), TypeError, "condition: expected a Tensor or a condition, got int"),
        (lambda: condition(valid=torch.ones(1, 3, dtype=torch.bool)), ValueError, r"valid: expected bool \[1, 11\]"),
        (lambda: condition(valid=torch.ones(1, LENGTH)), ValueError, "valid: .*got torch.float32"),
        (lambda: prequal.GuidedCondition(condition()), TypeError, "condition: expected a Tensor, got NullCondition"),
        (lambda: prequal.NullContext({}), ValueError, "layers: expected at least one, got none"),
        (lambda: prequal.NullContext([attention()]), TypeError, "layers: expected a mapping"),
        (lambda: context_of(attention(), canonical_rows=()), ValueError, "canonical_rows: .*got"),
        (lambda: context_of(attention(), canonical_rows=(0, 1)), ValueError, "canonical_rows: .*got"),
        (lambda: prequal.CrossAttention(3, "to_out", len, 1), TypeError, "module: expected a torch.nn.Module"),
        (lambda: prequal.CrossAttention(attention(), "out", len, 1), ValueError, "output: .*got 'out'"),
        (lambda: context_of(attention()).qualify(3, shapes=[(1, 1)]), TypeError, "condition: expected a NullCondition"),
        (lambda: context_of(attention(), canonical_rows=True), ValueError, "canonical_rows: .*got"),
        (
            lambda: context_of(attention(), canonical_rows=2.5),
            TypeError,
            "canonical_rows: expected row counts, got flo",
        ),
        (
            lambda: context_of(attention()).qualify(condition(), runs=len),
            TypeError,
            "runs: expected functions in a lis",
        ),
        (
            lambda: context_of(attention()).qualify(condition(), runs=[3]),
            TypeError,
            "runs: expected functions .*got int",
        ),
        (lambda: context_of(attention()).qualify(condition(), shapes=(1, 5)), TypeError, "shapes: .* got int"),
        (lambda: context_of(attention()).row("0", noise(1), noise(1)), TypeError, "condition: .*, got Tensor"),
        (lambda: context_of(attention()).qualify(condition()), ValueError, "shapes, runs: expected at least one case"),
        (lambda: context_of(attention()).qualify(condition(), shapes=["1"]), ValueError, "shapes: expected positive"),
    ],
)
def test_wrong_arguments_name_argument_expected_and_got(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_the_page_explains_every_need():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "null_context.md").read_text()
    assert [need for need in NEEDS if f":{need}`" not in page] == []
