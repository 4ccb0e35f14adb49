"""Exceptions that prequal raises of its own. Wrong arguments are ValueError and TypeError, as everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class FallbackError(RuntimeError):
    """Strict mode: a call would have been answered by the reference. `op`, `device` and `reason` say which and why."""

    def __init__(self, op: str, device: str, reason: str, detail: str = "") -> None:
        self.op, self.device, self.reason, self.detail = op, device, reason, detail
        tail = f" ({detail})" if detail else ""
        super().__init__(
            f"{op} on {device}: the fast path does not serve: {reason}{tail}; strict mode allows no fallback"
        )

    def __reduce__(self) -> tuple[type[FallbackError], tuple[str, str, str, str]]:
        return type(self), (self.op, self.device, self.reason, self.detail)


class LockError(ValueError):
    """A qualification lock that cannot be read or believed. The gate stays closed."""


class UnknownOpError(ValueError):
    """A flag or a call names an op that does not exist."""

    def __init__(self, where: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        self._said = where, name, known
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
        super().__init__(f"{where}: expected the name of an op or 'all', got {name!r}; {hint}")

    def __reduce__(self) -> tuple[type[UnknownOpError], tuple[str, str, list[str]]]:
        return type(self), self._said


class ReplacementError(AssertionError):
    """A fast path did not take the place of what it should have; `report` says what is still there."""

    def __init__(self, report: object) -> None:
        super().__init__(str(report))
        self.report = report


class StaleIndexError(RuntimeError):
    """What an index or a GraphPlan was built of has changed since.

    `argument` says what, `moved` maps what of it to (then, now).
    """

    def __init__(self, argument: str, moved: Mapping[str, tuple[Any, Any]]) -> None:
        self.argument, self.moved = argument, dict(moved)
        what = "; ".join(f"{name} {then} when built, {now} now" for name, (then, now) in self.moved.items())
        super().__init__(
            f"{argument}: expected what the index was built of, got a changed tensor ({what}); rebuild() it"
        )

    def __reduce__(self) -> tuple[type[StaleIndexError], tuple[str, dict[str, tuple[Any, Any]]]]:
        return type(self), (self.argument, self.moved)
