"""examples/viterbi_pitch.py in its quick form: right before timed, hears what was sung, and what it writes."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import prequal

pytest.importorskip("matplotlib")

PROGRAM = "viterbi_pitch"
SMALL = ["--quick", "--device", "cpu", "--runs", "1"]


@pytest.fixture
def without_librosa(program, monkeypatch):
    monkeypatch.setattr(program, "why_no_librosa", lambda: "librosa is not looked for here")


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_quick_form_listens_times_and_writes(program, without_librosa, tmp_path, capsys):
    out, picture = tmp_path / "pitch.json", tmp_path / "pitch.png"
    assert program.main([*SMALL, "--json", str(out), "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "librosa: left out: librosa is not looked for here" in said
    assert "right pitch" in said
    assert is_png(picture)
    result = json.loads(out.read_text())
    assert result["absent"] == {"librosa": "librosa is not looked for here"}
    assert [row["wrong"] for row in result["answers"].values()] == [[], []]
    assert set(result["times"]) == {"prequal", "torch"}
    assert all(row["wall_us"]["median"] > 0 for row in result["times"].values())


def test_nothing_is_drawn_unless_asked(program, without_librosa, monkeypatch):
    def plot(*_):
        raise AssertionError("drawn")

    monkeypatch.setattr(program, "plot", plot)
    assert program.main(SMALL) == 0


def test_what_was_sung_is_heard_and_each_frame_alone_hears_less(program):
    grid = program.COARSE
    voices = program.voices_of(grid, 3, 2.0, torch.device("cpu"))
    frames = program.frames_of(voices.sound, grid)[:, : voices.pitch.shape[1]]
    emissions = program.emissions_of(frames, grid)
    moves, start = program.moves_of(grid, frames.device), program.start_of(grid, frames.device)
    model = program.Model(emissions, moves, start, voices.lengths, program.band_of(grid))
    paths, scores = model.prequal()
    heard = program.heard(*program.of_states(paths, grid), voices)
    alone = program.heard(*program.of_states(model.frame_by_frame(), grid), voices)
    assert heard["right_pitch"] > 0.9
    assert heard["right_pitch"] > alone["right_pitch"]
    torch.testing.assert_close(model.score_of(paths), scores.double(), rtol=1e-5, atol=0)
    assert voices.lengths.tolist() == sorted(set(voices.lengths.tolist()), reverse=True)  # each of its own
    assert ((paths == -1) == (torch.arange(paths.shape[1]) >= voices.lengths[:, None])).all()


def test_all_moves_lie_in_the_band_and_are_likelihoods(program):
    grid = program.COARSE
    moves = program.moves_of(grid, torch.device("cpu"))
    at = torch.arange(grid.states)
    assert torch.equal(moves > -torch.inf, (at[:, None] // 2 - at // 2).abs() <= grid.reach)
    assert int((at[:, None] - at)[moves > -torch.inf].abs().max()) == program.band_of(grid)
    torch.testing.assert_close(
        moves.double().exp().sum(1), torch.ones(grid.states, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_differences_are_those_of_the_definition(program):
    """Sums of squares over a window, lag by lag, then over their running mean."""
    grid = program.COARSE
    frame = torch.randn(grid.frame, generator=torch.Generator().manual_seed(0))
    window, x = grid.frame // 2, frame.double()
    plain = torch.stack([(x[:window] - x[lag : lag + window]).square().sum() for lag in range(grid.lags[1] + 2)])
    want = plain * torch.arange(len(plain)) / plain.cumsum(0)
    want[0] = 1.0
    torch.testing.assert_close(program.differences(frame[None, None], grid)[0, 0], want, rtol=1e-9, atol=1e-9)


def test_a_threshold_takes_the_first_trough_below_it(program, monkeypatch):
    """The closed form against 20,000 thresholds, one after the other."""
    stats = pytest.importorskip("scipy.stats")
    grid = program.COARSE
    first, last = grid.lags
    normal = torch.rand(1, 5, last + 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    monkeypatch.setattr(program, "differences", lambda frames, grid: normal)
    share, lag = program.candidates(torch.zeros(1, 5, grid.frame), grid)
    count = 20_000
    edges = stats.beta.ppf((np.arange(count) + 0.5) / count, 2, 18)  # each stands for as much of the prior
    for t in range(5):
        row = normal[0, t].numpy()
        troughs = [i for i in range(first, last + 1) if row[i] < row[i - 1] and row[i] <= row[i + 1]]
        depths, want = row[troughs], np.zeros(last - first + 1)
        for edge in edges:
            below = np.flatnonzero(depths < edge)
            chosen = below[0] if len(below) else depths.argmin()
            want[troughs[chosen] - first] += (1.0 if len(below) else program.UNSURE) / count
        np.testing.assert_allclose(share[0, t].numpy(), want, atol=(len(troughs) + 1) / count)
    assert ((lag - torch.arange(first, last + 1)).abs() <= 1).all()


def test_librosa_agrees(program, tmp_path, capsys):
    """Its Viterbi on the same probabilities, and its whole pYIN on the same sound, by the truth."""
    pytest.importorskip("librosa.sequence")
    if (reason := program.why_no_librosa()) is not None:
        pytest.skip(reason)
    out = tmp_path / "pitch.json"
    assert program.main([*SMALL, "--json", str(out)]) == 0
    capsys.readouterr()
    result = json.loads(out.read_text())
    assert result["answers"]["librosa"]["wrong"] == []
    assert set(result["times"]) == {"prequal", "torch", "librosa"}
    ours, theirs = result["heard"]["prequal"], result["heard"]["pyin"]
    assert theirs["right_pitch"] > 0.9
    assert abs(ours["right_pitch"] - theirs["right_pitch"]) < 0.05


@pytest.mark.parametrize("wrong", ["paths", "scores", "nan"])
def test_a_wrong_path_is_not_timed(program, without_librosa, monkeypatch, tmp_path, capsys, wrong):
    right = prequal.viterbi_decode

    class Wrong:
        op = right.op

        def __call__(self, *args, **named):
            paths, scores = right(*args, **named)
            if wrong == "paths":  # the second voice goes where it may not
                paths[1, 5] = (paths[1, 5] + 2 * program.COARSE.reach + 4) % program.COARSE.states
            return paths, scores + (0.5 if wrong == "scores" else torch.nan if wrong == "nan" else 0.0)

    monkeypatch.setattr(prequal, "viterbi_decode", Wrong())
    out = tmp_path / "pitch.json"
    assert program.main([*SMALL, "--json", str(out)]) == 1
    said = capsys.readouterr().out
    assert "WRONG voice 1: another path or score than the reference has" in said
    assert ("behind, limit" in said) == (wrong == "paths")
    assert "FAILED: prequal" in said
    assert set(json.loads(out.read_text())["times"]) == {"torch"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--voices", "0"], "--voices: expected at least 1, got 0"),
        (["--seconds", "nan"], "--seconds: expected at least 1, got nan"),
        (["--device", "tpu"], "--device: expected cuda or cpu, got 'tpu'"),
    ],
)
def test_wrong_use_is_told(program, given, message, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main([*SMALL, *given])
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_answers(program, without_librosa, tmp_path):
    out = tmp_path / "pitch.json"
    assert program.main(["--quick", "--device", "cuda", "--runs", "2", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["path"] == "fast"
