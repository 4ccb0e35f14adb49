"""What compiles ahead of a benchmark: every case once, by shares, and none of its failures are the benchmark's."""

from __future__ import annotations

import sys

import pytest
import torch

from prequal.bench import cases as lists
from prequal.bench import precompile, runner

NAMES = ["rms_norm", "swiglu"]


@pytest.fixture
def asked(monkeypatch):
    """Instead of compiling: who asked for it, and a function that answers."""
    asked = []

    def compiled(function):
        asked.append(function)
        return lambda *args, **named: None

    monkeypatch.setattr(precompile, "compiled", compiled)
    return asked


@pytest.fixture
def small(monkeypatch):
    """The quick cases of two ops, on data that a CPU makes in no time."""
    found = [case for case in lists.cases_of(lists.chosen_ops(NAMES), "quick") if case.compiled is not None]
    assert found

    def shrunk(case):
        make = lists.cases_of(lists.chosen_ops([case.op]), "sample")[0].make
        return lists.Case(case.op, case.name, make, compiled=case.compiled)

    monkeypatch.setattr(precompile, "cases_of", lambda ops, tier: [shrunk(case) for case in found])
    return found


@pytest.mark.parametrize("shares", [1, 2, 3, 50])
def test_the_shares_together_compile_every_case_once(asked, small, shares):
    done = sum(precompile.compile_share(NAMES, "quick", share, shares, torch.device("cpu")) for share in range(shares))
    assert done == len(small)
    assert sorted(map(id, asked)) == sorted(id(case.compiled) for case in small)


def test_a_case_that_fails_leaves_the_others_compiled(asked, small, monkeypatch, capsys):
    def fails(function):
        if function is small[0].compiled:
            raise RuntimeError("no such kernel")
        asked.append(function)
        return lambda *args, **named: None

    monkeypatch.setattr(precompile, "compiled", fails)
    alike = sum(case.compiled is small[0].compiled for case in small)
    assert precompile.compile_share(NAMES, "quick", 0, 1, torch.device("cpu")) == len(small) - alike
    assert "no such kernel" in capsys.readouterr().err


def test_one_job_starts_no_process(monkeypatch):
    monkeypatch.setattr(precompile.subprocess, "Popen", None)
    precompile.compile_ahead(NAMES, "quick", 1, pytest.fail)


def test_processes_are_told_their_shares_and_waited_for(monkeypatch):
    said, started = [], []

    class Process:
        def __init__(self, command, **_):
            started.append(command)
            self.ended = False

        def wait(self):
            self.ended = True

        def kill(self):
            assert self.ended

    monkeypatch.setattr(precompile.subprocess, "Popen", Process)
    precompile.compile_ahead(NAMES, "full", 3, said.append)
    assert [command[-3:] for command in started] == [["rms_norm,swiglu", "full", f"{part}/3"] for part in range(3)]
    assert all(command[:3] == [sys.executable, "-m", "prequal.bench.precompile"] for command in started)
    assert len(said) == 1


def test_an_interrupt_ends_the_processes(monkeypatch):
    killed = []

    class Process:
        def __init__(self, command, **_):
            pass

        def wait(self):
            raise KeyboardInterrupt

        def kill(self):
            killed.append(self)

    monkeypatch.setattr(precompile.subprocess, "Popen", Process)
    with pytest.raises(KeyboardInterrupt):
        precompile.compile_ahead(NAMES, "quick", 2, lambda text: None)
    assert len(killed) == 2


def test_the_cases_are_those_that_the_benchmark_compiles():
    assert precompile.compiled is runner.compiled
    assert precompile.cases_of is lists.cases_of


def test_a_machine_gets_no_more_processes_than_it_has_processors_and_memory_for():
    gib = 2**30
    assert precompile.fitting_jobs(32, 140 * gib) == 12
    assert precompile.fitting_jobs(8, 140 * gib) == 4
    assert precompile.fitting_jobs(32, 24 * gib) == 3
    assert precompile.fitting_jobs(1, 24 * gib) == precompile.fitting_jobs(32, 0) == 1


def test_no_process_is_started_for_no_case(monkeypatch):
    monkeypatch.setattr(precompile.subprocess, "Popen", None)
    monkeypatch.setattr(precompile, "cases_of", lambda ops, tier: [])
    precompile.compile_ahead(NAMES, "quick", 8, pytest.fail)
