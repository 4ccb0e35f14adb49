"""prequal: hand-written CUDA kernels for PyTorch, prebuilt, and pre-qualified on the worker that runs them.

Every op answers everywhere: through its kernel where the gate is open, through its PyTorch reference where not,
counted, with a reason (`prequal.stats()`, `python -m prequal doctor`).
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING

from .errors import FallbackError as FallbackError
from .errors import LockError as LockError
from .errors import ReplacementError as ReplacementError
from .errors import StaleIndexError as StaleIndexError
from .errors import UnknownOpError as UnknownOpError
from .runtime import manifest as _manifest

__version__ = _manifest.load().version or "0+unknown"

# What a worker does not need at import costs it nothing there: these come when asked for.
_LATER = {
    "CorpusIndex": "retrieval",
    "CrossAttention": "null_context",
    "GraphPlan": "graph",
    "GuidedCondition": "null_context",
    "KnnIndex": "point_index",
    "LockStatus": "runtime.lock",
    "NullCondition": "null_context",
    "NullContext": "null_context",
    "NullContextReport": "null_context",
    "Report": "runtime.qualify",
    "SpatioTemporalPlan": "graph",
    "TensorSpec": "runtime.qualify",
    "cosine_topk": "retrieval",
    "metrics": "runtime.metrics",
    "pairwise_within": "retrieval",
    "patch": "integrations.patching",
    "patch_geometric": "integrations.geometric",
    "patch_null_context": "integrations.cross_attention",
    "unpatch": "integrations.patching",
    "unpatch_geometric": "integrations.geometric",
    "unpatch_null_context": "integrations.cross_attention",
    "verify_replacement": "bench.replacement",
}
_cause = None

if TYPE_CHECKING:
    from .bench.replacement import verify_replacement as verify_replacement
    from .graph import GraphPlan as GraphPlan
    from .graph import SpatioTemporalPlan as SpatioTemporalPlan
    from .integrations import patch as patch
    from .integrations import unpatch as unpatch
    from .integrations.cross_attention import patch_null_context as patch_null_context
    from .integrations.cross_attention import unpatch_null_context as unpatch_null_context
    from .integrations.geometric import patch_geometric as patch_geometric
    from .integrations.geometric import unpatch_geometric as unpatch_geometric
    from .null_context import CrossAttention as CrossAttention
    from .null_context import GuidedCondition as GuidedCondition
    from .null_context import NullCondition as NullCondition
    from .null_context import NullContext as NullContext
    from .null_context import NullContextReport as NullContextReport
    from .point_index import KnnIndex as KnnIndex
    from .retrieval import CorpusIndex as CorpusIndex
    from .retrieval import cosine_topk as cosine_topk
    from .retrieval import pairwise_within as pairwise_within
    from .runtime import metrics as metrics
    from .runtime.lock import LockStatus as LockStatus
    from .runtime.qualify import Report as Report
    from .runtime.qualify import TensorSpec as TensorSpec

try:
    from .api import *
    from .losses import linear_cross_entropy as linear_cross_entropy
    from .ops import *
    from .retrieval import pairwise_distance as pairwise_distance  # here, since `ops` has a module of this name
except (ImportError, ValueError) as _error:
    # The command must still start, to say what is wrong. Without torch everything else raises at its first use; a wrong
    # PREQUAL_ variable raises here, since a program that meant to switch something must not run as if it had not.
    _is_command = (sys.argv[:1] == ["-m"] and "prequal" in sys.orig_argv) or (
        os.path.basename(sys.argv[0] if sys.argv else "") == "prequal"
    )
    if TYPE_CHECKING or not (_is_command or isinstance(_error, ImportError)):
        raise
    _cause = _error


def __dir__():
    here = {name for name, value in globals().items() if not isinstance(value, type(sys))}  # the ops, not the modules
    return sorted(name for name in here | set(_LATER) if not name.startswith("_"))


def __getattr__(name):
    if _cause is not None and not name.startswith("__"):
        text = f"prequal could not start ({_cause}); `python -m prequal doctor` says more"
        raise ImportError(text) from _cause
    if name not in _LATER:
        raise AttributeError(f"module 'prequal' has no attribute {name!r}")
    module = importlib.import_module(f"prequal.{_LATER[name]}")
    return module if _LATER[name].endswith(f".{name}") else getattr(module, name)
