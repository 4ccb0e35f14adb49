"""The k rows of a corpus that are closest to each of some queries, in one pass over the corpus."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal, wide_of
from .row_norms import inverse_of
from .topk_rows import METRICS, best_of, is_metric, is_wide, nothing_yet, scores_of

MOST_KEPT, MOST_ROWS, MOST_QUERY_BYTES = 128, 2**30, 6 * 1024  # k, C and a query of the kernel
SCORES_AT_A_TIME = 2**22  # of the reference; and values of the corpus that it holds in the dtype of computation


def whole(device, *shape, dtype=torch.float32, most=2, of=0):
    """Whole numbers up to `most`, of both signs: their inner products have no rounding, and many are equal."""
    return (normal(device)(*shape, of=of).clamp(-most, most) * 1.2).round().to(dtype)


def samples(device):
    """Products and sums of squares without a rounding: scores are equal on both paths, and so are the rows."""
    x = normal(device)

    def call(queries, corpus, width, k, dtype, metric="dot", known=False):
        q, rows = (whole(device, n, width, dtype=dtype, of=of) for n, of in ((queries, 0), (corpus, 1)))
        terms = None
        if known:
            squares = rows.to(wide_of(rows)).square().sum(1)
            terms = squares if metric == "l2" else squares.rsqrt()
        return q, rows, k, terms, metric

    yield Sample("quick", call(3, 200, 16, 5, torch.bfloat16, "cosine"))
    for dtype in FLOATS:
        name = c.short(dtype)
        for queries, corpus, width, k in (
            *((1, 1, 1, 1), (1, 5, 16, 9), (1, 4099, 64, 10), (3, 257, 128, 128), (8, 1000, 256, 17), (9, 129, 64, 65)),
            *((16, 2049, 96, 10), (17, 127, 40, 64), (33, 700, 64, 32), (64, 1025, 64, 5), (65, 300, 16, 3)),
            *((1, 40_003, 16, 100), (5, 20_011, 64, 128), (2, 300, 1024, 10)),
        ):
            for metric in METRICS:
                for known in (False, True) if metric != "dot" else (False,):
                    args = call(queries, corpus, width, k, dtype, metric, known)
                    yield Sample(f"{name} {queries} x {corpus} x {width}, {k}, {metric}{', known' * known}", args)
        for width in (7, 33, 129):
            yield Sample(f"{name} {width} wide", call(5, 500, width, 20, dtype, "l2"))
        q, rows, *rest = call(6, 900, 130, 12, dtype, "l2")
        yield Sample(f"{name} slices", (q[::2, 1:129], rows[1::2, 2:130], *rest), {"first_index": 2**40})
        yield Sample(f"{name} misaligned rows", (q[:, 1:65], rows[:, 3:67], *rest))
        yield Sample(f"{name} one row for all", (q, rows[:1].expand(900, 130), *rest))
        yield Sample(f"{name} all zero", (q * 0, rows * 0, 12, None, "cosine"))
        yield Sample(f"{name} no queries", call(0, 33, 8, 4, dtype, "cosine"))
        yield Sample(f"{name} no rows", call(3, 0, 16, 4, dtype, "l2"))
        yield Sample(f"{name} no columns", (x(3, 0, dtype=dtype), x(70, 0, dtype=dtype), 4, None, "cosine"))
        along = torch.arange(3000, device=device).remainder(256).to(dtype).unsqueeze(1).expand(3000, 8)
        yield Sample(f"{name} ascending", (q[:, :8].abs() + 1, along, 60))
        wild = rows[:, :64].clone()
        wild[3, 1], wild[5], wild[7, :2], wild[9] = torch.nan, torch.inf, -torch.inf, 0
        for metric in METRICS:
            yield Sample(f"{name} not finite, {metric}", (q[:, :64].abs() + 1, wild[:40], 50, None, metric))
    yield Sample("129 places", call(3, 400, 16, 129, torch.float32))
    yield Sample("wide rows", call(2, 90, 4096, 7, torch.bfloat16))
    yield Sample("transposed", (x(8, 3).round().t(), x(8, 200, of=1).round().t(), 9))
    q, rows, k, terms, metric = call(3, 150, 16, 9, torch.float32, "l2", True)
    yield Sample("every second term", (q, rows, k, terms.repeat_interleave(2)[::2], metric))
    yield Sample("float64", call(3, 200, 16, 9, torch.float64, "cosine"))


# The samples' products and sums of squares are whole numbers below 2^24, so they have no rounding. The steps after that
# are rounded once each, on both paths; where torch's root or quotient is a vector's and an ulp off, norms of query and
# row put a score off by 8 of 2^-24, and the two products by 2 more. The rows are those of the reference.
TOLERANCE = Tolerance({torch.float32: (1e-6, 0.0), torch.float64: (1e-15, 0.0)})


@op(samples=samples, contract=TOLERANCE)
def topk_products(
    queries: Tensor,
    corpus: Tensor,
    k: int,
    column_terms: Tensor | None = None,
    metric: str = "dot",
    *,
    first_index: int = 0,
) -> tuple[Tensor, Tensor]:
    """An exhaustive search for a few queries: inner products and choice in one pass over the corpus.

    Args:
        queries: [Q, D], floating.
        corpus: [C, D], of queries' dtype.
        k: results a query, from 1. More than C is right.
        column_terms: [C], float32 (float64 for float64), or None: of "cosine" one over the norms of corpus, of "l2"
            their squares, where they are known. Else they are made of the rows as these are read.
        metric: "dot": the score is the inner product z; "cosine": ``z * column * row``, row being one over the query's
            norm (0 of a norm below the smallest normal number); "l2": ``min(2 z - column - row, 0)`` of squared norms,
            minus the squared distance.
        first_index: the index of the first row.

    Returns:
        scores: [Q, k], float32 (float64 for float64), in descending order.
        idx: [Q, k], int64. Equal scores stand in the order of the rows. Where there are fewer than k rows, -inf and -1
            come last.

    Sums are taken in float32 (float64), of float32 in full whatever torch's TF32 settings are; the kernel's of halves
    by tensor cores, which cut off what float32 does not hold. An inner product is off by at most
    ``(D + 2) 2^-23 |q| |c|``; every step after it is rounded once. Rows whose scores differ by less than two such
    bounds may stand in another order. NaN counts as larger than infinity.

    Gradients are those of the scores of the rows found, by queries and corpus; the choice has none.

    Raises:
        TypeError: queries is not floating; corpus or column_terms of another dtype; k is no int; metric is no str.
        ValueError: shapes that do not fit; k below 1; another metric, terms given for "dot"; a negative first_index;
            two devices.

    Contract: Tolerance (TOLERANCE in the source, with its arithmetic); the rows are equal where sums have no rounding.

    Source: Johnson, Douze and Jegou, Billion-scale similarity search with GPUs, 2017; here without scores in memory.
    """
    wide = wide_of(queries)
    q = queries.to(wide)
    row_terms = terms_of_rows(q, metric)
    best, idx = nothing_yet(queries.shape[0], k, wide, queries.device)
    step = max(1, SCORES_AT_A_TIME // max(1, *queries.shape))
    with torch.autocast(queries.device.type, enabled=False):
        for begin in range(0, corpus.shape[0], step):
            rows = corpus[begin : begin + step].to(wide)
            columns = terms_of_rows(rows, metric) if column_terms is None else column_terms[begin : begin + step]
            scores = scores_of(q @ rows.t(), row_terms, columns, metric)
            places = torch.arange(first_index + begin, first_index + begin + len(rows), device=queries.device)
            every = torch.cat((best, scores), 1)
            best, idx = best_of(every, torch.cat((idx, places.expand(len(q), -1)), 1), k)
    return best, idx


def terms_of_rows(x: Tensor, metric: str) -> Tensor | None:
    """[n, D] in the dtype of computation to [n]."""
    if metric == "dot":
        return None
    return inverse_of(torch.linalg.vector_norm(x, dim=1)) if metric == "cosine" else x.square().sum(1)


@topk_products.check
def _(queries, corpus, k, column_terms, metric, *, first_index):
    c.is_tensor("queries", queries)
    c.is_floating("queries", queries)
    c.has_shape("queries", queries, ("Q", "D"))
    c.is_tensor("corpus", corpus)
    c.same_dtype("corpus", corpus, "queries", queries)
    c.has_shape("corpus", corpus, ("C", queries.shape[1]))
    c.in_range("k", k, 1, 2**62)
    is_metric(metric)
    if column_terms is not None:
        if metric == "dot":
            raise ValueError("column_terms: expected None for the metric 'dot', got a tensor")
        is_wide("column_terms", column_terms, (corpus.shape[0],), queries, "queries")
    c.in_range("first_index", first_index, 0, 2**62)
    c.same_device(queries=queries, corpus=corpus, column_terms=column_terms)


@topk_products.fake
def _(queries, corpus, k, column_terms, metric, *, first_index):
    shape = (queries.shape[0], k)
    return queries.new_empty(shape, dtype=wide_of(queries)), queries.new_empty(shape, dtype=torch.int64)


@topk_products.backward(of=("queries", "corpus"))
def _(saved, kept, grad, _):
    local = torch.where(kept[0] < 0, -1, kept[0] - saved["first_index"])
    given, metric = saved["column_terms"], saved["metric"]

    def scores(queries: Tensor, corpus: Tensor) -> Tensor:
        return scores_at(queries, corpus, local, given, metric)

    pull_back = torch.func.vjp(scores, saved["queries"], saved["corpus"])[1]
    return dict(zip(("queries", "corpus"), pull_back(grad), strict=True))


def scores_at(queries: Tensor, corpus: Tensor, rows: Tensor, column_terms: Tensor | None, metric: str) -> Tensor:
    """[Q, k]: the scores of these rows of the corpus; -inf, which has no gradient, where one is negative."""
    wide, at = wide_of(queries), rows.clamp(min=0)
    if corpus.shape[0] == 0:
        return queries.new_full(rows.shape, -torch.inf, dtype=wide)
    q, picked = queries.to(wide), corpus[at].to(wide)
    scores = (picked * q.unsqueeze(1)).sum(2)
    row_terms = terms_of_rows(q, metric)
    if row_terms is not None:
        if column_terms is None:
            columns = terms_of_rows(picked.flatten(0, 1), metric)
            assert columns is not None
            columns = columns.view_as(scores)
        else:
            columns = column_terms[at]
        scores = scores_of(scores, row_terms, columns, metric)
    return torch.where(rows < 0, -torch.inf, scores)


topk_products.kernel(
    needs=[
        c.dtype_in("queries", *FLOATS),
        c.Need("size", f"k <= {MOST_KEPT}", lambda args: args["k"] <= MOST_KEPT),
        c.at_most("corpus", 0, MOST_ROWS),
        c.Need(
            "size",
            f"a query of at most {MOST_QUERY_BYTES:,} bytes",
            lambda args: args["queries"].shape[1] * args["queries"].element_size() <= MOST_QUERY_BYTES,
        ),
        *(c.unit_stride(name) for name in ("queries", "corpus", "column_terms")),
    ]
)


@topk_products.bad_calls
def _(device):
    x = normal(device)
    q, rows, terms = x(3, 8), x(20, 8), x(20)
    yield BadCall(([1.0], rows, 2), TypeError, r"queries: expected a torch.Tensor, got list")
    yield BadCall((q.long(), rows, 2), TypeError, r"queries: expected a floating dtype, got int64")
    yield BadCall((q[0], rows, 2), ValueError, r"queries: expected shape \[Q, D\], got \[8\]")
    yield BadCall((q, rows.half(), 2), TypeError, r"corpus: expected float32 like queries, got float16")
    yield BadCall((q, rows[:, 1:], 2), ValueError, r"corpus: expected shape \[C, 8\], got \[20, 7\]")
    yield BadCall((q, rows, 0), ValueError, r"k: expected 1 to")
    yield BadCall((q, rows, "2"), TypeError, r"k: expected an int, got str")
    yield BadCall((q, rows, 2, None, 3), TypeError, r"metric: expected a str, got int")
    yield BadCall((q, rows, 2, None, "l1"), ValueError, r"metric: expected 'dot', 'cosine' or 'l2', got 'l1'")
    none = r"column_terms: expected None for the metric 'dot', got a tensor"
    yield BadCall((q, rows, 2, terms), ValueError, none)
    half = r"column_terms: expected float32 for queries of float32, got float16"
    yield BadCall((q, rows, 2, terms.half(), "l2"), TypeError, half)
    yield BadCall((q, rows, 2, terms[1:], "l2"), ValueError, r"column_terms: expected shape \[20\], got \[19\]")
    yield BadCall((q, rows, 2), ValueError, r"first_index: expected 0 to", {"first_index": -1})
    if device.type == "cuda":
        cpu = r"corpus: expected a tensor on cuda:\d like queries, got cpu"
        yield BadCall((q, rows.cpu(), 2), ValueError, cpu)
