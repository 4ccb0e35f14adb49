"""For each (op, device): may the fast path serve, and if not, why. Fast or reference + one reason of the enumeration.

The static half is pure arithmetic on what the wheel holds and what the device is (`static_refusal`, `variant_for`). The
other half is qualification: evidence carried in the wheel, the op's quick case on this worker at first use, an explicit
`qualify`, or a lock. Everything the gate asks of the machine goes through `Host`, so that any host can be simulated.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from .manifest import Manifest
from .reasons import Reason, unsupported

Policy = Literal["auto", "strict", "trust"]
POLICIES = ("auto", "strict", "trust")


class Host(Protocol):
    """What the gate asks of the process and the machine. `device` is a CUDA ordinal."""

    manifest: Manifest

    def native_problem(self) -> str | None:
        """Why there is no native module, in words; None where there is one."""
        ...

    def cuda_problem(self) -> str | None:
        """Why CUDA cannot be used, in words; None where it can. Creates no context."""
        ...

    def driver(self) -> str | None:
        """"580.65.06", or None where nobody says."""
        ...

    def devices(self) -> list[int]: ...

    def capability(self, device: int) -> tuple[int, int]: ...

    def capturing(self) -> bool:
        """True inside a CUDA graph capture."""
        ...

    def failure(self, op: str, device: int) -> str | None:
        """CUDA's own words after a failed fast call of this op on this device."""
        ...

    def open(self, op: str, device: int, is_open: bool) -> None:
        """Tell the native hot path."""
        ...


class GatedOp(Protocol):
    """What the gate needs to know of an op."""

    name: str
    basename: str
    contract: Any

    def quick_case(self, device: int) -> str | None:
        """Run the smallest sample on both paths; the comparator's sentence, or None where the contract holds."""
        ...


@dataclass(frozen=True)
class Qualification:
    """That, when and by what an op was found right on a device; with a `problem`, that it was not."""

    by: str
    when: str
    problem: str | None = None


@dataclass(frozen=True)
class Verdict:
    """`path` is "fast" or "reference"; `reason` and `detail` say why not fast; `variant` is the machine code that serves."""

    op: str
    device: str
    path: Literal["fast", "reference"]
    reason: str | None = None
    detail: str = ""
    variant: str | None = None
    qualification: Qualification | None = None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def arch_number(arch: str) -> int:
    return int(arch.rstrip("af"))


def variant_for(manifest: Manifest, capability: tuple[int, int], environ: Mapping[str, str] = os.environ) -> str | None:
    """The architecture whose code runs on this capability: same major, the highest minor not above it. None: none built.

    A test build that carries PTX runs the variant that PREQUAL_FORCE_ARCH names; no released wheel carries PTX.
    """
    forced = environ.get("PREQUAL_FORCE_ARCH")
    if forced and forced in manifest.ptx:
        return forced
    major, minor = capability
    fitting = [
        arch
        for arch in manifest.archs
        if arch_number(arch) // 10 == major
        and (arch_number(arch) % 10 <= minor if arch.isdigit() else arch_number(arch) % 10 == minor)
    ]
    return max(fitting, key=arch_number, default=None)


def driver_refusal(manifest: Manifest, driver: str | None) -> str | None:
    """In words, why this driver is too old for the toolkit in the manifest; None where it is not, or nobody says."""
    if manifest.cuda is None or driver is None:
        return None
    try:
        have, want = (tuple(int(part) for part in text.split(".")) for text in (driver, manifest.cuda.minimum_driver))
    except ValueError:
        return None
    if have >= want:
        return None
    return f"driver {driver}; CUDA {manifest.cuda.toolkit} needs {manifest.cuda.minimum_driver} or newer"


def static_refusal(host: Host, device: int | None) -> tuple[Reason, str] | None:
    """The first reason, in a fixed order, that no flag and no qualification can change. `device` None: no CUDA tensor."""
    if problem := host.native_problem():
        return Reason.NO_NATIVE_MODULE, problem
    if problem := host.cuda_problem():
        return Reason.NO_CUDA, problem
    if problem := driver_refusal(host.manifest, host.driver()):
        return Reason.DRIVER_TOO_OLD, problem
    if device is not None:
        capability = host.capability(device)
        if variant_for(host.manifest, capability) is None:
            built = ", ".join(f"sm_{arch}" for arch in host.manifest.archs) or "none"
            text = f"compute capability {capability[0]}.{capability[1]}; this wheel holds {built}"
            return Reason.ARCH_NOT_BUILT, text
    return None


