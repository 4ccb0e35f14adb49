"""Write the wheel's bill of materials: CycloneDX 1.6, for `.dist-info/sboms/` (PEP 770).

It lists what is inside the native module (nanobind, NVIDIA's static runtime and header-only libraries) with version and
licence, and what has to be installed beside it, marked as not bundled. Versions are read from the files that were
compiled in, not from what was asked for. The same build gives the same bytes: no time, no random serial number.
Standard library only: it runs inside the build.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import re
import sys
import tomllib
import uuid

CUDA_LICENCE: dict[str, object] = {
    "license": {"name": "NVIDIA CUDA Toolkit End User License Agreement", "url": "https://docs.nvidia.com/cuda/eula/"}
}


class Unreadable(Exception):
    """A version that the bill must state cannot be found."""


def spdx(expression: str) -> dict[str, object]:
    if re.fullmatch(r"[\w.+-]+", expression):
        return {"license": {"id": expression}}
    return {"expression": expression}


def first(pattern: str, file: pathlib.Path) -> str:
    text = file.read_text(errors="replace") if file.is_file() else ""
    found = re.search(pattern, text, re.M)
    if not found:
        raise Unreadable(f"{file}: expected a line like {pattern!r}, found none")
    return found[1]


def with_text(licence: dict, folder: pathlib.Path, package: str) -> dict:
    """The licence with its own words, which BSD asks for in binary distributions, where the package brings them."""
    for file in sorted(folder.glob(f"{package}-*.dist-info/licenses/LICENSE")):
        return {"license": licence["license"] | {"text": {"contentType": "text/plain", "content": file.read_text()}}}
    return licence


def nanobind_version(root: pathlib.Path) -> str:
    header = root / "include" / "nanobind" / "nanobind.h"
    return ".".join(first(rf"#define NB_VERSION_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH"))


def cccl_version(root: pathlib.Path) -> str:
    name = pathlib.Path("cuda/std/__cccl/version.h")
    # beside the other headers up to CUDA 12, in a folder of its own from 13 on
    header = next((p for p in (root / "include/cccl" / name, root / "include" / name) if p.is_file()), root / name)
    number = int(first(r"#\s*define CCCL_VERSION (\d+)", header))
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def cudart_version(root: pathlib.Path) -> str:
    """The toolkit's own list, the PyPI package beside it, or what the header says (which lacks the last part)."""
    if (root / "version.json").is_file():
        return json.loads((root / "version.json").read_text())["cuda_cudart"]["version"]
    for folder in root.parent.parent.glob("nvidia_cuda_runtime-*.dist-info"):
        return first(r"^Version: (\S+)", folder / "METADATA")
    number = int(first(r"#define CUDART_VERSION\s+(\d+)", root / "include/cuda_runtime_api.h"))
    return f"{number // 1000}.{number // 10 % 100}"


def inside(name: str, version: str | None, licence: dict[str, object], about: str, *, purl: str | None = None) -> dict:
    part = {
        "type": "library",
        "bom-ref": purl or f"prequal:part/{name}",
        "name": name,
        "version": version,
        "description": about,
        "scope": "required",
        "licenses": [licence],
        "purl": purl,
        "properties": [{"name": "prequal:bundled", "value": "true"}],
    }
    return {key: value for key, value in part.items() if value is not None}


def beside(requirement: str) -> dict:
    name = re.split(r"[^\w.-]", requirement)[0].lower()
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}",
        "name": name,
        "description": "installed beside prequal, not part of this wheel; the version is the installer's choice",
        "scope": "required",
        "purl": f"pkg:pypi/{name}",
        "properties": [
            {"name": "prequal:bundled", "value": "false"},
            {"name": "prequal:requirement", "value": requirement},
        ],
    }


