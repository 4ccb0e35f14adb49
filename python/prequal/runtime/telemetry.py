"""Who answered, how often, and why not the fast path. Counters are exact under threads; a new reason is logged once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("prequal")

FastCalls = Callable[[], Mapping[tuple[str, str], int]]


class Telemetry:
    """One for a process. Fast calls are counted natively (one increment a call) and read through `fast_calls`."""

    def __init__(self, fast_calls: FastCalls = dict) -> None:
        self._fast_calls = fast_calls
        self._lock = threading.Lock()
        self._fallbacks: dict[tuple[str, str, str], int] = {}
        self._fast_before: dict[tuple[str, str], int] = {}
        self._said: set[tuple[str, str, str]] = set()

    def fell_back(self, op: str, device: str, reason: str, detail: str = "") -> None:
        key = (op, device, reason)
        with self._lock:
            self._fallbacks[key] = self._fallbacks.get(key, 0) + 1
            new = key not in self._said
            self._said.add(key)
        if new:
            logger.warning(
                "%s on %s is answered by its PyTorch reference: %s%s",
                *key,
                f" ({detail})" if detail else "",
                extra={"prequal_op": op, "prequal_device": device, "prequal_reason": reason},
            )

    def stats(self) -> dict[str, dict[str, dict[str, Any]]]:
        """{op: {device: {"fast": calls, "reference": {reason: calls}}}}: a copy, ready for json.dumps."""
        with self._lock:
            fast = {key: calls - self._fast_before.get(key, 0) for key, calls in self._fast_calls().items()}
            fallbacks = dict(self._fallbacks)
        out: dict[str, dict[str, dict[str, Any]]] = {}
        for op, device in sorted({*fast, *((op, device) for op, device, _ in fallbacks)}):
            row = {"fast": fast.get((op, device), 0), "reference": {}}
            row["reference"] = {key[2]: n for key, n in sorted(fallbacks.items()) if key[:2] == (op, device)}
            if row["fast"] or row["reference"]:
                out.setdefault(op, {})[device] = row
        return out

    def reset(self) -> None:
        """Counters to zero. What was logged once is not logged again."""
        with self._lock:
            self._fast_before = dict(self._fast_calls())
            self._fallbacks.clear()
