"""Between all rows of two sets, from their differences: distances, the nearest, those within a radius."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Exact, Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal, wide_of
from .knn import pull_of_distances, squared_radius

# The reference takes one dimension after the other, of this many pairs at a time (a pair takes about 12 bytes).
PAIRS_AT_A_TIME = 1 << 22
MOST_ROWS = 0x7FFFFF00  # of the kernels, and most dimensions
MOST_SEGMENTS = 65_535
MOST_NEIGHBOURS = 2**56
# Sums are equal, each step rounded alike. The kernels' root is rounded to nearest; torch's on a CPU is an ulp off in a
# sixth of all values, and no version of torch promises another one on a GPU: so one ulp, at most 2^-23 of a value.
ROOT = Tolerance({torch.float32: (2.0**-23, 0.0)})
INF = math.inf


# ---- what the four share -----------------------------------------------------------------------------------------


def sums_of(a: Tensor, b: Tensor, p: float = 2.0) -> Tensor:
    """[n, D] and [M, D] to [n, M]: sums of p-th powers, or the largest difference; d ascending, each step rounded."""
    total = a.new_zeros((a.shape[0], b.shape[0]))
    for x, y in zip(a.unbind(1), b.unbind(1), strict=True):
        apart = x.unsqueeze(1) - y
        if p == 2:
            total = total + apart * apart
        elif p == 1:
            total = total + apart.abs()
        elif p == INF:
            total = torch.maximum(total, apart.abs())
        else:
            total = total + apart.abs().pow(p)
    return total


def norms_of(sums: Tensor, p: float, squared: bool) -> Tensor:
    """Where a sum is zero, so is its gradient."""
    if p in (1, INF):
        return sums * sums if squared else sums
    if p == 2 and squared:
        return sums
    zero = sums == 0
    safe = sums.masked_fill(zero, 1.0)
    root = (safe.sqrt() if p == 2 else safe.pow(1.0 / p)).masked_fill(zero, 0.0)
    return root * root if squared else root


def by_rows(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Function of some rows of a and all of b, both in the dtype of computation, so often that a is done."""
    wide = wide_of(a)
    rows = max(1, PAIRS_AT_A_TIME // max(1, b.shape[0]))
    y = b.to(wide)
    found = [function(x.to(wide), y) for x in a.split(rows)]
    return found[0] if len(found) == 1 else torch.cat(found)


def check_pair(a: Tensor, b: Tensor) -> None:
    for name, x in (("a", a), ("b", b)):
        c.is_tensor(name, x)
        c.is_floating(name, x)
    c.has_shape("a", a, ("N", "D"))
    c.has_shape("b", b, ("M", a.shape[1]))
    c.same_dtype("b", b, "a", a)
    c.same_device(a=a, b=b)


def check_norm(p: float, squared: bool) -> None:
    c.is_number("p", p)
    if not p >= 1:
        raise ValueError(f"p: expected a number from 1, got {p}")
    c.is_bool("squared", squared)


def check_radius(radius: float) -> None:
    c.is_number("radius", radius)
    if not radius >= 0:
        raise ValueError(f"radius: expected a number from 0, got {radius}")


PAIR_NEEDS = [
    c.dtype_in("a", *FLOATS),
    *(c.at_most(name, dim, MOST_ROWS) for name, dim in (("a", 0), ("b", 0), ("a", 1))),
    c.unit_stride("a"),
    c.unit_stride("b"),
]


def pairs(device):
    """(name, a, b): what all four are tried on."""
    x = normal(device)
    yield "quick", x(7, 3), x(9, 3, of=1)
    for dtype in FLOATS:
        for n, m, width in (
            *((1, 1, 1), (0, 5, 3), (5, 0, 3), (3, 4, 0), (127, 129, 2), (129, 127, 16), (257, 401, 3), (33, 130, 17)),
            *((2, 1000, 64), (1000, 2, 33), (131, 260, 128), (5, 7, 300)),
        ):
            yield f"{c.short(dtype)} {n} and {m} of {width}", x(n, width, dtype=dtype), x(m, width, dtype=dtype, of=1)
        square = x(150, 8, dtype=dtype)
        yield f"{c.short(dtype)} a set and itself", square, square
        yield f"{c.short(dtype)} slices", x(90, 24, dtype=dtype)[::2, 3:20], x(300, 40, dtype=dtype)[1:, 21:38]
        yield f"{c.short(dtype)} few places", x(200, 3, dtype=dtype).round(), x(300, 3, dtype=dtype, of=1).round()
    far = x(140, 5), x(150, 5, of=1)
    yield "far from zero", far[0] + 1e4, far[1] + 1e4
    yield "one row for all", x(1, 6).expand(70, 6), x(200, 6)
    yield "vanishing squares", 1e-30 * far[0], 1e-30 * far[1]
    yield "overflowing squares", 1e25 * far[0], 1e25 * far[1]
    wild = x(140, 5).clone()
    wild[3, 1], wild[5, 4], wild[6], wild[7, 0], wild[8] = torch.nan, torch.inf, -torch.inf, -0.0, torch.nan
    yield "not finite", wild, wild.flip(0)
    yield "nothing but NaN", x(3, 2), x(4, 2) * torch.nan
    yield "transposed", x(5, 40).t(), x(5, 60, of=1).t()
    yield "float64", x(40, 6).double(), x(50, 6, of=1).double()
    yield "many rows", x(20_011, 3), x(101, 3, of=1)
    yield "many columns", x(3, 3), x(70_001, 3, of=1)


def wrong_pairs(device, *rest):
    """What every op here refuses of its points; `rest` are its other arguments."""
    x = normal(device)
    a, b = x(2, 3), x(4, 3)
    yield BadCall(([1.0], b, *rest), TypeError, r"a: expected a torch.Tensor, got list")
    yield BadCall((a, None, *rest), TypeError, r"b: expected a torch.Tensor, got NoneType")
    yield BadCall((a.long(), b, *rest), TypeError, r"a: expected a floating dtype, got int64")
    yield BadCall((a, b.half(), *rest), TypeError, r"b: expected float32 like a, got float16")
    yield BadCall((a[0], b, *rest), ValueError, r"a: expected shape \[N, D\], got \[3\]")
    yield BadCall((a, b[:, 1:], *rest), ValueError, r"b: expected shape \[M, 3\], got \[4, 2\]")
    if device.type == "cuda":
        yield BadCall((a, b.cpu(), *rest), ValueError, r"b: expected a tensor on cuda:\d like a, got cpu")


# ---- distances ----------------------------------------------------------------------------------------------------


def direct_samples(device):
    for name, a, b in pairs(device):
        yield Sample(name, (a, b))
        if name == "quick":
            continue
        for p in (1.0, 2.0, INF):
            yield Sample(f"{name}, p {p:g}, squared", (a, b, p, True))
        for p in (1.0, INF):
            yield Sample(f"{name}, p {p:g}", (a, b, p))
    x = normal(device)
    yield Sample("p 3", (x(30, 4), x(50, 4, of=1), 3.0))
    yield Sample("p 1.5, squared", (x(30, 4), x(50, 4, of=1), 1.5, True))


@op(samples=direct_samples, contract=ROOT)
def pairwise_direct(a: Tensor, b: Tensor, p: float = 2.0, squared: bool = False) -> Tensor:
    """The p-norm of every difference of a row of a and a row of b. `prequal.pairwise_distance` chooses a form by width.

    Args:
        a: [N, D], floating; the units of the coordinates.
        b: [M, D], of a's dtype and device.
        p: from 1, or infinity for the largest coordinate.
        squared: the squares of the norms; of p = 2 the sums themselves.

    Returns:
        [N, M], float32 (float64 for float64), computed in that dtype: differences, powers and sums are each rounded
        once, coordinates in ascending order; no products of coordinates are made. So equal rows have a distance of
        exactly 0, none is negative, and a common offset does no harm beyond what the coordinates themselves lose.
        The squares of p = 2 are right to (D + 2) 2^-24 (2^-53) of their value, where nothing over- or underflows.

    Gradients flow to a and b; at a distance of zero they are zero. Those of p = 2 are two matrix products of what asks,
    over the distance, with rows from which b's mean is subtracted.

    Raises:
        TypeError: a or b is no floating tensor, or of two dtypes; p is no number, squared no bool.
        ValueError: shapes that do not fit; p below 1; two devices.

    Contract: Tolerance: an ulp of a root; all else is equal. The kernel takes p 1, 2 and infinity.

    Source: the definition; tiles of rows in shared memory as of a matrix product.
    """
    p = float(p)
    return by_rows(lambda x, y: norms_of(sums_of(x, y, p), p, squared), a, b)


@pairwise_direct.check
def _(a, b, p, squared):
    check_pair(a, b)
    check_norm(p, squared)


@pairwise_direct.fake
def _(a, b, p, squared):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=wide_of(a))


