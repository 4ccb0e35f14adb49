"""What NVML says about driver and GPUs, and which of those GPUs this process will see.

NVML answers without a CUDA context, so this may run at import, before a fork, and where CUDA itself is broken.
It is a thin interface on purpose: everything above it takes an `Nvml`, so every machine can be simulated.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

_T = TypeVar("_T")


class NvmlError(RuntimeError):
    """NVML could not be read: no package, no driver, a failing driver, or one failing call. The text says which."""


@dataclass(frozen=True)
class Gpu:
    """One GPU in NVML's (= PCI bus) order; a field NVML does not know on this GPU is None."""

    index: int
    uuid: str | None = None
    name: str | None = None
    capability: tuple[int, int] | None = None
    mig: bool = False


class Nvml(Protocol):
    def driver_version(self) -> str: ...

    def gpus(self) -> tuple[Gpu, ...]: ...


class KernelModule:
    """The driver's version where the kernel module told it, nothing of GPUs: for who asks for no more than that."""

    def __init__(self, version: str) -> None:
        self._version = version

    def driver_version(self) -> str:
        return self._version

    def gpus(self) -> tuple[Gpu, ...]:
        raise NvmlError("not asked")


class SystemNvml:
    """NVML of this machine through `nvidia-ml-py`; read once, in one init/shutdown, however often it is asked."""

    def __init__(self, module: Any | None = None) -> None:
        self._module = module
        self._driver: str | NvmlError | None = None
        self._gpus: tuple[Gpu, ...] | NvmlError | None = None

    def driver_version(self) -> str:
        self._read()
        if isinstance(self._driver, str):
            return self._driver
        raise self._driver or NvmlError("NVML did not answer")

    def gpus(self) -> tuple[Gpu, ...]:
        self._read()
        if isinstance(self._gpus, tuple):
            return self._gpus
        raise self._gpus or NvmlError("NVML did not answer")

    def _read(self) -> None:
        if self._driver is not None:
            return
        try:
            # By name and late: a missing or broken nvidia-ml-py is an answer, not an import error of prequal.
            nvml = self._module or importlib.import_module("pynvml")
        except Exception as error:
            self._driver = self._gpus = NvmlError(f"nvidia-ml-py (module pynvml) cannot be imported: {_text(error)}")
            return
        try:
            nvml.nvmlInit()
        except Exception as error:
            self._driver = self._gpus = NvmlError(f"nvmlInit failed: {_text(error)}")
            return
        try:
            # Apart, because a driver whose GPUs are unreadable still has a version worth checking.
            self._driver = _or_error("nvmlSystemGetDriverVersion", lambda: _string(nvml.nvmlSystemGetDriverVersion()))
            self._gpus = _or_error("reading the GPUs", lambda: _read_gpus(nvml))
        finally:
            with contextlib.suppress(Exception):  # the answers are in hand, and there is nothing left to release
                nvml.nvmlShutdown()


