"""A build without CUDA is pure Python, serves every Python and platform, and says why no kernel runs."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    name = os.environ.get("PREQUAL_TEST_CPU_WHEEL")
    if not name:
        pytest.skip("no CPU wheel: set PREQUAL_TEST_CPU_WHEEL, or run `nox -s tests`")
    return pathlib.Path(name)


def test_it_holds_no_binary_and_is_for_every_python(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith((".so", ".pyi"))]
    assert json.loads(zipfile.ZipFile(wheel).read("prequal/_build.json"))["cuda"] is None


def test_every_op_answers_and_says_that_there_is_no_native_module(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import json, torch, prequal
from prequal.registry import OPS
for name, op in OPS.items():
    sample = next(iter(op.samples(torch.device("cpu"))))
    getattr(prequal, name)(*sample.args)
print(json.dumps({name: rows["cpu"] for name, rows in prequal.stats().items()}))
assert prequal.explain("knn").reason == "no_native_module"
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)
    for row in json.loads(out.stdout).values():
        assert row == {"fast": 0, "reference": {"no_native_module": 1}}
