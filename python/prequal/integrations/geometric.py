"""`prequal.patch_geometric`: `message_passing` in GCNConv, SAGEConv and GINConv of torch_geometric.

A patched layer keeps its weights, hooks and name; its class becomes a subclass that has another `propagate`, which
hands on to the layer's own what it does not know. Only these very classes are taken, whose messages are known: x_j, or
edge_weight * x_j. Nothing here imports torch_geometric.
"""

from __future__ import annotations

import contextvars
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

from prequal.graph import GraphPlan, LastFew
from prequal.ops.message_passing import INDICES, message_passing
from prequal.point_index import _key_of
from prequal.runtime.parameter_cache import watch

from .patching import NOTHING, Entry, PatchReport

logger = logging.getLogger("prequal")

CONVS = "torch_geometric.nn.conv"
LAYERS = {f"{CONVS}.gcn_conv": "GCNConv", f"{CONVS}.sage_conv": "SAGEConv", f"{CONVS}.gin_conv": "GINConv"}
AGGREGATIONS = {
    "SumAggregation": "sum",
    "MeanAggregation": "mean",
    "MaxAggregation": "max",
    "MinAggregation": "min",
    "SoftmaxAggregation": "softmax",
}
HOOKS = tuple(
    f"_{step}_forward{kind}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate")
    for kind in ("_pre", "")
)

_made: dict[type, type] = {}
_told: set[tuple[str, str]] = set()
# the edges, their key, what was made of them, and their memory, whose address the key names
_norms: LastFew[tuple[Tensor, Any, tuple[Tensor, Tensor], Tensor]] = LastFew()
_given: contextvars.ContextVar[tuple[Tensor, Tensor] | None] = contextvars.ContextVar("_given", default=None)


# ---- what is known ---------------------------------------------------------------------------------------------------


def _original_class(cls: type) -> type:
    found: type = vars(cls).get("_prequal_geometric_original", cls)
    return found


def _why_left(module: nn.Module) -> str | None:
    """None for a layer that can be patched."""
    cls = _original_class(type(module))
    if LAYERS.get(cls.__module__) != cls.__name__:
        return NOTHING
    return _why_not_reduced(module)


def _why_not_reduced(module: Any) -> str | None:
    aggregation = type(module.aggr_module)
    if aggregation.__module__ != "torch_geometric.nn.aggr.basic" or aggregation.__name__ not in AGGREGATIONS:
        return f"its aggregation is {aggregation.__name__}"
    if aggregation.__name__ == "SoftmaxAggregation":
        softmax = module.aggr_module
        if softmax.learn or softmax.semi_grad or softmax.t != 1:
            return "its softmax learns or has t, or half of its gradient"
    if module.flow != "source_to_target":
        return f"its flow is {module.flow}"
    if module.node_dim not in (-2, 0) or module.decomposed_layers != 1:
        return "its nodes are not in the last dimension but one, or it is decomposed"
    return None


def _why_not(module: Any, edge_index: Any, size: Any, x: Any, edge_weight: Any) -> str | None:
    """None for a call that `message_passing` answers; a traced call gets no reason: it is the layer's own."""
    if reason := _why_not_reduced(module):
        return reason
    if module.explain or any(getattr(module, name, None) for name in HOOKS):
        return "it is explained, or has hooks inside"
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided or edge_index.dtype not in INDICES:
        return "edge_index is no plain tensor of int32 or int64"
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        return "edge_index is not [2, E]"
    source, target = x if isinstance(x, tuple) else (x, x)
    if not isinstance(source, Tensor) or source.dim() != 2 or not source.is_floating_point():
        return "x is not [N, F] of a floating dtype"
    found = [source.shape[0], None if target is None else target.shape[0]]
    for side, told in enumerate(size or (None, None)):
        if told is not None and found[side] is not None and told != found[side]:
            return "size is not that of x"
    if found[1] is None and (size is None or size[1] is None):
        return "nobody says how many targets there are"
    if edge_weight is not None:
        if not isinstance(edge_weight, Tensor) or edge_weight.shape != edge_index.shape[1:]:
            return "edge_weight is not [E]"
        if torch.result_type(source, edge_weight) != source.dtype:
            return "edge_weight has a wider dtype than x, and so would the messages"
        if edge_weight.dtype not in (torch.float32, source.dtype):
            return "edge_weight is neither float32 nor of x's dtype"
    return None


# ---- what a layer becomes --------------------------------------------------------------------------------------------


def _patched_class(cls: Any) -> type:
    if cls in _made:
        return _made[cls]

    def propagate(self: Any, edge_index: Any, size: Any = None, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.propagate(self, edge_index, size=size, **named)
        x, edge_weight = named["x"], named.get("edge_weight")
        if reason := _why_not(self, edge_index, size, x, edge_weight):
            if (cls.__name__, reason) not in _told:
                _told.add((cls.__name__, reason))
                logger.warning("%s answers as before prequal.patch_geometric: %s", cls.__name__, reason)
            return cls.propagate(self, edge_index, size=size, **named)
        source, target = x if isinstance(x, tuple) else (x, x)
        targets = size[1] if target is None else target.shape[0]
        # of an inference tensor nobody can tell whether it has been written to
        plan_of = GraphPlan if edge_index.is_inference() else GraphPlan.cached
        plan = plan_of(edge_index, int(targets), int(source.shape[0]))
        reduce = AGGREGATIONS[type(self.aggr_module).__name__]
        return message_passing(source, plan, edge_weight=edge_weight, reduce=reduce)

    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce,
        "propagate": propagate,
        "_prequal_geometric_original": cls,
    }
    if cls.__name__ == "GCNConv":
        members |= {"forward": _forward_of_gcn(cls), "_cached_edge_index": property(_cached, _cache)}
    _made[cls] = type(cls.__name__, (cls,), members)
    return _made[cls]


