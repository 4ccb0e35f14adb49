"""cosine_topk against NumPy in float64, whatever the tiles; its edges, gradients, index and shards."""

from __future__ import annotations

import copy
import pickle
import sys
import weakref

import numpy as np
import pytest
import torch

import prequal
from best_rows import by_numpy
from compiled_once import is_compiled_once

METRICS = ("cosine", "dot", "l2")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INF = float("inf")


def integers(rows, width, dtype, device, seed=0, most=4):
    """Small whole numbers: their products have no rounding in any dtype of computation, and many are equal."""
    generator = torch.Generator().manual_seed(seed + rows)
    return torch.randint(-most, most + 1, (rows, width), generator=generator).to(device, dtype)


def normals(rows, width, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed + rows)
    return torch.randn(rows, width, generator=generator).to(device, dtype)


def of_norm_five(rows, dtype, device, seed=0):
    """[rows, 4]: 1, 2, 2 and 4 in any order, with any signs: norms and products have no rounding, many are equal."""
    generator = torch.Generator().manual_seed(seed + rows)
    order = torch.rand(rows, 4, generator=generator).argsort(1)
    signs = torch.randint(0, 2, (rows, 4), generator=generator) * 2 - 1
    return (torch.tensor([1, 2, 2, 4])[order] * signs).to(device, dtype)


def scores_of(queries, corpus, metric):
    q, rows = (x.detach().double().cpu().numpy() for x in (queries, corpus))
    if metric == "l2":
        return -((q[:, None] - rows[None]) ** 2).sum(2)
    products = q @ rows.T
    if metric == "cosine":
        norms = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(rows, axis=1)
        products = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
    return products


def bound(queries, corpus, metric):
    """What the docstring promises of a score, at most."""
    u = 2.0**-52 if queries.dtype == torch.float64 else 2.0**-23
    d = queries.shape[1]
    q, rows = (float(torch.linalg.vector_norm(x.double(), dim=1).max()) for x in (queries, corpus))
    e = (d + 2) * u * q * rows
    return {"dot": e, "cosine": (d + 8) * u, "l2": 2 * e + (d + 4) * u * (q * q + rows * rows)}[metric]


def is_as_good(found, queries, corpus, k, metric):
    """Scores within the bound of their rows', in order, and no row left out that is better by more than two bounds."""
    scores, idx = (x.detach().cpu() for x in found)
    every, off = torch.from_numpy(scores_of(queries, corpus, metric)), bound(queries, corpus, metric)
    some = min(k, corpus.shape[0])
    assert scores.shape == idx.shape == (len(queries), k)
    assert idx.dtype == torch.int64
    assert (idx[:, some:] == -1).all()
    assert (scores[:, some:] == -INF).all()
    scores, idx = scores[:, :some].double(), idx[:, :some]
    assert all(len(set(row)) == some for row in idx.tolist())
    assert ((scores - every.gather(1, idx)).abs() <= off).all()
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    if some < corpus.shape[0]:
        left_out = every.scatter(1, idx, -INF).amax(1)
        assert (left_out <= every.gather(1, idx).amin(1) + 2 * off).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "corpus", "width", "k", "budget"),
    [(1, 1, 1, 1, 4), (3, 501, 17, 10, 2**24), (5, 501, 64, 128, 4096), (130, 700, 8, 3, 50_000), (2, 6, 5, 9, 16)],
)
def test_the_best_are_found_whatever_the_tiles(device, queries, corpus, width, k, budget, dtype, metric):
    q, rows = normals(queries, width, dtype, device), normals(corpus, width, dtype, device, 7)
    for rerank in (0, 20):
        found = prequal.cosine_topk(q, rows, k, metric=metric, rerank=rerank, max_workspace_bytes=budget)
        is_as_good(found, q, rows, k, metric)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [100, 3000, 2**24])
def test_ties_go_to_the_lowest_row_whatever_the_tiles(device, budget, dtype, metric):
    q, rows = of_norm_five(6, dtype, device), of_norm_five(400, dtype, device, 3)
    want = by_numpy(scores_of(q, rows, metric).round(6), 60)
    for rerank in (0, 5):
        scores, idx = prequal.cosine_topk(q, rows, 60, metric=metric, rerank=rerank, max_workspace_bytes=budget)
        np.testing.assert_array_equal(idx.cpu().numpy(), want[1])
        np.testing.assert_allclose(scores.cpu().numpy(), want[0], rtol=0, atol=1e-6 if metric == "cosine" else 0)


