"""Measure ops on this GPU and write evidence, a JSON file a basename: `prequal bench` as the GPU lane calls it.

usage: python benchmarks/run.py --out DIR [--ops rms_norm,knn] [--quick] [--gpu-tests passed]

The harness, the shapes and the peers are in the package (prequal.bench), so that an installed wheel measures itself.
"""

from __future__ import annotations

import argparse

from prequal.cli import main as prequal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--ops")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpu-tests", default="not run", help="what the GPU tests of these sources said")
    args = parser.parse_args()
    words = ["bench", "--out", args.out, "--gpu-tests", args.gpu_tests, "--shapes", "quick" if args.quick else "full"]
    return prequal([*words, *(["--ops", args.ops] if args.ops else [])])


if __name__ == "__main__":
    raise SystemExit(main())
