"""A run of GPU tests ends at the test that breaks the context, and names it."""

from __future__ import annotations

import importlib.util
import pathlib
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def hooks():
    path = pathlib.Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("hooks_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reported(hooks, *, failed: bool, gpu: bool) -> str | bool:
    """What the session is told after a test."""
    session = SimpleNamespace(shouldstop=False)
    item = SimpleNamespace(nodeid="test_it", session=session, get_closest_marker=lambda name: gpu or None)
    steps = hooks.pytest_runtest_makereport(item, None)
    next(steps)
    with pytest.raises(StopIteration):
        steps.send(SimpleNamespace(failed=failed))
    return session.shouldstop


def broken() -> None:
    raise RuntimeError("CUDA error: misaligned address\nmore of it")


def test_the_test_that_breaks_the_context_ends_the_run_and_is_named(hooks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert reported(hooks, failed=True, gpu=True) == "test_it broke the GPU's context: CUDA error: misaligned address"


@pytest.mark.parametrize(("failed", "gpu"), [(False, True), (True, False)])
def test_a_test_that_passes_or_asks_no_gpu_does_not(hooks, monkeypatch, failed, gpu):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert reported(hooks, failed=failed, gpu=gpu) is False


def test_a_failure_that_leaves_the_context_whole_does_not(hooks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert reported(hooks, failed=True, gpu=True) is False


def test_no_context_is_made_to_ask(hooks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert hooks.broken_context() is None
