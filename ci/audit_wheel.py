"""Look at a finished wheel from outside and say what is wrong with it.

usage: python ci/audit_wheel.py WHEEL [--budget FILE] [--update-budget] [--only AUDIT] [--json]

Exit status: 0 every audit that applies passed; 1 something is wrong; 2 an audit could not be made (a program is
missing, the file is no wheel). The budget holds, for each kernel and architecture, registers, stack and shared memory,
and the size that the wheel may have. `--update-budget` writes what this wheel has into it; the change is there to be
reviewed.
"""

from __future__ import annotations

import argparse
import base64
import csv
import dataclasses
import functools
import hashlib
import importlib.util
import io
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elf_file import Elf, NotElf
from kernel_resources import Dump, NoTool, Use, dump_of, ptx_files, resources
from wheel_file import BrokenWheel, Wheel

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUDGET = ROOT / "ci" / "budget.json"
MIB = 2**20

# Registers are handed out eight a thread at a time: less than that changes no kernel's occupancy by itself, and
# compilers differ by as much from one release to the next.
REGISTER_SLACK = 8
# Shared memory is handed out in units of 128 bytes or more.
SHARED_SLACK = 128
# What a wheel may grow by before somebody has to look: over the size that the budget was made from.
SIZE_MARGIN = 1.25

# CUDA C++ Programming Guide, technical specifications: what a block may have without asking (all of them), and the most
# that it may ask for (sharedMemPerBlockOptin), in KiB.
STATIC_SHARED = 48 * 1024
LARGEST_SHARED = {"80": 163, "86": 99, "87": 163, "89": 99, "90": 227, "100": 227, "103": 227, "110": 227, "120": 99}
REGISTER_FILE = 65536
WARP_REGISTERS = 256  # a warp's registers come in units of this

# The newest symbol versions that a platform tag stands for, by its glibc (PEP 600); those of GCC's libraries from
# auditwheel's policies. Only the tags that wheels of this project carry or may come to carry.
PLATFORM_LIMITS: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {
    (2, 17): {"GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 8, 0)},
    (2, 27): {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    (2, 28): {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    (2, 31): {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    (2, 34): {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11, 0)},
}
# What every Linux of that age has; anything else would have to be inside the wheel.
ALLOWED_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libutil)\.so\.\d|libstdc\+\+\.so\.6|libgcc_s\.so\.1|ld-linux-[\w-]+\.so\.\d"
)
# Folders that only a building machine has. `--forbid` adds to them.
BUILD_FOLDERS = (
    "/tmp/", "/var/tmp/", "/home/", "/root/", "/Users/", "/builds/", "/project/", "/workspace/", "/github/", "/__w/",
    "/host/", "/mnt/", "/opt/python/", "/opt/_internal/",
)  # fmt: skip


class NotApplicable(Exception):
    """There is nothing to audit here, and that is right."""


@dataclasses.dataclass
class Subject:
    """The wheel and what it is held against. Tests replace `dump`."""

    wheel: Wheel
    budget: dict[str, Any]
    dump: Dump
    folder: pathlib.Path  # for files that a program has to read
    forbidden: tuple[str, ...] = BUILD_FOLDERS

    @functools.cached_property
    def module(self) -> str:
        """The member that is the native module."""
        if self.wheel.manifest["cuda"] is None:
            if self.wheel.binaries:
                raise BrokenWheel(
                    f"the manifest says built without CUDA, and there is {', '.join(self.wheel.binaries)}"
                )
            raise NotApplicable("a CPU build: no native module")
        found = [name for name in self.wheel.binaries if re.fullmatch(rf"{self.wheel.name}/_native\..*so", name)]
        if len(found) != 1:
            raise BrokenWheel(f"expected one native module, found {found or 'none'}")
        return found[0]

    def extracted(self) -> pathlib.Path:
        file = self.folder / pathlib.PurePosixPath(self.module).name
        if not file.exists():
            file.write_bytes(self.wheel.members[self.module])
        return file

    def elves(self) -> Iterator[tuple[str, Elf]]:
        _ = self.module
        for name in self.wheel.binaries:
            try:
                yield name, Elf(self.wheel.members[name])
            except NotElf as error:
                raise BrokenWheel(f"{name}: {error}") from error

    @functools.cached_property
    def kernels(self) -> dict[str, dict[str, Use]]:
        _ = self.module
        return resources(self.dump)


def folders_of_this_run() -> list[str]:
    """Never right in a wheel, whatever they are called. Where Python is the system's, its folder is everybody's."""
    here = [str(ROOT), tempfile.gettempdir(), *([sys.prefix] if sys.prefix != sys.base_prefix else [])]
    return [folder for folder in here if folder.count("/") > 1]


def subject(
    path: pathlib.Path,
    folder: pathlib.Path,
    *,
    budget: dict[str, Any] | None = None,
    dump: Dump | None = None,
    forbidden: Iterable[str] = (),
) -> Subject:
    made = Subject(Wheel(path), load_budget() if budget is None else budget, dump or (lambda option: ()), folder)
    if dump is None:
        made.dump = lambda option: dump_of(made.extracted())(option)
    made.forbidden += tuple(forbidden)
    return made


# ---- the file as a whole ---------------------------------------------------------------------------------------------


def record(s: Subject) -> Iterator[str]:
    """RECORD lists every member once, with its hash and size, and nothing else."""
    names = [info.filename for info in s.wheel.infos]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name}: twice in the archive"
    for name in names:
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            yield f"{name}: a name that leads out of the folder it is unpacked in"

    own = f"{s.wheel.dist_info}/RECORD"
    rows: dict[str, list[str]] = {}
    for row in csv.reader(io.StringIO(s.wheel.read(own).decode())):
        if len(row) != 3:
            yield f"RECORD: expected name, hash, size, found {row}"
            continue
        if row[0] in rows:
            yield f"{row[0]}: twice in RECORD"
        rows[row[0]] = row
    for name in sorted(rows.keys() - s.wheel.members.keys()):
        yield f"{name}: in RECORD, not in the archive"
    for name, data in s.wheel.members.items():
        if name == own:
            continue
        if name not in rows:
            yield f"{name}: in the archive, not in RECORD"
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        _, said, size = rows[name]
        if said != f"sha256={digest}":
            yield f"{name}: RECORD has {said or 'no hash'}, the member has sha256={digest}"
        if size != str(len(data)):
            yield f"{name}: RECORD has {size or 'no size'}, the member has {len(data)} bytes"


