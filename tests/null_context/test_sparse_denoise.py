"""examples/sparse_denoise.py in its quick form: right before timed, bits held together, and what it writes."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch
from torch.nn import functional as F

import prequal

pytest.importorskip("matplotlib")

from PIL import Image

PROGRAM = "sparse_denoise"
SMALL = ["--quick", "--device", "cpu", "--rounds", "1"]


@pytest.fixture
def without_fusions(program, monkeypatch):
    for name in program.FUSIONS:
        monkeypatch.delattr(prequal, name, raising=False)


# ---- what the fusions compute, in plain torch ------------------------------------------------------------------------


def head_norm(x, gamma, eps):
    return (F.normalize(x.float(), dim=-1, eps=eps) * gamma.float() * x.shape[-1] ** 0.5).to(x.dtype)


def qk_rms_norm_rope_qkv_inplace(qkv, q_gamma, k_gamma, cos, sin, *, eps, interleaved=True, exact_rounding=False):
    assert interleaved
    for i, gamma in enumerate((q_gamma, k_gamma)):
        a, b = head_norm(qkv[:, i], gamma, eps).float().unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[:, None], sin[:, None]
        qkv[:, i] = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2).to(qkv.dtype)
    return qkv


def qk_rms_norm_cross_inplace(q, kv, q_gamma, k_gamma, eps):
    q.copy_(head_norm(q, q_gamma, eps))
    kv[:, 0] = head_norm(kv[:, 0], k_gamma, eps)
    return q, kv


def token_rows(table, batch, ptr):
    batch = torch.arange(len(table)).repeat_interleave(ptr.diff()) if batch is None else batch
    return table.float()[batch]


def sparse_layer_norm_affine(x, scale, shift, batch=None, ptr=None, *, eps, add_one=True):
    rows = token_rows(scale, batch, ptr) + (1 if add_one else 0)
    return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * rows + token_rows(shift, batch, ptr)).to(x.dtype)


def sparse_batch_mul_add_(x, gate, residual, batch=None, ptr=None):
    return residual.copy_((x.float() * token_rows(gate, batch, ptr) + residual.float()).to(x.dtype))


def sparse_gate_add_layer_norm_affine(h, gate, residual, scale, shift, batch=None, ptr=None, *, eps, add_one=True):
    stream = (h.float() * token_rows(gate, batch, ptr) + residual.float()).to(h.dtype)
    return sparse_layer_norm_affine(stream, scale, shift, batch, ptr, eps=eps, add_one=add_one), stream


def linear_gelu(x, weight, bias, approximate="tanh"):
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


@pytest.fixture
def with_fusions(program, monkeypatch):
    """Plain torch in the fusions' places, whether this prequal has them or not."""
    for name in program.FUSIONS:
        monkeypatch.setattr(prequal, name, globals()[name], raising=False)


# ---- the program -----------------------------------------------------------------------------------------------------


def test_the_full_size_is_that_of_the_article(program):
    args = program.arguments(["--device", "cpu"])
    assert (args.size.blocks, args.size.width, args.size.heads, args.steps) == (24, 1024, 16, 15)
    assert (len(args.counts), args.counts[0], args.counts[-1]) == (10, 3664, 30227)
    assert args.size.tokens >= 1024
    assert args.paths == ["pure_eager", "kernel_fusion", "null_context", "combined", "compiled"]


def test_the_quick_form_compares_times_and_writes(program, with_fusions, tmp_path, capsys):
    paths = "kernel_fusion,null_context,combined,prior_exact_null,prior_exact_combined"
    files = ["--json", str(tmp_path / "denoise.json"), "--plot", str(tmp_path / "denoise.png")]
    assert program.main([*SMALL, "--paths", paths, *files]) == 0
    said = capsys.readouterr()
    assert "raw bits of the result, null_context against pure_eager: equal at all 2 token counts" in said.out
    assert "raw bits of the result, combined against kernel_fusion: equal at all 2 token counts" in said.out
    assert "96 tokens: pure_eager" in said.err
    result = json.loads((tmp_path / "denoise.json").read_text())
    every = ["pure_eager", *paths.split(",")]
    assert list(result["latency"]) == list(result["summary"]) == list(result["launches"]) == every
    assert all(list(row) == ["41", "96"] for row in result["latency"].values())
    assert result["summary"]["pure_eager"]["geometric_mean_speedup"] == pytest.approx(1)
    assert {name: each["path"] for name, each in result["qualification"].items()} == {"eager": "row", "fused": "row"}
    assert all(row["wrong"] == [] for row in result["answers"].values())
    assert result["who_answers"]["combined"]["null_context"] == "fast"
    assert result["who_answers"]["prior_exact_null"] == {
        "null_context": "disabled_by_flag",
        "null_context_projection": "fast",
    }
    assert [row["op"] for row in result["ablate"]["41"]["rows"]] == ["null_context"]
    with Image.open(tmp_path / "denoise.png") as image:
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10


