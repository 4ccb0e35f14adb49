"""What *may* run: switches for one process, one scope, one thread or task. What *can* run is the gate's business.

Process-wide: `PREQUAL_DISABLE=op,op|all`, `PREQUAL_STRICT=1`, and `disable`, `enable`. Scoped: `reference` and `strict`,
context managers that hold for the current thread or asyncio task and what it awaits, and for nobody else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import UnknownOpError

ALL = "all"
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"", "0", "false", "no", "off"})


def boolean(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in TRUE:
        return True
    if value in FALSE:
        return False
    raise ValueError(f"{name}: expected 1 or 0 (or true, yes, on / false, no, off), got {environ[name]!r}")


class Flags:
    """One for a process; tests make their own."""

    def __init__(
        self,
        known: Callable[[], Collection[str]],
        changed: Callable[[], None] = lambda: None,
        scoped: Callable[[int], object] = lambda change: None,
    ) -> None:
        self._known = known
        self._changed = changed  # the gate forgets its verdicts
        self._scoped = scoped  # the native hot path asks Python while any scope is open
        self._lock = threading.Lock()
        self._disabled: frozenset[str] = frozenset()
        self._strict = False
        self._reference_scope: ContextVar[frozenset[str]] = ContextVar("prequal.reference", default=frozenset())
        self._strict_scope: ContextVar[bool | None] = ContextVar("prequal.strict", default=None)

    def read(self, environ: Mapping[str, str] = os.environ) -> None:
        """Take over PREQUAL_DISABLE and PREQUAL_STRICT. A wrong value is an error here, at import, not a closed eye."""
        names = [name.strip() for name in environ.get("PREQUAL_DISABLE", "").split(",")]
        disabled = self._names("PREQUAL_DISABLE", [name for name in names if name])
        strict = boolean(environ, "PREQUAL_STRICT")
        with self._lock:
            self._disabled, self._strict = disabled, strict
        self._changed()

    def _names(self, where: str, names: Collection[str]) -> frozenset[str]:
        known = self._known()
        for name in names:
            if name != ALL and name not in known:
                raise UnknownOpError(where, name, known)
        return frozenset(names)

    def disable(self, *ops: str) -> None:
        """Send these ops (`"all"`: every op) to their reference, in the whole process, until `enable`."""
        names = self._names("disable", ops)
        with self._lock:
            self._disabled |= names
        self._changed()

    def enable(self, *ops: str) -> None:
        """Undo `disable` for these ops. `enable("all")` undoes all; after `disable("all")` only it does."""
        names = self._names("enable", ops)
        with self._lock:
            if ALL in names:
                self._disabled = frozenset()
            elif ALL in self._disabled:
                self._disabled = frozenset(self._known()) - names
            else:
                self._disabled -= names
        self._changed()

    @contextmanager
    def reference(self, *ops: str) -> Iterator[None]:
        """Within this scope, this thread or task: the named ops (none named: all) are answered by their reference."""
        names = self._names("reference", ops or (ALL,))
        token = self._reference_scope.set(self._reference_scope.get() | names)
        self._scoped(+1)
        try:
            yield
        finally:
            self._scoped(-1)
            self._reference_scope.reset(token)

    @contextmanager
    def strict(self, on: bool = True) -> Iterator[None]:
        """Within this scope, this thread or task: a fallback raises FallbackError (`on=False`: it does not)."""
        token = self._strict_scope.set(on)
        try:
            yield
        finally:
            self._strict_scope.reset(token)

    def disabled(self, op: str) -> str | None:
        """Where the op was switched off, in words; None where it was not."""
        scope = self._reference_scope.get()
        if op in scope or ALL in scope:
            return "by prequal.reference() in this scope"
        if op in self._disabled or ALL in self._disabled:
            return "by prequal.disable() or PREQUAL_DISABLE"
        return None

    @property
    def is_strict(self) -> bool:
        scope = self._strict_scope.get()
        return self._strict if scope is None else scope
