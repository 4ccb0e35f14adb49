"""`prequal lock explain [PATH]`: is this lock valid here, and if not, which fields moved.

Exit code: 0 valid for every device here, 1 it can be read and is not valid here, 2 it cannot be read or believed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prequal.errors import LockError

from ._progress import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    line = "why a lock is or is not valid here"
    explain_parser = actions.add_parser("explain", help=line, description=line)
    explain_parser.add_argument("path", nargs="?", help="default: PREQUAL_LOCK, else prequal.lock.json")
    explain_parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    path = os.environ.get("PREQUAL_LOCK") or "prequal.lock.json" if args.path is None else args.path
    try:
        if not path:  # an empty variable of a script's, which means no other lock
            raise LockError("path: expected that of a lock, got an empty one")
        report = explain(path)
    except LockError as error:
        if args.json:
            print(json.dumps({"schema": 1, "exit_code": 2, "path": path, "problem": str(error)}, indent=2))
        note(f"prequal lock explain: {error}")
        return 2
    print(json.dumps(report, indent=2, sort_keys=True) if args.json else render(report))
    return int(report["exit_code"])


def explain(
    path: str,
    ops: Mapping[str, Any] | None = None,
    manifest: Any = None,
    devices: Sequence[int] | None = None,
    key: Callable[[int | None], Any] | None = None,
) -> dict[str, Any]:
    """The whole answer as plain data; what is not given is this process's. LockError where the file is no lock."""
    from prequal.runtime import lock as lock_file
    from prequal.runtime.gate import Qualification

    lock = lock_file.read(path)
    if ops is None or manifest is None or devices is None or key is None:
        importlib.import_module("prequal.api")  # declares every op
        from prequal import runtime_state as state

        ops = state.native_ops
        manifest = state.gate.host.manifest
        devices = state.gate.host.devices() if state.gate.host.native_problem() is None else []

        def key(device: int | None) -> Any:
            return lock_file.key_of(state.fingerprint_for_keys()) if device is None else lock_file.this_worker(device)

    moved = lock.moved(key(None))
    shown = []
    for device in devices:
        now = key(device)
        device_moved = lock.moved(now)
        answers: list[dict[str, Any]] = []
        for op in [] if device_moved else ops.values():
            said = lock.qualification(op, manifest, now)
            good = isinstance(said, Qualification) and said.problem is None
            text = said if isinstance(said, str) else said.problem or f"qualified {said.when}"
            answers.append({"op": op.name, "ok": good, "text": text})
        shown.append(
            {
                "device": f"cuda:{device}",
                "name": now.data["device"]["name"],
                "valid": not device_moved,
                "moved": _changes(device_moved),
                "ops": answers,
            }
        )
    valid = not moved and bool(shown) and all(item["valid"] for item in shown)
    return {
        "schema": 1,
        "exit_code": 0 if valid else 1,
        "path": path,
        "problem": None,
        "made": lock.made,
        "prequal": lock.version,
        "made_on": sorted({f"{entry.name}, compute capability {entry.capability}" for entry in lock.entries}),
        "ops": sorted({entry.op for entry in lock.entries}),
        "valid": valid,
        "moved": _changes(moved),
        "devices": shown,
    }


def _changes(moved: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"field": change.field, "was": change.was, "now": change.now, "text": str(change)} for change in moved]


def render(report: Mapping[str, Any]) -> str:
    lines = [
        f"{report['path']}: made {report['made']} by prequal {report['prequal']} on {'; '.join(report['made_on'])}",
        f"ops: {', '.join(report['ops'])}",
        "",
    ]
    if report["moved"]:
        lines.append("Not valid here, for whatever device. What moved since:")
        lines += _wrapped(change["text"] for change in report["moved"])
    elif not report["devices"]:
        lines.append("Nothing that needs no GPU has moved; there is no CUDA device here to compare the rest with.")
    already = {change["text"] for change in report["moved"]}
    for item in report["devices"]:
        head = f"{item['device']} ({item['name']})"
        if item["valid"]:
            lines.append(f"{head}: valid")
            lines += _wrapped(f"{answer['op']}: {answer['text']}" for answer in item["ops"])
        else:
            lines.append(f"{head}: not valid")
            lines += _wrapped(change["text"] for change in item["moved"] if change["text"] not in already)
    if not report["valid"]:
        lines += ["", "To qualify this worker and write the lock anew: prequal qualify --write " + report["path"]]
    return "\n".join(lines)


def _wrapped(texts: Any) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += textwrap.wrap(
            " ".join(text.split()), 110, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """For `python -m prequal.cli.lock`."""
    parser = argparse.ArgumentParser(prog="prequal lock")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
