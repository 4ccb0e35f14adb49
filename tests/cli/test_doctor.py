"""doctor: wanted against found for every requirement, on good, poor and broken installations."""

import argparse
import base64
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prequal.cli import doctor
from prequal.cli.doctor import InstalledLibrary, NativeModule, explain, gather, native_module, render
from prequal.runtime.fingerprint import TorchInfo
from prequal.runtime.loaded import LoadedLibrary
from prequal.runtime.manifest import CudaBuild, Manifest
from prequal.runtime.nvml import Gpu, NvmlError

HOPPER = Gpu(0, "GPU-4377", "NVIDIA H200", (9, 0))
MANIFEST = Manifest(
    schema=1,
    version="0.1.0",
    cuda=CudaBuild("13.0", "13.0.88", "580"),
    archs=("80", "86", "89", "90"),
    commit="ab" * 20,
)
FAST = {
    "op": "rms_norm",
    "device": "cuda:0",
    "path": "fast",
    "reason": None,
    "detail": None,
    "contract": "Tolerance(bfloat16: 1e-2, 1.6e-2)",
    "qualified": "2026-01-02 by release evidence",
}
SLOW = {**FAST, "op": "knn", "path": "reference", "reason": "arch_not_built", "detail": "sm_120 is not in the wheel"}


class FakeNvml:
    def __init__(self, *gpus, driver="580.95.05"):
        self._gpus, self._driver = gpus or (HOPPER,), driver

    def driver_version(self):
        return self._driver

    def gpus(self):
        return self._gpus


class NoDriver:
    def driver_version(self):
        raise NvmlError("nvmlInit failed: NVML Shared Library Not Found")

    gpus = driver_version


def report_of(**changed):
    """The report of a good worker, but for what is changed."""
    good = {
        "nvml": FakeNvml(),
        "environ": {},
        "torch_info": TorchInfo("2.13.0+cu130", "cf30153c", "13.0"),
        "manifest": MANIFEST,
        "native": NativeModule("loaded", ("_native.abi3.so",)),
        "loaded": [],
        "installed": [],
        "rows": lambda: [FAST],
    }
    return gather(**{**good, **changed})


def requirement(report, name):
    (found,) = [item for item in report["requirements"] if item["name"] == name]
    return found


def raising(error):
    def call():
        raise error

    return call


def test_all_fast_is_exit_0():
    report = report_of()
    assert (report["exit_code"], report["verdict"]) == (0, "all 1 paths are fast")
    assert [item["name"] for item in report["requirements"] if item["ok"] is False] == []


@pytest.mark.parametrize("rows", [[FAST, SLOW], []])
def test_a_reference_path_or_no_op_at_all_is_exit_1(rows):
    assert report_of(rows=lambda: rows)["exit_code"] == 1


def test_a_stale_lock_is_read_and_its_paths_are_what_counts():
    lock = {"path": "x", "problem": None, "devices": {"cuda:0": "stale: torch.version moved"}}
    assert report_of(lock=lambda: lock)["exit_code"] == 0
    assert report_of(lock=lambda: lock, rows=lambda: [SLOW])["exit_code"] == 1


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"torch_info": TorchInfo(problem="torch is not installed")}, "torch cannot be imported"),
        ({"native": NativeModule("broken", ("x",), explain("ImportError: x"))}, "native module"),
        ({"manifest": Manifest(problem="_build.json is broken")}, "build manifest"),
        ({"rows": raising(RuntimeError("no rows"))}, "ops cannot be listed"),
        ({"lock": lambda: {"path": None, "problem": "lock x: no JSON", "devices": {}}}, "lock cannot be read"),
    ],
)
def test_what_is_broken_is_exit_2_and_said(changed, says):
    report = report_of(**changed)
    assert report["exit_code"] == 2
    assert says in report["verdict"]
    assert says in " ".join(render(report).split())