def test_equal_rows_are_found_in_their_order(device):
    rows = torch.ones(300, 8, device=device)
    for metric in METRICS:
        _, idx = prequal.cosine_topk(rows[:2], rows, 100, metric=metric, max_workspace_bytes=1024)
        assert idx.tolist() == [list(range(100))] * 2


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_of_zeros_have_a_score(device, dtype, metric):
    q, rows = normals(2, 6, dtype, device), normals(5, 6, dtype, device, 1)
    q[0] = 0
    rows[2] = 0
    scores, idx = prequal.cosine_topk(q, rows, 5, metric=metric)
    assert scores.isfinite().all()
    is_as_good((scores, idx), q, rows, 5, metric)
    if metric == "cosine":
        assert idx[0].tolist() == [0, 1, 2, 3, 4]
        assert (scores[0] == 0).all()


@pytest.mark.parametrize("rerank", [0, 4])
@pytest.mark.parametrize(("queries", "corpus", "width"), [(0, 5, 3), (3, 0, 3), (2, 5, 0), (0, 0, 0)])
def test_sizes_of_nothing(device, queries, corpus, width, rerank):
    for metric in METRICS:
        q, rows = torch.ones(queries, width, device=device), torch.ones(corpus, width, device=device)
        scores, idx = prequal.cosine_topk(q, rows, 7, metric=metric, rerank=rerank)
        assert scores.shape == idx.shape == (queries, 7)
        some = min(corpus, 7)
        assert idx.tolist() == [[*range(some), *[-1] * (7 - some)]] * queries
        assert (scores[:, some:] == -INF).all()


def test_strided_vectors(device):
    base, other = normals(40, 21, torch.float32, device), normals(21, 90, torch.float32, device)
    q, rows = base[::2, 1::2], other[::2].t()[3:][:, :10]
    for metric in METRICS:
        is_as_good(prequal.cosine_topk(q, rows, 8, metric=metric), q, rows, 8, metric)


def test_norms_that_are_known_are_believed(device):
    q, rows = normals(3, 8, torch.float32, device), normals(50, 8, torch.float32, device, 2)
    norms = torch.linalg.vector_norm(rows, dim=1)
    for metric in METRICS:
        plain = prequal.cosine_topk(q, rows, 9, metric=metric, max_workspace_bytes=200)
        known = prequal.cosine_topk(q, rows, 9, metric=metric, corpus_norms=norms)
        assert torch.equal(plain[1], known[1])
        torch.testing.assert_close(plain[0], known[0], rtol=0, atol=bound(q, rows, metric))
    twice = prequal.cosine_topk(q, rows, 9, corpus_norms=2 * norms)
    torch.testing.assert_close(2 * twice[0], prequal.cosine_topk(q, rows, 9)[0])


def test_reranked_scores_are_exact_beside_an_offset(device):
    """Minus squared distances of far points: norms cancel, differences do not."""
    rows = 1000 + normals(200, 16, torch.float32, device)
    q = rows[:5] + 2.0**-6
    scores, idx = prequal.cosine_topk(q, rows, 3, metric="l2", rerank=100)
    want = by_numpy(scores_of(q, rows, "l2"), 3)
    np.testing.assert_array_equal(idx.cpu().numpy(), want[1])
    np.testing.assert_array_equal(scores.cpu().numpy(), want[0].astype(np.float32))


def test_first_index_is_added(device):
    rows = normals(9, 4, torch.float32, device)
    for rerank in (0, 3):
        plain = prequal.cosine_topk(rows, rows, 4, rerank=rerank)
        moved = prequal.cosine_topk(rows, rows, 4, rerank=rerank, first_index=2**40)
        assert torch.equal(plain[1] + 2**40, moved[1])
        assert torch.equal(plain[0], moved[0])


