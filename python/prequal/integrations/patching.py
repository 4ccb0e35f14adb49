"""`prequal.patch` and `prequal.unpatch`: ops in the place of what a model's modules compute, and back.

A patched module keeps its weights, buffers, hooks and name; its class becomes a subclass of its class that has another
`forward`. A forward bound on the instance would be simpler and is wrong in three places: a DataParallel replica shares
the instance's dictionary, and with it a method bound to another device's weights; transformers wraps the forward of a
layer's *class* for gradient checkpointing; and a pickle would come back with half of it. fully_shard of torch does the
same thing in the same way.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from prequal.constraints import is_bool

from . import forwards
from .recognise import (
    ROTARY,
    NormForm,
    Steps,
    Unrecognised,
    check_rotation,
    innermost,
    lone_adds,
    norm_form,
    rewritten,
    steps_of,
)

logger = logging.getLogger("prequal")

OPS = ("rms_norm", "fused_add_rms_norm", "swiglu", "geglu", "rope")
HEAD_LOSS = "linear_cross_entropy"  # only where it is asked for: a model in training then returns no logits
KNOWN = (*OPS, HEAD_LOSS)
NOTHING = "nothing that these ops compute"
TORCHS_NORM = "a norm of torch's own: only the code of transformers' models is replaced"
TABLES = "it computes the tables of the rotation, which is replaced where they are used"
LONE_ADD = "a residual add whose norm is in another module stays torch's"


NO_STEPS = Steps()


# ---- what a module becomes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """With the class, all that a patched class is made of: plain data, so that a pickle can carry it."""

    exact_rounding: bool
    norm: bool = False
    steps: Steps = NO_STEPS
    norms: tuple[type, ...] = ()  # classes of steps.add_norms, in that order
    kind: str = ""  # of the activation
    activation: type | None = None


_made: dict[tuple[type, Any, Recipe], type] = {}


def original_class(cls: type) -> type:
    """The class that a patched class was made of; any other class itself."""
    found: type = vars(cls).get("_prequal_original", cls)
    return found


def patched_class(cls: type, recipe: Recipe) -> type:
    """One class for all modules alike: what is compiled for one layer serves the next."""
    key = cls, getattr(cls, "forward", None), recipe
    if key not in _made:
        forward = _norm_forward(cls, recipe) if recipe.norm else _rewritten_forward(cls, recipe)
        _made[key] = type(
            cls.__name__,  # transformers, FSDP policies and printed models go by it
            (cls,),
            {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
                "__reduce_ex__": _reduce,
                "forward": forward,
                "_prequal_original": cls,
                "_prequal_recipe": recipe,
            },
        )
    return _made[key]


def _norm_forward(cls: Any, recipe: Recipe) -> Callable[..., Any]:
    return forwards.norm(norm_form(cls), cls.forward, recipe.exact_rounding)


def _rewritten_forward(cls: Any, recipe: Recipe) -> Callable[..., Any]:
    helpers: dict[str, Any] = {}
    for name, norm in zip(recipe.steps.add_norms, recipe.norms, strict=True):
        known = (norm, patched_class(norm, Recipe(recipe.exact_rounding, norm=True)))
        helpers[f"prequal_add_norm_{name}"] = forwards.add_norm(norm_form(norm), known, recipe.exact_rounding)
    if recipe.steps.gated:
        assert recipe.activation is not None
        helpers["prequal_gated"] = forwards.gated(recipe.kind, recipe.activation, recipe.exact_rounding)
    if recipe.steps.rotates:
        original: Any = innermost(cls.forward).__globals__.get(ROTARY)  # type: ignore[attr-defined]
        check_rotation(original)
        helpers["prequal_rotary"] = forwards.rotary(original, recipe.exact_rounding)
    if recipe.steps.head_loss:
        helpers["prequal_head_loss"] = forwards.head_loss
    return rewritten(cls, recipe.steps, helpers)


def _reduce(self: Any, protocol: int) -> Any:
    """Copies and pickles come back patched: the class is made again where it is not there yet."""
    cls = type(self)
    reduced: Any = nn.Module.__reduce_ex__(self, protocol)  # of object: a function, its arguments, the state
    _, _, *state = reduced
    return _remake, (original_class(cls), cls._prequal_recipe), *state


def _remake(cls: Any, recipe: Recipe) -> Any:
    made: Any = cls
    try:
        made = patched_class(cls, recipe)
    except Unrecognised as error:  # another release of transformers than the one that the pickle was written with
        logger.warning("%s is loaded as it was before prequal.patch: %s", cls.__name__, error)
    return made.__new__(made)


# ---- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One module: its name in the model, its class, the ops that stand in it now, and what is left and why."""

    name: str
    module: str
    ops: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class PatchReport:
    """What `patch` or `unpatch` did. `str()` of it is the table, classes with one line each."""

    title: str
    replaced: tuple[Entry, ...]
    left: tuple[Entry, ...]

    @property
    def ops(self) -> dict[str, int]:
        """In how many modules each op stands."""
        found: dict[str, int] = {}
        for entry in self.replaced:
            for op in entry.ops:
                found[op] = found.get(op, 0) + 1
        return found

    def __str__(self) -> str:
        lines = [f"{self.title}: {len(self.replaced)} of {len(self.replaced) + len(self.left)} modules"]
        for heading, entries in (("replaced", self.replaced), ("left", self.left)):
            groups: dict[tuple[str, str], list[Entry]] = {}
            plain: dict[str, int] = {}
            for entry in entries:
                if entry.reason == NOTHING:
                    plain[entry.module] = plain.get(entry.module, 0) + 1
                else:
                    what = ", ".join(entry.ops) + (f" ({entry.reason})" if entry.ops and entry.reason else "")
                    groups.setdefault((entry.module, what or entry.reason), []).append(entry)
            if entries:
                lines.append(f"{heading}:")
            for (module, what), group in groups.items():
                where = group[0].name or "the model itself"
                more = f" and {len(group) - 1} more" if len(group) > 1 else ""
                lines.append(f"  {len(group)} × {module}: {what}" + f"  [{where}{more}]")
            if plain:
                lines.append(f"  {', '.join(f'{n} × {name}' for name, n in plain.items())}: {NOTHING}")
        return "\n".join(lines)


