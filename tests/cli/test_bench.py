"""`prequal bench`: what it measures, writes, prints and checks, and its exit codes."""

from __future__ import annotations

import json
import pathlib
import sys
from types import SimpleNamespace

import pytest

from prequal.bench import cases as lists
from prequal.bench import evidence, runner
from prequal.bench.device import Host
from prequal.cli import bench, main
from prequal.registry import OPS

KNN_OPS, NORM_OPS = (sum(op.basename == name for op in OPS.values()) for name in ("knn", "rms_norm"))
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "bench")]  # making_evidence


@pytest.fixture(autouse=True)
def ticking(monkeypatch):
    """A clock that moves 30 us at every look, and no second process to time an import in."""
    now = [0.0]

    def clock() -> float:
        now[0] += 30e-6
        return now[0]

    monkeypatch.setattr(bench, "_device", lambda args: Host(clock))
    monkeypatch.setattr(bench, "_import_ms", lambda: 12.5)


def run(*words: str) -> int:
    return main(["bench", "--device", "cpu", "--runs", "5", *words])


def test_it_measures_writes_and_prints(tmp_path, capsys):
    out = tmp_path / "all.json"
    assert run("--ops", "rms_norm,knn", "--json", str(out), "--out", str(tmp_path / "evidence")) == 0
    printed = capsys.readouterr()
    assert "rms_norm: sample quick" in printed.out
    assert f"[1/{NORM_OPS + KNN_OPS}] rms_norm: sample quick" in printed.err
    records = json.loads(out.read_text())["records"]
    assert [record["basename"] for record in records] == ["rms_norm", "knn"]
    for record in records:
        assert evidence.problems(record) == []
        assert evidence.load(tmp_path / "evidence" / f"{record['basename']}.json") == record
        assert (record["gpu"], record["gpu_tests"], record["complete"]) == ("CPU", "not run", True)
    assert records[0]["rows"][0]["by"]["prequal"]["device_us"]["median"] == 30.0
    assert records[0]["command"] == "prequal bench --ops rms_norm --device cpu --runs 5"
    assert records[1]["peers_installed"].keys() >= {"torch_cluster", "torchbvh", "torch_kdtree", "cupyx"}


def test_what_fails_beside_the_cases_costs_none_of_them(tmp_path, monkeypatch, capsys):
    def extra(device):
        yield {"case": "begun", "by": {}}
        raise TypeError("expected 5 arguments")

    (case,) = lists.sample_cases(OPS["rms_norm"])
    listed = SimpleNamespace(cases=list, extra=extra)
    monkeypatch.setattr(lists, "shape_lists", lambda: {"rms_norm": listed})
    monkeypatch.setattr(lists, "cases_of", lambda ops, tier: [case])
    monkeypatch.setattr(bench, "_no_gpu", lambda args: None)
    assert main(["bench", "--shapes", "full", "--runs", "5", "--ops", "rms_norm", "--out", str(tmp_path)]) == 1
    record = evidence.load(tmp_path / "rms_norm.json")
    assert [row["case"] for row in record["rows"]] == [case.name, "beside its cases"]
    assert record["rows"][1]["failed"] == {"prequal": "TypeError: expected 5 arguments"}
    assert "beside its cases: FAILED" in capsys.readouterr().err


def test_what_was_measured_before_a_gpu_was_gone_is_written(tmp_path, monkeypatch, capsys):
    measure = runner.measure

    def measured(case, *rest):
        if case.op == "knn":
            raise runner.DeviceLost("somebody", RuntimeError("an illegal memory access"))
        return measure(case, *rest)

    monkeypatch.setattr(runner, "measure", measured)
    assert run("--ops", "rms_norm,knn", "--out", str(tmp_path)) == 1
    whole, ended = (evidence.load(tmp_path / f"{name}.json") for name in ("rms_norm", "knn"))
    assert (whole["complete"], ended["complete"]) == (True, False)
    assert ended["rows"][-1]["failed"] == {"somebody": "RuntimeError: an illegal memory access"}
    said = capsys.readouterr().err
    assert "the GPU no longer answers after somebody" in said
    assert "measured in" in said


