"""`python -m prequal doctor`: what this installation needs, what it found, and which path every op takes.

Standard library only at module level: it is for the day on which torch or the native module cannot be imported.
Exit code: 0 all ops on the fast path, 1 something on its reference, 2 broken (torch, the native module, the build
manifest or the lock cannot be read, the ops cannot be listed, or --verify found a file that is not the wheel's).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prequal.runtime import loaded as loaded_libraries
from prequal.runtime import manifest as build_manifest
from prequal.runtime.fingerprint import Fingerprint, TorchInfo, collect, libc_name, read_torch
from prequal.runtime.loaded import LoadedLibrary
from prequal.runtime.manifest import Manifest
from prequal.runtime.nvml import Nvml

MINIMUM_PYTHON = "3.11"
MINIMUM_TORCH = "2.7"
WIDTH = 100

_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Requirement:
    name: str
    wanted: str
    found: str
    ok: bool | None  # None: not known, or asked by nobody
    note: str = ""


@dataclass(frozen=True)
class ImportProblem:
    """Why a library did not load, read from what the loader said."""

    kind: str  # missing_library, glibc_too_old, undefined_symbol, python_abi, corrupt, other
    text: str
    wanted: str
    found: str
    advice: str


@dataclass(frozen=True)
class NativeModule:
    state: str  # loaded, absent, broken
    files: tuple[str, ...]
    problem: ImportProblem | None = None


@dataclass(frozen=True)
class InstalledLibrary:
    name: str  # as in loaded.LIBRARIES
    path: str
    distribution: str
    version: str


@dataclass(frozen=True)
class Verification:
    state: str  # ok, mismatch, unavailable
    checked: int
    problems: tuple[str, ...]
    unlisted: tuple[str, ...]
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--verify", action="store_true", help="compare the installed files with the wheel's RECORD")


def run(args: argparse.Namespace) -> int:
    # Whatever an import prints belongs to nobody's JSON.
    with contextlib.redirect_stdout(sys.stderr):
        report = gather(verify_files=args.verify)
    print(json.dumps(report, indent=2, sort_keys=True, default=str) if args.json else render(report))
    return int(report["exit_code"])


def gather(
    verify_files: bool = False,
    nvml: Nvml | None = None,
    environ: Mapping[str, str] | None = None,
    torch_info: TorchInfo | None = None,
    manifest: Manifest | None = None,
    native: NativeModule | None = None,
    loaded: Sequence[LoadedLibrary] | None = None,
    installed: Sequence[InstalledLibrary] | None = None,
    rows: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
    lock: Callable[[], Mapping[str, Any] | None] | None = None,
) -> dict[str, Any]:
    """The whole report as plain data. What is not given is read from this machine."""
    torch_info = read_torch() if torch_info is None else torch_info  # first: it loads the libraries looked at below
    manifest = build_manifest.load() if manifest is None else manifest
    fingerprint = collect(nvml, environ, torch_info)
    installed = installed_libraries() if installed is None else installed
    native = native_module(installed=installed) if native is None else native
    shown_rows, rows_problem = _rows(_gate_rows if rows is None else rows)
    shown_lock = _lock(_gate_lock if lock is None else lock)
    loaded = loaded_libraries.loaded() if loaded is None else loaded
    verification = verify() if verify_files else None

    broken = []
    if torch_info.problem is not None:
        broken.append("torch cannot be imported")
    if native.state == "broken":
        broken.append("the native module is present and cannot be imported")
    if manifest.problem is not None:
        broken.append("the build manifest cannot be read")
    if verification is not None and verification.state == "mismatch":
        broken.append("installed files are not the wheel's")
    if rows_problem is not None:
        broken.append("the ops cannot be listed")
    if shown_lock is not None and shown_lock["problem"] is not None:
        broken.append("the lock cannot be read")
    slow = [row for row in shown_rows if row.get("path") != "fast"]
    if broken:
        exit_code, verdict = 2, "broken: " + "; ".join(broken)
    elif slow or not shown_rows:
        exit_code, verdict = 1, f"{len(slow)} of {len(shown_rows)} paths are on their reference"
    else:
        exit_code, verdict = 0, f"all {len(shown_rows)} paths are fast"

    torch_problem = explain(torch_info.problem, installed) if torch_info.problem is not None else None
    return {
        "schema": 1,
        "exit_code": exit_code,
        "verdict": verdict,
        "requirements": [asdict(item) for item in requirements(fingerprint, manifest, native)],
        "torch": {**torch_info._asdict(), "problem": asdict(torch_problem) if torch_problem else None},
        "native": asdict(native),
        "manifest_problem": manifest.problem,
        "libraries": {
            "loaded": [library._asdict() for library in loaded],
            "installed": [asdict(library) for library in installed],
            "findings": library_findings(loaded, installed, torch_info.cuda),
        },
        "rows": shown_rows,
        "rows_problem": rows_problem,
        "lock": shown_lock,
        "verify": asdict(verification) if verification else None,
        "fingerprint": fingerprint.data,
        "fingerprint_sha256": fingerprint.sha256,
    }


# Requirements


def requirements(fingerprint: Fingerprint, manifest: Manifest, native: NativeModule) -> list[Requirement]:
    data = fingerprint.data
    found = [_python(manifest), _libc(wheel_glibc(_distribution()))]
    found += _torch(data["torch"], manifest)
    if manifest.problem is not None:
        found.append(Requirement("build manifest", "readable", "not readable", False, manifest.problem))
    found.append(_native(native, manifest))
    if manifest.problem is None and manifest.cuda is None:
        found.append(Requirement("GPU", "nothing: built without CUDA", "-", None))
        return found
    found.append(_driver(data["driver"], manifest))
    found += _gpus(data["gpus"], manifest)
    return found


def _python(manifest: Manifest) -> Requirement:
    name = {"cpython": "CPython"}.get(sys.implementation.name, sys.implementation.name)
    version = sys.version_info[:2]
    abi = re.fullmatch(r"cp3(\d+)(-abi3)?", manifest.python_abi or "")
    if abi is None:
        wanted, ok = f">= {MINIMUM_PYTHON}", version >= _version(MINIMUM_PYTHON)
    elif abi[2]:
        wanted, ok = f"CPython >= 3.{abi[1]} ({manifest.python_abi})", version >= (3, int(abi[1]))
    else:
        wanted, ok = f"CPython 3.{abi[1]} ({manifest.python_abi})", version == (3, int(abi[1]))
    return Requirement(
        "Python", wanted, f"{name} {platform.python_version()}", ok and (abi is None or name == "CPython")
    )


def _libc(wanted: str | None) -> Requirement:
    name, version = libc_name()
    found = f"{name} {version}" if name else "no glibc"
    if wanted is None:
        return Requirement("glibc", "nothing: no manylinux wheel", found, None)
    return Requirement("glibc", f">= {wanted}", found, version is not None and _version(version) >= _version(wanted))


def _torch(torch: Mapping[str, Any], manifest: Manifest) -> list[Requirement]:
    wanted = f">= {MINIMUM_TORCH}"
    if torch["problem"] is not None:
        return [Requirement("torch", wanted, "not importable", False, torch["problem"])]
    found = [Requirement("torch", wanted, torch["version"], _version(torch["version"]) >= _version(MINIMUM_TORCH))]
    if manifest.cuda is not None:
        major = manifest.cuda.toolkit.split(".")[0]
        cuda = torch["cuda"]
        ok = cuda is not None and cuda.split(".")[0] == major
        found.append(Requirement("torch's CUDA", f"{major}.x", cuda or "none: torch is built without CUDA", ok))
    return found


def _native(native: NativeModule, manifest: Manifest) -> Requirement:
    if native.state == "loaded":
        return Requirement("native module", "importable", "imported", True)
    if native.problem is not None:
        problem = native.problem
        note = f"{problem.text}. Wanted: {problem.wanted}. Found: {problem.found}. {problem.advice}"
        return Requirement("native module", "importable", f"broken: {problem.kind}", False, note)
    if manifest.problem is None and manifest.cuda is None:
        return Requirement("native module", "nothing: built without CUDA", "absent", None)
    return Requirement("native module", "importable", "absent", False, f"no _native*.so in {_PACKAGE_FOLDER}")


def _driver(driver: Mapping[str, Any], manifest: Manifest) -> Requirement:
    minimum = manifest.cuda.minimum_driver if manifest.cuda else None
    wanted = f">= {minimum}" if minimum else "unknown"
    if driver["version"] is None:
        return Requirement("driver", wanted, "unknown", None, driver["problem"] or "")
    ok = None if minimum is None else _version(driver["version"]) >= _version(minimum)
    return Requirement("driver", wanted, driver["version"], ok)


def _gpus(gpus: Mapping[str, Any], manifest: Manifest) -> list[Requirement]:
    built = ", ".join(f"sm_{arch}" for arch in manifest.archs) or "unknown"
    if gpus["state"] == "unknown":
        return [Requirement("GPU", built, "unknown", None, gpus["note"])]
    if gpus["count"] == 0:
        return [Requirement("GPU", built, "none", False, gpus["note"])]
    found = []
    for index, gpu in enumerate(gpus["visible"]):
        arch = gpu["capability"].replace(".", "")
        # Not known which of several kinds of GPU this process will use: say what each would mean.
        name = f"GPU {index}" if gpus["state"] == "known" else f"a GPU (NVML's {gpu['index']})"
        ok = None if not manifest.archs else arch in {built_arch.rstrip("af") for built_arch in manifest.archs}
        found.append(Requirement(name, built, f"sm_{arch}, {gpu['name']}", ok))
    if gpus["state"] == "unordered":
        found.append(Requirement("GPU order", "known", "unknown", None, gpus["note"]))
    return found


def wheel_glibc(distribution: importlib.metadata.Distribution | None) -> str | None:
    """The oldest glibc that the installed wheel's tags allow; None without a manylinux tag."""
    text = (distribution.read_text("WHEEL") if distribution else None) or ""
    named = {"manylinux2014": "2.17", "manylinux2010": "2.12", "manylinux1": "2.5"}
    versions = [f"{major}.{minor}" for major, minor in re.findall(r"^Tag:.*manylinux_(\d+)_(\d+)_", text, re.M)]
    versions += [named[tag] for tag in re.findall(r"^Tag:.*(manylinux(?:2014|2010|1))_", text, re.M)]
    return min(versions, key=_version, default=None)


