"""`import prequal` on machines of every kind: no CUDA context, nothing that spoils a fork, no crash, no silence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from prequal.runtime import manifest


def python(code: str, **environ: str | None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in {**os.environ, **environ}.items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "visible",
    [
        *(None, "", "-1", "0", "0,1", "7,6", "GPU-8f2c0b32", "GPU-8f2c0b32-1f2e-4a55-9a0b-0123456789ab"),
        *("MIG-8f2c0b32-1f2e-4a55-9a0b-0123456789ab", "nonsense", "0,,1", "０"),
    ],
)
def test_import_initialises_no_cuda_whatever_is_visible(visible):
    code = (
        "import torch, prequal; assert not torch.cuda.is_initialized();"
        "prequal.fingerprint().sha256; assert not torch.cuda.is_initialized();"
        "print(prequal.rms_norm(torch.ones(2, 4)).sum().item()); assert not torch.cuda.is_initialized()"
    )
    out = python(code, CUDA_VISIBLE_DEVICES=visible)
    assert out.returncode == 0, out.stderr
    assert out.stdout == "7.999996185302734\n"


def test_import_starts_no_thread_and_no_process():
    code = (
        "import os, threading, torch; before = set(os.listdir('/proc/self/task'));"
        "import prequal; assert set(os.listdir('/proc/self/task')) == before; assert threading.active_count() == 1"
    )
    out = python(code)
    assert out.returncode == 0, out.stderr


def test_a_broken_torch_is_told_at_the_first_use_with_its_cause():
    code = "import sys; sys.modules['torch'] = None; import prequal; prequal.rms_norm"
    out = python(code)
    assert out.returncode != 0
    assert "ImportError: prequal could not start (" in out.stderr
    assert "python -m prequal doctor" in out.stderr
    assert "import of torch halted" in out.stderr


def test_from_import_tells_the_same():
    out = python("import sys; sys.modules['torch'] = None; from prequal import knn")
    assert "prequal could not start (" in out.stderr


@pytest.mark.gpu
def test_a_child_forked_after_import_can_use_cuda():
    code = """
import os, torch, prequal
prequal.fingerprint()
child = os.fork()
if child == 0:
    x = torch.ones(2, 8, device="cuda")
    prequal.rms_norm(x).sum().item()
    os._exit(0 if prequal.stats()["rms_norm"]["cuda:0"]["fast"] == 1 else 7)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    out = python(code)
    assert out.returncode == 0, out.stderr


@pytest.mark.gpu
def test_no_translation_and_no_cache_is_needed(tmp_path):
    """Machine code for this GPU is in the wheel: PTX translation is off, and the driver's cache cannot be written."""
    if manifest.load().ptx:
        pytest.skip("a test build of PTX: translation is what it is for")
    code = """
import torch, prequal
from prequal.registry import OPS
device = torch.device("cuda", 0)
for name, op in OPS.items():
    if op.contract.kind == "bitwise":
        prequal.qualify(name)  # until then its reference answers
    getattr(prequal, name)(*next(iter(op.samples(device))).args)
assert all(row["fast"] for devices in prequal.stats().values() for row in devices.values()), prequal.stats()
"""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    out = python(code, CUDA_DISABLE_PTX_JIT="1", CUDA_CACHE_PATH=str(cache))
    assert out.returncode == 0, out.stderr
    assert list(cache.iterdir()) == []  # the mode stops nobody who is root
