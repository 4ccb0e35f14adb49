"""The public functions around the ops: verdicts, counters, flags, policy, fingerprint, qualification, lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from . import ops as _ops  # noqa: F401  the flags below are checked against the ops that exist
from . import runtime_state as _state
from .registry import OpFunction, Sample, find
from .runtime.gate import Verdict
from .runtime.reasons import unsupported

if TYPE_CHECKING:
    from .runtime.fingerprint import Fingerprint
    from .runtime.lock import LockStatus
    from .runtime.qualify import Report, Step

__all__ = [
    "Sample",
    "Verdict",
    "disable",
    "enable",
    "explain",
    "fingerprint",
    "load_lock",
    "qualify",
    "reference",
    "reset_stats",
    "set_policy",
    "stats",
    "strict",
]

_state.read_environment()
if os.environ.get("PREQUAL_LOCK"):
    from .runtime.lock import load_from_environment as _load_from_environment

    _load_from_environment(_state.gate)

disable = _state.flags.disable
enable = _state.flags.enable
reference = _state.flags.reference
strict = _state.flags.strict
stats = _state.telemetry.stats
reset_stats = _state.telemetry.reset
set_policy = _state.gate.set_policy


def explain(op: str | OpFunction, *args: Any, device: torch.device | str | None = None, **kwargs: Any) -> Verdict:
    """Which path would serve, and why, without running it.

    Args:
        op: the op's name, or its public function.
        args, kwargs: a call's arguments; with them, the kernel's needs are looked at too, where the tensors are.
        device: for a look without arguments; default: the current CUDA device if there is one, else the CPU.

    Raises:
        UnknownOpError: no such op. TypeError, ValueError: the arguments are not a right call of it.
    """
    found = find(op)
    bound = found.bind(args, kwargs) if args or kwargs else None
    if bound is not None:
        found.validate(bound)
        where = found.device_of(bound)
    else:
        where = torch.device(device) if device is not None else _default_device()
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {where.type}")
    verdict = _state.gate.verdict(found, _index(where), may_run=False)
    if bound is not None and verdict.path == "fast" and (need := found.unmet_need(bound)):
        return Verdict(found.name, verdict.device, "reference", unsupported(need.name), f"the kernel needs {need.text}")
    return verdict


def fingerprint(device: torch.device | str | int | None = None) -> Fingerprint:
    """What results depend on here. Without a device no CUDA call is made; with one, CUDA is asked about it.

    Raises:
        ValueError: no such CUDA device here.
    """
    from .runtime import qualify as _qualify
    from .runtime.fingerprint import TorchProbe

    found = _state.fingerprint()
    if device is None:
        return found
    host = _state.gate.host
    if problem := host.cuda_problem():
        raise ValueError(f"device: expected a CUDA device of this process, got {device}; {problem}")
    (index,) = _qualify.chosen_devices(host.devices(), device)
    return found.with_device(TorchProbe(index))


def qualify(
    ops: str | Iterable[str] | None = None,
    devices: Iterable[int | str | torch.device] | int | str | torch.device | None = None,
    cases: Mapping[str, Iterable[Sample | tuple[Any, ...]]] | None = None,
    budget_s: float | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Report:
    """Run both paths of every op on its samples and on your shapes, compare, and open or close the gate accordingly.

    Also loads every kernel, so that no later launch loads one. What went wrong with an op is in the report and closes
    that op; it is not raised. To be called again whenever what the fingerprint describes moved in this process (a
    numeric flag of torch, a library loaded later): it then forgets what was qualified before.

    Args:
        ops: names; default: every op.
        devices: CUDA devices; default: all that this process sees.
        cases: for some ops, calls of yours: a Sample or a tuple of arguments each. Tensors go to each target device
            with their strides; a `TensorSpec` is made there.
        budget_s: no new case is started after so many seconds; ops not finished then are not opened by this.
        progress: called before every case and after every op.

    Raises:
        UnknownOpError: no such op. TypeError, ValueError: no such device; a case is not a right call of its op.
        RuntimeError: inside a CUDA graph capture.
    """
    from .runtime import qualify as _qualify

    gate = _state.gate
    chosen = _qualify.chosen_ops(_state.native_ops, ops)
    given = _qualify.chosen_cases(chosen, cases, _state.native_ops)
    present = gate.host.devices() if gate.host.native_problem() is None else []
    targets = _qualify.chosen_devices(present, devices) if present else []
    runner = _qualify.TorchRunner(_state.preload)
    return _qualify.qualify(gate, chosen, targets, runner, cases=given, budget_s=budget_s, progress=progress)


def load_lock(
    path: str | os.PathLike[str], devices: Iterable[int | str | torch.device] | int | str | torch.device | None = None
) -> LockStatus:
    """Rest on a qualification lock: what it names as right serves, on devices and software like those it was made on.

    Everything else stays as the policy says. The lock of an earlier call or of PREQUAL_LOCK is forgotten.

    Args:
        path: written by `prequal qualify --write` or `Report.write_lock`.
        devices: to compare now, which initialises CUDA; default: all where that has happened, else none. The others
            are compared at their first use.

    Returns:
        what moved; `.ok` where nothing did. A stale lock closes every op that was not qualified in this process.

    Raises:
        LockError: the file cannot be read or believed; the gate is then closed as with a stale lock.
        ValueError: no such device.
    """
    from .runtime import lock as _lock

    host = _state.gate.host
    if devices is not None:
        from .runtime import qualify as _qualify

        targets = _qualify.chosen_devices(host.devices(), devices)
    else:
        targets = host.devices() if torch.cuda.is_initialized() else []
    return _lock.load(path, _state.gate, _state.fingerprint_for_keys, targets)


def _default_device() -> torch.device:
    devices = _state.gate.host.devices()
    if not devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else devices[0])


def _index(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    if device.index is not None:
        return device.index
    # Before CUDA is initialised (or where it cannot be) the current device is the first.
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
