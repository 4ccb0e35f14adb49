"""The kernels under `prequal.linear_cross_entropy`, on chunks of logits: four ops, each gated, counted and answered by
its reference like any other. What adds chunks up to a loss and its gradients is in prequal/losses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from . import _cross_entropy as ce
from ._rows import FLOATS, normal, wide_of

# ---- the kernels: checks and samples ---------------------------------------------------------------------------------


def check_logits(logits, target, class_weight, first_class, softcap):
    for name, value in (("logits", logits), ("target", target)):
        c.is_tensor(name, value)
    c.is_floating("logits", logits)
    c.has_shape("logits", logits, ("n", "V"))
    if logits.shape[1] == 0:
        raise ValueError("logits: expected at least one class, got shape " + str(list(logits.shape)))
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected int64, got {c.short(target.dtype)}")
    c.has_shape("target", target, (logits.shape[0],))
    if class_weight is not None:
        is_wide("class_weight", class_weight, (logits.shape[1],), "logits", logits)
    c.same_device(logits=logits, target=target, class_weight=class_weight)
    c.in_range("first_class", first_class, 0, 2**62)
    c.is_number("softcap", softcap)
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap: expected a finite number >= 0, got {softcap}")


def is_wide(name, x, shape, other, y):
    c.is_tensor(name, x)
    wide = wide_of(y)
    if x.dtype != wide:
        raise TypeError(f"{name}: expected {c.short(wide)} for {other} of {c.short(y.dtype)}, got {c.short(x.dtype)}")
    c.has_shape(name, x, shape)


def check_coefficients(logits, coefficients):
    is_wide("coefficients", coefficients, (logits.shape[0], 4), "logits", logits)
    c.same_device(logits=logits, coefficients=coefficients)


def is_written(**tensors):
    """Each has memory of its own, and no two share any."""
    seen: list[tuple[str, Tensor]] = []
    for name, x in tensors.items():
        c.is_apart(name, x)
        for other, y in seen:
            c.are_apart(name, x, other, y)
        seen.append((name, x))


LOGITS = [
    c.dtype_in("logits", *FLOATS),
    c.unit_stride("logits"),
    c.unit_stride("target"),
    c.unit_stride("class_weight"),
    c.at_most("logits", 1, 2**30),
    c.at_most("logits", 0, 2**31 - 1),
]
ROWS_OF_FOUR = c.Need(
    "unit_stride",
    "the four coefficients of a row together",
    lambda args: args["coefficients"].stride(1) == 1 or 0 in args["coefficients"].shape,
)


@dataclass(frozen=True)
class Chunk:
    """Data of a sample, by name."""

    logits: Tensor
    target: Tensor
    coefficients: Tensor
    class_weight: Tensor
    lse: Tensor
    stats: Tensor


def chunk(device, rows, classes, dtype, *, padding=0, first=0):
    """Logits that lie `padding` elements apart and begin `first` elements into their memory; targets of every kind."""
    x = normal(device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = (3.0 * x(rows, classes + padding)).to(dtype)[:, first : first + classes]
    target = torch.arange(rows) * 7919 % max(classes, 1)
    target[1::4] = -100  # ignored
    target[3::8] = classes + 5  # of another slice
    target = target.to(device)
    lse = ce.logsumexp(ce.statistics(logits.to(wide), target, None, 0, 0.0)) if rows else x(0, dtype=wide)
    coefficients = x(rows, 4, of=1).abs().to(wide)
    coefficients[1::4] = 0.0
    weight = x(classes, of=2).abs().to(wide)
    return Chunk(logits, target, coefficients, weight, lse, torch.full((rows, 4), 7.0, dtype=wide, device=device))


def samples(pick, weighs=True):
    """Of one op: `pick` takes its tensors from a chunk, class_weight last where one is given."""

    def made(device):
        yield Sample("quick", pick(chunk(device, 4, 40, torch.float32), None))
        for dtype in FLOATS:
            name = c.short(dtype)
            for rows, classes in ((1, 1), (5, 7), (3, 127), (2, 4099), (9, 1024)):
                yield Sample(f"{name} {rows} x {classes}", pick(chunk(device, rows, classes, dtype), None))
            yield Sample(f"{name} no rows", pick(chunk(device, 0, 33, dtype), None))
            yield Sample(f"{name} rows apart", pick(chunk(device, 5, 250, dtype, padding=6), None))
            yield Sample(f"{name} misaligned", pick(chunk(device, 5, 250, dtype, padding=7, first=3), None))
            if not weighs:
                continue
            one = chunk(device, 6, 260, dtype)
            one.logits[1, 77], one.logits[5, 0] = torch.nan, -torch.inf  # rows that are ignored
            yield Sample(f"{name} not finite, ignored", pick(one, None))
            one = chunk(device, 6, 260, dtype)
            yield Sample(f"{name} weights", pick(one, one.class_weight))
            yield Sample(f"{name} softcap", pick(one, None), {"softcap": 2.5})
            yield Sample(f"{name} a slice", pick(one, one.class_weight), {"first_class": 100, "softcap": 30.0})
        yield Sample("float64", pick(chunk(device, 3, 50, torch.float64), None))

    return made


def bad_chunks(device):
    """(arguments by name, error, match): wrong logits and targets."""
    good = chunk(device, 4, 8, torch.float32)
    yield replace(good, logits=[1.0]), TypeError, r"logits: expected a torch.Tensor, got list"
    yield replace(good, logits=good.logits.long()), TypeError, r"logits: expected a floating dtype, got int64"
    yield replace(good, logits=good.logits[0]), ValueError, r"logits: expected shape \[n, V\], got \[8\]"
    yield replace(good, logits=good.logits[:, :0]), ValueError, r"logits: expected at least one class, got shape"
    yield replace(good, target=good.target.int()), TypeError, r"target: expected int64, got int32"
    yield replace(good, target=good.target[1:]), ValueError, r"target: expected shape \[4\], got \[3\]"


def bad_calls(pick, device):
    good = chunk(device, 4, 8, torch.float32)
    for wrong, error, match in bad_chunks(device):
        yield BadCall(pick(wrong, None), error, match)
    yield BadCall(pick(good, good.class_weight[1:]), ValueError, r"class_weight: expected shape \[8\], got \[7\]")
    half = good.class_weight.half()
    yield BadCall(pick(good, half), TypeError, r"class_weight: expected float32 for logits of float32, got float16")
    yield BadCall(pick(good, None), ValueError, r"softcap: expected a finite number >= 0, got -1", {"softcap": -1.0})
    yield BadCall(pick(good, None), ValueError, r"first_class: expected 0 to", {"first_class": -1})
    yield BadCall(pick(good, None), TypeError, r"first_class: expected an int, got str", {"first_class": "0"})
    if device.type == "cuda":
        wrong = replace(good, target=good.target.cpu())
        yield BadCall(pick(wrong, None), ValueError, r"target: expected a tensor on cuda:\d like logits, got cpu")


# ---- the kernels -----------------------------------------------------------------------------------------------------

# Both compute in fp32 from the load on. The sum of exponentials is of positive terms, each right to 5e-6 where it is
# not lost beside the largest: 2^-24 |z log2 e| and one more ulp at |z| = 30. The mean of logits cancels: a level of its
# sums rounds by 2^-24 of the mean of |z|, a few 1e-7. A softcap of 30 is right to 30 * 2^-23.
STATISTICS_TOLERANCE = Tolerance({torch.float32: (2e-5, 2e-5), torch.float64: (1e-12, 1e-11)})


def of_stats(of, class_weight):
    return of.logits, of.target, class_weight


@op(samples=samples(of_stats), contract=STATISTICS_TOLERANCE)
def cross_entropy_stats(
    logits: Tensor, target: Tensor, class_weight: Tensor | None = None, *, first_class: int = 0, softcap: float = 0.0
) -> Tensor:
    """What the loss of a row of logits is made of, in one pass; slices of a vocabulary are joined by it.

    Args:
        logits: [n, V], floating, V at least 1.
        target: [n], int64; any value: one that is none of this slice's classes picks nothing.
        class_weight: [V], float32 (float64 for float64), or None for ones.
        first_class: the class of column 0, where the columns are a slice of a vocabulary.
        softcap: z is ``softcap * tanh(logits / softcap)``; 0 for the logits themselves.

    Returns:
        [n, 4], float32 (float64 for float64): ``m = max z``, ``sum exp(z - m)``, ``z[target]`` or 0 where the target is
        none of these classes, ``sum class_weight * z / V``. A row with NaN has NaN in the first two.

    Raises:
        TypeError: logits are not floating, target is not int64, class_weight is of another dtype.
        ValueError: shapes that do not fit; a negative softcap or first_class; two devices.

    Contract: Tolerance (STATISTICS_TOLERANCE in the source, with its arithmetic).

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    return ce.statistics(logits.to(wide_of(logits)), target, class_weight, first_class, softcap)


