"""What results on this worker depend on, as one canonical JSON text and its sha256.

Stage A (`collect`) runs at import and asks only files, NVML and what Python knows: it makes no CUDA call, so it
creates no context and spoils no later fork. Stage B (`Fingerprint.with_device`) runs at the first use of a device
and may ask CUDA; where the two speak of the same thing, stage B is right and `disagreements` names the difference.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from . import loaded as loaded_libraries
from . import manifest as build_manifest
from .loaded import LoadedLibrary
from .nvml import Gpu, Nvml, NvmlError, SystemNvml, Visible, visible

SCHEMA = 1

# Environment that moves results, or decides which device or code runs. LD_LIBRARY_PATH and LD_PRELOAD are absent on
# purpose: what they change is which libraries load, and stage B records those as they are.
ENVIRONMENT: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "which GPUs exist for this process, and their indices",
    "CUDA_DEVICE_ORDER": "which GPU an index means on a mixed host",
    "CUDA_LAUNCH_BLOCKING": "makes launches synchronous: hides races, forbids graph capture of some calls",
    "CUDA_MODULE_LOADING": "lazy or eager: whether a first launch may load a module, so deadlock or break a capture",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues: changes which kernels overlap",
    "CUDA_FORCE_PTX_JIT": "makes the driver ignore machine code; a wheel without PTX then has no kernel",
    "CUDA_DISABLE_PTX_JIT": "forbids translation, so other libraries' kernels may be missing on a new GPU",
    "NVIDIA_TF32_OVERRIDE": "0 turns TF32 off below every framework flag",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1 makes torch allow TF32 from the start, whatever its default",
    "TORCH_BLAS_PREFER_CUBLASLT": "torch then multiplies through cuBLASLt: other kernels, other bits",
    "TORCH_LINALG_PREFER_CUSOLVER": "chooses the library behind torch.linalg",
    "DISABLE_ADDMM_CUDA_LT": "takes addmm's bias out of the cuBLASLt epilogue: rounds once more",
    "PYTORCH_CUDA_ALLOC_CONF": "the allocator: alignment of blocks, and whether captures can allocate",
    "PYTORCH_ALLOC_CONF": "the newer name of the same",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "no caching allocator: allocation fails inside a graph capture",
    "PREQUAL_FORCE_ARCH": "runs the kernel variants of another compute capability",
}
ENVIRONMENT_PREFIXES: Mapping[str, str] = {
    "CUBLAS_": "workspace (so algorithm and determinism) and fp32/fp64 emulation",
    "CUBLASLT_": "workspace, heuristics and algorithm overrides",
    "PYTORCH_TUNABLEOP_": "picks matrix-product algorithms by trial: other bits from run to run",
}
# Loggers under those prefixes: they change what is printed, nothing else.
_ENVIRONMENT_NOISE = ("CUBLAS_LOG", "CUBLASLT_LOG")

# What tells one worker from another of the same kind. `Fingerprint.portable` leaves it out, so that a lock made on one
# worker serves its equals.
_WORKER_ONLY: Mapping[str, str] = {
    "gpus": "which of a host's GPUs this process was given; each device it uses is described under devices",
    "environment.CUDA_VISIBLE_DEVICES": "likewise",
    "environment.CUDA_DEVICE_ORDER": "likewise",
    "runtime.environment.CUDA_VISIBLE_DEVICES": "likewise",
    "runtime.environment.CUDA_DEVICE_ORDER": "likewise",
    "runtime.libraries.*.*.path": "where the same library was installed",
    "devices.*.uuid": "this very board",
}


# NamedTuple where a dataclass would do: making one takes 0.1 ms, a frozen dataclass 0.7, and a lock must load in 20.
class Change(NamedTuple):
    """One dotted field of a fingerprint; None where a side has no such field."""

    field: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field}: was {_shown(self.was)}, now {_shown(self.now)}"


class TorchInfo(NamedTuple):
    """`torch.version`; with a problem, torch cannot be imported and the rest is None."""

    version: str | None = None
    git_version: str | None = None
    cuda: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class DeviceProperties:
    """What CUDA itself says of one device; None where this torch does not pass it on."""

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int | None = None
    shared_per_block_optin_bytes: int | None = None
    shared_per_sm_bytes: int | None = None
    memory_bytes: int | None = None
    uuid: str | None = None


class DeviceProbe(Protocol):
    """Everything that stage B asks. The real one is `TorchProbe`; a test brings its own."""

    def device(self) -> DeviceProperties: ...

    def libraries(self) -> Sequence[LoadedLibrary]: ...

    def flags(self) -> Mapping[str, bool | int | str | None]: ...

    def environment(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Fingerprint:
    """Immutable: it holds its canonical text, and every reading of `data` is a fresh copy."""

    text: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Fingerprint:
        """From plain data (of a lock, say); TypeError or ValueError names the field that is no plain JSON."""
        plain = _plain(data, "fingerprint")
        return cls(json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False))

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.text)
        return data

    def canonical(self) -> str:
        return self.text

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode("ascii")).hexdigest()

    def diff(self, now: Fingerprint) -> list[Change]:
        """What moved from this fingerprint to `now`, in the order of the fields' names."""
        return list(_changes(self.data, now.data, ""))

    def with_device(self, probe: DeviceProbe) -> Fingerprint:
        """Stage B for one device; what holds for the whole process (`runtime`) is that of the latest probe."""
        device = probe.device()
        described = {key: value for key, value in asdict(device).items() if key != "index"}
        described["capability"] = _capability(device.capability)
        described["uuid"] = _gpu_uuid(device.uuid)
        data = self.data
        data["devices"][str(device.index)] = described
        data["runtime"] = {
            "environment": relevant_environment(probe.environment()),
            "flags": dict(probe.flags()),
            "libraries": _libraries(probe.libraries()),
        }
        return Fingerprint.of(data)

    def portable(self) -> Fingerprint:
        """Without what tells this worker from an equal one (`_WORKER_ONLY` says what, and why): the key of a lock."""
        data = self.data
        for field in _WORKER_ONLY:
            _drop(data, field.split("."))
        return Fingerprint.of(data)

    def disagreements(self) -> list[Change]:
        """Where stage A (`was`) and stage B (`now`) differ; stage B is the one to believe."""
        data = self.data
        found: list[Change] = []
        for index, device in sorted(data["devices"].items(), key=lambda item: int(item[0])):
            found += _device_disagreements(data["gpus"], int(index), device)
        if "runtime" in data:
            found += _changes(data["environment"], data["runtime"]["environment"], "environment")
        return found


