"""Wheels made by hand: small, right in every respect that an audit looks at, and easy to break in one."""

from __future__ import annotations

import base64
import hashlib
import json
import pathlib
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

ARCHS = ("80", "86", "89", "90")
MODULE = "prequal/_native.abi3.so"
# One kernel as nvcc names it, in the words of cuobjdump.
KERNEL = "_ZN7prequal3ops38_GLOBAL__N__33be34da_6_knn_cu_9fb13d0913search_kernelILi32EEEvNS1_5CloudEiPfPl"
READABLE = "prequal::ops::knn.cu::search_kernel<32>"
ENTRY_POINT = "int PyInit__native(void) { return 0; }"


def make_wheel(
    folder: pathlib.Path,
    *,
    module: bytes | None = None,
    members: Mapping[str, bytes | str | None] | None = None,
    manifest: Mapping[str, Any] | None = None,
    version: str = "1.0",
    build: str = "",
    tag: str | None = None,
    toolkit: str = "13.0",
) -> pathlib.Path:
    """With a module: a CUDA build for the Python of its tag. `members` adds, replaces or (None) leaves out."""
    tag = tag or ("py3-none-any" if module is None else "cp312-abi3-manylinux_2_28_x86_64")
    info = f"prequal-{version}.dist-info"
    python, abi, _ = tag.split("-")
    told = {
        "schema": 1,
        "version": version,
        "commit": "0" * 40,
        "dirty": False,
        "python_abi": f"{python}-{abi}" if abi == "abi3" else python,
        "cuda": None if module is None else {"toolkit": toolkit, "nvcc": f"{toolkit}.88", "minimum_driver": "580"},
        "archs": [] if module is None else list(ARCHS),
        "ptx": [],
        "sass_source": "cuobjdump",
        "ops": {},
        "source_digest": "0" * 64,
    }
    told |= manifest or {}
    pure = str(module is None).lower()
    tags = "".join(f"Tag: {python}-{abi}-{platform}\n" for platform in tag.split("-")[2].split("."))
    content: dict[str, bytes | str | None] = {
        "prequal/__init__.py": f'__version__ = "{version}"\n',
        "prequal/py.typed": "",
        "prequal/_build.json": json.dumps(told),
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: prequal\nVersion: {version}\nRequires-Python: >=3.11\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: {pure}\n{tags}",
        f"{info}/licenses/LICENSE": "as you like",
        f"{info}/sboms/prequal.cdx.json": json.dumps(bill(version, bundled=module is not None)),
    }
    if module is not None:
        content |= {MODULE: module, "prequal/_native.pyi": ""}
    content |= members or {}
    record = f"{info}/RECORD"
    if record not in content:
        content[record] = record_of({name: data for name, data in content.items() if data is not None}, record)

    path = folder / f"{'-'.join(filter(None, ['prequal', version, build, tag]))}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            if data is not None:
                archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return path


def record_of(content: Mapping[str, bytes | str], record: str) -> str:
    rows = []
    for name, data in content.items():
        data = data.encode() if isinstance(data, str) else data
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    return "".join([*rows, f"{record},,\n"])


def bill(version: str, *, bundled: bool) -> dict[str, Any]:
    inside = [
        {
            "name": name,
            "version": "1",
            "licenses": [{"license": {"name": "as you like"}}],
            "properties": [{"name": "prequal:bundled", "value": "true"}],
        }
        for name in ("cudart_static", "nanobind")
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": {"name": "prequal", "version": version}},
        "components": inside if bundled else [],
    }


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler")
    return found


def shared_object(folder: pathlib.Path, source: str = ENTRY_POINT, *options: str, name: str = "m.so") -> bytes:
    """A shared object of a few lines of C, for breaking audits with real binaries."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "m.c").write_text(source)
    command = [compiler(), "-shared", "-fPIC", "-w", "-s", "-o", name, "m.c", *options]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return (folder / name).read_bytes()


def cuobjdump(
    *,
    kernels: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None,
    ptx: Iterable[str] = (),
    blocks: Mapping[str, int] | None = None,
) -> Callable[[str], list[str]]:
    """Answers as cuobjdump does: {architecture: {kernel: {"REG": 32, ...}}}."""
    usual = {arch: {KERNEL: {"REG": 32}} for arch in ARCHS}

    def dump(option: str) -> list[str]:
        lines: list[str] = []
        for arch, uses in (usual if kernels is None else kernels).items():
            lines += ["Fatbin elf code:", "================", f"arch = sm_{arch}", "code version = [1,8]", ""]
            for kernel, use in uses.items():
                if option == "-res-usage":
                    full = {"REG": 32, "STACK": 0, "SHARED": 0, "LOCAL": 0, "CONSTANT[0]": 560} | dict(use)
                    lines += [f" Function {kernel}:", "  " + " ".join(f"{key}:{value}" for key, value in full.items())]
                elif option == "-elf" and kernel in (blocks or {}):
                    lines += [f".nv.info.{kernel}", "\tAttribute:\tEIATTR_MAX_THREADS", "\tFormat:\tEIFMT_SVAL"]
                    lines += [f"\tValue:\t{blocks[kernel]:#x} 0x1 0x1 "]
        if option == "--list-ptx":
            return [f"PTX file    1: {name}" for name in ptx]
        return lines

    return dump
