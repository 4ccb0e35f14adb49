"""Write what the GPU tests of lanes said into evidence that was measured on the same sources in another run of them.

usage: python benchmarks/stamp.py [--lane gpu-tests.json]... EVIDENCE.json...

Lanes in the order that they ran. The last one that ran an op's tests speaks for its record, and must have done so on
the sources and the GPU of the record. What failed in any lane counts until a later lane has run it again: against the
op that it names, in its file's name or its parameters, or against the ops that its folder is about; what names none,
against all.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

# Folders of tests that are about some ops, and name them in few places.
FOLDERS = {
    "losses": {"cross_entropy"},
    "retrieval": {"topk_rows", "topk_products", "row_norms", "pairwise_distance"},
}


def named_by(test: str, basenames: Collection[str]) -> set[str]:
    """The basenames that a test's id names, the longest where one begins like another; else those of its folder."""
    found = set()
    for word in re.findall(r"\w+", test):
        plain = word.removeprefix("test_")
        fitting = [name for name in basenames if plain == name or plain.startswith(f"{name}_")]
        if fitting:
            found.add(max(fitting, key=len))
    return found or FOLDERS.get(test.partition("/")[0], set())


def counts_against(test: str, basename: str, basenames: Collection[str]) -> bool:
    named = named_by(test, basenames)
    return not named or basename in named


def has_run(lane: dict[str, Any], name: str) -> bool:
    return lane["only"] is None or any(word in name for word in lane["only"])


def outcome(lanes: Sequence[dict[str, Any]], record: dict[str, Any]) -> str:
    """Raises ValueError where no lane speaks of these sources."""
    basename = record["basename"]
    spoke = [lane for lane in lanes if has_run(lane, basename)]
    if not spoke:
        raise ValueError(f"no lane ran the tests of {basename}")
    if spoke[-1]["digests"].get(basename) != record["source_digest"] or spoke[-1]["gpu"] != record["gpu"]:
        raise ValueError(f"{basename}: of other sources or another GPU than the lane's")
    failed: set[str] = set()
    for lane in lanes:
        failed = {test for test in failed if not has_run(lane, test)} | set(lane["failed"])
        if lane["outcome"] != "passed" and not lane["failed"]:
            raise ValueError(f"a lane's outcome is {lane['outcome']!r}, and it names no test that failed")
    against = [test for test in failed if counts_against(test, basename, spoke[-1]["digests"])]
    return "failed" if against else "passed"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", action="append", required=True, type=pathlib.Path)
    parser.add_argument("evidence", nargs="+", type=pathlib.Path)
    args = parser.parse_args(words)
    lanes = [json.loads(path.read_text()) for path in args.lane]
    for path in args.evidence:
        record = json.loads(path.read_text())
        try:
            record["gpu_tests"] = outcome(lanes, record)
        except ValueError as error:
            parser.error(f"{path}: {error}")
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
