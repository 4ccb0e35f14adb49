"""Leave one out: a workload with every fast path on, then with each op off in turn, in interleaved rounds.

Every round runs every variant once. Of two rounds the second goes backwards, and the next two start with another
variant: a steady drift adds to a difference in one round what it takes from it in the other. What counts is the
difference within a round. The interval is that of the median difference, from the order statistics: it
assumes nothing of the distribution. All candidates together are wrong with at most the stated probability.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .stats import Interval, median_interval

Workload = Callable[[], object]
ERROR = 0.05
ADOPTED, NEUTRAL, REJECTED = "adopted", "neutral", "rejected"


class NotMeasurable(ValueError):
    """What was asked for has no answer: not an error of the workload's."""


class NothingServed(NotMeasurable):
    """No fast path served the workload."""


class Workbench(Protocol):
    """The seam to the clock, the counters and the flags."""

    def seconds(self, workload: Workload, iterations: int) -> float:
        """Of so many iterations, synchronised before and after."""
        ...

    def fast_calls(self, workload: Workload) -> Mapping[str, int]:
        """How often each op's fast path served one iteration."""
        ...

    def launches(self, workload: Workload) -> int | None:
        """CUDA launches of one iteration; None where there is no GPU."""
        ...

    def without(self, ops: Collection[str]) -> Any:
        """A context in which these ops are answered by their references."""
        ...


class ThisProcess:
    def seconds(self, workload: Workload, iterations: int) -> float:
        _synchronise()
        start = time.perf_counter()
        for _ in range(iterations):
            workload()
        _synchronise()
        return time.perf_counter() - start

    def fast_calls(self, workload: Workload) -> Mapping[str, int]:
        before = _fast()
        workload()
        return {op: count - before.get(op, 0) for op, count in _fast().items() if count > before.get(op, 0)}

    def launches(self, workload: Workload) -> int | None:
        from .replacement import observe

        return observe(workload).launches if torch.cuda.is_available() else None

    @contextmanager
    def without(self, ops: Collection[str]) -> Iterator[None]:
        """Process-wide, because a backward pass runs on threads of torch's own. Ops that were off before stay off."""
        from prequal import runtime_state as state

        ours = [op for op in ops if state.flags.disabled(op) is None]
        if ours:
            state.flags.disable(*ours)
        try:
            yield
        finally:
            if ours:
                state.flags.enable(*ours)


def _synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _fast() -> dict[str, int]:
    from prequal import runtime_state as state

    return {op: sum(row["fast"] for row in devices.values()) for op, devices in state.telemetry.stats().items()}


def verdict(interval: Interval) -> str:
    """The rule: adopted where the interval of the saving lies above zero, rejected where below, else neutral."""
    if interval.low > 0:
        return ADOPTED
    return REJECTED if interval.high < 0 else NEUTRAL


def rounds_needed(candidates: int, error: float = ERROR) -> int:
    """The fewest rounds from which any interval can be had."""
    return math.ceil(math.log2(2 * max(candidates, 1) / error))


@dataclass(frozen=True)
class Row:
    op: str
    calls: int  # an iteration
    ms: Interval  # saved an iteration
    percent: Interval  # of the iteration with the op off
    verdict: str