@pairwise_direct.backward(keeps=(0,))
def _(args, kept, grad):
    a, b, p, squared = (args[name] for name in ("a", "b", "p", "squared"))
    if p == 2:
        return pull_of_all(a, b, kept[0], grad, squared)
    pull_back = torch.func.vjp(lambda x, y: pairwise_direct.op.reference(x, y, p, squared), a, b)[1]
    return dict(zip(("a", "b"), pull_back(grad), strict=True))


def centre_of(b: Tensor) -> Tensor:
    """[D], in the dtype of computation: the mean of the rows, or zeros where there are none. Without a gradient.

    Rows with NaN or infinity, or so long that their squares overflow, are not in it: what is subtracted from all rows
    would carry one of these into all distances.
    """
    wide = b.detach().to(wide_of(b))
    counts = torch.linalg.vector_norm(wide, dim=1).square().isfinite()
    return torch.where(counts.unsqueeze(1), wide, 0.0).sum(0) / counts.sum().clamp(min=1)


def pull_of_all(a: Tensor, b: Tensor, distance: Tensor, grad: Tensor, squared: bool) -> dict[str, Tensor]:
    """Of p = 2: sums over pairs of weight (a - b), where weight is 2 grad, or grad over the distance."""
    wide, centre = wide_of(a), centre_of(b)
    if squared:
        weight = 2.0 * grad
    else:
        zero = distance == 0
        weight = (grad / distance.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
    x, y = a.to(wide) - centre, b.to(wide) - centre
    to_a = weight.sum(1, keepdim=True) * x - weight @ y
    to_b = weight.sum(0).unsqueeze(1) * y - weight.t() @ x
    return {"a": to_a.to(a.dtype), "b": to_b.to(b.dtype)}


pairwise_direct.kernel(
    needs=[*PAIR_NEEDS, c.Need("norm", "p 1, 2 or infinity", lambda args: float(args["p"]) in (1.0, 2.0, INF))]
)


@pairwise_direct.bad_calls
def _(device):
    yield from wrong_pairs(device)
    x = normal(device)
    a, b = x(2, 3), x(4, 3)
    yield BadCall((a, b, 0.5), ValueError, r"p: expected a number from 1, got 0.5")
    yield BadCall((a, b, math.nan), ValueError, r"p: expected a number from 1, got nan")
    yield BadCall((a, b, "2"), TypeError, r"p: expected a float, got str")
    yield BadCall((a, b, 2.0, 1), TypeError, r"squared: expected a bool, got int")


# ---- distances from inner products ----------------------------------------------------------------------------------


def products_samples(device):
    x = normal(device)

    def call(n, m, width=6):
        a, b = x(n, width), x(m, width, of=1)
        return a @ b.t(), a.square().sum(1), b.square().sum(1)

    yield Sample("quick", call(5, 12))
    for n, m in ((1, 1), (0, 4), (4, 0), (3, 1023), (257, 1025), (2, 4096), (70_000, 3)):
        yield Sample(f"{n} and {m}", call(n, m))
        yield Sample(f"{n} and {m}, squared", (*call(n, m), True))
    products, of_a, of_b = call(40, 300)
    yield Sample("slices", (products[::2, 1:290], of_a[::2].contiguous(), of_b[1:290]))
    yield Sample("rows of whole words", (products[:, :296], of_a, of_b[:296]))
    yield Sample("transposed", (products.t().contiguous().t(), of_a, of_b))
    yield Sample("every second square", (products[:20, :150], of_a[::2], of_b[::2]))
    wild = products.clone()
    wild[0, ::3], wild[1, ::5], wild[2] = torch.nan, torch.inf, -torch.inf
    yield Sample("not finite", (wild, of_a, of_b))
    yield Sample("float64", tuple(y.double() for y in call(7, 9)))


@op(samples=products_samples, contract=ROOT, mutates=("products",))
def pairwise_from_products_(products: Tensor, a_squares: Tensor, b_squares: Tensor, squared: bool = False) -> None:
    """Distances from inner products, in place: what follows the matrix product of `prequal.pairwise_distance`.

    Args:
        products: [N, M], float32 or float64: inner products z of rows of a and of b; becomes their distances.
        a_squares: [N], of products' dtype: squared norms of the rows of a.
        b_squares: [M], the same of b.
        squared: without the root.

    Returns:
        products, with ``sqrt(max(0, (a_squares + b_squares) - 2 z))``, every step rounded once. NaN stays.

    Raises:
        TypeError: products are neither float32 nor float64, or squares of another dtype; squared is no bool.
        ValueError: shapes that do not fit; two devices; products in memory that squares lie in, or in shared places.
            Nothing is written then.
        RuntimeError: a gradient would have to be recorded.

    Contract: Tolerance: an ulp of the root; without it values are equal.

    Source: the law of cosines.
    """
    sums = (a_squares.unsqueeze(1) + b_squares - 2 * products).clamp(min=0)
    products.copy_(sums if squared else sums.sqrt())


@pairwise_from_products_.check
def _(products, a_squares, b_squares, squared):
    c.is_tensor("products", products)
    if products.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"products: expected float32 or float64, got {c.short(products.dtype)}")
    c.has_shape("products", products, ("N", "M"))
    for name, x, size in (("a_squares", a_squares, products.shape[0]), ("b_squares", b_squares, products.shape[1])):
        c.is_tensor(name, x)
        c.same_dtype(name, x, "products", products)
        c.has_shape(name, x, (size,))
    c.same_device(products=products, a_squares=a_squares, b_squares=b_squares)
    c.is_bool("squared", squared)
    c.is_apart("products", products)
    c.are_apart("a_squares", a_squares, "products", products)
    c.are_apart("b_squares", b_squares, "products", products)


