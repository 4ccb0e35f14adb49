"""Devices and isolation for every test. GPU tests carry the marker `gpu`; without a GPU they are skipped, with why."""

from __future__ import annotations

import importlib.util
import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch

import prequal
from prequal import runtime_state as state
from prequal.registry import OPS, Op
from prequal.runtime.gate import Qualification, now

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests")]  # best_rows


def why_no_gpu() -> str | None:
    refusal = state.gate.host.native_problem() or state.gate.host.cuda_problem()
    if refusal:
        return refusal
    verdict = prequal.explain("rms_norm", device="cuda")
    return (
        None if verdict.path == "fast" or verdict.reason == "not_qualified" else f"{verdict.reason}: {verdict.detail}"
    )


LARGE = 30  # as so many tests a large one counts: a guess, its time was not measured


def shares(items: list[pytest.Item], shards: int) -> list[list[pytest.Item]]:
    """The tests of each shard. Those that go through an op's samples stay together, since a shard that has one of them
    makes all of that op's samples; so do the large ones, which would not fit side by side."""
    together: dict[str, list[pytest.Item]] = {}
    apart: list[pytest.Item] = []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("large"):
            together.setdefault("large", []).append(item)
        elif "op" in params and "name" in params:
            together.setdefault(params["op"].name, []).append(item)
        else:
            apart.append(item)
    weights = {name: len(group) * (LARGE if name == "large" else 1) for name, group in together.items()}
    found: list[list[pytest.Item]] = [[] for _ in range(shards)]
    load = [0] * shards
    for group, weight in [
        *((together[name], weights[name]) for name in sorted(together, key=lambda name: -weights[name])),
        *(([item], 1) for item in apart),
    ]:
        least = load.index(min(load))
        found[least] += group
        load[least] += weight
    return found


@pytest.hookimpl(trylast=True)  # after -m and -k have made their choice
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shard := os.environ.get("PREQUAL_TEST_SHARD"):  # "0/4": the first of four that the GPU lane runs side by side
        mine, shards = (int(part) for part in shard.split("/"))
        items[:] = shares(items, shards)[mine]
    reason = why_no_gpu() if any(item.get_closest_marker("gpu") for item in items) else None
    if reason is None:
        return
    if os.environ.get("PREQUAL_GPU_LANE"):
        raise pytest.UsageError(f"the GPU lane was asked for, and: {reason}")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"no usable GPU: {reason}"))


def broken_context() -> str | None:
    """What the GPU says once a kernel has broken its context: nothing of this process succeeds there any more."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """The test that breaks the context ends the run: thousands that fail for its sake would bury it."""
    report = yield
    if report.failed and item.get_closest_marker("gpu") and (why := broken_context()):
        item.session.shouldstop = f"{item.nodeid} broke the GPU's context: {why}"
    return report


DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the current GPU where there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def watching_dispatch() -> AbstractContextManager[list[object]]:
    """A dispatch mode that lists every op that comes by."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[object] = []

        def __enter__(self) -> list[object]:
            super().__enter__()
            return self.seen

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(function)
            return function(*args, **(kwargs or {}))

    return Watch()


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest):
    """The example that a test module names as its PROGRAM, imported."""
    name = request.module.PROGRAM
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def all_ranks(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Callable[[Sequence[int]], None]:
    """Runs the test's own file once a rank, side by side: its number, a store, and all sizes. All must end well."""

    def run(sizes: Sequence[int]) -> None:
        told = [str(tmp_path / "store"), *map(str, sizes)]
        paths = [str(REPOSITORY / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        words = [sys.executable, request.module.__file__]
        ranks = [
            subprocess.Popen([*words, str(rank), *told], stderr=subprocess.PIPE, text=True, env=own)
            for rank in range(len(sizes))
        ]
        try:
            ends = [(process.communicate(timeout=240)[1], process.returncode) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert all(code == 0 for _, code in ends), "\n".join(error for error, _ in ends)

    return run


@pytest.fixture(autouse=True)
def fresh_state(caplog: pytest.LogCaptureFixture):
    """Counters, flags, policy and qualifications of one test are not the next one's."""
    caplog.set_level(logging.ERROR, logger="prequal")
    prequal.enable("all")
    prequal.set_policy("auto")
    prequal.reset_stats()
    yield
    prequal.enable("all")
    prequal.set_policy("auto")
    state.gate.unqualify()


def qualify_unseen(ops: Iterable[Op]) -> None:
    """What a qualification would find, the tests that ask for this find themselves."""
    for op in ops:
        for index in state.gate.host.devices():
            state.gate.record(op.name, index, Qualification("the tests", now()))


@pytest.fixture
def bitwise_paths_serve(fresh_state: None) -> None:
    """Which they do only once they are qualified."""
    qualify_unseen(op for op in OPS.values() if op.contract.kind == "bitwise")


@pytest.fixture
def paths_serve(fresh_state: None) -> None:
    """At once: else every test begins with the self-test of its op's first use, thousands of times the same."""
    qualify_unseen(OPS.values())


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """Real scans, which are not part of the project."""
    folder = pathlib.Path(os.environ.get("PREQUAL_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no test data: set PREQUAL_TEST_DATA to the folder that holds the scans")
    return folder
