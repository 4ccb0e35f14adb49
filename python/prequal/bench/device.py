"""The seam to time and to the GPU. `Cuda` is the real one; `Host` times by a clock, the process's own or a test's.

Device time: CUDA events around one call, 256 MB of L2 flush before each. Graph time: a captured graph of 20 calls,
divided by 20: what a call costs where launches are not the bound. Wall time: one whole synchronised call. What an empty
launch and an empty replay cost in the same run is among the ceilings, and printed beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from .stats import Spread

Call = Callable[[], object]
GRAPH_CALLS = 20
FLUSH_BYTES = 256 * 2**20


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds, from any start."""
        ...


class Device(Protocol):
    """Times are microseconds, one a run."""

    name: str
    capability: str
    torch_device: torch.device
    cache_bytes: int
    memory_bytes: int

    def device_us(self, call: Call, runs: int) -> list[float]: ...

    def wall_us(self, call: Call, runs: int) -> list[float]: ...

    def captured(self, calls: Sequence[Call]) -> Callable[[int], list[float]] | None:
        """The calls as one graph: a function from runs to times a call. None where there are no graphs; raises
        RuntimeError where the calls cannot be captured."""
        ...

    def host_us(self, call: Call, runs: int) -> float:
        """CPU time a call, of a burst without synchronisation inside."""
        ...

    def peak_bytes(self, call: Call) -> int | None:
        """Allocated beyond what was there, outputs included."""
        ...

    def answers(self) -> bool:
        """Whether it still does: a kernel that reads what is nobody's takes the whole process's GPU away."""
        ...

    def ceilings(self) -> dict[str, float]:
        """What this device does at most, and what nothing costs on it, measured now."""
        ...


class Host:
    """No GPU: every time is the clock's. What it measures is never evidence."""

    name, capability, cache_bytes, memory_bytes = "CPU", "", 0, 0
    torch_device = torch.device("cpu")

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock

    def wall_us(self, call: Call, runs: int) -> list[float]:
        found = []
        for _ in range(runs):
            start = self._clock()
            call()
            found.append(1e6 * (self._clock() - start))
        return found

    device_us = wall_us

    def captured(self, calls: Sequence[Call]) -> Callable[[int], list[float]] | None:
        return None

    def host_us(self, call: Call, runs: int) -> float:
        start = self._clock()
        for _ in range(runs):
            call()
        return 1e6 * (self._clock() - start) / runs

    def peak_bytes(self, call: Call) -> int | None:
        return None

    def answers(self) -> bool:
        return True

    def ceilings(self) -> dict[str, float]:
        source = torch.ones(2**22, dtype=torch.uint8)
        target = torch.empty_like(source)
        copy = Spread.of(self.wall_us(lambda: target.copy_(source), 9))
        return {"copy_TB_s": round(2 * source.numel() / max(copy.median, 1e-3) / 1e6, 6)}


class Cuda:
    def __init__(self, index: int | None = None) -> None:
        index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self.capability = "{}.{}".format(*torch.cuda.get_device_capability(index))
        about = torch.cuda.get_device_properties(index)
        self.cache_bytes, self.memory_bytes = int(getattr(about, "L2_cache_size", 0)), int(about.total_memory)
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch_device)

    def device_us(self, call: Call, runs: int) -> list[float]:
        events = []
        for _ in range(runs):
            self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]

    def wall_us(self, call: Call, runs: int) -> list[float]:
        found = []
        for _ in range(runs):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            found.append(1e6 * (time.perf_counter() - start))
        return found

    def captured(self, calls: Sequence[Call]) -> Callable[[int], list[float]] | None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()

        def replayed(runs: int) -> list[float]:
            found = []
            for _ in range(runs):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(1e3 * start.elapsed_time(end) / len(calls))
            return found

        replayed(2)
        return replayed

    def host_us(self, call: Call, runs: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            call()
        return 1e6 * (time.perf_counter() - start) / runs

    def peak_bytes(self, call: Call) -> int | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del kept
        return peak

    def answers(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def ceilings(self) -> dict[str, float]:
        def median(call: Call, runs: int = 30) -> float:
            self.device_us(call, 8)
            return Spread.of(self.device_us(call, runs)).median

        source = torch.empty(2**30, dtype=torch.uint8, device=self.torch_device).random_()
        target = torch.empty_like(source)
        found = {"copy_TB_s": round(2 * source.numel() / median(partial(target.copy_, source)) / 1e6, 3)}
        del source, target
        for name, dtype, n in (("bf16_TFLOP_s", torch.bfloat16, 8192), ("fp32_TFLOP_s", torch.float32, 4096)):
            a, b = (torch.randn(n, n, device=self.torch_device, dtype=dtype) for _ in range(2))
            out = torch.empty_like(a)
            found[name] = round(2 * n**3 / median(partial(torch.mm, a, b, out=out)) / 1e6, 1)
        tiny = torch.zeros(1, device=self.torch_device)
        for _ in range(8):
            tiny.zero_()
        found["empty_launch_wall_us"] = Spread.of(self.wall_us(tiny.zero_, 100)).median
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tiny.zero_()
        graph.replay()
        found["empty_graph_replay_us"] = Spread.of(self.wall_us(graph.replay, 100)).median
        return found


def burst_us(device: Device, calls: dict[str, Call], rounds: int = 100, burst: int = 50) -> dict[str, Spread]:
    """CPU time a call, the calls interleaved burst by burst (long bursts measure the launch queue)."""
    values: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(8 + rounds):
        for name, call in calls.items():
            found = device.host_us(call, burst)
            if number >= 8:
                values[name].append(found)
    return {name: Spread.of(found) for name, found in values.items()}


def tensors_in(args: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in args if isinstance(x, torch.Tensor)]