def _read_gpus(nvml: Any) -> tuple[Gpu, ...]:
    return tuple(_read_gpu(nvml, index) for index in range(int(nvml.nvmlDeviceGetCount())))


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = _call(nvml, "nvmlDeviceGetHandleByIndex", index)
    capability = _optional(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    mig = _optional(nvml, "nvmlDeviceGetMigMode", handle)  # not supported = a GPU that cannot be partitioned
    return Gpu(
        index=index,
        uuid=_string(_optional(nvml, "nvmlDeviceGetUUID", handle)),
        name=_string(_optional(nvml, "nvmlDeviceGetName", handle)),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        mig=mig is not None and int(mig[0]) == 1,
    )


def _call(nvml: Any, function: str, argument: Any) -> Any:
    try:
        return getattr(nvml, function)(argument)
    except Exception as error:
        raise NvmlError(f"{function} failed: {_text(error)}") from error


def _optional(nvml: Any, function: str, handle: Any) -> Any:
    """None where NVML says that this GPU or this driver has no such thing; every other failure is an error."""
    absent = tuple(
        kind
        for kind in (getattr(nvml, "NVMLError_NotSupported", None), getattr(nvml, "NVMLError_FunctionNotFound", None))
        if kind is not None
    )
    try:
        return _call(nvml, function, handle)
    except NvmlError as error:
        if absent and isinstance(error.__cause__, absent):
            return None
        raise


def _or_error(what: str, read: Callable[[], _T]) -> _T | NvmlError:
    try:
        return read()
    except NvmlError as error:
        return error
    except Exception as error:
        return NvmlError(f"{what} failed: {_text(error)}")


def _string(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value  # older nvidia-ml-py gave bytes


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_UUID_LENGTH = len("GPU-") + 36

State = Literal["known", "unordered", "unknown"]


@dataclass(frozen=True)
class Visible:
    """Which GPUs CUDA will show to this process, as far as that is known without asking CUDA.

    known      `gpus` are exactly the visible ones, `gpus[i]` is CUDA device i
    unordered  `gpus` holds the candidates; which of them is which CUDA device is for CUDA to say
    unknown    nothing is said: `gpus` is empty, `capabilities` and `count` are None
    """

    state: State
    gpus: tuple[Gpu, ...]
    count: int | None
    capabilities: tuple[tuple[int, int], ...] | None  # of `gpus`, each once, ascending
    note: str


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Read CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as the driver does; pure.

    The rules below were seen on driver 580 with two GPUs, one cuDeviceGetCount a case:
    the first entry decides whether the list holds indices or UUIDs, and an entry of the other kind ends it like any
    invalid one; an index is read like C's atoi (`1gpu`, ` 1`, `01` and `1.0` are all 1, `0x1` is 0); a UUID may be
    cut short while it stays unambiguous, what follows a whole one is not looked at, upper case is fine, leading blanks
    are not; a repeated GPU hides all.
    """
    gpus = tuple(gpus)
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is not None and not entries.strip():
        return _exactly((), "CUDA_VISIBLE_DEVICES is empty: no GPU is visible")
    first = None if entries is None else _leading_int(entries)
    if first is not None and first < 0:
        return _exactly((), f"CUDA_VISIBLE_DEVICES={entries} starts with a negative index: no GPU is visible")
    if not gpus:
        return _exactly((), "the driver reports no GPU")
    order = environ.get("CUDA_DEVICE_ORDER")
    if order is not None and order not in ("FASTEST_FIRST", "PCI_BUS_ID"):
        return _unknown(
            f"CUDA_DEVICE_ORDER={order!r} is neither FASTEST_FIRST nor PCI_BUS_ID: CUDA may refuse to start"
        )
    if entries is not None and entries.startswith("MIG-"):
        return _unknown(f"CUDA_VISIBLE_DEVICES={entries} names a MIG instance: what CUDA shows is not guessed")
    if partitioned := [gpu.index for gpu in gpus if gpu.mig]:
        return _unknown(f"MIG is enabled on GPU {_listed(partitioned)}: what CUDA shows is not guessed")

    if entries is None:
        chosen, note = gpus, f"CUDA_VISIBLE_DEVICES is not set: all {len(gpus)} GPUs are visible"
    elif entries.startswith("GPU-"):
        if unreadable := [gpu.index for gpu in gpus if gpu.uuid is None]:
            return _unknown(
                f"CUDA_VISIBLE_DEVICES={entries} names UUIDs, and NVML has none for GPU {_listed(unreadable)}"
            )
        chosen, note = _by_uuid(gpus, entries)
    else:
        chosen, note = _by_index(gpus, entries)

    if unreadable := [gpu.index for gpu in chosen if gpu.capability is None]:
        return _unknown(f"NVML has no compute capability for GPU {_listed(unreadable)}; {note}")
    by_uuid = entries is not None and entries.startswith("GPU-")
    alike = len(gpus) == 1 or (gpus[0].name is not None and len({(gpu.name, gpu.capability) for gpu in gpus}) == 1)
    if by_uuid or order == "PCI_BUS_ID" or alike or not chosen:
        return _exactly(chosen, note)
    # FASTEST_FIRST ranks by a measure of the driver's own, so among different models an index names no NVML index.
    if unreadable := [gpu.index for gpu in gpus if gpu.capability is None]:
        return _unknown(f"NVML has no compute capability for GPU {_listed(unreadable)}; {note}")
    return Visible(
        "unordered",
        gpus,
        len(chosen),
        _capabilities(gpus),
        f"{note}; the GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, so which index is which is CUDA's to say",
    )


def _by_index(gpus: tuple[Gpu, ...], entries: str) -> tuple[tuple[Gpu, ...], str]:
    indices: list[int] = []
    for entry in entries.split(","):
        index = _leading_int(entry)
        if index is None or not 0 <= index < len(gpus):
            return _stopped(tuple(gpus[i] for i in indices), entries, entry, f"no index of the {len(gpus)} GPUs")
        if index in indices:
            return _repeated(entries, entry)
        indices.append(index)
    return tuple(gpus[i] for i in indices), f"CUDA_VISIBLE_DEVICES={entries} shows {len(indices)} of {len(gpus)} GPUs"


def _by_uuid(gpus: tuple[Gpu, ...], entries: str) -> tuple[tuple[Gpu, ...], str]:
    chosen: list[Gpu] = []
    for entry in entries.split(","):
        prefix = entry[:_UUID_LENGTH].rstrip().upper()
        found = [gpu for gpu in gpus if (gpu.uuid or "").upper().startswith(prefix)]
        if not prefix.startswith("GPU-") or not found:
            return _stopped(tuple(chosen), entries, entry, f"no UUID of the {len(gpus)} GPUs")
        if len(found) > 1 or prefix == "GPU-":
            return _stopped(
                tuple(chosen), entries, entry, f"ambiguous, it fits GPU {_listed([g.index for g in found])}"
            )
        if found[0] in chosen:
            return _repeated(entries, entry)
        chosen.append(found[0])
    return tuple(chosen), f"CUDA_VISIBLE_DEVICES={entries} shows {len(chosen)} of {len(gpus)} GPUs"


def _stopped(before: tuple[Gpu, ...], entries: str, entry: str, why: str) -> tuple[tuple[Gpu, ...], str]:
    shown = f"CUDA stops there and shows {len(before)}" if before else "CUDA stops there and shows none"
    return before, f"CUDA_VISIBLE_DEVICES={entries}: {entry!r} is {why}; {shown}"


def _repeated(entries: str, entry: str) -> tuple[tuple[Gpu, ...], str]:
    return (), f"CUDA_VISIBLE_DEVICES={entries}: {entry!r} repeats a GPU; CUDA then shows none"


def _leading_int(entry: str) -> int | None:
    """The number an entry starts with, as C's atoi on a 64-bit Linux has it (saturated, then cut to 32 bits)."""
    match = re.match(r"[ \t\n\v\f\r]*([+-]?)0*([0-9]*)", entry)
    if match is None or not match[0][-1:].isdigit():
        return None
    # 20 digits saturate already; int() itself refuses some thousands.
    wide = max(-(2**63), min(2**63 - 1, int(match[1] + (match[2][:20] or "0"))))
    return (wide + 2**31) % 2**32 - 2**31


def _exactly(gpus: tuple[Gpu, ...], note: str) -> Visible:
    return Visible("known", gpus, len(gpus), _capabilities(gpus), note)


def _unknown(note: str) -> Visible:
    return Visible("unknown", (), None, None, note)


def _capabilities(gpus: tuple[Gpu, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted({gpu.capability for gpu in gpus if gpu.capability is not None}))


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
