"""Qualification: every op's samples and the caller's own shapes, on every target device, both paths, one contract.

What passes opens the gate, what fails or crashes closes it, one op at a time; the others go on. A report says what was
done. Everything that touches CUDA goes through `Runner`, so that every outcome can be had without a GPU.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import textwrap
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from prequal.errors import UnknownOpError

from . import lock as lock_file
from .fingerprint import Fingerprint
from .gate import Gate, Qualification, moved_text, now, static_refusal
from .reasons import Reason

Outcome = Literal["qualified", "failed", "not finished", "not run", "refused"]


class Case(Protocol):
    """Arguments of one right call: a `registry.Sample`, or a `Made` of the caller's arguments."""

    @property
    def name(self) -> str: ...

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> Mapping[str, Any]: ...


class QualifiableOp(Protocol):
    """What qualification needs of an op; `registry.Op` is the real one."""

    name: str
    basename: str
    contract: Any

    @property
    def samples(self) -> Callable[[Any], Iterable[Any]]: ...

    def compare_paths(self, sample: Any) -> Any:
        """The breach of the contract, as a str the refusal of the kernel, or None; no such call is counted."""
        ...

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]: ...

    def validate(self, args: Sequence[Any]) -> None: ...


class Runner(Protocol):
    """The seam to the device. `TorchRunner` is the real one."""

    def target(self, device: int) -> Any:
        """What an op's samples take, and what tensors move to."""
        ...

    def preload(self, device: int) -> int:
        """Load every kernel, so that no later launch loads a module; how many."""
        ...

    def scope(self, device: int) -> AbstractContextManager[None]:
        """Where one op's cases run: a side stream of the device, without gradients."""
        ...

    def finish(self, device: int) -> None:
        """Wait for what was launched in the scope: what went wrong there is raised here."""
        ...

    def recover(self, device: int) -> str | None:
        """After a failure: free what can be freed; in words, why the device cannot be used any more, or None."""
        ...


@dataclass(frozen=True)
class Made:
    """A case of the caller's, its tensors on the target device."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to make on the target device, where the caller has a shape and no data. The values are reproducible:
    normal for floating and complex dtypes, 0 to `high` - 1 for integers.
    """

    shape: tuple[int, ...]
    dtype: Any = "float32"
    stride: tuple[int, ...] | None = None
    high: int = 100

    def __post_init__(self) -> None:
        for name in ("shape", "stride"):
            value = getattr(self, name)
            if value is None and name == "stride":
                continue
            if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
                raise ValueError(f"{name}: expected whole numbers of at least 0, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        if self.stride is not None and len(self.stride) != len(self.shape):
            raise ValueError(f"stride: expected {len(self.shape)} numbers like shape, got {len(self.stride)}")
        if type(self.high) is not int or self.high < 1:
            raise ValueError(f"high: expected a whole number of at least 1, got {self.high!r}")
        self._dtype()

    def _dtype(self) -> Any:
        torch = importlib.import_module("torch")
        found = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype: expected the name of one of torch's dtypes, got {self.dtype!r}")
        return found

    def make(self, target: Any) -> Any:
        torch = importlib.import_module("torch")
        dtype, target = self._dtype(), torch.device(target)
        if self.stride is None:
            size = math.prod(self.shape)
        else:
            size = _span(self.shape, self.stride)
        if target.type == "meta":
            flat = torch.empty(size, dtype=dtype, device=target)
        else:
            generator = torch.Generator(target).manual_seed(zlib.crc32(repr((self.shape, self.stride)).encode()))
            if dtype.is_floating_point or dtype.is_complex:
                wide = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
                flat = torch.randn(size, generator=generator, dtype=wide, device=target).to(dtype)
            else:
                high = 2 if dtype == torch.bool else min(self.high, torch.iinfo(dtype).max + 1)
                flat = torch.randint(0, high, (size,), generator=generator, dtype=torch.int64, device=target).to(dtype)
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one that a strided tensor reaches."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def moved_to(value: Any, target: Any) -> Any:
    """A tensor (or the tensors in a list or tuple) on the target; what is no tensor, or is there already, as it is."""
    torch = importlib.import_module("torch")
    if isinstance(value, TensorSpec):
        return value.make(target)
    if isinstance(value, list | tuple):
        return type(value)(moved_to(item, target) for item in value)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device == torch.device(target):
        return value
    return copied_to(value, target)


def copied_to(value: Any, target: Any) -> Any:
    """A strided tensor's copy on the target, with its strides and its misalignment."""
    torch = importlib.import_module("torch")
    value = value.detach().resolve_conj().resolve_neg()
    if value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=target)
    # The memory that it spans, from a round address on, and not the elements: a copy of those would be contiguous.
    start = value.storage_offset() - value.storage_offset() % 64
    ahead = value.storage_offset() - start
    size = ahead + _span(value.shape, value.stride())
    flat = value.as_strided((size,), (1,), start).to(target, copy=True)
    return flat.as_strided(value.shape, value.stride(), ahead)


