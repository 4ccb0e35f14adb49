"""Evidence files: what they must hold, and what is stale, missing or regressed."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest
from making_evidence import record, row, spread

from prequal.bench import evidence

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
NOW = {"rms_norm": "a" * 64, "knn": "b" * 64}


def kinds(findings) -> list[str]:
    return [finding.kind for finding in findings]


def with_ours(median: float, half: float, case: str = "a", **more):
    one = row(case)
    one["by"]["prequal"] |= {"device_us": spread(median, half), **more}
    return one


def test_a_record_of_the_schema_has_no_problem():
    assert evidence.problems(record()) == []
    host = {"case": "host time", "by": {"torch.add": {"host_us": spread(10.0)}}, "route_gate_counter_us": 1.5}
    assert evidence.problems(record([host])) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema: expected 1, got 2"),
        ({"basename": "../x"}, "basename: expected"),
        ({"gpu": ""}, "gpu: expected"),
        ({"source_digest": "abc"}, "source_digest: expected"),
        ({"gpu_tests": "perhaps"}, "gpu_tests: expected"),
        ({"fingerprint": None}, "fingerprint: expected an object"),
        ({"rows": {}}, "rows: expected a list"),
        ({"rows": [{"case": "a"}]}, r"rows[0]: expected an object with case and by"),
        ({"rows": [{"case": "a", "by": {"x": 3}}]}, "rows[0].by[x]: expected an object"),
        (
            {"rows": [{"case": "a", "by": {"x": {"device_us": {"median": 5, "q1": 6, "q3": 7, "runs": 9}}}}]},
            "rows[0].by[x].device_us: expected median",
        ),
        ({"rows": [{"case": "a", "by": {"x": {"wall_us": {"median": 5}}}}]}, "rows[0].by[x].wall_us: expected median"),
    ],
)
def test_a_broken_record_is_told_with_its_place(change, says):
    (found,) = evidence.problems(record() | change)
    assert found.startswith(says)


def test_a_file_is_written_whole_and_read_back(tmp_path):
    path = tmp_path / "h200" / "rms_norm.json"
    evidence.write(path, record())
    assert evidence.load(path) == record()
    with pytest.raises(TypeError):
        evidence.write(path, {"schema": object()})
    assert evidence.load(path) == record()
    assert [file.name for file in path.parent.iterdir()] == ["rms_norm.json"]


def test_a_file_that_is_no_evidence_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json"):
        evidence.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="schema: expected 1"):
        evidence.load(path)


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")],
)
def test_a_folder_is_named_for_its_gpu(gpu, folder):
    assert evidence.slug(gpu) == folder


def test_evidence_that_holds_has_nothing_to_say(tmp_path):
    evidence.write(tmp_path / "rms_norm.json", record())
    records, found = evidence.committed(tmp_path, NOW, ["rms_norm"])
    assert (records, found) == ({"rms_norm": record()}, [])


def test_stale_missing_and_broken_evidence_is_told(tmp_path):
    evidence.write(tmp_path / "rms_norm.json", record(source_digest="c" * 64))
    _, found = evidence.committed(tmp_path, NOW, ["rms_norm", "knn"])
    assert [(finding.kind, finding.where) for finding in found] == [("stale", "rms_norm"), ("missing", "knn")]
    (tmp_path / "knn.json").write_text("[]")
    assert kinds(evidence.committed(tmp_path, NOW, ["knn"])[1]) == ["broken"]


def test_a_run_that_was_stopped_is_no_whole_evidence(tmp_path):
    evidence.write(tmp_path / "rms_norm.json", record(complete=False))
    assert kinds(evidence.committed(tmp_path, NOW, ["rms_norm"])[1]) == ["missing"]


def test_only_what_moved_beyond_both_quartiles_is_a_regression():
    old = record([with_ours(100, 3)])
    assert evidence.compared(old, record([with_ours(105, 3)])) == []
    assert evidence.compared(old, record([with_ours(95, 3)])) == []
    (slower,) = evidence.compared(old, record([with_ours(107, 3)]))
    assert (slower.kind, slower.is_bad) == ("regressed", True)
    assert "100.0 us [97.0, 103.0] before, 107.0 [104.0, 110.0] now" in str(slower)
    (faster,) = evidence.compared(old, record([with_ours(90, 3)]))
    assert (faster.kind, faster.is_bad) == ("faster", False)


def test_a_noisy_time_is_said_to_be_noisy_not_to_have_moved():
    found = evidence.compared(record([with_ours(100, 3)]), record([with_ours(150, 3, noisy=True)]))
    assert kinds(found) == ["noisy"]
    assert not found[0].is_bad


def test_a_case_that_is_in_one_of_them_only_is_missing():
    old, new = record([row("a"), row("b")]), record([row("a"), row("c")])
    assert [(x.kind, x.where) for x in evidence.compared(old, new)] == [
        ("missing", "rms_norm, c"),
        ("missing", "rms_norm, b"),
    ]
    assert [x.where for x in evidence.compared(old, new, complete=False)] == ["rms_norm, c"]


def test_a_wrong_answer_of_ours_is_worse_than_a_slow_one():
    wrong = row("a")
    del wrong["by"]["prequal"]
    wrong["wrong"] = {"prequal": "output 0 at [0]"}
    (found,) = evidence.compared(record([row("a")]), record([wrong]))
    assert (found.kind, found.is_bad) == ("wrong", True)


def test_another_gpu_is_not_compared():
    assert kinds(evidence.compared(record(), record(gpu="NVIDIA A100"))) == ["missing"]


def tool(path: str):
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, REPOSITORY / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (REPOSITORY / "docs" / "make_tables.py").exists(), reason="tests without their repository")
def test_tables_and_the_manifest_read_what_is_written(tmp_path, monkeypatch):
    tables, manifest = tool("docs/make_tables.py"), tool("cmake/write_manifest.py")
    digest = tables.digests()["rms_norm"]
    slow = row("narrow", 70.0, torch_eager=90.0, torch_compile=80.0, liger_kernel=60.0)
    rows = [row("wide", 70.0, torch_eager=120.0, torch_compile=90.0), slow]
    evidence.write(tmp_path / "benchmarks/results/h200/rms_norm.json", record(rows, source_digest=digest))
    assert manifest.release_evidence(tmp_path, {"rms_norm": digest}) == {"rms_norm": ["90"]}
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "benchmarks/results")
    wide, narrow, *unmeasured = tables.scorecard().splitlines()[2:]
    assert len(unmeasured) == len(tables.digests()) - 1
    assert "`rms_norm` wide | NVIDIA H200 | 70.0 µs | 120 µs | 90.0 µs |" in wide
    assert "slower" not in wide
    assert "slower than the best of these" in narrow
    assert "liger_kernel 60.0 µs" in narrow


def test_the_record_is_json():
    assert json.loads(json.dumps(record())) == record()
