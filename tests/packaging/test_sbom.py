"""The bill of materials that the build writes: valid CycloneDX, true, and the same for the same build."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tomllib

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "ci"), str(ROOT / "cmake")]  # programs and helpers, no package

import write_sbom

from wheel_file import Wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def build(tmp_path) -> pathlib.Path:
    """What write_sbom.py reads of a build: a toolkit and nanobind as PyPI lays them out, a manifest, a module."""
    site = tmp_path / "site"
    files = {
        "nvidia/cu13/include/cuda_runtime_api.h": "#define CUDART_VERSION  13000\n",
        "nvidia/cu13/include/cccl/cuda/std/__cccl/version.h": "#  define CCCL_VERSION 3000001\n",
        "nvidia_cuda_runtime-13.0.96.dist-info/METADATA": "Name: nvidia-cuda-runtime\nVersion: 13.0.96\n",
        "nanobind/include/nanobind/nanobind.h": "".join(
            f"#define NB_VERSION_{part} {number}\n" for part, number in (("MAJOR", 3), ("MINOR", 1), ("PATCH", 0))
        ),
        "nanobind-3.1.0.dist-info/licenses/LICENSE": "Copyright (c) somebody",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    manifest = {
        "version": PROJECT["version"],
        "commit": "0" * 40,
        "source_digest": "1" * 64,
        "archs": ["80", "90"],
        "cuda": {"nvcc": "13.0.88", "toolkit": "13.0"},
    }
    (tmp_path / "_build.json").write_text(json.dumps(manifest))
    (tmp_path / "module.so").write_bytes(b"\x7fELF...\0libstdc++.so.6\0")
    return tmp_path


def written(build: pathlib.Path, *, native: bool = True, out: str = "bill.json") -> dict:
    arguments = ["--source", str(ROOT), "--manifest", str(build / "_build.json"), "--out", str(build / out)]
    if native:
        site = build / "site"
        arguments += ["--module", str(build / "module.so")]
        arguments += ["--cuda-root", str(site / "nvidia/cu13"), "--nanobind-root", str(site / "nanobind")]
    assert write_sbom.main(arguments) == 0
    return json.loads((build / out).read_text())


def parts(bill: dict, *, bundled: bool) -> dict[str, dict]:
    wanted = {"name": "prequal:bundled", "value": str(bundled).lower()}
    return {part["name"]: part for part in bill["components"] if wanted in part["properties"]}


def check_structure(bill: dict) -> None:
    """What the schema cannot say, and the little of it that matters most where no validator is installed."""
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    references = [part["bom-ref"] for part in bill["components"]] + [bill["metadata"]["component"]["bom-ref"]]
    assert len(set(references)) == len(references)
    assert {entry["ref"] for entry in bill["dependencies"]} == set(references)
    assert {ref for entry in bill["dependencies"] for ref in entry.get("dependsOn", ())} == set(references[:-1])
    assert "timestamp" not in bill["metadata"]
    assert set(parts(bill, bundled=True)) | set(parts(bill, bundled=False)) == {p["name"] for p in bill["components"]}
    for part in parts(bill, bundled=True).values():
        assert part["licenses"], part["name"]
    requirements = {
        prop["value"]
        for part in parts(bill, bundled=False).values()
        for prop in part["properties"]
        if prop["name"] == "prequal:requirement"
    }
    assert requirements == set(PROJECT["dependencies"])


def check_schema(bill: dict) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json", reason="no cyclonedx-python-lib")
    from cyclonedx.schema import SchemaVersion

    errors = validation.JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill))
    assert errors is None


@pytest.mark.parametrize("native", [True, False])
def test_it_is_valid_and_consistent(native, build):
    bill = written(build, native=native)
    check_structure(bill)
    check_schema(bill)


def test_the_schema_check_can_fail(build):
    with pytest.raises(AssertionError):
        check_schema(written(build) | {"serialNumber": "none"})


def test_it_lists_what_is_linked_into_the_module_with_versions_and_licences(build):
    inside = parts(written(build), bundled=True)
    assert {name: part.get("version") for name, part in inside.items()} == {
        "cudart_static": "13.0.96",
        "libdevice": "13.0.88",
        "cccl": "3.0.1",
        "nanobind": "3.1.0",
        "robin-map": None,
    }
    assert inside["cudart_static"]["licenses"][0]["license"]["name"] == (
        "NVIDIA CUDA Toolkit End User License Agreement"
    )
    assert inside["nanobind"]["licenses"][0]["license"]["id"] == "BSD-3-Clause"
    assert inside["nanobind"]["licenses"][0]["license"]["text"]["content"] == "Copyright (c) somebody"


def test_a_static_libstdcxx_is_listed_because_the_module_does_not_need_the_shared_one(build):
    assert "libstdc++" not in parts(written(build), bundled=True)
    (build / "module.so").write_bytes(b"\x7fELF...\0libc.so.6\0")
    assert "libstdc++" in parts(written(build), bundled=True)


def test_a_build_without_cuda_bundles_nothing(build):
    (build / "_build.json").write_text(
        json.dumps(json.loads((build / "_build.json").read_text()) | {"cuda": None, "archs": []})
    )
    bill = written(build, native=False)
    assert parts(bill, bundled=True) == {}
    assert set(parts(bill, bundled=False)) == {"torch", "nvidia-ml-py"}


def test_the_same_build_gives_the_same_bytes_and_another_another_serial_number(build):
    first, again = written(build), written(build, out="again.json")
    assert (build / "bill.json").read_bytes() == (build / "again.json").read_bytes()
    (build / "module.so").write_bytes(b"\x7fELF... other \0libstdc++.so.6\0")
    assert written(build)["serialNumber"] != first["serialNumber"] == again["serialNumber"]


def test_the_version_of_cudart_comes_from_the_toolkits_list_the_package_or_the_header(build):
    root = build / "site/nvidia/cu13"
    (build / "site/nvidia_cuda_runtime-13.0.96.dist-info/METADATA").unlink()
    (build / "site/nvidia_cuda_runtime-13.0.96.dist-info").rmdir()
    assert write_sbom.cudart_version(root) == "13.0"
    (root / "version.json").write_text('{"cuda_cudart": {"version": "13.0.96"}}')
    assert write_sbom.cudart_version(root) == "13.0.96"


def test_a_version_that_cannot_be_found_fails_the_build_with_the_files_name(build, capsys):
    (build / "site/nanobind/include/nanobind/nanobind.h").write_text("")
    with pytest.raises(AssertionError):
        written(build)
    assert "nanobind.h: expected a line like" in capsys.readouterr().err
    assert not (build / "bill.json").exists()


def test_the_bill_in_the_wheel_that_was_built_is_valid_and_of_this_build():
    name = os.environ.get("PREQUAL_TEST_WHEEL")
    if not name:
        pytest.skip("no wheel: set PREQUAL_TEST_WHEEL, or run `nox -s tests` or `nox -s wheel`")
    wheel = Wheel(pathlib.Path(name))
    bill = json.loads(wheel.read(f"{wheel.dist_info}/sboms/prequal.cdx.json"))
    check_structure(bill)
    about = {prop["name"]: prop["value"] for prop in bill["metadata"]["properties"]}
    assert about["prequal:source_digest"] == wheel.manifest["source_digest"]
    assert bill["metadata"]["component"]["version"] == wheel.version
    if wheel.manifest["cuda"]:
        assert about["prequal:nvcc"] == wheel.manifest["cuda"]["nvcc"]
        assert about["prequal:archs"].split() == wheel.manifest["archs"]
        toolkit = wheel.manifest["cuda"]["toolkit"]
        assert parts(bill, bundled=True)["cudart_static"]["version"].startswith(f"{toolkit}.")
    check_schema(bill)