# ---- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One op on one device: what came of it. `cases` passed, `refused` are the kernel's `unsupported_input` cases."""

    op: str
    device: int
    outcome: Outcome
    detail: str = ""
    cases: int = 0
    wrong: int = 0
    refused: tuple[str, ...] = ()
    seconds: float = 0.0
    when: str = ""
    basename: str = ""
    contract: str = ""
    source: str | None = None


@dataclass(frozen=True)
class Report:
    """What a qualification did. `problem`: why nothing could be qualified at all."""

    rows: tuple[Row, ...]
    version: str = ""
    seconds: float = 0.0
    kernels: Mapping[int, int] = field(default_factory=dict)  # preloaded, a device
    keys: Mapping[int, Fingerprint] = field(default_factory=dict)
    moved: Mapping[int, str] = field(default_factory=dict)  # what voided an earlier qualification
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 all qualified, 1 some not, 2 nothing to qualify."""
        if self.problem is not None or all(row.outcome == "refused" for row in self.rows):
            return 2
        return 0 if all(row.outcome == "qualified" for row in self.rows) else 1

    @property
    def verdict(self) -> str:
        if self.problem is not None:
            return f"nothing to qualify: {self.problem}; every op is answered by its PyTorch reference"
        if self.exit_code == 2:
            return "nothing to qualify: no device here has a fast path"
        good = sum(row.outcome == "qualified" for row in self.rows)
        return f"{good} of {len(self.rows)} qualified in {self.seconds:.1f} s"

    def table(self) -> str:
        lines = []
        if self.rows:
            head = ("op", "device", "outcome", "passed", "wrong", "refused", "seconds")
            cells = []
            for row in self.rows:
                counts = (str(row.cases), str(row.wrong), str(len(row.refused)), f"{row.seconds:.2f}")
                cells.append((row.op, f"cuda:{row.device}", row.outcome, *counts))
            widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
            for line in (head, *cells):
                texts = [
                    cell.ljust(width) if place < 3 else cell.rjust(width)
                    for place, (cell, width) in enumerate(zip(line, widths, strict=True))
                ]
                lines.append("  ".join(texts).rstrip())
        notes = [f"{row.op} on cuda:{row.device}: {row.detail}" for row in self.rows if row.detail]
        notes += [f"cuda:{device}: qualified anew, for {text}" for device, text in self.moved.items()]
        for note in dict.fromkeys(notes):
            lines += textwrap.wrap(
                " ".join(note.split()), 110, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
            )
        return "\n".join([*lines, self.verdict])

    def data(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "prequal": self.version,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "problem": self.problem,
            "seconds": round(self.seconds, 3),
            "rows": [
                {**asdict(row), "device": f"cuda:{row.device}", "seconds": round(row.seconds, 4)} for row in self.rows
            ],
            "preloaded": {f"cuda:{device}": count for device, count in self.kernels.items()},
            "moved": {f"cuda:{device}": text for device, text in self.moved.items()},
            "fingerprint_sha256": {f"cuda:{device}": key.sha256 for device, key in self.keys.items()},
        }

    def json(self) -> str:
        return json.dumps(self.data(), indent=2, sort_keys=True)

    def lock(self) -> lock_file.Lock:
        """What was found, right or wrong; what was not finished is not in it. LockError where there is nothing."""
        entries = tuple(self._entries())
        keys = {device: key for device, key in self.keys.items() if str(device) in {entry.device for entry in entries}}
        return lock_file.Lock.of(keys, entries, self.version)

    def _entries(self) -> Iterator[lock_file.Entry]:
        for row in self.rows:
            if row.outcome in ("qualified", "failed") and row.device in self.keys:
                device = self.keys[row.device].data["device"]
                yield lock_file.Entry(
                    op=row.op,
                    basename=row.basename,
                    source=row.source,
                    contract=row.contract,
                    device=str(row.device),
                    name=device["name"],
                    capability=device["capability"],
                    cases=row.cases,
                    refused=len(row.refused),
                    when=row.when,
                    problem=row.detail if row.outcome == "failed" else None,
                )

    def write_lock(self, path: str | os.PathLike[str]) -> None:
        lock_file.write(path, self.lock())


@dataclass(frozen=True)
class Step:
    """Progress: `case` is about to run, as number `number` of its op; or, with a `row`, an op on a device is done."""

    done: int
    total: int
    op: str
    device: int
    number: int = 0
    case: str = ""
    row: Row | None = None


# ---- the work --------------------------------------------------------------------------------------------------------


def chosen_ops(known: Mapping[str, Any], names: str | Iterable[str] | None) -> list[Any]:
    """In the order of the tables; UnknownOpError with near matches."""
    if names is None:
        return list(known.values())
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in known:
            raise UnknownOpError("ops", str(name), known)
    return [op for name, op in known.items() if name in wanted]


def chosen_devices(present: Sequence[int], devices: Any) -> list[int]:
    """CUDA ordinals of ints, texts ("1", "cuda:1") or torch devices; ValueError where this process has no such one."""
    if devices is None:
        return list(present)
    items = [devices] if isinstance(devices, str | int) or not isinstance(devices, Iterable) else list(devices)
    found = []
    for item in items:
        text = str(item).strip().removeprefix("cuda:")
        if isinstance(item, bool) or not text.isdecimal() or int(text) not in present:
            here = ", ".join(f"cuda:{device}" for device in present) or "none"
            raise ValueError(f"devices: expected some of those here ({here}), got {item!r}")
        found.append(int(text))
    return list(dict.fromkeys(found))


def chosen_cases(ops: Sequence[QualifiableOp], cases: Any, known: Iterable[str]) -> dict[str, list[Made]]:
    """The caller's cases by op, each a right call of it: what is not is an error before anything has run."""
    if cases is None:
        return {}
    if not isinstance(cases, Mapping):
        raise TypeError(f"cases: expected a mapping from op to its cases, got {type(cases).__name__}")
    by_name = {op.name: op for op in ops}
    found: dict[str, list[Made]] = {}
    for name, given in cases.items():
        if name not in by_name:
            if name in set(known):
                raise ValueError(f"cases: expected cases of the ops to qualify, got some of {name}")
            raise UnknownOpError("cases", str(name), known)
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"cases[{name!r}]: expected cases, got {type(given).__name__}")
        found[name] = [_case(by_name[name], item, place) for place, item in enumerate(given)]
    return found