pairwise_from_products_.kernel(
    needs=[
        c.dtype_in("products", torch.float32),
        c.at_most("products", 0, MOST_ROWS),
        c.at_most("products", 1, 2**30),
        *(c.unit_stride(name) for name in ("products", "a_squares", "b_squares")),
    ]
)


@pairwise_from_products_.bad_calls
def _(device):
    x = normal(device)
    z, of_a, of_b = x(3, 4), x(3), x(4)
    yield BadCall(([1.0], of_a, of_b), TypeError, r"products: expected a torch.Tensor, got list")
    yield BadCall((z.half(), of_a, of_b), TypeError, r"products: expected float32 or float64, got float16")
    yield BadCall((z[0], of_a, of_b), ValueError, r"products: expected shape \[N, M\], got \[4\]")
    yield BadCall((z, of_a.double(), of_b), TypeError, r"a_squares: expected float32 like products, got float64")
    yield BadCall((z, of_b, of_b), ValueError, r"a_squares: expected shape \[3\], got \[4\]")
    yield BadCall((z, of_a, of_a), ValueError, r"b_squares: expected shape \[4\], got \[3\]")
    yield BadCall((z, of_a, of_b, 1), TypeError, r"squared: expected a bool, got int")
    own = r"products: expected a place of its own for every element"
    yield BadCall((z[:1].expand(3, 4), of_a, of_b), ValueError, own)
    shared = r"b_squares: expected memory apart from that of products, which is written, got shared memory"
    yield BadCall((z, of_a, z[1]), ValueError, shared)
    if device.type == "cuda":
        cpu = r"a_squares: expected a tensor on cuda:\d like products, got cpu"
        yield BadCall((z, of_a.cpu(), of_b), ValueError, cpu)