def collect(
    nvml: Nvml | None = None, environ: Mapping[str, str] | None = None, torch_info: TorchInfo | None = None
) -> Fingerprint:
    """Stage A. Costs an NVML session, and importing torch where that is not done yet: the caller keeps the result."""
    environ = os.environ if environ is None else environ
    manifest = build_manifest.load()
    libc, libc_version = libc_name()
    driver, shown = _read_nvml(SystemNvml() if nvml is None else nvml, environ)
    return Fingerprint.of(
        {
            "schema": SCHEMA,
            "prequal": {
                "version": manifest.version,
                "commit": manifest.commit,
                "dirty": manifest.dirty,
                "toolkit": manifest.cuda.toolkit if manifest.cuda else None,
                "nvcc": manifest.cuda.nvcc if manifest.cuda else None,
                "archs": manifest.archs,
                "ptx": manifest.ptx,
                "source_digest": manifest.source_digest,
                "problem": manifest.problem,
            },
            "python": {
                "version": platform.python_version(),
                "implementation": sys.implementation.name,
                "abi": sysconfig.get_config_var("SOABI"),
            },
            "libc": {"name": libc, "version": libc_version},
            "torch": (read_torch() if torch_info is None else torch_info)._asdict(),
            "driver": driver,
            "gpus": shown,
            "environment": relevant_environment(environ),
            "devices": {},
        }
    )


def relevant_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that ENVIRONMENT and ENVIRONMENT_PREFIXES name."""
    return {
        name: value
        for name, value in environ.items()
        if name in ENVIRONMENT
        or (name.startswith(tuple(ENVIRONMENT_PREFIXES)) and not name.startswith(_ENVIRONMENT_NOISE))
    }


def libc_name() -> tuple[str | None, str | None]:
    """("glibc", "2.36"); (None, None) where the C library does not say, as musl does not."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, OSError, ValueError):
        name = version = ""
    return (name, version) if name and version else (None, None)


def read_torch() -> TorchInfo:
    """torch's own account of its build; imports torch where it can be, and says why where it cannot."""
    try:
        if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
            return TorchInfo(problem="torch is not installed")
        # By name: a reader of this file, and a type checker, must not need torch.
        version = importlib.import_module("torch").version
        return TorchInfo(
            version=str(version.__version__),
            git_version=_text_or_none(getattr(version, "git_version", None)),
            cuda=_text_or_none(getattr(version, "cuda", None)),
        )
    except Exception as error:  # a broken torch raises what its own start-up happened to meet
        return TorchInfo(problem=f"{type(error).__name__}: {error}")


class TorchProbe:
    """Stage B through torch. `device` makes torch initialise CUDA."""

    def __init__(self, index: int) -> None:
        self._index = index

    def device(self) -> DeviceProperties:
        torch = importlib.import_module("torch")
        found = torch.cuda.get_device_properties(self._index)
        return DeviceProperties(
            index=self._index,
            name=str(found.name),
            capability=(int(found.major), int(found.minor)),
            sms=int(found.multi_processor_count),
            l2_bytes=_int_or_none(getattr(found, "L2_cache_size", None)),
            shared_per_block_optin_bytes=_int_or_none(getattr(found, "shared_memory_per_block_optin", None)),
            shared_per_sm_bytes=_int_or_none(getattr(found, "shared_memory_per_multiprocessor", None)),
            memory_bytes=_int_or_none(getattr(found, "total_memory", None)),
            uuid=_text_or_none(getattr(found, "uuid", None)),
        )

    def libraries(self) -> Sequence[LoadedLibrary]:
        return loaded_libraries.loaded()

    def flags(self) -> Mapping[str, bool | int | str | None]:
        return torch_flags(importlib.import_module("torch"))

    def environment(self) -> Mapping[str, str]:
        return os.environ


