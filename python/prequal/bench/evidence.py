"""Evidence files, `<results>/<gpu>/<basename>.json`: written whole or not at all, read with their schema checked, and
held against each other. docs/make_tables.py and cmake/write_manifest.py read the same files."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .stats import Spread, change

SCHEMA = 1
SPREADS = ("device_us", "wall_us", "graph_us", "host_us")
_TEXTS = {
    "basename": r"[a-z_0-9]+",
    "gpu": r".+",
    "capability": r"(\d+\.\d+)?",
    "source_digest": r"([0-9a-f]{64})?",
    "gpu_tests": r"passed|failed|not run",
    "command": r".+",
}


def problems(record: Any) -> list[str]:
    """What keeps it from being evidence of this schema."""
    if not isinstance(record, dict):
        return ["expected a JSON object"]
    found = []
    if record.get("schema") != SCHEMA:
        found.append(f"schema: expected {SCHEMA}, got {record.get('schema')!r}")
    for key, pattern in _TEXTS.items():
        value = record.get(key)
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            found.append(f"{key}: expected text like {pattern}, got {value!r}")
    objects = ("fingerprint", "ceilings")
    found += [f"{key}: expected an object" for key in objects if not isinstance(record.get(key), dict)]
    rows = record.get("rows")
    if not isinstance(rows, list):
        return [*found, "rows: expected a list"]
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("case"), str) or not isinstance(row.get("by"), dict):
            found.append(f"rows[{number}]: expected an object with case and by")
            continue
        for name, figures in row["by"].items():
            if not isinstance(figures, dict):
                found.append(f"rows[{number}].by[{name}]: expected an object")
                continue
            found += [
                f"rows[{number}].by[{name}].{kind}: expected median, q1 <= median <= q3, runs"
                for kind in SPREADS
                if kind in figures and not _is_spread(figures[kind])
            ]
    return found


def _is_spread(value: Any) -> bool:
    try:
        spread = Spread.read(value)
    except (KeyError, TypeError, ValueError):
        return False
    return spread.q1 <= spread.median <= spread.q3 and spread.runs > 0


def load(path: Path) -> dict[str, Any]:
    """Raises ValueError that names the file and what is wrong with it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if wrong := problems(record):
        raise ValueError(f"{path}: {'; '.join(wrong[:3])}")
    return dict(record)


def write(path: Path, data: Any) -> None:
    """The whole file or the old one: a benchmark is stopped at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1, sort_keys=True) + "\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def slug(gpu: str) -> str:
    """The folder of a GPU's evidence: `NVIDIA H200` is h200."""
    words = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return re.sub(r"^(nvidia-)?(geforce-)?", "", words) or "unknown"


@dataclass(frozen=True)
class Finding:
    """One thing that `--check` has to say. `kind`: stale, missing, regressed, wrong, faster, noisy or broken."""

    kind: str
    where: str
    what: str

    @property
    def is_bad(self) -> bool:
        return self.kind not in ("faster", "noisy")

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


def committed(
    folder: Path, digests: Mapping[str, str], wanted: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """The evidence in one GPU's folder, by basename, and what is missing, broken or stale in it."""
    records: dict[str, dict[str, Any]] = {}
    found = []
    for name in dict.fromkeys(wanted):
        path = folder / f"{name}.json"
        if not path.exists():
            found.append(Finding("missing", name, f"no {path.name} in {folder.name}/"))
            continue
        try:
            record = load(path)
        except ValueError as error:
            found.append(Finding("broken", name, str(error)))
            continue
        records[name] = record
        if record["source_digest"] != digests.get(name):
            found.append(Finding("stale", name, "measured on other sources than these"))
        if record.get("complete") is False:
            found.append(Finding("missing", name, "the run that made it was stopped before its end"))
    return records, found


def what_failed(row: Mapping[str, Any]) -> str | None:
    """Why our answer has no time in this row; None where it has."""
    return row.get("wrong", {}).get("prequal") or row.get("failed", {}).get("prequal")


def wanting(record: Mapping[str, Any], listed: Iterable[str]) -> list[Finding]:
    """What a record says against itself: cases of its list that it does not have, answers that were wrong, tests that
    failed."""
    name, rows = record["basename"], {row["case"]: row for row in record["rows"]}
    found = [
        Finding("missing", f"{name}, {case}", "in the list of cases, not in the committed evidence")
        for case in dict.fromkeys(listed)
        if case not in rows
    ]
    for case, row in rows.items():
        if why := what_failed(row):
            found.append(Finding("wrong", f"{name}, {case}", why))
    if record["gpu_tests"] == "failed":
        found.append(Finding("wrong", name, "the GPU tests of its sources failed"))
    return found


def compared(old: Mapping[str, Any], new: Mapping[str, Any], complete: bool = True) -> list[Finding]:
    """What moved between two records of one basename on one GPU: our own times, beyond both interquartile ranges.

    A noisy time is said to be noisy, not to have moved. `complete`: the new run was asked for every case."""
    name = old["basename"]
    if old["gpu"] != new["gpu"]:
        return [Finding("missing", name, f"measured on {old['gpu']}, this is {new['gpu']}")]
    found = []
    before = {row["case"]: row for row in old["rows"]}
    after = {row["case"]: row for row in new["rows"]}
    for case, row in after.items():
        where = f"{name}, {case}"
        if why := what_failed(row):
            found.append(Finding("wrong", where, why))
        if case not in before:
            found.append(Finding("missing", where, "not in the committed evidence"))
            continue
        was, now = before[case]["by"].get("prequal"), row["by"].get("prequal")
        if not was or not now or "device_us" not in was or "device_us" not in now:
            continue
        a, b = Spread.read(was["device_us"]), Spread.read(now["device_us"])
        verdict = change(a, b)
        text = f"{a.median:,.1f} us [{a.q1:,.1f}, {a.q3:,.1f}] before, {b.median:,.1f} [{b.q1:,.1f}, {b.q3:,.1f}] now"
        if was.get("noisy") or now.get("noisy"):
            found.append(Finding("noisy", where, text))
        elif verdict != "same":
            found.append(Finding("regressed" if verdict == "slower" else "faster", where, text))
    if complete:
        found += [
            Finding("missing", f"{name}, {case}", "in the committed evidence, not measured now")
            for case in before
            if case not in after
        ]
    return found