@pytest.mark.parametrize("metric", METRICS)
def test_gradients_are_those_of_the_scores_of_the_rows_found(device, metric):
    q, rows = (normals(n, 6, torch.float64, device, n).requires_grad_() for n in (4, 30))
    scores, idx = prequal.cosine_topk(q, rows, 5, metric=metric)
    picked = rows[idx]
    want = (picked * q[:, None]).sum(2)
    if metric == "cosine":
        want = torch.nn.functional.cosine_similarity(picked, q[:, None], dim=2)
    elif metric == "l2":
        want = -(picked - q[:, None]).square().sum(2)
    weights = torch.linspace(0.5, 1.5, 20, dtype=torch.float64, device=device).view(4, 5)
    torch.testing.assert_close(scores, want)
    for a, b in zip(
        torch.autograd.grad(scores, (q, rows), weights), torch.autograd.grad(want, (q, rows), weights), strict=True
    ):
        torch.testing.assert_close(a, b)
    assert not idx.requires_grad


def test_empty_places_and_zeros_have_no_gradient(device):
    q, rows = torch.zeros(2, 3, device=device, requires_grad=True), torch.zeros(1, 3, device=device)
    for metric in METRICS:
        scores, _ = prequal.cosine_topk(q, rows, 3, metric=metric)
        (grad,) = torch.autograd.grad(scores[:, :1].sum(), q)
        assert torch.equal(grad, torch.zeros_like(q))


@pytest.mark.parametrize("metric", METRICS)
def test_transforms_are_taken_of_the_formula(device, metric):
    q, rows = normals(3, 4, torch.float64, device), normals(12, 4, torch.float64, device, 5)
    scores, idx = torch.func.vmap(lambda x: prequal.cosine_topk(x[None], rows, 5, metric=metric))(q)
    want = prequal.cosine_topk(q, rows, 5, metric=metric)
    assert torch.equal(idx[:, 0], want[1])
    torch.testing.assert_close(scores[:, 0], want[0])
    grad = torch.func.grad(lambda x: prequal.cosine_topk(x, rows, 5, metric=metric)[0].sum())(q)
    x = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(prequal.cosine_topk(x, rows, 5, metric=metric)[0].sum(), x)[0])


def alike(found, want):
    assert torch.equal(found[1], want[1])
    torch.testing.assert_close(found[0], want[0])


@pytest.mark.parametrize("rerank", [0, 4])
@pytest.mark.parametrize("metric", METRICS)
def test_transforms_believe_the_norms_as_a_call_does(device, metric, rerank):
    """Norms that are not those of the rows, so that they decide which are found."""
    q, rows = normals(4, 6, torch.float32, device), normals(60, 6, torch.float32, device, 5)
    norms = torch.linspace(0.5, 9.0, 60, device=device)
    named = {"metric": metric, "corpus_norms": norms, "rerank": rerank}

    def call(q, rows):
        return prequal.cosine_topk(q, rows, 5, **named)

    def of_one(x):
        return tuple(y[0] for y in call(x[None], rows))

    alike(torch.vmap(of_one)(q), call(q, rows))
    index = prequal.CorpusIndex(rows, metric=metric)
    alike(torch.vmap(lambda x: tuple(y[0] for y in index.topk(x[None], 5)))(q), index.topk(q, 5))
    found = torch.func.grad(lambda q, rows: call(q, rows)[0].square().sum(), (0, 1))(q, rows)
    x, y = q.clone().requires_grad_(), rows.clone().requires_grad_()
    alike(torch.vmap(of_one)(x), call(x, y))
    want = torch.autograd.grad(call(x, y)[0].square().sum(), (x, y))
    outside = torch.autograd.grad(torch.vmap(lambda x: call(x[None], y)[0])(x).square().sum(), (x, y))
    # linear in the scores, whose own roundings (l2: of squared norms) are others by another road
    along = torch.func.jvp(lambda q: call(q, rows)[0].sum(), (q,), (torch.ones_like(q),))[1]
    ascent = torch.autograd.grad(call(x, y)[0].sum(), x)[0].sum()
    for a, b, c in zip(found, want, outside, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)
    torch.testing.assert_close(along, ascent)