# Flags of torch that decide how a reference computes, as paths below the module `torch`.
_FLAGS = (
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
)
_FLAG_CALLS = (
    "get_float32_matmul_precision",
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "backends.cuda.preferred_blas_library",
)


def torch_flags(torch: Any) -> dict[str, bool | int | str | None]:
    """Every flag under its own name; one that this torch lacks is absent, one that it refuses to tell says so."""
    flags: dict[str, bool | int | str | None] = {}
    for name in (*_FLAGS, *_FLAG_CALLS):
        try:
            value = torch
            for part in name.split("."):
                value = getattr(value, part)
            if name in _FLAG_CALLS:
                value = value()
        except AttributeError:
            continue
        except Exception as error:  # torch >= 2.9 raises where old and new TF32 settings were mixed
            # The kind alone: the text may hold addresses, and a fingerprint must not move by itself.
            value = f"unreadable: {type(error).__name__}"
        key = name.removeprefix("backends.").removeprefix("get_").replace(".", "_")
        flags[key] = value if isinstance(value, bool | int | str) or value is None else str(value)
    return flags


def _read_nvml(nvml: Nvml, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    driver: dict[str, Any] = {"version": None, "problem": None}
    try:
        driver["version"] = nvml.driver_version()
    except NvmlError as error:
        driver["problem"] = str(error)
    try:
        shown = visible(nvml.gpus(), environ)
    except NvmlError as error:
        shown = Visible("unknown", (), None, None, str(error))
    capabilities = None if shown.capabilities is None else [_capability(pair) for pair in shown.capabilities]
    return driver, {
        "state": shown.state,
        "count": shown.count,
        "capabilities": capabilities,
        "visible": [_described(gpu) for gpu in shown.gpus],
        "note": shown.note,
    }


def _described(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "capability": None if gpu.capability is None else _capability(gpu.capability),
    }


def _device_disagreements(gpus: Mapping[str, Any], index: int, device: Mapping[str, Any]) -> list[Change]:
    if gpus["state"] == "unknown":
        return []
    seen, uuid = gpus["visible"], device["uuid"]
    where = f"devices.{index}"
    expected = next((gpu for gpu in seen if uuid is not None and gpu["uuid"] == uuid), None)
    if gpus["state"] == "known":
        if index >= len(seen):
            return [Change(where, None, device["capability"])]  # stage A did not see this device at all
        expected = seen[index]
    if expected is None:
        # Unordered, and no UUID to go by: all that stage A said is which capabilities there may be.
        if device["capability"] in gpus["capabilities"]:
            return []
        return [Change(f"{where}.capability", gpus["capabilities"], device["capability"])]
    return [
        Change(f"{where}.{field}", expected[field], device[field])
        for field in ("capability", "name", "uuid")
        if expected[field] is not None and device[field] is not None and expected[field] != device[field]
    ]


def _libraries(found: Sequence[LoadedLibrary]) -> dict[str, list[dict[str, Any]]]:
    libraries: dict[str, list[dict[str, Any]]] = {}
    for library in found:
        # nvidia-ml is stage A's, and libcuda's version is the driver's.
        if library.name not in ("cuda", "nvidia-ml"):
            described = library._asdict()
            libraries.setdefault(described.pop("name"), []).append(described)
    return libraries


def _changes(was: Any, now: Any, path: str) -> Iterator[Change]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from _changes(was.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now) and _objects(was) and _objects(now):
        for index, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from _changes(before, after, f"{path}.{index}")
    elif (isinstance(was, dict) and was and now is None) or (isinstance(now, dict) and now and was is None):
        yield from _changes(was or {}, now or {}, path)
    elif json.dumps(was) != json.dumps(now):  # not ==, for which 1, 1.0 and true are the same
        yield Change(path, was, now)


def _objects(values: list[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _drop(data: Any, path: list[str]) -> None:
    key, rest = path[0], path[1:]
    if isinstance(data, list):
        for value in data:
            _drop(value, rest)
        return
    keys = list(data) if key == "*" else [key]
    for name in keys:
        if name in data and rest:
            _drop(data[name], rest)
        elif name in data:
            del data[name]


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: expected a finite number, found {value}")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: expected text as key, found {key!r}")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}.{index}") for index, item in enumerate(value)]
    raise TypeError(f"{where}: expected plain JSON data, found {type(value).__name__}")


def _capability(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _gpu_uuid(uuid: str | None) -> str | None:
    """As NVML writes it; torch leaves the prefix out."""
    return uuid if uuid is None or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)
