"""For each (op, device): may the fast path serve, and if not, why. Fast or reference + one reason of the enumeration.

The static half is pure arithmetic on what the wheel holds and what the device is (`static_refusal`, `variant_for`). The
other half is qualification: evidence carried in the wheel, the op's quick case on this worker at first use, an explicit
`qualify`, or a lock. Everything the gate asks of the machine goes through `Host`, so that any host can be simulated.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from .manifest import Manifest
from .reasons import Reason, unsupported
from .telemetry import unlocked_in_a_child

if TYPE_CHECKING:
    from .fingerprint import Change, Fingerprint

logger = logging.getLogger("prequal")

Policy = Literal["auto", "strict", "trust"]
POLICIES = ("auto", "strict", "trust")

# GPUs of one chip with their CPU (Jetson and Drive): code for their majors' other GPUs is not promised to run on them.
INTEGRATED = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)})


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
        """Such as 580.65.06; None where nobody says."""
        ...

    def devices(self) -> list[int]: ...

    def capability(self, device: int) -> tuple[int, int]: ...

    def capturing(self) -> bool:
        """True inside a CUDA graph capture."""
        ...

    def loading_problem(self, basename: str, device: int) -> str | None:
        """Load the kernels of the ops of this basename on this device, once. In words, why that cannot be done now, or
        None where it is done."""
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


class LockFile(Protocol):
    """What the gate needs of a qualification lock; `lock.Lock` is the real one."""

    @property
    def path(self) -> str: ...

    def moved(self, now: Fingerprint) -> list[Change]:
        """What differs between the lock's workers and this device's key: empty where the lock is valid for it."""
        ...

    def qualification(self, op: GatedOp, manifest: Manifest, now: Fingerprint) -> Qualification | str:
        """What the lock, valid for this device, says of an op; in words why it says nothing."""
        ...


@dataclass(frozen=True)
class Qualification:
    """That, when and by what an op was found right on a device; with a `problem`, that it was not."""

    by: str
    when: str
    problem: str | None = None


@dataclass(frozen=True)
class Verdict:
    """`path` is "fast" or "reference"; `reason` and `detail` say why not fast; `variant` is the code that serves."""

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
    """The architecture whose code runs on this capability: same major, highest minor not above it. None: none built.

    Code for "90a" runs on 9.0 alone; code for "100f" on its family, the later minors of its major too.

    A test build that carries PTX runs the variant that PREQUAL_FORCE_ARCH names; no released wheel carries PTX.
    """
    forced = environ.get("PREQUAL_FORCE_ARCH")
    if forced and forced in manifest.ptx:
        return forced
    major, minor = capability

    def runs(arch: str) -> bool:
        built_major, built_minor = divmod(arch_number(arch), 10)
        if arch.endswith("a") or capability in INTEGRATED:
            return (built_major, built_minor) == capability
        return built_major == major and built_minor <= minor and (built_major, built_minor) not in INTEGRATED

    return max(filter(runs, manifest.archs), key=arch_number, default=None)


def driver_refusal(manifest: Manifest, driver: str | None) -> str | None:
    """In words, why this driver is too old for the toolkit in the manifest; None where it is not, or nobody says."""
    if manifest.cuda is None or driver is None:
        return None
    try:
        have, want = (tuple(int(part) for part in text.split(".")) for text in (driver, manifest.cuda.minimum_driver))
    except ValueError:
        return None
    length = max(len(have), len(want))  # 580 is 580.0
    if have + (0,) * (length - len(have)) >= want + (0,) * (length - len(want)):
        return None
    return f"driver {driver}; CUDA {manifest.cuda.toolkit} needs {manifest.cuda.minimum_driver} or newer"


def static_refusal(host: Host, device: int | None) -> tuple[Reason, str] | None:
    """The first reason, in a fixed order, that no flag or qualification can change. `device` None: no CUDA tensor."""
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
        key: Callable[[int], Fingerprint] | None = None,
    ) -> None:
        self.host = host
        self._disabled = disabled
        self._policy: Policy = policy
        self._lock = threading.RLock()
        self._static: dict[int | None, tuple[Reason, str] | None] = {}
        self._qualified: dict[tuple[str, int], Qualification] = {}
        self._recorded: set[tuple[str, int]] = set()  # by an explicit qualification, which no lock overrules
        self._by_lock: set[tuple[str, int]] = set()
        self._opened: set[tuple[str, int]] = set()
        # The whole lock is bad. A lock that is bad for one device only is told by `lock_problem_on`.
        self.lock_problem: str | None = None
        self.lock: LockFile | None = None
        self._lock_on: dict[int, str | None] = {}
        self.read_key = key  # what a device's qualifications rest on, read from the machine
        self._keys: dict[int, Fingerprint] = {}
        self._moved: dict[int, str] = {}
        unlocked_in_a_child(self)

    @property
    def policy(self) -> Policy:
        return self._policy

    def set_policy(self, policy: str) -> None:
        """What may serve before this worker was qualified: "auto", "strict" or "trust", as PREQUAL_POLICY says it.

        Raises:
            ValueError: another policy.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy (PREQUAL_POLICY): expected {', '.join(POLICIES)}, got {policy!r}")
        with self._lock:
            self._policy = cast(Policy, policy)
            # What the old policy let through by itself must pass the new one. What was found wrong stays found wrong.
            self._qualified = {
                pair: found
                for pair, found in self._qualified.items()
                if pair in self._recorded or found.problem is not None
            }
        self.forget()

    def forget(self) -> None:
        """Close every fast path until it is asked for again. What was qualified stays qualified."""
        with self._lock:
            for op, device in self._opened:
                self.host.open(op, device, False)
            self._opened.clear()
            self._static.clear()

    def record(self, op: str, device: int, qualification: Qualification) -> None:
        """Take over the outcome of an explicit qualification: it holds until the fingerprint moves."""
        with self._lock:
            self._qualified[op, device] = qualification
            self._recorded.add((op, device))
            self._by_lock.discard((op, device))
            self.host.open(op, device, False)
            self._opened.discard((op, device))

    def unqualify(self) -> None:
        """Forget every qualification: the next call stands where a new process does. A lock stays loaded."""
        with self._lock:
            self._qualified.clear()
            self._recorded.clear()
            self._by_lock.clear()
            self._moved.clear()
            self._keys.clear()
            self._lock_on.clear()
        self.forget()

    # ---- the fingerprint under which something was qualified, and the lock -----------------------------------------

    def use_lock(self, lock: LockFile | None, problem: str | None = None) -> None:
        """From now on rest on this lock, or on none. A `problem` closes what is not qualified explicitly."""
        with self._lock:
            self.lock, self.lock_problem = lock, problem
            self._lock_on.clear()
            # A quick case that failed here outweighs what a lock may say.
            self._qualified = {
                pair: found
                for pair, found in self._qualified.items()
                if pair in self._recorded or (found.problem is not None and pair not in self._by_lock)
            }
            self._by_lock.clear()
        self.forget()

    def key(self, device: int) -> Fingerprint | None:
        """What this device's qualifications rest on, as it was when first asked for; None where nobody can say."""
        with self._lock:
            if device not in self._keys and self.read_key is not None:
                self._keys[device] = self.read_key(device)
            return self._keys.get(device)

    def look_again(self, device: int) -> list[Change]:
        """Read the key anew. Where it moved, what was qualified under the old one is qualified no more.

        Numeric flags of torch can change at any time, and no call pays for watching them: this is called where
        somebody asks, by `qualify`, `load_lock` and `doctor`.
        """
        with self._lock:
            before, now = self._keys.get(device), self.read_key(device) if self.read_key is not None else None
            if now is not None:
                self._keys[device] = now
            moved = before.diff(now) if before is not None and now is not None else []
            if moved:
                self._lock_on.pop(device, None)
                self._moved[device] = moved_text(moved)
                # What was found wrong here stays wrong until somebody qualifies it anew.
                for pair, found in list(self._qualified.items()):
                    if pair[1] == device and (found.problem is None or pair in self._by_lock):
                        del self._qualified[pair]
                        self._recorded.discard(pair)
                        self._by_lock.discard(pair)
        if moved:
            self.forget()
        return moved

    def look_again_where_used(self) -> dict[int, list[Change]]:
        """`look_again` on every device on which anything rests: on the others there is nothing to lose."""
        with self._lock:
            devices = sorted(self._keys)
        return {device: moved for device in devices if (moved := self.look_again(device))}

    def lock_problem_on(self, device: int) -> str | None:
        """In words, why the lock cannot be believed on this device; None where it can, or where there is none."""
        with self._lock:
            if self.lock_problem is not None or self.lock is None:
                return self.lock_problem
            if device not in self._lock_on:
                problem = self._compare_lock(self.lock, device)
                if problem is not None and problem not in self._lock_on.values():
                    logger.error("%s; until prequal.qualify() the reference answers", problem)
                self._lock_on[device] = problem
            return self._lock_on[device]

    def _compare_lock(self, lock: LockFile, device: int) -> str | None:
        try:
            now = self.key(device)
        except Exception as error:  # whatever CUDA says here: a lock that cannot be checked is not believed
            return f"lock {lock.path} cannot be checked: {type(error).__name__}: {error}"
        if now is None:
            return f"lock {lock.path} cannot be checked: no fingerprint of this device"
        moved = lock.moved(now)
        return f"lock {lock.path} is not valid here: {moved_text(moved)}" if moved else None

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
            # Whatever vouches for the op: a first launch that loads a module may deadlock others or break a capture.
            if may_run and (text := self.host.loading_problem(op.basename, device)):
                return refuse(Reason.NOT_QUALIFIED, text)
            if self._disabled(op.name) is None and may_run:
                self.host.open(op.name, device, True)
                self._opened.add((op.name, device))
            return Verdict(op.name, name, "fast", variant=variant, qualification=found)

    def _qualify(self, op: GatedOp, device: int, may_run: bool) -> Qualification | str:
        """A qualification, or in words why there is none."""
        known = self._qualified.get((op.name, device))
        if known is not None:
            return known
        note = f"; the fingerprint moved in this process: {self._moved[device]}" if device in self._moved else ""
        if problem := self.lock_problem_on(device):
            return f"closed: {problem}"
        if self.lock is not None:
            key = self.key(device)
            assert key is not None  # lock_problem_on has seen to it
            said = self.lock.qualification(op, self.host.manifest, key)
            if isinstance(said, Qualification):
                self._qualified[op.name, device] = said
                self._by_lock.add((op.name, device))
                return said
            note = f"; {said}{note}"
        if op.contract.kind == "bitwise":
            return f"a bitwise path serves only after prequal.qualify() or with a valid lock{note}"
        if self._policy == "trust":
            return Qualification("policy trust", now())
        if self._policy == "strict":
            return f"policy strict: qualify explicitly or load a valid lock{note}"

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


def moved_text(moved: list[Change]) -> str:
    """The first three fields that moved, and how many more: one line for a log and a detail."""
    more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
    return "; ".join(str(change) for change in moved[:3]) + more


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
    from prequal import api, runtime_state  # noqa: F401  api declares every op

    gate = runtime_state.gate
    gate.look_again_where_used()
    devices: list[int | None] = [*gate.host.devices()] or [None]
    pairs = [(op, device) for op in runtime_state.native_ops.values() for device in devices]
    return [asdict(Row.of(gate.verdict(op, device, may_run=run), op.contract)) for op, device in pairs]
