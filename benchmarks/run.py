"""Measure ops on this GPU and write evidence, a JSON file a basename.

usage: python benchmarks/run.py --out DIR [--ops rms_norm,knn] [--quick] [--gpu-tests passed]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np
import torch
import torch.nn.functional as F

import prequal
from prequal import runtime_state as state

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness

Rows = Iterator[dict[str, object]]


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, mode="max-autotune-no-cudagraphs")


def measure(
    case: str, calls: dict[str, Callable[[], object]], moved: int | None = None, runs: int = harness.RUNS
) -> dict[str, object]:
    print(f"  {case}", file=sys.stderr, flush=True)
    found: dict[str, object] = {"case": case, "bytes": moved, "by": {}}
    for name, call in calls.items():
        found["by"][name] = harness.row(call, moved, runs)
        print(f"    {name}: {found['by'][name]['device_us']['median']:.1f} us", file=sys.stderr, flush=True)
    return found


def rms_norm_rows(quick: bool) -> Rows:
    shapes = [(16384, 4096, torch.bfloat16)]
    if not quick:
        shapes += [(16384, 8192, torch.bfloat16), (16384, 4096, torch.float16), (8192, 4096, torch.float32)]
        shapes += [(262144, 128, torch.bfloat16), (4096, 16384, torch.bfloat16), (16384, 4095, torch.bfloat16)]
    for rows, width, dtype in shapes:
        x, weight = torch.randn(rows, width, device="cuda", dtype=dtype), torch.randn(width, device="cuda", dtype=dtype)

        def eager(x=x, w=weight, n=width):
            return F.rms_norm(x, (n,), w, 1e-6)

        fused = compiled(lambda x, w, n=width: F.rms_norm(x, (n,), w, 1e-6))
        agree(prequal.rms_norm, x, weight)
        calls = {
            "prequal": lambda x=x, w=weight: prequal.rms_norm(x, w),
            "torch eager": eager,
            "torch.compile": lambda f=fused, x=x, w=weight: f(x, w),
        }
        yield measure(f"{str(dtype)[6:]} [{rows}, {width}]", calls, 2 * x.numel() * x.element_size())

    x, weight = torch.randn(64, 16, device="cuda"), torch.randn(16, device="cuda")
    other = torch.randn(64, 16, device="cuda")
    native = state.native

    def past_the_gate() -> object:
        native.admit(True)
        return native.rms_norm(x, weight, 1e-6)

    with torch.no_grad():
        host = harness.host_us(
            {
                "prequal.rms_norm": lambda: prequal.rms_norm(x, weight),
                "past route, gate and counter": past_the_gate,
                "what admission costs": lambda: native.admit(True),
                "torch.add": lambda: torch.add(x, other),
                "F.rms_norm": lambda: F.rms_norm(x, (16,), weight, 1e-6),
                "torch.ops.prequal.rms_norm": lambda: torch.ops.prequal.rms_norm(x, weight),
            }
        )
    native.admit(True)
    native.rms_norm(x, weight, 1e-6)  # spend the last admission
    bare = host["past route, gate and counter"].median - host["what admission costs"].median
    yield {
        "case": "host time, float32 [64, 16]",
        "by": {name: {"host_us": asdict(s)} for name, s in host.items()},
        # the Python function, the questions to autograd and the modes, the gate and the counter, all together
        "route_gate_counter_us": round(host["prequal.rms_norm"].median - bare, 3),
    }


def clouds(data: pathlib.Path | None) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(distribution, 100,000 queries, 8,000 references), the size of a label transfer on a mesh."""
    generator = torch.Generator().manual_seed(0)
    n, m = 100_000, 8_000

    def jittered(points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = points[torch.randperm(len(points), generator=generator)[:m]]
        return points.cuda(), chosen.cuda()

    volume = torch.rand(n, 3, generator=generator)
    yield "volume", *jittered(volume)
    yield (
        "uniform, independent",
        torch.rand(n, 3, generator=generator).cuda(),
        torch.rand(m, 3, generator=generator).cuda(),
    )
    yield "smooth sphere", *jittered(F.normalize(torch.randn(n, 3, generator=generator), dim=1))
    centres = torch.rand(20, 3, generator=generator)
    clustered = centres[torch.arange(n) % 20] + 1e-3 * torch.randn(n, 3, generator=generator)
    yield "clustered", *jittered(clustered)
    outlier = volume.clone()
    queries, references = jittered(outlier)
    references[0] = 1e6
    yield "one far outlier", queries, references
    if data is not None:
        scan = torch.from_numpy(np.load(data / "igea_vertices.npy").astype(np.float32))
        yield "Igea scan", *jittered(scan)


def knn_rows(quick: bool) -> Rows:
    folder = os.environ.get("PREQUAL_TEST_DATA")
    for name, queries, references in clouds(pathlib.Path(folder) if folder else None):
        agree(prequal.knn, queries[:4096], references, 1)
        labels = torch.arange(len(references), device="cuda")
        calls = {"prequal": lambda q=queries, r=references: prequal.knn(q, r)}
        if not quick:
            calls["prequal k=8"] = lambda q=queries, r=references: prequal.knn(q, r, 8)
            calls["prequal k=32"] = lambda q=queries, r=references: prequal.knn(q, r, 32)
            calls["prequal.knn_gather"] = lambda q=queries, r=references, v=labels: prequal.knn_gather(q, r, v)
        if name == "volume":
            calls["torch.cdist + argmin"] = lambda q=queries, r=references: torch.cdist(q, r).argmin(1)
        yield measure(f"{name}, k 1, [{len(queries)}] to [{len(references)}]", calls)
    if quick:
        return
    for n in (10_000, 100_000, 1_000_000, 10_000_000):
        points = torch.rand(n, 3, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        yield measure(f"volume, k 1, [{n}] to itself", {"prequal": lambda p=points: prequal.knn(p, p)}, runs=20)


def agree(function: Callable[..., object], *args: object) -> None:
    """A wrong answer is never timed."""
    op = function.op
    found = op.contract.compare(function(*args), op.reference(*args))
    if found is not None:
        raise SystemExit(f"{op.name}: {found}")


CASES = {"rms_norm": rms_norm_rows, "knn": knn_rows}
PEERS = ("liger_kernel", "torch_cluster", "torchbvh", "torch_kdtree", "pytorch3d")


def import_ms() -> float:
    code = "import time, torch; t = time.perf_counter(); import prequal; print(1e3 * (time.perf_counter() - t))"

    def run():
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    return round(min(run() for _ in range(5)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--ops", default=",".join(CASES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpu-tests", default="not run", help="what the GPU tests of these sources said")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    major, minor = torch.cuda.get_device_capability()
    ceilings = harness.ceilings()
    print(f"ceilings: {ceilings}", file=sys.stderr)
    import importlib.util

    peers = {name: importlib.util.find_spec(name) is not None for name in PEERS}
    for name in args.ops.split(","):
        print(name, file=sys.stderr)
        record = {
            "schema": 1,
            "basename": name,
            "gpu": torch.cuda.get_device_name(),
            "capability": f"{major}.{minor}",
            "source_digest": state.gate.host.manifest.ops[name].digest,
            "gpu_tests": args.gpu_tests,
            "command": f"python benchmarks/run.py --ops {name}{' --quick' if args.quick else ''}",
            "fingerprint": prequal.fingerprint(0).portable().data,
            "ceilings": ceilings,
            "import_ms": import_ms(),
            "peers_installed": peers,
            "rows": list(CASES[name](args.quick)),
        }
        (args.out / f"{name}.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
