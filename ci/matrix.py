"""The build matrix: ci/matrix.toml, read, derived from, and held against everything that repeats it.

usage: python ci/matrix.py COMMAND

  cells [--cell NAME]...      JSON for a workflow's strategy.matrix: a cell each
  gpu                         JSON for a workflow's strategy.matrix: a GPU runner each
  env CELL [--local]          KEY=VALUE lines that make cibuildwheel build this cell (--local: no image is named)
  docs [--check]              the tables of docs/install.md
  check                       pyproject.toml, CMakeLists.txt, cmake/write_manifest.py against the matrix
  check-toolkit               in a build container: the nvcc that CUDACXX names is the cell's
  check-wheel FILE...         each wheel's tag and manifest against its cell
  check-release FOLDER        exactly the wheels of the matrix, each right, none too large; or exit 1
  index-files FOLDER          names of those wheels that the package index gets
  version                     the project's version

Standard library only: it runs in build containers and on bare runners.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
INSTALL = ROOT / "docs" / "install.md"
PLACEHOLDER = "sha256:" + "0" * 64
MIB = 2**20


@dataclass(frozen=True)
class Cell:
    """One toolkit on one machine."""

    toolkit: str
    machine: str
    facts: dict[str, Any]  # of the toolkit
    image: dict[str, str]
    runner: str
    architectures: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"cu{self.toolkit}-{self.machine}"

    @property
    def reference(self) -> str:
        return f"{self.image['name']}@{self.image['digest']}"

    @property
    def pinned(self) -> bool:
        return self.image["digest"] != PLACEHOLDER


class Matrix:
    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = data if data is not None else tomllib.loads((ROOT / "ci" / "matrix.toml").read_text())
        self.default_toolkit: str = self.data["default_toolkit"]
        self.architectures = tuple(arch for arch, facts in self.data["architectures"].items() if facts["built"])

    def cells(self) -> list[Cell]:
        return [
            Cell(
                toolkit,
                machine,
                facts,
                self.data["images"][f"{toolkit}-{machine}"],
                machine_facts["runner"],
                self.architectures,
            )
            for toolkit, facts in self.data["toolkits"].items()
            for machine, machine_facts in self.data["machines"].items()
        ]

    def cell(self, name: str) -> Cell:
        for cell in self.cells():
            if cell.name == name:
                return cell
        raise SystemExit(f"cell: expected one of {', '.join(c.name for c in self.cells())}, got {name!r}")

    def files(self, version: str) -> dict[str, tuple[Cell, str]]:
        """Every wheel of a release: its name, the platform cut down to the machine -> (cell, Python tag)."""
        return {
            "-".join(filter(None, ["prequal", version, cell.facts["build_tag"], python, facts["abi"], cell.machine])): (
                cell,
                python,
            )
            for cell in self.cells()
            for python, facts in self.data["pythons"].items()
        }

    # ---- derived ----------------------------------------------------------------------------------------------------

    def environment(self, cell: Cell, *, local: bool) -> dict[str, str]:
        """What cibuildwheel needs to know beyond pyproject.toml; the names are passed on into the container there."""
        pythons = [*self.data["pythons"]]
        pythons += [tag for facts in self.data["pythons"].values() for tag in facts.get("also_tested_on", ())]
        environment = {
            "PREQUAL_CELL": cell.name,
            "PREQUAL_CUDA_ARCHS": ";".join(cell.architectures),
            "CIBW_ARCHS": cell.machine,
            "CIBW_BUILD": " ".join(f"{tag}-manylinux_{cell.machine}" for tag in sorted(pythons)),
        }
        if cell.facts["build_tag"]:
            environment["SKBUILD_WHEEL_BUILD_TAG"] = cell.facts["build_tag"]
        if cell.facts["from"] == "image":
            environment["CUDACXX"] = cell.facts["nvcc"]
        if not local:
            if not cell.pinned:
                raise SystemExit(
                    f"{cell.name}: the image {cell.image['name']} has a placeholder for a digest; "
                    "run `python ci/refresh_pins.py` where its registry can be reached, and commit what it writes"
                )
            environment[f"CIBW_MANYLINUX_{cell.machine.upper()}_IMAGE"] = cell.reference
        return environment

    def workflow_cells(self, names: Iterable[str] = ()) -> dict[str, list[dict[str, str]]]:
        chosen = [self.cell(name) for name in names] or self.cells()
        return {
            "include": [{"cell": cell.name, "runner": cell.runner, "index": cell.facts["index"]} for cell in chosen]
        }

    def workflow_gpus(self) -> dict[str, list[dict[str, Any]]]:
        cell = next(c for c in self.cells() if c.toolkit == self.default_toolkit and c.machine == "x86_64")
        return {
            "include": [
                {"label": entry["label"], "labels": ["self-hosted", "linux", "gpu", entry["label"]], "cell": cell.name}
                for entry in self.data["gpu_runners"]
            ]
        }

    def tables(self) -> dict[str, str]:
        return {"stacks": self.stack_table(), "wheels": self.wheel_table(), "architectures": self.architecture_table()}

    def stack_table(self) -> str:
        lines = ["| your stack | torch, its CUDA | driver | GPU code used | wheel |", "|---|---|---|---|---|"]
        for stack in self.data["stacks"]:
            codes = ", ".join(f"sm_{arch}" for arch in stack["architectures"])
            wheels = ", ".join(f"`cu{stack['toolkit']}-{machine}`" for machine in stack["machines"])
            torch = f"{stack['torch']}, {stack['torch_cuda']}"
            lines.append(f"| {stack['name']} | {torch} | {stack['driver']} | {codes} | {wheels} |")
        return "\n".join(lines)

    def wheel_table(self) -> str:
        lines = ["| wheel | built with | needs a driver | index | files |", "|---|---|---|---|---|"]
        for cell in self.cells():
            index = "the package index" if cell.toolkit == self.default_toolkit else f"`{cell.facts['index']}`"
            front = "-".join(filter(None, ["prequal-VERSION", cell.facts["build_tag"]]))
            files = "<br>".join(
                f"`{front}-{python}-{facts['abi']}-{self.data['platform']}_{cell.machine}` (Python {facts['serves']})"
                for python, facts in self.data["pythons"].items()
            )
            lines.append(
                f"| `{cell.name}` | CUDA {cell.toolkit} | {cell.facts['minimum_driver']} or newer | {index} | {files} |"
            )
        return "\n".join(lines)

    def architecture_table(self) -> str:
        lines = ["| architecture | GPUs | in the wheels |", "|---|---|---|"]
        for arch, facts in self.data["architectures"].items():
            state = "machine code" if facts["built"] else "not built: `arch_not_built`, the reference answers"
            lines.append(f"| sm_{arch} | {facts['gpus']} | {state} |")
        return "\n".join(lines)

    # ---- checked ----------------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[str]:
        """What contradicts itself within the matrix."""
        toolkits, machines = self.data["toolkits"], self.data["machines"]
        if self.default_toolkit not in toolkits:
            yield f"default_toolkit: expected one of {', '.join(toolkits)}, got {self.default_toolkit}"
        wanted = {f"{toolkit}-{machine}" for toolkit in toolkits for machine in machines}
        if wanted != set(self.data["images"]):
            yield f"images: expected {sorted(wanted)}, got {sorted(self.data['images'])}"
        for toolkit, facts in toolkits.items():
            if bool(facts["build_tag"]) == (toolkit == self.default_toolkit):
                yield f"toolkits.{toolkit}: every toolkit but the default needs a build tag, and the default none"
            if facts["build_tag"] and not re.fullmatch(r"\d+[a-z0-9]*", facts["build_tag"]):
                yield f"toolkits.{toolkit}.build_tag: expected digits first, got {facts['build_tag']!r}"
            for arch in self.architectures:
                if numbers(self.data["architectures"][arch]["since"]) > numbers(toolkit):
                    yield f"architectures.{arch}: built, and CUDA {toolkit} does not know it"
        for key, image in self.data["images"].items():
            if not re.fullmatch(r"sha256:[0-9a-f]{64}", image["digest"]):
                yield f"images.{key}.digest: expected sha256:<64 hexadecimal digits>, got {image['digest']!r}"
        for stack in self.data["stacks"]:
            where = f"stacks: {stack['name']}"
            if stack["toolkit"] not in toolkits:
                yield f"{where}: toolkit {stack['toolkit']} is not built"
                continue
            for machine in set(stack["machines"]) - set(machines):
                yield f"{where}: machine {machine} is not built"
            for arch in set(stack["architectures"]) - set(self.architectures):
                yield f"{where}: sm_{arch} is not built"
            if stack["driver"] != f">={toolkits[stack['toolkit']]['minimum_driver']}":
                yield f"{where}: driver {stack['driver']} is not what CUDA {stack['toolkit']} asks for"
            if stack["torch_cuda"].split(".")[0] != stack["toolkit"].split(".")[0]:
                yield f"{where}: torch's CUDA {stack['torch_cuda']} and the wheel's {stack['toolkit']} differ in major"
        for entry in self.data["gpu_runners"]:
            if entry["label"].removeprefix("sm_") not in self.architectures:
                yield f"gpu_runners: {entry['label']} is not built"

    def repository_problems(self, root: pathlib.Path = ROOT) -> Iterator[str]:
        """What repeats the matrix elsewhere, and says something else."""
        yield from self.problems()
        project = tomllib.loads((root / "pyproject.toml").read_text())
        build = project["tool"]["scikit-build"]
        archs = ";".join(self.architectures)

        default = build["cmake"]["define"]["PREQUAL_CUDA_ARCHS"]["default"]
        if default != archs:
            yield f"pyproject.toml, PREQUAL_CUDA_ARCHS: expected {archs}, got {default}"
        cmake = (root / "CMakeLists.txt").read_text()
        found = re.search(r'set\(PREQUAL_CUDA_ARCHS "([^"]*)"', cmake)
        if found is None or found[1] != archs:
            yield f"CMakeLists.txt, PREQUAL_CUDA_ARCHS: expected {archs}, got {found and found[1]}"

        requirement = self.data["toolkits"][self.default_toolkit].get("requirement", "")
        if not any(line.split(";")[0].strip() == requirement for line in build["build"]["requires"]):
            yield f"pyproject.toml, build.requires: expected {requirement}, got {build['build']['requires']}"

        oldest = min((int(tag.removeprefix("cp3")) for tag in self.data["pythons"]), default=0)
        if project["project"]["requires-python"] != f">=3.{oldest}":
            yield f"pyproject.toml, requires-python: expected >=3.{oldest}, got {project['project']['requires-python']}"
        (stable,) = [tag for tag, facts in self.data["pythons"].items() if facts["abi"] == "abi3"]
        if build["wheel"]["py-api"] != stable:
            yield f"pyproject.toml, wheel.py-api: expected {stable}, got {build['wheel']['py-api']}"

        said = {c.rpartition(" ")[2] for c in project["project"]["classifiers"] if "NVIDIA CUDA :: " in c}
        majors = {toolkit.split(".")[0] for toolkit in self.data["toolkits"]}
        if said != majors:
            yield f"pyproject.toml, classifiers: expected NVIDIA CUDA {sorted(majors)}, got {sorted(said)}"

        written = re.search(r"^MINIMUM_DRIVER = \{(.*)\}", (root / "cmake" / "write_manifest.py").read_text(), re.M)
        drivers = dict(re.findall(r'(\d+): "(\d+)"', written[1])) if written else {}
        wanted = {toolkit.split(".")[0]: facts["minimum_driver"] for toolkit, facts in self.data["toolkits"].items()}
        if drivers != wanted:
            yield f"cmake/write_manifest.py, MINIMUM_DRIVER: expected {wanted}, got {drivers}"

        wheel = project["tool"]["cibuildwheel"]
        for machine in self.data["machines"]:
            key, cell = f"manylinux-{machine}-image", self.cell(f"cu{self.default_toolkit}-{machine}")
            if (got := wheel["linux"].get(key)) != cell.reference:
                yield f"pyproject.toml, tool.cibuildwheel.linux.{key}: expected {cell.reference}, got {got}"
        tags = [*self.data["pythons"], *(t for f in self.data["pythons"].values() for t in f.get("also_tested_on", ()))]
        if sorted(wheel["build"]) != sorted(f"{tag}-manylinux*" for tag in tags):
            yield f"pyproject.toml, tool.cibuildwheel.build: expected one for each of {tags}, got {wheel['build']}"

    def wheel_problems(self, path: pathlib.Path, *, allow_dirty: bool = False) -> Iterator[str]:
        """What a finished wheel says of itself, against its cell."""
        parts = path.name.removesuffix(".whl").split("-")
        if len(parts) not in (5, 6) or parts[0] != "prequal":
            yield f"{path.name}: not the name of a wheel of prequal"
            return
        *_, python, abi, platforms = parts
        build_tag = parts[2] if len(parts) == 6 else ""
        with zipfile.ZipFile(path) as wheel:
            manifest = json.loads(wheel.read("prequal/_build.json"))
        if manifest["cuda"] is None:
            yield f"{path.name}: built without CUDA"
            return
        machine = next((m for m in self.data["machines"] if platforms.endswith(m)), None)
        toolkit = manifest["cuda"]["toolkit"]
        if machine is None or toolkit not in self.data["toolkits"]:
            yield f"{path.name}: CUDA {toolkit} on {platforms} is no cell of the matrix"
            return
        cell = self.cell(f"cu{toolkit}-{machine}")
        said = {
            "architectures": (list(cell.architectures), manifest["archs"]),
            "PTX": ([], manifest["ptx"]),
            "minimum driver": (cell.facts["minimum_driver"], manifest["cuda"]["minimum_driver"]),
            "build tag": (cell.facts["build_tag"], build_tag),
            "how the architectures are known": ("cuobjdump", manifest["sass_source"]),
            "uncommitted changes": (False, manifest["dirty"] and not allow_dirty),
        }
        for what, (expected, got) in said.items():
            if got != expected:
                yield f"{path.name}, {what}: expected {expected}, got {got}"
        if self.data["pythons"].get(python, {}).get("abi") != abi:
            yield f"{path.name}: {python}-{abi} is not in the matrix"
        if f"{self.data['platform']}_{machine}" not in platforms.split("."):
            yield f"{path.name}: expected the platform {self.data['platform']}_{machine}, got {platforms}"
        if path.stat().st_size > self.data["wheel_limit_mib"] * MIB:
            yield f"{path.name}: {path.stat().st_size / MIB:.1f} MiB, the limit is {self.data['wheel_limit_mib']}"

    def key(self, path: pathlib.Path) -> str:
        """As `files` names a wheel."""
        *front, platforms = path.name.removesuffix(".whl").split("-")
        return "-".join([*front, next((m for m in self.data["machines"] if platforms.endswith(m)), platforms)])

    def index_files(self, folder: pathlib.Path, version: str) -> list[str]:
        """An index holds one file a version, Python and platform: that of the default toolkit."""
        wanted = {key for key, (cell, _) in self.files(version).items() if cell.toolkit == self.default_toolkit}
        return [path.name for path in sorted(folder.glob("*.whl")) if self.key(path) in wanted]

    def release_problems(self, folder: pathlib.Path, version: str) -> Iterator[str]:
        """Exactly the wheels of the matrix, each right: a release is all of them or none."""
        wanted = self.files(version)
        seen: set[str] = set()
        for path in sorted(folder.glob("*.whl")):
            key = self.key(path)
            if key not in wanted:
                yield f"{path.name}: not a wheel of this release"
            elif key in seen:
                yield f"{path.name}: a second wheel for {wanted[key][0].name}, {wanted[key][1]}"
            seen.add(key)
            yield from self.wheel_problems(path)
        for key in sorted(set(wanted) - seen):
            cell, python = wanted[key]
            yield f"missing: the wheel for {cell.name}, {python}"
        for cell in self.cells():
            if not cell.pinned:
                yield f"{cell.name}: its image is not pinned; a release is built from pinned images alone"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def project_version(root: pathlib.Path = ROOT) -> str:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def filled(text: str, tables: dict[str, str]) -> str:
    """The text with each table between its markers; a missing marker is an error."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: generated by ci/matrix.py -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"docs/install.md: no markers for the table {name}")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def check_toolkit(cell: Cell) -> Iterator[str]:
    """In the build container. With `from = "pypi"` nothing is there yet: build isolation will bring it."""
    nvcc = os.environ.get("CUDACXX")
    if cell.facts["from"] == "pypi":
        if nvcc:
            yield f"{cell.name}: nvcc should come from PyPI, and CUDACXX names {nvcc}"
        return
    if not nvcc:
        yield f"{cell.name}: expected CUDACXX={cell.facts['nvcc']}, got none"
        return
    said = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    if found is None or found[1] != cell.toolkit:
        yield f"{cell.name}: expected nvcc {cell.toolkit}, got {found and found[1]} from {nvcc}"


