"""What a long command says while it works. Everything here goes to stderr: stdout carries results only."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class InputError(Exception):
    """A command line that cannot be carried out: which argument, what was expected, what came."""

    def __init__(self, argument: str, expected: str, got: str) -> None:
        super().__init__(f"argument {argument}: expected {expected}, got {got}")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Progress:
    """`with Progress("sampling", total) as p: p.update(done)`.

    A terminal gets one line that rewrites itself; a log file gets a line every few seconds and no control
    characters. Work that ends before the first report is silent.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = max(total, 1)
        self._terminal = sys.stderr.isatty()
        self._interval = 0.1 if self._terminal else 3.0
        self._start = time.perf_counter()
        self._next = self._start + max(self._interval, 0.5)
        self._open_line = False

    def update(self, done: int) -> None:
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + self._interval
        spent = now - self._start
        left = spent * (self._total - done) / done if done else 0.0
        line = f"{self._what}: {done:,} of {self._total:,} ({100 * done // self._total} %), about {left:.0f} s left"
        if self._terminal:
            sys.stderr.write(f"\r\033[K{line}")
            sys.stderr.flush()
            self._open_line = True
        else:
            note(line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._open_line:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
