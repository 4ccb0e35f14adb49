"""linear_cross_entropy beside the three matrix products that it cannot do without, torch and its peers.

Forward with backward, and forward alone: device time (CUDA events around one call, the L2 flushed before), the peak of
memory beyond inputs and gradients, and the error of gradients against float64. A step of this size takes a sixth longer
in a row of such steps than on a GPU that had idled. So that none profits by its neighbour, each candidate is timed a
few calls in a row, behind two of its own, and they take turns in an order drawn anew for every round.

usage: python benchmarks/linear_cross_entropy.py [--tokens 8192] [--hidden 4096] [--classes 131072] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.losses.chunks import LEAN_WORKSPACE_BYTES

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
FLUSH_BYTES = 256 * 2**20
IN_A_ROW = 5


def eager_wide(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def eager_half(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def peers() -> dict[str, Loss | str]:
    found: dict[str, Loss | str] = {}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        found["Liger"] = lambda h, w, t: _first(liger(h, w, t))
    else:
        found["Liger"] = "not installed"
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cut

        found["cut-cross-entropy"] = lambda h, w, t: cut(h, w, t)
    else:
        found["cut-cross-entropy"] = "not installed"
    return found


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def candidates() -> dict[str, Loss | str]:
    ours = prequal.linear_cross_entropy
    return {
        "prequal": ours,
        "prequal, float32 sums": partial(ours, weight_grad_dtype=torch.float32),
        "prequal, 1 GiB": partial(ours, max_workspace_bytes=2**30),
        "prequal, lean: 284 MiB": partial(ours, max_workspace_bytes=LEAN_WORKSPACE_BYTES),
        "prequal, 128 MiB": partial(ours, max_workspace_bytes=2**27),
        "prequal, 4 MiB": partial(ours, max_workspace_bytes=2**22),
        "torch eager, fp32 logits": eager_wide,
        "torch eager, bf16 logits": eager_half,
        "torch.compile": torch.compile(eager_wide),
        **peers(),
    }


def products(hidden: Tensor, weight: Tensor, logits: Tensor, count: int) -> None:
    """The matrix products of a call, at once: logits, and with gradients those of hidden and weight."""
    torch.mm(hidden, weight.t(), out=logits)
    if count == 3:
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)


def microseconds(calls: dict[str, Callable[[], Any]], runs: int) -> dict[str, dict[str, float]]:
    """The median and the middle half."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(-(-runs // IN_A_ROW)):
        for name in order.sample(list(calls), len(calls)):
            for turn in range(-2, IN_A_ROW):
                flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                calls[name]()
                end.record()
                end.synchronize()
                if turn >= 0:
                    times[name].append(1000 * start.elapsed_time(end))
    found = {}
    for name, each in times.items():
        low, median, high = statistics.quantiles(each, n=4)
        found[name] = {"median": median, "q1": low, "q3": high}
    return found


def peak_beyond(call: Callable[[], Any], kept: int) -> int:
    """Bytes at the peak of a call, less what was there before and what it is asked to give."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - kept


def step(loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden.grad = weight.grad = None
    out = loss(hidden, weight, target)
    out.backward()
    return out.detach(), hidden.grad, weight.grad


def truth(hidden: Tensor, weight: Tensor, target: Tensor, rows: int = 256) -> tuple[Tensor, Tensor]:
    """Gradients in float64, chunk by chunk."""
    wide, tokens = weight.detach().double(), hidden.shape[0]
    of_hidden, of_weight = torch.empty(hidden.shape, dtype=torch.float64, device=hidden.device), torch.zeros_like(wide)
    for begin in range(0, tokens, rows):
        x = hidden.detach()[begin : begin + rows].double()
        p = torch.softmax(x @ wide.t(), 1)
        p[torch.arange(len(x), device=x.device), target[begin : begin + rows]] -= 1
        p /= tokens
        of_hidden[begin : begin + rows] = p @ wide
        of_weight.addmm_(p.t(), x)
    return of_hidden, of_weight


def error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, a piece at a time: float64 of everything at once is as large as all else together."""
    off = of = 0.0
    for a, b in zip(got.split(4096), want.split(4096), strict=True):
        off += float((a.double() - b).square().sum())
        of += float(b.square().sum())
    return (off / of) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=131_072)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--no-error", action="store_true", help="no gradients in float64")
    parser.add_argument("--json")
    options = parser.parse_args()

    generator = torch.Generator("cuda").manual_seed(0)
    shape = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    hidden = torch.randn(options.tokens, options.hidden, **shape).requires_grad_()
    weight = (torch.randn(options.classes, options.hidden, **shape) * options.hidden**-0.5).requires_grad_()
    target = torch.randint(0, options.classes, (options.tokens,), device="cuda", generator=generator)
    gradients = sum(x.numel() * x.element_size() for x in (hidden, weight))

    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": sys.argv}
    report["shape"] = [options.tokens, options.hidden, options.classes]
    rows: dict[str, dict[str, Any]] = {}
    exact = None if options.no_error else truth(hidden, weight, target)
    right: dict[str, Loss] = {}
    for name, loss in candidates().items():
        rows[name] = {}
        if isinstance(loss, str):
            rows[name]["absent"] = loss
            continue
        try:
            for _ in range(2):  # compiles, autotunes
                _, of_hidden, of_weight = step(loss, hidden, weight, target)
            if exact is not None:
                rows[name]["error"] = {"hidden": error(of_hidden, exact[0]), "weight": error(of_weight, exact[1])}
            del of_hidden, of_weight
            hidden.grad = weight.grad = None
            rows[name]["peak_MB"] = peak_beyond(partial(step, loss, hidden, weight, target), gradients) / 1e6
            hidden.grad = weight.grad = None
            with torch.no_grad():
                loss(hidden, weight, target)
                rows[name]["peak_forward_MB"] = peak_beyond(partial(loss, hidden, weight, target), 0) / 1e6
        except Exception as problem:  # a peer's failure, or ours: reported, never timed
            rows[name]["failed"] = f"{type(problem).__name__}: {problem}"[:200]
            continue
        right[name] = loss
    del exact
    torch.cuda.empty_cache()

    logits = torch.empty(options.tokens, options.classes, device="cuda", dtype=torch.bfloat16)
    plain = hidden.detach(), weight.detach()
    both = {"three products": partial(products, *plain, logits, 3)}
    both |= {name: partial(step, loss, hidden, weight, target) for name, loss in right.items()}
    one = {"one product": partial(products, *plain, logits, 1)}
    one |= {name: partial(loss, *plain, target) for name, loss in right.items()}
    for key, calls in (("device_us", both), ("forward_us", one)):
        for name, figures in microseconds(calls, options.runs).items():
            rows.setdefault(name, {})[key] = figures
    hidden.grad = weight.grad = None
    report["rows"], report["paths"] = rows, prequal.stats()

    for name, row in rows.items():
        times = [
            f"{row[key]['median'] / 1000:9.2f} ms" if key in row else f"{'–':>12}"
            for key in ("device_us", "forward_us")
        ]
        peak = f"{row['peak_MB']:8.0f} MB" if "peak_MB" in row else f"{'–':>11}"
        off = "  ".join(f"{k} {v:.2e}" for k, v in row.get("error", {}).items())
        print(f"{name:28}", *times, peak, off, row.get("absent", ""), row.get("failed", ""))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
