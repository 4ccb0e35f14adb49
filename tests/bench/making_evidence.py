"""Evidence and devices made up for tests: numbers with a known truth, a clock that no machine moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from prequal.bench.device import Call, Host
from prequal.bench.stats import Spread

GPU = "NVIDIA H200"


class FakeClock:
    """Stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_us(self, us: float) -> None:
        self.now += us / 1e6


class FakeGpu(Host):
    """A GPU by name, whose times are those of the fake clock; graphs where it is told to have them."""

    name, capability = GPU, "9.0"

    def __init__(self, clock: Callable[[], float], graphs: bool = True, cache_bytes: int = 0) -> None:
        super().__init__(clock)
        self.log: list[str] = []
        self.graphs, self.cache_bytes = graphs, cache_bytes
        self.captures: list[int] = []

    def captured(self, calls: Sequence[Call]) -> Callable[[int], list[float]] | None:
        if not self.graphs:
            raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
        self.captures.append(len(calls))

        def replayed(runs: int) -> list[float]:
            return [sum(self.wall_us(call, 1)[0] for call in calls) / len(calls) for _ in range(runs)]

        return replayed

    def peak_bytes(self, call: Call) -> int | None:
        call()
        return 4096

    def ceilings(self) -> dict[str, float]:
        return {"copy_TB_s": 4.0, "fp32_TFLOP_s": 50.0, "bf16_TFLOP_s": 700.0, "empty_launch_wall_us": 9.0}


def spread(median: float, half: float | None = None, runs: int = 100) -> dict[str, float]:
    half = 0.02 * median if half is None else half
    return Spread(median, median - half, median + half, runs).json()


def figures(median: float, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "device_us": spread(median),
        "wall_us": spread(median + 15),
        "graph_us": spread(0.9 * median),
        "TB_s": round(200 / median, 3),
        "peak_bytes": 2**27,
        **more,
    }


def row(case: str, ours: float = 70.0, bytes: int = 268_443_648, **others: float) -> dict[str, Any]:
    kinds = {"torch_eager": "eager", "torch_compile": "compiled"}
    by = {"prequal": figures(ours, "prequal", path="fast")}
    for name, median in others.items():
        kind = kinds.get(name, "peer")
        by[name.replace("_", " ") if kind == "eager" else name.replace("torch_c", "torch.c")] = figures(median, kind)
    return {"case": case, "op": "rms_norm", "bytes": bytes, "flops": 0, "flops_unit": "fp32", "cold": True, "by": by}


def record(rows: Sequence[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    if rows is None:
        rows = [row("bfloat16 [16384, 4096]", torch_eager=120.0, torch_compile=90.0, liger_kernel=81.0)]
    return {
        "schema": 1,
        "basename": "rms_norm",
        "ops": ["rms_norm"],
        "shapes": "full",
        "gpu": GPU,
        "capability": "9.0",
        "source_digest": "a" * 64,
        "gpu_tests": "passed",
        "command": "prequal bench --ops rms_norm --shapes full",
        "fingerprint": {"schema": 1, "torch": {"version": torch.__version__}},
        "ceilings": {"copy_TB_s": 4.25, "fp32_TFLOP_s": 50.0},
        "complete": True,
        "rows": list(rows),
        **more,
    }
