"""What a fast path promises about its numbers, and the comparison that says where and by how much it broke its word.

`Bitwise`: the raw bits of the reference. `Tolerance`: |got - want| <= atol + rtol |want|, for each dtype. `Exact`:
equal values, with a stated rule for ties. NaN and infinity are compared like any value: they must stand in the same
places.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

# Signed, so that the sign bit of a float is the sign of its integer.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED_FLOATS = frozenset({getattr(torch, "float8_e8m0fnu", None)})
# Values compared at a time: a comparison takes some ten times 8 bytes a value, so 1.3 GB here, whatever the output.
_AT_A_TIME = 1 << 24


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
        """The worst breach of the first output that has one, or None. Takes a tensor or a sequence of tensors each."""
        ...

    def __str__(self) -> str: ...


# ---- values --------------------------------------------------------------------------------------------------------


def ordered_bits(x: Tensor) -> Tensor:
    """Floating values as integers in the same order, neighbours one apart, -0 and +0 together. int64, any shape."""
    bits = x.contiguous().view(_BITS[x.element_size()]).to(torch.int64)
    if x.dtype in _UNSIGNED_FLOATS:
        return bits & 0xFF
    lowest = -(1 << (8 * x.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def _is_real_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _parts(x: Tensor) -> Tensor:
    """[n] to [n, parts]: a complex value is two."""
    return torch.view_as_real(x) if x.is_complex() else x.unsqueeze(-1)


def _raw(x: Tensor) -> Tensor:
    """[n] to [n, parts], the bits as signed integers."""
    parts = _parts(x)
    return parts.contiguous().view(_BITS[parts.element_size()])


def _wide(x: Tensor) -> Tensor:
    """[n] floating or complex to [n, parts] float64: every narrower value is one of float64."""
    return _parts(x).to(torch.float64)


def _length(parts: Tensor) -> Tensor:
    """[n, parts] to [n]: the modulus of a complex value, without overflow of its squares."""
    return parts[:, 0].abs() if parts.shape[1] == 1 else torch.hypot(parts[:, 0], parts[:, 1])


def _near(a: Tensor, b: Tensor, rtol: float, atol: float, size: Callable[[Tensor], Tensor]) -> Tensor:
    """size(a - b) <= atol + rtol size(b), of finite float64."""
    bound, distance = atol + rtol * size(b), size(a - b)
    # Near the end of float64 both sides may overflow, and infinity <= infinity says nothing: there at a quarter scale.
    a, b = 0.25 * a, 0.25 * b
    return torch.where(torch.isinf(bound), size(a - b) <= 0.25 * atol + rtol * size(b), distance <= bound)


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """[n] of bool: equal values, NaN equal to NaN, -0 to +0."""
    if a.dtype == torch.bool:
        return a == b
    if not _is_real_number(a):
        return (_raw(a) == _raw(b)).squeeze(-1)
    x, y = _wide(a), _wide(b)
    return ((x == y) | (torch.isnan(x) & torch.isnan(y))).all(-1)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """[n] float64: |a - b|, +inf where it has no size (NaN, or an infinity and something else)."""
    if a.dtype == torch.bool:
        return (a != b).to(torch.float64)
    if _is_real_number(a):
        distance = _length(_wide(a) - _wide(b))
        return torch.where(torch.isnan(distance), torch.inf, distance)
    x, y = _raw(a).squeeze(-1).to(torch.int64), _raw(b).squeeze(-1).to(torch.int64)
    if not a.dtype.is_signed:
        # An unsigned value in signed bits: back into its own range, 64 bits of it moved down by 2^63 to keep the order.
        bits = 8 * a.element_size()
        x, y = (v ^ (-1 << 63) if bits == 64 else v & ((1 << bits) - 1) for v in (x, y))
    # Right to the last integer before it is rounded to float64: as float64 2^53 and 2^53 + 1 are one number. The
    # difference may pass 2^63; then it has wrapped once.
    gap = torch.maximum(x, y) - torch.minimum(x, y)
    return torch.where(gap < 0, gap.to(torch.float64) + 2.0**64, gap.to(torch.float64))


# ---- what to say of one place --------------------------------------------------------------------------------------


def _shown(value: Tensor) -> float | int | bool | str:
    item = value.item()
    return str(item) if isinstance(item, complex) else item


def _hex(value: Tensor) -> str:
    parts = _raw(value.reshape(1)).flatten()
    size = parts.element_size()
    return " ".join(f"0x{part & ((1 << 8 * size) - 1):0{2 * size}x}" for part in parts.tolist())


def _ulp(a: Tensor, b: Tensor) -> int | None:
    """The distance in representable numbers of two values, of a complex one in the part that is further off."""
    if not _is_real_number(a):
        return None
    a, b = _parts(a.reshape(1)), _parts(b.reshape(1))
    if not bool(torch.isfinite(a.to(torch.float64)).all() & torch.isfinite(b.to(torch.float64)).all()):
        return None
    # as Python integers: from one end of float64 to the other is more than an int64 holds
    each = zip(ordered_bits(a).flatten().tolist(), ordered_bits(b).flatten().tolist(), strict=True)
    return max(abs(x - y) for x, y in each)


def _index(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.append(at)
    return tuple(reversed(index))


def _memory(x: Tensor) -> Tensor:
    """The plain values: no graph, no subclass, no pending conjugation or negation."""
    return x.detach().as_subclass(Tensor).resolve_conj().resolve_neg()


def _outputs(value: Any) -> Sequence[Any]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _described(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _unlike(output: int, got: Any, want: Any) -> Mismatch | None:
    """What makes two outputs no match before a value is looked at."""
    if not (isinstance(got, Tensor) and isinstance(want, Tensor)):
        # an output that is absent (None) or a plain number
        if type(got) is type(want) and got == want:
            return None
        return Mismatch(output, (), _described(got), _described(want), None, 0, 0, "must be the same")
    for what, a, b in (
        ("shape", list(got.shape), list(want.shape)),
        ("dtype", got.dtype, want.dtype),
        ("device", got.device, want.device),
    ):
        if a != b:
            return Mismatch(output, (), str(a), str(b), None, 0, 0, f"{what} must be the same")
    return None


# ---- the three -----------------------------------------------------------------------------------------------------


class _EachOutput(ABC):
    """Output by output, a bounded piece at a time. What differs between contracts is `_bad` and `_rule`."""

    _show_bits = False

    def compare(self, got: Any, want: Any) -> Mismatch | None:
        got, want = _outputs(got), _outputs(want)
        if len(got) != len(want):
            return Mismatch(0, (), f"{len(got)} outputs", f"{len(want)} outputs", None, 0, 0, "as many outputs")
        for output, (a, b) in enumerate(zip(got, want, strict=True)):
            found = _unlike(output, a, b)
            if found is None and isinstance(a, Tensor) and a.numel():
                found = self._compare(output, _memory(a), _memory(b))
            if found is not None:
                return found
        return None

    def _compare(self, output: int, got: Tensor, want: Tensor) -> Mismatch | None:
        flat_got, flat_want = got.reshape(-1), want.reshape(-1)
        wrong, worst, place = 0, -1.0, 0
        for start in range(0, got.numel(), _AT_A_TIME):
            a, b = flat_got[start : start + _AT_A_TIME], flat_want[start : start + _AT_A_TIME]
            bad = self._bad(a, b)
            count = int(bad.sum())
            if not count:
                continue
            wrong += count
            distance = torch.where(bad, _distance(a, b), -1.0)
            at = int(distance.argmax())
            if (size := float(distance[at])) > worst:
                worst, place = size, start + at
        if not wrong:
            return None

        a, b = flat_got[place], flat_want[place]
        shown_a, shown_b = _shown(a), _shown(b)
        if self._show_bits and str(shown_a) == str(shown_b):  # two NaN of two payloads
            shown_a, shown_b = f"{shown_a} (bits {_hex(a)})", f"{shown_b} (bits {_hex(b)})"
        return Mismatch(
            output,
            _index(place, got.shape),
            shown_a,
            shown_b,
            _ulp(a, b),
            wrong,
            got.numel(),
            self._rule(want.dtype),
        )

    @abstractmethod
    def _bad(self, got: Tensor, want: Tensor) -> Tensor:
        """[n], [n] of one dtype to [n] of bool."""

    @abstractmethod
    def _rule(self, dtype: torch.dtype) -> str:
        """What was asked of values of this dtype, in words."""


@dataclass(frozen=True)
class Bitwise(_EachOutput):
    """The bits of the reference, NaN payloads and the sign of zero included."""

    kind: str = field(default="bitwise", init=False)

    _show_bits = True

    def _bad(self, got: Tensor, want: Tensor) -> Tensor:
        return (_raw(got) != _raw(want)).any(-1)

    def _rule(self, dtype: torch.dtype) -> str:
        return "raw bits must be equal"

    def __str__(self) -> str:
        return "Bitwise"


@dataclass(frozen=True)
class Tolerance(_EachOutput):
    """(rtol, atol) for each dtype of an output. A dtype that is not listed must be equal."""

    bounds: Mapping[torch.dtype, tuple[float, float]]
    kind: str = field(default="tolerance", init=False)

    def __post_init__(self) -> None:
        for dtype, (rtol, atol) in self.bounds.items():
            # a NaN bound would fail everything, an infinite one nothing
            for name, bound in (("rtol", rtol), ("atol", atol)):
                if not (math.isfinite(bound) and bound >= 0):
                    raise ValueError(f"Tolerance: expected a finite {name} >= 0 for {dtype}, got {bound}")
        object.__setattr__(self, "bounds", dict(self.bounds))

    def __hash__(self) -> int:
        return hash(frozenset(self.bounds.items()))

    def _bad(self, got: Tensor, want: Tensor) -> Tensor:
        good = _equal(got, want)
        if want.dtype not in self.bounds:
            return ~good
        rtol, atol = self.bounds[want.dtype]
        if not _is_real_number(want):
            return ~(good | (_distance(got, want) <= atol + rtol * want.to(torch.float64).abs()))
        a, b = _wide(got), _wide(want)
        finite = torch.isfinite(a) & torch.isfinite(b)
        whole = finite.all(-1) & _near(a, b, rtol, atol, _length)
        # A complex value with one part that is no number: that part must be the same, the other near.
        near = (a == b) | (torch.isnan(a) & torch.isnan(b)) | (finite & _near(a, b, rtol, atol, torch.abs))
        return ~(good | whole | (~finite.all(-1) & near.all(-1)))

    def _rule(self, dtype: torch.dtype) -> str:
        if dtype not in self.bounds:
            return f"must be equal: no tolerance for {str(dtype).removeprefix('torch.')}"
        rtol, atol = self.bounds[dtype]
        return f"rtol {rtol:g}, atol {atol:g}"

    def __str__(self) -> str:
        rows = (f"{str(d).removeprefix('torch.')} {r:g}/{a:g}" for d, (r, a) in self.bounds.items())
        return f"Tolerance (rtol/atol: {', '.join(rows)})"


@dataclass(frozen=True)
class Exact(_EachOutput):
    """Equal values: integers and sets, and numbers that each path rounds alike. `ties` says who wins among equals."""

    ties: str
    kind: str = field(default="exact", init=False)

    def _bad(self, got: Tensor, want: Tensor) -> Tensor:
        return ~_equal(got, want)

    def _rule(self, dtype: torch.dtype) -> str:
        return f"must be equal; ties: {self.ties}"

    def __str__(self) -> str:
        return f"Exact (ties: {self.ties})"