# ---- planning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    cls: type
    ops: tuple[str, ...] = ()
    reason: str = ""


def _left(cls: type, reason: str = NOTHING) -> _Plan:
    return _Plan(cls, reason=reason)


def _plan(module: nn.Module, wanted: frozenset[str], exact_rounding: bool) -> _Plan:
    cls = original_class(type(module))
    if cls.__module__.partition(".")[0] == "torch":
        return _left(cls, TORCHS_NORM if cls in (nn.RMSNorm, nn.LayerNorm) else NOTHING)
    if reason := _why_untouchable(module):
        return _left(type(module), reason)  # as it is, patched or not
    if "Norm" in cls.__name__:
        return _plan_norm(module, cls, wanted, exact_rounding)
    if "RotaryEmbedding" in cls.__name__:
        return _left(cls, TABLES)
    return _plan_steps(module, cls, wanted, exact_rounding)


def _why_untouchable(module: nn.Module) -> str | None:
    if "forward" in vars(module):
        return "its forward is replaced on the instance (a hook of accelerate's?)"
    bases = type(module).__mro__[1 if _is_patched(type(module)) else 0 :]
    if any("_prequal_original" in vars(base) for base in bases[1:]):
        return "its class was changed after it was patched"
    if any(base.__name__ == "FSDPModule" for base in bases):
        return "fully_shard has its class: patch before it"
    return None


def _is_patched(cls: type) -> bool:
    return "_prequal_original" in vars(cls)


