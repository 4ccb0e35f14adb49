"""Spreads of timings, and what may be said of two of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Under this the clock's own grain (0.5 us for CUDA events) is as wide as the quartiles: halves cannot be held together.
NOISY_ABOVE_US = 20.0
HALF = 10  # of fewer runs than that, quartiles are no more than two single runs


@dataclass(frozen=True)
class Spread:
    """Microseconds."""

    median: float
    q1: float
    q3: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(round(values[0], 3), round(values[0], 3), round(values[0], 3), 1)
        # "inclusive": the quartiles of few values stay within them
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(round(median, 3), round(q1, 3), round(q3, 3), len(values))

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Spread:
        return cls(float(data["median"]), float(data["q1"]), float(data["q3"]), int(data["runs"]))

    def json(self) -> dict[str, float]:
        return asdict(self)


def agree(a: Spread, b: Spread) -> bool:
    """Their interquartile ranges meet."""
    return a.q1 <= b.q3 and b.q1 <= a.q3


def is_noisy(values: Sequence[float]) -> bool:
    """The first and the second half of a run, each by itself, would not have agreed, for work of over 20 us."""
    half = len(values) // 2
    if half < HALF or Spread.of(values).median <= NOISY_ABOVE_US:
        return False
    return not agree(Spread.of(values[:half]), Spread.of(values[half:]))


def change(old: Spread, new: Spread) -> str:
    """`same` where the interquartile ranges meet, else `slower` or `faster`."""
    if agree(old, new):
        return "same"
    return "slower" if new.median > old.median else "faster"


@dataclass(frozen=True)
class Interval:
    """A median with an interval that holds it, whatever the distribution, with at least this confidence."""

    low: float
    median: float
    high: float
    confidence: float


def median_interval(values: Sequence[float], error: float = 0.05) -> Interval:
    """From the order statistics: k values below, k above, where fewer than k+1 of n fair coins show heads with
    probability at most error / 2. Too few values for that: an infinite interval."""
    ordered, n = sorted(values), len(values)
    tail, k = 0.0, -1
    while k + 1 < n / 2:
        more = tail + math.comb(n, k + 1) / 2**n
        if more > error / 2:
            break
        tail, k = more, k + 1
    middle = statistics.median(ordered)
    if k < 0:
        return Interval(-math.inf, middle, math.inf, 1.0)
    return Interval(ordered[k], middle, ordered[n - 1 - k], 1 - 2 * tail)
