"""The norms of the rows of a matrix, or what scores of similarity ask of them, in one launch."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal, wide_of

FORMS = ("norm", "inverse", "square")
MOST_ROWS, MOST_WIDTH = 2**31, 2**30  # of the kernel


def samples(device):
    x = normal(device)
    yield Sample("quick", (x(9, 40), "inverse"))
    for dtype in FLOATS:
        name = c.short(dtype)
        for form in FORMS:
            for rows, width in (
                (1, 1),
                (3, 7),
                (65, 64),
                (33, 129),
                (127, 256),
                (129, 257),
                (5, 1024),
                (2, 4096),
                (31, 8),
            ):
                yield Sample(f"{name} {rows} x {width}, {form}", (x(rows, width, dtype=dtype), form))
            yield Sample(f"{name} no rows, {form}", (x(0, 5, dtype=dtype), form))
            yield Sample(f"{name} no columns, {form}", (x(5, 0, dtype=dtype), form))
            some = x(40, 300, dtype=dtype)
            yield Sample(f"{name} slices, {form}", (some[::2, 3:261], form))
            yield Sample(f"{name} misaligned words, {form}", (some[1:, 1:257], form))
            yield Sample(f"{name} one row for all, {form}", (some[:1].expand(70, 300), form))
            wild = some.clone()
            wild[0], wild[1, 5], wild[2, 299], wild[3] = 0, torch.nan, -torch.inf, -0.0
            yield Sample(f"{name} not finite, {form}", (wild, form))
        yield Sample(f"{name} many rows", (x(70_001, 3, dtype=dtype), "norm"))
        yield Sample(f"{name} transposed", (x(40, 6, dtype=dtype).t(), "inverse"))
    yield Sample("float64", (x(30, 50).double(), "inverse"))


# A sum of D squares, none negative, is off by at most as many units of 2^-24 of itself as there are roundings in the
# longest chain behind it: in the kernel the columns of a lane and the halvings of the team, D / 8 + 3 up to D = 256 and
# D / 32 + 5 beyond, so 133 for D of 4,096; in a sum of torch's by vectors of eight 512. Together 3.9e-5; a root halves
# it, a quotient adds one unit.
TOLERANCE = Tolerance({torch.float32: (4e-5, 0.0)})


@op(samples=samples, contract=TOLERANCE)
def row_norms(x: Tensor, form: str = "norm") -> Tensor:
    """The Euclidean norm of every row, or what is made of it: one launch, each row read once.

    Args:
        x: [n, D], floating.
        form: "norm"; "inverse", one over it, and 0 where it is below the smallest normal number (as of a row of zeros);
            "square", the sum of the squares itself.

    Returns:
        [n], float32 (float64 for float64), summed in that dtype.

    Squares are not scaled: in float32, norms below 1e-19 lose digits and those from 1.9e19 on are infinite, as torch's.

    Raises:
        TypeError: x is no floating tensor; form is no str.
        ValueError: x is no matrix; another form.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic).

    Source: the definition.
    """
    wide = wide_of(x)
    if form == "square":
        return x.to(wide).square().sum(1)
    norms = torch.linalg.vector_norm(x, dim=1, dtype=wide)
    return norms if form == "norm" else inverse_of(norms)


def inverse_of(norms: Tensor) -> Tensor:
    """One over it; of what is below the smallest normal number, zero."""
    tiny = torch.finfo(norms.dtype).tiny
    return torch.where(norms < tiny, 0.0, 1.0 / norms.clamp(min=tiny))


@row_norms.check
def _(x, form):
    c.is_tensor("x", x)
    c.is_floating("x", x)
    c.has_shape("x", x, ("n", "D"))
    if not isinstance(form, str):
        raise TypeError(f"form: expected a str, got {type(form).__name__}")
    if form not in FORMS:
        raise ValueError(f"form: expected 'norm', 'inverse' or 'square', got {form!r}")


@row_norms.fake
def _(x, form):
    return x.new_empty(x.shape[0], dtype=wide_of(x))


row_norms.kernel(
    needs=[c.dtype_in("x", *FLOATS), c.at_most("x", 0, MOST_ROWS), c.at_most("x", 1, MOST_WIDTH), c.unit_stride("x")]
)


@row_norms.bad_calls
def _(device):
    x = normal(device)(4, 8)
    yield BadCall(([1.0],), TypeError, r"x: expected a torch.Tensor, got list")
    yield BadCall((x.long(),), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x[0],), ValueError, r"x: expected shape \[n, D\], got \[8\]")
    yield BadCall((x, 2), TypeError, r"form: expected a str, got int")
    yield BadCall((x, "cube"), ValueError, r"form: expected 'norm', 'inverse' or 'square', got 'cube'")