# ---- the nearest --------------------------------------------------------------------------------------------------


def argmin_samples(device):
    for name, a, b in pairs(device):
        yield Sample(name, (a, b))
    x = normal(device)
    yield Sample("all equal", (x(1, 4).expand(130, 4), x(1, 4).expand(5000, 4)))


@op(samples=argmin_samples, contract=Exact(ties="the lower row of b"))
def pairwise_argmin(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest row of b to each row of a, by Euclidean distance; the distances of all are never in memory.

    Args:
        a: [N, D], floating; the units of the coordinates.
        b: [M, D], of a's dtype and device.

    Returns:
        dist2: [N], **squared** distances (units²), float32 (float64 for float64), as `pairwise_direct` computes them;
            infinity where b has no rows.
        idx: [N], int64, rows of b; among equals the lowest, and -1 where b has no rows. A distance of NaN comes last.

    Gradients of dist2 flow to a and to the rows found; the choice has none. For points in the plane or in space that
    are many, `prequal.knn` searches a structure instead.

    Raises:
        TypeError: a or b is no floating tensor, or of two dtypes.
        ValueError: shapes that do not fit; two devices.

    Contract: Exact: equal values and indices.

    Source: the definition; a minimum of (distance, index) as one integer.
    """
    wide = wide_of(a)
    if b.shape[0] == 0:
        none = a.new_full((a.shape[0],), torch.inf, dtype=wide)
        return none, torch.full_like(none, -1, dtype=torch.int64)

    def nearest(x: Tensor, y: Tensor) -> Tensor:
        dist2 = sums_of(x, y)
        broken = dist2.isnan()
        least = dist2.masked_fill(broken, torch.inf).amin(1, keepdim=True)
        column = torch.arange(y.shape[0], device=y.device)
        # where the least is infinite an infinite one comes before one that is NaN
        rank = torch.where(broken, 1, 0) + torch.where(dist2 > least, 2, 0)
        return (rank * y.shape[0] + column).amin(1) % y.shape[0]

    idx = by_rows(nearest, a.detach(), b.detach())
    x, y = a.to(wide), b.to(wide)[idx]
    total = x.new_zeros(a.shape[0])
    for one, other in zip(x.unbind(1), y.unbind(1), strict=True):
        apart = one - other
        total = total + apart * apart
    return total, idx


@pairwise_argmin.check
def _(a, b):
    check_pair(a, b)


@pairwise_argmin.fake
def _(a, b):
    return a.new_empty(a.shape[0], dtype=wide_of(a)), a.new_empty(a.shape[0], dtype=torch.int64)


@pairwise_argmin.backward
def _(args, kept, grad_dist2, grad_idx):
    found = pull_of_distances(args["a"], args["b"], kept[0].unsqueeze(1), grad_dist2.unsqueeze(1))
    return {"a": found["queries"], "b": found["references"]}


pairwise_argmin.kernel(needs=PAIR_NEEDS)


@pairwise_argmin.bad_calls
def _(device):
    yield from wrong_pairs(device)


# ---- those within a radius ------------------------------------------------------------------------------------------


def within_calls(device):
    """(name, a, b, radius, segment)"""
    for name, a, b in pairs(device):
        yield name, a, b, 1.5, 2**31
        if name != "quick":
            yield f"{name}, segments", a, b, 1.5, 100
    x = normal(device)
    a, b = x(200, 3).round(), x(1000, 3, of=1).round()
    for radius in (0.0, 1.0, 2.0**0.5, 1e-30, 1e30, INF):
        yield f"radius {radius:.3g} among few places", a, b, radius, 256
    yield "segments of one row", x(5, 3), x(140, 3, of=1), 1.5, 1
    yield "more segments than a grid has", x(2, 2), x(70_000, 2, of=1), 0.5, 1


def counts_samples(device):
    for name, a, b, radius, segment in within_calls(device):
        yield Sample(name, (a, b, radius, segment))


def in_segments(near: Tensor, segment: int) -> Tensor:
    """[n, M] of bool to [n, segments] int64: how many."""
    n, m = near.shape
    segments = -(-m // segment)
    width = min(segment, m)
    return torch.nn.functional.pad(near, (0, segments * width - m)).view(n, segments, width).sum(2)


@op(samples=counts_samples, contract=Exact(ties="none: counts"))
def pairwise_within_counts(a: Tensor, b: Tensor, radius: float, segment: int = 2**31) -> Tensor:
    """How many rows of b are within a radius of each row of a: the first of the two walks of `prequal.pairwise_within`.

    Args:
        a: [N, D], floating; the units of the coordinates.
        b: [M, D], of a's dtype and device.
        radius: from 0, infinity allowed: a neighbour's squared distance, as `pairwise_direct` computes it, is at most
            radius * radius. The radius is rounded to the dtype of distances, and so is its square.
        segment: rows of b that are counted together, from 1.

    Returns:
        [N, segments], int64, where segments = ceil(M / segment): of each segment's rows, one after the other.

    A distance of NaN is within no radius. No gradient.

    Raises:
        TypeError: a or b is no floating tensor, or of two dtypes; radius is no number, segment no int.
        ValueError: shapes that do not fit; radius negative or NaN; segment below 1; two devices.

    Contract: Exact: equal counts.

    Source: the definition.
    """
    limit = squared_radius(radius, wide_of(a))
    if b.shape[0] == 0:
        return a.new_zeros((a.shape[0], 0), dtype=torch.int64)
    return by_rows(lambda x, y: in_segments(sums_of(x, y) <= limit, segment), a.detach(), b.detach())


def segments_of(b: Tensor, segment: int) -> int:
    return -(-b.shape[0] // segment)


@pairwise_within_counts.check
def _(a, b, radius, segment):
    check_pair(a, b)
    check_radius(radius)
    c.in_range("segment", segment, 1, 2**63 - 1)


@pairwise_within_counts.fake
def _(a, b, radius, segment):
    return a.new_empty((a.shape[0], -(-b.shape[0] // segment)), dtype=torch.int64)


WITHIN_NEEDS = [
    *PAIR_NEEDS,
    c.Need(
        "segments",
        f"at most {MOST_SEGMENTS:,} segments",
        lambda args: segments_of(args["b"], args["segment"]) <= MOST_SEGMENTS,
    ),
]


pairwise_within_counts.kernel(needs=WITHIN_NEEDS)


@pairwise_within_counts.bad_calls
def _(device):
    yield from wrong_pairs(device, 1.0)
    x = normal(device)
    a, b = x(2, 3), x(4, 3)
    yield BadCall((a, b, -0.5), ValueError, r"radius: expected a number from 0, got -0.5")
    yield BadCall((a, b, math.nan), ValueError, r"radius: expected a number from 0, got nan")
    yield BadCall((a, b, "1"), TypeError, r"radius: expected a float, got str")
    yield BadCall((a, b, 1.0, 0), ValueError, r"segment: expected 1 to \d+, got 0")
    yield BadCall((a, b, 1.0, 1.5), TypeError, r"segment: expected an int, got float")


def starts_of(counts: Tensor) -> tuple[Tensor, Tensor]:
    """[N, segments] to ([N, segments], [1]): where a segment's neighbours begin, row after row; how many all are."""
    flat = counts.flatten()
    ends = flat.cumsum(0)
    return (ends - flat).view(counts.shape), ends[-1:].sum(0, keepdim=True)


def fill_samples(device):
    for name, a, b, radius, segment in within_calls(device):
        starts, total = starts_of(pairwise_within_counts.op.reference(a, b, radius, segment))
        yield Sample(name, (a, b, radius, starts, int(total), segment))
    x = normal(device)
    a, b = x(9, 3), x(11, 3, of=1)
    starts, total = starts_of(pairwise_within_counts.op.reference(a, b, 2.0))
    yield Sample("room for more", (a, b, 2.0, starts + 5, int(total) + 9))
    yield Sample("room for fewer", (a, b, 2.0, starts - 5, int(total) - 9))
    yield Sample("strided starts", (a, b, 2.0, starts.repeat(1, 3)[:, 1:2], int(total)))


@op(samples=fill_samples, contract=Exact(ties="none: rows of b in their order"))
def pairwise_within_fill(
    a: Tensor, b: Tensor, radius: float, starts: Tensor, total: int, segment: int = 2**31
) -> tuple[Tensor, Tensor]:
    """Which rows of b are within a radius of each row of a: the second of the two walks of `prequal.pairwise_within`.

    Args:
        a: [N, D], floating; the units of the coordinates.
        b: [M, D], of a's dtype and device.
        radius: as of `pairwise_within_counts`.
        starts: [N, segments], int64: where the neighbours of each segment begin, from running sums of those counts. No
            two may overlap; what stands in them is not looked at before.
        total: how many neighbours there is room for, from 0.
        segment: as of `pairwise_within_counts`.

    Returns:
        idx: [total], int64: rows of b, ascending in each segment. A place that no neighbour has is -1; neighbours whose
            place is none of these are left out.
        dist2: [total], their **squared** distances (units²), infinity where idx is -1; float32, or float64 for float64.

    No gradient.

    Raises:
        TypeError: a or b is no floating tensor, or of two dtypes; starts are not int64; radius is no number, total or
            segment no int.
        ValueError: shapes that do not fit; a number out of range; two devices.

    Contract: Exact: equal indices and distances.

    Source: the definition; counts, their running sum, and a second walk, as CSR matrices are built.
    """
    wide = wide_of(a)
    limit = squared_radius(radius, wide)
    idx = torch.full((total + 1,), -1, dtype=torch.int64, device=a.device)  # the last: what has no place here
    dist2 = torch.full((total + 1,), torch.inf, dtype=wide, device=a.device)
    m = b.shape[0]
    if m == 0 or total == 0:
        return idx[:-1].clone(), dist2[:-1].clone()
    rows = max(1, PAIRS_AT_A_TIME // m)
    for x, first in zip(a.detach().split(rows), starts.split(rows), strict=True):
        sums = sums_of(x.to(wide), b.detach().to(wide))
        near = sums <= limit
        column = torch.arange(m, device=a.device)
        part = column // segment
        upto = near.to(torch.int64).cumsum(1)
        # of a row and its segments before this one: what the row had before the segment's first column
        of_segment = torch.nn.functional.pad(upto, (1, 0))[:, torch.clamp(part * segment, max=m)]
        place = first[:, part] + upto - 1 - of_segment
        good = near & (place >= 0) & (place < total)
        target = torch.where(good, place, total).flatten()
        idx = idx.scatter(0, target, column.expand(near.shape).flatten())
        dist2 = dist2.scatter(0, target, sums.flatten())
    return idx[:-1].clone(), dist2[:-1].clone()


@pairwise_within_fill.check
def _(a, b, radius, starts, total, segment):
    check_pair(a, b)
    check_radius(radius)
    c.in_range("segment", segment, 1, 2**63 - 1)
    c.is_tensor("starts", starts)
    if starts.dtype != torch.int64:
        raise TypeError(f"starts: expected int64, got {c.short(starts.dtype)}")
    c.has_shape("starts", starts, (a.shape[0], segments_of(b, segment)))
    c.same_device(a=a, starts=starts)
    c.in_range("total", total, 0, MOST_NEIGHBOURS)


@pairwise_within_fill.fake
def _(a, b, radius, starts, total, segment):
    return a.new_empty(total, dtype=torch.int64), a.new_empty(total, dtype=wide_of(a))


@pairwise_within_fill.backward(constant=("a", "b"))
def _(args, kept, grad_idx, grad_dist2):
    return {}


pairwise_within_fill.kernel(needs=WITHIN_NEEDS)


@pairwise_within_fill.bad_calls
def _(device):
    x = normal(device)
    a, b = x(2, 3), x(4, 3)
    starts = torch.zeros(2, 1, dtype=torch.int64, device=device)
    yield from wrong_pairs(device, 1.0, starts, 8)
    yield BadCall((a, b, -1.0, starts, 8), ValueError, r"radius: expected a number from 0, got -1")
    yield BadCall((a, b, 1.0, [0, 0], 8), TypeError, r"starts: expected a torch.Tensor, got list")
    yield BadCall((a, b, 1.0, starts.int(), 8), TypeError, r"starts: expected int64, got int32")
    yield BadCall((a, b, 1.0, starts[1:], 8), ValueError, r"starts: expected shape \[2, 1\], got \[1, 1\]")
    yield BadCall((a, b, 1.0, starts, 8, 2), ValueError, r"starts: expected shape \[2, 2\], got \[2, 1\]")
    yield BadCall((a, b, 1.0, starts, -1), ValueError, r"total: expected 0 to \d+, got -1")
    yield BadCall((a, b, 1.0, starts, "8"), TypeError, r"total: expected an int, got str")
    if device.type == "cuda":
        cpu = r"starts: expected a tensor on cuda:\d like a, got cpu"
        yield BadCall((a, b, 1.0, starts.cpu(), 8), ValueError, cpu)