@pytest.mark.parametrize("rerank", [0, 4])
@pytest.mark.parametrize("metric", METRICS)
def test_an_empty_corpus_has_gradients_of_zero(device, metric, rerank):
    q, rows = (torch.ones(n, 3, device=device, requires_grad=True) for n in (2, 0))

    def total(q, rows):
        return prequal.cosine_topk(q, rows, 4, metric=metric, rerank=rerank)[0].sum()

    made = torch.autograd.grad(total(q, rows), (q, rows))
    made += torch.func.grad(total, (0, 1))(q.detach(), rows.detach())
    scores, _ = prequal.topk_products(q, rows, 4, None, metric)
    made += torch.autograd.grad(scores.sum(), (q, rows))
    for grad, x in zip(made, (q, rows) * 3, strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


SIZES = ((4, 40, 8), (5, 77, 12), (31, 9, 7), (130, 20_001, 5), (9, 700, 16))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("metric", "known"), [("cosine", False), ("cosine", True), ("dot", False), ("l2", True)])
@pytest.mark.parametrize(("budget", "rerank"), [(None, 0), (5000, 0), (None, 3)])
def test_it_is_compiled_once_for_every_size(device, budget, rerank, metric, known, asks):
    """Of one pass and of tiles, whatever their number."""

    def call(q, rows, norms):
        named = {"corpus_norms": norms, "max_workspace_bytes": budget, "rerank": rerank}
        return prequal.cosine_topk(q, rows, 5, metric=metric, **named)

    def sizes():
        for n, m, width in SIZES[:3] if budget else SIZES:
            q, rows = normals(n, width, torch.float32, device), normals(m, width, torch.float32, device, 5)
            norms = torch.linalg.vector_norm(rows, dim=1) if known else None
            yield q.requires_grad_(asks), rows.requires_grad_(asks), norms

    is_compiled_once(call, sizes())


def test_a_compiled_search_is_mapped_over_a_batch(device):
    q, rows = normals(3, 8, torch.float32, device), normals(60, 8, torch.float32, device, 5)

    def each(q):
        return torch.vmap(lambda x: prequal.cosine_topk(x[None], rows, 5))(q)

    torch.compiler.reset()
    alike(torch.compile(each, fullgraph=True, backend="aot_eager")(q), each(q))


