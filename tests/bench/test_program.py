"""What the examples share: options, turns in time, and who answered."""

from __future__ import annotations

import argparse

import pytest
import torch

import prequal
from prequal.bench.device import Host
from prequal.bench.program import a_file, add_device, device_named, fill_numbers, in_turns, who_answers


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_device(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int)
    args = parser.parse_args(words)
    fill_numbers(parser, args, {"runs": (20, 2)})
    return args


@pytest.mark.parametrize(("words", "runs"), [((), 20), (("--quick",), 2), (("--quick", "--runs", "7"), 7)])
def test_a_number_that_is_not_given_is_that_of_the_form(words, runs):
    assert parsed("--device", "cpu", *words).runs == runs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "--device: expected cuda or cpu, got 'tpu'"),
        (["--device", "cpu", "--runs", "0"], "--runs: expected at least 1, got 0"),
    ],
)
def test_wrong_options_are_told(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed(*words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there_is_told(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parsed().device == "cpu"
    with pytest.raises(SystemExit):
        parsed("--device", "cuda:1")
    assert "--device: expected a device of this machine, got 'cuda:1'" in capsys.readouterr().err


def test_a_device_is_measured_by_its_name(device):
    assert device_named(str(device)).torch_device == device


def test_every_round_starts_with_another():
    log: list[str] = []
    told: list[int] = []
    calls = {name: lambda name=name: log.append(name) for name in "abc"}
    found = in_turns(Host(), calls, 3, 4, walls=False, done=told.append)
    assert told == [1, 2, 3]
    assert "".join(log) == "aaabbbccc" + "".join(6 * name for turn in ("abc", "bca", "cab") for name in turn)
    assert list(found) == ["a", "b", "c"]
    assert found["a"]["device_us"]["runs"] == 12
    assert "wall_us" not in found["a"]
    assert in_turns(Host(), calls, 1, 2)["a"]["wall_us"]["runs"] == 2


def test_who_answers_says_why_not():
    x = torch.ones(2, 8)
    found = who_answers(lambda: prequal.rms_norm(x, None, 1e-6))
    assert list(found) == ["rms_norm"]
    assert found["rms_norm"] not in ("fast", "")


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    assert a_file(str(tmp_path / "out.json")) == tmp_path / "out.json"
    for text in (str(tmp_path), str(tmp_path / "nowhere" / "out.json")):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a file in a folder that is there"):
            a_file(text)
