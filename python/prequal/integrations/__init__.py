"""Ops of prequal inside models that other libraries define. Nothing here imports those libraries."""

from .patching import PatchReport as PatchReport
from .patching import patch as patch
from .patching import unpatch as unpatch