def test_results_alone_go_to_stdout(capsys):
    assert run("--ops", "rms_norm", "--json", "-") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["records"][0]["basename"] == "rms_norm"


def test_absent_peers_are_printed(capsys):
    assert run("--ops", "knn") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "torchbvh" in line and "absent" in line and "not installed" in line]


def test_ctrl_c_writes_what_is_done(tmp_path, monkeypatch, capsys):
    real, calls = runner.measure, []

    def second_is_interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(runner, "measure", second_is_interrupted)
    assert run("--ops", "knn", "--out", str(tmp_path)) == 130
    record = evidence.load(tmp_path / "knn.json")
    assert (len(record["rows"]), record["complete"]) == (1, False)
    assert "interrupted: what is done is written" in capsys.readouterr().err


def test_a_record_is_complete_by_itself_however_far_the_others_came(tmp_path, monkeypatch):
    real = runner.measure

    def interrupted_at_swiglu(case, *args):
        if case.op == "swiglu_backward":
            raise KeyboardInterrupt
        return real(case, *args)

    monkeypatch.setattr(runner, "measure", interrupted_at_swiglu)
    assert run("--ops", "rms_norm,swiglu", "--out", str(tmp_path)) == 130
    assert evidence.load(tmp_path / "rms_norm.json")["complete"]
    assert not evidence.load(tmp_path / "swiglu.json")["complete"]


def test_the_budget_stops_before_the_next_case(tmp_path, capsys):
    assert run("--ops", "knn", "--budget", "0", "--out", str(tmp_path)) == 3
    assert list(tmp_path.iterdir()) == []
    assert f"budget spent: {KNN_OPS} cases not measured" in capsys.readouterr().err


def test_a_wrong_answer_of_ours_is_exit_code_1(monkeypatch, capsys):
    op = OPS["rms_norm"]
    monkeypatch.setattr(op, "function", lambda *args: op.reference(*args) + 1)
    assert run("--ops", "rms_norm") == 1
    assert "prequal: WRONG, not timed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ops", "rmsnorm"], "did you mean rms_norm"),
        (["--ops", ","], "--ops: expected names"),
        (["--runs", "0"], "--runs: expected at least 1"),
        (["--json", "no/such/folder/x.json"], "--json: expected a file in a folder that exists"),
        (["--check", "--results", "no/such/folder"], "--results: expected the folder"),
        (["--from", "no_such_file.json"], "--from: expected a JSON file"),
    ],
)
def test_wrong_use_is_exit_code_2_with_why(words, says, capsys):
    assert run(*words) == 2
    assert says in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(bench, "_no_gpu", lambda args: "this torch is built without CUDA")
    assert main(["bench", "--ops", "rms_norm"]) == 2
    assert "expected a GPU that this process can use, got this torch is built without CUDA" in capsys.readouterr().err


# ---- --check ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """A folder with evidence of these very sources, made up."""
    from making_evidence import record

    monkeypatch.setattr(bench, "_digests", lambda: {"rms_norm": "a" * 64})
    monkeypatch.setattr(bench, "_no_gpu", lambda args: "no GPU here")
    listed = [SimpleNamespace(name="bfloat16 [16384, 4096]")]  # the list of cases is made up, too
    monkeypatch.setattr(bench, "_listed_cases", lambda record: listed)
    evidence.write(tmp_path / "results/h200/rms_norm.json", record())
    return tmp_path


def check(folder, *words: str) -> int:
    return main(["bench", "--ops", "rms_norm", "--check", "--results", str(folder / "results"), *words])


def test_check_without_a_gpu_tells_stale_and_missing(committed, monkeypatch, capsys):
    assert check(committed) == 0
    printed = capsys.readouterr()
    assert printed.out == "the committed evidence holds\n"
    assert "what regressed is not looked at" in printed.err
    monkeypatch.setattr(bench, "_digests", lambda: {"rms_norm": "b" * 64})
    assert check(committed) == 1
    assert capsys.readouterr().out.startswith("stale: rms_norm: measured on other sources")
    (committed / "results/h200/rms_norm.json").unlink()
    assert check(committed) == 1
    assert capsys.readouterr().out.startswith("missing: rms_norm")


