"""CUDA libraries as they are mapped into this process, whatever was installed or meant to be loaded.

A system cuBLAS found through LD_LIBRARY_PATH, or one upgraded under a running worker, shows here and nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Those whose version can change results or break loading; nccl, cufft and the like take part in no op here.
LIBRARIES = ("cublas", "cublasLt", "cudart", "cudnn", "nvrtc", "cuda", "nvidia-ml")

_FILE_NAME = re.compile(rf"lib({'|'.join(LIBRARIES)})(?:-[0-9a-f]{{8}})?\.so(?:\.([0-9.]+))?")


class LoadedLibrary(NamedTuple):
    name: str  # as in LIBRARIES
    path: str  # as mapped
    file: str  # the file's own name behind every link: libcublas.so.13.1.0.3, where its packager kept that
    version: str | None  # as the library itself says, else as far as its file name says
    replaced: bool = False  # the file mapped is no longer the one at this path


def library_name(path: str) -> str | None:
    """`cublasLt` for .../libcublasLt.so.13.1; None for a file that is not one of LIBRARIES."""
    match = _FILE_NAME.fullmatch(os.path.basename(path))
    return match[1] if match else None


def file_version(path: str) -> str | None:
    match = _FILE_NAME.fullmatch(os.path.basename(path))
    return match[2] if match else None


def read_maps(path: str = "/proc/self/maps") -> str:
    """The process's memory map; empty where the system has none to show."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def loaded(maps: str | None = None, version_of: Callable[[str, str], str | None] | None = None) -> list[LoadedLibrary]:
    """The mapped CUDA libraries, by name and path. Calls into them only to ask their version; makes no context."""
    found: dict[str, bool] = {}
    for line in (read_maps() if maps is None else maps).splitlines():
        fields = line.split(None, 5)  # address, permissions, offset, device, inode, path (which may hold blanks)
        if len(fields) < 6:
            continue
        path = fields[5].strip()
        replaced = path.endswith(" (deleted)")
        path = path.removesuffix(" (deleted)")
        if library_name(path) is not None:
            found[path] = replaced
    ask = library_version if version_of is None else version_of
    libraries = []
    for path, replaced in found.items():
        name = library_name(path) or ""
        real = path if replaced else os.path.realpath(path)
        version = ask(name, path) or file_version(real) or file_version(path)
        libraries.append(LoadedLibrary(name, path, os.path.basename(real), version, replaced))
    return sorted(libraries, key=lambda library: (library.name, library.path))


def library_version(name: str, path: str) -> str | None:
    """Ask the library at `path`, which must be loaded already: it is never loaded for the question."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):  # not loaded under that name, or a system without RTLD_NOLOAD
        return None
    # The function goes by the name of the library, not by what it answers to: a look-up in libcublas also finds
    # the functions of libcublasLt, on which it depends.
    try:
        if name in ("cublas", "cublasLt"):
            return _property_version(getattr(library, f"{name}GetProperty"))
        if name == "cudart":
            value = ctypes.c_int(0)
            if library.cudaRuntimeGetVersion(ctypes.byref(value)) != 0:
                return None
            return f"{value.value // 1000}.{value.value % 1000 // 10}"
        if name == "cudnn":
            library.cudnnGetVersion.restype = ctypes.c_size_t
            number = int(library.cudnnGetVersion())
            scale = 10000 if number >= 90000 else 1000  # cuDNN 9 widened its fields
            return f"{number // scale}.{number % scale // 100}.{number % 100}"
    except AttributeError:  # a library of that name without that function
        return None
    return None


def _property_version(get_property: Callable[..., int]) -> str | None:
    """cublasGetProperty and its like need no handle, which cublasGetVersion does, and a handle needs a context."""
    parts = []
    for which in range(3):  # libraryPropertyType: major, minor, patch
        value = ctypes.c_int(-1)
        if get_property(which, ctypes.byref(value)) != 0 or value.value < 0:
            return None
        parts.append(str(value.value))
    return ".".join(parts)
