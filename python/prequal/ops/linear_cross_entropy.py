"""The loss of a language model's head with exact gradients, chunk by chunk: the logits never exist at once.

`linear_cross_entropy` is Python over torch's matrix products and the four ops of this file, which are the kernels of
src/ops/linear_cross_entropy.cu: each is gated, counted and answered by its reference like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, library

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import LIBRARY, NAMESPACE, BadCall, Sample, _is_transformed, _needs_dispatcher, op

from . import _cross_entropy as ce
from ._rows import FLOATS, normal, wide_of

INTS = (torch.int32, torch.int64)

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
    c.has_shape("target", target, (int(logits.shape[0]),))
    if class_weight is not None:
        is_wide("class_weight", class_weight, (int(logits.shape[1]),), "logits", logits)
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
    is_wide("coefficients", coefficients, (int(logits.shape[0]), 4), "logits", logits)
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
    is_wide("lse", lse, (int(logits.shape[0]),), "logits", logits)
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
    is_wide("stats", stats, (int(logits.shape[0]), 4), "logits", logits)
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


# ---- the loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """What a call asks for, besides its tensors."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float
    wide_weight_grad: bool  # chunks of the weight's gradient are added in float32
    workspace: int
    first_class: int
    classes: int  # of the whole vocabulary
    checked: bool = False
    group: Any = None  # a ProcessGroup where the vocabulary is spread
    into_grad: bool = False

    def summed(self, x: Tensor) -> Tensor:
        """In place, over the ranks."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x


class Tokens:
    """Of each token: whether it counts, and what its class weighs. [N] each."""

    def __init__(self, how: Loss, target: Tensor, class_weight: Tensor | None, wide: torch.dtype) -> None:
        self.how = how
        self.ignored = target == how.ignore_index
        self.outside = ~self.ignored & ((target < 0) | (target >= how.classes))
        if how.checked and bool(self.outside.any()):
            found = int(target[self.outside][0])
            raise ValueError(
                f"target: expected classes 0 to {how.classes - 1} or ignore_index {how.ignore_index}, got {found}"
            )
        counts = ~(self.ignored | self.outside)
        self.all_weights: Tensor | float = float(how.classes)
        self.weight = counts.to(wide)
        if class_weight is not None:
            place, inside = ce.local_classes(target, how.first_class, class_weight.shape[0])
            self.weight = how.summed(torch.where(inside & counts, class_weight[place], 0.0))
            self.all_weights = how.summed(class_weight.sum())
        # of nothing but ignored tokens, or of nothing: 0 / 0
        self.count = self.weight.sum() if how.reduction == "mean" else None

    def only(self, value: Tensor) -> Tensor:
        """Zero where a token is ignored, NaN where its target is no class: never a number that looks right."""
        value = torch.where(self.outside, torch.nan, value)
        return torch.where(self.ignored, 0.0, value)

    def losses(self, stats: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 4] to the loss of each token and lse, [N] each."""
        how = self.how
        lse = ce.logsumexp(stats)
        value = (1.0 - how.label_smoothing) * self.weight * (lse - stats[:, 2])
        if how.label_smoothing:
            value = value + how.label_smoothing * (self.all_weights / how.classes * lse - stats[:, 3])
        if how.z_loss:
            value = value + how.z_loss * lse.square()
        return self.only(value), lse

    def reduced(self, losses: Tensor) -> Tensor:
        if self.how.reduction == "none":
            return losses
        total = losses.sum()
        return total if self.count is None else total / self.count

    def upstream(self, grad: Tensor | float) -> Tensor:
        """From the gradient of the result to that of each token's loss, [N]."""
        if not isinstance(grad, Tensor):  # filled in there: a copy of a number of the host's is waited for
            grad = torch.full((), grad, dtype=self.weight.dtype, device=self.weight.device)
        each = grad.to(self.weight.dtype)
        each = each if self.count is None else each / self.count
        return self.only(each.expand(self.weight.shape))

    def coefficients(self, upstream: Tensor, of_lse: Tensor | None) -> Tensor:
        """[N, 4], as of cross_entropy_gradient_."""
        how = self.how
        kept = (1.0 - how.label_smoothing) * self.weight
        spread = how.label_smoothing / how.classes
        first = upstream * (kept + spread * self.all_weights)
        if of_lse is not None:
            first = first + of_lse
        columns = (first, 2.0 * how.z_loss * upstream, upstream * kept, spread * upstream)
        return torch.stack(columns, 1)


