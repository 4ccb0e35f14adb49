"""The qualification lock: what one worker found right, believed by every equal worker, by none other.

JSON only. A lock rests on `key_of` the fingerprint: where any field of it moved, the lock is stale and names it. Its
digest tells an accident (a cut file, an edit, a bad merge), not an attacker: who can write the lock can write the
digest. Reading checks everything before it believes anything, and raises one LockError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from prequal.errors import LockError

from .fingerprint import Change, Fingerprint, TorchProbe
from .gate import Gate, GatedOp, Qualification, moved_text, now
from .manifest import Manifest

logger = logging.getLogger("prequal")

SCHEMA = 1
DEFAULT_NAME = "prequal.lock.json"
VARIABLE = "PREQUAL_LOCK"
# A lock of a hundred ops on eight devices takes under half a MiB: a larger file is something else.
LIMIT = 4 << 20

# What of a portable fingerprint is no part of the key, and why.
NOT_IN_KEY: Mapping[str, str] = {
    "environment": "stage A's, of before or after torch sets CUDA_MODULE_LOADING; runtime.environment says it as used",
    "runtime.libraries.nvrtc": "loaded at the first translation of source by anybody; no op goes through it",
    "devices.*.memory_bytes": "boards of one kind differ in it by a few pages, and no result depends on it",
}


def key_of(fingerprint: Fingerprint, device: int | None = None) -> Fingerprint:
    """What a qualification on this device rests on. Without a device: the part that needs no CUDA call."""
    data = fingerprint.portable().data
    data.pop("environment", None)
    devices = data.pop("devices", {})
    if device is None:
        data.pop("runtime", None)
        return Fingerprint.of(data)
    data["runtime"]["libraries"].pop("nvrtc", None)
    data["device"] = {name: value for name, value in devices[str(device)].items() if name != "memory_bytes"}
    return Fingerprint.of(data)


def this_worker(device: int) -> Fingerprint:
    """The key of a device of this process. Asks CUDA about it."""
    from prequal import runtime_state

    return key_of(runtime_state.fingerprint_for_keys().with_device(TorchProbe(device)), device)


# ---- what a lock holds -----------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One op on one device of the worker that wrote the lock; with a `problem`, it was found wrong there."""

    op: str
    basename: str
    source: str | None  # digest of its sources, from the build manifest
    contract: str
    device: str  # a key of the fingerprint's devices
    name: str
    capability: str
    cases: int
    refused: int
    when: str
    problem: str | None = None


@dataclass(frozen=True)
class Lock:
    """A lock that was read and checked, or is about to be written. `path` is where it lies, for messages."""

    path: str
    version: str
    made: str
    fingerprint: Fingerprint  # the key that all devices share, and `devices` with what each is
    entries: tuple[Entry, ...]

    @cached_property
    def keys(self) -> dict[str, Fingerprint]:
        """By the device's index on the worker that wrote the lock."""
        shared = self.fingerprint.data
        devices = shared.pop("devices")
        return {index: Fingerprint.of({**shared, "device": device}) for index, device in devices.items()}

    def moved(self, now: Fingerprint) -> list[Change]:
        """Against the device of the lock that is most alike; for a key without a device, the shared part alone."""
        if "device" not in now.data:
            shared = self.fingerprint.data
            del shared["devices"], shared["runtime"]
            return Fingerprint.of(shared).diff(now)
        return min((was.diff(now) for was in self.keys.values()), key=len)

    def qualification(self, op: GatedOp, manifest: Manifest, now: Fingerprint) -> Qualification | str:
        """What the lock says of an op on a device with this key, for which it is valid; in words why nothing."""
        alike = {index for index, was in self.keys.items() if was == now}
        entries = [entry for entry in self.entries if entry.op == op.name and entry.device in alike]
        if not entries:
            return f"lock {self.path} does not name {op.name} on this kind of device"
        built = manifest.ops.get(op.basename)
        for entry in entries:
            if entry.source != (built.digest if built else None):
                return f"lock {self.path}: the sources of {op.name} are not those that were qualified"
            if entry.contract != (contract := str(op.contract)):
                moved = f"was {entry.contract!r}, now {contract!r}"
                return f"lock {self.path}: the contract of {op.name} is not the one that was kept: {moved}"
        # Several equal boards: one on which the op was wrong speaks for all, as nobody knows which one this is.
        entry = next((entry for entry in entries if entry.problem is not None), entries[0])
        return Qualification(f"lock {self.path}", entry.when, entry.problem)

    def data(self) -> dict[str, Any]:
        content = {
            "schema": SCHEMA,
            "prequal": self.version,
            "made": self.made,
            "fingerprint": self.fingerprint.data,
            "fingerprint_sha256": self.fingerprint.sha256,
            "qualified": [entry._asdict() for entry in self.entries],
        }
        return {**content, "digest": digest_of(content)}

    @classmethod
    def of(cls, keys: Mapping[int, Fingerprint], entries: Iterable[Entry], version: str, path: str = "") -> Lock:
        """From the key of every device; LockError where they are not of one process in one state."""
        devices: dict[str, Any] = {}
        shared: Fingerprint | None = None
        for index, key in sorted(keys.items()):
            data = key.data
            devices[str(index)] = data.pop("device")
            process = Fingerprint.of(data)
            if shared is not None and shared != process:
                raise LockError(f"the fingerprint moved while qualifying: {moved_text(shared.diff(process))}")
            shared = process
        entries = tuple(entries)
        if shared is None or not entries:
            raise LockError("nothing was qualified: there is no lock to write")
        return cls(path, version, now(), Fingerprint.of({**shared.data, "devices": devices}), entries)


def digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
    ).hexdigest()


# ---- the file --------------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], lock: Lock) -> None:
    """Whole or not at all: several may write at once, a reader sees one of them, the last to finish stays."""
    target = os.path.realpath(path)  # behind a link, not instead of it
    text = json.dumps(lock.data(), indent=1, sort_keys=True) + "\n"
    # In the same folder: a rename is atomic only within a file system.
    temporary = f"{target}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        # Not mkstemp, whose file only its owner may read: the workers may be others.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise LockError(f"lock {os.fspath(path)} cannot be written: {error.strerror or error}") from None
    with contextlib.suppress(OSError):  # the name, too, survives a power cut; some file systems do not offer it
        folder = os.open(os.path.dirname(target), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: str | os.PathLike[str]) -> Lock:
    """A lock that is whole and of this schema; LockError says in one sentence what it is instead."""
    name = os.fspath(path)
    try:
        return _parse(_load(_text_of(name)), name)
    except OSError as error:
        raise LockError(f"lock {name} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise LockError(f"lock {name} is broken: nested too deeply") from None
    except (ValueError, TypeError) as error:  # LockError is one; so are what json and a codec raise
        raise LockError(f"lock {name} is broken: {error}") from None


def _text_of(name: str) -> str:
    # Open first and look at what was opened. Without O_NONBLOCK a named pipe would wait for a writer.
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("expected a regular file, found " + _kind(found.st_mode))
        if found.st_size > LIMIT:
            raise ValueError(f"expected at most {LIMIT:,} bytes, found {found.st_size:,}")
        raw = file.read(LIMIT + 1)
    if len(raw) > LIMIT:
        raise ValueError(f"expected at most {LIMIT:,} bytes, found more")
    if not raw.strip():
        raise ValueError("the file is empty")
    return raw.decode("utf-8")


def _kind(mode: int) -> str:
    return "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def _load(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{_shown(twice)} is there twice")
        return found

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, object_pairs_hook=once, parse_constant=no_constant)


_SHA256 = r"[0-9a-f]{64}"
_WHEN = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)"


def _parse(root: Any, path: str) -> Lock:
    if not isinstance(root, dict):
        raise ValueError(f"expected an object, found {_shown(root)}")
    schema = root.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        newer = " (a newer prequal wrote it)" if type(schema) is int and schema > SCHEMA else ""
        raise ValueError(f"schema: expected {SCHEMA}, found {_shown(schema)}{newer}")
    _exactly(root, "", ("schema", "prequal", "made", "fingerprint", "fingerprint_sha256", "qualified", "digest"))
    content = {name: value for name, value in root.items() if name != "digest"}
    written, computed = _text(root, "digest", "", _SHA256), digest_of(content)
    if written != computed:
        raise ValueError(
            f"its digest is {computed[:12]}... and it says {written[:12]}...: edited by hand, or merged; "
            "write it anew with `prequal qualify --write`"
        )

    fingerprint = Fingerprint.of(_object(root["fingerprint"], "fingerprint"))
    if fingerprint.sha256 != _text(root, "fingerprint_sha256", "", _SHA256):
        raise ValueError(f"fingerprint_sha256: expected {fingerprint.sha256}, found {root['fingerprint_sha256']}")
    for name in ("devices", "runtime"):
        _object(root["fingerprint"].get(name), f"fingerprint.{name}")
    devices = root["fingerprint"]["devices"]
    if not devices:
        raise ValueError("fingerprint.devices: expected at least one")
    for index, device in devices.items():
        _object(device, f"fingerprint.devices.{index}")
    rows = root["qualified"]
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"qualified: expected a list of at least one, found {_shown(rows)}")
    entries = tuple(_entry(row, f"qualified.{place}", devices) for place, row in enumerate(rows))
    return Lock(path, _text(root, "prequal", "", ".+"), _text(root, "made", "", _WHEN), fingerprint, entries)


