"""The arithmetic that kernels share with the host: row plans, the kNN tree, the walk over rows. No GPU, no CUDA."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
WARP, BLOCK, LOOP = range(3)


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("native") / "host_logic.so"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", *warnings]
    subprocess.run(
        [*command, f"-I{REPOSITORY / 'include'}", str(HERE / "host_logic.cpp"), "-o", str(library)], check=True
    )
    loaded = ctypes.CDLL(str(library))
    for name, result, arguments in (
        ("plan", None, [ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]),
        ("distance2", ctypes.c_float, [ctypes.c_void_p] * 2),
        ("bound2", ctypes.c_float, [ctypes.c_void_p] * 3),
        ("all_finite", ctypes.c_int, [ctypes.c_void_p]),
        ("rank_of", ctypes.c_uint32, [ctypes.c_float, ctypes.c_void_p]),
        ("key_of", ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]),
        ("even", ctypes.c_int, [*[ctypes.c_float] * 2, ctypes.c_int, ctypes.c_float, *[ctypes.c_void_p] * 3]),
        ("ranked_cell", ctypes.c_int, [ctypes.c_float, ctypes.c_void_p]),
        ("cells_along", ctypes.c_int, [ctypes.c_float] * 2),
        ("cells_for", ctypes.c_int, [ctypes.c_int64, ctypes.c_int]),
        ("ranked_cells_for", ctypes.c_int, [ctypes.c_int]),
        ("best", None, [ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 2]),
        ("sorted_bits", ctypes.c_int, [ctypes.c_int64]),
        ("levels", ctypes.c_int, [ctypes.c_int64, *[ctypes.c_void_p] * 4]),
        ("rows", ctypes.c_int, [ctypes.c_int, *[ctypes.c_void_p] * 3]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def pointer(array: np.ndarray) -> int:
    return array.ctypes.data


# ---- row plans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vec", [1, 4, 8])
def test_every_width_has_a_plan_that_covers_it(native, vec):
    widths = {*range(1, 4200), *(2**e + d for e in range(12, 19) for d in (-1, 0, 1)), 262144, 2**31 - 1}
    for width in sorted(widths):
        out = np.zeros(4, dtype=np.int32)
        native.plan(width, vec, pointer(out))
        kind, items, threads, rows = out.tolist()
        accesses = -(-width // vec)
        assert threads % 32 == 0
        assert 32 <= threads <= 1024
        if kind == WARP:
            assert items in (1, 2, 4)
            assert items * 32 >= accesses
            assert rows * 32 == threads
        elif kind == BLOCK:
            assert items in (2, 4)
            assert items * threads >= accesses
            assert items == 4 or threads <= 512  # the launch bound that block_rows is compiled with
            assert (threads - 32) * items < accesses or threads == 32  # no warp without work
            assert rows == 1
        else:
            assert (kind, rows) == (LOOP, 1)
            assert accesses > 4 * 1024


# ---- rows --------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_rows_reach_what_numpy_reaches_or_refuse(native, shape, data):
    base = np.arange(10_000, dtype=np.int64)
    strides = [data.draw(st.integers(1, 40)) for _ in shape[:-1]] + [data.draw(st.sampled_from([1, 1, 1, 2]))]
    view = np.lib.stride_tricks.as_strided(base, shape, [8 * s for s in strides])
    out = np.zeros(2, dtype=np.int64)
    sizes, steps = np.array(shape, dtype=np.int64), np.array(strides, dtype=np.int64)
    refused = native.rows(len(shape), pointer(sizes), pointer(steps), pointer(out))
    if refused == 1:
        assert shape[-1] > 1
        assert strides[-1] != 1
        return
    firsts = [int(view[where][0]) for where in itertools.product(*(range(n) for n in shape[:-1]))] if shape[-1] else []
    if refused == 2:
        assert len({b - a for a, b in itertools.pairwise(firsts)}) != 1 or len(firsts) < 2
        return
    count, stride = out.tolist()
    assert count == int(np.prod(shape[:-1]))
    if shape[-1]:
        assert firsts == [row * stride for row in range(count)]


# ---- the kNN tree ------------------------------------------------------------------------------------------------

wild = st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-4, 4).map(float))
point = st.tuples(wild, wild, wild)


@settings(max_examples=500, deadline=None)
@given(point, st.lists(point, min_size=1, max_size=8))
def test_no_point_of_a_box_is_nearer_than_the_bound_of_the_box(native, query, points):
    q, p = f32(*query), np.array(points, dtype=np.float32)
    lo, hi = p.min(0), p.max(0)
    bound = native.bound2(pointer(q), pointer(lo), pointer(hi))
    for row in p:
        row = np.ascontiguousarray(row)
        assert bound <= native.distance2(pointer(q), pointer(row))


@settings(max_examples=300, deadline=None)
@given(point, point)
def test_the_distance_has_the_bits_of_numpys_float32(native, a, b):
    x, y = f32(*a), f32(*b)
    with np.errstate(over="ignore", under="ignore"):
        d = x - y
        want = (d[0] * d[0] + d[1] * d[1]) + d[2] * d[2]
    assert np.float32(native.distance2(pointer(x), pointer(y))) == want


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_coordinate_makes_a_point_not_finite(native, bad):
    assert native.all_finite(pointer(f32(1, -0.0, 3e38)))
    for axis in range(3):
        p = f32(0, 0, 0)
        p[axis] = bad
        assert not native.all_finite(pointer(p))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60), st.sampled_from([1, 4, 8, 32]), st.data())
def test_the_best_are_the_first_of_a_sort_by_distance_then_index(native, offers, capacity, data):
    k = data.draw(st.integers(1, capacity))
    distance = np.array([np.inf if far else near for near, far in offers], dtype=np.float32)
    index = np.array(data.draw(st.permutations(range(len(offers)))), dtype=np.int32)
    got_d, got_i = np.zeros(k, dtype=np.float32), np.zeros(k, dtype=np.int32)
    native.best(capacity, pointer(distance), pointer(index), len(offers), k, pointer(got_d), pointer(got_i))
    order = np.lexsort((index, distance))[:k]
    nobody = np.iinfo(np.int32).max
    assert got_d.tolist() == [*distance[order].tolist(), *[np.inf] * (k - len(order))]
    assert got_i.tolist() == [*index[order].tolist(), *[nobody] * (k - len(order))]


def test_a_rank_is_the_count_of_the_sample_at_or_below(native):
    n = native.knots()
    rng = np.random.default_rng(0)
    sample = np.sort(np.concatenate([rng.normal(size=n - 100), np.full(100, 0.25)])).astype(np.float32)
    for value in [*rng.normal(size=200), 0.25, sample[0], sample[-1], -1e30, 1e30]:
        value = np.float32(value)
        assert native.rank_of(value, pointer(sample)) == min(np.searchsorted(sample, value, "right"), n - 1)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_key_interleaves_the_bits_of_the_ranks(native, dims):
    n = native.knots()
    sample = np.tile(np.arange(n, dtype=np.float32), 3)
    for ranks in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1023, 1023, 1023), (5, 300, 1000)]:
        p = f32(*(rank - 0.5 for rank in ranks))
        want = sum(
            ((rank >> bit) & 1) << (dims * bit + axis) for axis, rank in enumerate(ranks[:dims]) for bit in range(10)
        )
        assert native.key_of(pointer(p), dims, pointer(sample)) == want << (10 if dims == 2 else 0)


@pytest.mark.parametrize("points", [0, 1, 31, 32, 33, 1024, 1025, 32769, 10**6, 0x7FFFFFF0])
def test_every_box_has_its_place_in_a_group_and_the_last_level_is_one(native, points):
    boxes, groups, first = (np.zeros(6, dtype=np.int32) for _ in range(3))
    total = np.zeros(1, dtype=np.int32)
    count = native.levels(points, pointer(boxes), pointer(groups), pointer(first), pointer(total))
    if points == 0:
        assert (count, total[0]) == (0, 0)
        return
    assert boxes[0] == -(-points // 32)
    assert [g == -(-b // 32) for b, g in zip(boxes[:count], groups[:count], strict=True)] == [True] * count
    assert boxes[1:count].tolist() == groups[: count - 1].tolist()
    assert groups[count - 1] == 1
    assert first[:count].tolist() == [int(groups[:level].sum()) for level in range(count)]
    assert total[0] == groups[:count].sum()


def test_enough_bits_are_sorted_for_a_cell_to_hold_a_leaf_or_less(native):
    assert [native.sorted_bits(n) for n in (0, 1, 256, 257, 65536, 65537, 2**24, 2**24 + 1, 2**31)] == [
        *(8, 8, 8, 16, 16, 24, 24, 30, 30)
    ]


# ---- the kNN grid ------------------------------------------------------------------------------------------------


def even(native, lo, hi, wanted, x):
    low, high, cells = np.zeros(192, dtype=np.float32), np.zeros(192, dtype=np.float32), np.zeros(1, dtype=np.int32)
    cell = native.even(lo, hi, wanted, x, pointer(low), pointer(high), pointer(cells))
    return cell, low[: cells[0]], high[: cells[0]]


@settings(max_examples=1000, deadline=None)
@given(wild, wild, st.integers(1, 192), st.floats(0, 1), st.integers(-3, 3))
def test_a_point_is_within_the_edges_of_its_cell(native, a, b, wanted, where, ulps):
    lo, hi = np.float32(min(a, b)), np.float32(max(a, b))
    with np.errstate(over="ignore"):
        x = np.float32(lo + np.float32(where) * (hi - lo))
        for _ in range(abs(ulps)):
            x = np.nextafter(x, np.float32(np.inf if ulps > 0 else -np.inf))
    x = np.clip(x if np.isfinite(x) else lo, lo, hi)
    cell, low, high = even(native, lo, hi, wanted, x)
    assert 0 <= cell < len(low)
    assert low[cell] <= x <= high[cell]
    assert (np.diff(low) >= 0).all()
    assert (np.diff(high) >= 0).all()


@settings(max_examples=300, deadline=None)
@given(wild, wild, st.integers(1, 192), st.lists(st.floats(-0.5, 1.5), min_size=2, max_size=8))
def test_cells_never_fall_as_the_coordinate_rises(native, a, b, wanted, places):
    lo, hi = np.float32(min(a, b)), np.float32(max(a, b))
    with np.errstate(over="ignore", invalid="ignore"):
        xs = np.array([lo + np.float32(place) * (hi - lo) for place in sorted(places)], dtype=np.float32)
    xs = xs[np.isfinite(xs)]
    cells = [even(native, lo, hi, wanted, x)[0] for x in xs]
    assert cells == sorted(cells)


@pytest.mark.parametrize("cells", [1, 2, 21, 32])
def test_a_ranked_cell_is_the_count_of_knots_at_or_below(native, cells):
    rng = np.random.default_rng(0)
    low = np.full(32, np.inf, dtype=np.float32)
    low[:cells] = np.sort(np.round(rng.normal(size=cells), 1))
    for x in [*rng.normal(size=200), *low[:cells], -1e30, 1e30]:
        x = np.float32(x)
        assert native.ranked_cell(x, pointer(low)) == max(np.searchsorted(low[:cells], x, "right") - 1, 0)


def test_the_cells_of_a_grid_fit_its_table(native):
    for points in (1, 2, 100, 8000, 8192):
        for k in (1, 4, 8):
            cells = native.cells_for(points, k)
            assert 64 <= cells <= 32768
            along = native.ranked_cells_for(cells)
            assert along**3 <= cells
            assert along == 32 or (along + 1) ** 3 > cells
    assert native.cells_along(1.0, 1.0) == 1
    assert native.cells_along(1.0, 0.25) == 4
    assert native.cells_along(0.0, 0.25) == 1
    assert native.cells_along(float("inf"), 0.25) == 1
    assert native.cells_along(1e20, 1e-20) == 192
