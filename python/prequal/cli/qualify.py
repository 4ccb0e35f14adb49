"""`prequal qualify`: run every op's two paths on this worker, compare them, and write a lock for its equals.

Exit code: 0 all qualified, 1 an op failed or was not finished, 2 wrong use, or nothing here to qualify.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._progress import InputError, note

_JSON_LIMIT = 4 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", metavar="OP,OP", help="default: every op")
    parser.add_argument("--devices", metavar="N,N", help="CUDA devices as this process numbers them; default: all")
    parser.add_argument(
        "--cases",
        metavar="SOURCE",
        help="your own calls: a JSON file of shapes, or MODULE:FUNCTION or FILE.py:FUNCTION that returns a mapping "
        "from op to cases",
    )
    parser.add_argument("--budget", metavar="S", type=float, help="start no new case after S seconds")
    parser.add_argument("--write", metavar="LOCK", help="write what was found to this file, say prequal.lock.json")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    api = importlib.import_module("prequal.api")
    from prequal.errors import LockError
    from prequal.runtime.qualify import TensorSpec

    try:
        # before an hour of work, not after it
        if args.write is not None:
            _check_target(args.write)
        cases = None if args.cases is None else read_cases(args.cases, TensorSpec)
        with Progress() as progress:
            report = api.qualify(
                ops=_listed(args.ops, "--ops"),
                devices=_listed(args.devices, "--devices"),
                cases=cases,
                budget_s=args.budget,
                progress=progress.step,
            )
    except (InputError, TypeError, ValueError) as error:
        note(f"prequal qualify: {error}")
        return 2
    print(report.json() if args.json else report.table())
    if args.write is not None and report.rows:
        try:
            report.write_lock(args.write)
        except LockError as error:
            note(f"prequal qualify: {error}")
            return max(1, report.exit_code)
        note(f"wrote {args.write}")
    return int(report.exit_code)


def _listed(text: str | None, argument: str) -> list[str] | None:
    if text is None:
        return None
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise InputError(argument, "names with commas between them", repr(text))
    return found


def _check_target(path: str) -> None:
    if not path:
        raise InputError("--write", "the path of a file", "an empty one")
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        raise InputError("--write", "a file", f"{path}, which is a folder")
    if not os.path.isdir(folder):
        raise InputError("--write", "a file in a folder that exists", path)
    if not os.access(folder, os.W_OK):
        raise InputError("--write", "a file in a folder that can be written to", path)


# ---- the caller's cases ----------------------------------------------------------------------------------------------


def read_cases(source: str, spec: Any) -> Mapping[str, Any]:
    """A mapping from op to cases, as `prequal.qualify` takes it."""
    if source.endswith(".json"):
        return _json_cases(source, spec)
    place, colon, name = source.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise InputError("--cases", "FILE.json, MODULE:FUNCTION or FILE.py:FUNCTION", source)
    try:
        module = _from_file(place) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name)()
    except Exception as error:  # the caller's code; what it raises is what is wrong with it
        raise InputError(
            "--cases", "a function that returns cases", f"{source}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Mapping):
        raise InputError("--cases", "a mapping from op to cases", f"{type(found).__name__} from {source}")
    return found


def _from_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _json_cases(path: str, spec: Any) -> Mapping[str, Any]:
    """{"op": [{"name": "...", "args": [...], "kwargs": {...}}, [argument, ...]]}; {"shape": [...]} is a tensor."""
    try:
        if os.path.getsize(path) > _JSON_LIMIT:
            raise InputError("--cases", f"at most {_JSON_LIMIT:,} bytes of JSON", path)
        root = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("--cases", "a JSON file", f"{path}: {error}") from None
    if not isinstance(root, dict):
        raise InputError("--cases", "a JSON object from op to cases", f"{type(root).__name__} in {path}")

    def value(item: Any, where: str) -> Any:
        if isinstance(item, list):
            return [value(part, where) for part in item]
        if not isinstance(item, dict):
            return item
        unknown = item.keys() - {"shape", "dtype", "stride", "high"}
        if "shape" not in item or unknown:
            raise InputError("--cases", f"{where}: a tensor as shape, dtype, stride, high", json.dumps(item))
        try:
            return spec(**item)
        except ValueError as error:
            raise InputError("--cases", f"{where}: a tensor", str(error)) from None

    found: dict[str, list[Any]] = {}
    for op, cases in root.items():
        if not isinstance(cases, list):
            raise InputError("--cases", f"{op}: a list of cases", type(cases).__name__)
        found[op] = []
        for place, case in enumerate(cases):
            where = f"{op}[{place}]"
            if isinstance(case, list):
                case = {"args": case}
            if not isinstance(case, dict) or case.keys() - {"name", "args", "kwargs"}:
                raise InputError("--cases", f"{where}: a list of arguments, or name, args and kwargs", json.dumps(case))
            args, kwargs = case.get("args", []), case.get("kwargs", {})
            if not isinstance(args, list) or not isinstance(kwargs, dict):
                raise InputError("--cases", f"{where}: args as a list, kwargs as an object", json.dumps(case))
            made = Case(
                str(case.get("name", f"case {place}")),
                tuple(value(item, where) for item in args),
                {name: value(item, where) for name, item in kwargs.items()},
            )
            found[op].append(made)
    return found


class Case:
    def __init__(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs


# ---- progress --------------------------------------------------------------------------------------------------------


class Progress:
    """On stderr: a terminal gets a line that rewrites itself; a log one an op, and one a while within a long op."""

    def __init__(self, interval: float = 5.0) -> None:
        self._terminal = sys.stderr.isatty()
        self._interval = 0.1 if self._terminal else interval
        self._next = time.monotonic() + self._interval
        self._open_line = False

    def step(self, step: Any) -> None:
        row = step.row
        if row is not None:
            self._clear()
            note(
                f"[{step.done}/{step.total}] {row.op} on cuda:{row.device}: {row.outcome}, {row.cases} cases, "
                f"{row.seconds:.2f} s"
            )
            return
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + self._interval
        line = f"[{step.done}/{step.total}] {step.op} on cuda:{step.device}: case {step.number}, {step.case}"
        if self._terminal:
            sys.stderr.write(f"\r\033[K{line[:110]}")
            sys.stderr.flush()
            self._open_line = True
        else:
            note(line)

    def _clear(self) -> None:
        if self._open_line:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
            self._open_line = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()