# The native module


def native_module(
    load: Callable[[], object] | None = None,
    folders: Iterable[str | os.PathLike[str]] | None = None,
    installed: Sequence[InstalledLibrary] = (),
) -> NativeModule:
    if folders is None:
        folders = list(dict.fromkeys([str(_PACKAGE_FOLDER), *getattr(sys.modules.get("prequal"), "__path__", ())]))
    files = tuple(str(file) for folder in folders for file in sorted(Path(folder).glob("_native*.so")))
    try:
        (load or _import_native)()
    except ModuleNotFoundError as error:
        if not files:
            return NativeModule("absent", ())
        if not any(
            Path(file).name == f"_native{end}" for file in files for end in importlib.machinery.EXTENSION_SUFFIXES
        ):
            return NativeModule("broken", files, _wrong_tag(files, str(error)))
        return NativeModule("broken", files, explain(f"{type(error).__name__}: {error}", installed))
    except Exception as error:  # a module's start-up may raise anything; it is broken all the same
        return NativeModule("broken", files, explain(f"{type(error).__name__}: {error}", installed))
    return NativeModule("loaded", files)


def _import_native() -> object:
    return importlib.import_module("prequal._native")


def _wrong_tag(files: Sequence[str], text: str) -> ImportProblem:
    return ImportProblem(
        "python_abi",
        text,
        f"_native with one of {', '.join(importlib.machinery.EXTENSION_SUFFIXES)}",
        ", ".join(Path(file).name for file in files),
        "The wheel was built for another Python: install prequal with the Python that runs it.",
    )


