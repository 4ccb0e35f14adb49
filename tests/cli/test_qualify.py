"""`prequal qualify` and `prequal lock explain`: what they print, where, and their exit codes."""

import io
import json
import sys
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

import prequal.api
from prequal import runtime_state
from prequal.cli import doctor, main
from prequal.cli import lock as lock_cli
from prequal.cli import qualify as qualify_cli
from prequal.runtime import lock as lock_file
from prequal.runtime.fingerprint import Fingerprint
from prequal.runtime.lock import Entry, Lock
from prequal.runtime.manifest import Manifest, OpBuild
from prequal.runtime.qualify import Report, Row, Step

WHEN = "2026-05-04T03:02:01+00:00"


def key_of(device=0, tf32=False, name="NVIDIA H200", torch_version="2.13"):
    described = {"name": name, "capability": "9.0"}
    data = {"schema": 1, "torch": {"version": torch_version}}
    if device is None:
        return Fingerprint.of(data)
    data["runtime"] = {"flags": {"tf32": tf32}, "libraries": {}}
    return Fingerprint.of({**data, "device": described})


def row(op="rms_norm", outcome="qualified", **changed):
    given = {"cases": 77, "seconds": 0.5, "when": WHEN, "basename": op, "contract": "Bitwise", "source": "a" * 64}
    return Row(op, 0, outcome, **{**given, **changed})


@pytest.fixture
def qualified(monkeypatch):
    """`prequal.qualify` that tells what it was called with, steps once, and answers what the test says."""

    @dataclass
    class Qualified:
        report: Report
        called: dict

    found = Qualified(Report((row(),), "0.1.0", 1.0, {0: 9}, {0: key_of()}), {})

    def qualify(**given):
        found.called = given
        for at, one in enumerate(found.report.rows):
            given["progress"](Step(at, len(found.report.rows), one.op, one.device, 1, "quick"))
            given["progress"](Step(at + 1, len(found.report.rows), one.op, one.device, row=one))
        return found.report

    monkeypatch.setattr(prequal.api, "qualify", qualify)
    return found


