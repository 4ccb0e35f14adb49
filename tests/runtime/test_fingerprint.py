"""One canonical text and one hash for what results depend on, in two stages, on simulated machines."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import prequal.runtime.fingerprint as fingerprint_module
from prequal.runtime import loaded as loaded_libraries
from prequal.runtime.fingerprint import (
    ENVIRONMENT,
    Change,
    DeviceProperties,
    Fingerprint,
    TorchInfo,
    collect,
    read_torch,
    relevant_environment,
    torch_flags,
)
from prequal.runtime.loaded import LoadedLibrary, loaded
from prequal.runtime.nvml import Gpu, NvmlError

UUID = "GPU-437787e1-30b6-95ae-cfa3-673071e6d02d"
HOPPER = Gpu(0, UUID, "NVIDIA H200", (9, 0))
AMPERE = Gpu(1, "GPU-10000000-0000-0000-0000-000000000000", "NVIDIA A100", (8, 0))
TORCH = TorchInfo("2.13.0+cu130", "cf30153c", "13.0")
CUBLAS = LoadedLibrary("cublas", "/site/nvidia/cu13/lib/libcublas.so.13", "libcublas.so.13", "13.1.0")


class FakeNvml:
    def __init__(self, *gpus, driver="580.95.05", error=None):
        self._gpus, self._driver, self._error = gpus, driver, error

    def driver_version(self):
        return self._driver

    def gpus(self):
        if self._error is not None:
            raise NvmlError(self._error)
        return self._gpus


class NoDriver:
    def driver_version(self):
        raise NvmlError("nvmlInit failed: NVML Shared Library Not Found")

    gpus = driver_version


class FakeProbe:
    def __init__(self, *, libraries=(CUBLAS,), flags=None, environ=None, **device):
        standard = {"index": 0, "name": "NVIDIA H200", "capability": (9, 0), "sms": 132, "uuid": UUID[4:]}
        self._device = DeviceProperties(**{**standard, **device})
        self._libraries, self._flags, self._environ = libraries, flags or {"cuda_matmul_allow_tf32": False}, environ

    def device(self):
        return self._device

    def libraries(self):
        return self._libraries

    def flags(self):
        return self._flags

    def environment(self):
        return self._environ or {}


def stage_a(*gpus, environ=None, torch=TORCH, **nvml):
    return collect(FakeNvml(*(gpus or (HOPPER,)), **nvml), environ or {}, torch)


def test_stage_a_says_what_the_machine_is():
    data = stage_a(environ={"NVIDIA_TF32_OVERRIDE": "0", "HOME": "/x"}).data
    assert data["driver"] == {"version": "580.95.05", "problem": None}
    assert data["gpus"]["state"] == "known"
    assert data["gpus"]["capabilities"] == ["9.0"]
    assert data["gpus"]["visible"] == [{"index": 0, "uuid": UUID, "name": "NVIDIA H200", "capability": "9.0"}]
    assert data["torch"] == {"version": TORCH.version, "git_version": "cf30153c", "cuda": "13.0", "problem": None}
    assert data["environment"] == {"NVIDIA_TF32_OVERRIDE": "0"}
    assert data["python"]["implementation"] == sys.implementation.name
    assert set(data["prequal"]) >= {"version", "commit", "nvcc", "archs", "source_digest", "problem"}
    assert data["devices"] == {}


def test_without_a_driver_the_gpus_are_unknown_and_the_reason_is_kept():
    data = collect(NoDriver(), {}, TORCH).data
    assert data["driver"] == {"version": None, "problem": "nvmlInit failed: NVML Shared Library Not Found"}
    assert (data["gpus"]["state"], data["gpus"]["capabilities"], data["gpus"]["count"]) == ("unknown", None, None)
    assert "Not Found" in data["gpus"]["note"]


def test_a_driver_whose_gpus_are_unreadable_keeps_its_version():
    data = stage_a(error="GPU is lost").data
    assert data["driver"]["version"] == "580.95.05"
    assert data["gpus"]["state"] == "unknown"
    assert data["gpus"]["note"] == "GPU is lost"


def test_mig_is_unknown_not_guessed():
    gpus = stage_a(dataclasses.replace(HOPPER, mig=True)).data["gpus"]
    assert (gpus["state"], gpus["visible"], gpus["capabilities"]) == ("unknown", [], None)


def test_torch_that_cannot_be_imported_is_a_field_like_any_other():
    data = stage_a(torch=TorchInfo(problem="torch is not installed")).data
    assert data["torch"] == {"version": None, "git_version": None, "cuda": None, "problem": "torch is not installed"}


def test_a_blocked_torch_is_said_and_not_raised(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "ModuleNotFoundError" in read_torch().problem


def test_every_variable_of_the_environment_table_has_a_reason():
    assert all(reason.strip() for reason in ENVIRONMENT.values())
    environ = dict.fromkeys([*ENVIRONMENT, "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"], "1")
    noise = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "CUBLAS_LOGINFO_DBG": "1", "CUBLASLT_LOG_LEVEL": "5"}
    assert relevant_environment({**environ, **noise}) == environ


def test_the_canonical_text_is_sorted_ascii_without_blanks():
    text = Fingerprint.of({"b": [1, None, True], "a": {"é": "ü \udcff"}}).canonical()
    assert text == '{"a":{"\\u00e9":"\\u00fc \\udcff"},"b":[1,null,true]}'


def test_the_order_of_keys_does_not_matter():
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert Fingerprint.of(one) == Fingerprint.of(other)
    assert Fingerprint.of(one).sha256 == Fingerprint.of(other).sha256


def test_data_goes_there_and_back_and_is_no_way_to_change_it():
    fingerprint = stage_a().with_device(FakeProbe())
    assert Fingerprint.of(fingerprint.data) == fingerprint
    fingerprint.data["driver"]["version"] = "1"
    assert fingerprint.data["driver"]["version"] == "580.95.05"


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (float("nan"), ValueError, "fingerprint.a.0"),
        (float("inf"), ValueError, "inf"),
        ({1: 2}, TypeError, "expected text as key, found 1"),
        (b"x", TypeError, "found bytes"),
        ({1, 2}, TypeError, "found set"),
    ],
)
def test_what_is_no_plain_json_is_refused_by_name(value, error, says):
    with pytest.raises(error, match=says):
        Fingerprint.of({"a": [value]})


PROGRAM = """
import sys
from prequal.runtime.fingerprint import DeviceProperties, TorchInfo, collect
from prequal.runtime.nvml import Gpu

