"""The GPU lane runs the tests in several processes side by side: none is left out, and none runs twice."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SHARDS = 3


def collected(shard: str | None) -> list[str]:
    where = ["test_every_op.py", "ops/test_quantize_fp8.py", "-k", "fp8 and not dequantize"]
    out = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *where],
        cwd=HERE,
        env={k: v for k, v in os.environ.items() if k != "PREQUAL_TEST_SHARD"}
        | ({"PREQUAL_TEST_SHARD": shard} if shard else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in out.stdout.splitlines() if "::" in line]


def test_every_test_is_in_one_shard_and_an_ops_samples_and_the_large_ones_are_together():
    whole = collected(None)
    parts = [collected(f"{i}/{SHARDS}") for i in range(SHARDS)]
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert all(parts)
    for what in ("test_two_runs_give_the_same_bits[swiglu_quantize_fp8-", "test_rows_past_two_to_the_31_elements"):
        holding = [sum(what in name for name in part) for part in parts]
        assert max(holding) == sum(holding) > 1
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) < len(whole) / SHARDS