@dataclass(frozen=True)
class Report:
    workload: str
    rounds: int
    iterations: int
    rows: tuple[Row, ...]
    all_on_ms: float
    all_off_ms: float
    launches_on: int | None
    launches_off: int | None
    complete: bool = True

    @property
    def rule(self) -> str:
        return (
            f"adopted where the interval of the median saving is above zero, rejected where below, else neutral; "
            f"{1 - ERROR:.0%} for all candidates together"
        )

    def data(self) -> dict[str, Any]:
        def three(interval: Interval) -> list[float]:
            return [round(value, 4) for value in (interval.low, interval.median, interval.high)]

        return {
            "schema": 1,
            "workload": self.workload,
            "rounds": self.rounds,
            "iterations": self.iterations,
            "complete": self.complete,
            "rule": self.rule,
            "all_on_ms": round(self.all_on_ms, 4),
            "all_off_ms": round(self.all_off_ms, 4),
            "launches": {"fast": self.launches_on, "eager": self.launches_off},
            "rows": [
                {
                    "op": row.op,
                    "calls": row.calls,
                    "ms": three(row.ms),
                    "percent": three(row.percent),
                    "confidence": round(row.ms.confidence, 4),
                    "verdict": row.verdict,
                }
                for row in self.rows
            ],
        }

    def table(self) -> str:
        lines: list[tuple[str, ...]] = [("candidate", "calls", "ms saved", "% saved", "interval", "verdict")]
        lines += [
            (
                row.op,
                f"{row.calls:,}",
                f"{row.ms.median:.3f}",
                f"{row.percent.median:.2f}",
                f"[{row.percent.low:.2f}, {row.percent.high:.2f}]",
                row.verdict,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(6)]
        text = [
            "  ".join(
                cell.ljust(w) if i in (0, 5) else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        speed = f"{self.all_off_ms / self.all_on_ms:.3f}×" if self.all_on_ms else "–"
        text.append(
            f"\nan iteration: {self.all_on_ms:.3f} ms with all of them, {self.all_off_ms:.3f} without ({speed})"
        )
        if self.launches_on is not None:
            text.append(
                f"CUDA launches an iteration: {self.launches_on:,} with all of them, {self.launches_off:,} without"
            )
        text.append(f"{self.rounds} rounds; {self.rule}")
        return "\n".join(text)


def ablate(
    workload: Workload,
    *,
    name: str = "workload",
    ops: Sequence[str] | None = None,
    rounds: int = 20,
    iterations: int = 1,
    progress: Callable[[str], None] = lambda text: None,
    bench: Workbench | None = None,
) -> Report:
    """What each op is worth in a workload of yours.

    Args:
        workload: called without arguments; one call is one iteration. It must do the same work every time.
        ops: candidates; default: every op whose fast path served a call in one iteration.
        rounds: each runs every variant once, every second one backwards; an interval needs `rounds_needed`.
        iterations: timed together, for workloads of well under a millisecond.
        progress: told after every round.

    Raises:
        NotMeasurable (a ValueError): no fast path served (NothingServed), or fewer rounds than an interval needs.
        TypeError: ops is a text.
        Whatever the workload raises.
    """
    if isinstance(ops, str):
        raise TypeError("ops: expected names of ops in a list, got a text")
    bench = bench or ThisProcess()
    workload()
    served = bench.fast_calls(workload)
    candidates = [op for op in dict.fromkeys(served if ops is None else ops) if served.get(op)]
    if idle := [op for op in dict.fromkeys(ops or ()) if not served.get(op)]:
        progress(f"left out, since their fast path serves no call of this workload: {', '.join(idle)}")
    if not candidates:
        raise NothingServed("no fast path served a call of this workload: `prequal doctor` and prequal.stats() say why")
    least = rounds_needed(len(candidates))
    if rounds < least:
        raise NotMeasurable(f"rounds: expected at least {least} for {len(candidates)} candidates, got {rounds}")

    variants: list[tuple[str, ...]] = [(), *((op,) for op in candidates)]
    everything = tuple(candidates)
    if everything not in variants:
        variants.append(everything)
    times: dict[tuple[str, ...], list[float]] = {variant: [] for variant in variants}
    done, complete = 0, True
    try:
        for number in range(rounds):
            turn = number // 2 % len(variants)
            order = variants[turn:] + variants[:turn]
            this_round = {}
            for variant in reversed(order) if number % 2 else order:
                with bench.without(variant):
                    workload()  # verdicts are forgotten at a switch, and caches hold another variant's data
                    this_round[variant] = 1e3 * bench.seconds(workload, iterations) / iterations
            for variant, ms in this_round.items():  # whole rounds only
                times[variant].append(ms)
            done += 1
            progress(f"round {done} of {rounds}: {this_round[()]:.3f} ms an iteration with every fast path on")
    except KeyboardInterrupt:
        complete = False
        if done < least:
            raise
        progress(f"interrupted after {done} rounds")

    rows = []
    for op in candidates:
        pairs = list(zip(times[op,], times[()], strict=True))
        error = ERROR / len(candidates)
        saved = median_interval([off - on for off, on in pairs], error)
        percent = median_interval([100 * (off - on) / off if off else 0.0 for off, on in pairs], error)
        rows.append(Row(op, served[op], saved, percent, verdict(saved)))
    rows.sort(key=lambda row: -row.ms.median)
    launches_on = bench.launches(workload)
    with bench.without(everything):
        launches_off = bench.launches(workload)
    return Report(
        workload=name,
        rounds=done,
        iterations=iterations,
        rows=tuple(rows),
        all_on_ms=_median(times[()]),
        all_off_ms=_median(times[everything]),
        launches_on=launches_on,
        launches_off=launches_off,
        complete=complete,
    )


def _median(values: Sequence[float]) -> float:
    return median_interval(values).median
