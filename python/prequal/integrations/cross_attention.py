"""`prequal.patch_null_context`: the null context in cross-attention modules of sparse-3D generators.

Modules are known by their interface: what they project with, and in which order the value lies in it. Whether that is
enough is not believed but measured, by `NullContext.qualify`. Nothing here imports those generators.

Kinds, by the public repositories whose modules look so:
- trellis: `to_q`, `to_kv` (keys, then values), `to_out`; forward(x, context). TRELLIS and TRELLIS.2, dense and sparse,
  and Direct3D-S2, whose modules are of the same kind.
- hunyuan3d: `to_q`, `to_k`, `to_v`, `out_proj`; forward(x, y). Hunyuan3D 2.1. It lays keys and values side by side and
  cuts that into heads, so that what it attends with as values are pieces of both.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prequal.null_context import CANDIDATES, CrossAttention, NullContext, symbolic
from prequal.null_context.condition import materialized

Kind = Callable[[nn.Module], CrossAttention | str | None]

# A copy of a module is no key of this: what was qualified of one is not said of another.
_plans: weakref.WeakKeyDictionary[nn.Module, tuple[NullContext, str]] = weakref.WeakKeyDictionary()
_made: dict[type, type] = {}


# ---- the kinds -------------------------------------------------------------------------------------------------------


def trellis(module: Any) -> CrossAttention | str | None:
    """The adapter of a cross-attention of TRELLIS's or Direct3D-S2's kind; in words why it is left; None: not this
    kind."""
    if not _has_linears(module, "to_q", "to_kv", "to_out") or getattr(module, "_type", "cross") != "cross":
        return None
    if problem := _wrong_forward(module):
        return problem
    width = module.to_out.in_features
    if module.to_kv.out_features != 2 * width:
        return (
            f"to_kv: expected {2 * width} columns, keys and values of to_out's width, got {module.to_kv.out_features}"
        )

    def values(context: Any) -> Tensor:
        feats = context if isinstance(context, Tensor) else context.feats
        return module.to_kv(feats)[..., width:]

    return CrossAttention(module, "to_out", values, module.to_out.out_features)


def hunyuan3d(module: Any) -> CrossAttention | str | None:
    """The adapter of a cross-attention of Hunyuan3D 2.1's kind; in words why it is left; None: not this kind."""
    if not _has_linears(module, "to_q", "to_k", "to_v", "out_proj") or not hasattr(module, "kdim"):
        return None
    if problem := _wrong_forward(module):
        return problem
    if getattr(module, "with_dca", False):
        return "decoupled: a second attention over a part of the condition"
    heads, width = int(module.num_heads), module.out_proj.in_features

    def values(context: Any) -> Tensor:
        pairs = torch.cat((module.to_k(context), module.to_v(context)), dim=-1)
        return pairs.unflatten(-1, (heads, -1))[..., width // heads :].flatten(-2)

    return CrossAttention(module, "out_proj", values, module.out_proj.out_features)


KINDS: Mapping[str, Kind] = {"trellis": trellis, "direct3d_s2": trellis, "hunyuan3d": hunyuan3d}


def _has_linears(module: nn.Module, *names: str) -> bool:
    return all(hasattr(getattr(module, name, None), "in_features") for name in names)


def _wrong_forward(module: nn.Module) -> str | None:
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    names = list(inspect.signature(type(module).forward).parameters)
    return None if len(names) >= 3 else f"forward: expected (self, x, context), got ({', '.join(names)})"


# ---- what a module becomes -------------------------------------------------------------------------------------------


def _original_class(cls: type) -> type:
    found: type = vars(cls).get("_prequal_null_original", cls)
    return found


def _patched_class(cls: Any) -> type:
    if cls not in _made:
        original = cls.forward

        def forward(self: Any, *args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():  # traced as the reference
                return original(self, *map(_real, args), **{key: _real(value) for key, value in named.items()})
            plan = _plans.get(self)
            if plan is None:
                return original(self, *args, **named)
            null_context, name = plan
            x, context, more, others = _parted(original, self, args, named)
            # what is no symbol is passed on as it came
            if context is None or (symbolic(context) is None and not null_context.is_looking_on):
                return original(self, *args, **named)
            return null_context.answer(name, x, context, *more, **others)

        _made[cls] = type(
            cls.__name__,
            (cls,),
            {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
                "__reduce_ex__": _reduce,
                "forward": forward,
                "_prequal_null_original": cls,
            },
        )
    return _made[cls]


def _real(value: Any) -> Any:
    return value if symbolic(value) is None else materialized(value)


def _parted(
    original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Any, tuple[Any, ...], dict[str, Any]]:
    """x and the context of a call, by the places that the module's own signature gives them, and what else came."""
    if len(args) >= 2:
        return args[0], args[1], args[2:], named
    bound = inspect.signature(original).bind(module, *args, **named)
    names = list(bound.signature.parameters)[1:3]
    x, context = (bound.arguments.get(name) for name in names)
    return x, context, (), {key: value for key, value in named.items() if key not in names}


def _reduce(self: Any, protocol: int) -> Any:
    """Copies and pickles come back as the module was: a qualification is of this very module."""
    reduced: Any = nn.Module.__reduce_ex__(self, protocol)  # of object: a function, its arguments, the state
    _, _, *rest = reduced
    return _remake, (_original_class(type(self)),), *rest


def _remake(cls: Any) -> Any:
    return cls.__new__(cls)


# ---- the public functions --------------------------------------------------------------------------------------------


def patch_null_context(
    model: nn.Module,
    *,
    kinds: Iterable[str] | None = None,
    only: Callable[[str, nn.Module], bool] = lambda name, module: True,
    canonical_rows: int | Iterable[int] = CANDIDATES,
) -> NullContext:
    """Let a model's cross-attention modules take symbolic conditions, and answer them from a cached row.

    In place, and reversible with `unpatch_null_context`. Until the returned null context is qualified, and for every
    other condition, modules compute what they did: a symbolic condition that the row does not serve becomes the zeros
    that it stands for, counted. Weights, names, hooks and `state_dict` stay. A copy and a pickle are not patched.

    Args:
        model: anything with cross-attention modules of a known kind in it.
        kinds: which of trellis, direct3d_s2, hunyuan3d; default: all.
        only: says of a name and its module whether it is a target.
        canonical_rows: as of `NullContext`.

    Returns:
        the null context over all of these modules, by their names in the model. `qualify` it.

    Raises:
        TypeError: model is no torch.nn.Module. ValueError: an unknown kind; no module of a kind, or one is patched.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    chosen = _chosen(kinds)
    layers: dict[str, CrossAttention] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        found = next((adapter for kind in chosen if (adapter := kind(module)) is not None), None)
        if found is None or not only(name, module):
            continue
        if _original_class(type(module)) is not type(module):
            raise ValueError(f"model: {name} is patched already: unpatch_null_context first")
        if isinstance(found, str):
            left[name] = found
        else:
            layers[name] = found
    if left:
        # All targets or none: with one layer on another path the two branches are no longer those that were compared.
        why = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        raise ValueError(
            f"model: expected cross-attentions that a null context fits, got {why}; leave them out by only="
        )
    if not layers:
        names = ", ".join(KINDS)
        raise ValueError(f"model: expected cross-attention modules ({names}), got none in {type(model).__name__}")
    made = NullContext(layers, canonical_rows=canonical_rows)
    for name, layer in layers.items():
        layer.module.__class__ = _patched_class(type(layer.module))
        _plans[layer.module] = made, name
    return made


def unpatch_null_context(model: nn.Module) -> list[str]:
    """Undo `patch_null_context`: every module gets back the class that it had, and takes symbolic conditions as zeros.

    Returns:
        the names of the modules that were restored.

    Raises:
        TypeError: model is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    restored = []
    for name, module in model.named_modules():
        cls = type(module)
        if _original_class(cls) is not cls:
            module.__class__ = _original_class(cls)
            _plans.pop(module, None)
            restored.append(name)
    return restored


def _chosen(kinds: Iterable[str] | None) -> list[Kind]:
    if isinstance(kinds, str):
        raise TypeError(f"kinds: expected names in a list, got the text {kinds!r}")
    names = list(KINDS) if kinds is None else list(kinds)
    for name in names:
        if name not in KINDS:
            raise ValueError(f"kinds: expected names out of {', '.join(KINDS)}, got {name!r}")
    return list(dict.fromkeys(KINDS[name] for name in names))
