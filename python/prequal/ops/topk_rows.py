"""The k best of each row of a tile of scores, merged into the k best of the tiles before it."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Exact
from prequal.registry import BadCall, Sample, op

from ._rows import FLOATS, normal, wide_of

METRICS = ("dot", "cosine", "l2")
MOST_KEPT = 256  # k of the kernel


def nothing_yet(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(best, idx), both [rows, k], before the first tile: every place is empty."""
    best = torch.full((rows, k), -torch.inf, dtype=dtype, device=device)
    return best, torch.full((rows, k), -1, dtype=torch.int64, device=device)


def samples(device):
    x = normal(device)

    def terms(rows, columns, metric, wide=torch.float32):
        if metric == "dot":
            return None, None
        return x(rows, of=1).abs().to(wide), x(columns, of=2).abs().to(wide)

    def tile(rows, columns, k, dtype=torch.float32, metric="dot", held=None):
        """held: how many of the k places are not empty."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        best, idx = nothing_yet(rows, k, wide, device)
        held = k // 2 if held is None else held
        best[:, :held] = x(rows, held, of=3).sort(1, descending=True).values.to(wide)
        idx[:, :held] = torch.arange(held, device=device)
        return best, idx, x(rows, columns, dtype=dtype), *terms(rows, columns, metric, wide), metric

    yield Sample("quick", tile(5, 40, 3, metric="cosine"))
    for dtype in FLOATS:
        name = c.short(dtype)
        for rows, columns, k in (
            *((1, 1, 1), (3, 7, 10), (2, 4097, 128), (7, 129, 32), (1, 40_003, 10), (2, 20_011, 33), (9, 1024, 256)),
            *((1, 65_536, 100), (33, 4096, 1), (4, 127, 5)),
        ):
            for metric in METRICS:
                yield Sample(f"{name} {rows} x {columns}, {k}, {metric}", tile(rows, columns, k, dtype, metric))
        yield Sample(f"{name} nothing yet", tile(5, 9001, 40, dtype, held=0))
        yield Sample(f"{name} all held", tile(5, 9001, 40, dtype, "l2", held=40))
        for columns in (2, 900, 70_000):
            best, idx, *rest = tile(3, columns, 40, dtype, "cosine", held=40)
            yield Sample(f"{name} fresh, {columns}", (best * torch.nan, idx, *rest), {"fresh": True})
        yield Sample(f"{name} no rows", tile(0, 33, 4, dtype))
        yield Sample(f"{name} no columns", tile(3, 0, 4, dtype, "cosine"))
        best, idx, products, *rest = tile(6, 4200, 20, dtype, "l2")
        yield Sample(f"{name} unsorted", (best.flip(1), idx.flip(1), products, *rest), {"first_index": 7})
        yield Sample(f"{name} unsorted, no columns", (best.flip(1), idx.flip(1), *tile(6, 0, 20, dtype)[2:]))
        best, idx, products, rows, columns, metric = tile(6, 4200, 20, dtype, "cosine")
        args = best[::2, 1:18], idx[::2, 1:18], products[::2, 3:4100], rows[3:], columns[1:4098], metric
        yield Sample(f"{name} slices", args, {"first_index": 2**40})
        best, idx, products = tile(3, 5000, 17, dtype)[:3]
        yield Sample(f"{name} one row for all", (best, idx, products[:1].expand(3, 5000)))
        yield Sample(f"{name} all equal", (best, idx, torch.zeros_like(products)))
        yield Sample(f"{name} few values", (best, idx, products.clamp(-0.5, 0.5).mul(4).round()))
        yield Sample(f"{name} ascending", (best, idx, products.sort(1).values))
        wild = products.clone()
        wild[0, ::7], wild[1, ::50], wild[1, 3:], wild[2] = -torch.inf, torch.nan, -0.0, -torch.inf
        yield Sample(f"{name} not finite", (best, idx, wild))
    best, idx, products = tile(3, 500, 17)[:3]
    yield Sample("transposed", (best, idx, products.t().contiguous().t()))
    yield Sample("every second term", (best, idx, products, *(y[::2] for y in terms(6, 1000, "l2")), "l2"))
    yield Sample("257 places", tile(2, 700, 257))
    yield Sample("float64", tile(3, 700, 9, torch.float64, "l2"))


@op(samples=samples, contract=Exact(ties="what was held, then the lower column"), mutates=("best", "idx"))
def topk_rows_(
    best: Tensor,
    idx: Tensor,
    products: Tensor,
    row_terms: Tensor | None = None,
    column_terms: Tensor | None = None,
    metric: str = "dot",
    *,
    first_index: int = 0,
    fresh: bool = False,
) -> None:
    """One step of a search over a corpus in tiles: what of a tile of products is better than what was found before.

    Args:
        best: [Q, k], float32 (float64 for float64), k from 1: the scores found before; becomes the k best with this
            tile, in descending order.
        idx: [Q, k], int64: where those were; becomes where these are. What is negative makes a place empty: it comes
            after every score, whatever stands in best.
        products: [Q, n], floating: inner products of queries and a tile of the corpus.
        row_terms: [Q], of best's dtype, or None for "dot": of "cosine" what the scores of a row are multiplied by
            (one over the query's norm), of "l2" its squared norm.
        column_terms: [n], of best's dtype, or None for "dot": the same of the columns.
        metric: "dot": the score is the product z; "cosine": ``z * column * row``; "l2": ``min(2 z - column - row, 0)``,
            minus the squared distance.
        first_index: the index of column 0.
        fresh: every place is empty, whatever stands in best and idx: they are not read, and need not be filled before.
            A place that stays empty becomes -inf and -1.

    Returns:
        None.

    Scores are computed in float32 (float64 for float64), every step rounded once. Among equal scores those of best come
    first, in their order, then the columns in theirs. NaN counts as larger than infinity; zeros of both signs are one.

    Raises:
        TypeError: products are not floating; best, idx or terms of another dtype; metric is no str, fresh
            no bool.
        ValueError: shapes that do not fit; another metric, terms missing or given where there are none; a negative
            first_index; two devices; best or idx in memory that another argument lies in. Nothing is written then.
        RuntimeError: a gradient would have to be recorded.

    Contract: Exact: equal scores and indices.

    Source: Johnson, Douze and Jegou, Billion-scale similarity search with GPUs, 2017: a filter by the k-th best. The
    rest is a sort.
    """
    if fresh:
        best.fill_(-torch.inf)
        idx.fill_(-1)
    scores = scores_of(products.to(best.dtype), row_terms, column_terms, metric)
    columns = torch.arange(first_index, first_index + products.shape[1], device=idx.device)
    every = torch.cat((best, scores), 1)
    places = torch.cat((idx, columns.expand(idx.shape[0], -1)), 1)
    found, where = best_of(every, places, best.shape[1])
    best.copy_(found)
    idx.copy_(where)


def scores_of(products: Tensor, row_terms: Tensor | None, column_terms: Tensor | None, metric: str) -> Tensor:
    """[Q, n] in the dtype of computation. column_terms [n], or [Q, n]."""
    if metric == "dot":
        return products
    assert row_terms is not None
    assert column_terms is not None
    if metric == "cosine":
        return products * column_terms * row_terms.unsqueeze(1)
    return (2 * products - column_terms - row_terms.unsqueeze(1)).clamp(max=0)


def best_of(scores: Tensor, idx: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """[Q, m] both to [Q, k]: in descending order, equal ones as they stand; what has a negative index comes last."""
    empty = idx < 0
    ranked = scores.masked_fill(empty, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    last = empty.gather(1, ranked).to(torch.uint8).sort(dim=1, stable=True).indices
    kept = ranked.gather(1, last)[:, :k]
    return scores.gather(1, kept), idx.gather(1, kept)


@topk_rows_.check
def _(best, idx, products, row_terms, column_terms, metric, *, first_index, fresh):
    for name, x in (("best", best), ("idx", idx), ("products", products)):
        c.is_tensor(name, x)
    c.is_floating("products", products)
    c.has_shape("products", products, ("Q", "n"))
    rows, columns = products.shape[0], products.shape[1]
    is_wide("best", best, (rows, "k"), products)
    if best.shape[1] == 0:
        raise ValueError(f"best: expected k from 1, got shape {list(best.shape)}")
    if idx.dtype != torch.int64:
        raise TypeError(f"idx: expected int64, got {c.short(idx.dtype)}")
    c.has_shape("idx", idx, (rows, best.shape[1]))
    is_metric(metric)
    for name, x, size in (("row_terms", row_terms, rows), ("column_terms", column_terms, columns)):
        if metric == "dot":
            if x is not None:
                raise ValueError(f"{name}: expected None for the metric 'dot', got a tensor")
        elif x is None:
            raise ValueError(f"{name}: expected a tensor for the metrics 'cosine' and 'l2', got None")
        else:
            is_wide(name, x, (size,), products)
    c.in_range("first_index", first_index, 0, 2**62)
    c.is_bool("fresh", fresh)
    c.same_device(best=best, idx=idx, products=products, row_terms=row_terms, column_terms=column_terms)
    c.is_apart("best", best)
    c.is_apart("idx", idx)
    c.are_apart("idx", idx, "best", best)
    for name, x in (("products", products), ("row_terms", row_terms), ("column_terms", column_terms)):
        if x is not None:
            c.are_apart(name, x, "best", best)
            c.are_apart(name, x, "idx", idx)


def is_metric(metric):
    if not isinstance(metric, str):
        raise TypeError(f"metric: expected a str, got {type(metric).__name__}")
    if metric not in METRICS:
        raise ValueError(f"metric: expected 'dot', 'cosine' or 'l2', got {metric!r}")


def is_wide(name, x, shape, products, of="products"):
    c.is_tensor(name, x)
    wide = wide_of(products)
    if x.dtype != wide:
        raise TypeError(
            f"{name}: expected {c.short(wide)} for {of} of {c.short(products.dtype)}, got {c.short(x.dtype)}"
        )
    c.has_shape(name, x, shape)


topk_rows_.kernel(
    needs=[
        c.dtype_in("products", *FLOATS),
        c.at_most("best", 1, MOST_KEPT),
        c.at_most("products", 1, 2**30),
        c.at_most("products", 0, 2**31 - 1),
        *(c.unit_stride(name) for name in ("best", "idx", "products", "row_terms", "column_terms")),
    ]
)


@topk_rows_.bad_calls
def _(device):
    x = normal(device)
    best, idx = nothing_yet(4, 3, torch.float32, device)
    z, rows, columns = x(4, 8), x(4), x(8)
    yield BadCall((best, idx, [1.0]), TypeError, r"products: expected a torch.Tensor, got list")
    yield BadCall((best, idx, z.long()), TypeError, r"products: expected a floating dtype, got int64")
    yield BadCall((best, idx, z[0]), ValueError, r"products: expected shape \[Q, n\], got \[8\]")
    half = r"best: expected float32 for products of float32, got float16"
    yield BadCall((best.half(), idx, z), TypeError, half)
    yield BadCall((best[1:], idx, z), ValueError, r"best: expected shape \[4, k\], got \[3, 3\]")
    yield BadCall((best[:, :0], idx[:, :0], z), ValueError, r"best: expected k from 1, got shape \[4, 0\]")
    yield BadCall((best, idx.int(), z), TypeError, r"idx: expected int64, got int32")
    yield BadCall((best, idx[:, 1:], z), ValueError, r"idx: expected shape \[4, 3\], got \[4, 2\]")
    yield BadCall((best, idx, z, None, None, 3), TypeError, r"metric: expected a str, got int")
    other = r"metric: expected 'dot', 'cosine' or 'l2', got 'l1'"
    yield BadCall((best, idx, z, rows, columns, "l1"), ValueError, other)
    none = r"row_terms: expected None for the metric 'dot', got a tensor"
    yield BadCall((best, idx, z, rows), ValueError, none)
    missing = r"column_terms: expected a tensor for the metrics 'cosine' and 'l2', got None"
    yield BadCall((best, idx, z, rows, None, "l2"), ValueError, missing)
    yield BadCall((best, idx, z, rows[1:], columns, "l2"), ValueError, r"row_terms: expected shape \[4\], got \[3\]")
    short = r"column_terms: expected shape \[8\], got \[7\]"
    yield BadCall((best, idx, z, rows, columns[1:], "cosine"), ValueError, short)
    yield BadCall((best, idx, z), ValueError, r"first_index: expected 0 to", {"first_index": -1})
    yield BadCall((best, idx, z), TypeError, r"first_index: expected an int, got str", {"first_index": "0"})
    yield BadCall((best, idx, z), TypeError, r"fresh: expected a bool, got int", {"fresh": 1})
    own = r"best: expected a place of its own for every element"
    yield BadCall((best[:1].expand(4, 3), idx, z), ValueError, own)
    shared = r"products: expected memory apart from that of best, which is written, got shared memory"
    yield BadCall((z[:, 2:5], idx, z), ValueError, shared)
    memory = x(12)
    shared = r"row_terms: expected memory apart from that of best, which is written, got shared memory"
    yield BadCall((memory.view(4, 3), idx, z, memory[:4], columns, "l2"), ValueError, shared)
    if device.type == "cuda":
        cpu = r"products: expected a tensor on cuda:\d like best, got cpu"
        yield BadCall((best, idx, z.cpu()), ValueError, cpu)
