"""How a time is taken. Nothing here knows an op; nothing here asserts a time.

Device time: CUDA events around one call, 256 MB of L2 flush before each, 8 warm-ups, 100 runs, median and quartiles.
Graph time: a captured graph of 20 calls, divided by 20: what a call costs where launches are not the bound; the empty
replay of the same run is reported beside it. Wall time: one whole synchronised call, the empty synchronised launch
beside it. Host time: interleaved short bursts without synchronisation (long ones measure the queue).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

Call = Callable[[], object]
WARM_UPS, RUNS, GRAPH_CALLS, BURST = 8, 100, 20, 50
FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Spread:
    """Microseconds."""

    median: float
    q1: float
    q3: float
    runs: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        q1, median, q3 = statistics.quantiles(values, n=4)
        return cls(round(median, 3), round(q1, 3), round(q3, 3), len(values))


def device_us(call: Call, runs: int = RUNS) -> Spread:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(WARM_UPS):
        call()
    events = []
    for _ in range(runs):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return Spread.of([1e3 * start.elapsed_time(end) for start, end in events])


def graph_us(call: Call, runs: int = RUNS) -> Spread:
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    values = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        values.append(1e3 * start.elapsed_time(end) / GRAPH_CALLS)
    return Spread.of(values)


def wall_us(call: Call, runs: int = RUNS) -> Spread:
    values = []
    for run in range(WARM_UPS + runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if run >= WARM_UPS:
            values.append(1e6 * (time.perf_counter() - start))
    return Spread.of(values)


def host_us(calls: dict[str, Call], runs: int = RUNS) -> dict[str, Spread]:
    """CPU time a call, the calls interleaved burst by burst."""
    values: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(WARM_UPS + runs):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            elapsed = time.perf_counter() - start
            if run >= WARM_UPS:
                values[name].append(1e6 * elapsed / BURST)
    return {name: Spread.of(found) for name, found in values.items()}


def peak_bytes(call: Call) -> int:
    """Allocated beyond what was there, outputs included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def ceilings() -> dict[str, float]:
    """Copy bandwidth (bytes read and written), and what nothing costs here."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = device_us(lambda: target.copy_(source), 30)
    tiny = torch.zeros(1, device="cuda")
    return {
        "copy_TB_s": round(2 * source.numel() / copy.median / 1e6, 3),
        "empty_launch_wall_us": wall_us(lambda: tiny.zero_()).median,
        "empty_graph_replay_us": _empty_replay(),
    }


def _empty_replay() -> float:
    graph = torch.cuda.CUDAGraph()
    tiny = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tiny.zero_()
    return wall_us(graph.replay).median


def row(call: Call, bytes_moved: int | None = None, runs: int = RUNS) -> dict[str, object]:
    """One implementation at one shape. Its answer was compared before."""
    device = device_us(call, runs)
    measured: dict[str, object] = {"device_us": asdict(device), "wall_us": asdict(wall_us(call, runs))}
    if device.median < 1000:
        measured["graph_us"] = asdict(graph_us(call, runs))
    if bytes_moved:
        measured["TB_s"] = round(bytes_moved / device.median / 1e6, 3)
    measured["peak_bytes"] = peak_bytes(call)
    return measured
