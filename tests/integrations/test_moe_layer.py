"""examples/moe_layer.py in its quick form: right before timed, and what it writes."""

from __future__ import annotations

import json
import re

import pytest
import torch

import prequal

PROGRAM = "moe_layer"
SMALL = ["--quick", "--device", "cpu", "--rounds", "1", "--runs", "1"]


def test_the_published_shapes_are_built(program):
    mixtral, deepseek = program.SHAPES
    assert (mixtral.hidden, mixtral.inner, mixtral.experts, mixtral.k) == (4096, 14336, 8, 2)
    assert (deepseek.hidden, deepseek.inner, deepseek.experts, deepseek.k) == (7168, 2048, 256, 8)
    assert (deepseek.score, deepseek.groups, deepseek.topk_groups, deepseek.scale) == ("sigmoid", 8, 4, 2.5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_quick_form_compares_times_and_writes(program, dtype, tmp_path, capsys):
    out = tmp_path / "moe.json"
    assert program.main([*SMALL, "--dtype", dtype, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "deepseek: distance from plain torch in a wider dtype" in said
    result = json.loads(out.read_text())
    for layer in result["layers"].values():
        assert all(row["wrong"] == [] for row in layer["answers"].values())
        for kind in ("forward", "step"):
            assert list(layer[kind]) == list(program.VARIANTS)
            assert all(row["device_us"]["median"] > 0 for row in layer[kind].values())
        assert set(layer["paths"]) == set(program.OURS)
    assert list(result["layers"]) == ["mixtral", "deepseek"]


def test_float32_layers_are_equal_to_the_last_bits(program):
    for shape in program.SHAPES:
        hidden, inner = program.TINY[shape.name]
        layer = program.Layer(program.replace(shape, hidden=hidden, inner=inner), torch.device("cpu"), torch.float32)
        x, above = (torch.randn(50, hidden, generator=torch.Generator().manual_seed(i)) for i in range(2))
        plain = program.everything(layer, layer.plain, x, above)
        for other in (layer.grouped, layer.prequal):
            for name, value in program.everything(layer, other, x, above).items():
                torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", ["weights", "experts"])
def test_a_wrong_layer_is_not_timed(program, monkeypatch, tmp_path, capsys, wrong):
    right = prequal.moe_route

    def route(logits, k, **what):
        weights, experts, counts = right(logits, k, **what)
        return (1.1 * weights, experts, counts) if wrong == "weights" else (weights, experts.flip(0), counts)

    monkeypatch.setattr(prequal, "moe_route", route)
    out = tmp_path / "moe.json"
    assert program.main([*SMALL, "--shapes", "mixtral", "--variants", "plain,prequal", "--json", str(out)]) == 1
    said = capsys.readouterr().out
    assert "WRONG output: " in said
    assert ("WRONG experts: " in said) == (wrong == "experts")
    assert "FAILED: mixtral prequal" in said
    result = json.loads(out.read_text())["layers"]["mixtral"]
    assert list(result["forward"]) == list(result["step"]) == ["plain"]
    assert result["paths"] == {}


def test_a_nan_is_wrong(program):
    plain = {"output": 1e-3, "gradient of the input": 1e-3}
    assert program.what_is_wrong(plain, plain) == []
    assert len(program.what_is_wrong({"output": float("nan"), "gradient of the input": float("inf")}, plain)) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--variants", "fast"], "--variants: expected names out of plain, .*got 'fast'"),
        (["--shapes", "dense"], "--shapes: expected names out of mixtral, deepseek, got 'dense'"),
        (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--device", "tpu"], "--device: expected cuda or cpu, got 'tpu'"),
    ],
)
def test_wrong_use_is_told(program, given, message, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main([*SMALL, *given])
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_answer(program, tmp_path):
    out = tmp_path / "moe.json"
    assert program.main(["--quick", "--device", "cuda", "--rounds", "1", "--runs", "2", "--json", str(out)]) == 0
    for layer in json.loads(out.read_text())["layers"].values():
        assert layer["paths"] == dict.fromkeys(program.OURS, "fast")