@cross_entropy_stats.check
def _(logits, target, class_weight, *, first_class, softcap):
    check_logits(logits, target, class_weight, first_class, softcap)


@cross_entropy_stats.bad_calls
def _(device):
    yield from bad_calls(of_stats, device)


cross_entropy_stats.kernel(needs=LOGITS)

# p is exp(z - lse), an error of 2^-24 |z log2 e| and one more ulp, 5e-6 of itself at |z| = 30; from it the share of the
# target is taken, which leaves 5e-6 of coefficients of a few. A half is rounded once more.
GRADIENT_TOLERANCE = Tolerance(
    {
        torch.float32: (2e-5, 2e-5),
        torch.bfloat16: (2.0**-7, 2e-5),
        torch.float16: (2.0**-10, 2e-5),
        torch.float64: (1e-12, 1e-11),
    }
)


def of_gradient(of, class_weight):
    return of.logits, of.lse, of.target, of.coefficients, class_weight


@op(samples=samples(of_gradient), contract=GRADIENT_TOLERANCE, mutates=("logits",))
def cross_entropy_gradient_(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    coefficients: Tensor,
    class_weight: Tensor | None = None,
    *,
    first_class: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Logits become the gradient by them of ``a lse + b lse^2 / 2 - c z[target] - d sum(class_weight * z)``, in place.

    Args:
        logits: [n, V], floating; becomes the gradient.
        lse: [n], float32 (float64 for float64): ``log sum exp z`` over the whole vocabulary.
        target: [n], int64; any value: one that is none of this slice's classes picks nothing.
        coefficients: [n, 4], of lse's dtype: a, b, c, d. A row of zeros has a gradient of zeros, whatever its logits.
        class_weight: [V], of lse's dtype, or None for ones.
        first_class: the class of column 0, where the columns are a slice of a vocabulary.
        softcap: z is ``softcap * tanh(logits / softcap)``; 0 for the logits themselves.

    Returns:
        logits. No memory is allocated.

    Raises:
        TypeError, ValueError: as cross_entropy_stats; lse or coefficients of another dtype or shape.
        ValueError: logits share memory with lse or coefficients, or among themselves. Nothing is written then.
        RuntimeError: a gradient would have to be recorded.

    Contract: Tolerance (GRADIENT_TOLERANCE in the source, with its arithmetic).

    Source: the derivative of the formula.
    """
    wide = wide_of(logits)
    found = ce.gradient(logits.to(wide), lse, target, coefficients, class_weight, first_class, softcap)
    return logits.copy_(found)


@cross_entropy_gradient_.check
def _(logits, lse, target, coefficients, class_weight, *, first_class, softcap):
    check_logits(logits, target, class_weight, first_class, softcap)
    is_wide("lse", lse, (logits.shape[0],), "logits", logits)
    check_coefficients(logits, coefficients)
    c.same_device(logits=logits, lse=lse)
    c.is_apart("logits", logits)
    c.are_apart("lse", lse, "logits", logits)
    c.are_apart("coefficients", coefficients, "logits", logits)


@cross_entropy_gradient_.bad_calls
def _(device):
    yield from bad_calls(of_gradient, device)
    good = chunk(device, 4, 8, torch.float32)
    yield BadCall(
        of_gradient(replace(good, lse=good.lse.half()), None),
        TypeError,
        r"lse: expected float32 for logits of float32, got float16",
    )
    yield BadCall(
        of_gradient(replace(good, coefficients=good.coefficients[:, :3]), None),
        ValueError,
        r"coefficients: expected shape \[4, 4\], got \[4, 3\]",
    )
    shared = r"coefficients: expected memory apart from that of logits, which is written, got shared memory"
    yield BadCall(of_gradient(replace(good, coefficients=good.logits[:, 4:]), None), ValueError, shared)
    row = good.logits[:1].expand(4, 8)
    yield BadCall(of_gradient(replace(good, logits=row), None), ValueError, r"logits: expected a place of its own")


def apart(*written):
    """What is written lies apart from target and class_weight: else the kernel reads what it has written."""
    return c.apart(*written, read=("target", "class_weight"))


cross_entropy_gradient_.kernel(needs=[*LOGITS, c.unit_stride("lse"), ROWS_OF_FOUR, apart("logits")])


def of_chunk(of, class_weight):
    return of.logits, of.stats, of.target, of.coefficients, class_weight


# As of the two ops that it is.
CHUNK_TOLERANCE = Tolerance({**GRADIENT_TOLERANCE.bounds, **STATISTICS_TOLERANCE.bounds})


@op(samples=samples(of_chunk), contract=CHUNK_TOLERANCE, mutates=("logits", "stats"))
def cross_entropy_chunk_(
    logits: Tensor,
    stats: Tensor,
    target: Tensor,
    coefficients: Tensor,
    class_weight: Tensor | None = None,
    *,
    first_class: int = 0,
    softcap: float = 0.0,
) -> None:
    """`cross_entropy_stats` and, with their lse, `cross_entropy_gradient_`, in one launch: a row is read from memory
    once and stays in the cache for its second pass.

    Args:
        logits: [n, V], floating, all of the vocabulary; becomes the gradient.
        stats: [n, 4], float32 (float64 for float64); becomes what cross_entropy_stats returns.
        target: [n], int64, as of cross_entropy_stats.
        coefficients: [n, 4], of stats' dtype, as of cross_entropy_gradient_.
        class_weight: [V], of stats' dtype, or None for ones.
        first_class: the class of column 0.
        softcap: as of cross_entropy_stats.

    Returns:
        None. No memory is allocated.

    Raises:
        TypeError, ValueError: as cross_entropy_gradient_; stats of another dtype or shape, or in memory that another
            argument lies in. Nothing is written then.
        RuntimeError: a gradient would have to be recorded.

    Contract: Tolerance (CHUNK_TOLERANCE in the source, with its arithmetic).

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, and the derivative of the formula.
    """
    wide = logits.to(wide_of(logits))
    found = ce.statistics(wide, target, class_weight, first_class, softcap)
    lse = ce.logsumexp(found)
    logits.copy_(ce.gradient(wide, lse, target, coefficients, class_weight, first_class, softcap))
    stats.copy_(found)


@cross_entropy_chunk_.check
def _(logits, stats, target, coefficients, class_weight, *, first_class, softcap):
    check_logits(logits, target, class_weight, first_class, softcap)
    is_wide("stats", stats, (logits.shape[0], 4), "logits", logits)
    check_coefficients(logits, coefficients)
    c.same_device(logits=logits, stats=stats)
    is_written(logits=logits, stats=stats)
    c.are_apart("coefficients", coefficients, "logits", logits)
    c.are_apart("coefficients", coefficients, "stats", stats)


@cross_entropy_chunk_.bad_calls
def _(device):
    yield from bad_calls(of_chunk, device)
    good = chunk(device, 4, 8, torch.float32)
    yield BadCall(
        of_chunk(replace(good, stats=good.stats[1:]), None),
        ValueError,
        r"stats: expected shape \[4, 4\], got \[3, 4\]",
    )
    shared = r"stats: expected memory apart from that of logits, which is written, got shared memory"
    yield BadCall(of_chunk(replace(good, stats=good.logits[:, 4:]), None), ValueError, shared)
    both = r"coefficients: expected memory apart from that of stats, which is written, got shared memory"
    yield BadCall(of_chunk(replace(good, coefficients=good.stats), None), ValueError, both)


ROWS_OF_STATS = c.Need(
    "unit_stride",
    "the four statistics of a row together",
    lambda args: args["stats"].stride(1) == 1 or 0 in args["stats"].shape,
)
cross_entropy_chunk_.kernel(needs=[*LOGITS, ROWS_OF_FOUR, ROWS_OF_STATS, apart("logits", "stats")])


def scale_samples(device):
    x = normal(device)
    yield Sample("quick", (x(4, 40), torch.tensor([0.5], dtype=torch.float32, device=device)))
    for dtype in FLOATS:
        name = c.short(dtype)
        for value in (1.0, 3.0, 0.0, float("inf")):
            yield Sample(
                f"{name} by {value}",
                (x(5, 131, dtype=dtype), torch.tensor([value], dtype=torch.float32, device=device)),
            )
        for shape in ((1,), (0,), (4099,), (3, 5, 7)):
            size = " x ".join(map(str, shape))
            yield Sample(
                f"{name} {size}", (x(*shape, dtype=dtype), torch.tensor([1.25], dtype=torch.float32, device=device))
            )
        yield Sample(
            f"{name} misaligned", (x(1001, dtype=dtype)[1:], torch.tensor([1.25], dtype=torch.float32, device=device))
        )
    yield Sample("float64", (x(7, dtype=torch.float64), torch.tensor([1.25], dtype=torch.float64, device=device)))


# One product in fp32 and one rounding on both paths: equal.
SCALE_TOLERANCE = Tolerance(dict.fromkeys((*FLOATS, torch.float64), (0.0, 0.0)))


@op(samples=scale_samples, contract=SCALE_TOLERANCE, mutates=("x",))
def scale_unless_one_(x: Tensor, factor: Tensor) -> Tensor:
    """``x *= factor`` in place, where a factor of 1 costs no pass over x: the device looks, nobody waits.

    Args:
        x: [...], floating; becomes the product, computed in float32 (float64 for float64) and rounded once.
        factor: [1], float32 (float64 for float64).

    Returns:
        x. No memory is allocated.

    Raises:
        TypeError: x is not floating, or factor is of another dtype.
        ValueError: factor is not of one element; x and factor share memory, or elements of x do; two devices.
        RuntimeError: a gradient would have to be recorded.

    Contract: Tolerance of nothing (SCALE_TOLERANCE): equal values.

    Source: multiplication.
    """
    return x.copy_(x.to(factor.dtype) * factor)


@scale_unless_one_.check
def _(x, factor):
    c.is_tensor("x", x)
    c.is_floating("x", x)
    is_wide("factor", factor, (1,), "x", x)
    c.same_device(x=x, factor=factor)
    c.is_apart("x", x)
    c.are_apart("factor", factor, "x", x)


@scale_unless_one_.bad_calls
def _(device):
    x, factor = torch.ones(4, 8, device=device), torch.ones(1, device=device)
    yield BadCall((x.long(), factor), TypeError, r"x: expected a floating dtype, got int64")
    yield BadCall((x, 2.0), TypeError, r"factor: expected a torch.Tensor, got float")
    yield BadCall((x, factor.half()), TypeError, r"factor: expected float32 for x of float32, got float16")
    yield BadCall((x, x[0]), ValueError, r"factor: expected shape \[1\], got \[8\]")
    shared = r"factor: expected memory apart from that of x, which is written, got shared memory"
    yield BadCall((x, x[0, :1]), ValueError, shared)
    yield BadCall((x[:1].expand(4, 8), factor), ValueError, r"x: expected a place of its own for every element")
    if device.type == "cuda":
        yield BadCall((x, factor.cpu()), ValueError, r"factor: expected a tensor on cuda:\d like x, got cpu")


CONTIGUOUS = c.Need("contiguous", "x contiguous", lambda args: args["x"].is_contiguous())
scale_unless_one_.kernel(needs=[c.dtype_in("x", *FLOATS), CONTIGUOUS])