def test_all_qualified_is_exit_0_with_a_table_and_progress_apart(qualified, capsys):
    assert main(["qualify"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "1 of 1 qualified in 1.0 s"
    assert err == "[1/1] rms_norm on cuda:0: qualified, 77 cases, 0.50 s\n"
    assert {name: value for name, value in qualified.called.items() if name != "progress"} == {
        "ops": None,
        "devices": None,
        "cases": None,
        "budget_s": None,
    }


def test_arguments_reach_the_call(qualified):
    assert main(["qualify", "--ops", "a, b", "--devices", "0,cuda:1", "--budget", "2.5"]) == 0
    assert (qualified.called["ops"], qualified.called["devices"]) == (["a", "b"], ["0", "cuda:1"])
    assert qualified.called["budget_s"] == 2.5


@pytest.mark.parametrize("outcome", ["failed", "not finished", "not run"])
def test_an_op_that_is_not_qualified_is_exit_1(qualified, outcome, capsys):
    qualified.report = Report((row(), row("knn", outcome, detail="why it is")), "0.1.0", 1.0, {}, {0: key_of()})
    assert main(["qualify", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["exit_code"], data["rows"][1]["detail"]) == (1, "why it is")


def test_without_a_gpu_it_says_so_and_is_exit_2(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["qualify", "--write", str(tmp_path / "lock")]) == 2
    assert capsys.readouterr().out.startswith("nothing to qualify: no_")
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_written_and_explained(qualified, capsys, tmp_path):
    path = tmp_path / "prequal.lock.json"
    assert main(["qualify", "--write", str(path)]) == 0
    assert capsys.readouterr().err.endswith(f"wrote {path}\n")
    assert [entry.op for entry in lock_file.read(path).entries] == ["rms_norm"]


def test_a_failed_op_is_in_the_lock_as_failed(qualified, tmp_path):
    qualified.report = Report((row(), row("knn", "failed", detail="got 1, want 2")), "0.1.0", 1.0, {}, {0: key_of()})
    assert main(["qualify", "--write", str(tmp_path / "lock")]) == 1
    assert {e.op: e.problem for e in lock_file.read(tmp_path / "lock").entries} == {
        "rms_norm": None,
        "knn": "got 1, want 2",
    }


def test_nothing_finished_writes_no_lock(qualified, tmp_path, capsys):
    qualified.report = Report((row(outcome="not finished"),), "0.1.0", 1.0, {}, {0: key_of()})
    assert main(["qualify", "--write", str(tmp_path / "lock")]) == 1
    assert "there is no lock to write" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ops", ","], "argument --ops: expected names with commas between them, got ','"),
        (["--write", ""], "argument --write: expected the path of a file, got an empty one"),
        (["--write", "{tmp}"], "argument --write: expected a file, got"),
        (["--write", "{tmp}/absent/lock"], "expected a file in a folder that exists"),
        (["--cases", "{tmp}/absent.json"], "argument --cases: expected a JSON file"),
        (["--cases", "nonsense"], "expected FILE.json, MODULE:FUNCTION or FILE.py:FUNCTION, got nonsense"),
        (["--cases", "no.such.module:cases"], "ModuleNotFoundError"),
        (["--cases", "math:tau"], "TypeError"),
        (["--cases", "os:getcwd"], "expected a mapping from op to cases, got str from os:getcwd"),
        (["--cases", "{tmp}/absent.py:cases"], "FileNotFoundError"),
    ],
)
def test_wrong_use_is_exit_2_and_one_line_before_any_work(qualified, arguments, says, tmp_path, capsys):
    assert main(["qualify", *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines()), says in err) == ("", 1, True), err
    assert qualified.called == {}


def test_an_unknown_op_or_device_is_exit_2(capsys):
    assert main(["qualify", "--ops", "rms_nrom"]) == 2
    assert "did you mean rms_norm" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--budget", "soon"], ["--nonsense"], ["rms_norm"]])
def test_what_the_parser_does_not_know_is_exit_2(arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["qualify", *arguments])


# ---- the caller's cases ----------------------------------------------------------------------------------------------


def cases_of(folder, content):
    path = folder / "cases.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return qualify_cli.read_cases(str(path), prequal.TensorSpec)


def test_json_cases_are_shapes(tmp_path):
    found = cases_of(
        tmp_path,
        {
            "rms_norm": [
                [{"shape": [4096, 64], "dtype": "bfloat16"}, None, 1e-5],
                {"name": "llama", "args": [{"shape": [3, 8], "stride": [16, 2]}], "kwargs": {"eps": 0.5}},
            ]
        },
    )
    first, second = found["rms_norm"]
    assert first.args == (prequal.TensorSpec((4096, 64), "bfloat16"), None, 1e-5)
    assert (second.name, second.kwargs) == ("llama", {"eps": 0.5})
    assert second.args == (prequal.TensorSpec((3, 8), stride=(16, 2)),)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "expected a JSON file"),
        ([], "expected a JSON object from op to cases, got list"),
        ({"a": {}}, "a: a list of cases, got dict"),
        ({"a": [3]}, r"a\[0\]: a list of arguments, or name, args and kwargs, got 3"),
        ({"a": [{"arguments": []}]}, r"a\[0\]: a list of arguments"),
        ({"a": [{"args": {}}]}, "args as a list"),
        ({"a": [[{"size": [3]}]]}, r"a\[0\]: a tensor as shape, dtype, stride, high, got"),
        ({"a": [[{"shape": [-3]}]]}, r"a\[0\]: a tensor, got shape: expected whole numbers"),
    ],
)
def test_json_cases_of_a_wrong_shape_name_the_place(tmp_path, content, says):
    with pytest.raises(Exception, match=says) as caught:
        cases_of(tmp_path, content)
    assert type(caught.value).__name__ == "InputError"


