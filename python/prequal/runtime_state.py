"""The one gate, the one telemetry and the one set of flags of this process, and the seam to the native module."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import FallbackError
from .runtime import manifest as build_manifest
from .runtime.flags import Flags
from .runtime.gate import Gate
from .runtime.manifest import Manifest
from .runtime.telemetry import Telemetry

if TYPE_CHECKING:
    from .registry import Op
    from .runtime.fingerprint import Fingerprint

native_ops: dict[str, Op] = {}
through_torch: dict[str, Callable[..., Any]] = {}  # what answers behind a launcher that is a door alone

# Fast paths that are no op and have no kernel: known to the flags and the counters by these names.
PYTHON_PATHS = ("null_context", "null_context_projection")


def absent(*args: object) -> Any:
    """Stands where a native function would."""
    return NotImplemented


def _load_native() -> tuple[Any, str | None]:
    """The module, or why there is none: told by gate and doctor, never a None that fails far away."""
    if build_manifest.load().cuda is None and importlib.util.find_spec("prequal._native") is None:
        return None, "this build of prequal has no native module (built with PREQUAL_WITH_CUDA=OFF)"
    try:
        module = importlib.import_module("prequal._native")
    except ImportError as error:
        return None, f"prequal._native could not be loaded: {error}"
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    module.attach(torch, torch._C._len_torch_dispatch_stack, stream)
    module.use_exchange_api(True)
    return module, None


native, native_problem = _load_native()
_ids: dict[str, int] = {name: i for i, name in enumerate(native.ops())} if native is not None else {}


def native_function(name: str) -> Any:
    if native is None:
        return absent
    if name not in _ids:
        raise ImportError(
            f"prequal._native has no launcher {name!r}: the module and the Python files are of two builds"
        )
    launcher = getattr(native, name)
    if name not in through_torch:
        return launcher
    body = through_torch[name]

    def through(*args: Any) -> Any:
        if launcher(*args) is NotImplemented:
            return NotImplemented
        if torch.is_autocast_enabled("cuda"):  # what it gives is of its arguments' dtype, as of a kernel
            with torch.autocast("cuda", enabled=False):
                return body(*args)
        return body(*args)

    return through


def why() -> str:
    """Why the last native call on this thread did not answer."""
    return "not_attached" if native is None else native.why()


def admitted(name: str, args: Sequence[Any], *, trial: bool = False) -> Any:
    """Call the launcher past route and gate: the caller has seen to both. A trial is not counted as a call served."""
    if native is None:
        return NotImplemented
    native.admit(trial)
    return native_function(name)(*args)


_loaded: set[tuple[int, str]] = set()  # basenames whose kernels are loaded on a device


def preload(device: int, basename: str | None = None) -> int:
    """Load the kernels of the ops of this basename, or all of them, on this device; how many there are."""
    if native is None:
        return 0
    count = int(native.preload(device, basename))
    # what stands behind a door of torch's has no kernels to load
    every = {*native.kernels(), *through_torch}
    _loaded.update((device, name) for name in (every if basename is None else [basename]))
    return count


def fast_calls() -> Mapping[tuple[str, str], int]:
    calls = {}
    for name, op in _ids.items():
        for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            if count := native.fast_calls(op, device):
                calls[name, f"cuda:{device}"] = count
    return calls


def kernel_module_version(path: str = "/proc/driver/nvidia/version") -> str | None:
    """ "580.95.05" of NVIDIA's kernel module, or None where the file is absent or says nothing of the kind."""
    try:
        with open(path, encoding="ascii", errors="replace") as lines:
            found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", lines.readline())
    except OSError:
        return None
    return found[1] if found else None


class ThisHost:
    """The gate's view of this very process."""

    def __init__(self) -> None:
        self.manifest: Manifest = build_manifest.load()

    def native_problem(self) -> str | None:
        return native_problem

    def cuda_problem(self) -> str | None:
        if torch.version.cuda is None:
            return "this torch is built without CUDA"
        if torch.cuda.is_initialized():
            return None
        gpus = fingerprint().data["gpus"]
        if gpus["state"] != "unknown" and gpus["count"] == 0:
            return str(gpus["note"])
        return None if torch.cuda.device_count() > 0 else f"torch sees no GPU ({gpus['note']})"

    def driver(self) -> str | None:
        # The kernel module says its version in a file; NVML takes a tenth of a second, at the first call of a worker.
        if version := kernel_module_version():
            return version
        version = fingerprint().data["driver"]["version"]
        return None if version is None else str(version)

    def devices(self) -> list[int]:
        return list(range(torch.cuda.device_count())) if self.cuda_problem() is None else []

    def capability(self, device: int) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def loading_problem(self, basename: str, device: int) -> str | None:
        if (device, basename) in _loaded:
            return None
        if self.capturing():
            return "first use on this device inside a graph capture: call the op once before, or qualify"
        try:
            preload(device, basename)
        except RuntimeError as error:
            return f"the kernels could not be loaded: {error}"
        return None

    def failure(self, op: str, device: int) -> str | None:
        return native.failure(_ids[op], device) or None if native is not None and op in _ids else None

    def open(self, op: str, device: int, is_open: bool) -> None:
        if native is not None and op in _ids:
            native.set_gate(_ids[op], device, is_open)


_fingerprint: Fingerprint | None = None


def fingerprint() -> Fingerprint:
    """Stage A of this process, made when first asked for: no CUDA call."""
    global _fingerprint
    if _fingerprint is None:
        from .runtime.fingerprint import collect

        _fingerprint = collect()
    return _fingerprint


def _forget_verdicts() -> None:
    gate.forget()


_key_side: Fingerprint | None = None


def fingerprint_for_keys() -> Fingerprint:
    """Stage A as far as the key of a lock goes, which leaves the list of GPUs out: no NVML session where the kernel
    module tells the driver's version. Always by this road where it is open, so that writer and reader agree."""
    global _key_side
    version = kernel_module_version()
    if version is None:
        return fingerprint()
    if _key_side is None:
        from .runtime.fingerprint import collect
        from .runtime.nvml import KernelModule

        _key_side = collect(KernelModule(version))
    return _key_side


telemetry = Telemetry(fast_calls)
flags = Flags(
    known=lambda: {*native_ops, *PYTHON_PATHS},
    changed=_forget_verdicts,
    scoped=lambda change: native.scoped_flags(change) if native is not None else None,
)


def count_fallback(name: str, device: str, reason: str, detail: str) -> None:
    """A call of this fast path goes to its reference; in strict mode none answers: an error, and nothing counted."""
    if flags.is_strict:
        raise FallbackError(name, device, reason, detail)
    telemetry.fell_back(name, device, reason, detail)


def _device_key(device: int) -> Fingerprint:
    from .runtime.lock import this_worker

    return this_worker(device)


gate: Gate = Gate(ThisHost(), flags.disabled, key=_device_key)


def read_environment(environ: Mapping[str, str] = os.environ) -> None:
    """PREQUAL_POLICY, PREQUAL_DISABLE, PREQUAL_STRICT: read once all ops are known. A wrong value is an error here."""
    gate.set_policy(environ.get("PREQUAL_POLICY", "auto") or "auto")
    flags.read(environ)
