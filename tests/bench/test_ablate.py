"""Leave one out, on workloads whose truth is known: a fake clock that every op moves by what it is worth."""

from __future__ import annotations

import json
import random
import sys
from contextlib import contextmanager

import pytest
from making_evidence import FakeClock

import prequal
from prequal.bench.ablate import ThisProcess, ablate, rounds_needed, verdict
from prequal.bench.stats import Interval
from prequal.cli import main


class FakeBench:
    """Ten milliseconds an iteration; an op that is off adds what it is worth, with noise, and everything drifts."""

    def __init__(self, worth_ms, noise=0.0, drift=0.0, seed=0):
        self.worth, self.noise, self.drift = worth_ms, noise, drift
        self.clock, self.draw = FakeClock(), random.Random(seed)
        self.off: tuple[str, ...] = ()
        self.order: list[tuple[str, ...]] = []
        self.stop_after: int | None = None

    def workload(self):
        ms = 10 + sum(self.worth[op] for op in self.off) + self.draw.gauss(0, self.noise)
        self.clock.advance_us(1e3 * ms + self.drift * len(self.order))

    def seconds(self, workload, iterations):
        if self.stop_after is not None and len(self.order) >= self.stop_after:
            raise KeyboardInterrupt
        self.order.append(self.off)
        start = self.clock()
        for _ in range(iterations):
            workload()
        return self.clock() - start

    def fast_calls(self, workload):
        return dict.fromkeys(self.worth, 24)

    def launches(self, workload):
        return 100 + 30 * len(self.off)

    @contextmanager
    def without(self, ops):
        self.off = tuple(ops)
        yield
        self.off = ()


WORTH = {"rms_norm": 0.7, "knn": 0.0, "knn_gather": -0.3}


def test_the_verdict_is_whether_the_interval_clears_zero():
    assert verdict(Interval(0.1, 0.2, 0.3, 0.95)) == "adopted"
    assert verdict(Interval(-0.1, 0.2, 0.3, 0.95)) == "neutral"
    assert verdict(Interval(0.0, 0.2, 0.3, 0.95)) == "neutral"
    assert verdict(Interval(-0.3, -0.2, -0.1, 0.95)) == "rejected"


@pytest.mark.parametrize("seed", range(5))
def test_the_truth_is_found_under_noise_and_drift(seed):
    bench = FakeBench(WORTH, noise=0.05, drift=40.0, seed=seed)
    report = ablate(bench.workload, bench=bench, rounds=24)
    found = {row.op: row for row in report.rows}
    assert {op: row.verdict for op, row in found.items()} == {
        "rms_norm": "adopted",
        "knn": "neutral",
        "knn_gather": "rejected",
    }
    assert found["rms_norm"].ms.low <= 0.7 + 0.12
    assert found["rms_norm"].ms.high >= 0.7 - 0.12
    assert [row.op for row in report.rows] == ["rms_norm", "knn", "knn_gather"]


def test_without_noise_the_numbers_are_exact():
    bench = FakeBench({"rms_norm": 2.5})
    report = ablate(bench.workload, bench=bench, rounds=8, iterations=3)
    (row,) = report.rows
    assert (row.calls, row.ms.median, row.percent.median) == (24, pytest.approx(2.5), pytest.approx(20.0))
    assert (report.all_on_ms, report.all_off_ms) == (pytest.approx(10), pytest.approx(12.5))
    assert (report.launches_on, report.launches_off) == (100, 130)


def test_nothing_but_noise_is_seldom_called_something():
    wrong = 0
    for seed in range(60):
        bench = FakeBench(dict.fromkeys(WORTH, 0.0), noise=0.3, seed=seed)
        report = ablate(bench.workload, bench=bench, rounds=12)
        wrong += any(row.verdict != "neutral" for row in report.rows)
    assert wrong <= 7  # at most 5 % of 60 in the mean; more than 7 in one of 60 such tests


