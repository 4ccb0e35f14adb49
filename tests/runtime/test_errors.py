"""The exceptions of prequal cross a process boundary whole: a worker pool that cannot unpickle one breaks."""

from __future__ import annotations

import pickle

import pytest

import prequal
from prequal.registry import OPS


@pytest.mark.parametrize(
    "error",
    [
        prequal.FallbackError("knn", "cuda:0", "no_cuda", "why"),
        prequal.LockError("lock: broken"),
        prequal.UnknownOpError("disable", "knnn", OPS),
        prequal.StaleIndexError("references", {"version": (0, 1)}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_it_survives_a_pickle(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


@pytest.mark.parametrize("variable", ["PREQUAL_POLICY", "PREQUAL_DISABLE", "PREQUAL_STRICT"])
@pytest.mark.parametrize("command", ["doctor", "qualify", "transfer-labels"])
def test_a_wrong_variable_is_a_sentence_and_exit_2(variable, command):
    import os
    import subprocess
    import sys

    words = [sys.executable, "-m", "prequal", command, *(["demo:knot", "--out", "x.ply"] if command[0] == "t" else [])]
    out = subprocess.run(words, env={**os.environ, variable: "nonsense"}, capture_output=True, text=True, check=False)
    assert out.returncode == 2
    assert variable in out.stdout + out.stderr
    assert "Traceback" not in out.stderr


def test_a_reader_that_leaves_is_no_traceback():
    import subprocess
    import sys

    command = f"{sys.executable} -m prequal doctor | head -n 1"
    out = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert out.stdout.startswith("prequal ")
    assert "Traceback" not in out.stderr
    assert "Exception" not in out.stderr


def test_explain_takes_the_public_function_and_refuses_what_is_no_op():
    assert prequal.explain(prequal.knn) == prequal.explain("knn")
    with pytest.raises(TypeError, match="op: expected the name of an op, got int"):
        prequal.explain(3)
    with pytest.raises(ValueError, match="device: expected cpu or cuda, got meta"):
        prequal.explain("knn", device="meta")
