"""`prequal bench`: measure ops beside eager, torch.compile and installed peers; write evidence; draw it; check it.

Exit code: 0 done, 1 an answer of ours was wrong, or --check found something stale, missing or regressed, 2 wrong use,
3 stopped at the budget, 130 at Ctrl-C; what was done by then is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._progress import InputError, note

TESTS = ("passed", "failed", "not run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", metavar="OP,OP", help="names or basenames; default: every op")
    parser.add_argument("--shapes", choices=("quick", "full"), default="quick", help="default: quick")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal on small samples, never evidence"
    )
    parser.add_argument("--json", metavar="FILE", help="write every record to this file; - is stdout")
    parser.add_argument("--out", metavar="DIR", help="write evidence, a JSON file a basename")
    parser.add_argument("--charts", metavar="DIR", help="draw PNG and SVG files there (prequal[bench])")
    parser.add_argument(
        "--gpu-tests", choices=TESTS, default="not run", help="what the GPU tests of these sources said"
    )
    parser.add_argument("--budget", metavar="S", type=float, help="start no new case after S seconds")
    parser.add_argument(
        "--runs",
        metavar="N",
        type=int,
        help="runs a case, in five rounds of as many; evidence wants the default of 100",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out: its autotuning takes minutes"
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="processes that compile ahead of the measuring, 1 for none; default: as many as the machine has room for",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--check", action="store_true", help="hold the run against the committed evidence")
    parser.add_argument(
        "--results", metavar="DIR", default="benchmarks/results", help="where the committed evidence lies, for --check"
    )
    parser.add_argument(
        "--from",
        metavar="FILE",
        dest="source",
        help="measure nothing: take what --json or --out wrote, a file or a folder",
    )


def run(args: argparse.Namespace) -> int:
    from prequal import ops as _ops  # noqa: F401  declares them
    from prequal.bench import cases as lists
    from prequal.errors import UnknownOpError

    try:
        chosen = lists.chosen_ops(_listed(args.ops))
        for argument in ("runs", "jobs"):
            if (number := getattr(args, argument)) is not None and number < 1:
                raise InputError(f"--{argument}", "at least 1", str(number))
        if args.budget is not None and not args.budget >= 0:
            raise InputError("--budget", "at least 0 seconds", str(args.budget))
        if args.source is not None and args.out is not None:
            raise InputError("--out", "none beside --from, which measures nothing", args.out)
        for name in ("out", "charts"):
            if (folder := getattr(args, name)) is not None:
                check_folder(f"--{name}", folder)
        check_file("--json", args.json)
        if args.charts is not None and importlib.util.find_spec("matplotlib") is None:
            raise InputError("--charts", "matplotlib (pip install 'prequal[bench]')", "a Python without it")
        if args.check and not Path(args.results).is_dir():
            raise InputError("--results", "the folder of the committed evidence", args.results)
        session = Session(args, chosen)
        return session.run()
    except (InputError, UnknownOpError) as error:
        note(f"prequal bench: {error}")
        return 2


def _listed(text: str | None) -> list[str] | None:
    if text is None:
        return None
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise InputError("--ops", "names with commas between them", repr(text))
    return found


def check_file(argument: str, path: str | None) -> None:
    """As check_folder; None and - are none."""
    if path in (None, "-"):
        return
    from prequal.bench.program import can_be_a_file

    assert path is not None
    if not can_be_a_file(path):
        raise InputError(argument, "a file in a folder that exists", path)


def check_folder(argument: str, path: str) -> None:
    """Before minutes of measuring, not after them."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise InputError(argument, "a folder that can be made", f"{path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise InputError(argument, "a folder that can be written to", path)


class Session:
    """One command: what was asked, what was measured so far."""

    def __init__(self, args: argparse.Namespace, ops: Sequence[Any], device: Any = None) -> None:
        self.args, self.ops = args, ops
        self.basenames = list(dict.fromkeys(op.basename for op in ops))
        self.records: dict[str, dict[str, Any]] = {}
        self._device = device
        self._started = time.monotonic()
        # A rehearsal on a CPU takes each op's quick sample: the shapes of a GPU would take it hours.
        self.tier = "sample" if args.device == "cpu" else args.shapes

    def run(self) -> int:
        from prequal.bench import evidence

        code = 0
        if self.args.source is not None:
            for record in _read(Path(self.args.source)):
                if record["basename"] in self.basenames:
                    self.records[record["basename"]] = record
            if not self.records:
                raise InputError("--from", f"evidence of {', '.join(self.basenames)}", f"none in {self.args.source}")
        elif not (self.args.check and self._device is None and _no_gpu(self.args)):
            code = self._measure()
        self._write(evidence)
        if self.args.check:
            code = max(code, self._check(evidence))
        return code

    # ---- measuring -----------------------------------------------------------------------------------------------

    def _measure(self) -> int:
        from prequal.bench import cases as lists
        from prequal.bench import precompile, runner

        if self._device is None and (why := _no_gpu(self.args)):
            raise InputError("--device", "a GPU that this process can use", why)
        device = self._device or _device(self.args)
        listed = lists.shape_lists()
        peers = [peer for module in listed.values() for peer in getattr(module, "PEERS", ())]
        options = runner.Options(
            compile=not self.args.no_compile and device.torch_device.type == "cuda",
            peers=() if self.args.no_peers else peers,
            runs=self.args.runs,
        )
        cases = lists.cases_of(self.ops, self.tier)
        try:
            ceilings = device.ceilings()
            note(f"{device.name}: " + ", ".join(f"{name} {value:,}" for name, value in ceilings.items()))
            imported = _import_ms()
            if options.compile:
                jobs = self.args.jobs or precompile.fitting_jobs(os.cpu_count() or 1, device.memory_bytes)
                begun = time.monotonic()
                precompile.compile_ahead([op.name for op in self.ops], self.tier, jobs, note)
                note(f"compiled ahead in {time.monotonic() - begun:.0f} s")
        except KeyboardInterrupt:
            note("interrupted before the first case")
            return 130
        for name in self.basenames:
            self.records[name] = self._record(name, device, ceilings, imported, peers)

        def keep(case: Any, row: dict[str, Any]) -> None:
            self.records[next(op.basename for op in self.ops if op.name == case.op)]["rows"].append(row)

        before, begun = 0, time.monotonic()
        try:
            for name in self.basenames:  # a record is complete or not by itself, however far the others came
                record = self.records[name]
                mine = [case for case in cases if case.op in record["ops"]]
                if not runner.run(mine, device, options, keep, note, self._may_go_on, before, len(cases)):
                    return 130 if self._may_go_on() else 3
                before += len(mine)
                if (extra := getattr(listed.get(name), "extra", None)) is not None and self.tier == "full":
                    record["rows"] += _rows_of(extra, device)
                record["complete"] = True
        except KeyboardInterrupt:
            note("interrupted: what is done is written")
            return 130
        except runner.DeviceLost as lost:
            note(f"{lost}; what is done is written")
            return 1
        finally:
            note(f"measured in {time.monotonic() - begun:.0f} s")
        bad = any(
            "prequal" in row.get(kind, {})
            for record in self.records.values()
            for row in record["rows"]
            for kind in ("wrong", "failed")
        )
        return 1 if bad else 0

    def _may_go_on(self) -> bool:
        return self.args.budget is None or time.monotonic() - self._started < self.args.budget

    def _record(
        self, name: str, device: Any, ceilings: dict[str, float], imported: float, peers: Sequence[Any]
    ) -> dict[str, Any]:
        import prequal

        mine = [peer for peer in peers if peer.op in {op.name for op in self.ops if op.basename == name}]
        index = device.torch_device.index if device.torch_device.type == "cuda" else None
        return {
            "schema": 1,
            "basename": name,
            "ops": [op.name for op in self.ops if op.basename == name],
            "shapes": self.tier,
            "gpu": device.name,
            "capability": device.capability,
            "source_digest": _digests().get(name, ""),
            "gpu_tests": self.args.gpu_tests if device.torch_device.type == "cuda" else "not run",
            "command": self._command(name),
            "fingerprint": prequal.fingerprint(index).portable().data,
            "ceilings": ceilings,
            "import_ms": imported,
            "peers_installed": {peer.module: peer.absent() is None for peer in mine},
            "complete": False,
            "rows": [],
        }

    def _command(self, name: str) -> str:
        words = ["prequal bench", f"--ops {name}"]
        if self.tier != "sample":
            words.append(f"--shapes {self.tier}")
        if self.args.device != "cuda":
            words.append(f"--device {self.args.device}")
        words += [f"--{flag.replace('_', '-')}" for flag in ("no_compile", "no_peers") if getattr(self.args, flag)]
        if self.args.runs is not None:
            words.append(f"--runs {self.args.runs}")
        return " ".join(words)

    # ---- what is made of it --------------------------------------------------------------------------------------

    def _write(self, evidence: Any) -> None:
        records = [record for record in self.records.values() if record["rows"]]
        if self.args.out is not None and self.args.source is None:
            for record in records:
                path = Path(self.args.out) / f"{record['basename']}.json"
                evidence.write(path, record)
                note(f"wrote {path}")
        if self.args.json == "-":
            print(json.dumps({"schema": 1, "records": records}, indent=1, sort_keys=True))
        elif self.args.json is not None:
            evidence.write(Path(self.args.json), {"schema": 1, "records": records})
            note(f"wrote {self.args.json}")
        if self.args.json != "-" and not self.args.check:
            print(table(records))
        if self.args.charts is not None and records:
            from prequal.bench import charts

            for path in charts.draw(records, Path(self.args.charts)):
                note(f"drew {path}")

    def _check(self, evidence: Any) -> int:
        """Stale, missing and regressed, against the folder of this GPU; without one, against every GPU's folder."""
        results = Path(self.args.results)
        if self.records:
            gpu = next(iter(self.records.values()))["gpu"]
            folders = [results / evidence.slug(gpu)]
        else:
            folders = sorted(path for path in results.iterdir() if path.is_dir())
            note("nothing was measured here: what regressed is not looked at")
            if not any(folder.glob("*.json") for folder in folders):
                folders = [results]
        found = []
        for folder in folders:
            old, said = evidence.committed(folder, _digests(), self.basenames)
            found += said
            for record in old.values():
                listed = [case.name for case in _listed_cases(record)]
                found += evidence.wanting(record, listed)
            for name, record in old.items():
                if (new := self.records.get(name)) is not None:
                    everything = (
                        new.get("complete", True)
                        and new.get("shapes") == record.get("shapes")
                        and new.get("ops") == record.get("ops")
                    )
                    found += evidence.compared(record, new, everything)
        for finding in found:
            print(finding)
        bad = sum(finding.is_bad for finding in found)
        print(f"{bad} to see to" if bad else "the committed evidence holds")
        return 1 if bad else 0


def _listed_cases(record: dict[str, Any]) -> list[Any]:
    """What a run for this record is asked for."""
    from prequal.bench import cases as lists

    return list(lists.cases_of(lists.chosen_ops([record["basename"]]), record.get("shapes", "quick")))


def _digests() -> dict[str, str]:
    """Of the sources that this prequal was built from."""
    from prequal.runtime import manifest

    return {name: op.digest for name, op in manifest.load().ops.items()}


def _no_gpu(args: argparse.Namespace) -> str | None:
    if args.device == "cpu":
        return None
    from prequal import runtime_state as state

    return state.gate.host.cuda_problem()


def _device(args: argparse.Namespace) -> Any:
    from prequal.bench import device

    return device.Host() if args.device == "cpu" else device.Cuda()


def _rows_of(extra: Any, device: Any) -> list[dict[str, Any]]:
    """What else is measured of a basename; where that fails, a row that says so: the others must be written."""
    from prequal.bench.runner import first_line

    try:
        return list(extra(device))
    except Exception as error:
        note(f"  beside its cases: FAILED, {first_line(error)}")
        return [{"case": "beside its cases", "by": {}, "failed": {"prequal": first_line(error)}}]


def _import_ms() -> float:
    code = "import time, torch; t = time.perf_counter(); import prequal; print(1e3 * (time.perf_counter() - t))"

    def once() -> float:
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    return round(min(once() for _ in range(3)), 1)


def _read(path: Path) -> list[dict[str, Any]]:
    if path.is_dir():
        return [record for file in sorted(path.glob("*.json")) for record in _read(file)]
    from prequal.bench import evidence

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("--from", "a JSON file of prequal bench", f"{path}: {error}") from None
    records = data["records"] if isinstance(data, dict) and isinstance(data.get("records"), list) else [data]
    for record in records:
        if wrong := evidence.problems(record):
            raise InputError("--from", "evidence of schema 1", f"{path}: {'; '.join(wrong[:3])}")
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line an implementation, for people; nothing that was wrong, absent or noisy is left out."""
    from prequal.bench.runner import floor_us

    lines: list[tuple[str, ...]] = [("case", "who", "device us", "IQR", "in a graph", "wall us", "of the roof", "")]
    for record in records:
        for row in record["rows"]:
            floor = floor_us(row, record["ceilings"])
            timed = {name: x for name, x in row["by"].items() if "device_us" in x}
            best = min((x["device_us"]["median"] for x in timed.values()), default=0.0)
            for name, figures in timed.items():
                spread = figures["device_us"]
                notes = ["noisy"] if figures.get("noisy") else []
                if name == "prequal" and spread["median"] > best:
                    notes.append("slower than the best of these")
                if (path := figures.get("path", "fast")) != "fast":
                    notes.append(f"by the {path}")
                if name in row.get("not_capturable", {}):
                    notes.append("cannot be captured")
                lines.append(
                    (
                        f"{row.get('op', record['basename'])}: {row['case']}",
                        name,
                        f"{spread['median']:,.1f}",
                        f"{spread['q1']:,.1f}-{spread['q3']:,.1f}",
                        _figure(figures, "graph_us") + ("" if row.get("cold", True) else " warm"),
                        _figure(figures, "wall_us"),
                        f"{floor / spread['median']:.0%}" if floor and spread["median"] else "-",
                        ", ".join(notes),
                    )
                )
            for kind in ("wrong", "failed", "absent"):
                for name, why in row.get(kind, {}).items():
                    lines.append((f"{row.get('op', '')}: {row['case']}", name, kind, "", "", "", "", why[:70]))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _figure(figures: dict[str, Any], kind: str) -> str:
    return f"{figures[kind]['median']:,.1f}" if kind in figures else "-"