def tag(s: Subject) -> Iterator[str]:
    """The file's name, WHEEL, METADATA and the manifest agree on name, version and tag."""
    metadata, manifest = s.wheel.metadata, s.wheel.manifest
    for what, found in {"METADATA": metadata["Version"], "the manifest": manifest["version"]}.items():
        if found != s.wheel.version:
            yield f"version: the file's name has {s.wheel.version}, {what} has {found}"
    said = set(re.findall(r"^Tag: (\S+)", s.wheel.read(f"{s.wheel.dist_info}/WHEEL").decode(), re.M))
    if said != s.wheel.tags:
        yield f"tags: the file's name has {sorted(s.wheel.tags)}, WHEEL has {sorted(said)}"

    found = f"{s.wheel.python}-{s.wheel.abi}"
    if manifest["cuda"] is None:
        if (found, s.wheel.platform) != ("py3-none", "any"):
            yield f"tag: expected py3-none-any of a CPU build, found {found}-{s.wheel.platform}"
        return
    abi = manifest["python_abi"]
    if found != (abi if "-" in abi else f"{abi}-{abi}"):
        yield f"tag: the module is for {abi}, the file's name says {found}"
    if not re.fullmatch(r"((manylinux_\d+_\d+|manylinux\d+|linux)_(x86_64|aarch64)\.?)+", s.wheel.platform):
        yield f"platform: expected linux or manylinux on x86_64 or aarch64, found {s.wheel.platform}"
    if not s.wheel.metadata["Requires-Python"]:
        yield "METADATA: expected Requires-Python, found none"