def test_check_tells_what_the_evidence_says_against_itself(committed, capsys):
    from making_evidence import record, row

    def says(**changed) -> str:
        evidence.write(committed / "results/h200/rms_norm.json", record(**changed))
        assert check(committed) == 1
        return capsys.readouterr().out

    assert says(rows=[]).startswith("missing: rms_norm, bfloat16 [16384, 4096]: in the list of cases")
    assert says(gpu_tests="failed").startswith("wrong: rms_norm: the GPU tests of its sources failed")
    wrong = {**row("bfloat16 [16384, 4096]"), "wrong": {"prequal": "1 of 8 values"}}
    assert says(rows=[wrong]).startswith("wrong: rms_norm, bfloat16 [16384, 4096]: 1 of 8 values")


def test_the_cases_of_a_record_are_those_of_its_list():
    full, quick = (
        [case.name for case in bench._listed_cases({"basename": "rope", "shapes": tier})] for tier in ("full", "quick")
    )
    assert set(quick) < set(full)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--json", "{}"], "--json: expected a file in a folder that exists, got {}"),
        (["--budget", "nan"], "--budget: expected at least 0 seconds, got nan"),
        (["--budget", "-5"], "--budget: expected at least 0 seconds, got -5.0"),
        (["--from", "{}", "--out", "{}"], "--out: expected none beside --from"),
        (["--from", "{}"], "--from: expected evidence of rms_norm, got none in {}"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is_measured(words, says, tmp_path, capsys):
    assert run("--ops", "rms_norm", *(word.format(tmp_path) for word in words)) == 2
    said = capsys.readouterr()
    assert says.format(tmp_path) in said.err
    assert "[1/" not in said.err


def test_check_tells_what_regressed_since(committed, capsys):
    from making_evidence import record, row

    def measured(ours: float) -> str:
        path = committed / "now.json"
        rows = [row("bfloat16 [16384, 4096]", ours)]
        evidence.write(path, {"schema": 1, "records": [record(rows)]})
        return str(path)

    assert check(committed, "--from", measured(71.0)) == 0
    assert check(committed, "--from", measured(60.0)) == 0
    assert "faster: rms_norm" in capsys.readouterr().out
    assert check(committed, "--from", measured(80.0)) == 1
    printed = capsys.readouterr().out
    assert "regressed: rms_norm, bfloat16 [16384, 4096]: 70.0 us" in printed
    assert printed.endswith("1 to see to\n")


def test_a_quick_run_does_not_miss_the_cases_of_the_full_one(committed, capsys):
    from making_evidence import record, row

    full = record([row("bfloat16 [16384, 4096]"), row("another")])
    evidence.write(committed / "results/h200/rms_norm.json", full)
    evidence.write(committed / "now.json", record([row("another")], shapes="quick"))
    assert check(committed, "--from", str(committed / "now.json")) == 0


def test_charts_are_drawn_from_what_was_measured_before(committed, capsys):
    pytest.importorskip("matplotlib")
    source = committed / "results/h200/rms_norm.json"
    for place in (source, source.parent):
        assert main(["bench", "--from", str(place), "--charts", str(committed / "charts")]) == 0
    assert (committed / "charts" / "scorecard.svg").exists()
    assert "drew" in capsys.readouterr().err


EXTRAS = {name: listed.extra for name, listed in lists.shape_lists().items() if hasattr(listed, "extra")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXTRAS)
def test_what_is_measured_beside_the_cases_can_be(name, cuda):
    from prequal.bench.device import Cuda

    rows = list(EXTRAS[name](Cuda()))
    assert rows
    assert all(row["by"] for row in rows)


@pytest.mark.gpu
def test_a_run_on_the_gpu_is_evidence(tmp_path, cuda, monkeypatch):
    from prequal.bench.device import Cuda

    monkeypatch.setattr(bench, "_device", lambda args: Cuda())
    words = ["--ops", "knn_gather", "--runs", "20", "--no-compile", "--no-peers", "--gpu-tests", "passed"]
    assert main(["bench", *words, "--out", str(tmp_path)]) == 0
    record = evidence.load(tmp_path / "knn.json")
    assert record["gpu_tests"] == "passed"
    assert record["rows"][0]["by"]["prequal"]["path"] == "fast"
