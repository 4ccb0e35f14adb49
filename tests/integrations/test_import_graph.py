"""examples/import_graph.py in its quick form: edges that are there, right before timed, and what it writes."""

from __future__ import annotations

import json
import re

import pytest
import torch

import prequal

pytest.importorskip("matplotlib")

PROGRAM = "import_graph"
SMALL = ["--quick", "--device", "cpu", "--runs", "1"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """a imports b.c and, by its name, d; b.c imports b (from . import) and a; d has no imports."""
    root = tmp_path / "pack"
    (root / "b").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "a.py").write_text("from .b import c\nimport pack.d\nimport os\n")
    (root / "b" / "__init__.py").write_text("from . import c\n")
    (root / "b" / "c.py").write_text("def f():\n    from .. import a\n")
    (root / "d.py").write_text("x = 1\n")
    (root / "broken.py").write_text("def (\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "pack"


def test_edges_are_the_imports_of_the_sources(program, package):
    names, edges = program.import_graph([package])
    assert {(names[i], names[j]) for i, j in edges} == {
        ("pack.a", "pack.b.c"),
        ("pack.a", "pack.d"),
        ("pack.b", "pack.b.c"),
        ("pack.b.c", "pack.a"),
    }
    assert "pack.broken" in names


def test_the_largest_component_is_mapped(program):
    nodes, edges = program.largest_component(6, [(0, 1), (4, 2), (5, 4)])
    assert nodes == [2, 4, 5]
    assert sorted(edges) == [(1, 0), (2, 1)]


def test_a_rank_is_the_stationary_distribution(program, package):
    names, edges = program.import_graph([package])
    graph = program.Graph(len(names), edges, torch.device("cpu"))
    count = len(names)
    step = torch.zeros(count, count, dtype=torch.float64)
    for i, j in edges:
        step[j, i] = 1 / sum(a == i for a, _ in edges)
    step[:, step.sum(0) == 0] = 1 / count
    step = program.DAMPING * step + (1 - program.DAMPING) / count
    want = torch.linalg.matrix_power(step, 200)[:, 0]
    for variant in program.VARIANTS:
        # 0.85^50 of what is left to settle
        torch.testing.assert_close(graph.rank(graph.passes(variant)[0]).double(), want, rtol=1e-3, atol=1e-4)


def test_the_quick_form_compares_times_writes_and_draws(program, tmp_path, capsys):
    files = tmp_path / "imports.json", tmp_path / "imports.png"
    assert program.main([*SMALL, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    said = capsys.readouterr().out
    assert "most leaned on" in said
    result = json.loads(files[0].read_text())
    assert result["wrong"] == {name: [] for name in program.VARIANTS}
    assert abs(sum(result["rank"]) - 1) < 1e-4
    assert len(result["modules"]) == len(result["rank"])
    assert len(result["coordinates"]) == len(result["mapped"]) <= len(result["modules"])
    for rows in result["times_us"].values():
        assert all(row["median"] > 0 for row in rows.values())
    assert files[1].read_bytes()[:4] == b"\x89PNG"


def test_a_wrong_answer_is_not_timed(program, package, monkeypatch, capsys, tmp_path):
    right = prequal.message_passing
    monkeypatch.setattr(prequal, "message_passing", lambda *args, **named: 1.01 * right(*args, **named))
    out = tmp_path / "imports.json"
    assert program.main([*SMALL, "--packages", package, "--json", str(out)]) == 1
    said = capsys.readouterr().out
    assert "WRONG prequal: smoothing: " in said
    assert "FAILED: prequal" in said
    assert all(list(rows) == ["plain"] for rows in json.loads(out.read_text())["times_us"].values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--packages", "no_such_package"], "--packages: expected installed packages, got 'no_such_package'"),
        (["--runs", "0"], "--runs: expected at least 1, got 0"),
        (["--device", "tpu"], "--device: expected cuda or cpu, got 'tpu'"),
    ],
)
def test_wrong_use_is_told(program, given, message, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main([*SMALL, *given])
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_answers(program, cuda, tmp_path):
    out = tmp_path / "imports.json"
    assert program.main(["--quick", "--device", "cuda", "--runs", "1", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["path"] == "fast"