@pytest.mark.parametrize("kind", ["file", "module"])
def test_cases_come_from_a_function_of_a_file_or_a_module(tmp_path, monkeypatch, kind, qualified):
    (tmp_path / "shapes_of_mine.py").write_text("def mine():\n    return {'rms_norm': [(1, 2)]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = f"{tmp_path}/shapes_of_mine.py:mine" if kind == "file" else "shapes_of_mine:mine"
    assert main(["qualify", "--cases", source]) == 0
    assert qualified.called["cases"] == {"rms_norm": [(1, 2)]}


def test_a_case_that_is_no_right_call_is_exit_2(tmp_path, capsys):
    (tmp_path / "cases.json").write_text(json.dumps({"rms_norm": [[{"shape": [2, 8]}, {"shape": [7]}]]}))
    assert main(["qualify", "--cases", str(tmp_path / "cases.json")]) == 2
    err = capsys.readouterr().err
    assert "cases['rms_norm'][0]: weight: expected shape [8] to match the last dimension of x, got [7]" in err


# ---- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_that_rewrites_itself(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with qualify_cli.Progress() as progress:
        progress._next = 0.0
        progress.step(Step(0, 2, "knn", 0, 3, "clustered"))
        progress.step(Step(1, 2, "knn", 0, row=row("knn")))
    assert terminal.getvalue() == (
        "\r\033[K[0/2] knn on cuda:0: case 3, clustered\r\033[K[1/2] knn on cuda:0: qualified, 77 cases, 0.50 s\n"
    )


def test_a_log_gets_plain_lines(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with qualify_cli.Progress(interval=0.0) as progress:
        progress.step(Step(0, 2, "knn", 0, 3, "clustered"))
        progress.step(Step(1, 2, "knn", 0, row=row("knn")))
    assert log.getvalue() == (
        "[0/2] knn on cuda:0: case 3, clustered\n[1/2] knn on cuda:0: qualified, 77 cases, 0.50 s\n"
    )


# ---- lock explain ----------------------------------------------------------------------------------------------------

MANIFEST = Manifest(ops=MappingProxyType({"rms_norm": OpBuild("a" * 64, ()), "knn": OpBuild("b" * 64, ())}))


def entry(op, source, problem=None):
    return Entry(op, op, source * 64, "Bitwise", "0", "NVIDIA H200", "9.0", 77, 2, WHEN, problem)


def explained(path, devices=(0,), **key):
    ops = {name: SimpleNamespace(name=name, basename=name, contract="Bitwise") for name in ("rms_norm", "knn", "new")}
    return lock_cli.explain(path, ops, MANIFEST, devices, lambda device: key_of(device, **key))


@pytest.fixture
def path(tmp_path):
    lock = Lock.of({0: key_of()}, [entry("rms_norm", "a"), entry("knn", "c")], "0.1.0")
    lock_file.write(tmp_path / "prequal.lock.json", lock)
    return str(tmp_path / "prequal.lock.json")


def test_a_valid_lock_is_explained_op_by_op(path):
    report = explained(path, [0, 1])
    assert (report["exit_code"], report["valid"], report["moved"]) == (0, True, [])
    assert {answer["op"]: answer["ok"] for answer in report["devices"][1]["ops"]} == {
        "rms_norm": True,
        "knn": False,
        "new": False,
    }
    text = " ".join(lock_cli.render(report).split())
    assert "cuda:1 (NVIDIA H200): valid" in text
    assert f"rms_norm: qualified {WHEN}" in text
    assert "the sources of knn are not those that were qualified" in text
    assert "does not name new on this kind of device" in text
    assert "NVIDIA H200, compute capability 9.0" in text


@pytest.mark.parametrize(
    ("moved", "says"),
    [
        ({"torch_version": "2.14"}, 'torch.version: was "2.13", now "2.14"'),
        ({"tf32": True}, "runtime.flags.tf32: was false, now true"),
        ({"name": "NVIDIA L4"}, 'device.name: was "NVIDIA H200", now "NVIDIA L4"'),
    ],
)
def test_a_stale_lock_is_exit_1_and_names_what_moved_once(path, moved, says):
    report = explained(path, **moved)
    text = lock_cli.render(report)
    assert (report["exit_code"], text.count(says)) == (1, 1), text
    assert f"prequal qualify --write {path}" in text
    json.dumps(report)


def test_without_a_device_it_compares_what_it_can(path):
    report = explained(path, [])
    assert report["exit_code"] == 1
    assert "no CUDA device here" in lock_cli.render(report)


def test_a_broken_or_absent_lock_is_exit_2_and_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREQUAL_LOCK", raising=False)
    assert main(["lock", "explain"]) == 2
    assert capsys.readouterr().err == (
        "prequal lock explain: lock prequal.lock.json cannot be read: No such file or directory\n"
    )
    (tmp_path / "cut").write_text('{"schema": 1')
    monkeypatch.setenv("PREQUAL_LOCK", str(tmp_path / "cut"))
    assert main(["lock", "explain", "--json"]) == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert json.loads(out)["problem"] in err


def test_an_empty_path_is_no_other_lock(path, capsys, monkeypatch):
    monkeypatch.setenv("PREQUAL_LOCK", path)
    assert main(["lock", "explain", ""]) == 2
    assert capsys.readouterr().err == "prequal lock explain: path: expected that of a lock, got an empty one\n"


def test_explain_in_this_process_names_what_moved(path, capsys):
    assert main(["lock", "explain", path]) == 1
    assert "torch.version" in capsys.readouterr().out


# ---- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lock", "says"),
    [
        ({"path": "p", "problem": None, "devices": {"cuda:0": None, "cuda:1": None}}, "p: valid on cuda:0, cuda:1"),
        ({"path": "p", "problem": None, "devices": {"cuda:0": "lock p is not valid here: x"}}, "cuda:0: lock p is not"),
        ({"path": None, "problem": "lock p is broken", "devices": {}}, "- lock p is broken"),
        ({"path": "p", "problem": None, "devices": {}}, "p: read, and there is no device here to compare it with"),
        (None, None),
    ],
)
def test_doctor_shows_the_lock(lock, says):
    text = doctor.render(doctor.gather(rows=list, lock=lambda: lock))
    assert (says in text) if says else ("\nLock\n" not in text)


def test_doctor_of_this_process_shows_a_lock_that_is_not_valid_here(path):
    try:
        prequal.load_lock(path)
        report = doctor.gather()
    finally:
        runtime_state.gate.use_lock(None)
    assert (report["lock"]["path"], "is not valid here: " in report["lock"]["problem"]) == (path, True)
