"""prequal: hand-written CUDA kernels for PyTorch, prebuilt, and pre-qualified on the worker that runs them.

Every op answers everywhere: through its kernel where the gate is open, through its PyTorch reference where not,
counted, with a reason (`prequal.stats()`, `python -m prequal doctor`).
"""

from typing import TYPE_CHECKING

from .errors import FallbackError as FallbackError
from .errors import LockError as LockError
from .errors import UnknownOpError as UnknownOpError
from .runtime import manifest as _manifest

__version__ = _manifest.load().version or "0+unknown"

try:
    from .api import *
    from .ops import *
except ImportError as _error:
    # `python -m prequal doctor` must still start, to say what is wrong; everything else raises at its first use.
    if TYPE_CHECKING:
        raise
    _cause = _error

    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        text = f"prequal could not start ({_cause}); `python -m prequal doctor` says more"
        raise ImportError(text) from _cause
