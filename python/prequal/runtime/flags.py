"""What *may* run: switches for one process, one scope, one thread or task. What *can* run is the gate's business.

Process-wide: `PREQUAL_DISABLE=op,op|all`, `PREQUAL_STRICT=1`, and `disable`, `enable`. Scoped: `reference` and
`strict`, context managers that hold for the current thread or asyncio task and what it awaits, and for nobody else. A
task that is started inside a scope is inside it for as long as the scope is open, and no longer.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from prequal.errors import UnknownOpError

from .telemetry import unlocked_in_a_child

ALL = "all"
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"", "0", "false", "no", "off"})

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def boolean(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in TRUE:
        return True
    if value in FALSE:
        return False
    raise ValueError(f"{name}: expected 1 or 0 (or true, yes, on / false, no, off), got {environ[name]!r}")


class Scope(ContextDecorator, Generic[T]):
    """One `with`: a value that holds in this context until the end of the block.

    Contexts are copied, into tasks and into `asyncio.to_thread`, and a generator may leave its block in another order
    or another context than it entered. So a scope is not a token that puts an old value back: it is an entry that says
    itself whether it is still open, and whoever meets a closed one passes over it.
    """

    def __init__(
        self,
        name: str,
        scopes: ContextVar[tuple[Scope[T], ...]],
        value: T,
        told: Callable[[int], object] = lambda change: None,
    ) -> None:
        self.name, self.value, self.is_open = name, value, False
        self._scopes, self._told = scopes, told
        self._entered = False

    def __enter__(self) -> None:
        if self._entered:
            raise RuntimeError(f"prequal.{self.name}(): expected a new scope for every `with`, got one used before")
        self._entered = self.is_open = True
        self._scopes.set((*open_scopes(self._scopes), self))
        self._told(+1)

    def __exit__(self, *error: object) -> None:
        self.is_open = False
        self._told(-1)
        self._scopes.set(open_scopes(self._scopes))

    def __call__(self, function: F) -> F:
        # The body of these runs after the call has returned, and with it the scope: better an error than no scope.
        for kind, is_one in (
            ("an async function", inspect.iscoroutinefunction),
            ("a generator", inspect.isgeneratorfunction),
            ("an async generator", inspect.isasyncgenfunction),
        ):
            if is_one(function):
                raise TypeError(f"@prequal.{self.name}: expected a plain function, got {kind}: use `with` inside it")
        return super().__call__(function)

    def _recreate_cm(self) -> Scope[T]:
        """A decorated function opens a scope of its own at each call."""
        return Scope(self.name, self._scopes, self.value, self._told)


def open_scopes(scopes: ContextVar[tuple[Scope[T], ...]]) -> tuple[Scope[T], ...]:
    return tuple(scope for scope in scopes.get() if scope.is_open)


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
        self._lock = threading.RLock()
        unlocked_in_a_child(self)
        self._disabled: frozenset[str] = frozenset()
        self._strict = False
        self._references: ContextVar[tuple[Scope[frozenset[str]], ...]] = ContextVar("prequal.reference", default=())
        self._stricts: ContextVar[tuple[Scope[bool], ...]] = ContextVar("prequal.strict", default=())

    def read(self, environ: Mapping[str, str] = os.environ) -> None:
        """Take over PREQUAL_DISABLE and PREQUAL_STRICT. A wrong value is an error here, at import, not a closed eye."""
        names = [name.strip() for name in environ.get("PREQUAL_DISABLE", "").split(",")]
        disabled = self._names("PREQUAL_DISABLE", [name for name in names if name])
        strict = boolean(environ, "PREQUAL_STRICT")
        with self._lock:
            self._disabled, self._strict = disabled, strict
        self._changed()

    def _names(self, where: str, names: Collection[object]) -> frozenset[str]:
        known = self._known()
        found = set()
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"{where}: expected names of ops as text, got {type(name).__name__}")
            if name != ALL and name not in known:
                raise UnknownOpError(where, name, known)
            found.add(name)
        return frozenset(found)

    def disable(self, *ops: str) -> None:
        """Send these ops (`"all"`: every op) to their reference, in the whole process, until `enable`."""
        names = self._some_names("disable", ops)
        with self._lock:
            self._disabled |= names
        self._changed()

    def enable(self, *ops: str) -> None:
        """Undo `disable` and PREQUAL_DISABLE for these ops (`"all"`: for every op)."""
        names = self._some_names("enable", ops)
        with self._lock:
            if ALL in names:
                self._disabled = frozenset()
            elif ALL in self._disabled:
                self._disabled = frozenset(self._known()) - names
            else:
                self._disabled -= names
        self._changed()

    def _some_names(self, where: str, ops: Collection[str]) -> frozenset[str]:
        if not ops:
            raise TypeError(f"{where}: expected the name of an op or 'all', got none")
        return self._names(where, ops)

    def reference(self, *ops: str) -> Scope[frozenset[str]]:
        """Within this scope, this thread or task: the named ops (none named: all) are answered by their reference.

        A context manager, and a decorator of plain functions. A backward pass that torch runs on a thread of its own
        is outside.
        """
        return Scope("reference", self._references, self._names("reference", ops or (ALL,)), self._scoped)

    def strict(self, on: bool = True) -> Scope[bool]:
        """Within this scope, this thread or task: a fallback raises FallbackError (`on=False`: it does not).

        A context manager, and a decorator of plain functions.
        """
        if not isinstance(on, bool):
            raise TypeError(f"strict: expected a bool, got {type(on).__name__}")
        return Scope("strict", self._stricts, on)

    def disabled(self, op: str) -> str | None:
        """Where the op was switched off, in words; None where it was not."""
        for scope in self._references.get():
            if scope.is_open and (op in scope.value or ALL in scope.value):
                return "by prequal.reference() in this scope"
        if op in self._disabled or ALL in self._disabled:
            return "by prequal.disable() or PREQUAL_DISABLE"
        return None

    @property
    def is_strict(self) -> bool:
        for scope in reversed(self._stricts.get()):
            if scope.is_open:
                return scope.value
        return self._strict
