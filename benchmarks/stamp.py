"""Write what the GPU tests of a lane said into evidence that was measured on the same sources in another run of it.

usage: python benchmarks/stamp.py gpu-tests.json EVIDENCE.json...
"""

from __future__ import annotations

import json
import pathlib
import sys


def main() -> int:
    said, *paths = map(pathlib.Path, sys.argv[1:])
    tests = json.loads(said.read_text())
    for path in paths:
        record = json.loads(path.read_text())
        if tests["digests"].get(record["basename"]) != record["source_digest"] or tests["gpu"] != record["gpu"]:
            print(f"{path}: of other sources or another GPU than {said}", file=sys.stderr)
            return 1
        record["gpu_tests"] = tests["outcome"]
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