class Nvml:
    driver_version = staticmethod(lambda: "580.95.05")
    gpus = staticmethod(lambda: (Gpu(0, "GPU-1", "NVIDIA H200", (9, 0)), Gpu(1, "GPU-2", "NVIDIA A100", (8, 0))))

environ = dict.fromkeys({"CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING"}, "1")
fingerprint = collect(Nvml(), environ, TorchInfo("2.13.0", "cf30153c", "13.0"))
print(fingerprint.sha256, fingerprint.canonical())
"""


def test_the_hash_is_the_same_in_every_process():
    path = str(Path(fingerprint_module.__file__).parents[2])
    said = {
        subprocess.run(
            [sys.executable, "-c", f"import sys\nsys.path.insert(0, {path!r})\n{PROGRAM}"],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(said) == 1


def test_nothing_moved_is_no_change():
    assert stage_a().diff(stage_a()) == []


def test_a_change_names_its_field_and_both_sides():
    was, now = stage_a(), stage_a(torch=TORCH._replace(version="2.14.0"), driver="590.1")
    assert was.diff(now) == [
        Change("driver.version", "580.95.05", "590.1"),
        Change("torch.version", "2.13.0+cu130", "2.14.0"),
    ]
    assert str(was.diff(now)[1]) == 'torch.version: was "2.13.0+cu130", now "2.14.0"'
    assert was.sha256 != now.sha256


def test_fields_that_come_and_go_are_named_to_the_leaf():
    without, with_device = stage_a(), stage_a().with_device(FakeProbe())
    came = {change.field: change for change in without.diff(with_device)}
    assert came["devices.0.capability"] == Change("devices.0.capability", None, "9.0")
    assert came["runtime.flags.cuda_matmul_allow_tf32"].now is False
    went = with_device.diff(without)
    assert {change.field for change in went} == set(came)
    assert all(change.now is None for change in went if change.was is not None)


def test_a_change_deep_in_a_list_of_objects_is_named_by_its_place():
    was = stage_a(HOPPER, AMPERE, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    now = stage_a(HOPPER, dataclasses.replace(AMPERE, uuid="GPU-2"), environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [change.field for change in was.diff(now)] == ["gpus.visible.1.uuid"]


def test_true_and_one_are_different_values():
    assert Fingerprint.of({"a": True}).diff(Fingerprint.of({"a": 1})) == [Change("a", True, 1)]


@pytest.mark.parametrize(
    ("probe", "field"),
    [
        (FakeProbe(name="NVIDIA H100"), "devices.0.name"),
        (FakeProbe(sms=114), "devices.0.sms"),
        (FakeProbe(l2_bytes=1), "devices.0.l2_bytes"),
        (FakeProbe(flags={"cuda_matmul_allow_tf32": True}), "runtime.flags.cuda_matmul_allow_tf32"),
        (
            FakeProbe(libraries=[CUBLAS._replace(version="13.2.0")]),
            "runtime.libraries.cublas.0.version",
        ),
        (FakeProbe(environ={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}), "runtime.environment.CUBLAS_WORKSPACE_CONFIG"),
    ],
)
def test_each_property_of_stage_b_moves_the_fingerprint_by_name(probe, field):
    changes = stage_a().with_device(FakeProbe()).diff(stage_a().with_device(probe))
    assert [change.field for change in changes] == [field]


def test_devices_are_kept_apart():
    fingerprint = stage_a(HOPPER, AMPERE).with_device(FakeProbe())
    fingerprint = fingerprint.with_device(FakeProbe(index=1, name="NVIDIA A100", capability=(8, 0), sms=108, uuid=None))
    assert {index: device["capability"] for index, device in fingerprint.data["devices"].items()} == {
        "0": "9.0",
        "1": "8.0",
    }


@pytest.mark.parametrize("uuid", [UUID, UUID[4:], None])
def test_a_device_that_is_not_what_nvml_said_keeps_both_and_is_named(uuid):
    fingerprint = stage_a().with_device(FakeProbe(capability=(8, 0), uuid=uuid))
    assert fingerprint.data["gpus"]["capabilities"] == ["9.0"]
    assert fingerprint.data["devices"]["0"]["capability"] == "8.0"
    assert fingerprint.disagreements() == [Change("devices.0.capability", "9.0", "8.0")]


def test_agreeing_stages_have_no_disagreement():
    assert stage_a().with_device(FakeProbe()).disagreements() == []


def test_an_unknown_stage_a_disagrees_with_nothing():
    assert collect(NoDriver(), {}, TORCH).with_device(FakeProbe()).disagreements() == []


def test_a_device_that_stage_a_did_not_see_is_named():
    hidden = stage_a(environ={"CUDA_VISIBLE_DEVICES": ""}).with_device(FakeProbe(environ={"CUDA_VISIBLE_DEVICES": "0"}))
    assert hidden.disagreements() == [
        Change("devices.0", None, "9.0"),
        Change("environment.CUDA_VISIBLE_DEVICES", "", "0"),
    ]


def test_another_board_at_the_same_index_is_named():
    fingerprint = stage_a(HOPPER).with_device(FakeProbe(uuid="GPU-2"))
    assert fingerprint.disagreements() == [Change("devices.0.uuid", UUID, "GPU-2")]


def test_on_a_mixed_host_only_the_set_of_capabilities_is_held_against_a_device():
    mixed = stage_a(HOPPER, AMPERE)
    assert mixed.with_device(FakeProbe(capability=(8, 0), uuid=None)).disagreements() == []
    assert mixed.with_device(FakeProbe(capability=(7, 5), uuid=None)).disagreements() == [
        Change("devices.0.capability", ["8.0", "9.0"], "7.5")
    ]
    # with a UUID, the very board is known
    assert mixed.with_device(FakeProbe(capability=(8, 0))).disagreements()[0].was == "9.0"


def test_equal_workers_share_a_portable_fingerprint_and_unequal_ones_do_not():
    here = stage_a().with_device(FakeProbe())
    elsewhere = stage_a(
        dataclasses.replace(AMPERE, index=0),
        dataclasses.replace(HOPPER, index=1),
        environ={"CUDA_VISIBLE_DEVICES": "1"},
    ).with_device(FakeProbe(uuid="GPU-9", libraries=[CUBLAS._replace(path="/opt/libcublas.so.13")]))
    assert here.sha256 != elsewhere.sha256
    assert here.portable().diff(elsewhere.portable()) == []
    other = stage_a().with_device(FakeProbe(capability=(8, 0)))
    assert [change.field for change in here.portable().diff(other.portable())] == ["devices.0.capability"]


class Flags:
    """As torch holds them, with one that it refuses to tell and several that it lacks."""

    class backends:
        class cuda:
            class matmul:
                allow_tf32 = False
                allow_fp16_reduced_precision_reduction = True

            @staticmethod
            def preferred_blas_library():
                return Path("cublaslt")  # stands for torch's own enumeration

        class cudnn:
            @property
            def allow_tf32(self):
                raise RuntimeError("mix of the legacy and new APIs at 0x7f")

        cudnn = cudnn()

    @staticmethod
    def get_float32_matmul_precision():
        return "highest"


def test_a_flag_is_plain_or_absent_or_says_that_it_is_unreadable():
    assert torch_flags(Flags) == {
        "cuda_matmul_allow_tf32": False,
        "cuda_matmul_allow_fp16_reduced_precision_reduction": True,
        "cuda_preferred_blas_library": "cublaslt",
        "cudnn_allow_tf32": "unreadable: RuntimeError",
        "float32_matmul_precision": "highest",
    }


def test_the_flags_of_this_torch_are_read_and_follow_it():
    torch = pytest.importorskip("torch")
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    first = torch_flags(torch)
    assert {"cuda_matmul_allow_tf32", "cudnn_allow_tf32", "float32_matmul_precision"} <= set(first)
    assert "are_deterministic_algorithms_enabled" in first
    try:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not before
        moved = torch_flags(torch)
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
    key = "cuda_matmul_allow_bf16_reduced_precision_reduction"
    assert (first[key], moved[key]) == (before, not before)


MAPS = """\
55d0c0000000-55d0c0001000 r-xp 00000000 00:00 0                          [heap]
7f0000000000-7f0000001000 r--p 00000000 00:1d 17 /site packages/nvidia/cu13/lib/libcublas.so.13
7f0000001000-7f0000002000 r-xp 00001000 00:1d 17 /site packages/nvidia/cu13/lib/libcublas.so.13
7f0000003000-7f0000004000 r-xp 00000000 00:1d 18 /site packages/nvidia/cu13/lib/libcublasLt.so.13
7f0000005000-7f0000006000 r-xp 00000000 00:1d 19 /usr/lib/libcudart-1a2b3c4d.so.12.9.79 (deleted)
7f0000007000-7f0000008000 r-xp 00000000 00:1d 20 /usr/lib/libcuda.so.580.95.05
7f0000009000-7f000000a000 r-xp 00000000 00:1d 21 /usr/lib/libnvrtc-builtins.so.13.0
7f000000b000-7f000000c000 r-xp 00000000 00:00 0
7f000000d000-7f000000e000 r-xp 00000000 00:1d 22 /usr/lib/libc.so.6
"""


def test_loaded_libraries_are_read_from_the_map():
    asked = []
    found = loaded(MAPS, lambda name, path: asked.append(name) or ("13.1.0" if name.startswith("cublas") else None))
    folder = "/site packages/nvidia/cu13/lib"
    assert found == [
        LoadedLibrary("cublas", f"{folder}/libcublas.so.13", "libcublas.so.13", "13.1.0"),
        LoadedLibrary("cublasLt", f"{folder}/libcublasLt.so.13", "libcublasLt.so.13", "13.1.0"),
        LoadedLibrary("cuda", "/usr/lib/libcuda.so.580.95.05", "libcuda.so.580.95.05", "580.95.05"),
        LoadedLibrary(
            "cudart", "/usr/lib/libcudart-1a2b3c4d.so.12.9.79", "libcudart-1a2b3c4d.so.12.9.79", "12.9.79", True
        ),
    ]
    assert sorted(asked) == ["cublas", "cublasLt", "cuda", "cudart"]


def test_the_real_file_behind_a_link_gives_the_version(tmp_path):
    (tmp_path / "libcublas.so.13.1.0.3").touch()
    (tmp_path / "libcublas.so.13").symlink_to("libcublas.so.13.1.0.3")
    found = loaded(f"0-1 r-xp 0 0:0 1 {tmp_path}/libcublas.so.13\n", lambda name, path: None)
    assert [(library.file, library.version) for library in found] == [("libcublas.so.13.1.0.3", "13.1.0.3")]


def test_asking_a_version_never_loads_a_library(tmp_path):
    path = tmp_path / "libcublas.so.13"
    path.write_bytes(b"no shared library")
    assert loaded_libraries.library_version("cublas", str(path)) is None
    assert str(path) not in loaded_libraries.read_maps()


def test_no_map_is_no_libraries(tmp_path):
    assert loaded_libraries.read_maps(str(tmp_path / "absent")) == ""
    assert loaded("") == []


@pytest.mark.gpu
def test_stage_a_leaves_cuda_alone_and_stage_b_agrees_with_it():
    torch = pytest.importorskip("torch")
    program = """
import os, sys
from prequal.runtime.fingerprint import TorchProbe, collect
import torch
first = collect()
assert not torch.cuda.is_initialized()
child = os.fork()
if not child:
    os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
assert os.waitpid(child, 0)[1] == 0, "a fork after stage A cannot use CUDA"
for index in range(torch.cuda.device_count()):
    first = first.with_device(TorchProbe(index))
assert first.disagreements() == [], first.disagreements()
print(first.canonical())
"""
    path = str(Path(fingerprint_module.__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
    said = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    data = json.loads(said.stdout)
    assert len(data["devices"]) == torch.cuda.device_count()
    versions = {name: entries[0]["version"] for name, entries in data["runtime"]["libraries"].items()}
    assert versions["cublas"].split(".")[0] == versions["cublasLt"].split(".")[0] == data["torch"]["cuda"].split(".")[0]