def test_a_broken_gate_leaves_the_rest_of_the_report():
    report = report_of(rows=raising(RuntimeError("no rows")))
    assert report["rows_problem"] == "RuntimeError: no rows"
    assert requirement(report, "driver")["ok"] is True


@pytest.mark.parametrize(
    ("changed", "name", "wanted", "found", "ok"),
    [
        ({}, "torch", ">= 2.7", "2.13.0+cu130", True),
        ({"torch_info": TorchInfo("2.6.1+cu130", "c", "13.0")}, "torch", ">= 2.7", "2.6.1+cu130", False),
        ({"torch_info": TorchInfo("2.10.0", "c", "13.0")}, "torch", ">= 2.7", "2.10.0", True),
        ({"torch_info": TorchInfo(problem="not installed")}, "torch", ">= 2.7", "not importable", False),
        ({}, "torch's CUDA", "13.x", "13.0", True),
        ({"torch_info": TorchInfo("2.13.0+cu128", "c", "12.8")}, "torch's CUDA", "13.x", "12.8", False),
        (
            {"torch_info": TorchInfo("2.13.0+cpu", "c", None)},
            "torch's CUDA",
            "13.x",
            "none: torch is built without CUDA",
            False,
        ),
        ({}, "driver", ">= 580", "580.95.05", True),
        ({"nvml": FakeNvml(driver="575.57.08")}, "driver", ">= 580", "575.57.08", False),
        ({"nvml": NoDriver()}, "driver", ">= 580", "unknown", None),
        ({}, "GPU 0", "sm_80, sm_86, sm_89, sm_90", "sm_90, NVIDIA H200", True),
        (
            {"nvml": FakeNvml(Gpu(0, "GPU-1", "RTX 5090", (12, 0)))},
            "GPU 0",
            "sm_80, sm_86, sm_89, sm_90",
            "sm_120, RTX 5090",
            False,
        ),
        ({"nvml": NoDriver()}, "GPU", "sm_80, sm_86, sm_89, sm_90", "unknown", None),
        ({"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "GPU", "sm_80, sm_86, sm_89, sm_90", "none", False),
        ({}, "native module", "importable", "imported", True),
        ({"native": NativeModule("absent", ())}, "native module", "importable", "absent", False),
    ],
)
def test_each_requirement_says_wanted_and_found(changed, name, wanted, found, ok):
    item = requirement(report_of(**changed), name)
    assert (item["wanted"], item["found"], item["ok"]) == (wanted, found, ok)


@pytest.mark.parametrize(
    ("abi", "wanted", "ok"),
    [
        (None, ">= 3.11", True),
        (f"cp3{sys.version_info.minor}", f"CPython 3.{sys.version_info.minor} ", True),
        (f"cp3{sys.version_info.minor + 1}", f"CPython 3.{sys.version_info.minor + 1} ", False),
        (f"cp3{sys.version_info.minor}-abi3", f"CPython >= 3.{sys.version_info.minor} ", True),
        (f"cp3{sys.version_info.minor + 1}-abi3", f"CPython >= 3.{sys.version_info.minor + 1} ", False),
    ],
)
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="the tags are CPython's")
def test_the_python_that_the_native_module_wants_is_named(abi, wanted, ok):
    item = requirement(report_of(manifest=Manifest(schema=1, version="0.1.0", python_abi=abi)), "Python")
    assert item["wanted"].startswith(wanted)
    assert item["ok"] is ok


def test_on_a_mixed_host_each_kind_of_gpu_is_judged_and_the_order_is_unknown():
    report = report_of(nvml=FakeNvml(HOPPER, Gpu(1, "GPU-2", "GTX 1080", (6, 1))))
    judged = {item["found"]: item["ok"] for item in report["requirements"] if item["name"].startswith("a GPU")}
    assert judged == {"sm_90, NVIDIA H200": True, "sm_61, GTX 1080": False}
    assert requirement(report, "GPU order")["ok"] is None


def test_a_build_without_cuda_wants_no_gpu():
    report = report_of(
        manifest=Manifest(schema=1, version="0.1.0"), native=NativeModule("absent", ()), rows=lambda: [SLOW]
    )
    assert report["exit_code"] == 1
    assert requirement(report, "native module")["ok"] is None
    assert [item["name"] for item in report["requirements"] if item["ok"] is False] == []


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        (
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
            "missing_library",
            "libcudart.so.12",
        ),
        (
            "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by /x/_native.so)",
            "glibc_too_old",
            "GLIBC_2.38",
        ),
        (
            "ImportError: /lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /x/_native.so)",
            "glibc_too_old",
            "GLIBCXX_3.4.32",
        ),
        ("ImportError: /x/_native.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "undefined_symbol", "_ZN3c104cuda"),
        ("ImportError: /x/_native.so: undefined symbol: PyType_GetTypeDataSize", "python_abi", "PyType_GetTypeData"),
        ("ImportError: Python version mismatch: module was compiled for Python 3.9", "python_abi", "built for"),
        ("ImportError: /x/_native.so: invalid ELF header", "corrupt", "shared library"),
        ("ImportError: /x/_native.so: file too short", "corrupt", "shared library"),
        ("ImportError: dynamic module does not define module export function (PyInit__native)", "corrupt", ""),
        ("torch is not installed", "missing_module", ""),
        ("ModuleNotFoundError: No module named 'torch'", "missing_module", ""),
        ("RuntimeError: nothing anyone has seen", "other", ""),
    ],
)
def test_an_import_error_is_read_for_what_was_wanted(text, kind, wanted):
    problem = explain(text)
    assert problem.kind == kind
    assert wanted in problem.wanted
    assert problem.text == text
    assert problem.found
    assert problem.advice


