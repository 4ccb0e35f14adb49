"""Did the fast path really replace it? What a call dispatches and launches, by PyTorch's profiler, before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from prequal.errors import ReplacementError

LAUNCHES = frozenset(
    {
        *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel"),
        *("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cudaGraphLaunch", "cuGraphLaunch"),
    }
)


@dataclass(frozen=True)
class Event:
    """What the profiler saw: by its name, on the host or on a device."""

    name: str
    on_device: bool = False


@dataclass(frozen=True)
class Observation:
    """One call: dispatched ops, kernels that ran, launches that the host made (a replayed graph is one)."""

    ops: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, int] = field(default_factory=dict)
    launches: int = 0

    @classmethod
    def of(cls, events: Iterable[Event]) -> Observation:
        ops: Counter[str] = Counter()
        kernels: Counter[str] = Counter()
        launches = 0
        for event in events:
            if event.on_device:
                if not event.name.startswith(("Memcpy", "Memset")):
                    kernels[event.name] += 1
            elif event.name in LAUNCHES:
                launches += 1
            elif "::" in event.name and event.name.partition("::")[0].isidentifier():
                ops[event.name] += 1
        return cls(dict(ops), dict(kernels), launches)


def observe(call: Callable[[], object]) -> Observation:
    """Profile one call, after one that is not looked at: first calls compile, allocate and load."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = torch.cuda.is_available()
    call()
    if on_gpu:
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # without acc_events torch warns (once a process) that events of other cycles are dropped; there is one cycle
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    cpu = torch.autograd.DeviceType.CPU
    return Observation.of(
        Event(event.name, event.device_type != cpu)
        for event in profiler.events() or ()
        if not getattr(event, "is_user_annotation", False)
    )


@dataclass(frozen=True)
class Replacement:
    """What `verify_replacement` found. `str()` of it is the table."""

    before: Observation
    after: Observation
    gone: tuple[str, ...]

    def _moved(self, kind: str, sign: int) -> dict[str, int]:
        before, after = getattr(self.before, kind), getattr(self.after, kind)
        a, b = (before, after) if sign > 0 else (after, before)
        return {name: count - b.get(name, 0) for name, count in a.items() if count > b.get(name, 0)}

    @property
    def ops_gone(self) -> dict[str, int]:
        """Dispatches fewer than before, by op."""
        return self._moved("ops", +1)

    @property
    def ops_new(self) -> dict[str, int]:
        return self._moved("ops", -1)

    @property
    def kernels_gone(self) -> dict[str, int]:
        return self._moved("kernels", +1)

    @property
    def kernels_new(self) -> dict[str, int]:
        return self._moved("kernels", -1)

    @property
    def still_there(self) -> dict[str, int]:
        """Of what should be gone: what the fast call still does, and how often."""
        return {name: count for name in self.gone if (count := _count(self.after, name))}

    @property
    def never_there(self) -> tuple[str, ...]:
        """Of what should be gone: what the reference never did, so that its absence proves nothing."""
        return tuple(name for name in self.gone if not _count(self.before, name))

    @property
    def ok(self) -> bool:
        return not self.still_there and not self.never_there

    def __str__(self) -> str:
        lines = [f"launches: {self.before.launches} before, {self.after.launches} after"]
        for title, found in (
            *(("ops gone", self.ops_gone), ("ops new", self.ops_new)),
            *(("kernels gone", self.kernels_gone), ("kernels new", self.kernels_new)),
        ):
            lines += [f"{title}:", *(f"  {count} × {name}" for name, count in found.items())] if found else []
        lines += [f"STILL THERE: {count} × {name}" for name, count in self.still_there.items()]
        lines += [f"NEVER THERE: {name}: the reference does not do it either" for name in self.never_there]
        return "\n".join(lines)


def _count(seen: Observation, name: str) -> int:
    """An op by its whole name (aten::gelu), a kernel by a part of it."""
    if "::" in name:
        return seen.ops.get(name, 0)
    return sum(count for kernel, count in seen.kernels.items() if name in kernel)


def verify_replacement(
    fn_reference: Callable[..., Any],
    fn_fast: Callable[..., Any],
    args: Sequence[Any] = (),
    gone: Iterable[str] = (),
    *,
    observer: Callable[[Callable[[], object]], Observation] = observe,
) -> Replacement:
    """Whether a fast path took the place of what it should: ops, kernels and launches of both, by the profiler.

    Args:
        fn_reference, fn_fast: called with args, twice each; the second call is looked at.
        gone: what the fast call must not do any more: ops by name ("aten::gelu"), kernels by a part of their name. Ops
            inside a torch.compile'd function are not dispatched, and so not seen: name kernels there. Nor are those of
            other threads that the call starts, as torch.nn.DataParallel does.
        observer: instead of PyTorch's profiler.

    Raises:
        ReplacementError: something that should be gone is still there, or was not there before; `.report` is the whole.
        TypeError: gone is a text or holds what is none; args is a tensor.
        RuntimeError: PyTorch's profiler is on already: it would lose what it has seen.
    """
    if isinstance(gone, str | bytes) or not isinstance(gone, Iterable):
        raise TypeError(f"gone: expected names of ops or kernels in a list, got {type(gone).__name__}")
    gone = list(gone)
    if odd := [name for name in gone if not isinstance(name, str)]:
        raise TypeError(f"gone: expected names of ops or kernels, got {type(odd[0]).__name__} among them")
    if isinstance(args, torch.Tensor):
        raise TypeError("args: expected a tuple of arguments, got a tensor: (x,) for one")
    if observer is observe and torch.autograd._profiler_enabled():
        raise RuntimeError("verify_replacement: expected no profiler that is on, since it starts its own; got one")
    report = Replacement(
        observer(lambda: fn_reference(*args)), observer(lambda: fn_fast(*args)), tuple(dict.fromkeys(gone))
    )
    if not report.ok:
        raise ReplacementError(report)
    return report
