"""Fill the tables of README.md and docs/ from the registry and the committed evidence; nobody types a number.

usage: python docs/make_tables.py [--check]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def write_manifest() -> Any:
    """cmake/write_manifest.py, which knows the digest of every op's sources."""
    spec = importlib.util.spec_from_file_location("write_manifest", ROOT / "cmake" / "write_manifest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digests() -> dict[str, str]:
    tool = write_manifest()
    return {name: tool.digest(files, ROOT) for name, files in tool.op_sources(ROOT).items()}


def evidence() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/*.json"))]


def is_stale(record: dict[str, Any], now: dict[str, str]) -> bool:
    return now.get(record["basename"]) != record["source_digest"]


def microseconds(measured: dict[str, Any], kind: str) -> str:
    if kind not in measured:
        return "–"
    value = measured[kind]["median"]
    if value >= 10_000:
        return f"{value / 1000:,.1f} ms"
    return f"{value:,.0f} µs" if value >= 100 else f"{value:.1f} µs"


EAGER = ("torch eager", "torch.cdist + argmin")  # of which one has a column of its own


def best_of_others(row: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Peers, and other ways to say it in torch."""
    own = ("prequal", "torch.compile", *EAGER)
    others = [(name, x) for name, x in row["by"].items() if name not in own and "device_us" in x]
    return min(others, key=lambda item: item[1]["device_us"]["median"], default=None)


SLOWER = "slower than the best of these"


def scorecard(every: bool = True) -> str:
    """A line a measured case, or the first of each file of ops: ours, eager, compiled, the best of the others, share of
    the copy bandwidth."""
    now = digests()
    lines = [
        "| op, shape | GPU | prequal | torch eager | torch.compile | best other | of copy bandwidth | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in evidence():
        for row in record["rows"] if every else record["rows"][:1]:
            by = row["by"]
            ours = by.get("prequal")
            name = f"`{row.get('op', record['basename'])}` {row['case']}"
            if ours is None or "device_us" not in ours:
                why = row.get("wrong", {}).get("prequal") or row.get("failed", {}).get("prequal")
                if why:
                    lines.append(f"| {name} | {record['gpu']} | – | – | – | – | – | not timed: {cell(why)} |")
                continue
            eager: dict[str, Any] = next((by[name] for name in EAGER if name in by), {})
            compiled = by.get("torch.compile", {})
            peer = best_of_others(row)
            share = f"{ours['TB_s'] / record['ceilings']['copy_TB_s']:.0%}" if "TB_s" in ours else "–"
            measured = (eager, compiled, *([peer[1]] if peer else []))
            others = [x["device_us"]["median"] for x in measured if "device_us" in x]
            notes = []
            if others and min(others) < ours["device_us"]["median"]:
                notes.append(SLOWER)
            if ours.get("path", "fast") != "fast":
                notes.append(f"by the {ours['path']}")
            if ours.get("noisy"):
                notes.append("noisy")
            if is_stale(record, now):
                notes.append("stale: sources changed since")
            if record.get("complete") is False:
                notes.append("of a run that was stopped")
            if record["gpu_tests"] != "passed":
                notes.append(f"GPU tests: {record['gpu_tests']}")
            cells = [microseconds(x, "device_us") for x in (ours, eager, compiled)]
            cells.append(f"{peer[0]} {microseconds(peer[1], 'device_us')}" if peer else "–")
            lines.append(f"| {name} | {record['gpu']} | {' | '.join(cells)} | {share} | {'; '.join(notes)} |")
    measured_names = {record["basename"] for record in evidence()}
    lines += [f"| `{name}` | – | – | – | – | – | – | not measured yet |" for name in now if name not in measured_names]
    return "\n".join(lines)


def summary() -> str:
    """How many cases there are, and of how many somebody else is faster."""
    lines = scorecard().splitlines()[2:]
    measured = [line for line in lines if "not measured yet" not in line]
    slower = sum(SLOWER in line for line in measured)
    return (
        f"The first case of each file of ops. [All {len(measured)} cases measured](docs/scorecard.md): in {slower} of "
        "them the best of the others is faster than prequal."
    )


def gate_table() -> str:
    """What the gate costs against what it was meant to cost, shortfalls said, of each GPU that was asked."""
    lines = ["| on | | measured | aimed at | |", "|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*/lane/gate.json")):
        found = json.loads(path.read_text())
        gpu = json.loads((path.parent / "gpu-tests.json").read_text())["gpu"]
        load = statistics.median(one["load_ms"] for one in found["from_lock"])
        for what, value, most, unit in (
            ("gate and counter, a call", found["hot_path"]["gate_and_counter_ns"], 300, "ns"),
            (f"qualifying all {found['qualify']['ops']} ops", found["qualify"]["seconds"], 10, "s"),
            ("loading a lock of them instead", load, 20, "ms"),
        ):
            missed = "missed" if value >= most else ""
            lines.append(f"| {gpu} | {what} | {value:.1f} {unit} | under {most} {unit} | {missed} |")
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def op_table() -> str:
    sys.path.insert(0, str(ROOT / "python"))
    from prequal import ops as _ops  # noqa: F401  declares them
    from prequal import registry

    lines = ["| op | what | contract | the kernel needs |", "|---|---|---|---|"]
    for name, op in registry.OPS.items():
        what = (op.reference.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")
        lines.append(f"| `{name}` | {what} | {op.contract} | {'; '.join(need.text for need in op.needs)} |")
    return "\n".join(lines)


def filled(text: str, tables: dict[str, str]) -> str:
    for name, table in tables.items():
        begin, end = f"<!-- {name}: generated by docs/make_tables.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        if not rest:
            continue
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a table is not current")
    args = parser.parse_args()
    tables = {
        "scorecard": scorecard(),
        "short scorecard": f"{scorecard(every=False)}\n\n{summary()}",
        "ops": op_table(),
        "gate costs": gate_table(),
    }
    behind = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        new = filled(text, tables)
        if new != text:
            behind.append(path.name)
            if not args.check:
                path.write_text(new)
    for record in evidence():
        if is_stale(record, digests()):
            print(f"stale evidence: {record['basename']} on {record['gpu']}")
    if behind:
        print(("not current: " if args.check else "written: ") + ", ".join(behind))
    return 1 if behind and args.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