def explain(text: str, installed: Sequence[InstalledLibrary] = ()) -> ImportProblem:
    """What an ImportError's text means: kind, wanted, found, and what to do."""
    python = f"{sys.implementation.name} {platform.python_version()}"
    if match := re.search(r"version [`'](GLIBC\w*_[\w.]+)' not found", text):
        libc, version = libc_name()
        library = "the C++ runtime (libstdc++)" if match[1].startswith("GLIBCXX") else "glibc"
        found = f"{libc} {version}" if libc and library == "glibc" else f"an older {library}"
        advice = f"Use a system with a newer {library}, or a build for this one."
        return ImportProblem("glibc_too_old", text, match[1], found, advice)
    if match := re.search(r"(lib[^\s:/]+\.so[^\s:/]*): cannot open shared object file", text):
        name = loaded_libraries.library_name(match[1])
        others = [f"{item.path} ({item.distribution} {item.version})" for item in installed if item.name == name]
        if name == "cuda":
            advice = "It comes with the NVIDIA driver, and with nothing from a package index."
        else:
            advice = "Install the package that carries it; another major version of it will not do."
        return ImportProblem("missing_library", text, match[1], ", ".join(others) or "no such library", advice)
    if match := re.search(r"undefined symbol: (\w+)", text):
        if match[1].startswith(("Py", "_Py")):
            advice = "The module was built for another Python: install prequal with the Python that runs it."
            return ImportProblem("python_abi", text, f"a Python that has {match[1]}", python, advice)
        advice = "Two builds are mixed: install the packages that came together, each into the same environment."
        return ImportProblem("undefined_symbol", text, match[1], "libraries without it", advice)
    if re.search(r"[Pp]ython version mismatch|compiled for Python|incompatible.*interpreter", text):
        advice = "Install prequal with the Python that runs it."
        return ImportProblem("python_abi", text, "the Python it was built for", python, advice)
    if re.search(r"invalid ELF|file too short|wrong ELF class|ELF load command|ELF file|module export function", text):
        advice = "The file is damaged or for another machine: `prequal doctor --verify`, then reinstall."
        machine = f"{platform.system()} {platform.machine()}"
        return ImportProblem("corrupt", text, f"a shared library for {machine}", "another kind of file", advice)
    if re.search(r"not installed|No module named|None in sys.modules", text):
        return ImportProblem("missing_module", text, "an importable module", "none", "Install it.")
    return ImportProblem("other", text, "a clean import", "an error", "The text is all there is to go by.")