@dataclass
class Gradients:
    """What chunks add up to. `factor`, [1] or None, is still to be multiplied by."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    factor: Tensor | None = None
    weight_scale: float = 1.0  # the weight's is larger than `factor` says by this


class _NoAutocast:
    """The matrix products are of the dtypes that they are given."""

    def __init__(self, device: torch.device) -> None:
        self.off = torch.autocast(device.type, enabled=False) if device.type in ("cpu", "cuda") else None

    def __enter__(self) -> None:
        if self.off is not None:
            self.off.__enter__()

    def __exit__(self, *of: Any) -> None:
        if self.off is not None:
            self.off.__exit__(*of)


def _wide_product(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """``out = beta out + a @ b``, out in float32 and a and b in a half, without rounding in between."""
    if a.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):  # torch 2.9 and later
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, out=out)
    else:  # a and b, of one chunk, are copied
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)


def _passes(
    how: Loss,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    wants: tuple[bool, bool, bool],
    lse: Tensor | None = None,
    grads: tuple[Tensor | None, Tensor | None] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Gradients]:
    """(loss, lse, gradients) of hidden [N, H], weight [V, H], target [N]: chunk by chunk, each product once.

    lse and grads: of a backward pass, with the gradients of the loss and of lse. into: what the weight's gradient is
    added to.
    """
    tokens, width = hidden.shape
    classes, wide = weight.shape[0], wide_of(hidden)
    if class_weight is not None:
        class_weight = class_weight.to(wide)
    of = Tokens(how, target, class_weight, wide)
    of_all = class_weight if how.label_smoothing else None  # the kernels need weights for the sum over all classes

    made = Gradients()
    coefficients = None
    chunks_are_wide = how.wide_weight_grad and weight.dtype != wide
    if any(wants):
        of_loss, of_lse = grads or (None, None)
        upstream = of.upstream(1.0) if grads is None else of.upstream(0.0 if of_loss is None else of_loss)
        coefficients = of.coefficients(upstream, of_lse)
        if hidden.dtype == torch.float16:
            # p / N is below fp16's smallest number, 6e-8, at sizes of every day: the gradient of the logits is computed
            # from coefficients of 1 at most, and the rest multiplied in at the end
            peak = torch.nan_to_num(coefficients.abs().flatten(), posinf=torch.inf)
            largest = torch.cat((peak, peak.new_zeros(1))).amax()
            made.factor = torch.where(largest > 0, largest, 1.0).reshape(1)
            coefficients = coefficients / made.factor
            if not chunks_are_wide:
                # N rows of at most 1 each add up to 1024 at most, which leaves 64 for the hidden state below 65504
                made.weight_scale = 1.0 / (1 << max(0, (tokens - 1) // 1024).bit_length())
        if wants[0]:
            made.hidden = hidden.new_empty((tokens, width))
        if wants[1]:
            made.weight = into if into is not None else weight.new_empty(weight.shape)
            if into is None and chunks_are_wide:
                made.weight = weight.new_empty(weight.shape, dtype=wide)
        if wants[2]:
            made.bias = weight.new_zeros(classes, dtype=wide)
    stats = hidden.new_empty((tokens, 4), dtype=wide) if lse is None else None

    # ranks meet at every chunk: all have as many, of an even share of the vocabulary
    share = classes if how.group is None else -(-how.classes // dist.get_world_size(how.group))
    rows = ce.chunk_rows(tokens, share, hidden.element_size(), how.workspace)
    buffer = hidden.new_empty((rows, ce.row_elements(classes, hidden.element_size())))[:, :classes]
    product = weight.t()
    first = into is None
    with _NoAutocast(hidden.device):
        for begin, end in ce.chunks(tokens, rows):
            x, y, logits = hidden[begin:end], target[begin:end], buffer[: end - begin]
            if bias is None:
                torch.mm(x, product, out=logits)
            else:
                torch.addmm(bias, x, product, out=logits)

            place = {"first_class": how.first_class, "softcap": how.softcap}
            if coefficients is None:
                assert stats is not None
                stats[begin:end] = _joined(how, cross_entropy_stats(logits, y, of_all, **place), classes)
                continue
            c4 = coefficients[begin:end]
            if lse is not None or stats is None:
                assert lse is not None
                cross_entropy_gradient_(logits, lse[begin:end], y, c4, of_all, **place)
            elif how.group is None:
                cross_entropy_chunk_(logits, stats[begin:end], y, c4, of_all, **place)
            else:
                whole = _joined(how, cross_entropy_stats(logits, y, of_all, **place), classes)
                stats[begin:end] = whole
                cross_entropy_gradient_(logits, ce.logsumexp(whole), y, c4, of_all, **place)

            if made.hidden is not None:
                torch.mm(logits, weight, out=made.hidden[begin:end])
            if made.weight is not None:
                if made.weight.dtype != logits.dtype:
                    _wide_product(made.weight, logits.t(), x, 0 if first else 1)
                else:
                    torch.addmm(
                        made.weight,
                        logits.t(),
                        x,
                        beta=0 if first else 1,
                        alpha=made.weight_scale,
                        out=made.weight,
                    )
            if made.bias is not None:
                made.bias += logits.sum(0, dtype=wide)
            first = False
        if tokens == 0 and made.weight is not None and into is None:
            made.weight.zero_()
        if made.hidden is not None:
            how.summed(made.hidden)
    if stats is None:
        return None, None, made
    losses, lse = of.losses(stats)
    return of.reduced(losses), lse, made


def _joined(how: Loss, stats: Tensor, classes: int) -> Tensor:
    """[n, 4] of this rank's slice of the vocabulary, of so many classes, to [n, 4] of all of it."""
    if how.group is None:
        return stats
    # a NaN is told by the sums: what the largest of NaN and a number is, backends differ about
    own = torch.where(stats[:, 0].isnan(), -torch.inf, stats[:, 0])
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=how.group)
    scale = torch.exp(own - torch.where(largest == -torch.inf, 0.0, largest))
    # NaN times exp(-inf) is NaN
    sums = torch.stack((stats[:, 1] * scale, stats[:, 2], stats[:, 3] * (classes / how.classes)), 1)
    dist.all_reduce(sums, group=how.group)
    return torch.cat((largest.unsqueeze(1), sums), 1)


