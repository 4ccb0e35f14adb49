"""examples/llama_block.py in its small mode: right before timed, and what it writes."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch

import prequal

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from PIL import Image

PROGRAM = "llama_block"
SMALL = ["--device", "cpu", "--tokens", "16", "--hidden", "64", "--rounds", "2", "--runs", "2"]


def test_the_published_configuration_is_built(program):
    config = program.configuration(4096)
    found = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    assert found == (4096, 32, 8, 14336)
    inverse = program.LlamaRotaryEmbedding(config).inv_freq
    assert inverse.shape == (64,)
    assert float(inverse[-1]) == pytest.approx(500_000 ** -(126 / 128))
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_small_mode_compares_times_and_writes(program, dtype, tmp_path, capsys):
    paths = ["--json", str(tmp_path / "block.json"), "--plot", str(tmp_path / "block.png")]
    assert program.main([*SMALL, "--dtype", dtype, "--variants", "eager,patched", *paths]) == 0
    said = capsys.readouterr()
    assert "1 × LlamaMLP: swiglu" in said.out
    assert "round 2 of 2" in said.err
    result = json.loads((tmp_path / "block.json").read_text())
    for kind, more in (("forward", ["floor"]), ("step", [])):
        assert list(result[kind]) == ["eager", "patched", *more]
        assert result[kind]["patched"]["device_us"]["runs"] == 4
        assert "no fast path served" in result["ablate"][kind]["not_done"]
    assert set(result["paths"]) == {"fused_add_rms_norm", "rms_norm", "rope", "swiglu_"}
    assert result["replacement"]["should_be_gone"] == []  # references answer: nothing is claimed
    assert all(row["wrong"] == [] for row in result["answers"].values())
    with Image.open(tmp_path / "block.png") as image:
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10


def test_compiled_variants_are_compared_and_timed_alike(program, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "block.json"
    torch._dynamo.reset()
    try:
        assert program.main([*SMALL, "--variants", "compiled,patched-compiled", "--json", str(out)]) == 0
    finally:
        torch._dynamo.reset()
    assert list(json.loads(out.read_text())["step"]) == ["compiled", "patched-compiled"]


def test_a_wrong_variant_is_not_timed(program, monkeypatch, tmp_path, capsys):
    right = prequal.swiglu

    def wrong(gate, up, **rounding):
        return 1.1 * right(gate, up, **rounding)

    monkeypatch.setattr(prequal, "swiglu", wrong)
    out = tmp_path / "block.json"
    assert program.main([*SMALL, "--variants", "eager,patched", "--json", str(out)]) == 1
    said = capsys.readouterr().out
    assert "WRONG output: " in said
    assert "FAILED: patched" in said
    result = json.loads(out.read_text())
    assert list(result["forward"]) == ["eager", "floor"]
    assert list(result["step"]) == ["eager"]
    assert result["replacement"] is None


def test_a_nan_is_wrong(program):
    eager = {"output": 1e-3, "gradient of x": 1e-3}
    assert program.what_is_wrong(eager, eager) == []
    assert len(program.what_is_wrong({"output": float("nan"), "gradient of x": float("inf")}, eager)) == 2


def test_what_references_answer_is_not_claimed_to_be_gone(program):
    fast = dict.fromkeys(("rms_norm", "fused_add_rms_norm", "swiglu", "rope"), "fast")
    every = [name for names in program.STANDS_FOR.values() for name in names]
    assert program.should_be_gone(fast, None) == every
    assert program.should_be_gone(fast | {"rope": "no_cuda"}, None) == every[:-2]
    in_place = {op + "_" if op == "swiglu" else op: path for op, path in fast.items()}
    assert program.should_be_gone(in_place, None) == every
    assert program.should_be_gone(in_place | {"swiglu_": "no_cuda"}, None) == [x for x in every if x != "aten::silu"]
    assert program.should_be_gone(fast, ["rms_norm", "rope"]) == ["aten::neg", "aten::cat"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--variants", "fast"], "--variants: expected names out of eager, .*got 'fast'"),
        (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--hidden", "100"], "--hidden: expected a multiple of 8"),
        (
            ["--json", "nowhere/block.json"],
            "argument --json: expected a file in a folder that is there, got 'nowhere/block.json'",
        ),
        (
            ["--plot", "nowhere/block.png"],
            "argument --plot: expected a file in a folder that is there, got 'nowhere/block.png'",
        ),
        (["--device", "tpu"], "--device: expected cuda or cpu, got 'tpu'"),
        (["--ops", "geglu", "--variants", "patched"], "something to replace for geglu, got none in Block"),
    ],
)
def test_wrong_use_is_told(program, given, message, capsys):
    try:
        code = program.main([*SMALL, *given])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