@pytest.mark.parametrize("corpus", [60, 77])  # whole words of scores, and not
@pytest.mark.parametrize("budget", [None, 300, 2**24])
def test_it_compiles_without_a_graph_break(device, budget, corpus):
    q, rows = normals(3, 8, torch.float32, device), normals(corpus, 8, torch.float32, device, 5)

    def call(q, rows):
        return prequal.cosine_topk(q, rows, 5, metric="l2", max_workspace_bytes=budget)

    torch.compiler.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, rows)
    for a, b in zip(got, call(q, rows), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_changes_nothing(device):
    q, rows = normals(3, 8, torch.float32, device), normals(60, 8, torch.float32, device, 5)
    want = prequal.cosine_topk(q, rows, 5, rerank=2)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = prequal.cosine_topk(q, rows, 5, rerank=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"queries": [1.0]}, TypeError, r"queries: expected a torch.Tensor, got list"),
        ({"queries": torch.ones(2, 3, dtype=torch.int64)}, TypeError, r"queries: expected float16, .* got int64"),
        ({"queries": torch.ones(3)}, ValueError, r"queries: expected shape \[Q, D\], got \[3\]"),
        ({"corpus": torch.ones(4, 2)}, ValueError, r"corpus: expected shape \[C, 3\], got \[4, 2\]"),
        ({"corpus": torch.ones(4, 3).half()}, TypeError, r"corpus: expected float32 like queries, got float16"),
        ({"k": 0}, ValueError, r"k: expected 1 to 128, got 0"),
        ({"k": 129}, ValueError, r"k: expected 1 to 128, got 129"),
        ({"k": 2.0}, TypeError, r"k: expected an int, got float"),
        ({"metric": "l1"}, ValueError, r"metric: expected 'dot', 'cosine' or 'l2', got 'l1'"),
        ({"metric": 2}, TypeError, r"metric: expected a str, got int"),
        ({"rerank": -1}, ValueError, r"rerank: expected 0 to 128, got -1"),
        ({"first_index": -1}, ValueError, r"first_index: expected 0 to"),
        ({"max_workspace_bytes": 0}, ValueError, r"max_workspace_bytes: expected 1 to"),
        ({"corpus_norms": torch.ones(3)}, ValueError, r"corpus_norms: expected shape \[4\], got \[3\]"),
        ({"corpus_norms": torch.ones(4).half()}, TypeError, r"corpus_norms: expected float32 for float32, got float16"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(change, error, match):
    call = {"queries": torch.ones(2, 3), "corpus": torch.ones(4, 3), "k": 2} | change
    with pytest.raises(error, match=match):
        prequal.cosine_topk(**call)


# ---- the index -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
def test_an_index_answers_as_the_call_with_its_norms(device, metric):
    q, rows = of_norm_five(3, torch.bfloat16, device), of_norm_five(80, torch.bfloat16, device, 5)
    index = prequal.CorpusIndex(rows, metric=metric)
    want = prequal.cosine_topk(q, rows, 7, metric=metric, corpus_norms=index.norms)
    for made in (index, copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        got = made.topk(q, 7)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert repr(index) == f"CorpusIndex([80, 4] bfloat16 on {rows.device}, {metric})"


def test_an_index_notices_that_its_corpus_was_written(device):
    rows = normals(20, 4, torch.float32, device)
    index = prequal.CorpusIndex(rows)
    index.topk(rows[:2], 3)
    rows[3] *= 2
    with pytest.raises(prequal.StaleIndexError, match="corpus: expected what the index was built of"):
        index.topk(rows[:2], 3)
    index.rebuild()
    assert torch.equal(index.topk(rows, 1)[1], prequal.cosine_topk(rows, rows, 1)[1])


def test_the_memory_of_the_corpus_is_kept_until_a_rebuild():
    """What `.data =` takes away would be handed out again, and another corpus at the same address pass for the old."""
    array = np.ones((20, 4), np.float32)
    kept = weakref.ref(array)
    corpus = torch.from_numpy(array)
    del array
    index = prequal.CorpusIndex(corpus)
    corpus.data = torch.zeros(20, 4)
    assert kept() is not None
    index.rebuild()
    assert kept() is None


def test_an_index_of_what_is_no_corpus(device):
    with pytest.raises(TypeError, match=r"corpus: expected a torch.Tensor, got list"):
        prequal.CorpusIndex([1.0])
    with pytest.raises(ValueError, match=r"corpus: expected shape \[C, D\], got \[3\]"):
        prequal.CorpusIndex(torch.ones(3, device=device))
    with pytest.raises(ValueError, match="metric: expected"):
        prequal.CorpusIndex(torch.ones(3, 2, device=device), metric="l1")


# ---- shards ----------------------------------------------------------------------------------------------------------


def as_rank(rank: int, file: str, sizes: list[int]) -> None:
    """A process of its own."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(sizes))
    cpu, group = torch.device("cpu"), dist.group.WORLD
    q, rows = integers(5, 6, torch.float32, cpu), integers(sum(sizes), 6, torch.float32, cpu, 3)
    first = sum(sizes[:rank])
    mine = rows[first : first + sizes[rank]]
    for metric in METRICS:
        for k, rerank in ((1, 0), (10, 0), (128, 0), (10, 7)):
            want = prequal.cosine_topk(q, rows, k, metric=metric, rerank=rerank)
            for given in (None, first):
                got = prequal.cosine_topk(
                    q, mine, k, metric=metric, rerank=rerank, process_group=group, first_index=given
                )
                assert torch.equal(got[0], want[0])
                assert torch.equal(got[1], want[1])
        index = prequal.CorpusIndex(mine, metric=metric)
        assert torch.equal(index.topk(q, 9, process_group=group)[1], prequal.cosine_topk(q, rows, 9, metric=metric)[1])
    with pytest.raises(ValueError, match="process_group: expected tensors without a gradient"):
        prequal.cosine_topk(q.clone().requires_grad_(), mine, 2, process_group=group)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [[40, 40, 40], [70, 0, 13]])
def test_shards_of_three_ranks_are_the_whole(sizes, all_ranks):
    all_ranks(sizes)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(("queries", "corpus", "width"), [(1, 300_001, 64), (100, 50_000, 96), (1500, 9001, 64)])
def test_the_kernel_serves_the_search(cuda, queries, corpus, width, dtype, metric):
    q, rows = integers(queries, width, dtype, cuda, most=1), integers(corpus, width, dtype, cuda, 3, most=1)
    scores, idx = prequal.cosine_topk(q, rows, 100, metric=metric)
    stats = prequal.stats()
    assert {"topk_rows_", "topk_products"} & stats.keys()
    assert all(stats[name][str(cuda)]["reference"] == {} for name in stats)
    with prequal.reference("topk_rows_", "topk_products", "row_norms"):
        want = prequal.cosine_topk(q, rows, 100, metric=metric)
    assert torch.equal(idx, want[1])
    assert torch.equal(scores, want[0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_search_waits_for_nothing_and_is_captured(cuda):
    q, rows = normals(4, 64, torch.bfloat16, cuda), normals(50_000, 64, torch.bfloat16, cuda, 3)
    prequal.cosine_topk(q, rows, 10, max_workspace_bytes=2**18)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prequal.cosine_topk(q, rows, 10, max_workspace_bytes=2**18)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = prequal.cosine_topk(q, rows, 10, max_workspace_bytes=2**18)
    q.copy_(q.flip(0))
    graph.replay()
    want = prequal.cosine_topk(q, rows, 10, max_workspace_bytes=2**18)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "corpus", "k"), [(1, 1_000_000, 128), (16, 500_000, 128), (256, 500_000, 10)])
def test_a_search_takes_less_than_a_tenth_of_the_memory_of_all_scores(cuda, queries, corpus, k):
    q, rows = normals(queries, 64, torch.bfloat16, cuda), normals(corpus, 64, torch.bfloat16, cuda, 3)
    prequal.cosine_topk(q, rows, k)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    prequal.cosine_topk(q, rows, k)
    torch.cuda.synchronize()
    # what was asked for: what the allocator gives is more by up to a block that was free, of another test
    asked = torch.cuda.memory_stats()
    most = asked["requested_bytes.all.peak"] - asked["requested_bytes.all.current"]
    assert 0 < most < queries * corpus * q.element_size() / 10


@pytest.mark.gpu
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("queries", "corpus"), [(1, 100_003), (20, 40_000), (100, 70_001)])
def test_one_pass_and_tiles_are_as_good(cuda, queries, corpus, metric):
    q, rows = normals(queries, 96, torch.bfloat16, cuda), normals(corpus, 96, torch.bfloat16, cuda, 3)
    for budget in (None, 2**24):
        is_as_good(prequal.cosine_topk(q, rows, 60, metric=metric, max_workspace_bytes=budget), q, rows, 60, metric)


if __name__ == "__main__":
    as_rank(int(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("rerank", [0, 5])
def test_scores_are_the_same_in_the_same_order_where_a_gradient_is_needed(device, metric, rerank):
    q, rows = (normals(n, 64, torch.float32, device, seed) + 50 for n, seed in ((9, 0), (300, 1)))
    want = prequal.cosine_topk(q, rows, 12, metric=metric, rerank=rerank)
    got = prequal.cosine_topk(q.requires_grad_(), rows, 12, metric=metric, rerank=rerank)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got[0].diff(dim=1).le(0).all()


def test_a_norm_that_float32_cannot_hold_is_zero_to_the_exact_scores_too(device):
    q, rows = torch.full((1, 4), 1e-41, device=device), torch.ones(5, 4, device=device)
    assert prequal.cosine_topk(q, rows, 3, rerank=2)[0].eq(0).all()


def test_the_metric_of_an_index_cannot_be_changed(device):
    index = prequal.CorpusIndex(normals(9, 8, torch.float32, device))
    with pytest.raises(AttributeError):
        index.metric = "l2"


def test_a_group_that_is_none_is_an_error(device):
    x = normals(9, 8, torch.float32, device)
    with pytest.raises(TypeError, match=r"process_group: expected a torch\.distributed\.ProcessGroup, got int"):
        prequal.cosine_topk(x, x, 2, process_group=3)
    with pytest.raises(TypeError, match=r"process_group: expected a torch\.distributed\.ProcessGroup, got str"):
        prequal.CorpusIndex(x).topk(x, 2, process_group="world")


def test_autocast_does_not_reach_what_transforms_are_taken_of(device):
    q, rows = (normals(n, 300, torch.float32, device, seed) for n, seed in ((3, 0), (20, 1)))

    def scores(q):
        return prequal.cosine_topk(q, rows, 5)[0]

    def distances(q):
        return prequal.pairwise_distance(q, rows)

    for call in (scores, distances):
        want = call(q), torch.func.grad(lambda q: call(q).sum())(q)  # noqa: B023
        with torch.autocast(device.type, dtype=torch.bfloat16):
            got = torch.vmap(lambda x: call(x[None])[0])(q), torch.func.grad(lambda q: call(q).sum())(q)  # noqa: B023
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