def test_absent_fusions_are_said_to_be_absent(program, without_fusions, tmp_path, capsys):
    out = tmp_path / "denoise.json"
    assert program.absent_fusions() == list(program.FUSIONS)
    assert program.main([*SMALL, "--paths", "kernel_fusion,null_context,combined", "--json", str(out)]) == 0
    assert "combined: left out: this prequal has no qk_rms_norm_rope_qkv_inplace, " in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert list(result["absent"]) == ["combined", "kernel_fusion"]
    assert list(result["latency"]) == ["pure_eager", "null_context"]


def test_one_graph_serves_every_token_count_and_block(program, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "denoise.json"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        assert program.main([*SMALL, "--counts", "23,41,96", "--paths", "compiled", "--json", str(out)]) == 0
    finally:
        torch._dynamo.reset()
    assert [row["graphs"] for row in json.loads(out.read_text())["latency"]["compiled"].values()] == [1, 1, 1]


def test_a_wrong_fusion_is_not_timed(program, with_fusions, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(prequal, "linear_gelu", lambda *args: 1.2 * linear_gelu(*args))
    out = tmp_path / "denoise.json"
    assert program.main([*SMALL, "--paths", "kernel_fusion", "--json", str(out)]) == 1
    assert "WRONG one velocity" in capsys.readouterr().out
    assert list(json.loads(out.read_text())["latency"]) == ["pure_eager"]


def test_a_wrong_row_is_found_in_the_bits(program, monkeypatch, capsys):
    right = prequal.NullContext.row

    def wrong(self, layer, x, condition):
        row = right(self, layer, x, condition)
        return row if row is None else (row.view(torch.int16) ^ 1).view(row.dtype)

    monkeypatch.setattr(prequal.NullContext, "row", wrong)
    assert program.main([*SMALL, "--paths", "null_context"]) == 1
    assert "null_context against pure_eager: DIFFER at [41, 96]" in capsys.readouterr().out


def test_where_the_row_is_refused_the_loop_keeps_its_bits(program, monkeypatch, capsys):
    """A row count at which this product rounds otherwise than in the loop: what then answers is said."""
    right = torch.nn.Linear.forward

    def odd(self, x):
        y = right(self, x)
        return (y.view(torch.int16) ^ 1).view(y.dtype) if x.shape[:-1].numel() == 7 else y

    monkeypatch.setattr(torch.nn.Linear, "forward", odd)
    assert program.main([*SMALL, "--paths", "null_context", "--canonical-rows", "7"]) == 0
    said = capsys.readouterr().out
    assert "projection of the value row (qualification_failed" in said
    assert "null_context against pure_eager: equal at all 2" in said
    assert "null_context qualification_failed, null_context_projection fast" in said


def test_a_nan_is_wrong(program, with_fusions, monkeypatch):
    monkeypatch.setattr(prequal, "linear_gelu", lambda *args: linear_gelu(*args) * float("nan"))
    assert program.main([*SMALL, "--paths", "kernel_fusion"]) == 1


def test_voxels_are_as_many_as_wanted_and_distinct(program):
    for tokens in (1, 41, 3664):
        coords = program.surface(tokens, torch.device("cpu"))
        assert coords.shape == coords.unique(dim=0).shape == (tokens, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--paths", "fast"], "--paths: expected names out of pure_eager, .*got 'fast'"),
        (["--counts", "0,3"], "--counts: expected positive numbers"),
        (["--counts", "many"], "--counts: expected positive numbers"),
        (["--ablate", "17"], r"--ablate: expected counts out of \[41, 96\], got 17"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--device", "tpu"], "--device: expected cuda or cpu, got 'tpu'"),
    ],
)
def test_wrong_use_is_told(program, given, message, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main([*SMALL, *given])
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)
