"""The build manifest that the wheel carries (`prequal/_build.json`): what was built, from what, for which GPUs.

A manifest that is missing or broken is a `problem` that closes the gate. It never raises and never half-counts: with a
problem, every other field is empty.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

SCHEMA = 1
FILE_NAME = "_build.json"

_ARCH = re.compile(r"[0-9]{2,3}[af]?")


@dataclass(frozen=True)
class CudaBuild:
    toolkit: str
    nvcc: str
    minimum_driver: str


@dataclass(frozen=True)
class OpBuild:
    digest: str
    evidence: tuple[str, ...]  # compute capabilities, as in `archs`, that release evidence covers


@dataclass(frozen=True)
class Manifest:
    schema: int = 0
    version: str = ""
    commit: str | None = None
    dirty: bool | None = None
    python_abi: str | None = None  # None: no native module, so any Python
    cuda: CudaBuild | None = None  # None: built without CUDA
    archs: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    sass_source: str = ""
    ops: Mapping[str, OpBuild] = field(default_factory=lambda: MappingProxyType({}))
    source_digest: str = ""
    problem: str | None = None

    def without_evidence(self) -> Manifest:
        """As a build that no release evidence covers: every op must prove itself here."""
        return replace(self, ops={name: replace(op, evidence=()) for name, op in self.ops.items()})


def load(path: str | os.PathLike[str] | None = None) -> Manifest:
    """The manifest at `path`, else the one of this installation; read once a path."""
    return _load(os.fspath(path) if path is not None else _default_path())


def _default_path() -> str:
    # An editable install serves its Python files from the source tree and keeps what the build made elsewhere on
    # the package's path.
    here = str(Path(__file__).resolve().parent.parent)
    package = sys.modules.get("prequal")
    for folder in dict.fromkeys([here, *map(str, getattr(package, "__path__", ()))]):
        candidate = os.path.join(folder, FILE_NAME)
        if os.path.exists(candidate):
            return candidate
    return os.path.join(here, FILE_NAME)


@functools.cache
def _load(path: str) -> Manifest:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return Manifest(problem=f"{path} does not exist: this prequal was never built")
    except (OSError, ValueError) as error:
        return Manifest(problem=f"{path} cannot be read: {error}")
    try:
        return parse(json.loads(text))
    except RecursionError:
        return Manifest(problem=f"{path} is broken: nested too deeply")
    except ValueError as error:
        return Manifest(problem=f"{path} is broken: {error}")


def parse(data: Any) -> Manifest:
    """Raises ValueError that names the field, what it must be and what it is. Unknown fields are left for later."""
    root = _object(data, "manifest")
    schema = root.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA}, found {_shown(schema)}")
    cuda = _get(root, "cuda")
    return Manifest(
        schema=schema,
        version=_text(root, "version", r".+"),
        commit=_optional_text(root, "commit", r"[0-9a-f]{40}"),
        dirty=_optional_bool(root, "dirty"),
        python_abi=_optional_text(root, "python_abi", r"cp3[0-9]+(-abi3)?"),
        cuda=None if cuda is None else _cuda(_object(cuda, "cuda")),
        archs=_archs(root, "archs"),
        ptx=_archs(root, "ptx"),
        sass_source=_text(root, "sass_source", r"cuobjdump|declared"),
        ops=MappingProxyType(
            {name: _op(_object(op, f"ops.{name}"), name) for name, op in _object(_get(root, "ops"), "ops").items()}
        ),
        source_digest=_text(root, "source_digest", r"[0-9a-f]{64}"),
    )


def _cuda(cuda: Mapping[str, Any]) -> CudaBuild:
    return CudaBuild(
        toolkit=_text(cuda, "toolkit", r"[0-9]+(\.[0-9]+)+", "cuda."),
        nvcc=_text(cuda, "nvcc", r"[0-9]+(\.[0-9]+)+", "cuda."),
        minimum_driver=_text(cuda, "minimum_driver", r"[0-9]+(\.[0-9]+)*", "cuda."),
    )


def _op(op: Mapping[str, Any], name: str) -> OpBuild:
    return OpBuild(
        digest=_text(op, "digest", r"[0-9a-f]{64}", f"ops.{name}."), evidence=_archs(op, "evidence", f"ops.{name}.")
    )


def _get(parent: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    if key not in parent:
        raise ValueError(f"{prefix}{key}: missing")
    return parent[key]


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object, found {_shown(value)}")
    return value


def _text(parent: Mapping[str, Any], key: str, pattern: str, prefix: str = "") -> str:
    value = _get(parent, key, prefix)
    if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
        raise ValueError(f"{prefix}{key}: expected text like {pattern}, found {_shown(value)}")
    return value


def _optional_text(parent: Mapping[str, Any], key: str, pattern: str) -> str | None:
    return None if _get(parent, key) is None else _text(parent, key, pattern)


def _optional_bool(parent: Mapping[str, Any], key: str) -> bool | None:
    value = _get(parent, key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: expected true, false or null, found {_shown(value)}")
    return value


def _archs(parent: Mapping[str, Any], key: str, prefix: str = "") -> tuple[str, ...]:
    value = _get(parent, key, prefix)
    if not isinstance(value, list) or not all(isinstance(arch, str) and _ARCH.fullmatch(arch) for arch in value):
        raise ValueError(f'{prefix}{key}: expected a list like ["80", "90"], found {_shown(value)}')
    return tuple(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
