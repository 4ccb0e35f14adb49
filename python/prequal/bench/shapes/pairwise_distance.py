"""Distances between all rows of two sets beside torch.cdist, from differences and by a matrix product; what is near.

From 256 coordinates on prequal.pairwise_distance is a matrix product and this family's pass over it, which is measured
here alone; benchmarks/pairwise.py measures the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, normal
from prequal.contracts import Tolerance
from prequal.ops.pairwise_distance import starts_of
from prequal.registry import Cost


def read_once(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def of_pairs(a: Tensor, b: Tensor, written: int) -> Cost:
    """Two operations a coordinate and pair, however a distance is come by."""
    return Cost(read_once(a, b) + written, 2 * a.shape[0] * b.numel())


@prequal.pairwise_direct.cost
def _(a, b, p, squared):
    return of_pairs(a, b, a.shape[0] * b.shape[0] * (8 if a.dtype == torch.float64 else 4))


@prequal.pairwise_from_products_.cost
def _(products, a_squares, b_squares, squared):
    return Cost(2 * read_once(products) + read_once(a_squares, b_squares), 4 * products.numel())


# The nearest and those within a radius may be found without looking at every pair: no operations are counted.


@prequal.pairwise_argmin.cost
def _(a, b):
    return Cost(read_once(a, b) + a.shape[0] * (16 if a.dtype == torch.float64 else 12))


@prequal.pairwise_within_counts.cost
def _(a, b, radius, segment):
    return Cost(read_once(a, b) + 8 * a.shape[0] * -(-b.shape[0] // segment))


@prequal.pairwise_within_fill.cost
def _(a, b, radius, starts, total, segment):
    return Cost(read_once(a, b, starts) + total * (16 if a.dtype == torch.float64 else 12))


# rows of a, rows of b, coordinates, p
DISTANCES = (
    *((4096, 4096, 3, 2.0), (4096, 4096, 16, 2.0), (4096, 4096, 64, 2.0), (16_384, 16_384, 3, 2.0)),
    *((1000, 1000, 32, 2.0), (64, 1_000_000, 64, 2.0), (4096, 4096, 64, 1.0), (4096, 4096, 64, float("inf"))),
    (2048, 2048, 256, 2.0),
)
PRODUCTS = ((4096, 4096), (16_384, 16_384), (1000, 100_001))
NEAREST = ((8192, 8192, 3), (8192, 8192, 64), (100_000, 8000, 16), (64, 1_000_000, 64), (4096, 4096, 256))
ROWS = 1024  # that are compared with the reference, which looks at every pair
WITHIN = ((8192, 8192, 3, 0.2), (16_384, 16_384, 16, 2.5))

# Sums of squares in another order: roundings of fp32, 64 of them at most here, and 256 of the widest.
OTHERS = Tolerance({torch.float32: (256 * 2.0**-24, 1e-6)})


def near(got: Any, want: Any, args: Any) -> str | None:
    found = OTHERS.compare(got, want)
    return None if found is None else str(found)


def near_by_products(got: Any, want: Any, args: Any) -> str | None:
    """A square is off by some roundings of (|a| + |b|)^2, its root by the root of that where a distance is small."""
    a, b = args[:2]
    scale = (a.norm(dim=1)[:, None] + b.norm(dim=1)).square()
    wrong = int(((got - want).abs() > ((a.shape[1] + 8) * 2.0**-23 * scale).sqrt()).sum())
    return f"{wrong} of {got.numel()} distances are off" if wrong else None


def as_near(got: Any, want: Any, args: Any) -> str | None:
    """Another row is as right where its distance is the same, up to the rounding of a sum in another order."""
    a, b = args
    return near((a - b[got]).square().sum(1), want[0], args)


def cdist(mode: str) -> Any:
    def call(a: Tensor, b: Tensor, p: float, squared: bool) -> Tensor:
        assert not squared
        return torch.cdist(a, b, p=p, compute_mode=mode)

    return call


def nearest_by_cdist(mode: str) -> Any:
    def call(a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b, compute_mode=mode).argmin(1)

    return call


def epilogue(products: Tensor, a_squares: Tensor, b_squares: Tensor, squared: bool) -> Tensor:
    """As one would write it, in place."""
    assert not squared
    products.mul_(-2.0).add_(a_squares[:, None]).add_(b_squares)
    return products.clamp_(min=0).sqrt_()


def near_in_place(got: Any, want: Any, args: Any) -> str | None:
    """A sum of three terms in another order, some roundings of the largest; small ones are under a root."""
    products, a_squares, b_squares = args[:3]
    scale = products.abs().amax() + a_squares.amax() + b_squares.amax()
    wrong = int(((got[0].square() - want[0].square()).abs() > 8 * 2.0**-23 * scale).sum())
    return f"{wrong} of {want[0].numel()} distances are off" if wrong else None


def counted(a: Tensor, b: Tensor, radius: float, segment: int) -> Tensor:
    return (torch.cdist(a, b, compute_mode=DIRECT) <= radius).sum(1, keepdim=True)


def few_others(got: Any, want: Any, args: Any) -> str | None:
    """A neighbour at the radius itself may be rounded in or out."""
    wrong = int((got.sum() - want.sum()).abs())
    return f"{wrong} neighbours more or fewer" if wrong > 1e-4 * int(want.sum()) + 2 else None


DIRECT, BY_PRODUCTS = "donot_use_mm_for_euclid_dist", "use_mm_for_euclid_dist"


def cases() -> Iterator[Case]:
    for quick, (n, m, width, p) in each(DISTANCES):

        def make(device: torch.device, n=n, m=m, width=width, p=p) -> tuple[Any, ...]:
            a = normal(device, n, width, dtype=torch.float32)
            return a, normal(device, m, width, dtype=torch.float32, seed=1), p

        others = [Other("torch.cdist from differences", cdist(DIRECT), near)]
        if p == 2:
            others.append(Other("torch.cdist by products", cdist(BY_PRODUCTS), near_by_products))
        name = f"float32 [{n}, {width}] and [{m}, {width}], p {p:g}"
        yield Case("pairwise_direct", name, make, quick=quick, others=others)

    for quick, (n, m) in each(PRODUCTS):

        def make_products(device: torch.device, n=n, m=m) -> tuple[Any, ...]:
            squares = (normal(device, rows, dtype=torch.float32).square() + 4.0 for rows in (n, m))
            return normal(device, n, m, dtype=torch.float32), *squares

        others = [Other("torch eager", epilogue, near_in_place)]
        yield Case("pairwise_from_products_", f"float32 [{n}, {m}]", make_products, quick=quick, others=others)

    for quick, (n, m, width) in each(NEAREST):

        def make_sets(device: torch.device, n=n, m=m, width=width) -> tuple[Any, ...]:
            a = normal(device, n, width, dtype=torch.float32)
            return a, normal(device, m, width, dtype=torch.float32, seed=1)

        others = [Other("torch.cdist from differences, argmin", nearest_by_cdist(DIRECT), as_near)]
        name = f"float32 [{n}, {width}] in [{m}, {width}]"
        yield Case("pairwise_argmin", name, make_sets, quick=quick, others=others, rows=ROWS)

    for quick, (n, m, width, radius) in each(WITHIN):

        def make_within(device: torch.device, n=n, m=m, width=width, radius=radius) -> tuple[Any, ...]:
            a = normal(device, n, width, dtype=torch.float32)
            return a, normal(device, m, width, dtype=torch.float32, seed=1), radius, m

        def make_fill(device: torch.device, make=make_within) -> tuple[Any, ...]:
            a, b, radius, segment = make(device)
            starts, total = starts_of(prequal.pairwise_within_counts(a, b, radius, segment))
            return a, b, radius, starts, int(total), segment

        name = f"float32 [{n}, {width}] in [{m}, {width}], radius {radius}"
        others = [Other("torch.cdist from differences, counted", counted, few_others)]
        yield Case("pairwise_within_counts", name, make_within, quick=quick, others=others)
        yield Case("pairwise_within_fill", f"{name}, filled", make_fill, quick=quick)
