"""Machines that are not here: a simulated host, alone or behind the gate of this very process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import prequal
from prequal import runtime_state as state
from prequal.registry import OPS, Op
from prequal.runtime.manifest import CudaBuild, Manifest, OpBuild

CPU = torch.device("cpu")


def manifest_of(
    archs: tuple[str, ...] = ("80", "86", "89", "90"),
    *,
    ptx: tuple[str, ...] = (),
    evidence: Mapping[str, tuple[str, ...]] | None = None,
    minimum_driver: str = "580.65.06",
) -> Manifest:
    evidence = evidence or {}
    basenames = {*(op.basename for op in OPS.values()), *evidence}
    ops = {name: OpBuild("0" * 64, evidence.get(name, ())) for name in basenames}
    cuda = CudaBuild("13.0", "13.0.88", minimum_driver)
    return Manifest(schema=1, version="1.2.3", commit="a" * 40, cuda=cuda, archs=archs, ptx=ptx, ops=ops)


class SimulatedHost:
    """What the gate asks of a machine, as plain data that a test may change at any time."""

    def __init__(
        self,
        *capabilities: tuple[int, int],
        manifest: Manifest | None = None,
        driver: str | None = "580.95.05",
        native: str | None = None,
        cuda: str | None = None,
    ) -> None:
        self.capabilities = dict(enumerate(capabilities or [(9, 0)]))
        self.manifest = manifest or manifest_of()
        self.driver_version, self.native, self.cuda = driver, native, cuda
        self.in_capture = False
        self.loading: str | None = None  # why the kernels cannot be loaded
        self.loaded: set[tuple[str, int]] = set()  # whose are
        self.failures: dict[tuple[str, int], str] = {}
        self.is_open: dict[tuple[str, int], bool] = {}  # what the native hot path was told last
        self.asked: Counter[str] = Counter()

        # Used by `machine` only, where calls are made and not just verdicts.
        self.current = 0
        self.kernel: Callable[..., Any] = lambda op, args: OPS[op]._call(OPS[op].reference, args)
        self.quick_runs: Counter[tuple[str, int]] = Counter()
        self.served: Counter[tuple[str, str]] = Counter()

    def native_problem(self) -> str | None:
        return self.native

    def cuda_problem(self) -> str | None:
        return self.cuda

    def driver(self) -> str | None:
        return self.driver_version

    def devices(self) -> list[int]:
        return list(self.capabilities)

    def capability(self, device: int) -> tuple[int, int]:
        self.asked["capability"] += 1
        return self.capabilities[device]

    def capturing(self) -> bool:
        return self.in_capture

    def loading_problem(self, basename: str, device: int) -> str | None:
        if self.loading is None:
            self.loaded.add((basename, device))
        return self.loading

    def failure(self, op: str, device: int) -> str | None:
        return self.failures.get((op, device))

    def open(self, op: str, device: int, is_open: bool) -> None:
        self.is_open[op, device] = is_open

    def opened(self) -> set[tuple[str, int]]:
        return {pair for pair, is_open in self.is_open.items() if is_open}


@pytest.fixture
def make_host() -> type[SimulatedHost]:
    return SimulatedHost


@pytest.fixture
def make_manifest() -> Callable[..., Manifest]:
    return manifest_of


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """`machine(host)`: prequal's own functions then work as on that host.

    Tensors on the CPU stand for tensors on the host's `current` device, and its `kernel` (by default the reference) for
    the launchers. Gate, flags, telemetry, registry and the public functions are the real ones.
    """
    lock, this_thread, native_why = threading.Lock(), threading.local(), state.why

    def admitted(name: str, args: tuple[Any, ...], *, trial: bool = False) -> Any:
        """As a launcher does: a wrong call is an error, an unmet need a refusal with its name."""
        host, op = state.gate.host, OPS[name]
        op.validate(args)
        if need := op.unmet_need(args):
            this_thread.why = need.name
            return NotImplemented
        out = host.kernel(name, args)
        if not trial:
            with lock:
                host.served[name, f"cuda:{host.current}"] += 1
        return out

    def why() -> str:
        return this_thread.__dict__.pop("why", None) or native_why()

    def quick_case(op: Op, device: int) -> str | None:
        state.gate.host.quick_runs[op.name, device] += 1
        sample = next(iter(op.samples(CPU)))
        found = op.compare_paths(sample)
        return None if found is None else f"{sample.name}: {found}"

    def put(host: SimulatedHost) -> SimulatedHost:
        state.gate.unqualify()
        monkeypatch.setattr(state.gate, "host", host)
        monkeypatch.setattr(state.telemetry, "_fast_calls", lambda: host.served)
        monkeypatch.setattr(state, "admitted", admitted)
        monkeypatch.setattr(state, "why", why)
        monkeypatch.setattr(Op, "device_of", lambda op, args: torch.device("cuda", host.current))
        monkeypatch.setattr(Op, "quick_case", quick_case)
        prequal.reset_stats()
        return host

    yield put
    state.gate.unqualify()  # before the real host is back