def _case(op: QualifiableOp, item: Any, place: int) -> Made:
    where = f"cases[{op.name!r}][{place}]"
    if isinstance(item, tuple | list):
        case = Made(f"case {place}", tuple(item))
    elif all(hasattr(item, name) for name in ("name", "args", "kwargs")):
        case = Made(str(item.name), tuple(item.args), dict(item.kwargs))
    else:
        raise TypeError(f"{where}: expected a Sample or a tuple of arguments, got {type(item).__name__}")
    try:
        # Shapes and dtypes are known before the data is made; what has data is looked at where it is.
        looked_at = _on(case, "meta") if _has_spec(case) else case
        op.validate(op.bind(looked_at.args, looked_at.kwargs))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    return case


def _has_spec(case: Made) -> bool:
    return any(isinstance(value, TensorSpec) for value in (*case.args, *case.kwargs.values()))


def _on(case: Made, target: Any) -> Made:
    kwargs = {name: moved_to(value, target) for name, value in case.kwargs.items()}
    return replace(case, args=tuple(moved_to(value, target) for value in case.args), kwargs=kwargs)


class _Spent(Exception):
    """The budget is."""


def qualify(
    gate: Gate,
    ops: Sequence[QualifiableOp],
    devices: Sequence[int],
    runner: Runner,
    *,
    cases: Mapping[str, Sequence[Made]] | None = None,
    budget_s: float | None = None,
    progress: Callable[[Step], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Qualify these ops on these devices and tell the gate. What is wrong with an op is in the report, not raised."""
    if budget_s is not None and not (isinstance(budget_s, int | float) and budget_s >= 0):
        raise ValueError(f"budget_s: expected seconds, 0 or more, got {budget_s!r}")
    version = gate.host.manifest.version
    refusal = static_refusal(gate.host, None)
    if refusal is not None or not devices or not ops:
        problem = f"{refusal[0]} ({refusal[1]})" if refusal else "no device" if not devices else "no op"
        return Report((), version, problem=problem)
    if gate.host.capturing():
        raise RuntimeError("qualify: a CUDA graph is being captured on this stream; qualify before")
    run = _Run(gate, runner, cases or {}, budget_s, progress, clock, len(ops) * len(devices))
    for device in devices:
        run.device(device, ops)
    return Report(tuple(run.rows), version, clock() - run.start, run.kernels, run.keys, run.moved)


def _same(case: Case) -> Case:
    return case


class _Run:
    def __init__(
        self,
        gate: Gate,
        runner: Runner,
        cases: Mapping[str, Sequence[Made]],
        budget_s: float | None,
        progress: Callable[[Step], None] | None,
        clock: Callable[[], float],
        total: int,
    ) -> None:
        self.gate, self.runner, self.cases, self.clock, self.total = gate, runner, cases, clock, total
        self.budget_s, self.progress = budget_s, progress
        self.start = clock()
        self.rows: list[Row] = []
        self.kernels: dict[int, int] = {}
        self.keys: dict[int, Fingerprint] = {}
        self.moved: dict[int, str] = {}

    def spent(self) -> bool:
        return self.budget_s is not None and self.clock() - self.start >= self.budget_s

    def device(self, device: int, ops: Sequence[QualifiableOp]) -> None:
        """All ops on one device. From the first failure on that leaves it unusable, nothing more is run there."""
        refusal = static_refusal(self.gate.host, device)
        if refusal is not None:
            for op in ops:
                self._done(op, Row(op.name, device, "refused", f"{refusal[0]}: {refusal[1]}"))
            return
        closed = self._prepare(device)
        for op in ops:
            if closed is not None:
                self._done(op, Row(op.name, device, "not run", closed), closes=True)
                continue
            row = self._op(op, device)
            self._done(op, row, closes=row.outcome == "failed")
            if row.outcome == "failed" and (problem := self.runner.recover(device)):
                closed = f"cuda:{device} cannot be used any more after {op.name} ({problem}); restart the process"

    def _prepare(self, device: int) -> str | None:
        """The fingerprint that all this rests on, then the kernels; in words, why neither op nor case can run."""
        try:
            # before the first case: a case may load libraries that a new worker has not loaded
            moved = self.gate.look_again(device)
            if (key := self.gate.key(device)) is not None:
                self.keys[device] = key
            if moved:
                self.moved[device] = moved_text(moved)
            self.kernels[device] = self.runner.preload(device)
        except Exception as error:
            return _told(error)
        return None

    def _op(self, op: QualifiableOp, device: int) -> Row:
        began = self.clock()
        row = Row(op.name, device, "not finished")
        if text := self.gate.host.failure(op.name, device):
            return replace(row, outcome="failed", detail=f"{Reason.RUNTIME_ERROR}: {text}; restart the process")
        passed, number, refused, breaches = 0, 0, [], []
        doing = "making its first case"
        crash = None
        outcome: Outcome = "qualified"
        try:
            with self.runner.scope(device):
                for name, make in self._all_cases(op, device):
                    number, doing = number + 1, f"case {name!r}"
                    self._tell(op, device, number, name)
                    found = op.compare_paths(make())
                    self.runner.finish(device)
                    doing = f"after case {name!r}"
                    if found is None:
                        passed += 1
                    elif isinstance(found, str):
                        refused.append(f"{name}: {found}")
                    else:
                        breaches.append(f"{name}: {found}")
        except _Spent:
            outcome = "not finished"
        except Exception as error:  # out of memory, a launch failure, a broken reference: it closes this op only
            crash = _told(error)
        detail = ""
        if crash is not None:
            outcome, detail = "failed", f"qualification crashed ({doing}): {crash}"
        elif breaches:
            more = f" (and {len(breaches) - 1} more cases)" if len(breaches) > 1 else ""
            outcome, detail = "failed", breaches[0] + more
        elif outcome == "not finished":
            detail = f"the budget of {self.budget_s:g} s was spent after {number} cases; it is not opened by this"
        elif not passed:
            outcome, detail = "failed", f"no case reached the kernel: {refused[0] if refused else 'there is none'}"
        return replace(
            row,
            outcome=outcome,
            detail=detail,
            cases=passed,
            wrong=len(breaches),
            refused=tuple(refused),
            seconds=self.clock() - began,
        )

    def _all_cases(self, op: QualifiableOp, device: int) -> Iterator[tuple[str, Callable[[], Case]]]:
        """The name of each case, and what makes it: a case of the caller's may not fit into the device's memory."""
        target = self.runner.target(device)
        for sample in op.samples(target):
            if self.spent():
                raise _Spent
            yield sample.name, partial(_same, sample)
        for case in self.cases.get(op.name, ()):
            if self.spent():
                raise _Spent
            yield f"{case.name} (yours)", partial(_on, case, target)

    def _tell(self, op: QualifiableOp, device: int, number: int, case: str) -> None:
        if self.progress is not None:
            self.progress(Step(len(self.rows), self.total, op.name, device, number, case))

    def _done(self, op: QualifiableOp, row: Row, closes: bool = False) -> None:
        built = self.gate.host.manifest.ops.get(op.basename)
        row = replace(
            row,
            basename=op.basename,
            contract=str(op.contract),
            source=built.digest if built else None,
            when=now(),
        )
        if closes or row.outcome == "qualified":
            by = f"qualification, {row.cases} cases"
            self.gate.record(row.op, row.device, Qualification(by, row.when, row.detail if closes else None))
        self.rows.append(row)
        if self.progress is not None:
            self.progress(Step(len(self.rows), self.total, row.op, row.device, row=row))


def _told(error: BaseException) -> str:
    """The kind and the first line: CUDA's own errors go on for paragraphs of advice."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def _default_dtype(torch: Any, dtype: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TorchRunner:
    """CUDA through torch; `preload` is the native module's."""

    def __init__(self, preload: Callable[[int], int]) -> None:
        self.preload = preload

    def target(self, device: int) -> Any:
        return importlib.import_module("torch").device("cuda", device)

    @contextmanager
    def scope(self, device: int) -> Iterator[None]:
        torch = importlib.import_module("torch")
        target = self.target(device)
        with (
            torch.cuda.device(target),
            torch.no_grad(),
            # What the caller has set for its own code is none of the samples' business.
            torch.device("cpu"),
            torch.autocast("cuda", enabled=False),
            _default_dtype(torch, torch.float32),
        ):
            stream = torch.cuda.Stream(target)
            stream.wait_stream(torch.cuda.current_stream(target))
            with torch.cuda.stream(stream):
                yield

    def finish(self, device: int) -> None:
        importlib.import_module("torch").cuda.current_stream(self.target(device)).synchronize()

    def recover(self, device: int) -> str | None:
        torch = importlib.import_module("torch")
        try:
            torch.cuda.empty_cache()
            with torch.cuda.device(device):
                value = torch.ones(1, device=self.target(device)).add_(1).item()
        except Exception as error:
            return _told(error)
        return None if value == 2.0 else f"1 + 1 gave {value}"