# Libraries: loaded versus installed


def installed_libraries(
    distributions: Iterable[importlib.metadata.Distribution] | None = None,
) -> list[InstalledLibrary]:
    """CUDA libraries that NVIDIA's packages brought into this environment."""
    found = []
    for distribution in importlib.metadata.distributions() if distributions is None else distributions:
        package = str(distribution.metadata["Name"] or "")
        if not package.startswith("nvidia-"):
            continue
        for file in distribution.files or ():
            if name := loaded_libraries.library_name(file.name):
                path = os.path.realpath(str(distribution.locate_file(file)))
                found.append(InstalledLibrary(name, path, package, str(distribution.version)))
    return sorted(set(found), key=lambda library: (library.name, library.path))


def library_findings(
    loaded: Sequence[LoadedLibrary], installed: Sequence[InstalledLibrary], torch_cuda: str | None
) -> list[str]:
    """What is odd about the loaded libraries, a sentence each."""
    findings = []
    for library in loaded:
        ours = [item for item in installed if item.name == library.name]
        if ours and os.path.realpath(library.path) not in {item.path for item in ours}:
            instead = ", ".join(f"{item.distribution} {item.version} ({item.path})" for item in ours)
            findings.append(
                f"lib{library.name} {library.version or ''} is loaded from {library.path} and shadows {instead}: "
                "look at LD_LIBRARY_PATH and LD_PRELOAD"
            )
        if library.replaced:
            findings.append(f"{library.path} was replaced after this process loaded it: restart the process")
        major = (library.version or "").split(".")[0]
        # These two carry CUDA's own major version.
        if library.name in ("cudart", "cublas") and torch_cuda and major and major != torch_cuda.split(".")[0]:
            findings.append(f"lib{library.name} {library.version} is loaded, torch is built for CUDA {torch_cuda}")
    for name in sorted({library.name for library in loaded}):
        paths = [library.path for library in loaded if library.name == name]
        if len(paths) > 1:
            findings.append(f"lib{name} is loaded {len(paths)} times: {', '.join(paths)}")
    return findings


