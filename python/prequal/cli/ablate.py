"""`prequal ablate MODULE:CALLABLE`: what each op is worth in a workload of yours.

Exit code: 0 done, 1 no fast path served it, 2 wrong use, 3 the workload raised (its traceback is on stderr), 130 at
Ctrl-C (with enough rounds, the report is written).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._progress import InputError, note
from .bench import check_file, check_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="MODULE:CALLABLE", help="or FILE.py:CALLABLE; a call is an iteration")
    parser.add_argument("--factory", action="store_true", help="call it once: what it returns is the iteration")
    parser.add_argument("--ops", metavar="OP,OP", help="candidates; default: every op whose fast path serves")
    parser.add_argument("--rounds", metavar="N", type=int, default=20)
    parser.add_argument("--iterations", metavar="N", type=int, default=1, help="timed together; more for short ones")
    parser.add_argument("--json", metavar="FILE", help="write the report; - is stdout, instead of the table")
    parser.add_argument("--chart", metavar="DIR", help="draw ablation.png and .svg there (prequal[bench])")


def run(args: argparse.Namespace) -> int:
    from prequal.bench import evidence
    from prequal.bench.ablate import NothingServed, NotMeasurable, ablate
    from prequal.errors import UnknownOpError
    from prequal.registry import find

    try:
        if args.iterations < 1:
            raise InputError("--iterations", "at least 1", str(args.iterations))
        if args.chart is not None and importlib.util.find_spec("matplotlib") is None:
            raise InputError("--chart", "matplotlib (pip install 'prequal[bench]')", "a Python without it")
        check_file("--json", args.json)
        if args.chart is not None:
            check_folder("--chart", args.chart)
        ops = None if args.ops is None else [find(word.strip()).name for word in args.ops.split(",") if word.strip()]
        workload = read_workload(args.workload)
    except (InputError, UnknownOpError) as error:
        note(f"prequal ablate: {error}")
        return 2
    try:
        if args.factory:
            workload = workload()
            if not callable(workload):
                raise InputError("--factory", "a function that returns a callable", type(workload).__name__)
        report = ablate(
            workload, name=args.workload, ops=ops, rounds=args.rounds, iterations=args.iterations, progress=note
        )
    except (InputError, NotMeasurable) as error:
        note(f"prequal ablate: {error}")
        return 1 if isinstance(error, NothingServed) else 2
    except KeyboardInterrupt:
        note("prequal ablate: interrupted before there were rounds enough for an interval")
        return 130
    except (Exception, SystemExit) as error:  # a script that ends the process has no report either
        traceback.print_exc()
        if isinstance(error, SystemExit):
            note("prequal ablate: the workload ended the process (SystemExit)")
        return 3
    if args.json == "-":
        print(json.dumps(report.data(), indent=1))
    else:
        print(report.table())
        if args.json is not None:
            evidence.write(Path(args.json), report.data())
            note(f"wrote {args.json}")
    if args.chart is not None:
        from prequal.bench import charts

        Path(args.chart).mkdir(parents=True, exist_ok=True)
        for path in charts.save(charts.ablation(report.data()), Path(args.chart) / "ablation"):
            note(f"drew {path}")
    return 0 if report.complete else 130


def read_workload(source: str) -> Callable[[], Any]:
    place, colon, name = source.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise InputError("MODULE:CALLABLE", "MODULE:CALLABLE or FILE.py:CALLABLE", source)
    try:
        if place.endswith(".py"):
            # a name that is nobody else's: the file may be called random.py
            spec = importlib.util.spec_from_file_location(f"_workload_{Path(place).stem}", place)
            if spec is None or spec.loader is None:
                raise ImportError(f"{place} is no Python file")
            module = importlib.util.module_from_spec(spec)
            sys.path.insert(0, str(Path(place).resolve().parent))  # as `python FILE.py` has it, for what lies beside
            sys.modules[spec.name] = module  # dataclasses, for one, look there
            spec.loader.exec_module(module)
        else:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())  # as `python -m` does; the installed script does not
            module = importlib.import_module(place)
        found = getattr(module, name)
    except Exception as error:  # the caller's code; what it raises is what is wrong with it
        raise InputError("MODULE:CALLABLE", "a callable", f"{source}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise InputError("MODULE:CALLABLE", "a callable", f"{type(found).__name__} at {source}")
    return found