def contents(s: Subject) -> Iterator[str]:
    """Types, manifest and licence are there; sources of kernels and anybody else's files are not."""
    names = set(s.wheel.members)
    wanted = {f"{s.wheel.name}/{name}" for name in ("__init__.py", "py.typed", "_build.json")}
    if s.wheel.manifest["cuda"] is not None:
        wanted.add(f"{s.wheel.name}/_native.pyi")
    for name in sorted(wanted - names):
        yield f"{name}: missing"
    if f"{s.wheel.dist_info}/licenses/LICENSE" not in names:
        yield f"{s.wheel.dist_info}/licenses/LICENSE: missing"
    for name in sorted(names):
        if name.endswith((".cu", ".cuh", ".cpp", ".h", ".a", ".o", ".pyc")):
            yield f"{name}: does not belong into a wheel"
        if name.split("/")[0] not in (s.wheel.name, s.wheel.dist_info):
            yield f"{name}: expected only {s.wheel.name}/ and {s.wheel.dist_info}/"


def paths(s: Subject) -> Iterator[str]:
    """No member holds a path of the machine that built it."""
    folders = b"|".join(re.escape(folder.rstrip("/").encode()) for folder in sorted(set(s.forbidden)))
    # a name has to follow: two bytes of machine code may look like "/x"
    pattern = re.compile(rb"(?<![\w.:/~-])(?:" + folders + rb")/+[\w.+@-]{2,}[\w./+@-]*")
    for name, data in s.wheel.members.items():
        found = sorted({match[0].decode("ascii", "replace") for match in pattern.finditer(data)})
        if found:
            yield f"{name}: {', '.join(found[:3])}" + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def size(s: Subject) -> Iterator[str]:
    """The wheel is no larger than the budget, and that no larger than the matrix allows."""
    limit = s.budget["wheel_bytes"]
    if limit > ceiling():
        yield f"the budget allows {limit / MIB:.1f} MiB, ci/matrix.toml {ceiling() / MIB:.0f} MiB"
    if s.wheel.size > limit:
        listing = "".join(f"\n  {packed:>10,} {name}" for packed, name in largest(s.wheel))
        yield (
            f"{s.wheel.size:,} bytes, the budget has {limit:,}; if that is meant: --update-budget. "
            f"The largest members, compressed:{listing}"
        )


def largest(wheel: Wheel, count: int = 10) -> list[tuple[int, str]]:
    return sorted(((info.compress_size, info.filename) for info in wheel.infos), reverse=True)[:count]


def ceiling() -> int:
    return int(matrix()["wheel_limit_mib"] * MIB)


def sbom(s: Subject) -> Iterator[str]:
    """A CycloneDX bill of materials for this version, with a licence for whatever is inside (PEP 770)."""
    prefix = f"{s.wheel.dist_info}/sboms/"
    bills = [name for name in s.wheel.members if name.startswith(prefix) and name.endswith(".cdx.json")]
    if f"{prefix}{s.wheel.name}.cdx.json" not in bills:
        yield f"{prefix}{s.wheel.name}.cdx.json: missing"
        return
    try:
        bill = json.loads(s.wheel.members[f"{prefix}{s.wheel.name}.cdx.json"])
        about, parts = bill["metadata"]["component"], bill["components"]
        if (bill["bomFormat"], bill["specVersion"]) != ("CycloneDX", "1.6"):
            yield f"sbom: expected CycloneDX 1.6, found {bill['bomFormat']} {bill['specVersion']}"
        if (about["name"], about["version"]) != (s.wheel.name, s.wheel.version):
            yield f"sbom: expected {s.wheel.name} {s.wheel.version}, found {about['name']} {about['version']}"
        inside = {
            part["name"]: part for part in parts if {"name": "prequal:bundled", "value": "true"} in part["properties"]
        }
    except (ValueError, KeyError, TypeError) as error:
        yield f"sbom: not a bill of prequal's: {error!r}"
        return
    for name, part in inside.items():
        if not part.get("licenses"):
            yield f"sbom: {name} has no licence"
    if s.wheel.manifest["cuda"] is not None:
        for name in ("cudart_static", "nanobind"):
            if not inside.get(name, {}).get("version"):
                yield f"sbom: expected {name} with a version among what is inside, found {sorted(inside)}"


# ---- the module as a shared object -----------------------------------------------------------------------------------


def needed(s: Subject) -> Iterator[str]:
    """The module loads without torch, without a driver and without a CUDA library; it searches no folders."""
    for name, elf in s.elves():
        for library in elf.needed:
            if not ALLOWED_LIBRARIES.fullmatch(library):
                yield f"{name}: needs {library}"
        for folder in elf.search_paths:
            yield f"{name}: expected no RPATH or RUNPATH, found {folder!r}"