def test_a_missing_library_of_another_major_names_the_one_installed():
    installed = [InstalledLibrary("cudart", "/site/libcudart.so.13", "nvidia-cuda-runtime", "13.0.88")]
    problem = explain("ImportError: libcudart.so.12: cannot open shared object file", installed)
    assert problem.found == "/site/libcudart.so.13 (nvidia-cuda-runtime 13.0.88)"


def no_module():
    raise ModuleNotFoundError("No module named 'prequal._native'", name="prequal._native")


def test_no_native_file_is_absent_not_broken(tmp_path):
    assert native_module(no_module, [tmp_path]) == NativeModule("absent", ())


def test_a_native_file_for_another_python_is_named_with_the_tags_wanted(tmp_path):
    (tmp_path / "_native.cpython-36m-x86_64-linux-gnu.so").touch()
    native = native_module(no_module, [tmp_path])
    assert (native.state, native.problem.kind) == ("broken", "python_abi")
    assert native.problem.found == "_native.cpython-36m-x86_64-linux-gnu.so"
    assert importlib.machinery.EXTENSION_SUFFIXES[0] in native.problem.wanted


def test_any_error_of_a_native_module_is_broken(tmp_path):
    native = native_module(raising(RuntimeError("at start-up")), [tmp_path])
    assert (native.state, native.problem.text) == ("broken", "RuntimeError: at start-up")


CUBLAS = LoadedLibrary("cublas", "/site/nvidia/libcublas.so.13", "libcublas.so.13", "13.1.0")
PIP_CUBLAS = InstalledLibrary("cublas", "/site/nvidia/libcublas.so.13", "nvidia-cublas", "13.1.0.3")


def test_libraries_as_installed_are_no_finding():
    assert doctor.library_findings([CUBLAS], [PIP_CUBLAS], "13.0") == []


def test_a_system_cublas_that_shadows_pips_is_found():
    system = LoadedLibrary("cublas", "/usr/local/cuda/lib64/libcublas.so.13", "libcublas.so.13.0.0.19", "13.0.0")
    (finding,) = doctor.library_findings([system], [PIP_CUBLAS], "13.0")
    for part in ("/usr/local/cuda/lib64/libcublas.so.13", "nvidia-cublas 13.1.0.3", "LD_LIBRARY_PATH"):
        assert part in finding