def _plan_norm(module: nn.Module, cls: type, wanted: frozenset[str], exact_rounding: bool) -> _Plan:
    try:
        _check_norm(module, norm_form(cls))
        made = patched_class(cls, Recipe(exact_rounding, norm=True))
    except Unrecognised as error:
        return _left(cls, str(error))
    return _Plan(made, ("rms_norm",)) if "rms_norm" in wanted else _left(cls, "rms_norm was not asked for")


def _check_norm(module: Any, form: NormForm) -> None:
    weight, eps = getattr(module, "weight", None), getattr(module, form.eps, None)
    if getattr(weight, "ndim", None) != 1 or not isinstance(eps, float):
        raise Unrecognised(f"it has not the weight of one dimension and the {form.eps} that its forward uses")


def _plan_steps(module: Any, cls: type, wanted: frozenset[str], exact_rounding: bool) -> _Plan:
    """Every step that the module's forward has is taken where it can be, and else left with its reason."""
    looks_known = cls.__name__.endswith(("MLP", "Attention", "DecoderLayer"))
    try:
        steps = steps_of(cls)
    except Unrecognised as error:
        return _left(cls, str(error) if looks_known else NOTHING)
    if steps.head_loss and HEAD_LOSS not in wanted:
        steps = replace(steps, head_loss=None)
    if not steps:
        return _left(cls, "its forward has no step of a form that is known" if looks_known else NOTHING)

    ops: list[str] = []
    reasons: list[str] = []

    def take(op: str) -> bool:
        (ops if op in wanted else reasons).append(op if op in wanted else f"{op} was not asked for")
        return op in wanted

    norms: dict[str, type] = {}
    for name in dict.fromkeys(steps.add_norms):
        norm = getattr(module, name, None)
        norm_class = original_class(type(norm))
        try:
            _check_norm(norm, norm_form(norm_class))
        except Unrecognised as error:
            reasons.append(f"{name}: {error}")
            continue
        if "fused_add_rms_norm" in ops or take("fused_add_rms_norm"):
            norms[name] = norm_class
    if norms and lone_adds(cls):
        reasons.append(LONE_ADD)
    gated, kind = steps.gated, None
    if gated:
        activation = getattr(module, gated[0], None)
        kind = forwards.activation_kind(activation)
        if kind is None:
            reasons.append(f"no op for the activation {type(activation).__name__}")
        elif not take(kind.partition(" ")[0]):
            kind = None
    if steps.head_loss:
        take(HEAD_LOSS)
    rotates = steps.rotates
    if rotates:
        try:
            check_rotation(innermost(cls.forward).__globals__.get(ROTARY))  # type: ignore[attr-defined]
            rotates = take("rope")
        except Unrecognised as error:
            reasons.append(str(error))
            rotates = False

    recipe = Recipe(
        exact_rounding,
        steps=Steps(tuple(norms), gated if kind else None, rotates, steps.head_loss),
        norms=tuple(norms.values()),
        kind=kind or "",
        activation=type(getattr(module, gated[0])) if gated and kind else None,
    )
    if not recipe.steps:
        return _left(cls, "; ".join(reasons))
    try:
        return _Plan(patched_class(cls, recipe), tuple(ops), "; ".join(reasons))
    except Unrecognised as error:
        return _left(cls, str(error))


# ---- the public functions --------------------------------------------------------------------------------------------


