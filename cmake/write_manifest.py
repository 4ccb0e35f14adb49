"""Write `_build.json`, the wheel's account of itself: what was built, by what, for which GPUs, from which sources.

What the binary holds is read from the finished module with cuobjdump, and a module that does not hold exactly the
machine code that was asked for, or holds PTX, fails the build. Standard library only: it runs inside the build.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import re
import subprocess

# The oldest driver branch that runs a toolkit of this major, by NVIDIA's minor-version compatibility.
MINIMUM_DRIVER = {12: "525", 13: "580"}


def output(*command: str | pathlib.Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def digest(files: list[pathlib.Path], root: pathlib.Path) -> str:
    total = hashlib.sha256()
    root = root.resolve()
    for file in sorted(files):
        total.update(file.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


# Lists of all ops, which every new op changes: the linker and the generic tests hold them to their definitions.
CONTENTS = ("src/ops.h", "src/module.cpp")


def with_includes(files: list[pathlib.Path], source: pathlib.Path) -> set[pathlib.Path]:
    """The files and every header of this repository that they reach."""
    found: set[pathlib.Path] = set()
    reached = list(files)
    while reached:
        file = reached.pop()
        if file in found or file.relative_to(source).as_posix() in CONTENTS:
            continue
        found.add(file)
        for name in re.findall(r'^\s*#\s*include "(.+)"', file.read_text(), re.M):
            places = [folder / name for folder in (file.parent, source / "include", source / "src", source / "src/ops")]
            inside = next((place.resolve() for place in places if place.is_file()), None)
            if inside is None:
                raise FileNotFoundError(f"{file}: the included file {name} is nowhere in the sources")
            reached.append(inside)
    return found


def op_sources(source: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """For each basename, the files that decide what its fast path computes: another op's are not among them."""
    source = source.resolve()
    boundary = [source / "src/binding.h"]
    python = [*source.glob("python/prequal/ops/_[!_]*.py")]
    found = {}
    ops = sorted(source.glob("python/prequal/ops/[!_]*.py"))

    def belongs(unit: pathlib.Path, name: str) -> bool:
        """To the op of the longest name that it begins with: rms_norm_quantize_fp8.cu is not one of rms_norm's."""
        return max((op.stem for op in ops if f"{unit.stem}_".startswith(f"{op.stem}_")), key=len, default="") == name

    units = sorted(source.glob("src/ops/*.cu*"))
    for file in ops:
        native = [unit for unit in units if unit.suffix == ".cu" and belongs(unit, file.stem)]
        used = [helper for helper in python if re.search(rf"\b{helper.stem}\b", file.read_text())]
        while more := [
            h for h in python if h not in used and any(re.search(rf"\b{h.stem}\b", u.read_text()) for u in used)
        ]:
            used += more
        found[file.stem] = sorted({file, *used, *with_includes([*boundary, *native], source)})
    return found


def release_evidence(source: pathlib.Path, digests: dict[str, str]) -> dict[str, list[str]]:
    """Compute capabilities on which these very sources passed the GPU tests, by basename."""
    covered: dict[str, set[str]] = {}
    for file in sorted(source.glob("benchmarks/results/*/*.json")):
        record = json.loads(file.read_text())
        name = record.get("basename")
        if name in digests and record.get("source_digest") == digests[name] and record.get("gpu_tests") == "passed":
            covered.setdefault(name, set()).add(str(record["capability"]).replace(".", ""))
    return {name: sorted(found) for name, found in covered.items()}


def git_state(source: pathlib.Path) -> tuple[str | None, bool | None]:
    if not (source / ".git").exists():
        return None, None  # an sdist
    try:
        commit = output("git", "-C", source, "rev-parse", "HEAD").strip()
        return commit, bool(output("git", "-C", source, "status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.CalledProcessError):
        return None, None


def machine_code(cuobjdump: str, module: pathlib.Path) -> tuple[list[str], list[str]]:
    """(SASS architectures, PTX architectures) inside the module."""

    def found(option: str) -> list[str]:
        names = re.findall(r"\.sm_(\d+[af]?)\.", output(cuobjdump, option, module))
        return sorted(set(names), key=lambda name: (int(name.rstrip("af")), name))

    return found("--list-elf"), found("--list-ptx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--version")
    parser.add_argument("--module", type=pathlib.Path)
    parser.add_argument("--nvcc")
    parser.add_argument("--cuobjdump")
    parser.add_argument("--archs", default="")
    parser.add_argument("--abi-soabi", default="")
    args = parser.parse_args()

    version = args.version or re.search(r'^version = "(.+)"', (args.source / "pyproject.toml").read_text(), re.M)[1]
    commit, dirty = git_state(args.source)
    sources = op_sources(args.source)
    digests = {name: digest(files, args.source) for name, files in sources.items()}
    evidence = release_evidence(args.source, digests)
    manifest: dict[str, object] = {
        "schema": 1,
        "version": version,
        "commit": commit,
        "dirty": dirty,
        "python_abi": None,
        "cuda": None,
        "archs": [],
        "ptx": [],
        "sass_source": "declared",
        "ops": {name: {"digest": digests[name], "evidence": evidence.get(name, [])} for name in digests},
        "source_digest": digest(sorted({file for files in sources.values() for file in files}), args.source),
    }

    if args.module:
        release, build = re.search(r"release (\d+\.\d+), V([\d.]+)", output(args.nvcc, "--version")).groups()
        manifest["cuda"] = {
            "toolkit": release,
            "nvcc": build,
            "minimum_driver": MINIMUM_DRIVER[int(release.split(".")[0])],
        }
        tag = re.search(r"\.cpython-(\d+)", args.abi_soabi)
        manifest["python_abi"] = f"cp{tag[1]}" if tag else "cp312-abi3"
        manifest["archs"] = args.archs.split(",")
        if args.cuobjdump:
            manifest["archs"], manifest["ptx"] = machine_code(args.cuobjdump, args.module)
            manifest["sass_source"] = "cuobjdump"
            if not manifest["ptx"] and sorted(manifest["archs"]) != sorted(args.archs.split(",")):
                raise SystemExit(f"the module holds machine code for {manifest['archs']}, asked for {args.archs}")

    args.out.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