# Installed files against the wheel's RECORD


def verify(
    distribution: importlib.metadata.Distribution | None = None, package: str | os.PathLike[str] | None = None
) -> Verification:
    """Compare every hashed file of the installed wheel; `package` is the folder that Python imported."""
    distribution = _distribution() if distribution is None else distribution
    if distribution is None:
        return _cannot("prequal is not installed: this is a source tree")
    if _editable(distribution):
        return _cannot("an editable install: its files are those of the source tree")
    # Not `distribution.files`: from Python 3.12 on it leaves out the files that are missing.
    record = [row for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()) if len(row) == 3]
    if not record:
        return _cannot("the installed prequal has no RECORD")
    imported = Path(_PACKAGE_FOLDER if package is None else package).resolve()
    recorded = Path(str(distribution.locate_file("prequal"))).resolve()
    if imported != recorded:
        return _cannot(f"prequal was imported from {imported}, and the one installed is {recorded}")

    problems, checked, listed = [], 0, set()
    for file, hashed, _ in record:
        path = Path(str(distribution.locate_file(file)))
        listed.add(path.resolve())
        if not hashed:  # RECORD itself, and compiled Python files
            continue
        checked += 1
        if (problem := _compare(path, *hashed.partition("=")[::2])) is not None:
            problems.append(f"{file}: {problem}")
    # A file that the wheel did not bring can still be imported, a native module left over from before above all.
    extra = (path for path in recorded.rglob("*") if path.suffix in (".py", ".so") and path.resolve() not in listed)
    unlisted = tuple(sorted(path.relative_to(recorded.parent).as_posix() for path in extra))
    note = f"{checked} files compared with RECORD, {len(problems)} differ, {len(unlisted)} are not in it"
    return Verification("mismatch" if problems else "ok", checked, tuple(problems), unlisted, note)


def _compare(path: Path, mode: str, expected: str) -> str | None:
    if mode not in hashlib.algorithms_guaranteed or mode in ("md5", "sha1") or mode.startswith("shake"):
        return f"hash {mode}: expected sha256 or better"
    try:
        digest = hashlib.new(mode, path.read_bytes()).digest()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error}"
    found = base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
    return None if found == expected else f"changed: expected {mode} {expected}, found {found}"


def _cannot(note: str) -> Verification:
    return Verification("unavailable", 0, (), (), f"cannot verify: {note}")