def test_a_runtime_of_another_major_is_found():
    old = LoadedLibrary("cudart", "/opt/libcudart.so.12", "libcudart.so.12", "12.9")
    assert doctor.library_findings([old], [], "13.0") == ["libcudart 12.9 is loaded, torch is built for CUDA 13.0"]


def test_a_library_loaded_twice_or_replaced_under_the_process_is_found():
    other = LoadedLibrary("cublas", "/other/libcublas.so.13", "libcublas.so.13", "13.1.0", replaced=True)
    replaced, twice = doctor.library_findings([CUBLAS, other], [], "13.0")
    assert "restart" in replaced
    assert "loaded 2 times" in twice


def install(folder, name="prequal", version="0.1.0", files=(), tag="cp312-abi3-manylinux_2_28_x86_64", **metadata):
    """An installed distribution as pip leaves it: files, metadata, and a RECORD of them all."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    content = {
        **dict(files),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        **{f"{info}/{file}": data for file, data in metadata.items()},
    }
    record = [f"{info}/RECORD,,", "prequal/__pycache__/__init__.cpython-312.pyc,,"]
    for file, data in content.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{file},sha256={digest},{len(data)}")
    (folder / info / "RECORD").write_text("\n".join(record) + "\n")
    return importlib.metadata.PathDistribution(folder / info)


FILES = {"prequal/__init__.py": b"# prequal\n", "prequal/_native.abi3.so": b"machine code"}


@pytest.mark.parametrize(
    ("tag", "wanted"),
    [
        ("cp312-abi3-manylinux_2_28_x86_64", "2.28"),
        ("cp312-abi3-manylinux_2_17_x86_64\nTag: cp312-abi3-manylinux2014_x86_64", "2.17"),
        ("cp312-abi3-manylinux2014_x86_64", "2.17"),
        ("cp312-abi3-linux_x86_64", None),
        ("py3-none-any", None),
    ],
)
def test_the_glibc_wanted_is_the_wheels_tag(tmp_path, tag, wanted):
    assert doctor.wheel_glibc(install(tmp_path, tag=tag)) == wanted


def test_without_an_installed_wheel_no_glibc_is_wanted():
    assert doctor.wheel_glibc(None) is None


def test_the_libraries_of_nvidias_packages_are_found_by_distribution(tmp_path):
    nvidia = install(
        tmp_path, "nvidia-cublas", "13.1.0.3", {"nvidia/cu13/lib/libcublas.so.13": b"", "nvidia/cu13/lib/libx.so": b""}
    )
    others = install(tmp_path, "other", "1", {"other/libcublas.so.13": b""})
    path = os.path.realpath(tmp_path / "nvidia/cu13/lib/libcublas.so.13")
    assert doctor.installed_libraries([nvidia, others]) == [
        InstalledLibrary("cublas", path, "nvidia-cublas", "13.1.0.3")
    ]


def test_verify_passes_untouched_files(tmp_path):
    found = doctor.verify(install(tmp_path, files=FILES), tmp_path / "prequal")
    assert (found.state, found.checked, found.problems, found.unlisted) == ("ok", 4, (), ())


def test_verify_names_a_changed_file(tmp_path):
    distribution = install(tmp_path, files=FILES)
    (tmp_path / "prequal/_native.abi3.so").write_bytes(b"Machine code")
    found = doctor.verify(distribution, tmp_path / "prequal")
    assert found.state == "mismatch"
    (problem,) = found.problems
    assert problem.startswith("prequal/_native.abi3.so: changed: expected sha256 ")


def test_verify_names_a_missing_file(tmp_path):
    distribution = install(tmp_path, files=FILES)
    (tmp_path / "prequal/_native.abi3.so").unlink()
    assert doctor.verify(distribution, tmp_path / "prequal").problems == ("prequal/_native.abi3.so: missing",)


def test_verify_mentions_a_native_module_left_over_and_does_not_fail_for_it(tmp_path):
    distribution = install(tmp_path, files=FILES)
    (tmp_path / "prequal/_native.cpython-311.so").touch()
    found = doctor.verify(distribution, tmp_path / "prequal")
    assert (found.state, found.unlisted) == ("ok", ("prequal/_native.cpython-311.so",))


def test_verify_refuses_a_weak_hash(tmp_path):
    distribution = install(tmp_path, files=FILES)
    record = tmp_path / "prequal-0.1.0.dist-info/RECORD"
    record.write_text(record.read_text().replace("sha256=", "md5=", 1))
    assert "expected sha256 or better" in doctor.verify(distribution, tmp_path / "prequal").problems[0]


@pytest.mark.parametrize(
    ("metadata", "package", "says"),
    [
        ({"direct_url.json": b'{"url": "file:///x", "dir_info": {"editable": true}}'}, "prequal", "editable"),
        ({}, "elsewhere", "was imported from"),
    ],
)
def test_verify_says_when_it_cannot(tmp_path, metadata, package, says):
    found = doctor.verify(install(tmp_path, files=FILES, **metadata), tmp_path / package)
    assert found.state == "unavailable"
    assert says in found.note


def test_verify_without_a_record_says_so(tmp_path):
    distribution = install(tmp_path, files=FILES)
    (tmp_path / "prequal-0.1.0.dist-info/RECORD").unlink()
    assert "no RECORD" in doctor.verify(distribution, tmp_path / "prequal").note


@pytest.mark.parametrize("state", ["mismatch", "ok", "unavailable"])
def test_only_a_mismatch_fails_verify(monkeypatch, state):
    monkeypatch.setattr(doctor, "verify", lambda: doctor.Verification(state, 1, (), (), "a note"))
    report = report_of(verify_files=True)
    assert report["exit_code"] == (2 if state == "mismatch" else 0)
    assert "a note" in render(report)


def test_the_report_is_plain_json():
    report = report_of(rows=lambda: [FAST, SLOW], loaded=[CUBLAS], installed=[PIP_CUBLAS])
    assert json.loads(json.dumps(report))["rows"][1]["reason"] == "arch_not_built"


def test_the_tables_fit_100_columns_and_hold_every_row():
    rows = [{**SLOW, "contract": "Tolerance(" + "bfloat16: 1e-2, 1.6e-2; " * 6 + ")"}, FAST]
    deep = LoadedLibrary("cublas", "/very/long" * 30 + "/libcublas.so.13", "libcublas.so.13", "13.1.0")
    native = NativeModule("broken", ("x",), explain("ImportError: /x/_native.so: undefined symbol: " + "x" * 200))
    text = render(report_of(rows=lambda: rows, loaded=[deep], installed=[PIP_CUBLAS], native=native))
    assert max(map(len, text.splitlines())) <= 100
    for part in ("rms_norm", "knn", "arch_not_built", "sm_120 is not in the wheel", "cuda:0", "undefined_symbol"):
        assert part in text


def test_qualified_may_be_text_an_object_or_nothing():
    rows = [{**FAST, "qualified": {"by": "lock", "when": "2026-01-02"}}, {**FAST, "qualified": None}]
    text = render(report_of(rows=lambda: rows))
    assert "by lock, when 2026-01-02" in text


def test_json_is_one_object_on_stdout_whatever_an_import_prints(monkeypatch, capsys):
    def noisy(**_):
        print("a banner")
        return report_of()

    monkeypatch.setattr(doctor, "gather", noisy)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--json"])) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["exit_code"] == 0
    assert said.err == "a banner\n"


# In a process of its own, on a copy of this package


def package_copy(folder):
    """The Python part of prequal alone: no native module, no manifest."""
    source = Path(doctor.__file__).parents[1]
    shutil.copytree(source, folder / "prequal", ignore=shutil.ignore_patterns("__pycache__", "*.so", "_build.json"))
    return folder / "prequal"


RUN = """
import sys
# An editable prequal puts a finder of its own before the path; the copy is meant.
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
{prepare}
from prequal.cli.doctor import main
sys.exit(main({arguments!r}))
"""


def doctor_process(folder, *arguments, prepare=""):
    return subprocess.run(
        [sys.executable, "-c", RUN.format(prepare=prepare, arguments=list(arguments))],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
    )


BLOCK_TORCH = "sys.modules['torch'] = None"


def test_doctor_works_where_torch_cannot_be_imported(tmp_path):
    package_copy(tmp_path)
    said = doctor_process(tmp_path, "--json", prepare=BLOCK_TORCH)
    assert said.returncode == 2, said.stderr
    report = json.loads(said.stdout)
    assert report["torch"]["problem"]["kind"] == "missing_module"
    assert requirement(report, "torch")["ok"] is False
    assert "torch cannot be imported" in report["verdict"]


def test_doctor_speaks_to_people_where_torch_cannot_be_imported(tmp_path):
    package_copy(tmp_path)
    said = doctor_process(tmp_path, prepare=BLOCK_TORCH)
    assert said.returncode == 2, said.stderr
    assert "not importable" in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 100


def test_doctor_reads_why_a_torch_is_broken(tmp_path):
    package_copy(tmp_path)
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')\n"
    )
    report = json.loads(doctor_process(tmp_path, "--json").stdout)
    assert report["exit_code"] == 2
    assert (report["torch"]["problem"]["kind"], report["torch"]["problem"]["wanted"]) == (
        "missing_library",
        "libcudart.so.12",
    )


@pytest.mark.parametrize("prepare", [BLOCK_TORCH, ""], ids=["without torch", "with torch"])
def test_doctor_says_why_a_damaged_native_module_does_not_load(tmp_path, prepare):
    file = package_copy(tmp_path) / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    file.write_bytes(b"no shared library, whatever its name says")
    said = doctor_process(tmp_path, "--json", prepare=prepare)
    assert said.returncode == 2, said.stderr
    native = json.loads(said.stdout)["native"]
    assert (native["state"], native["problem"]["kind"]) == ("broken", "corrupt")
    assert native["files"] == [str(file)]


def test_doctor_says_why_a_native_module_of_another_python_does_not_load(tmp_path):
    (package_copy(tmp_path) / "_native.cpython-36m-x86_64-linux-gnu.so").touch()
    report = json.loads(doctor_process(tmp_path, "--json", prepare=BLOCK_TORCH).stdout)
    assert report["native"]["problem"]["kind"] == "python_abi"


def test_doctor_says_what_is_wrong_with_a_broken_manifest(tmp_path):
    (package_copy(tmp_path) / "_build.json").write_text('{"schema": 1}')
    report = json.loads(doctor_process(tmp_path, "--json", prepare=BLOCK_TORCH).stdout)
    assert "is broken: " in report["manifest_problem"]
    assert requirement(report, "build manifest")["ok"] is False


def test_doctor_verifies_an_installed_wheel_in_its_own_process(tmp_path):
    package = package_copy(tmp_path)
    files = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in package.rglob("*") if path.is_file()}
    install(tmp_path, files=files)
    report = json.loads(doctor_process(tmp_path, "--json", "--verify", prepare=BLOCK_TORCH).stdout)
    assert report["verify"]["state"] == "ok"
    changed = package / "cli" / "doctor.py"
    changed.write_text(changed.read_text() + "# changed\n")
    report = json.loads(doctor_process(tmp_path, "--json", "--verify", prepare=BLOCK_TORCH).stdout)
    assert report["verify"]["state"] == "mismatch"
    assert report["verify"]["problems"][0].startswith("prequal/cli/doctor.py: changed")
    assert "installed files are not the wheel's" in report["verdict"]
