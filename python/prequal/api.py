"""The public functions around the ops: verdicts, counters, flags, policy, fingerprint."""

from __future__ import annotations

from typing import Any

import torch

from . import ops as _ops  # noqa: F401  the flags below are checked against the ops that exist
from . import runtime_state as _state
from .registry import Sample, find
from .runtime.fingerprint import Fingerprint, TorchProbe
from .runtime.gate import Verdict
from .runtime.reasons import unsupported

__all__ = [
    "Sample",
    "Verdict",
    "disable",
    "enable",
    "explain",
    "fingerprint",
    "reference",
    "reset_stats",
    "set_policy",
    "stats",
    "strict",
]

_state.read_environment()

disable = _state.flags.disable
enable = _state.flags.enable
reference = _state.flags.reference
strict = _state.flags.strict
stats = _state.telemetry.stats
reset_stats = _state.telemetry.reset
set_policy = _state.gate.set_policy


def explain(op: str, *args: Any, device: torch.device | str | None = None, **kwargs: Any) -> Verdict:
    """Which path would serve, and why, without running it.

    Args:
        op: the op's name.
        args, kwargs: a call's arguments; with them, the kernel's needs are looked at too.
        device: where no arguments are given; default: the current CUDA device if there is one, else the CPU.

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
    verdict = _state.gate.verdict(found, _index(where), may_run=False)
    if bound is not None and verdict.path == "fast" and (need := found.unmet_need(bound)):
        return Verdict(op, verdict.device, "reference", unsupported(need.name), f"the kernel needs {need.text}")
    return verdict


def fingerprint(device: int | None = None) -> Fingerprint:
    """What results depend on here. Without a device no CUDA call is made; with one, CUDA is asked about it."""
    found = _state.fingerprint()
    return found if device is None else found.with_device(TorchProbe(device))


def _default_device() -> torch.device:
    devices = _state.gate.host.devices()
    if not devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else devices[0])


def _index(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index

