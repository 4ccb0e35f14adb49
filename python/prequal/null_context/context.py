"""`NullContext`: qualification, and the answers that rest on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prequal import runtime_state as state
from prequal.runtime.reasons import Reason, unsupported
from prequal.runtime.telemetry import unlocked_in_a_child

from .condition import (
    NEEDS,
    PROJECTION,
    ROW,
    Condition,
    GuidedCondition,
    NullCondition,
    feats_of,
    materialized,
    refuse,
    symbolic,
)
from .layer import Case, CrossAttention, Served, Shape, Shapes, Watched, fingerprint_of, numerics_of, repeated
from .report import Guidance, NullContextReport, Path

CANDIDATES = (1, 16, 64, 256, 1024)


@dataclass(frozen=True)
class _Qualified:
    """For one kind of guidance."""

    report: NullContextReport
    layers: Mapping[str, Served]
    projects: bool  # the projection path passed as well
    device: torch.device
    numerics: tuple[Any, ...]
    fingerprint: Any


@dataclass
class _Watching:
    """A qualification that looks on while the model runs."""

    cases: Mapping[str, Case]
    valid: Tensor | None  # of the condition, which the tensor in its place cannot say
    symbolic: bool = False  # the second run: which layers the symbolic condition reached
    reached: set[str] = field(default_factory=set)


_watching: ContextVar[tuple[NullContext, _Watching] | None] = ContextVar("prequal.null_context", default=None)


class NullContext:
    """The null context of a model's cross-attentions: their output rows for a condition of zeros, cached, bit for bit.

    Serves nothing until `qualify` has passed on this worker, under every policy: the contract is Bitwise. Then a call
    is answered, where all layers passed, by a view of the cached row; where only that failed, by the projection of the
    value row at the reference's own shape; else by the reference. Calls are counted as `null_context` and
    `null_context_projection` in `prequal.stats()`; `prequal.disable` takes both names, and turning off the first leaves
    the second. A qualification ends when a parameter is written, exchanged, moved or cast, when a submodule is
    exchanged, and when a numeric flag of torch moves; the next calls say `not_qualified` and what moved.

    Args:
        layers: the cross-attentions by name, or modules whose `cross_attention` adapter was made elsewhere:
            `prequal.patch_null_context(model)` makes both.
        canonical_rows: the row counts at which the row may be made; the smallest that passes everywhere is taken. One
            number is a list of one. Some libraries multiply one row by another kernel than many, and round otherwise.

    Raises:
        TypeError, ValueError: no layers; a layer is no CrossAttention; no positive row counts.
    """

    def __init__(
        self, layers: Mapping[str, CrossAttention], *, canonical_rows: int | Iterable[int] = CANDIDATES
    ) -> None:
        if not isinstance(layers, Mapping) or not all(isinstance(layer, CrossAttention) for layer in layers.values()):
            raise TypeError("layers: expected a mapping from names to CrossAttention")
        if not layers:
            raise ValueError("layers: expected at least one, got none")
        if not isinstance(canonical_rows, Iterable | int):
            raise TypeError(f"canonical_rows: expected row counts, got {type(canonical_rows).__name__}")
        counts = [canonical_rows] if isinstance(canonical_rows, int) else list(canonical_rows)
        if not counts or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"canonical_rows: expected positive row counts, got {counts}")
        self.layers = dict(layers)
        self.canonical_rows = tuple(sorted(set(counts)))
        self._qualified: dict[Guidance, _Qualified] = {}
        self._lock = threading.RLock()
        unlocked_in_a_child(self)

    # ---- qualification -----------------------------------------------------------------------------------------------

    def qualify(
        self,
        condition: Condition,
        *,
        shapes: Iterable[Sequence[int]] = (),
        runs: Iterable[Callable[[Any], object]] = (),
        exact_shapes: bool = False,
        seed: int = 0,
    ) -> NullContextReport:
        """Run the reference at this worker's shapes and hold the cached rows against it, raw bits against raw bits.

        In this order, for every layer and shape: the row from its canonical input; the reference on conditional and
        null rows (of batched guidance [2B, N, C]); its conditional slice against the conditional half alone; its null
        rows against the cached row. All must pass, or the next path serves, which is held to the same: `NullContext`
        says which. The outcome replaces that of an earlier call for the same kind of guidance.

        Args:
            condition: a NullCondition: serial guidance; a GuidedCondition: batched.
            shapes: leading dimensions of x, (B, N) a case (of batched guidance those of the conditional half), for
                layers that take plain tensors; x is random.
            runs: functions of a condition that run the whole model (patched by `patch_null_context`) at one production
                shape. Each is called with the real tensor, while every layer is looked at as it is reached, and once
                more with the symbolic condition, which must reach every layer too.
            exact_shapes: serve only token counts that were run; default: also those between the least and the largest,
                as far as the batch and the condition are the same. No run proves the counts between.
            seed: of the random x.

        Raises:
            TypeError, ValueError: no condition, or neither shapes nor runs. RuntimeError: inside a graph capture.
        """
        if not isinstance(condition, NullCondition | GuidedCondition):
            raise TypeError(f"condition: expected a NullCondition or a GuidedCondition, got {type(condition).__name__}")
        if callable(runs):
            raise TypeError(f"runs: expected functions in a list, got {type(runs).__name__}")
        runs = list(runs)
        for run in runs:
            if not callable(run):
                raise TypeError(f"runs: expected functions of a condition, got {type(run).__name__}")
        wanted = []
        for one in shapes:
            if not isinstance(one, Sequence):
                raise TypeError(f"shapes: expected leading dimensions (B, N) of each case, got {type(one).__name__}")
            wanted.append(tuple(one))
        if not wanted and not runs:
            raise ValueError("shapes, runs: expected at least one case, got none")
        for shape in wanted:
            if not shape or not all(isinstance(n, int) and n > 0 for n in shape):
                raise ValueError(f"shapes: expected positive leading dimensions of x, got {shape}")
        if condition.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("NullContext.qualify: expected no graph capture, got one: qualify before")
        guidance: Guidance = "batched" if isinstance(condition, GuidedCondition) else "serial"
        with self._lock, torch.no_grad():
            self._qualified.pop(guidance, None)
            watched = {name: Watched(layer.module) for name, layer in self.layers.items()}
            numerics = numerics_of(condition.device)
            cases = {name: Case(name, layer, guidance, self.canonical_rows) for name, layer in self.layers.items()}
            for name, found in watched.items():
                if found.uncounted:
                    cases[name].refuse("counted_writes", NEEDS["counted_writes"])
            self._run_shapes(cases, condition, wanted, seed)
            self._run_model(cases, condition, runs)
            made = self._concluded(guidance, cases, condition, watched, numerics, exact_shapes)
            self._qualified[guidance] = made
        return made.report

    def _run_shapes(
        self, cases: Mapping[str, Case], condition: Condition, shapes: Sequence[tuple[int, ...]], seed: int
    ) -> None:
        generator = torch.Generator(condition.device).manual_seed(seed)
        zeros, valid = condition.materialize(), condition.valid
        batched = isinstance(condition, GuidedCondition)
        for shape in shapes:
            first, *rest = shape
            leading = (2 * first, *rest) if batched else shape
            for case in cases.values():
                dtype = next(case.layer.module.parameters()).dtype
                x = torch.randn(*leading, case.layer.width, generator=generator, device=condition.device).to(dtype)
                case.observe(x, zeros, valid)

    def _run_model(
        self, cases: Mapping[str, Case], condition: Condition, runs: Sequence[Callable[[Any], object]]
    ) -> None:
        for run in runs:
            seen = {name: case.cases for name, case in cases.items()}
            with self._looking_on(_Watching(cases, condition.valid)):
                run(condition.materialize())
            with self._looking_on(_Watching(cases, condition.valid, symbolic=True)) as second:
                run(condition)
            for name, case in cases.items():
                if case.cases == seen[name]:
                    case.refuse("materialized", "a run did not reach this layer: is the model patched?")
                elif name not in second.reached:
                    case.refuse("materialized", f"the symbolic condition did not reach it; {NEEDS['materialized']}")

    @contextmanager
    def _looking_on(self, watching: _Watching) -> Iterator[_Watching]:
        token = _watching.set((self, watching))
        try:
            with state.flags.strict(False):
                yield watching
        finally:
            _watching.reset(token)

    def _concluded(
        self,
        guidance: Guidance,
        cases: Mapping[str, Case],
        condition: Condition,
        watched: Mapping[str, Watched],
        numerics: tuple[Any, ...],
        exact: bool,
    ) -> _Qualified:
        reports = tuple(case.report() for case in cases.values())
        common = set.intersection(*(set(report.candidates) for report in reports))
        refused = next((report for report in reports if report.reason), None)
        projects = refused is None and all(case.projection for case in cases.values())
        canonical, reason, detail = min(common, default=None), None, ""
        path: Path = "row"
        if refused is not None:
            path, canonical, reason, detail = "reference", None, refused.reason, f"{refused.name}: {refused.detail}"
        elif canonical is None:
            path, reason = "projection" if projects else "reference", str(Reason.QUALIFICATION_FAILED)
            detail = next(
                f"{report.name}: {what}: {text}"
                for report in reports
                for what, text in [*report.mismatches.items(), ("canonical rows", "no count passes everywhere")]
                if report.mismatches or report is reports[-1]
            )
        shapes = {shape.leading for case in cases.values() for shape in case.shapes}
        report = NullContextReport(guidance, path, canonical, reason, detail, reports, tuple(sorted(shapes)))
        layers = {
            name: Served(
                row=None if canonical is None else case.rows[canonical],
                value=case.value,
                watched=watched[name],
                shapes=Shapes(case.shapes, exact),
                dtypes=case.dtypes,
                row_version=0 if canonical is None else case.rows[canonical]._version,
            )
            for name, case in cases.items()
        }
        return _Qualified(report, layers, projects, condition.device, numerics, fingerprint_of(condition.device))

    def check(self) -> dict[Guidance, str]:
        """What moved since each qualification, the whole fingerprint included: empty where nothing did.

        Calls notice parameters and a few numeric flags by themselves; libraries, devices and all other flags are
        compared here. What moved ends the qualification.
        """
        with self._lock:
            found: dict[Guidance, str] = {}
            for guidance, qualified in self._qualified.items():
                text = next(
                    (f"{n}: {t}" for n, found_layer in qualified.layers.items() if (t := found_layer.moved())),
                    None,
                )
                now = fingerprint_of(qualified.device)
                if text is None and now is not None and qualified.fingerprint is not None:
                    moved = qualified.fingerprint.diff(now)
                    text = "; ".join(str(change) for change in moved[:3]) or None
                if text is not None:
                    found[guidance] = text
            for guidance in found:
                del self._qualified[guidance]
        return found

    @property
    def is_looking_on(self) -> bool:
        """A qualification of this null context runs the model, in this very thread or task."""
        looking = _watching.get()
        return looking is not None and looking[0] is self

    def report(self, guidance: Guidance) -> NullContextReport | None:
        """Of the last qualification for this kind of guidance; None where there is none, or it ended."""
        found = self._qualified.get(guidance)
        return None if found is None else found.report

    # ---- answers -----------------------------------------------------------------------------------------------------

    def row(self, layer: str, x: Any, condition: Condition) -> Tensor | None:
        """The layer's output for the null rows as a view of the cached row, or None: then the reference must answer.

        Nothing is allocated or launched. Every None is counted with its reason; in strict mode it raises.

        Args:
            layer: its name.
            x: what the layer would be called with, [B, N, C] (of batched guidance [2B, N, C]). Only its shape is used.
            condition: symbolic, as the layer would get it.

        Returns:
            [B, N, C], strides 0 but in the last dimension. It is not to be written to: torch raises, or, of a single
            token, the qualification ends.

        Raises:
            KeyError: no such layer. TypeError: condition is not symbolic. FallbackError: refused, in strict mode.
        """
        if torch.compiler.is_compiling():
            return None
        if not isinstance(condition, Condition):
            raise TypeError(f"condition: expected a NullCondition or a GuidedCondition, got {type(condition).__name__}")
        qualified, refusal = self._look_up(ROW, layer, x, condition)
        if refusal is not None:
            refuse(str(feats_of(x).device), *refusal)
            return None
        assert qualified is not None
        state.telemetry.served(ROW, str(qualified.device))
        row = qualified.layers[layer].row
        assert row is not None
        return row.expand(*_leading(x, condition), -1)

    def answer(self, layer: str, x: Any, context: Any, *more: Any, **named: Any) -> Any:
        """What the layer's module answers, by the best path that is open. `context` may be symbolic, or not.

        For serial guidance the answer is the view of `row`. For batched guidance both halves are concatenated, which
        copies; a block that adds the halves to its stream by itself calls `row`.
        """
        found = self.layers[layer]
        condition = symbolic(context)
        if torch.compiler.is_compiling():  # traced as the reference
            return found.reference(x, context if condition is None else materialized(context), *more, **named)
        looking = _watching.get()
        if looking is not None and looking[0] is self:
            return self._looked_at(looking[1], layer, x, context, condition, more, named)
        if condition is None:
            return found.reference(x, context, *more, **named)
        valid = condition.valid
        if any(value is not None for value in (*more, *named.values())):
            refuse(str(feats_of(x).device), unsupported("arguments"), NEEDS["arguments"])
            return found.reference(x, materialized(context), *more, **named)
        row = self.row(layer, x, condition)
        if row is None:
            return self._projected(layer, x, context, condition, valid)
        if isinstance(condition, GuidedCondition):
            conditional = found.reference(x[: x.shape[0] // 2], condition.condition, condition.null.valid)
            return torch.cat([conditional, row])
        return row if isinstance(x, Tensor) else x.replace(row)

    def _projected(self, layer: str, x: Any, context: Any, condition: Condition, valid: Tensor | None) -> Any:
        found = self.layers[layer]
        qualified, refusal = self._look_up(PROJECTION, layer, x, condition)
        if refusal is not None or qualified is None:
            return found.reference(x, materialized(context), valid)
        state.telemetry.served(PROJECTION, str(qualified.device))
        value = qualified.layers[layer].value
        assert value is not None
        rows = repeated(value, _leading(x, condition))
        if isinstance(condition, GuidedCondition):
            attended = found.attend(x[: x.shape[0] // 2], condition.condition, condition.null.valid)
            return found.project(torch.cat([attended, rows]))
        answer = found.project(rows)
        return answer if isinstance(x, Tensor) else x.replace(answer)

    def _looked_at(
        self,
        watching: _Watching,
        layer: str,
        x: Any,
        context: Any,
        condition: Condition | None,
        more: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Any:
        case, extra = watching.cases[layer], any(value is not None for value in (*more, *named.values()))
        if condition is not None:
            watching.reached.add(layer)
            context = materialized(context)
            if not extra:
                return self.layers[layer].reference(x, context, condition.valid)
        if watching.symbolic:  # zeros by now
            return self.layers[layer].reference(x, context, *more, **named)
        if extra:
            case.refuse("arguments", NEEDS["arguments"])
            return self.layers[layer].reference(x, context, *more, **named)
        return case.observe(x, context, watching.valid)

    def _look_up(
        self, path: str, layer: str, x: Any, condition: Condition
    ) -> tuple[_Qualified | None, tuple[str, str] | None]:
        """The qualification that serves this call by this path, or a reason with its detail."""
        module = self.layers[layer].module
        guidance: Guidance = "batched" if isinstance(condition, GuidedCondition) else "serial"
        null = condition.null if isinstance(condition, GuidedCondition) else condition
        assert isinstance(null, NullCondition)
        if where := state.flags.disabled(path):
            return None, (str(Reason.DISABLED_BY_FLAG), where)
        qualified = self._qualified.get(guidance)
        if qualified is None:
            return None, (str(Reason.NOT_QUALIFIED), f"no qualification for {guidance} guidance: NullContext.qualify")
        report = qualified.report
        if (
            report.path == "reference"
            or (path == ROW and report.path != "row")
            or not (path == ROW or qualified.projects)
        ):
            return None, (report.reason or str(Reason.QUALIFICATION_FAILED), report.detail)
        need = self._unmet(qualified, layer, module, x, condition, null)
        if need is not None:
            return None, (unsupported(need), NEEDS[need])
        if moved := self._moved(qualified, layer):
            return None, (str(Reason.NOT_QUALIFIED), f"{moved}: NullContext.qualify again")
        return qualified, None

    def _unmet(
        self, qualified: _Qualified, layer: str, module: nn.Module, x: Any, condition: Condition, null: NullCondition
    ) -> str | None:
        feats, served, batched = feats_of(x), qualified.layers[layer], isinstance(condition, GuidedCondition)
        if type(feats) is not Tensor or _is_transformed():
            return "transform"
        if torch.is_grad_enabled() and (feats.requires_grad or any(p.requires_grad for p in module.parameters())):
            return "grad"
        if torch.is_autocast_enabled(feats.device.type):
            return "autocast"
        if not self.layers[layer].no_dropout(module) or served.watched.began_training():
            return "dropout"
        if not served.watched.is_bare():
            return "bare"
        if null.least_valid < 1:
            return "valid_tokens"
        assert served.dtypes is not None
        if (condition.dtype, condition.device) != (served.dtypes[1], qualified.device):
            return "condition"
        if (
            (feats.dtype, feats.device) != (served.dtypes[0], qualified.device)
            or feats.shape[-1] != self.layers[layer].width
            or (batched and (x is not feats or feats.shape[0] % 2))
        ):
            return "layout"
        return served.shapes.unmet(Shape(_leading(x, condition), tuple(null.shape), null.valid is not None))

    def _moved(self, qualified: _Qualified, layer: str) -> str | None:
        if text := qualified.layers[layer].moved():
            return f"{layer}: {text}"
        if (now := numerics_of(qualified.device)) != qualified.numerics:
            return f"numeric flags of torch moved from {qualified.numerics} to {now}"
        return None

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind}: {found.report.path}" for kind, found in self._qualified.items()) or "not qualified"
        return f"NullContext({len(self.layers)} layers; {kinds})"


def _leading(x: Any, condition: Condition) -> tuple[int, ...]:
    first, *rest = feats_of(x).shape[:-1]
    return (first // 2, *rest) if isinstance(condition, GuidedCondition) else (first, *rest)


def _is_transformed() -> bool:
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None