def versions(s: Subject) -> Iterator[str]:
    """No symbol version is newer than the platform tag promises."""
    tagged = [
        (int(a), int(b))
        for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", s.wheel.platform.replace("manylinux2014", "manylinux_2_17"))
    ]
    if s.wheel.platform != "any" and not tagged:
        raise NotApplicable(f"{s.wheel.platform} promises nothing about symbol versions")
    for name, elf in s.elves():
        glibc = min(tagged)
        policy = max((known for known in PLATFORM_LIMITS if known <= glibc), default=min(PLATFORM_LIMITS))
        limits = PLATFORM_LIMITS[policy] | {"GLIBC": glibc}
        for symbol in sorted(elf.versions):
            library, _, text = symbol.partition("_")
            if library in limits and re.fullmatch(r"[\d.]+", text):
                version = tuple(int(part) for part in text.split("."))
                if version > limits[library]:
                    newest = ".".join(str(part) for part in limits[library])
                    yield f"{name}: needs {symbol}, {s.wheel.platform} promises at most {library}_{newest}"


def exports(s: Subject) -> Iterator[str]:
    """The module offers its entry point, and nothing of cudart: two copies in one process must not meet."""
    for name, elf in s.elves():
        if name == s.module and "PyInit__native" not in elf.exported:
            yield f"{name}: expected PyInit__native among the exported symbols"
        for symbol in elf.exported:
            if symbol.startswith(("cuda", "cu", "__cuda", "nv")):
                yield f"{name}: exports {symbol}"


def abi3(s: Subject) -> Iterator[str]:
    """A module tagged abi3 uses nothing beyond the limited API of its Python."""
    module = s.module
    if s.wheel.abi != "abi3":
        raise NotApplicable(f"{s.wheel.python}-{s.wheel.abi} is for one Python")
    if importlib.util.find_spec("abi3audit") is None:
        raise NoTool("no abi3audit: `pip install abi3audit` brings one")
    oldest = re.sub(r"cp(\d)(\d+)", r"\1.\2", s.wheel.python)
    file = s.extracted()
    command = [sys.executable, "-m", "abi3audit", "--report", "--assume-minimum-abi3", oldest, str(file)]
    ran = subprocess.run(command, capture_output=True, text=True)
    try:
        result = json.loads(ran.stdout)["specs"][str(file)]["object"]["result"]
    except (ValueError, KeyError, TypeError):
        raise NoTool(f"abi3audit gave no report: {ran.stdout.strip()} {ran.stderr.strip()}") from None
    for symbol in result["non_abi3_symbols"]:
        yield f"{module}: {symbol} is not in the limited API"
    for symbol, since in result["future_abi3_objects"].items():
        if not result["is_abi3_baseline_compatible"]:
            yield f"{module}: {symbol} is in the limited API from {since} on, the tag says {oldest}"


# ---- the machine code in it ------------------------------------------------------------------------------------------


def machine_code(s: Subject) -> Iterator[str]:
    """Every kernel has machine code for exactly the architectures of the manifest, and there is no PTX."""
    wanted = s.wheel.manifest["archs"]
    if s.wheel.manifest["ptx"]:
        yield f"the manifest lists PTX for {s.wheel.manifest['ptx']}"
    if not s.kernels:
        yield f"{s.module}: no kernel"
    for kernel, uses in s.kernels.items():
        if set(uses) != set(wanted):
            yield f"{kernel}: machine code for {_listed(uses)}, the manifest says {_listed(wanted)}"
    for file in ptx_files(s.dump):
        yield f"{s.module}: holds PTX ({file})"


