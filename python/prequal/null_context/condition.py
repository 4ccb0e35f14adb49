"""Conditions that stand for zeros without being zeros, and the reasons why a null context may not serve."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prequal import runtime_state as state
from prequal.runtime.reasons import unsupported

# The names under which flags, counters and logs know the two paths.
ROW, PROJECTION = "null_context", "null_context_projection"
assert set(state.PYTHON_PATHS) == {ROW, PROJECTION}

# What a call, or a layer, must meet: `unsupported_input:<need>`.
NEEDS: Mapping[str, str] = {
    "value_rows": "value rows that are one vector at every valid position of the null condition",
    "one_row": "a reference whose null rows are one row: not joint attention, weights that sum to one",
    "dropout": "no attention dropout: a module in training mode drops weights",
    "valid_tokens": "at least one valid token in every sequence of the condition",
    "joint": "a softmax over the condition alone: in joint attention its tokens change the weights of the others",
    "condition": "a condition of the batch, length, width and dtype that was qualified, with or without a mask as then",
    "rows": "leading dimensions within those that were qualified",
    "layout": "x of the width, dtype and device of the layer; for batched guidance an even first dimension",
    "arguments": "no argument besides x and the condition",
    "bare": "no hooks on the layer's submodules, and no forward on their instances: the row would pass them by",
    "grad": "no gradient recorded: a cached row has none",
    "autocast": "no autocast: it changes the dtype of the projection",
    "transform": "plain tensors: no functorch transform, dispatch mode or subclass",
    "counted_writes": "parameters whose writes torch counts: inference tensors have no version",
    "materialized": "an operation that the symbolic condition passes through; another one makes zeros of it",
}


def refuse(device: str, reason: str, detail: str) -> None:
    """Count a null context that the cached row does not serve; an error in strict mode."""
    if not torch.compiler.is_compiling():
        state.count_fallback(ROW, device, reason, detail)


class Condition(abc.ABC):
    """What both symbolic conditions share: they look like a tensor, and become one where an operation needs values.

    Casts and moves (`to`, `type`, `half`, `float`, `bfloat16`, `cuda`, `cpu`, `detach`, `contiguous`, `clone`) keep it
    symbolic. Every other torch function or method gets the real tensor, so that code which knows nothing of this stays
    right; that is counted, as `null_context` with the reason `unsupported_input:materialized`.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    valid: Tensor | None  # [B, L] of bool

    requires_grad = False
    is_sparse = False

    @abc.abstractmethod
    def materialize(self) -> Tensor:
        """The tensor that this stands for; not counted: it was asked for by name."""

    @abc.abstractmethod
    def _cast(self, device: torch.device | None, dtype: torch.dtype | None) -> Condition:
        """The same on another device or of another dtype; None: as it is."""

    def _values(self, what: str) -> Tensor:
        refuse(str(self.device), unsupported("materialized"), f"{what} needs the values; {NEEDS['materialized']}")
        return self.materialize()

    # ---- as a tensor says it ----

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def to(self, *args: Any, **kwargs: Any) -> Condition:
        if args and isinstance(args[0], Tensor | Condition):
            return self._cast(args[0].device, args[0].dtype)
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self._cast(device, dtype)

    def type(self, dtype: torch.dtype | str | None = None) -> Any:
        return self._cast(None, dtype) if isinstance(dtype, torch.dtype) else self._values("type").type(dtype)

    def float(self) -> Condition:
        return self._cast(None, torch.float32)

    def half(self) -> Condition:
        return self._cast(None, torch.float16)

    def bfloat16(self) -> Condition:
        return self._cast(None, torch.bfloat16)

    def cuda(self, device: Any = None) -> Condition:
        named = "cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device
        return self._cast(_device(named), None)

    def cpu(self) -> Condition:
        return self._cast(torch.device("cpu"), None)

    def detach(self) -> Condition:
        return self._cast(None, None)

    def clone(self, **kwargs: Any) -> Condition:
        return self._cast(None, None)

    def contiguous(self, **kwargs: Any) -> Condition:
        return self._cast(None, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._values(name), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._values("indexing")[index]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.cat, torch.concat, torch.concatenate) and (pair := _guided(args, kwargs)) is not None:
            return pair
        name = getattr(func, "__name__", str(func))

        def real(value: Any) -> Any:
            if isinstance(value, Condition):
                return value._values(name)
            return type(value)(real(each) for each in value) if type(value) in (list, tuple) else value

        return func(*(real(value) for value in args), **{key: real(value) for key, value in kwargs.items()})


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Condition, *args: Any) -> Any:
        others = [other._values(name) if isinstance(other, Condition) else other for other in args]
        return getattr(self._values(name), name)(*others)

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow"):
    for _side in ("", "r"):
        setattr(Condition, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))
# Without these, == would compare the two objects, and answer one bool.
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"):
    setattr(Condition, f"__{_name}__", _operator(f"__{_name}__"))