def _editable(distribution: importlib.metadata.Distribution) -> bool:
    try:
        return bool(json.loads(distribution.read_text("direct_url.json") or "{}")["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):
        return False


def _distribution() -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution("prequal")
    except importlib.metadata.PackageNotFoundError:
        return None


# Ops


def _gate_rows() -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = importlib.import_module("prequal.runtime.gate").rows()
    return rows


def _gate_lock() -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = importlib.import_module("prequal.runtime.lock").summary()
    return found


def _lock(read: Callable[[], Mapping[str, Any] | None]) -> dict[str, Any] | None:
    try:
        found = read()
    except Exception as error:  # as with the rows, which say the same; of interest where a lock was asked for
        path = os.environ.get("PREQUAL_LOCK")
        return {"path": path, "problem": f"{type(error).__name__}: {error}", "devices": {}} if path else None
    return None if found is None else dict(found)


def _rows(read: Callable[[], Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, Any]], str | None]:
    try:
        return [dict(row) for row in read()], None
    except Exception as error:  # without torch, or with any part broken; the rest of the report must still come out
        return [], f"{type(error).__name__}: {error}"


# For people


def render(report: Mapping[str, Any]) -> str:
    build = report["fingerprint"]["prequal"]
    about = f"prequal {build['version'] or '(no build)'}"
    if build["commit"]:
        about += f", commit {build['commit'][:12]}"
    if build["nvcc"]:
        about += f", nvcc {build['nvcc']}"
    lines = [about, "", "Requirements"]
    marks = {True: "ok", False: "NO", None: "?"}
    needs = [[marks[item["ok"]], item["name"], item["wanted"], item["found"]] for item in report["requirements"]]
    lines += _table(["", "", "wanted", "found"], needs)
    lines += _wrapped(f"{item['name']}: {item['note']}" for item in report["requirements"] if item["note"])

    libraries = report["libraries"]
    if libraries["loaded"]:
        lines += ["", "CUDA libraries in this process"]
        shown = [[f"lib{item['name']}", item["version"] or "?", item["path"]] for item in libraries["loaded"]]
        lines += _table(["library", "version", "loaded from"], shown)
        lines += _wrapped(libraries["findings"])

    lines += ["", "Ops"]
    if report["rows"]:
        columns = ("op", "device", "path", "reason", "contract", "qualified")
        lines += _table(list(columns), [[_cell(row.get(name)) for name in columns] for row in report["rows"]])
        details = [f"{row.get('op')}: {row['detail']}" for row in report["rows"] if row.get("detail")]
        lines += _wrapped(dict.fromkeys(details))
    else:
        lines += _wrapped([report["rows_problem"] or "none is registered"])

    if report["lock"] is not None:
        lines += ["", "Lock", *_wrapped(_about_lock(report["lock"]))]

    if report["verify"] is not None:
        lines += ["", "Installed files", *_wrapped([report["verify"]["note"]])]
        lines += _wrapped(report["verify"]["problems"])
        lines += _wrapped(f"{name}: not in RECORD" for name in report["verify"]["unlisted"])
    lines += ["", *textwrap.wrap(report["verdict"], WIDTH), f"fingerprint {report['fingerprint_sha256']}"]
    return "\n".join(lines)


def _about_lock(lock: Mapping[str, Any]) -> list[str]:
    if lock["problem"] is not None:
        return [lock["problem"]]
    devices = lock["devices"].items()
    good = ", ".join(device for device, problem in devices if problem is None)
    lines = [f"{lock['path']}: valid on {good}"] if good else []
    lines += [f"{device}: {problem}" for device, problem in devices if problem is not None]
    return lines or [f"{lock['path']}: read, and there is no device here to compare it with"]


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "-"
    return str(value)


def _wrapped(texts: Iterable[str]) -> list[str]:
    lines = []
    for text in texts:
        lines += textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Aligned columns within WIDTH: the widest are narrowed, and what does not fit goes on in the next line."""
    gap = 2
    everything = [head, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]
    while sum(widths) + gap * len(widths) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in everything:
        cells = [
            textwrap.wrap(cell, max(width, 1), break_on_hyphens=False) or [""]
            for cell, width in zip(row, widths, strict=True)
        ]
        for number in range(max(map(len, cells))):
            parts = [
                (cell[number] if number < len(cell) else "").ljust(w) for cell, w in zip(cells, widths, strict=True)
            ]
            lines.append(("  " + "  ".join(parts)).rstrip())
    return lines


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def main(argv: Sequence[str] | None = None) -> int:
    """For `python -m prequal.cli.doctor`."""
    parser = argparse.ArgumentParser(prog="prequal doctor", description="Say what is wanted, what was found, and why.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
