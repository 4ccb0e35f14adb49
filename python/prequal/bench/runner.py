"""Measure cases: compare every answer with the reference first, then time who was right, in interleaved rounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from prequal import runtime_state as state
from prequal.api import qualify
from prequal.registry import OPS, Cost, Op

from .cases import WARM_UPS, Case, Compare, Peer, contract_of
from .device import GRAPH_CALLS, Call, Device, tensors_in
from .stats import Spread, is_noisy

ROUNDS = 5  # every implementation has its turn in each, so that a GPU that warms up or throttles is shared by all
GRAPH_BELOW_US = 1000.0  # above it, launches are nothing
# Others that are slow are measured fewer times, so that one of them does not take the time of all: 20 runs still have
# quartiles, and from a quarter of a second on, where nothing of a launch shows, one a round does. Who takes seconds a
# call is not measured at all, and the row says so. A replay is 20 calls already: of long ones 20 replays, 4 a round.
PATIENCE_US, LEAST_RUNS, ONE_A_ROUND_US, TOO_SLOW_US = 5e5, 20, 2.5e5, 2e6
REPLAYS_PATIENCE_US = 1e5

Say = Callable[[str], None]


def silent(text: str) -> None:
    pass


@dataclass
class Candidate:
    """One way to answer a case."""

    name: str
    function: Callable[..., Any]
    compare: Compare
    kind: str
    device_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)
    graph_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    compile: bool = True
    peers: Sequence[Peer] = ()
    rounds: int = ROUNDS
    runs: int | None = None  # instead of what each case says


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()  # or the second shape would be compiled as one of any size
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


class DeviceLost(RuntimeError):
    """The GPU no longer answers this process: of what follows nothing can be told."""

    def __init__(self, who: str, error: BaseException) -> None:
        super().__init__(f"the GPU no longer answers after {who}: {first_line(error)}")
        self.who, self.why = who, first_line(error)


def candidates(case: Case, op: Op, args: tuple[Any, ...], options: Options) -> tuple[list[Candidate], dict[str, str]]:
    """Who answers this case, and who does not, with why."""
    own = contract_of(op)
    found = [Candidate("prequal", op.function, own, "prequal")]
    found += [Candidate(other.name, other.function, other.compare, other.kind) for other in case.others]
    absent: dict[str, str] = {}
    if case.compiled is not None and options.compile:
        found.append(Candidate("torch.compile", compiled(case.compiled), case.compare_compiled or own, "compiled"))
    for peer in options.peers if case.peers else ():
        if peer.op != op.name:
            continue
        why = peer.absent() or peer.refuses(args)
        if why is None:
            try:
                found.append(Candidate(peer.module, peer.build(), peer.compare, "peer"))
                continue
            except Exception as error:  # somebody else's package: whatever it raises is why it is not measured
                why = f"cannot be imported: {first_line(error)}"
        absent[peer.module] = why
    return found, absent


def measure(case: Case, device: Device, options: Options | None = None, say: Say = silent) -> dict[str, Any]:
    """A row of evidence. Who is wrong or fails is named in it, and has no time."""
    options = options or Options()
    op = OPS[case.op]
    _let_serve(device)
    args = op.bind(case.make(device.torch_device), case.named)
    cost = op.cost_of(args)
    everybody, absent = candidates(case, op, args, options)
    row: dict[str, Any] = {"case": case.name, "op": op.name, "bytes": None, "flops": None, "by": {}}
    if cost is not None:
        row |= {"bytes": cost.bytes, "flops": cost.flops, "flops_unit": cost.unit}
    if case.series:
        row |= {"series": case.series, "size": case.size}
    if absent:
        row["absent"] = absent

    with torch.no_grad():
        right = _those_who_are_right(case, op, device, args, everybody, row, say)
        _time(case, op, device, args, right, row, options, say)
        for one in right:
            row["by"][one.name] = _figures(case, one, op, cost, device, args)
            figures = row["by"][one.name]
            if one.kind == "prequal":
                figures["path"] = _path(op, args)
            noisy = ", noisy" if figures.get("noisy") else ""
            slow = "" if figures.get("path", "fast") == "fast" else f", by the {figures['path']}"
            say(f"  {one.name}: {figures['device_us']['median']:,.1f} us{noisy}{slow}")
    return row


def _let_serve(device: Device) -> None:
    """A bitwise path serves once it is qualified here, as a production worker does it."""
    index = device.torch_device.index
    if index is None:
        return
    bitwise = [name for name, op in state.native_ops.items() if op.contract.kind == "bitwise"]
    if asked := [name for name in bitwise if state.gate.qualification(name, index) is None]:
        qualify(asked, index)


def _those_who_are_right(
    case: Case,
    op: Op,
    device: Device,
    args: tuple[Any, ...],
    everybody: Sequence[Candidate],
    row: dict[str, Any],
    say: Say,
) -> list[Candidate]:
    few = case.reference_args(args)
    want = op.outcome(lambda every: op._call(op.reference, every), few)
    right = []
    for one in everybody:
        try:
            got = case.compared(op.outcome(partial(_answer, case, op, one), args))
            wrong = one.compare(got, want, few)
        except Exception as error:  # a peer's failure, or ours: reported, never timed
            row.setdefault("failed", {})[one.name] = first_line(error)
            say(f"  {one.name}: FAILED, not timed: {first_line(error)}")
            if not device.answers():
                raise DeviceLost(one.name, error) from error
            continue
        if wrong is not None:
            row.setdefault("wrong", {})[one.name] = wrong
            say(f"  {one.name}: WRONG, not timed: {wrong}")
            continue
        right.append(one)
    return right


def _path(op: Op, args: tuple[Any, ...]) -> str:
    """Who answered as `prequal`: a benchmark that times the reference in its name must say so."""
    from prequal.api import explain

    positional, named = op.passed(args)
    found = explain(op.name, *positional, **named)
    return "fast" if found.path == "fast" else f"reference: {found.reason}"


def rotated(args: tuple[Any, ...], cache_bytes: int) -> tuple[list[tuple[Any, ...]], bool]:
    """Copies of the arguments for the calls of one graph, and whether a call finds its own gone from the cache.

    Nothing flushes between the calls of a graph. Enough copies to fill the cache twice make them cold; where the
    arguments are so small that not even one copy a call does, they are warm, and the row says so.
    """
    size = sum(x.numel() * x.element_size() for x in tensors_in(args))
    if not cache_bytes or not size:
        return [args], False
    if size > 2 * cache_bytes:
        return [args], True
    copies = math.ceil(2 * cache_bytes / size)
    if copies > GRAPH_CALLS:
        return [args], False

    def copy() -> tuple[Any, ...]:
        return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)

    return [args, *(copy() for _ in range(copies - 1))], True


def _time(
    case: Case,
    op: Op,
    device: Device,
    args: tuple[Any, ...],
    right: list[Candidate],
    row: dict[str, Any],
    options: Options,
    say: Say,
) -> None:
    """Fills in the times, and strikes out of `right` who is too slow to have any."""
    asked = options.runs or case.runs
    calls: dict[str, Call] = {one.name: _bound(case, op, one, args) for one in right}
    runs: dict[str, int] = {}
    for one in list(right):
        (first,) = device.device_us(calls[one.name], 1)
        if one.kind != "prequal" and first > TOO_SLOW_US:
            row.setdefault("failed", {})[one.name] = f"{first / 1e6:.1f} s a call: not measured"
            say(f"  {one.name}: {row['failed'][one.name]}")
            right.remove(one)
            continue
        if one.kind != "prequal" and first > ONE_A_ROUND_US:
            runs[one.name] = 1
            continue
        warm = device.device_us(calls[one.name], 1 if first > PATIENCE_US / LEAST_RUNS else WARM_UPS - 1)
        patient = asked if one.kind == "prequal" else max(LEAST_RUNS, int(PATIENCE_US / max(1e-3, min(warm))))
        runs[one.name] = math.ceil(min(asked, patient) / options.rounds)
    for _ in range(options.rounds):
        for one in right:
            if runs[one.name] > 1:
                device.wall_us(calls[one.name], 2)  # back from the others' code and data
            one.device_us += device.device_us(calls[one.name], runs[one.name])
            one.wall_us += device.wall_us(calls[one.name], runs[one.name])

    copies, cold = rotated(args, device.cache_bytes)
    graphs: dict[str, Callable[[int], list[float]]] = {}
    for one in right:
        if Spread.of(one.device_us).median >= GRAPH_BELOW_US:
            continue
        try:
            graph = device.captured([_bound(case, op, one, copies[i % len(copies)]) for i in range(GRAPH_CALLS)])
        except Exception as error:  # a host read, or an allocation of its own: its users cannot capture it either
            row.setdefault("not_capturable", {})[one.name] = first_line(error)
            continue
        if graph is not None:
            graphs[one.name] = graph
    if graphs:
        row["cold"] = cold  # of graph_us; device_us is always cold
    for _ in range(options.rounds):
        for one in right:
            if one.name in graphs:
                one.graph_us += graphs[one.name](replays(one, runs[one.name], options.rounds))


def replays(one: Candidate, most: int, rounds: int) -> int:
    """Of a graph of its calls in a round: as many as `most`, and fewer of long calls."""
    patient = REPLAYS_PATIENCE_US / max(1e-3, GRAPH_CALLS * Spread.of(one.device_us).median)
    return min(most, math.ceil(max(LEAST_RUNS, patient) / rounds))


def bound_call(op: Op, function: Callable[..., Any], args: Sequence[Any], hidden: Collection[str] = ()) -> Call:
    """What has a default and was not asked for is not passed: others have no such argument. Nor what is `hidden`."""
    positional, named = op.passed(args, defaults=False)
    return partial(function, *positional, **{name: value for name, value in named.items() if name not in hidden})


def _bound(case: Case, op: Op, one: Candidate, args: Sequence[Any]) -> Call:
    return bound_call(op, one.function, args, () if one.kind == "prequal" else case.named)


def _answer(case: Case, op: Op, one: Candidate, args: Sequence[Any]) -> Any:
    return _bound(case, op, one, args)()


def _figures(
    case: Case, one: Candidate, op: Op, cost: Cost | None, device: Device, args: tuple[Any, ...]
) -> dict[str, Any]:
    spread = Spread.of(one.device_us)
    found: dict[str, Any] = {
        "kind": one.kind,
        "device_us": spread.json(),
        "wall_us": Spread.of(one.wall_us).json(),
    }
    if one.graph_us:
        found["graph_us"] = Spread.of(one.graph_us).json()
    if is_noisy(one.device_us):
        found["noisy"] = True
    if cost is not None and spread.median > 0:
        found["TB_s"] = round(cost.bytes / spread.median / 1e6, 3)
        if cost.flops:
            found["TFLOP_s"] = round(cost.flops / spread.median / 1e6, 3)
    peak = device.peak_bytes(_bound(case, op, one, args))
    if peak is not None:
        found["peak_bytes"] = peak
    return found


def floor_us(row: Mapping[str, Any], ceilings: Mapping[str, float]) -> float | None:
    """The time that the declared cost takes at the measured ceilings, whichever binds."""
    if not row.get("bytes") or not ceilings.get("copy_TB_s"):
        return None
    found = row["bytes"] / ceilings["copy_TB_s"] / 1e6
    rate = ceilings.get(f"{row.get('flops_unit', 'fp32')}_TFLOP_s")
    if row.get("flops") and rate:
        found = max(found, row["flops"] / rate / 1e6)
    return float(found)


def run(
    cases: Iterable[Case],
    device: Device,
    options: Options,
    keep: Callable[[Case, dict[str, Any]], None],
    say: Say = silent,
    may_go_on: Callable[[], bool] = lambda: True,
    before: int = 0,
    total: int | None = None,
) -> bool:
    """Measure them all, handing over each row as it is made; a case that fails is a row that says so.

    False where it was stopped, by Ctrl-C or by the budget. Raises DeviceLost where nothing more can be
    measured. `before` of `total` cases were measured already."""
    cases = list(cases)
    total = len(cases) if total is None else total
    try:
        for number, case in enumerate(cases, before + 1):
            if not may_go_on():
                say(f"budget spent: {total - number + 1} cases not measured")
                return False
            say(f"[{number}/{total}] {case.op}: {case.name}")
            try:
                row = measure(case, device, options, say)
            except DeviceLost as lost:
                keep(case, {"case": case.name, "op": case.op, "by": {}, "failed": {lost.who: lost.why}})
                raise
            except Exception as error:  # out of memory, say: what was measured before must be written
                row = {"case": case.name, "op": case.op, "by": {}, "failed": {"prequal": first_line(error)}}
                say(f"  FAILED, not timed: {first_line(error)}")
                if not device.answers():
                    keep(case, row)
                    raise DeviceLost(f"the case {case.name}", error) from error
            keep(case, row)
    except KeyboardInterrupt:
        say("interrupted: what is done is written")
        return False
    return True


def first_line(error: BaseException) -> str:
    """Its first line; of files the name, since evidence is read elsewhere."""
    lines = str(error).strip().splitlines()
    text = re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+", "", f"{type(error).__name__}: {lines[0] if lines else ''}")
    return text if len(text) <= 200 else text[:197] + "..."
