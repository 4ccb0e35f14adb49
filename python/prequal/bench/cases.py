"""What is measured: cases (an op at a shape, with its data) and who answers them. shapes/<basename>.py lists them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from prequal.errors import UnknownOpError
from prequal.registry import OPS, Op

from . import shapes

Compare = Callable[[Any, Any, Sequence[Any]], str | None]  # got, want, arguments: what is wrong, or None
WARM_UPS, RUNS = 8, 100


@dataclass(frozen=True)
class Other:
    """Somebody else's way to the same answer. It may be held to another standard than the op's own contract, which it
    never signed; `compare` says to which."""

    name: str
    function: Callable[..., Any]  # of the op's arguments
    compare: Compare
    kind: str = "eager"  # eager, compiled or peer


@dataclass(frozen=True)
class Peer:
    """A package with an op like ours: measured where it is installed, listed as absent where not."""

    module: str
    op: str
    build: Callable[[], Callable[..., Any]]  # imports it
    compare: Compare
    refuses: Callable[[Sequence[Any]], str | None] = lambda args: None  # why it cannot take this call

    def absent(self) -> str | None:
        try:
            found = importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            found = False
        return None if found else "not installed"


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    make: Callable[[torch.device], tuple[Any, ...]]  # positional arguments: data and distribution are the case's
    quick: bool = False
    series: str = ""  # cases of one series make a line of the cost-growth chart, over `size`
    size: int = 0
    runs: int = RUNS
    others: Sequence[Other] = ()
    compiled: Callable[..., Any] | None = None  # what torch.compile is given; None: that is not measured here
    compare_compiled: Compare | None = None
    peers: bool = True
    # Compared are only the answers for the first rows of the first argument, where the reference cannot do all of them.
    rows: int | None = None
    # Keyword arguments of the op and its reference; the others are written for them.
    named: Mapping[str, Any] = field(default_factory=dict)

    def reference_args(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if self.rows is None else (args[0][: self.rows], *args[1:])

    def compared(self, out: Any) -> Any:
        if self.rows is None:
            return out
        return out[: self.rows] if isinstance(out, torch.Tensor) else tuple(x[: self.rows] for x in out)


def contract_of(op: Op) -> Compare:
    def compare(got: Any, want: Any, args: Sequence[Any]) -> str | None:
        found = op.contract.compare(got, want)
        return None if found is None else str(found)

    return compare


def shape_lists() -> dict[str, Any]:
    """The modules of shapes/, by basename."""
    return {
        name: importlib.import_module(f"{shapes.__name__}.{name}")
        for _, name, _ in pkgutil.iter_modules(shapes.__path__)
    }


def sample_cases(op: Op) -> Iterator[Case]:
    """For an op that has no shape list: its quick sample, so that no op goes unmeasured."""
    first = next(iter(op.samples(torch.device("cpu"))))

    def make(device: torch.device) -> tuple[Any, ...]:
        return next(iter(op.samples(device))).args

    eager = Other("torch eager", partial(op.reference, **first.kwargs), contract_of(op))
    yield Case(op.name, f"sample {first.name}", make, quick=True, others=[eager], named=first.kwargs)


def chosen_ops(names: Iterable[str] | None) -> list[Op]:
    """By name or basename; None: every op."""
    if names is None:
        return list(OPS.values())
    found: dict[str, Op] = {}
    for name in names:
        these = [op for op in OPS.values() if name in (op.name, op.basename)]
        if not these:
            raise UnknownOpError("--ops", name, OPS)
        found |= {op.name: op for op in these}
    return list(found.values())


def cases_of(ops: Sequence[Op], tier: str) -> list[Case]:
    """In the order of the registry; `quick`, `full`, or `sample`: the quick sample of each op and nothing else.

    Quick leaves torch.compile to the first case of each basename: its autotuning is what takes the minutes."""
    if tier == "sample":
        return [case for op in ops for case in sample_cases(op)]
    lists = shape_lists()
    found: list[Case] = []
    for op in ops:
        listed = [case for case in lists[op.basename].cases() if case.op == op.name] if op.basename in lists else []
        found += [case for case in listed or sample_cases(op) if tier == "full" or case.quick]
    if tier == "full":
        return found
    compiled: set[str] = set()
    for i, case in enumerate(found):
        basename = OPS[case.op].basename
        if case.compiled is not None and basename in compiled:
            found[i] = replace(case, compiled=None)
        elif case.compiled is not None:
            compiled.add(basename)
    return found
