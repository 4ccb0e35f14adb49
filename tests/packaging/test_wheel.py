"""The wheel that was built, looked at from outside: what it holds, what it needs, what it says of itself.

PREQUAL_TEST_WHEEL names it; `nox -s tests` and `nox -s wheel` set that.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
MIB = 2**20


@pytest.fixture(scope="session")
def path() -> pathlib.Path:
    name = os.environ.get("PREQUAL_TEST_WHEEL")
    if not name:
        pytest.skip("no wheel: set PREQUAL_TEST_WHEEL, or run `nox -s tests` or `nox -s wheel`")
    return pathlib.Path(name)


@pytest.fixture(scope="session")
def wheel(path: pathlib.Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


@pytest.fixture(scope="session")
def manifest(wheel: zipfile.ZipFile) -> dict:
    return json.loads(wheel.read("prequal/_build.json"))


@pytest.fixture(scope="session")
def module(wheel: zipfile.ZipFile, manifest: dict, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if manifest["cuda"] is None:
        pytest.skip("a CPU build: no native module")
    (name,) = [n for n in wheel.namelist() if re.fullmatch(r"prequal/_native\..*so", n)]
    return pathlib.Path(wheel.extract(name, tmp_path_factory.mktemp("wheel")))


@functools.cache
def cuobjdump() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [str(p) for root in roots for p in root.glob("cu*/bin/cuobjdump")]
    return found[0] if found else shutil.which("cuobjdump")


def dumped(option: str, module: pathlib.Path) -> str:
    if cuobjdump() is None:
        pytest.skip("no cuobjdump")
    return subprocess.run([cuobjdump(), option, str(module)], check=True, capture_output=True, text=True).stdout


def test_it_is_small(path):
    assert path.stat().st_size < 8 * MIB


def test_the_tag_says_which_pythons_it_serves(path, manifest):
    tag = path.stem.split("-", 2)[2]
    if manifest["cuda"] is None:
        assert tag == "py3-none-any"
    elif manifest["python_abi"] == "cp312-abi3":
        assert tag.startswith(("cp312-abi3-linux", "cp312-abi3-manylinux"))
    else:
        assert tag.startswith(f"{manifest['python_abi']}-{manifest['python_abi']}-")


def test_record_lists_every_member_with_its_hash(wheel):
    import base64
    import csv
    import io

    (record,) = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(wheel.read(record).decode()))}
    members = {name for name in wheel.namelist() if not name.endswith("/")}
    assert set(rows) == members
    for name in members - {record}:
        digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
        assert rows[name] == f"sha256={digest}", name


def test_it_carries_types_a_manifest_and_its_licence_and_no_sources_of_kernels(wheel, manifest):
    names = set(wheel.namelist())
    wanted = {"prequal/__init__.py", "prequal/py.typed", "prequal/_build.json"}
    if manifest["cuda"] is not None:
        wanted.add("prequal/_native.pyi")
    assert wanted <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".cu", ".cuh", ".cpp", ".h", ".a", ".o"))]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"prequal"}


def test_the_manifest_tells_version_commit_compiler_and_the_digest_of_every_op(wheel, manifest):
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    version = re.search(r"^Version: (.+)$", wheel.read(metadata).decode(), re.M)[1]
    assert manifest["schema"] == 1
    assert manifest["version"] == version
    if (REPOSITORY / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}", manifest["commit"])
    ops = {file.stem for file in (REPOSITORY / "python/prequal/ops").glob("[!_]*.py")}
    assert set(manifest["ops"]) == ops
    assert all(re.fullmatch(r"[0-9a-f]{64}", op["digest"]) for op in manifest["ops"].values())


def test_it_holds_the_machine_code_that_was_asked_for_and_no_ptx(manifest, module):
    assert manifest["ptx"] == []
    assert manifest["sass_source"] == "cuobjdump"
    asked = os.environ.get("PREQUAL_CUDA_ARCHS", "80;86;89;90").split(";")
    assert manifest["archs"] == asked
    assert re.search(r"\.ptx", dumped("--list-ptx", module)) is None


def test_every_kernel_has_code_for_every_architecture(manifest, module):
    kernels: dict[str, set[str]] = {arch: set() for arch in manifest["archs"]}
    arch = None
    for line in dumped("-res-usage", module).splitlines():
        if found := re.search(r"arch = sm_(\d+)", line):
            arch = found[1]
        elif (found := re.search(r"Function (\S+):", line)) and "prequal" in found[1]:
            # the name of an anonymous namespace holds a hash of the file, the same for all architectures
            kernels[arch].add(found[1])
    first = next(iter(kernels.values()))
    assert len(first) > 20
    assert all(found == first for found in kernels.values())


def test_no_kernel_spills_registers(module):
    """The search of the kNN tree keeps its stack in local memory on purpose; nothing else may have a frame."""
    name = None
    frames = {}
    for line in dumped("-res-usage", module).splitlines():
        if found := re.search(r"Function (\S+):", line):
            name = found[1]
        elif (found := re.search(r"STACK:(\d+)", line)) and int(found[1]) and "prequal" in name:
            frames[name] = int(found[1])
    assert not {n: size for n, size in frames.items() if not re.search(r"search_kernel|gather_kernel", n)}


def test_it_needs_neither_torch_nor_a_cuda_library_to_load(module):
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    text = subprocess.run(["readelf", "-d", str(module)], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
    assert needed
    assert not [name for name in needed if re.match(r"lib(torch|c10|cuda|cudart|cublas|nvrtc|python)", name)]
    assert "RPATH" not in text
    assert "RUNPATH" not in text


def test_nothing_but_the_module_is_exported(module):
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    text = subprocess.run(
        ["nm", "-D", "--defined-only", str(module)], check=True, capture_output=True, text=True
    ).stdout
    names = [line.split()[-1] for line in text.splitlines()]
    assert "PyInit__native" in names
    assert not [name for name in names if name.startswith(("cuda", "cu", "__cuda"))]


def test_it_imports_where_nothing_else_is_installed(module):
    """No torch, no driver, no CUDA: the native module must load, or doctor could not say why the rest does not."""
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