def test_rounds_are_whole_every_second_goes_backwards_and_each_pair_begins_with_another_variant():
    bench = FakeBench(WORTH)
    ablate(bench.workload, bench=bench, rounds=10)
    rounds = [bench.order[i : i + 5] for i in range(0, len(bench.order), 5)]
    assert len(rounds) == 10
    assert all(len(set(one)) == 5 for one in rounds)
    assert rounds[1::2] == [one[::-1] for one in rounds[::2]]
    assert len({one[0] for one in rounds[::2]}) == 5


@pytest.mark.parametrize("rounds", [20, 50])
def test_a_steady_drift_is_worth_nothing(rounds):
    """Of the size of an effect that is told from noise: without turning back, the first op is adopted every time."""
    wrong = 0
    for seed in range(40):
        bench = FakeBench(dict.fromkeys("abcde", 0.0), noise=0.01, drift=20.0, seed=seed)
        report = ablate(bench.workload, bench=bench, rounds=rounds)
        wrong += any(row.verdict != "neutral" for row in report.rows)
    assert wrong <= 6  # at most 5 % of 40 in the mean; more than 6 in one of 200 such tests


def test_candidates_are_named_once_and_who_serves_nothing_is_said_to():
    bench, said = FakeBench({"rms_norm": 1.0}), []
    report = ablate(bench.workload, bench=bench, ops=["rms_norm", "knn", "rms_norm"], progress=said.append)
    assert [row.op for row in report.rows] == ["rms_norm"]
    assert said[0] == "left out, since their fast path serves no call of this workload: knn"
    with pytest.raises(TypeError, match="ops: expected names of ops in a list, got a text"):
        ablate(bench.workload, bench=bench, ops="rms_norm")


def test_rounds_too_few_for_an_interval_are_refused():
    assert [rounds_needed(n) for n in (1, 3, 10)] == [6, 7, 9]
    bench = FakeBench(WORTH)
    with pytest.raises(ValueError, match="rounds: expected at least 7 for 3 candidates, got 6"):
        ablate(bench.workload, bench=bench, rounds=6)


def test_an_interrupted_run_tells_what_whole_rounds_told():
    bench = FakeBench(WORTH)
    bench.stop_after = 5 * 8 + 2
    report = ablate(bench.workload, bench=bench, rounds=20)
    assert (report.rounds, report.complete) == (8, False)
    bench = FakeBench(WORTH)
    bench.stop_after = 5 * 3
    with pytest.raises(KeyboardInterrupt):
        ablate(bench.workload, bench=bench, rounds=20)


def test_only_ops_that_served_are_candidates():
    bench = FakeBench({"rms_norm": 1.0})
    report = ablate(bench.workload, bench=bench, ops=["knn", "rms_norm"], rounds=8)
    assert [row.op for row in report.rows] == ["rms_norm"]
    with pytest.raises(ValueError, match="no fast path served"):
        ablate(bench.workload, bench=bench, ops=["knn"], rounds=8)


def test_the_report_is_json_and_a_table():
    bench = FakeBench(WORTH, noise=0.01)
    report = ablate(bench.workload, bench=bench, rounds=10, name="model:step")
    data = json.loads(json.dumps(report.data(), allow_nan=False))
    assert data["launches"] == {"fast": 100, "eager": 190}
    assert [row["verdict"] for row in data["rows"]] == ["adopted", "neutral", "rejected"]
    text = report.table()
    assert "adopted" in text
    assert "CUDA launches an iteration: 100 with all of them, 190 without" in text


def test_a_chart_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from prequal.bench import charts

    bench = FakeBench(WORTH, noise=0.01)
    report = ablate(bench.workload, bench=bench, rounds=10)
    made = list(charts.save(charts.ablation(report.data()), tmp_path / "ablation"))
    assert [path.name for path in made] == ["ablation.png", "ablation.svg"]


