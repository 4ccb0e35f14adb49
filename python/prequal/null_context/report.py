"""What qualifying a null context found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Guidance = Literal["serial", "batched"]
Path = Literal["row", "projection", "reference"]


@dataclass(frozen=True)
class LayerReport:
    """One layer: the cases it was run on, what it does not meet (a reason), and where bits differed."""

    name: str
    cases: int
    reason: str | None
    detail: str
    candidates: tuple[int, ...]  # canonical row counts whose row has the reference's bits in every case
    mismatches: Mapping[str, str]  # what was compared -> the comparator's first sentence


@dataclass(frozen=True)
class NullContextReport:
    """What `NullContext.qualify` found. `str()` of it is the table.

    path: "row" (the cached row), "projection" (no attention, the reference's projection) or "reference"; `reason` and
    `detail` say why not "row".
    """

    guidance: Guidance
    path: Path
    canonical_rows: int | None
    reason: str | None
    detail: str
    layers: tuple[LayerReport, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        served = {
            "row": f"the cached row, made at {self.canonical_rows} rows",
            "projection": "projection of the value row",
        }
        why = f" ({self.reason}: {self.detail})" if self.reason else ""
        shapes = ", ".join("×".join(str(n) for n in shape) for shape in self.shapes) or "none"
        lines = [
            f"null context, {self.guidance} guidance: {served.get(self.path, 'the reference')}{why}",
            f"  {len(self.layers)} layers; leading dimensions qualified: {shapes}",
        ]
        for layer in self.layers:
            if layer.reason:
                lines.append(f"  {layer.name}: {layer.reason}: {layer.detail}")
            lines += [f"  {layer.name}: {what}: {text}" for what, text in layer.mismatches.items()]
        return "\n".join(lines)
