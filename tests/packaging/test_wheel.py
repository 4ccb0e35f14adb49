"""The wheel that was built, looked at from outside: what it holds, what it needs, what it says of itself.

PREQUAL_TEST_WHEEL names it; `nox -s tests` and `nox -s wheel` set that. What an audit of ci/audit_wheel.py asks is
asked through it, so that the program and these tests cannot come to differ; test_audit.py shows each audit failing.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPOSITORY / "ci")]  # programs, no package

import audit_wheel
from audit_wheel import AUDITS, NotApplicable, NoTool, Subject


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    name = os.environ.get("PREQUAL_TEST_WHEEL")
    if not name:
        pytest.skip("no wheel: set PREQUAL_TEST_WHEEL, or run `nox -s tests` or `nox -s wheel`")
    made = audit_wheel.subject(
        pathlib.Path(name), tmp_path_factory.mktemp("wheel"), forbidden=audit_wheel.folders_of_this_run()
    )
    assert made.wheel.manifest["schema"] == 1
    return made


@pytest.fixture(scope="session")
def manifest(subject: Subject) -> dict:
    return subject.wheel.manifest


def holds(audit: str, subject: Subject) -> None:
    try:
        assert list(AUDITS[audit](subject)) == []
    except (NotApplicable, NoTool) as reason:
        pytest.skip(str(reason))


def test_record_lists_every_member_with_its_hash_and_size(subject):
    holds("record", subject)


def test_name_tag_metadata_and_manifest_agree(subject):
    holds("tag", subject)


def test_it_carries_types_a_manifest_and_its_licence_and_no_sources_of_kernels(subject):
    holds("contents", subject)


def test_no_path_of_the_building_machine_is_in_it(subject):
    holds("paths", subject)


def test_it_is_within_its_budget_of_bytes(subject):
    holds("size", subject)


def test_it_carries_a_bill_of_materials(subject):
    holds("sbom", subject)


def test_it_needs_neither_torch_nor_a_cuda_library_to_load_and_searches_no_folder(subject):
    holds("needed", subject)


def test_it_asks_no_newer_system_than_its_tag_promises(subject):
    holds("versions", subject)


def test_nothing_of_cudart_is_exported(subject):
    holds("exports", subject)


def test_it_keeps_to_the_limited_api_of_its_tag(subject):
    holds("abi3", subject)


def test_every_kernel_has_machine_code_for_every_architecture_and_there_is_no_ptx(subject):
    holds("machine_code", subject)


def test_every_kernel_fits_every_gpu_it_is_for(subject):
    holds("limits", subject)


def test_no_kernel_spills_or_takes_more_registers_or_shared_memory_than_its_budget(subject):
    holds("budget", subject)


def test_every_audit_is_asked_here():
    asked = re.findall(r'^    holds\("(\w+)"', pathlib.Path(__file__).read_text(), re.M)
    assert sorted(asked) == sorted(AUDITS)


def test_the_manifest_tells_commit_compiler_and_the_digest_of_every_op(manifest):
    if (REPOSITORY / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}", manifest["commit"])
    ops = {file.stem for file in (REPOSITORY / "python/prequal/ops").glob("[!_]*.py")}
    assert set(manifest["ops"]) == ops
    assert all(re.fullmatch(r"[0-9a-f]{64}", op["digest"]) for op in manifest["ops"].values())


def test_it_holds_the_machine_code_that_was_asked_for(subject, manifest):
    if manifest["cuda"] is None:
        pytest.skip("a CPU build: no native module")
    assert manifest["sass_source"] == "cuobjdump"
    assert manifest["archs"] == os.environ.get("PREQUAL_CUDA_ARCHS", "80;86;89;90").split(";")
    try:
        assert len(subject.kernels) > 20
    except NoTool as reason:
        pytest.skip(str(reason))


def test_it_imports_where_nothing_else_is_installed(subject, manifest):
    """No torch, no driver, no CUDA: the native module must load, or doctor could not say why the rest does not."""
    if manifest["cuda"] is None:
        pytest.skip("a CPU build: no native module")
    module = subject.extracted()
    name = module.name
    tag = re.search(r"cpython-3(\d+)", name)
    if tag and int(tag[1]) != sys.version_info[1]:
        pytest.skip(f"{name} is for another Python")
    if "abi3" in name and sys.version_info < (3, 12):
        pytest.skip("abi3 of 3.12 on an older Python")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import _native; print(_native.ops())"
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(module.parent)], check=True, capture_output=True, text=True
    )
    assert "rms_norm" in out.stdout
