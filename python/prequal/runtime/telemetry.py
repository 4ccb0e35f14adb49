"""Who answered, how often, and why not the fast path. Counters are exact under threads; a new reason is logged once."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

logger = logging.getLogger("prequal")

FastCalls = Callable[[], Mapping[tuple[str, str], int]]


class Counted(NamedTuple):
    """What a counter is kept for. `path`: fast, reference, or failed (CUDA's error was raised, nothing answered)."""

    op: str
    device: str
    path: str
    reason: str  # empty on the fast path


class Telemetry:
    """One for a process. Fast calls are counted natively (one increment a call) and read through `fast_calls`."""

    def __init__(self, fast_calls: FastCalls = dict) -> None:
        self._fast_calls = fast_calls
        # Reentrant: a signal handler or a destructor that asks for stats() may interrupt this very thread in here.
        self._lock = threading.RLock()
        self._counts: dict[Counted, int] = {}
        self._before: dict[Counted, int] = {}  # what was counted when `reset` was called
        self._said: set[tuple[str, str, str]] = set()
        unlocked_in_a_child(self)

    def served(self, op: str, device: str) -> None:
        """A fast call that no native counter sees: the path is Python's."""
        self._count("fast", op, device, "")

    def fell_back(self, op: str, device: str, reason: str, detail: str = "") -> None:
        """A call that the fast path does not serve goes to the reference."""
        self._count("reference", op, device, reason)
        self._say(op, device, reason, "goes to its PyTorch reference", detail)

    def failed(self, op: str, device: str, reason: str, detail: str = "") -> None:
        """A fast call that raised CUDA's own error."""
        self._count("failed", op, device, reason)
        self._say(op, device, reason, "failed and is closed", detail)

    def _count(self, path: str, op: str, device: str, reason: str) -> None:
        key = Counted(op, device, path, str(reason))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    def _say(self, op: str, device: str, reason: str, what: str, detail: str) -> None:
        key = (op, device, str(reason))
        with self._lock:
            if key in self._said:
                return
            self._said.add(key)
        # outside the lock: a handler may be slow, or ask for stats()
        tail = f" ({detail})" if detail else ""
        extra = {"prequal_op": op, "prequal_device": device, "prequal_reason": str(reason), "prequal_detail": detail}
        logger.warning("%s on %s %s: %s%s", op, device, what, reason, tail, extra=extra)

    def totals(self) -> dict[Counted, int]:
        """Every counter since the process started; `reset` does not touch these, so that exporters only ever go up."""
        with self._lock:
            found = dict(self._counts)
        for (op, device), calls in self._fast_calls().items():
            found[Counted(op, device, "fast", "")] = calls
        return found

    def stats(self) -> dict[str, dict[str, dict[str, Any]]]:
        """{op: {device: {"fast": calls, "reference": {reason: calls}}}} since the last reset: a copy, for json.dumps.

        A device on which calls raised CUDA's error has a third entry, {"failed": {reason: calls}}.
        """
        out: dict[str, dict[str, dict[str, Any]]] = {}
        for key, calls in self._since_reset():
            row = out.setdefault(key.op, {}).setdefault(key.device, {"fast": 0, "reference": {}})
            if key.path == "fast":
                row["fast"] = calls
            else:
                row.setdefault(key.path, {})[key.reason] = calls
        return out

    def _since_reset(self) -> Iterator[tuple[Counted, int]]:
        with self._lock:
            before, totals = dict(self._before), self.totals()
        for key in sorted(totals):
            if calls := totals[key] - before.get(key, 0):
                yield key, calls

    def reset(self) -> None:
        """The counters of `stats` to zero. What was logged once is not logged again."""
        with self._lock:
            self._before = self.totals()


def unlocked_in_a_child(owner: Any) -> None:
    """A fork while another thread holds `owner._lock` copies a lock that nobody in the child will ever release."""
    known = weakref.ref(owner)

    def after() -> None:
        if (found := known()) is not None:
            found._lock = threading.RLock()

    os.register_at_fork(after_in_child=after)