class Gate:
    """Verdicts, kept until something that they rest on changes."""

    def __init__(
        self,
        host: Host,
        disabled: Callable[[str], str | None] = lambda op: None,
        policy: Policy = "auto",
    ) -> None:
        self.host = host
        self._disabled = disabled
        self._policy: Policy = policy
        self._lock = threading.RLock()
        self._static: dict[int | None, tuple[Reason, str] | None] = {}
        self._qualified: dict[tuple[str, int], Qualification] = {}
        self._opened: set[tuple[str, int]] = set()
        self.lock_problem: str | None = None

    @property
    def policy(self) -> Policy:
        return self._policy

    def set_policy(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy (PREQUAL_POLICY): expected {', '.join(POLICIES)}, got {policy!r}")
        self._policy = policy
        self.forget()

    def forget(self) -> None:
        """Close every fast path until it is asked for again. What was qualified stays qualified."""
        with self._lock:
            for op, device in self._opened:
                self.host.open(op, device, False)
            self._opened.clear()
            self._static.clear()

    def record(self, op: str, device: int, qualification: Qualification) -> None:
        with self._lock:
            self._qualified[op, device] = qualification
            self.host.open(op, device, False)
            self._opened.discard((op, device))

    def unqualify(self) -> None:
        """Forget every qualification: the next call stands where a new process does."""
        with self._lock:
            self._qualified.clear()
        self.forget()

    def qualification(self, op: str, device: int) -> Qualification | None:
        return self._qualified.get((op, device))

    def verdict(self, op: GatedOp, device: int | None, *, may_run: bool = True) -> Verdict:
        """For a CUDA device, or None for tensors on the CPU. `may_run=False` only looks: no quick case is run."""
        name = "cpu" if device is None else f"cuda:{device}"

        def refuse(reason: str, detail: str, qualification: Qualification | None = None) -> Verdict:
            return Verdict(op.name, name, "reference", str(reason), detail, None, qualification)

        with self._lock:
            if device not in self._static:
                self._static[device] = static_refusal(self.host, device)
            refusal = self._static[device]
            if refusal:
                return refuse(*refusal)
            if device is None:
                return refuse(unsupported("cuda"), "the tensors are on the CPU")
            if where := self._disabled(op.name):
                return refuse(Reason.DISABLED_BY_FLAG, where)
            if text := self.host.failure(op.name, device):
                return refuse(Reason.RUNTIME_ERROR, f"{text}; restart the process")

            variant = variant_for(self.host.manifest, self.host.capability(device))
            found = self._qualify(op, device, may_run)
            if isinstance(found, str):
                return refuse(Reason.NOT_QUALIFIED, found)
            if found.problem is not None:
                return refuse(Reason.QUALIFICATION_FAILED, found.problem, found)
            if self._disabled(op.name) is None and may_run:
                self.host.open(op.name, device, True)
                self._opened.add((op.name, device))
            return Verdict(op.name, name, "fast", variant=variant, qualification=found)

    def _qualify(self, op: GatedOp, device: int, may_run: bool) -> Qualification | str:
        """A qualification, or in words why there is none."""
        known = self._qualified.get((op.name, device))
        if known is not None:
            return known
        if self._policy == "trust":
            return Qualification("policy trust", now())
        lock = f"; {self.lock_problem}" if self.lock_problem else ""
        if op.contract.kind == "bitwise":
            return f"a bitwise path serves only after prequal.qualify() or with a valid lock{lock}"
        if self._policy == "strict":
            return f"policy strict: qualify explicitly or load a valid lock{lock}"
        if self.lock_problem:
            return f"closed: {self.lock_problem}"

        capability = "".join(str(part) for part in self.host.capability(device))
        built = self.host.manifest.ops.get(op.basename)
        if built is not None and capability in built.evidence:
            found = Qualification(f"release evidence for sm_{capability}", now())
        elif not may_run:
            return "its quick case runs at first use"
        elif self.host.capturing():
            return "first use inside a graph capture: call the op once before, or qualify"
        else:
            found = self._try(op, device)
        self._qualified[op.name, device] = found
        return found

    def _try(self, op: GatedOp, device: int) -> Qualification:
        try:
            problem = op.quick_case(device)
        except Exception as error:  # whatever a broken kernel does, the reference still answers
            problem = f"the quick case raised {type(error).__name__}: {error}"
        return Qualification("quick case at first use", now(), problem)


@dataclass(frozen=True)
class Row:
    """One line of doctor: an op on a device."""

    op: str
    device: str
    path: str
    reason: str | None
    detail: str
    contract: str
    qualified: str | None

    @classmethod
    def of(cls, verdict: Verdict, contract: object) -> Row:
        found = verdict.qualification
        qualified = f"{found.by}, {found.when}" if found and found.problem is None else None
        return cls(verdict.op, verdict.device, verdict.path, verdict.reason, verdict.detail, str(contract), qualified)



def rows(*, run: bool = True) -> list[dict[str, Any]]:
    """A row an op a device of this process, as dicts. `run`: quick cases run where a first use would run them."""
    from .. import api, runtime_state  # noqa: F401  api declares every op

    gate = runtime_state.gate
    devices: list[int | None] = [*gate.host.devices()] or [None]
    verdicts = [(op, gate.verdict(op, device, may_run=run)) for op in runtime_state.native_ops.values() for device in devices]
    return [asdict(Row.of(verdict, op.contract)) for op, verdict in verdicts]
