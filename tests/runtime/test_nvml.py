"""NVML read through a thin interface, and CUDA_VISIBLE_DEVICES read as the driver reads it."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

import prequal.runtime.nvml as nvml_module
from prequal.runtime.nvml import Gpu, NvmlError, SystemNvml, visible

A = Gpu(0, "GPU-437787e1-30b6-95ae-cfa3-673071e6d02d", "NVIDIA H200", (9, 0))
B = Gpu(1, "GPU-4b0cdff0-4fa4-41e6-0f14-21ba657ef46f", "NVIDIA H200", (9, 0))
OLD = Gpu(1, "GPU-10000000-0000-0000-0000-000000000000", "NVIDIA A100", (8, 0))


# Seen on driver 580 with two GPUs, one process and one cuDeviceGetCount each; the very long ones follow from atoi.
@pytest.mark.parametrize(
    ("entries", "indices"),
    [
        (None, [0, 1]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("0", [0]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("0,0", []),
        ("0,1,0", []),
        ("0,5,1", [0]),
        ("5,0", []),
        ("0,-1,1", [0]),
        ("0gpu", [0]),
        ("1gpu,0x", [1, 0]),
        ("+1", [1]),
        (" 1 , 0 ", [1, 0]),
        ("x", []),
        ("0,x,1", [0]),
        ("0,", [0]),
        (",0", []),
        ("0,,1", [0]),
        ("0x1", [0]),
        ("01", [1]),
        ("1.0", [1]),
        ("0;1", [0]),
        ("99999999999999999999,0", []),
        ("4294967297", [1]),
        ("9" * 5000, []),
        ("0" * 5000 + "1", [1]),
        ("-0", [0]),
        ("+", []),
        ("none", []),
        ("all", []),
        ("NoDevFiles", []),
        (A.uuid, [0]),
        (B.uuid, [1]),
        (f"{B.uuid},{A.uuid}", [1, 0]),
        (f"{B.uuid},{B.uuid}", []),
        ("GPU-43", [0]),
        ("GPU-4", []),
        ("GPU-", []),
        ("GPU-zz", []),
        (f"{A.uuid},GPU-zz,{B.uuid}", [0]),
        (f"0,{B.uuid}", [0]),
        (f"{B.uuid},0", [1]),
        (f" {B.uuid}", []),
        (f"{B.uuid} ", [1]),
        (f"{B.uuid}zz", [1]),
        (f"{B.uuid} x", [1]),
        (f"{str(B.uuid)[:12]}zz", []),
        (f"gpu-{str(B.uuid)[4:]}", []),
        (f"{B.uuid},MIG-x", [1]),
        ("0,MIG-x", [0]),
        ("GPU-4,0", []),
        (f"{A.uuid}, {B.uuid}", [0]),
        (str(B.uuid)[4:], []),
        (f"GPU-{str(B.uuid)[4:].upper()}", [1]),
    ],
)
def test_visible_devices_are_those_the_driver_shows(entries, indices):
    shown = visible((A, B), {} if entries is None else {"CUDA_VISIBLE_DEVICES": entries})
    assert shown.state == "known"
    assert [gpu.index for gpu in shown.gpus] == indices
    assert shown.count == len(indices)
    assert shown.capabilities == (((9, 0),) if indices else ())
    assert entries is None or "CUDA_VISIBLE_DEVICES" in shown.note


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ("0,0", "repeats"),
        ("0,x", "'x' is no index"),
        ("GPU-4", "ambiguous, it fits GPU 0, 1"),
        ("GPU-zz", "no UUID"),
        ("", "empty"),
        ("-1", "negative"),
    ],
)
def test_a_note_says_why_a_gpu_is_hidden(entries, says):
    assert says in visible((A, B), {"CUDA_VISIBLE_DEVICES": entries}).note


@pytest.mark.parametrize("entries", ["MIG-4b0cdff0-4fa4-41e6-0f14-21ba657ef46f", "MIG-GPU-4b0cdff0/1/0"])
def test_a_mig_uuid_is_unknown_not_guessed(entries):
    shown = visible((A, B), {"CUDA_VISIBLE_DEVICES": entries})
    assert (shown.state, shown.gpus, shown.count, shown.capabilities) == ("unknown", (), None, None)
    assert "MIG" in shown.note


@pytest.mark.parametrize("entries", [None, "0", "1", A.uuid])
def test_mig_enabled_anywhere_is_unknown_not_guessed(entries):
    mig = Gpu(1, B.uuid, B.name, B.capability, mig=True)
    shown = visible((A, mig), {} if entries is None else {"CUDA_VISIBLE_DEVICES": entries})
    assert shown.state == "unknown"
    assert "MIG is enabled on GPU 1" in shown.note


@pytest.mark.parametrize("entries", ["", "-1"])
def test_hiding_every_gpu_is_known_whatever_the_gpus_are(entries):
    mig = Gpu(0, None, None, None, mig=True)
    assert visible((mig,), {"CUDA_VISIBLE_DEVICES": entries}).count == 0


def test_an_unreadable_capability_is_unknown_only_while_that_gpu_is_visible():
    unread = Gpu(1, B.uuid, B.name, None)
    assert visible((A, unread), {}).state == "unknown"
    assert "compute capability for GPU 1" in visible((A, unread), {}).note
    assert visible((A, unread), {"CUDA_VISIBLE_DEVICES": str(A.uuid)}).gpus == (A,)


def test_without_uuids_a_uuid_list_is_unknown():
    assert visible((A, Gpu(1, None, "x", (9, 0))), {"CUDA_VISIBLE_DEVICES": str(A.uuid)}).state == "unknown"


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
@pytest.mark.parametrize(("entries", "count"), [(None, 2), ("1", 1), ("1,0", 2)])
def test_an_index_on_a_mixed_host_names_no_gpu_but_the_capabilities_are_known(order, entries, count):
    environ = {"CUDA_VISIBLE_DEVICES": entries, "CUDA_DEVICE_ORDER": order}
    shown = visible((A, OLD), {name: value for name, value in environ.items() if value is not None})
    assert (shown.state, shown.count, shown.capabilities) == ("unordered", count, ((8, 0), (9, 0)))
    assert "CUDA_DEVICE_ORDER" in shown.note


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (A, OLD)),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}, (OLD,)),
        ({"CUDA_VISIBLE_DEVICES": f"{OLD.uuid},{A.uuid}"}, (OLD, A)),
        ({"CUDA_VISIBLE_DEVICES": "7"}, ()),
    ],
)
def test_pci_order_and_uuids_name_gpus_on_a_mixed_host(environ, gpus):
    shown = visible((A, OLD), environ)
    assert (shown.state, shown.gpus) == ("known", gpus)


# Driver 580 then starts with CUDA_ERROR_INVALID_DEVICE; whether others do is not guessed.
@pytest.mark.parametrize("order", ["", "junk", "pci_bus_id", " PCI_BUS_ID"])
def test_a_device_order_that_cuda_refuses_is_unknown(order):
    shown = visible((A, B), {"CUDA_DEVICE_ORDER": order})
    assert shown.state == "unknown"
    assert f"CUDA_DEVICE_ORDER={order!r}" in shown.note


def test_gpus_without_a_name_are_not_taken_for_alike():
    nameless = (Gpu(0, "GPU-1", None, (9, 0)), Gpu(1, "GPU-2", None, (9, 0)))
    assert visible(nameless, {}).state == "unordered"
    assert visible(nameless[:1], {}).state == "known"


def test_a_driver_without_gpus_is_known_to_show_none():
    assert visible((), {}).count == 0
    assert "no GPU" in visible((), {"CUDA_VISIBLE_DEVICES": "0"}).note


class FakeError(Exception):
    pass


class NotSupported(FakeError):
    pass


def fake_pynvml(**replaced):
    """A stand-in for the module pynvml; `calls` keeps what was called, in order."""
    calls = []

    def recorded(name, function):
        def call(*args):
            calls.append(name)
            return function(*args)

        return call

    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: (A, B)[handle].uuid,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        **replaced,
    }
    module = types.SimpleNamespace(**{name: recorded(name, function) for name, function in functions.items()})
    module.NVMLError_NotSupported = NotSupported
    module.calls = calls
    return module


def failing(error):
    def call(*args):
        raise error

    return call


def test_nvml_is_read_in_one_session_and_shut_down():
    module = fake_pynvml()
    nvml = SystemNvml(module)
    assert nvml.driver_version() == "580.95.05"
    assert nvml.gpus() == (A, B)
    assert nvml.gpus() == (A, B)
    assert module.calls.count("nvmlInit") == module.calls.count("nvmlShutdown") == 1
    assert module.calls[-1] == "nvmlShutdown"


def test_nvml_bytes_are_text():
    nvml = SystemNvml(
        fake_pynvml(nvmlSystemGetDriverVersion=lambda: b"580.1", nvmlDeviceGetName=lambda handle: b"NVIDIA H200")
    )
    assert nvml.driver_version() == "580.1"
    assert nvml.gpus() == (A, B)


def test_a_failing_init_is_an_nvml_error_and_nothing_is_shut_down():
    module = fake_pynvml(nvmlInit=failing(FakeError("Driver/library version mismatch")))
    nvml = SystemNvml(module)
    for read in (nvml.driver_version, nvml.gpus):
        with pytest.raises(NvmlError, match="nvmlInit failed: FakeError: Driver/library version mismatch"):
            read()
    assert "nvmlShutdown" not in module.calls


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMigMode",
    ],
)
def test_a_failing_call_is_an_nvml_error_and_the_driver_version_survives(function):
    module = fake_pynvml(**{function: failing(FakeError("GPU is lost"))})
    nvml = SystemNvml(module)
    with pytest.raises(NvmlError, match="FakeError: GPU is lost"):
        nvml.gpus()
    assert nvml.driver_version() == "580.95.05"
    assert module.calls[-1] == "nvmlShutdown"


def test_a_failing_driver_version_leaves_the_gpus_readable():
    nvml = SystemNvml(fake_pynvml(nvmlSystemGetDriverVersion=failing(FakeError())))
    with pytest.raises(NvmlError, match="nvmlSystemGetDriverVersion failed: FakeError"):
        nvml.driver_version()
    assert nvml.gpus() == (A, B)


def test_a_failing_shutdown_does_not_lose_the_answers():
    assert SystemNvml(fake_pynvml(nvmlShutdown=failing(FakeError()))).gpus() == (A, B)


def test_what_a_gpu_does_not_support_is_none_and_no_mig():
    nvml = SystemNvml(
        fake_pynvml(nvmlDeviceGetMigMode=failing(NotSupported()), nvmlDeviceGetUUID=failing(NotSupported()))
    )
    assert [(gpu.uuid, gpu.mig, gpu.capability) for gpu in nvml.gpus()] == [(None, False, (9, 0))] * 2


def test_mig_is_reported():
    nvml = SystemNvml(fake_pynvml(nvmlDeviceGetMigMode=lambda handle: [handle, 0]))
    assert [gpu.mig for gpu in nvml.gpus()] == [False, True]


def run_python(program, **environ):
    environ = {"PYTHONPATH": str(Path(nvml_module.__file__).parents[2]), **environ}
    return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)


READ = """
import sys
{prepare}
from prequal.runtime.nvml import NvmlError, SystemNvml
try:
    print(SystemNvml().driver_version())
except NvmlError as error:
    print("NvmlError:", error)
"""


def test_without_nvidia_ml_py_the_error_names_the_package():
    said = run_python(READ.format(prepare="sys.modules['pynvml'] = None")).stdout
    assert said.startswith("NvmlError: nvidia-ml-py (module pynvml) cannot be imported")


def test_a_damaged_driver_library_is_an_nvml_error(tmp_path):
    pytest.importorskip("pynvml")
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no shared library")
    assert run_python(READ.format(prepare=""), LD_LIBRARY_PATH=str(tmp_path)).stdout.startswith("NvmlError: nvmlInit")