def native_parts(cuda: pathlib.Path, nanobind: pathlib.Path, manifest: dict, module: bytes) -> list[dict]:
    nvcc, nanobind_is = manifest["cuda"]["nvcc"], nanobind_version(nanobind)
    parts = [
        inside(
            "cudart_static",
            cudart_version(cuda),
            CUDA_LICENCE,
            "NVIDIA's CUDA runtime, linked statically (a redistributable part under the licence's attachment A)",
        ),
        inside(
            "libdevice",
            nvcc,
            CUDA_LICENCE,
            "NVIDIA's device mathematics, compiled into the kernels; of nvcc's own release",
        ),
        inside(
            "cccl",
            cccl_version(cuda),
            spdx("Apache-2.0 WITH LLVM-exception AND Apache-2.0 AND BSD-3-Clause"),
            "NVIDIA's CUDA Core Compute Libraries (CUB, Thrust, libcu++): header-only, compiled into the kernels",
            purl=f"pkg:github/NVIDIA/cccl@v{cccl_version(cuda)}",
        ),
        inside(
            "nanobind",
            nanobind_is,
            with_text(spdx("BSD-3-Clause"), nanobind.parent, "nanobind"),
            "the binding between Python and C++, linked statically",
            purl=f"pkg:pypi/nanobind@{nanobind_is}",
        ),
        inside("robin-map", None, spdx("MIT"), "the hash map inside nanobind, of the copy that nanobind carries"),
    ]
    if b"\0libstdc++.so.6\0" not in module:
        parts.append(
            inside("libstdc++", None, spdx("GPL-3.0-or-later WITH GCC-exception-3.1"), "linked statically, of GCC")
        )
    return parts


def bill(project: dict, manifest: dict, parts: list[dict], module: bytes | None) -> dict:
    purl = f"pkg:pypi/{project['name']}@{manifest['version']}"
    parts = [*parts, *(beside(requirement) for requirement in project["dependencies"])]
    parts.sort(key=lambda part: part["bom-ref"])
    properties = {
        "prequal:commit": manifest["commit"],
        "prequal:source_digest": manifest["source_digest"],
        "prequal:nvcc": (manifest["cuda"] or {}).get("nvcc"),
        "prequal:archs": " ".join(manifest["archs"]),
        # auditwheel may rewrite the module after the build; this is the module as it was linked
        "prequal:module_sha256": hashlib.sha256(module).hexdigest() if module else None,
    }
    made = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": purl,
                "name": project["name"],
                "version": manifest["version"],
                "description": project["description"],
                "licenses": [spdx(project["license"])],
                "purl": purl,
            },
            "properties": [{"name": name, "value": value} for name, value in properties.items() if value],
        },
        "components": parts,
        "dependencies": [
            {"ref": purl, "dependsOn": [part["bom-ref"] for part in parts]},
            *({"ref": part["bom-ref"]} for part in parts),
        ],
    }
    # a serial number has to be a UUID; this one stands for the content
    content = json.dumps(made, sort_keys=True)
    return made | {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=pathlib.Path, required=True, help="the folder of pyproject.toml")
    parser.add_argument("--manifest", type=pathlib.Path, required=True, help="the _build.json of this build")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--module", type=pathlib.Path, help="the finished native module; none in a CPU build")
    parser.add_argument("--cuda-root", type=pathlib.Path, help="the toolkit that the module was built with")
    parser.add_argument("--nanobind-root", type=pathlib.Path, help="the folder that holds nanobind's include/")
    args = parser.parse_args(arguments)

    project = tomllib.loads((args.source / "pyproject.toml").read_text())["project"]
    manifest = json.loads(args.manifest.read_text())
    module = args.module.read_bytes() if args.module else None
    try:
        parts = native_parts(args.cuda_root, args.nanobind_root, manifest, module) if module else []
    except (Unreadable, OSError, KeyError, ValueError) as error:
        print(f"write_sbom: {error}", file=sys.stderr)
        return 1
    args.out.write_text(json.dumps(bill(project, manifest, parts, module), indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