def _forward_of_gcn(cls: Any) -> Any:
    """GCNConv normalises its edges in every call, into new tensors; here they are kept with the tensor they are of, and
    reach the layer's own forward in the place where it looks for those that it kept itself (`cached=True`)."""

    def forward(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
        keeps = (
            not torch.compiler.is_compiling()
            and self.normalize
            and self._cached_edge_index is None
            and not self.cached
            and edge_weight is None
            and isinstance(x, Tensor)
            and _why_not(self, edge_index, None, x, None) is None
            and not edge_index.is_inference()
        )
        if not keeps:
            return cls.forward(self, x, edge_index, edge_weight)
        token = _given.set(_normalised(cls, self, edge_index, x))
        try:
            return cls.forward(self, x, edge_index)
        finally:
            _given.reset(token)

    return forward


def _normalised(cls: Any, module: Any, edge_index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    how = (x.shape[0], module.improved, module.add_self_loops, module.flow, x.dtype)
    place, now = (id(edge_index), *how), _key_of(edge_index)
    found = _norms.get(place)
    if found is None or found[0] is not edge_index or found[1] != now:
        gcn_norm = sys.modules[cls.__module__].gcn_norm  # type: ignore[attr-defined]
        with torch.inference_mode(False):
            found = (edge_index, now, gcn_norm(edge_index, None, *how), edge_index.detach())
        watch(edge_index)
    return _norms.put(place, found)[2]


def _cached(self: Any) -> Any:
    given = _given.get()
    return vars(self).get("_cached_edge_index") if given is None else given


def _cache(self: Any, value: Any) -> None:
    vars(self)["_cached_edge_index"] = value


def _reduce(self: Any, protocol: int) -> Any:
    """Copies and pickles come back patched."""
    reduced: Any = nn.Module.__reduce_ex__(self, protocol)  # of object: a function, its arguments, the state
    _, _, *rest = reduced
    return _remake, (_original_class(type(self)),), *rest


def _remake(cls: Any) -> Any:
    made: Any = _patched_class(cls)
    return made.__new__(made)


# ---- the public functions --------------------------------------------------------------------------------------------


def patch_geometric(model: nn.Module, *, verbose: bool = False) -> PatchReport:
    """Let GCNConv, SAGEConv and GINConv of torch_geometric reduce their messages by `prequal.message_passing`.

    In place, and reversible with `unpatch_geometric`. Weights, names, hooks and `state_dict` stay; copies and pickles
    are patched. Aggregations sum, mean, max, min, and softmax with t = 1 that does not learn. The edges are sorted at
    the first call with an edge_index tensor, which waits for the device, and kept for the last 8 of them until they are
    written (a write through `.data` or by another library is not seen; edges made in inference mode are never kept); so
    are the normalised edges of a GCNConv that is called without edge_weight. A call that is not covered (SparseTensor,
    EdgeIndex, another flow, hooks inside, torch.compile) is answered by the layer as before, and its reason is logged
    once.

    Results are those of the layer but for the order and width of sums: float32 also for halves. The gradient of max and
    min goes to the first of equal messages; torch_geometric shares it out.

    Args:
        model: anything with such layers in it.
        verbose: print the report.

    Returns:
        which layers are patched, and which modules are left, and why.

    Raises:
        TypeError: model is no torch.nn.Module. ValueError: it has no such layer; nothing is changed then.
    """
    _check_model("patch_geometric", model)
    found = [(name, module, _why_left(module)) for name, module in model.named_modules()]
    entries = [
        Entry(name, type(module).__name__, () if reason else ("message_passing",), reason or "")
        for name, module, reason in found
    ]
    title = f"prequal.patch_geometric of {type(model).__name__}"
    report = PatchReport(
        title, tuple(entry for entry in entries if entry.ops), tuple(entry for entry in entries if not entry.ops)
    )
    if not report.replaced:
        raise ValueError(
            f"model: expected GCNConv, SAGEConv or GINConv of torch_geometric in it, got none in "
            f"{type(model).__name__} that can be patched\n{report}"
        )
    for _, module, reason in found:
        if reason is None:
            module.__class__ = _patched_class(_original_class(type(module)))
    if verbose:
        print(report)
    return report


def unpatch_geometric(model: nn.Module) -> list[str]:
    """Undo `patch_geometric`: every layer gets back the class that it had.

    Returns:
        the names of the layers that were restored.

    Raises:
        TypeError: model is no torch.nn.Module.
    """
    _check_model("unpatch_geometric", model)
    restored = []
    for name, module in model.named_modules():
        cls = type(module)
        if _original_class(cls) is not cls:
            module.__class__ = _original_class(cls)
            restored.append(name)
    return restored


def _check_model(where: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: model: expected a torch.nn.Module, got {type(model).__name__}")
