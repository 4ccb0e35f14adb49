"""Tables in README and docs are made from the registry and the evidence; a stale one fails here."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def make_tables():
    spec = importlib.util.spec_from_file_location("make_tables", REPOSITORY / "docs" / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scorecards_are_those_of_the_evidence(make_tables):
    tables = {
        "scorecard": make_tables.scorecard(),
        "short scorecard": f"{make_tables.scorecard(every=False)}\n\n{make_tables.summary()}",
        "gate costs": make_tables.gate_table(),
    }
    for path, table in (
        ("README.md", "short scorecard"),
        ("docs/scorecard.md", "scorecard"),
        ("docs/gate.md", "gate costs"),
    ):
        text = (REPOSITORY / path).read_text()
        assert tables[table] in text, path
        assert make_tables.filled(text, tables) == text, path


def test_the_short_scorecard_has_a_line_for_each_file_of_ops_and_counts_who_is_slower(make_tables):
    lines = make_tables.scorecard(every=False).splitlines()[2:]
    assert len(lines) == len(make_tables.digests())
    slower = sum(make_tables.SLOWER in line for line in make_tables.scorecard().splitlines())
    assert f"in {slower} of them" in make_tables.summary()


def test_the_index_of_the_notes_names_every_note():
    docs = REPOSITORY / "docs"
    named = set(re.findall(r"\]\((\w+\.md)\)", (docs / "index.md").read_text()))
    assert named == {path.name for path in docs.glob("*.md")} - {"index.md"}


def test_evidence_names_its_gpu_sources_and_tests(make_tables):
    paths = list((REPOSITORY / "benchmarks" / "results").glob("*/*.json"))
    assert {path.stem for path in paths} <= set(make_tables.digests())
    for path in paths:
        record = json.loads(path.read_text())
        assert re.fullmatch(r"[0-9a-f]{64}", record["source_digest"]), path.name
        assert record["basename"] == path.stem
        assert record["gpu"]
        assert record["command"]
        assert record["gpu_tests"] in ("passed", "failed", "not run")


def test_what_has_no_evidence_is_said_to_be_unmeasured(make_tables):
    measured = {record["basename"] for record in make_tables.evidence()}
    table = make_tables.scorecard()
    for name in make_tables.digests():
        assert (f"| `{name}` | – | – | – | – | – | – | not measured yet |" in table) == (name not in measured)


def test_a_cost_of_the_gate_beyond_its_aim_is_said_to_miss_it(make_tables, tmp_path, monkeypatch):
    (tmp_path / "h200" / "lane").mkdir(parents=True)
    lane = tmp_path / "h200" / "lane"
    (lane / "gpu-tests.json").write_text('{"gpu": "NVIDIA H200"}')
    costs = {"qualify": {"ops": 2, "seconds": 9.5}, "hot_path": {"gate_and_counter_ns": 300.0}}
    costs["from_lock"] = [{"load_ms": ms} for ms in (19.0, 30.0, 18.0)]
    (lane / "gate.json").write_text(json.dumps(costs))
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    hot, qualify, lock = make_tables.gate_table().splitlines()[2:]
    assert "300.0 ns | under 300 ns | missed |" in hot
    assert "qualifying all 2 ops | 9.5 s | under 10 s |  |" in qualify
    assert "19.0 ms | under 20 ms |  |" in lock


def test_evidence_of_other_sources_counts_as_stale(make_tables):
    now = make_tables.digests()
    for name, digest in now.items():
        assert not make_tables.is_stale({"basename": name, "source_digest": digest}, now)
        assert make_tables.is_stale({"basename": name, "source_digest": "0" * 64}, now)
    assert make_tables.is_stale({"basename": "gone", "source_digest": "0" * 64}, now)