def _finished(grad: Tensor | None, like: Tensor, factor: Tensor | None, functional: bool) -> Tensor | None:
    """The gradient times a factor, in like's dtype."""
    if grad is None:
        return None
    if factor is None:
        return grad.to(like.dtype)
    if functional:
        return (grad.to(factor.dtype) * factor).to(like.dtype)
    return scale_unless_one_(grad, factor).to(like.dtype)


def _finish(
    made: Gradients, hidden: Tensor, weight: Tensor, grad: Tensor | None, functional: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, with what is still to be multiplied by: `grad` too, where it is given."""
    factor = made.factor
    if grad is not None:
        above = grad.to(wide_of(hidden)).reshape(1)
        factor = above if factor is None else above * factor
    of_weight = factor if made.weight_scale == 1.0 or factor is None else factor / made.weight_scale
    return (
        _finished(made.hidden, hidden, factor, functional),
        _finished(made.weight, weight, of_weight, functional),
        _finished(made.bias, weight, factor, functional),
    )


def _grad_to_add_to(how: Loss, weight: Tensor) -> Tensor | None:
    """The weight's .grad, where the gradient may be added to it at once."""
    if not how.into_grad:
        return None
    grad = weight.grad
    return grad if grad is not None and grad.dtype == weight.dtype and grad.layout == torch.strided else None


class _Chunked(torch.autograd.Function):
    """The loss in eager mode: where one number weighs all tokens, the gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, class_weight, how, wants):
        late = how.reduction == "none" or how.into_grad
        loss, lse, made = _passes(
            how, hidden, weight, target, bias, class_weight, (False, False, False) if late else wants
        )
        ctx.set_materialize_grads(False)
        ctx.how, ctx.wants = how, wants
        if how.into_grad:
            ctx.leaf = weight  # what is saved comes back as another tensor over the same memory
        if not late and hidden.dtype != torch.float16:
            # nothing is to be multiplied by but the upstream gradient, as a rule 1: float32 sums need not wait for it
            made.weight = None if made.weight is None else made.weight.to(weight.dtype)
        ctx.made = None if late else made
        ctx.save_for_backward(hidden, weight, bias, target, class_weight, lse)
        return loss, lse

    @staticmethod
    def backward(ctx, of_loss, of_lse):
        with torch.no_grad():
            found = _Chunked.gradients(ctx, of_loss, of_lse)
        if torch.is_grad_enabled():  # somebody will differentiate again
            found = tuple(None if x is None else _Once.apply(x.requires_grad_()) for x in found)
        return (*found, None, None, None, None)

    @staticmethod
    def gradients(ctx, of_loss, of_lse):
        hidden, weight, bias, target, class_weight, lse = ctx.saved_tensors
        made, ctx.made = ctx.made, None  # what autograd is given is its own: a second walk computes again
        if of_loss is None and of_lse is None:
            return None, None, None
        if made is not None and of_lse is None:
            return _finish(made, hidden, weight, of_loss)
        into = _grad_to_add_to(ctx.how, ctx.leaf) if ctx.how.into_grad and ctx.wants[1] else None
        *_, made = _passes(ctx.how, hidden, weight, target, bias, class_weight, ctx.wants, lse, (of_loss, of_lse), into)
        if into is not None:
            made.weight = None
        return _finish(made, hidden, weight, None)


class _Once(torch.autograd.Function):
    """The gradient itself; its own gradient is an error. It does not depend on nothing, as it would else seem to."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "linear_cross_entropy: its gradient has no gradient of its own; torch.func's transforms have them all"
        )