def limits(s: Subject) -> Iterator[str]:
    """Static shared memory, and the registers of the largest block that a kernel declares, fit the GPU."""
    for kernel, uses in s.kernels.items():
        for arch, use in uses.items():
            allowed = min(STATIC_SHARED, LARGEST_SHARED.get(arch.rstrip("af"), 48) * 1024)
            if use.shared > allowed:
                yield f"{kernel} on sm_{arch}: {use.shared} bytes of static shared memory, a block has {allowed}"
            if use.block:
                a_warp = -(-use.registers * 32 // WARP_REGISTERS) * WARP_REGISTERS
                of_block = a_warp * -(-use.block // 32)
                if of_block > REGISTER_FILE:
                    yield (
                        f"{kernel} on sm_{arch}: {use.registers} registers for {use.block} threads make {of_block}, "
                        f"a multiprocessor has {REGISTER_FILE}"
                    )


def budget(s: Subject) -> Iterator[str]:
    """No kernel uses more registers, stack or shared memory than the committed budget says."""
    kernels = s.kernels
    for kernel, uses in kernels.items():
        frames = {arch: use.frame for arch, use in uses.items() if use.frame}
        if frames and not any(re.search(pattern, kernel) for pattern in s.budget["frames"]):
            yield (
                f"{kernel}: {_per_arch(frames)} bytes of stack or local memory a thread: registers spill, or an array "
                'is indexed at run time. If that is meant, "frames" in the budget takes the kernel and the reason'
            )

    if sorted(s.wheel.manifest["archs"]) == sorted(built_archs()):
        framed = [kernel for kernel, uses in kernels.items() if any(use.frame for use in uses.values())]
        for pattern in s.budget["frames"]:
            if not any(re.search(pattern, kernel) for kernel in framed):
                yield f'"frames" in the budget: no kernel that {pattern} names has a frame; take it out'

    toolkit = s.wheel.manifest["cuda"]["toolkit"]
    if toolkit not in s.budget["toolkits"]:
        if toolkit == matrix()["default_toolkit"]:
            yield f"the budget holds nothing for CUDA {toolkit}: --update-budget"
            return
        raise NotApplicable(f"frames are right; the budget holds nothing for CUDA {toolkit} to compare with")
    allowed = s.budget["toolkits"][toolkit]
    for kernel in sorted(allowed.keys() - kernels.keys()):
        yield f"{kernel}: in the budget, not in the module; --update-budget takes it out"
    for kernel, uses in kernels.items():
        if kernel not in allowed:
            yield f"{kernel}: not in the budget; --update-budget puts it in"
            continue
        for arch, use in uses.items():
            if arch not in allowed[kernel]:
                yield f"{kernel} on sm_{arch}: not in the budget; --update-budget puts it in"
                continue
            was = Use(*allowed[kernel][arch])
            where = f"{kernel} on sm_{arch}"
            if use.registers > was.registers + REGISTER_SLACK:
                yield f"{where}: {use.registers} registers, the budget has {was.registers} + {REGISTER_SLACK}"
            if use.frame > was.frame:
                yield f"{where}: {use.frame} bytes of stack or local memory a thread, the budget has {was.frame}"
            if use.shared > was.shared + SHARED_SLACK:
                yield f"{where}: {use.shared} bytes of shared memory, the budget has {was.shared}"


def _listed(archs: Iterable[str]) -> str:
    return ", ".join(f"sm_{arch}" for arch in sorted(archs, key=lambda a: (int(re.sub(r"\D", "", a)), a))) or "nothing"


def _per_arch(values: dict[str, int]) -> str:
    if len(set(values.values())) == 1:
        return str(next(iter(values.values())))
    return ", ".join(f"{value} (sm_{arch})" for arch, value in values.items())


@functools.cache
def matrix() -> dict[str, Any]:
    return tomllib.loads((ROOT / "ci" / "matrix.toml").read_text())


def built_archs() -> list[str]:
    return [arch for arch, facts in matrix()["architectures"].items() if facts["built"]]


AUDITS: dict[str, Callable[[Subject], Iterator[str]]] = {
    audit.__name__: audit
    for audit in (
        *(record, tag, contents, paths, size, sbom),
        *(needed, versions, exports, abi3),
        *(machine_code, limits, budget),
    )
}


# ---- the budget file -------------------------------------------------------------------------------------------------


def load_budget(file: pathlib.Path = BUDGET) -> dict[str, Any]:
    empty = {"schema": 1, "wheel_bytes": 0, "frames": {}, "toolkits": {}}
    if not file.exists():
        return empty
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise BrokenWheel(f"{file.name}: not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != 1 or not empty.keys() <= found.keys():
        raise BrokenWheel(f"{file.name}: expected schema 1 with {', '.join(empty)}")
    return found


def updated_budget(s: Subject) -> dict[str, Any]:
    """The budget with this wheel's kernels and size. What a person wrote in it ("frames") stays."""
    built = built_archs()
    if sorted(s.wheel.manifest["archs"]) != sorted(built):
        raise BrokenWheel(
            f"a budget is made from a wheel for {_listed(built)}, this one is for {_listed(s.wheel.manifest['archs'])}"
        )
    measured = {
        kernel: {
            arch: [use.registers, use.frame, use.shared] for arch, use in sorted(uses.items(), key=lambda i: int(i[0]))
        }
        for kernel, uses in s.kernels.items()
    }
    room = -(-int(s.wheel.size * SIZE_MARGIN) // 65536) * 65536
    return s.budget | {
        "wheel_bytes": min(room, ceiling()),
        "toolkits": dict(sorted((s.budget["toolkits"] | {s.wheel.manifest["cuda"]["toolkit"]: measured}).items())),
    }


def budget_text(found: dict[str, Any]) -> str:
    """One line a kernel, so that a diff shows what a change of the sources did to which kernel."""
    lines = [
        "{",
        ' "schema": 1,',
        ' "about": "made by ci/audit_wheel.py --update-budget; [registers, stack, static shared] by architecture",',
        f' "wheel_bytes": {found["wheel_bytes"]},',
        ' "frames": {',
        ",\n".join(f"  {json.dumps(name)}: {json.dumps(reason)}" for name, reason in sorted(found["frames"].items())),
        " },",
        ' "toolkits": {',
    ]
    toolkits = []
    for toolkit, kernels in found["toolkits"].items():
        rows = ",\n".join(f"   {json.dumps(kernel)}: {json.dumps(uses)}" for kernel, uses in kernels.items())
        toolkits.append(f'  "{toolkit}": {{\n{rows}\n  }}')
    return "\n".join([*lines, ",\n".join(toolkits), " }", "}"]) + "\n"


# ---- the program -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    state: str  # passed, failed, not applicable, not audited
    findings: list[str]


def outcome(audit: Callable[[Subject], Iterable[str]], s: Subject) -> Outcome:
    try:
        findings = list(audit(s))
    except NotApplicable as reason:
        return Outcome("not applicable", [str(reason)])
    except NoTool as reason:
        return Outcome("not audited", [str(reason)])
    except BrokenWheel as error:
        return Outcome("failed", [str(error)])
    return Outcome("failed" if findings else "passed", findings)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--budget", type=pathlib.Path, default=BUDGET)
    parser.add_argument("--update-budget", action="store_true", help="first write what this wheel has into the budget")
    parser.add_argument("--only", action="append", choices=AUDITS, metavar="AUDIT", help=f"of {', '.join(AUDITS)}")
    parser.add_argument("--forbid", action="append", default=[], metavar="FOLDER", help="no member may name it either")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    args = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        forbidden = [*args.forbid, *folders_of_this_run()]
        try:
            s = subject(args.wheel, pathlib.Path(folder), budget=load_budget(args.budget), forbidden=forbidden)
            _ = s.wheel.manifest
            if args.update_budget:
                s.budget = updated_budget(s)
                args.budget.write_text(budget_text(s.budget))
        except (BrokenWheel, NotApplicable, NoTool, OSError) as error:
            print(f"audit_wheel: {error}", file=sys.stderr)
            return 2
        outcomes = {name: outcome(AUDITS[name], s) for name in args.only or AUDITS}

    states = {result.state for result in outcomes.values()}
    if args.json:
        report = {
            "wheel": args.wheel.name,
            "bytes": s.wheel.size,
            "audits": {name: dataclasses.asdict(result) for name, result in outcomes.items()},
            "largest": [{"bytes": packed, "name": name} for packed, name in largest(s.wheel)],
        }
        print(json.dumps(report, indent=1))
    else:
        print(f"{args.wheel.name}: {s.wheel.size:,} bytes; the largest members, compressed:")
        for packed, name in largest(s.wheel):
            print(f"  {packed:>10,} {name}")
        for name, result in outcomes.items():
            print(f"{name}: {result.state}" + "".join(f"\n  {finding}" for finding in result.findings))
    return 1 if "failed" in states else 2 if "not audited" in states else 0


if __name__ == "__main__":
    sys.exit(main())