def _entry(row: Any, where: str, devices: Mapping[str, Any]) -> Entry:
    row = _object(row, where)
    _exactly(row, f"{where}.", Entry._fields)
    device = _text(row, "device", f"{where}.", ".+")
    if device not in devices:
        raise ValueError(f"{where}.device: expected one of fingerprint.devices, found {_shown(device)}")
    return Entry(
        op=_text(row, "op", f"{where}.", r"\w+"),
        basename=_text(row, "basename", f"{where}.", r"\w+"),
        source=None if row["source"] is None else _text(row, "source", f"{where}.", _SHA256),
        contract=_text(row, "contract", f"{where}.", ".+"),
        device=device,
        name=_text(row, "name", f"{where}.", ".+"),
        capability=_text(row, "capability", f"{where}.", r"\d+\.\d+"),
        cases=_count(row, "cases", where, 0 if row["problem"] is not None else 1),
        refused=_count(row, "refused", where, 0),
        when=_text(row, "when", f"{where}.", _WHEN),
        problem=None if row["problem"] is None else _text(row, "problem", f"{where}.", r"(?s).+"),
    )


def _exactly(value: Mapping[str, Any], prefix: str, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in value:
            raise ValueError(f"{prefix}{name}: missing")
    for name in value:
        if name not in names:
            raise ValueError(f"{prefix}{name}: not a field of schema {SCHEMA}")


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {_shown(value)}")
    return value


def _text(row: Mapping[str, Any], name: str, prefix: str, pattern: str) -> str:
    value = row[name]
    if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
        raise ValueError(f"{prefix}{name}: expected text like {pattern}, found {_shown(value)}")
    return value


def _count(row: Mapping[str, Any], name: str, where: str, least: int) -> int:
    value = row[name]
    if type(value) is not int or value < least:
        raise ValueError(f"{where}.{name}: expected a whole number of at least {least}, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- a lock and this process -----------------------------------------------------------------------------------------


class LockStatus(NamedTuple):
    """What became of a lock that could be read. `ok`: nothing that was compared has moved."""

    path: str
    made: str
    version: str
    moved: tuple[Change, ...]  # of what needs no CUDA call: it holds for every device
    devices: Mapping[int, tuple[Change, ...]]  # of each device compared so far; the others at their first use

    @property
    def ok(self) -> bool:
        return not self.moved and not any(self.devices.values())

    def __str__(self) -> str:
        if self.moved:
            return f"lock {self.path} is not valid here: {moved_text(list(self.moved))}"
        stale = {device: moved for device, moved in self.devices.items() if moved}
        if stale:
            each = (f"cuda:{device}: {moved_text(list(moved))}" for device, moved in stale.items())
            return f"lock {self.path} is not valid here: {'; '.join(each)}"
        where = ", ".join(f"cuda:{device}" for device in self.devices)
        rest = f"compared on {where}" if where else "each device is compared at its first use"
        return f"lock {self.path} of {self.made} is valid here; {rest}"


def load(
    path: str | os.PathLike[str], gate: Gate, stage_a: Callable[[], Fingerprint], devices: Iterable[int] = ()
) -> LockStatus:
    """Let the gate rest on this lock. A broken one is LockError, a stale one a status; both leave the gate closed."""
    gate.look_again_where_used()
    try:
        lock = read(path)
    except LockError as error:
        gate.use_lock(None, str(error))
        raise
    moved = tuple(lock.moved(key_of(stage_a())))
    problem = f"lock {lock.path} is not valid here: {moved_text(list(moved))}" if moved else None
    gate.use_lock(lock, problem)
    if problem is not None:
        logger.error("%s; until prequal.qualify() the reference answers", problem)
    compared = {}
    if problem is None:
        for device in devices:
            if gate.lock_problem_on(device) is not None and (key := gate.key(device)) is not None:
                compared[device] = tuple(lock.moved(key))
            else:
                compared[device] = ()
    return LockStatus(lock.path, lock.made, lock.version, moved, compared)


def load_from_environment(gate: Gate, environ: Mapping[str, str] = os.environ) -> None:
    """PREQUAL_LOCK, at import: the file is read and checked, and nothing else is asked.

    No NVML and no CUDA call: the fingerprint is compared at the first verdict for each device. A lock that cannot be
    believed is one line in the log and a closed gate.
    """
    path = environ.get(VARIABLE)
    if not path:
        return
    try:
        gate.use_lock(read(path))
    except LockError as error:
        problem = f"{VARIABLE}: {error}"
        gate.use_lock(None, problem)
        logger.error("%s; until prequal.qualify() the reference answers", problem)


def summary() -> dict[str, Any] | None:
    """For doctor: the lock of this process as plain data; None where none was asked for."""
    from prequal import api, runtime_state  # noqa: F401  api reads PREQUAL_LOCK

    gate = runtime_state.gate
    if gate.lock is None and gate.lock_problem is None:
        return None
    devices = {f"cuda:{device}": gate.lock_problem_on(device) for device in gate.host.devices()}
    return {
        "path": gate.lock.path if gate.lock is not None else None,
        "problem": gate.lock_problem,
        "devices": devices,
    }
