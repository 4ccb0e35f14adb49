"""One cross-attention: its reference, its parts, what it was computed from, and its run under qualification."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prequal import runtime_state as state
from prequal.contracts import Bitwise
from prequal.integrations.forwards import is_bare
from prequal.runtime.parameter_cache import ParameterKey, watch
from prequal.runtime.reasons import unsupported

from .condition import NEEDS, feats_of
from .report import Guidance, LayerReport

_BITWISE = Bitwise()


def _no_dropout(module: nn.Module) -> bool:
    return not (module.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()))


@dataclass(frozen=True)
class CrossAttention:
    """What the null context needs to know of one cross-attention module.

    Args:
        module: its forward takes (x, context), and (x, context, valid) where conditions say which tokens are valid;
            x: [B, N, C] or a sparse tensor with `feats` [N, C] and `replace`; context: [B, L, Dc], or sparse.
        output: the name of its output projection, a submodule [..., D] -> [..., C], the last thing that it does.
        values: context -> value rows [..., L, D]: all that the module does on the condition's side.
        width: C.
        forward: the reference; default: the module's class's forward.
        no_dropout: says whether nothing is dropped now; default: eval mode, or no Dropout with p > 0 inside.
        joint: tokens other than the condition's share the softmax. That is refused; undeclared, it is found, because
            the reference's null rows then differ.

    Raises:
        TypeError, ValueError: module is no nn.Module; it has no such submodule.
    """

    module: nn.Module
    output: str
    values: Callable[[Any], Tensor]
    width: int
    forward: Callable[..., Any] | None = None
    no_dropout: Callable[[nn.Module], bool] = _no_dropout
    joint: bool = False
    _class: type = field(init=False, repr=False)  # that the module had before it was patched

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, got {type(self.module).__name__}")
        if not isinstance(self.module._modules.get(self.output), nn.Module):
            raise ValueError(
                f"output: expected the name of a submodule of {type(self.module).__name__}, got {self.output!r}"
            )
        object.__setattr__(self, "_class", type(copy.copy(self.module)))

    def reference(self, x: Any, context: Any, *more: Any, **named: Any) -> Any:
        return self._call(self.module, x, context, *more, **named)

    def attend(self, x: Any, context: Any, valid: Tensor | None = None) -> Any:
        """The reference up to its output projection."""
        # A copy of the module as it is now (its mode, its attributes), with the same parameters and submodules but one.
        headless = copy.copy(self.module)
        headless._modules = {**self.module._modules, self.output: nn.Identity()}
        return self._call(headless, x, context, valid)

    def project(self, rows: Tensor) -> Tensor:
        """[..., D] -> [..., C]"""
        return self.module._modules[self.output](rows)  # type: ignore[misc]

    def _call(self, module: nn.Module, x: Any, context: Any, *more: Any, **named: Any) -> Any:
        forward = self.forward or self._class.forward  # type: ignore[attr-defined]
        given = more if any(value is not None for value in more) else ()
        return forward(module, x, context, *given, **named)


class Watched:
    """A module's parameters, buffers and submodules as they were: what a cached row was computed from.

    Looked at by every call, so by plain tuples: made for each parameter, a ParameterKey takes four times as long.
    """

    def __init__(self, module: nn.Module) -> None:
        self._inner = list(module.modules())[1:]
        self._children = [
            (owner._modules, name, child) for owner in module.modules() for name, child in owner._modules.items()
        ]
        self._counts = [
            (places, len(places))
            for owner in module.modules()
            for places in (owner._modules, owner._parameters, owner._buffers)
        ]
        self._eval = [each for each in module.modules() if not each.training]
        self._tensors = [
            (places, name, tensor, None if tensor is None else _key(tensor))
            for owner in module.modules()
            for places in (owner._parameters, owner._buffers)
            for name, tensor in places.items()
            if tensor is None or not tensor.is_inference()  # None: a bias that is not there may come
        ]
        for _, _, tensor, _ in self._tensors:
            if tensor is not None:
                watch(tensor)
        self.uncounted = any(tensor.is_inference() for tensor in (*module.parameters(), *module.buffers()))

    def moved(self) -> str | None:
        """In words, the first thing that is not as it was."""
        for places, name, child in self._children:
            if places.get(name) is not child:
                return f"{name} was exchanged"
        for tensors, name, tensor, key in self._tensors:
            if tensors.get(name) is not tensor:
                return f"{name} was exchanged"
            if tensor is not None and key is not None and (now := _key(tensor)) != key:
                each = zip(ParameterKey.__slots__, key, now, strict=True)
                return f"{name}: " + ", ".join(f"{field} was {was}, is {new}" for field, was, new in each if was != new)
        for held, count in self._counts:
            if len(held) != count:
                return f"{', '.join(list(held)[count:]) or 'a name'} was added or removed"
        return None

    def began_training(self) -> bool:
        """A module that was in eval mode is not: what it drops now, if by a function, nobody can see."""
        return any(module.training for module in self._eval)

    def is_bare(self) -> bool:
        return all(is_bare(module) for module in self._inner)


def _key(x: Tensor) -> tuple[Any, ...]:
    """The fields of a ParameterKey."""
    return x.data_ptr(), x._version, x.dtype, x.device, x.shape, x.stride()


class Shape(NamedTuple):
    """Of a call."""

    leading: tuple[int, ...]  # of x: of one half, where guidance is batched
    condition: tuple[int, ...]  # [B, L, Dc], of one half
    masked: bool  # the condition says which tokens are valid: attention with a mask may be another kernel


class Shapes:
    """Those that were run, and what may be served on the strength of them."""

    def __init__(self, known: Collection[Shape], exact: bool) -> None:
        self._known, self._exact = frozenset(known), exact
        self._conditions = {(shape.condition, shape.masked) for shape in known}
        self._spans: dict[Shape, tuple[int, int]] = {}  # without the token count -> the least and the largest
        for shape in known:
            *before, count = shape.leading
            key = shape._replace(leading=tuple(before))
            low, high = self._spans.get(key, (count, count))
            self._spans[key] = min(low, count), max(high, count)

    def unmet(self, shape: Shape) -> str | None:
        if shape in self._known:
            return None
        if (shape.condition, shape.masked) not in self._conditions:
            return "condition"
        *before, count = shape.leading
        low, high = self._spans.get(shape._replace(leading=tuple(before)), (1, 0))
        return "rows" if self._exact or not low <= count <= high else None


@dataclass(frozen=True)
class Served:
    """What qualification leaves of one layer, to answer calls from."""

    row: Tensor | None  # [C]
    value: Tensor | None  # [D]
    watched: Watched
    shapes: Shapes
    dtypes: tuple[torch.dtype, torch.dtype] | None
    row_version: int = 0

    def moved(self) -> str | None:
        # torch lets a view of one token be written to, also where that token is the view that a call was given
        if self.row is not None and self.row._version != self.row_version:
            return "the cached row was written to"
        return self.watched.moved()


# Which product and which attention run: getters of torch's own, absent in some releases.
_CUDA_FLAGS = tuple(
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_blas_preferred_backend",
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_cudnn_sdp_enabled",
    )
    if hasattr(torch._C, name)
)


def numerics_of(device: torch.device) -> tuple[Any, ...]:
    """Flags of torch that move the bits of a product and that a call can afford to read; `check` reads all."""
    if device.type == "cuda":
        return torch.get_float32_matmul_precision(), *(read() for read in _CUDA_FLAGS)
    return torch.get_float32_matmul_precision(), torch.get_num_threads()


def fingerprint_of(device: torch.device) -> Any:
    if device.type == "cuda":
        return state.gate.read_key(device.index) if state.gate.read_key else None
    from prequal.runtime.fingerprint import Fingerprint, torch_flags

    return Fingerprint.of({**state.fingerprint().portable().data, "flags": torch_flags(torch)})


def repeated(row: Tensor, leading: Sequence[int]) -> Tensor:
    """[D] -> [*leading, D] in memory of its own: a product of strides of 0 had other bits (bf16, torch 2.13, a CPU)."""
    return row.expand(*leading, -1).contiguous()


class Case:
    """One layer under qualification: what all its cases so far left standing."""

    def __init__(self, name: str, layer: CrossAttention, guidance: Guidance, candidates: Sequence[int]) -> None:
        self.name, self.layer, self.guidance = name, layer, guidance
        self.cases = 0
        self.reason: str | None = None
        self.detail = ""
        self.value: Tensor | None = None  # [D]
        self.rows: dict[int, Tensor] = {}  # [C] a candidate that is still right
        self.candidates = tuple(candidates)
        self.conditional = self.projection = True
        self.mismatches: dict[str, str] = {}
        self.shapes: set[Shape] = set()
        self.dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of x and of the condition, as they arrive here

    def refuse(self, need: str, detail: str) -> None:
        if self.reason is None:
            self.reason, self.detail = unsupported(need), detail

    def observe(self, x: Any, context: Any, valid: Tensor | None = None) -> Any:
        """One case, `context` being a tensor (or sparse), its null half zeros. Returns the reference's answer."""
        layer, batched = self.layer, self.guidance == "batched"
        feats, null = feats_of(x), context
        if not feats.shape[:-1].numel():  # nothing to compare: such a case vouches for nothing
            return layer.reference(x, context, valid)
        self.cases += 1
        conditional: tuple[Any, ...] = ()
        if batched:
            if not (isinstance(x, Tensor) and isinstance(context, Tensor)):
                self.refuse("layout", NEEDS["layout"] + "; sparse tensors are guided serially")
                return layer.reference(x, context, valid)
            if x.shape[0] % 2 or context.shape[0] % 2:
                self.refuse("layout", NEEDS["layout"])
                return layer.reference(x, context, valid)
            n, b = x.shape[0] // 2, context.shape[0] // 2
            null = context[b:]
            halves: tuple[Tensor | None, Tensor | None] = (None, None) if valid is None else (valid[:b], valid[b:])
            conditional = x[:n], context[:b], halves[0]
            leading = (n, *x.shape[1:-1])
        else:
            halves = (valid, valid)
            leading = tuple(feats.shape[:-1])
        self.shapes.add(Shape(leading, tuple(feats_of(null).shape), valid is not None))
        dtypes = feats.dtype, feats_of(null).dtype
        if self.dtypes not in (None, dtypes):
            self.refuse("layout", f"{NEEDS['layout']}; cases of {self.dtypes} and of {dtypes}")
        self.dtypes = dtypes

        # the article's order: the cache, the reference, its conditional slice, its null row
        if self._applies(null, halves[1]) and self.cases == 1:
            self._make_rows()
        answer = layer.reference(x, context, valid)
        if self.reason is not None:
            return answer
        assert self.value is not None
        want = feats_of(answer)
        null_want = want[n:] if batched else want
        if batched and self.conditional:
            found = _BITWISE.compare(layer.reference(*conditional), want[:n])
            self._note("conditional slice", found, leading)
            self.conditional = found is None
        first = null_want.reshape(-1, null_want.shape[-1])[0]
        if found := _BITWISE.compare(null_want, first.expand_as(null_want)):
            self.refuse("one_row", f"the reference's null rows differ: {found}; needed: {NEEDS['one_row']}")
            return answer
        for count in list(self.rows):
            if found := _BITWISE.compare(self.rows[count], first):
                self._note(f"row made at {count}", found, leading)
                del self.rows[count]
        if self.projection:
            self.projection = self._projects(conditional, want, null_want, leading)
        return answer

    def _applies(self, null: Any, valid: Tensor | None) -> bool:
        layer = self.layer
        if layer.joint:
            self.refuse("joint", NEEDS["joint"])
        elif not layer.no_dropout(layer.module):
            self.refuse("dropout", NEEDS["dropout"])
        elif torch.is_autocast_enabled(feats_of(null).device.type):
            self.refuse("autocast", NEEDS["autocast"])
        elif not feats_of(null).shape[:-1].numel() or (valid is not None and not bool(valid.any(-1).all())):
            self.refuse("valid_tokens", NEEDS["valid_tokens"])
        else:
            rows = layer.values(null)
            rows = rows.reshape(-1, rows.shape[-1]) if valid is None else rows[valid]
            value = rows[0].clone() if self.value is None else self.value
            if found := _BITWISE.compare(rows, value.expand_as(rows)):
                self.refuse("value_rows", f"{found}; needed: {NEEDS['value_rows']}")
            else:
                self.value = value
        return self.reason is None

    def _make_rows(self) -> None:
        assert self.value is not None
        for count in self.candidates:
            row = self.layer.project(repeated(self.value, (count,)))[0]
            with torch.inference_mode(False):  # writes to it are to be counted
                self.rows[count] = row.clone()

    def _projects(
        self, conditional: tuple[Any, ...], want: Tensor, null_want: Tensor, leading: tuple[int, ...]
    ) -> bool:
        assert self.value is not None
        rows = repeated(self.value, null_want.shape[:-1])
        if conditional:
            rows = torch.cat([self.layer.attend(*conditional), rows])
        found = _BITWISE.compare(self.layer.project(rows), want)
        self._note("projection of the value row", found, leading)
        return found is None

    def _note(self, what: str, found: object, leading: tuple[int, ...]) -> None:
        if found is not None:
            self.mismatches.setdefault(what, f"{found}, at {list(leading)}")

    def report(self) -> LayerReport:
        good = tuple(sorted(self.rows)) if self.conditional else ()
        return LayerReport(self.name, self.cases, self.reason, self.detail, good, dict(self.mismatches))
