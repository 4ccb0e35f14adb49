"""The process-wide state: what the gate asks of this very machine."""

from __future__ import annotations

import pytest

from prequal import runtime_state as state
from prequal.runtime.fingerprint import collect
from prequal.runtime.lock import key_of
from prequal.runtime.nvml import Gpu, SystemNvml


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@host)",
            "580.95.05",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12  Wed Aug 20 01:58:59 UTC 2025", "535.104.12"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  525.60  Wed", "525.60"),
        ("something else", None),
        ("", None),
    ],
)
def test_the_kernel_modules_version_is_read_from_its_file(tmp_path, line, version):
    path = tmp_path / "version"
    path.write_text(line + "\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    assert state.kernel_module_version(str(path)) == version


def test_without_the_file_nobody_says(tmp_path):
    assert state.kernel_module_version(str(tmp_path / "absent")) is None


class Session:
    """NVML as a machine of one GPU answers."""

    def driver_version(self) -> str:
        return "580.95.05"

    def gpus(self) -> tuple[Gpu, ...]:
        return (Gpu(0, "GPU-1", "NVIDIA H200", (9, 0)),)


def test_a_key_needs_no_nvml_session_where_the_kernel_module_tells_the_driver(monkeypatch):
    def session(self: object, module: object = None) -> None:
        raise AssertionError("a session was opened")

    monkeypatch.setattr(state, "kernel_module_version", lambda: "580.95.05")
    monkeypatch.setattr(state, "_key_side", None)
    monkeypatch.setattr(SystemNvml, "__init__", session)
    found = state.fingerprint_for_keys()
    assert found.data["driver"] == {"version": "580.95.05", "problem": None}
    assert state.fingerprint_for_keys() is found


def test_a_key_made_without_a_session_is_the_key_made_with_one(monkeypatch):
    monkeypatch.setattr(state, "kernel_module_version", lambda: "580.95.05")
    monkeypatch.setattr(state, "_key_side", None)
    assert key_of(state.fingerprint_for_keys()) == key_of(collect(Session()))


class Loading:
    """The native module's side of loading: two basenames, of which a kernel may be unloadable."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str | None]] = []
        self.problem: str | None = None

    def kernels(self) -> dict[str, int]:
        return {"knn": 5, "rope": 2}

    def preload(self, device: int, basename: str | None) -> int:
        self.asked.append((device, basename))
        if self.problem:
            raise RuntimeError(self.problem)
        return sum(self.kernels().values()) if basename is None else self.kernels()[basename]


def test_an_op_opens_with_its_own_kernels_loaded_once_a_device(monkeypatch):
    native, host = Loading(), state.ThisHost()
    monkeypatch.setattr(state, "native", native)
    monkeypatch.setattr(state, "_loaded", set())
    capturing = False
    monkeypatch.setattr(state.ThisHost, "capturing", lambda self: capturing)
    for device in (0, 0, 1):
        assert host.loading_problem("rope", device) is None
    assert native.asked == [(0, "rope"), (1, "rope")]

    capturing = True
    assert host.loading_problem("rope", 0) is None
    assert "inside a graph capture: call the op once before, or qualify" in (host.loading_problem("knn", 0) or "")
    assert native.asked == [(0, "rope"), (1, "rope")]
    monkeypatch.setattr(state, "through_torch", {"linear": len})
    assert state.preload(0) == 7  # as qualification does
    assert host.loading_problem("knn", 0) is None
    assert host.loading_problem("linear", 0) is None

    capturing = False
    native.problem = "preload on cuda:1: no kernel image"
    assert host.loading_problem("knn", 1) == "the kernels could not be loaded: preload on cuda:1: no kernel image"
    native.problem = None
    assert host.loading_problem("knn", 1) is None


class Door:
    """The native module, with one launcher that answers nothing where it lets a call through."""

    def __init__(self) -> None:
        self.open = False
        self.admitted: list[bool] = []

    def linear(self, *args: object) -> object:
        return None if self.open else NotImplemented

    def admit(self, trial: bool) -> None:
        self.admitted.append(trial)


def test_what_stands_behind_a_door_answers_only_where_the_launcher_lets_the_call_through(monkeypatch):
    door, asked = Door(), []
    monkeypatch.setattr(state, "native", door)
    monkeypatch.setattr(state, "_ids", {"linear": 0})
    monkeypatch.setattr(state, "through_torch", {"linear": lambda *args: asked.append(args) or "answer"})
    for call in (state.native_function("linear"), lambda *args: state.admitted("linear", args, trial=True)):
        door.open, asked[:] = False, []
        assert call(1, 2) is NotImplemented
        assert asked == []
        door.open = True
        assert call(1, 2) == "answer"
        assert asked == [(1, 2)]
    assert door.admitted == [True, True]