class NullCondition(Condition):
    """The condition of the unconditional branch, in the place of `torch.zeros_like(condition)`: nothing is allocated.

    Args:
        shape: [B, L, Dc] of the condition whose place it takes, or [L, Dc].
        dtype, device: as that condition's.
        valid: [B, L] of bool where the condition is padded; read once, here (on a GPU that waits for it).

    Raises:
        TypeError, ValueError: no shape of at least two dimensions; valid is no bool tensor of the leading ones.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        valid: Tensor | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        if len(self.shape) < 2:
            raise ValueError(f"shape: expected [B, L, Dc] or [L, Dc], got {list(self.shape)}")
        if min(self.shape) < 0:
            raise ValueError(f"shape: expected no negative size, got {list(self.shape)}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: expected a torch.dtype, got {type(dtype).__name__}")
        self.dtype, self.device = dtype, _device(device)
        self.least_valid = _least_valid(self.shape, valid)
        self.valid = None if valid is None else valid.to(self.device)

    @classmethod
    def like(cls, condition: Tensor | Condition, *, valid: Tensor | None = None) -> NullCondition:
        """As `torch.zeros_like`."""
        if not isinstance(condition, Tensor | Condition):
            raise TypeError(f"condition: expected a Tensor or a condition, got {type(condition).__name__}")
        return cls(condition.shape, condition.dtype, condition.device, valid=valid)

    def materialize(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def _cast(self, device: torch.device | None, dtype: torch.dtype | None) -> NullCondition:
        made = copy.copy(self)
        made.device, made.dtype = _device(device or self.device), dtype or self.dtype
        made.valid = None if self.valid is None else self.valid.to(made.device)
        return made

    def __repr__(self) -> str:
        return f"NullCondition({list(self.shape)}, {self.dtype}, {self.device})"


class GuidedCondition(Condition):
    """The condition of batched guidance: stands for `torch.cat([condition, zeros_like(condition)])`.

    `torch.cat([condition, NullCondition.like(condition)])` makes one too.

    Args:
        condition: [B, L, Dc]; the conditional half comes first.
        valid: [B, L] of bool, of both halves alike.

    Raises:
        TypeError, ValueError: condition is no tensor of at least two dimensions; valid is not of its leading ones.
    """

    def __init__(self, condition: Tensor, *, valid: Tensor | None = None) -> None:
        if not isinstance(condition, Tensor):
            raise TypeError(f"condition: expected a Tensor, got {type(condition).__name__}")
        self.condition = condition
        self.null = NullCondition.like(condition, valid=valid)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        first, *rest = self.condition.shape
        return torch.Size((2 * first, *rest))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.condition.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.condition.device

    @property
    def valid(self) -> Tensor | None:  # type: ignore[override]
        return None if self.null.valid is None else torch.cat([self.null.valid, self.null.valid])

    def materialize(self) -> Tensor:
        return torch.cat([self.condition, torch.zeros_like(self.condition)])

    def _cast(self, device: torch.device | None, dtype: torch.dtype | None) -> GuidedCondition:
        made = copy.copy(self)
        made.condition, made.null = self.condition.to(device, dtype), self.null._cast(device, dtype)
        return made

    def __repr__(self) -> str:
        return f"GuidedCondition({list(self.condition.shape)} and as many zeros, {self.dtype}, {self.device})"


def _device(device: torch.device | str) -> torch.device:
    """With its index, as tensors have it."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


def _least_valid(shape: torch.Size, valid: Tensor | None) -> int:
    """Of the sequences of the condition, the fewest valid tokens."""
    leading = shape[:-1]
    if valid is None:
        return leading[-1] if leading.numel() else 0
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.shape != leading:
        got = f"{valid.dtype} {list(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise ValueError(f"valid: expected bool {list(leading)}, got {got}")
    return int(valid.sum(-1).min()) if valid.numel() else 0


def _guided(args: Sequence[Any], kwargs: Mapping[str, Any]) -> GuidedCondition | None:
    """`torch.cat([condition, null])` of two alike along the batch; None for every other concatenation."""
    tensors = args[0] if args else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if len(tensors) != 2 or dim != 0 or "out" in kwargs:
        return None
    condition, null = tensors
    alike = (
        isinstance(condition, Tensor)
        and isinstance(null, NullCondition)
        and (condition.shape, condition.dtype, condition.device) == (null.shape, null.dtype, null.device)
    )
    if not alike:
        return None
    made = GuidedCondition(condition)
    made.null = null
    return made


def symbolic(context: Any) -> Condition | None:
    """The symbolic condition that this is, or that a sparse tensor (an object with `feats`) carries; else None."""
    if isinstance(context, Condition):
        return context
    if isinstance(context, Tensor):
        return None
    feats = getattr(context, "feats", None)
    return feats if isinstance(feats, Condition) else None


def materialized(context: Any) -> Any:
    if isinstance(context, Condition):
        return context.materialize()
    return context.replace(context.feats.materialize())


def feats_of(x: Any) -> Tensor:
    """Of a tensor itself, of a sparse tensor its features."""
    return x if isinstance(x, Tensor) else x.feats