def patch(
    model: nn.Module, *, ops: Iterable[str] | None = None, exact_rounding: bool = False, verbose: bool = True
) -> PatchReport:
    """Put ops of prequal into a model of Hugging Face transformers: norms, gated activations, rotary embeddings.

    In place, and reversible with `unpatch`. Weights are not copied, and neither names nor parameters change. Modules
    are known by the code of their forward, not by their class's name; what is not of a form that is known is left, with
    the reason in the report. A second call changes what the first one did to what it asks for. Patch before
    torch.compile and before fully_shard. Flags and gate hold for every call as anywhere: `prequal.disable("rope")`
    sends that op of a patched model to its reference, counted.

    Args:
        model: anything with such modules in it: a model, one layer, DataParallel of a model.
        ops: which of rms_norm, fused_add_rms_norm, swiglu, geglu, rope; default: all of them. Also
            linear_cross_entropy, for the head and the loss of a causal language model: called with labels in training
            mode, the model then returns its loss and, in the place of logits, None (with return_dict=False there is no
            place: transformers' tuples leave out what is None).
        exact_rounding: keep the roundings between steps that the model's code has: its bits, for less accuracy.
        verbose: print the report.

    Returns:
        which modules have which op now, and which were left, and why.

    Raises:
        TypeError: model is no torch.nn.Module, ops is a text, or exact_rounding or verbose is no bool.
        ValueError: an unknown name in ops; nothing in the model is of a form that is known. Nothing is changed then.
    """
    _check_model("patch", model)
    is_bool("exact_rounding", exact_rounding)
    is_bool("verbose", verbose)
    wanted = _wanted(ops)
    plans = [(name, module, _plan(module, wanted, exact_rounding)) for name, module in model.named_modules()]
    entries = [(Entry(name, plan.cls.__name__, plan.ops, plan.reason)) for name, _, plan in plans]
    title = f"prequal.patch of {original_class(type(model)).__name__}"
    report = PatchReport(
        title, tuple(entry for entry in entries if entry.ops), tuple(entry for entry in entries if not entry.ops)
    )
    if not report.replaced:
        asked = "" if wanted == frozenset(OPS) else f" for {', '.join(op for op in KNOWN if op in wanted)}"
        raise ValueError(
            f"model: expected modules of transformers' Llama family (Llama, Qwen, Mistral, Gemma) with something "
            f"to replace{asked}, got none in {type(model).__name__}\n{report}"
        )
    for _, module, plan in plans:
        if type(module) is not plan.cls and (plan.ops or _is_patched(type(module))):
            module.__class__ = plan.cls
    if verbose:
        print(report)
    return report


def unpatch(model: nn.Module, *, verbose: bool = False) -> PatchReport:
    """Undo `patch`: every module gets back the very class that it had, and with it its methods.

    Args:
        model: what was patched, or a part or a copy of it. Nothing happens where nothing was patched.
        verbose: print the report.

    Returns:
        which modules were restored; left are those that could not be, because something was put over the patch.

    Raises:
        TypeError: model is no torch.nn.Module, or verbose is no bool.
    """
    _check_model("unpatch", model)
    is_bool("verbose", verbose)
    replaced, left = [], []
    for name, module in model.named_modules():
        cls = type(module)
        if not any(_is_patched(base) for base in cls.__mro__):
            continue
        reason = _why_untouchable(module)
        if reason or not _is_patched(cls):
            left.append(Entry(name, cls.__name__, reason=reason or "its class was changed after it was patched"))
            continue
        module.__class__ = original_class(cls)
        replaced.append(Entry(name, cls.__name__, ("as it was",)))
    report = PatchReport(f"prequal.unpatch of {type(model).__name__}", tuple(replaced), tuple(left))
    if verbose:
        print(report)
    return report


def _check_model(where: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: model: expected a torch.nn.Module, got {type(model).__name__}")


def _wanted(ops: Iterable[str] | None) -> frozenset[str]:
    if ops is None:
        return frozenset(OPS)
    if isinstance(ops, str):
        raise TypeError(f"ops: expected names of ops in a list, got the text {ops!r}")
    if not isinstance(ops, Iterable):
        raise TypeError(f"ops: expected names of ops in a list, got {type(ops).__name__}")
    wanted = list(ops)
    if not wanted:
        raise ValueError(f"ops: expected names out of {', '.join(KNOWN)}, or None for the default, got none")
    for name in wanted:
        if name not in KNOWN:
            near = difflib.get_close_matches(str(name), KNOWN, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"ops: expected names out of {', '.join(KNOWN)}, got {name!r}{hint}")
    return frozenset(wanted)
