"""The production worker of docs/: no compiler in the image that runs, and a start that qualifies once."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

DOCS = pathlib.Path(__file__).resolve().parent.parent.parent / "docs"
FAKE = """#!/bin/sh
echo "$* (lock: ${PREQUAL_LOCK-none})" >> "$LOG"
case "$1" in
  lock) exit "$EXPLAIN" ;;
  qualify) exit "$QUALIFY" ;;
esac
"""


def stages() -> list[str]:
    text = (DOCS / "Dockerfile.worker").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return re.split(r"^FROM ", "\n".join(lines), flags=re.M)[1:]


def test_only_wheels_are_installed():
    install, _ = stages()
    (command,) = re.findall(r"^RUN (.*pip install.*)$", install, re.M)
    assert "--only-binary :all:" in command


def test_the_image_that_runs_gets_the_environment_and_no_compiler():
    install, run = stages()
    assert install.startswith("${BASE} AS install\n")
    assert run.startswith("${BASE}\n")
    assert "COPY --from=install /opt/worker /opt/worker" in run
    assert not re.search(r"\b(apt-get|apk|dnf|pip) ", run)
    (check,) = re.findall(r"^RUN ! command -v ([a-z+ ]+)", run, re.M)
    assert {"cc", "gcc", "nvcc", "ninja"} <= set(check.split())
    assert re.search(r"^USER (?!root)\w+", run, re.M)
    assert "PREQUAL_POLICY=strict" in run
    assert "PREQUAL_LOCK=/var/lib/prequal/" in run


def start(tmp_path: pathlib.Path, *, explain: int, qualify: int, **environ: str) -> tuple[int, str, list[str]]:
    """Exit code, what the service printed, what prequal was asked."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    (folder / "prequal").write_text(FAKE)
    (folder / "prequal").chmod(0o755)
    log.touch()
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "PREQUAL_LOCK": "/somewhere/lock.json"}
    env |= {"EXPLAIN": str(explain), "QUALIFY": str(qualify), **environ}
    command = ["sh", str(DOCS / "start-worker.sh"), "echo", "serving", "$HOME and more"]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return out.returncode, out.stdout, log.read_text().splitlines()


EXPLAINED = "lock explain /somewhere/lock.json (lock: /somewhere/lock.json)"
QUALIFIED = "qualify --write /somewhere/lock.json (lock: none)"
SERVING = "serving $HOME and more\n"


def test_a_valid_lock_is_enough(tmp_path):
    assert start(tmp_path, explain=0, qualify=9) == (0, SERVING, [EXPLAINED])


@pytest.mark.parametrize("explain", [1, 2], ids=["stale", "absent or broken"])
def test_without_a_valid_lock_it_qualifies_and_then_serves(tmp_path, explain):
    assert start(tmp_path, explain=explain, qualify=0) == (0, SERVING, [EXPLAINED, QUALIFIED])


def test_a_worker_that_could_not_qualify_serves_by_the_reference(tmp_path):
    assert start(tmp_path, explain=2, qualify=1)[:2] == (0, SERVING)


def test_or_does_not_start_where_that_is_asked(tmp_path):
    assert start(tmp_path, explain=2, qualify=1, PREQUAL_REQUIRE="1")[:2] == (1, "")


def test_without_the_path_of_a_lock_it_does_not_start(tmp_path):
    assert start(tmp_path, explain=0, qualify=0, PREQUAL_LOCK="") == (2, "", [])
