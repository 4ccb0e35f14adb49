"""What a fast path promises about its numbers, and the comparison that says where and by how much it broke the promise.

`Bitwise`: the raw bits of the reference. `Tolerance`: |got - want| <= atol + rtol |want|, for each dtype. `Exact`: equal
values, with a stated rule for ties. NaN and infinity are compared like any value: they must stand in the same places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Mismatch:
    """The worst place of one output. `ulp` is the distance in representable numbers, None where there is none."""

    output: int
    index: tuple[int, ...]
    got: float | int | bool | str
    want: float | int | bool | str
    ulp: int | None
    wrong: int
    total: int
    rule: str

    def __str__(self) -> str:
        place = f"output {self.output} at {list(self.index)}" if self.index else f"output {self.output}"
        ulp = f", {self.ulp} ulp apart" if self.ulp is not None else ""
        count = f"; {self.wrong} of {self.total} values differ" if self.total else ""
        return f"{place}: got {self.got}, want {self.want}{ulp} ({self.rule}{count})"


class Contract(Protocol):
    """A promise with its comparison."""

    @property
    def kind(self) -> str: ...

    def compare(self, got: Any, want: Any) -> Mismatch | None:
        """The worst breach, or None where the promise holds. Takes a tensor or a sequence of tensors each."""
        ...

    def __str__(self) -> str: ...


def ordered_bits(x: Tensor) -> Tensor:
    """Floating values as integers in the same order, neighbours one apart, -0 and +0 together. int64, any shape."""
    bits = x.contiguous().view(_BITS[x.element_size()]).to(torch.int64)
    lowest = -(1 << (8 * x.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def _plain(value: Tensor) -> float | int | bool | str:
    if value.is_complex():
        return str(value.item())
    return value.item()


def _outputs(value: Any) -> Sequence[Tensor]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _shape_mismatch(output: int, got: Tensor, want: Tensor) -> Mismatch | None:
    for what, a, b in (
        ("shape", list(got.shape), list(want.shape)),
        ("dtype", got.dtype, want.dtype),
        ("device", got.device, want.device),
    ):
        if a != b:
            return Mismatch(output, (), str(a), str(b), None, 0, 0, f"{what} must be the same")
    return None


def _worst(output: int, got: Tensor, want: Tensor, bad: Tensor, error: Tensor, rule: str) -> Mismatch:
    """The bad place with the largest error; `error` is +inf where a difference has no size."""
    flat = torch.where(bad, error, torch.full_like(error, -1.0)).flatten()
    place = int(flat.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), got.shape)) if got.dim() else ()
    a, b = got.flatten()[place], want.flatten()[place]
    ulp = None
    if got.is_floating_point() and got.element_size() < 8 and bool(torch.isfinite(a) & torch.isfinite(b)):
        ulp = int((ordered_bits(a.reshape(1)) - ordered_bits(b.reshape(1))).abs())
    return Mismatch(output, index, _plain(a), _plain(b), ulp, int(bad.sum()), got.numel(), rule)


def _difference(got: Tensor, want: Tensor) -> Tensor:
    wide = torch.complex128 if got.is_complex() else torch.float64
    difference = (got.to(wide) - want.to(wide)).abs()
    return torch.where(torch.isnan(difference), torch.inf, difference)


class _EachOutput:
    def compare(self, got: Any, want: Any) -> Mismatch | None:
        got, want = _outputs(got), _outputs(want)
        if len(got) != len(want):
            return Mismatch(0, (), f"{len(got)} outputs", f"{len(want)} outputs", None, 0, 0, "as many outputs")
        for output, (a, b) in enumerate(zip(got, want, strict=True)):
            found = _shape_mismatch(output, a, b)
            if found is None and a.numel():
                found = self._compare(output, a, b)
            if found is not None:
                return found
        return None

    def _compare(self, output: int, got: Tensor, want: Tensor) -> Mismatch | None:
        raise NotImplementedError


@dataclass(frozen=True)
class Bitwise(_EachOutput):
    """The bits of the reference, NaN payloads and the sign of zero included."""

    kind: str = field(default="bitwise", init=False)

    def _compare(self, output: int, got: Tensor, want: Tensor) -> Mismatch | None:
        a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (got, want))
        bits = _BITS[a.element_size()]
        bad = a.contiguous().view(bits) != b.contiguous().view(bits)
        if not bool(bad.any()):
            return None
        return _worst(output, a, b, bad, _difference(a, b), "raw bits must be equal")

    def __str__(self) -> str:
        return "Bitwise"


@dataclass(frozen=True)
class Tolerance(_EachOutput):
    """(rtol, atol) for each dtype of an output. A dtype that is not listed must be equal."""

    bounds: Mapping[torch.dtype, tuple[float, float]]
    kind: str = field(default="tolerance", init=False)

    def _compare(self, output: int, got: Tensor, want: Tensor) -> Mismatch | None:
        rtol, atol = self.bounds.get(want.dtype, (0.0, 0.0))
        wide = torch.complex128 if got.is_complex() else torch.float64
        a, b = got.to(wide), want.to(wide)
        good = (a == b) | (torch.isnan(a) & torch.isnan(b))
        finite = torch.isfinite(a) & torch.isfinite(b)
        good |= finite & ((a - b).abs() <= atol + rtol * b.abs())
        if bool(good.all()):
            return None
        return _worst(output, got, want, ~good, _difference(got, want), f"rtol {rtol:g}, atol {atol:g}")

    def __str__(self) -> str:
        rows = (f"{str(d).removeprefix('torch.')} {r:.2g}/{a:.2g}" for d, (r, a) in self.bounds.items())
        return f"Tolerance (rtol/atol: {', '.join(rows)})"


@dataclass(frozen=True)
class Exact(_EachOutput):
    """Equal values: integers and sets, and numbers that each path rounds alike. `ties` says who wins among equals."""

    ties: str
    kind: str = field(default="exact", init=False)

    def _compare(self, output: int, got: Tensor, want: Tensor) -> Mismatch | None:
        good = got == want
        if got.is_floating_point() or got.is_complex():
            good |= torch.isnan(got) & torch.isnan(want)
        if bool(good.all()):
            return None
        return _worst(output, got, want, ~good, _difference(got, want), f"must be equal; ties: {self.ties}")

    def __str__(self) -> str:
        return f"Exact (ties: {self.ties})"