def report(problems: Iterable[str]) -> int:
    found = list(problems)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cells = commands.add_parser("cells")
    cells.add_argument("--cell", action="append", default=[])
    commands.add_parser("gpu")
    env = commands.add_parser("env")
    env.add_argument("cell")
    env.add_argument("--local", action="store_true")
    docs = commands.add_parser("docs")
    docs.add_argument("--check", action="store_true")
    commands.add_parser("check")
    commands.add_parser("check-toolkit")
    wheel = commands.add_parser("check-wheel")
    wheel.add_argument("files", nargs="+", type=pathlib.Path)
    wheel.add_argument("--allow-dirty", action="store_true", help="a build of uncommitted changes will do")
    for name in ("check-release", "index-files"):
        commands.add_parser(name).add_argument("folder", type=pathlib.Path)
    commands.add_parser("version")
    args = parser.parse_args(argv)
    matrix = Matrix()

    match args.command:
        case "cells":
            print(json.dumps(matrix.workflow_cells(args.cell)))
        case "gpu":
            print(json.dumps(matrix.workflow_gpus()))
        case "env":
            for name, value in matrix.environment(matrix.cell(args.cell), local=args.local).items():
                print(f"{name}={value}")
        case "docs":
            text = INSTALL.read_text()
            new = filled(text, matrix.tables())
            if new != text and not args.check:
                INSTALL.write_text(new)
            return report(
                ["docs/install.md is not current: python ci/matrix.py docs"] if new != text and args.check else []
            )
        case "check":
            return report(matrix.repository_problems())
        case "check-toolkit":
            return report(
                check_toolkit(matrix.cell(os.environ["PREQUAL_CELL"])) if "PREQUAL_CELL" in os.environ else []
            )
        case "check-wheel":
            return report(
                line for file in args.files for line in matrix.wheel_problems(file, allow_dirty=args.allow_dirty)
            )
        case "check-release":
            return report(matrix.release_problems(args.folder, project_version()))
        case "index-files":
            print(*matrix.index_files(args.folder, project_version()), sep="\n")
        case "version":
            print(project_version())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