# ---- under torch.compile and dispatch modes: one node of the graph ---------------------------------------------------

_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, int ignore_index, str reduction, "
    "float label_smoothing, float z_loss, float softcap, bool wide_weight_grad, int workspace, bool checked, "
    "bool return_lse, bool[] wants"
)
_OF_LOSS = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "wide_weight_grad", "workspace")
_FORWARD = "linear_cross_entropy_forward"
_BACKWARD = "linear_cross_entropy_backward"
LIBRARY.define(f"{_FORWARD}({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define(f"{_BACKWARD}({_SCHEMA}, Tensor lse, Tensor? grad_loss, Tensor? grad_lse) -> (Tensor, Tensor, Tensor)")


def _loss_of(weight: Tensor, plain: tuple[Any, ...]) -> tuple[Loss, bool, tuple[bool, bool, bool]]:
    *of_loss, checked, return_lse, wants = plain
    named: dict[str, Any] = dict(zip(_OF_LOSS, of_loss, strict=True))
    how = Loss(**named, first_class=0, classes=weight.shape[0], checked=checked)
    return how, return_lse, tuple(wants)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _forward_op(hidden, weight, target, bias, class_weight, *plain):
    how, _, wants = _loss_of(weight, plain)
    wants = (False, False, False) if how.reduction == "none" else wants
    loss, lse, made = _passes(how, hidden, weight, target, bias, class_weight, wants)
    assert loss is not None
    assert lse is not None
    if made.weight is not None and hidden.dtype != torch.float16:
        made.weight = made.weight.to(weight.dtype)
    scale = torch.ones(2, dtype=lse.dtype, device=lse.device)
    if made.factor is not None:
        scale = torch.cat((made.factor, made.factor / made.weight_scale))
    outputs = (_or_empty(made.hidden, hidden), _or_empty(made.weight, weight), _or_empty(made.bias, lse))
    return (loss, lse, *outputs, scale)


def _shapes_of(hidden, weight, bias, how, wants, wide):
    late = how.reduction == "none"
    kept = wide if how.wide_weight_grad and hidden.dtype == torch.float16 else weight.dtype
    return (
        hidden.new_empty(hidden.shape if wants[0] and not late else (0,)),
        weight.new_empty(weight.shape if wants[1] and not late else (0,), dtype=kept),
        weight.new_empty(weight.shape[:1] if wants[2] and not late else (0,), dtype=wide),
    )


def _forward_fake(hidden, weight, target, bias, class_weight, *plain):
    how, _, wants = _loss_of(weight, plain)
    numbers = (how.ignore_index, how.reduction, how.label_smoothing, how.z_loss, how.softcap or None, how.workspace)
    _check(hidden, weight, target, bias, class_weight, *numbers)
    wide = wide_of(hidden)
    lse = hidden.new_empty(hidden.shape[:1], dtype=wide)
    loss = lse if how.reduction == "none" else lse.new_empty(())
    loss = torch.empty_like(loss)
    return (loss, lse, *_shapes_of(hidden, weight, bias, how, wants, wide), lse.new_empty(2))


def _backward_op(hidden, weight, target, bias, class_weight, *plain):
    lse, grad_loss, grad_lse = plain[-3:]
    how, _, wants = _loss_of(weight, plain[:-3])
    how = replace(how, checked=False)
    _, _, made = _passes(how, hidden, weight, target, bias, class_weight, wants, lse, (grad_loss, grad_lse))
    of_hidden, of_weight, of_bias = _finish(made, hidden, weight, None)
    return _or_empty(of_hidden, hidden), _or_empty(of_weight, weight), _or_empty(of_bias, weight)


def _backward_fake(hidden, weight, target, bias, class_weight, *plain):
    _, _, wants = _loss_of(weight, plain[:-3])
    return (
        hidden.new_empty(hidden.shape if wants[0] else (0,)),
        weight.new_empty(weight.shape if wants[1] else (0,)),
        weight.new_empty(weight.shape[:1] if wants[2] else (0,)),
    )


def _setup(ctx, inputs, output):
    hidden, weight, target, bias, class_weight, *plain = inputs
    _, lse, of_hidden, of_weight, of_bias, scale = output
    how, return_lse, _ = _loss_of(weight, tuple(plain))
    still = [of_hidden, of_weight, of_bias, scale, *([] if return_lse else [lse])]
    ctx.mark_non_differentiable(*still)
    ctx.late, ctx.plain = how.reduction == "none" or return_lse, tuple(plain)
    ctx.save_for_backward(hidden, weight, target, bias, class_weight, lse, of_hidden, of_weight, of_bias, scale)


def _walk(ctx, of_loss, of_lse, *unused):
    hidden, weight, target, bias, class_weight, lse, of_hidden, of_weight, of_bias, scale = ctx.saved_tensors
    wants = ctx.plain[-1]
    if ctx.late:
        grad_lse = of_lse if ctx.plain[-2] else None
        packet = getattr(getattr(torch.ops, NAMESPACE), _BACKWARD)
        found = packet(hidden, weight, target, bias, class_weight, *ctx.plain, lse, of_loss, grad_lse)
    else:
        factor = of_loss.to(scale.dtype) * scale
        found = (
            _finished(of_hidden, hidden, factor[:1], True),
            _finished(of_weight, weight, factor[1:], True),
            _finished(of_bias, weight, factor[:1], True),
        )
    dh, dw, db = (x if asks else None for x, asks in zip(found, wants, strict=True))
    return (dh, dw, None, db, None, *(None for _ in ctx.plain))


LIBRARY.impl(_FORWARD, _forward_op, "CompositeExplicitAutograd")
LIBRARY.impl(_BACKWARD, _backward_op, "CompositeExplicitAutograd")
library.register_fake(f"{NAMESPACE}::{_FORWARD}", _forward_fake, lib=LIBRARY)
library.register_fake(f"{NAMESPACE}::{_BACKWARD}", _backward_fake, lib=LIBRARY)
library.register_autograd(f"{NAMESPACE}::{_FORWARD}", _walk, setup_context=_setup, lib=LIBRARY)


# ---- the plain formula -----------------------------------------------------------------------------------------------


def plain_formula(
    how: Loss, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(loss, lse) with all logits in memory: for what torch differentiates by itself, as functorch's transforms."""
    wide = wide_of(hidden)
    logits = torch.nn.functional.linear(hidden, weight, bias).to(wide)
    class_weight = None if class_weight is None else class_weight.to(wide)
    of = Tokens(replace(how, checked=False), target, class_weight, wide)
    of_all = class_weight if how.label_smoothing else None
    z = ce.capped(logits, how.softcap)
    place, _ = ce.local_classes(target, 0, z.shape[1])
    weighted = (z if of_all is None else z * of_all).mean(1)
    lse = torch.logsumexp(z, 1)
    stats = torch.stack((lse, torch.ones_like(lse), z.gather(1, place.unsqueeze(1)).squeeze(1), weighted), 1)
    losses, lse = of.losses(stats)
    return of.reduced(losses), lse


# ---- the public function ---------------------------------------------------------------------------------------------


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    return_lse: bool = False,
    weight_grad_dtype: torch.dtype | None = None,
    accumulate_into_grad: bool = False,
    max_workspace_bytes: int = ce.WORKSPACE_BYTES,
    checked: bool = False,
    process_group: Any = None,
    vocabulary: tuple[int, int] | None = None,
) -> Any:
    """Cross-entropy of ``hidden @ weight.T + bias``, without all of the logits ever being in memory.

    Args:
        hidden: [..., H], floating.
        weight: [V, H], of hidden's dtype.
        target: [...], int32 or int64: classes, or ignore_index.
        bias: [V], of hidden's dtype, or None.
        ignore_index: tokens of this target have no loss and no gradient, and do not count in the mean.
        reduction: "mean" over the tokens that count (with class_weight over their weights), "sum" or "none".
        label_smoothing: 0 to 1: this share of the target is spread over all classes.
        z_loss: what lse squared is multiplied by and added to each token's loss.
        softcap: logits z become ``softcap * tanh(z / softcap)``; None: they stay.
        class_weight: [V], floating, without a gradient of its own; or None.
        return_lse: return lse as well.
        weight_grad_dtype: what the chunks of the weight's gradient are added in: None for weight's dtype, or
            torch.float32, which takes 4 bytes an element of weight more while it runs.
        accumulate_into_grad: the weight's gradient is added to an existing ``weight.grad`` in the backward pass, and no
            second one is made; the logits are computed twice for it. Not with float16, hooks on weight, or
            torch.compile, and with weight_grad_dtype only where weight is of that dtype.
        max_workspace_bytes: memory for logits; one row is always made. Of a vocabulary that is spread, for an even
            share of it; the same number on every rank.
        checked: wait for the device and raise where a target is no class. On the CPU that is always so.
        process_group: weight, bias and class_weight are this rank's slice of a vocabulary spread over the group; hidden
            and target are the same on every rank. So are the results, and the gradient of hidden.
        vocabulary: (first class of this rank, classes in all); default: slices of one size in the order of ranks.

    Returns:
        the loss, a scalar or of target's shape, float32 (float64 for float64). With return_lse a pair with lse of
        target's shape, ``log sum exp`` of each row's logits, which has a gradient too.

    Each token's loss is ``(1 - s) w[y] (lse - z[y]) + s / V sum_j w[j] (lse - z[j]) + z_loss lse^2``. The mean of
    nothing but ignored tokens is NaN, their sum 0, and the gradients of both are 0. Without `checked`, on a GPU, a
    target that is neither a class nor ignore_index makes its token's loss and gradient NaN; nothing outside is read.

    Where a gradient is needed and the loss is one number, gradients are computed in the forward pass, with three matrix
    products in all. With reduction="none", accumulate_into_grad, or a gradient of lse the backward pass computes the
    logits again. Second derivatives are an error. Under torch.func's transforms all logits are made.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    tensors = (hidden, weight, target, bias, class_weight)
    if not torch.compiler.is_dynamo_compiling():  # there the fake of the node does it
        _check(*tensors, ignore_index, reduction, label_smoothing, z_loss, softcap, max_workspace_bytes)
    for name, value in (
        ("return_lse", return_lse),
        ("checked", checked),
        ("accumulate_into_grad", accumulate_into_grad),
    ):
        c.is_bool(name, value)
    if weight_grad_dtype not in (None, torch.float32):
        raise ValueError(f"weight_grad_dtype: expected None or torch.float32, got {weight_grad_dtype}")
    if process_group is None and vocabulary is not None:
        raise ValueError(f"vocabulary: expected None without a process_group, got {vocabulary}")
    first, classes = 0, weight.shape[0]
    if process_group is not None:
        first, classes = _share(process_group, weight.shape[0], vocabulary)
    how = Loss(
        ignore_index,
        reduction,
        float(label_smoothing),
        float(z_loss),
        0.0 if softcap is None else float(softcap),
        weight_grad_dtype == torch.float32,
        max_workspace_bytes,
        first,
        classes,
        checked or not hidden.is_cuda,
        process_group,
        accumulate_into_grad,
    )

    kind = hidden.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if hidden.dtype != torch.float64:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
    if accumulate_into_grad:
        _check_accumulation(weight, weight_grad_dtype)
    flat, target_flat = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
    if class_weight is not None:
        class_weight = class_weight.detach()

    loss, lse = _answer(how, flat, weight, target_flat, bias, class_weight, return_lse)
    if reduction == "none":
        loss = loss.view(target.shape)
    return (loss, lse.view(target.shape)) if return_lse else loss


def _answer(how, hidden, weight, target, bias, class_weight, return_lse):
    grad = torch.is_grad_enabled()
    wants = (
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    if not torch.compiler.is_dynamo_compiling():
        args = tuple(x for x in (hidden, weight, target, bias, class_weight) if x is not None)
        transformed = torch._C._functorch.peek_interpreter_stack() is not None or _is_transformed(args)
        if how.group is not None and (transformed or _needs_dispatcher(args)):
            raise ValueError("process_group: expected plain tensors and no transform where a vocabulary is spread")
        if transformed:
            return plain_formula(how, hidden, weight, target, bias, class_weight)
        if not _needs_dispatcher(args):
            if any(wants):
                return _Chunked.apply(hidden, weight, bias, target, class_weight, how, wants)
            with torch.no_grad():
                return _passes(how, hidden, weight, target, bias, class_weight, wants)[:2]
    if how.group is not None or how.into_grad:
        raise ValueError("process_group, accumulate_into_grad: expected neither under torch.compile or a dispatch mode")
    packet = getattr(getattr(torch.ops, NAMESPACE), _FORWARD)
    return packet(
        hidden,
        weight,
        target,
        bias,
        class_weight,
        how.ignore_index,
        how.reduction,
        how.label_smoothing,
        how.z_loss,
        how.softcap,
        how.wide_weight_grad,
        how.workspace,
        how.checked,
        return_lse,
        list(wants),
    )[:2]


def _share(group: Any, own: int, vocabulary: tuple[int, int] | None) -> tuple[int, int]:
    """(first class of this rank, classes in all)."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if vocabulary is None:
        return rank * own, ranks * own
    first, classes = vocabulary
    if not 0 <= first <= first + own <= classes:
        raise ValueError(
            f"vocabulary: expected (first, classes) with {own} classes of this rank inside, got ({first}, {classes})"
        )
    return int(first), int(classes)


def _check_accumulation(weight: Tensor, sums: torch.dtype | None) -> None:
    if sums is not None and weight.dtype != wide_of(weight):
        raise ValueError(
            f"weight_grad_dtype: expected None with accumulate_into_grad, which adds in {c.short(weight.dtype)}, "
            f"got {sums}"
        )
    if torch.is_grad_enabled() and weight.requires_grad:
        if not weight.is_leaf:
            raise ValueError(
                "accumulate_into_grad: expected a leaf for weight, got the result of an operation (a cast of autocast?)"
            )
        if weight.dtype == torch.float16:
            raise ValueError("accumulate_into_grad: expected float32 or bfloat16 for weight, got float16")
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise ValueError("accumulate_into_grad: expected no hooks on weight, which would not be called")


def _check(hidden, weight, target, bias, class_weight, ignore_index, reduction, smoothing, z_loss, softcap, workspace):
    for name, value in (("hidden", hidden), ("weight", weight), ("target", target)):
        c.is_tensor(name, value)
    c.is_floating("hidden", hidden)
    if hidden.dim() == 0:
        raise ValueError("hidden: expected at least one dimension, got a 0-dimensional tensor")
    c.has_shape("weight", weight, ("V", hidden.shape[-1]))
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one class, got shape " + str(list(weight.shape)))
    kind = hidden.device.type
    autocast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    if autocast:
        c.is_floating("weight", weight)
    else:
        c.same_dtype("weight", weight, "hidden", hidden)
    if target.dtype not in INTS:
        raise TypeError(f"target: expected int32 or int64, got {c.short(target.dtype)}")
    c.has_shape("target", target, hidden.shape[:-1])
    if bias is not None:
        c.is_tensor("bias", bias)
        c.has_shape("bias", bias, weight.shape[:1])
        if autocast:
            c.is_floating("bias", bias)
        else:
            c.same_dtype("bias", bias, "hidden", hidden)
    if class_weight is not None:
        c.is_tensor("class_weight", class_weight)
        c.is_floating("class_weight", class_weight)
        c.has_shape("class_weight", class_weight, weight.shape[:1])
    c.same_device(hidden=hidden, weight=weight, target=target, bias=bias, class_weight=class_weight)
    c.in_range("ignore_index", ignore_index, -(2**63), 2**63 - 1)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    for name, value in (("label_smoothing", smoothing), ("z_loss", z_loss)):
        c.is_number(name, value)
        if not 0 <= value < float("inf") or (name == "label_smoothing" and value > 1):
            most = "0 to 1" if name == "label_smoothing" else "a finite number >= 0"
            raise ValueError(f"{name}: expected {most}, got {value}")
    if softcap is not None:
        c.is_number("softcap", softcap)
        if not 0 < softcap < float("inf"):
            raise ValueError(f"softcap: expected None or a finite number > 0, got {softcap}")
    c.in_range("max_workspace_bytes", workspace, 1, 2**62)
