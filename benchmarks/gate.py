"""What the gate costs on this GPU: qualifying every op, and starting from its lock instead, each in a new process.

usage: python benchmarks/gate.py --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

QUALIFY = """
import json, sys, time, torch, prequal
torch.cuda.init()
start = time.perf_counter()
report = prequal.qualify()
seconds = time.perf_counter() - start
report.write_lock(sys.argv[1])
print(json.dumps({"seconds": round(seconds, 3), "ok": report.ok, "ops": len(report.rows)}))
"""

FROM_LOCK = """
import json, sys, time, torch, prequal
x = torch.ones(2, 64, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
status = prequal.load_lock(sys.argv[1])
loaded = time.perf_counter()
prequal.rms_norm(x)
torch.cuda.synchronize()
called = time.perf_counter()
prequal.rms_norm(x)
torch.cuda.synchronize()
print(json.dumps({
    "ok": status.ok, "load_ms": round(1e3 * (loaded - start), 3),
    "first_call_ms": round(1e3 * (called - loaded), 3),
    "second_call_ms": round(1e3 * (time.perf_counter() - called), 3),
    "stats": prequal.stats(), "qualified_by": prequal.explain("rms_norm", device="cuda").qualification.by.split()[0],
}))
"""

# The gate and the counter alone, in a loop
HOT_PATH = """
import json, statistics, time
from prequal import runtime_state as state
calls = 1_000_000
rounds = [state.native.time_gate(calls) / calls for _ in range(21)]
print(json.dumps({"gate_and_counter_ns": round(1e9 * statistics.median(rounds), 2), "calls": calls, "rounds": 21}))
"""

FIRST_USE = """
import json, time, torch, prequal
x = torch.ones(2, 64, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
prequal.rms_norm(x)
torch.cuda.synchronize()
print(json.dumps({"first_call_ms": round(1e3 * (time.perf_counter() - start), 3), "stats": prequal.stats()}))
"""


def measured(code: str, *arguments: str) -> dict[str, object]:
    out = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lock = str(pathlib.Path(folder) / "prequal.lock.json")
        record = {
            "qualify": measured(QUALIFY, lock),
            "from_lock": [measured(FROM_LOCK, lock) for _ in range(3)],
            "first_use": measured(FIRST_USE),
            "hot_path": measured(HOT_PATH),
        }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