def test_leaving_out_undoes_itself_and_nothing_else():
    from prequal import runtime_state as state

    prequal.disable("knn")
    bench = ThisProcess()
    with bench.without(("knn", "rms_norm")):
        assert state.flags.disabled("rms_norm")
        assert state.flags.disabled("knn")
        assert not state.flags.disabled("knn_gather")
    assert not state.flags.disabled("rms_norm")
    assert state.flags.disabled("knn")
    with pytest.raises(KeyError), bench.without(("rms_norm",)):
        raise KeyError
    assert not state.flags.disabled("rms_norm")


# ---- the command -----------------------------------------------------------------------------------------------------

WORKLOAD = """
import torch, prequal
x = torch.ones(2, 8)
def step():
    return prequal.rms_norm(x)
def make():
    return step
def fails():
    raise ValueError("rounds: expected another weather")
number = 3
"""


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "work.py"
    path.write_text(WORKLOAD)
    return path


@pytest.mark.parametrize("words", [["{}:step"], ["{}:make", "--factory"]])
def test_where_no_fast_path_serves_there_is_nothing_to_leave_out(words, workload, capsys):
    with prequal.reference():
        assert main(["ablate", *(word.format(workload) for word in words)]) == 1
    assert "no fast path served" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nonsense"], "expected MODULE:CALLABLE or FILE.py:CALLABLE, got nonsense"),
        (["{}:absent"], "AttributeError"),
        (["{}:number"], "expected a callable, got int"),
        (["no_such_module_at_all:f"], "ModuleNotFoundError"),
        (["{}:step", "--factory"], "expected a function that returns a callable, got Tensor"),
        (["{}:step", "--ops", "rmsnorm"], "did you mean rms_norm"),
        (["{}:step", "--iterations", "0"], "--iterations: expected at least 1"),
        (["{}:step", "--json", "/"], "--json: expected a file in a folder that exists, got /"),
        (["{}:step", "--chart", "{}"], "--chart: expected a folder that can be made, got {}"),
    ],
)
def test_wrong_use_is_exit_code_2_with_why(words, says, workload, capsys):
    assert main(["ablate", *(word.format(workload) for word in words)]) == 2
    assert says.format(workload) in capsys.readouterr().err


def test_a_file_is_loaded_as_python_runs_it(workload, capsys):
    (workload.parent / "beside_it.py").write_text("NUMBER = 3\n")
    workload.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\nimport beside_it\n"
        "@dataclass\nclass Size:\n    number: int = beside_it.NUMBER\n"
        "def step():\n    return Size()\n"
    )
    named_like_another = workload.rename(workload.with_name("random.py"))
    assert main(["ablate", f"{named_like_another}:step"]) == 1
    assert "no fast path served" in capsys.readouterr().err
    assert sys.modules["random"] is random


def test_a_workload_that_ends_the_process_is_told(workload, capsys):
    workload.write_text("import sys\ndef step():\n    sys.exit(0)\n")
    assert main(["ablate", f"{workload}:step"]) == 3
    assert "the workload ended the process (SystemExit)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["{}:fails"], ["{}:fails", "--factory"]])
def test_what_the_workload_raises_is_told_as_its_own(words, workload, capsys):
    assert main(["ablate", *(word.format(workload) for word in words)]) == 3
    said = capsys.readouterr().err
    assert "prequal ablate:" not in said
    assert f'File "{workload}", line 9, in fails' in said
    assert said.endswith("ValueError: rounds: expected another weather\n")


def test_an_error_of_the_workload_comes_out_as_it_was():
    def fails():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        ablate(fails)
    assert type(caught.value) is ValueError


@pytest.mark.gpu
def test_a_workload_on_the_gpu_is_taken_apart(cuda):
    import torch

    x = torch.randn(4096, 4096, device=cuda, dtype=torch.bfloat16)
    report = ablate(lambda: prequal.rms_norm(x), rounds=8)
    (row,) = report.rows
    assert (row.op, row.calls) == ("rms_norm", 1)
    assert report.launches_on is not None
    assert report.launches_on < report.launches_off
