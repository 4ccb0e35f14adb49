"""The arithmetic that kernels share with the host: row plans, the kNN tree, the walk over rows. No GPU, no CUDA."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
import shutil
import subprocess
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prequal
from prequal import constraints
from prequal.bench.shapes import knn as benchmarked
from prequal.ops._clouds import KINDS, cloud
from prequal.retrieval import chunks

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
WARP, BLOCK, LOOP = range(3)
TOLD_APART = [name for name, *_ in benchmarked.KINDS if name not in ("all scales", "centre of a sphere")]


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
        ("plan", None, [ctypes.c_int64, *[ctypes.c_int] * 3, ctypes.c_void_p]),
        ("plan_stream", None, [ctypes.c_int64, *[ctypes.c_int] * 9, ctypes.c_void_p]),
        ("plan_part", None, [ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]),
        ("widest_of_parts", ctypes.c_int, []),
        ("streams", ctypes.c_int64, [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]),
        ("teams", ctypes.c_int64, [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]),
        ("blocks_of", ctypes.c_int, [ctypes.c_int] * 2),
        ("plan_rope", None, [*[ctypes.c_int] * 4, ctypes.c_void_p]),
        ("plan_heads", None, [*[ctypes.c_int] * 4, ctypes.c_void_p]),
        ("plan_search", None, [*[ctypes.c_int64] * 3, *[ctypes.c_int] * 2, ctypes.c_void_p]),
        ("pieces_of", ctypes.c_int, [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2]),
        ("first_state_of", ctypes.c_int, [ctypes.c_int] * 4),
        ("most_states_of", ctypes.c_int, [ctypes.c_int] * 3),
        ("wrong_quotient", ctypes.c_int, [ctypes.c_int]),
        ("move_row", ctypes.c_int, [*[ctypes.c_void_p] * 3, *[ctypes.c_int] * 2]),
        ("apart_alone", ctypes.c_int, [ctypes.c_int, *[ctypes.c_void_p] * 2]),
        ("apart", ctypes.c_int, [ctypes.c_int64, ctypes.c_int, *[ctypes.c_void_p] * 2] * 2),
        ("distance2", ctypes.c_float, [ctypes.c_void_p] * 2),
        ("bound2", ctypes.c_float, [ctypes.c_void_p] * 3),
        ("all_finite", ctypes.c_int, [ctypes.c_void_p]),
        ("rank_of", ctypes.c_uint32, [ctypes.c_float, ctypes.c_void_p]),
        ("key_of", ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]),
        ("even", ctypes.c_int, [*[ctypes.c_float] * 2, ctypes.c_int, ctypes.c_float, *[ctypes.c_void_p] * 3]),
        ("cells_along", ctypes.c_int, [ctypes.c_float] * 2),
        ("cells_for", ctypes.c_int, [ctypes.c_int64]),
        (
            "grid_search",
            ctypes.c_int,
            [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_int]
            + [ctypes.c_void_p] * 5,
        ),
        ("lanes_for", ctypes.c_int, [ctypes.c_int]),
        ("patience_for", ctypes.c_int, [ctypes.c_int]),
        ("best", None, [ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 2]),
        ("orders", None, [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2]),
        ("sorted_bits", ctypes.c_int, [ctypes.c_int64]),
        ("levels", ctypes.c_int, [ctypes.c_int64, *[ctypes.c_void_p] * 4]),
        ("rows", ctypes.c_int, [ctypes.c_int, *[ctypes.c_void_p] * 3]),
        (
            "quantize",
            None,
            [ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p],
        ),
        ("wrong_short_quotients", ctypes.c_int64, [ctypes.c_int, ctypes.c_void_p]),
        ("convert", None, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]),
        ("convert_back", None, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]),
        (
            "scales",
            None,
            [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int, ctypes.c_void_p],
        ),
        ("wrong_quotients", ctypes.c_int64, [ctypes.c_int, ctypes.c_void_p]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def pointer(array: np.ndarray) -> int:
    return array.ctypes.data


# ---- row plans ---------------------------------------------------------------------------------------------------


WIDTHS = sorted({*range(1, 4200), *(2**e + d for e in range(12, 20) for d in (-1, 0, 1)), 262144, 2**30})


@pytest.mark.parametrize("vec", [4, 8])
@pytest.mark.parametrize(("two", "four"), [(512, 2048), (1024, 2048), (0, 0)])
def test_every_width_has_a_plan_that_covers_it(native, vec, two, four):
    for width in WIDTHS:
        out = np.zeros(4, dtype=np.int32)
        native.plan(width, vec, two, four, pointer(out))
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
            assert threads <= 512  # the launch bounds that held_rows is compiled with
            assert (threads - 32) * items < accesses  # no warp without work
            assert accesses <= (two if items == 2 else four)
            assert rows == 1
        else:
            assert (kind, rows) == (LOOP, 1)
            assert accesses > max(four, 128)


@pytest.mark.parametrize("vec", [4, 8])
def test_a_narrow_row_has_a_lane_for_each_access_in_one_warp_and_at_most_half_of_them_idle(native, vec):
    for width in range(1, native.widest_of_parts() * vec + 1):
        out = np.zeros(4, dtype=np.int32)
        native.plan_part(width, vec, pointer(out))
        kind, items, threads, rows = out.tolist()
        assert (kind, items, threads) == (WARP, 1, 128)
        lanes, accesses = threads // rows, -(-width // vec)
        assert lanes in (8, 16)
        assert lanes >= accesses
        assert lanes == 8 or lanes < 2 * accesses


# (shared memory of a multiprocessor, of a block, the widest cluster): sm_80, sm_86 and sm_89, sm_90, sm_90 without 16
DEVICES = [(167936, 166912, 1), (102400, 101376, 1), (233472, 232448, 16), (233472, 232448, 8)]


@pytest.mark.parametrize("vec", [4, 8])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    ("items", "inputs", "most", "registers"), [(2, 1, 1024, 64), (2, 3, 512, 128), (4, 1, 512, 128)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_streamed_row_has_room_for_all_of_it_or_no_plan(native, vec, ragged, items, inputs, most, registers, device):
    shared_sm, shared_block, largest = device
    for width in WIDTHS:
        out = np.zeros(5, dtype=np.int32)
        native.plan_stream(
            width, vec, ragged, items, inputs, most, largest, shared_sm, shared_block, registers, pointer(out)
        )
        blocks, threads, stages, shared, per_sm = out.tolist()
        words = -(-width // vec) + ragged  # a row that begins within a word has one more
        stage = inputs * (threads * items + 1) * 16
        if blocks == 0:
            # not even one block with three rows of its slice
            own = -(-words // largest)
            least = -(-own // (items * 32)) * 32
            assert least > most or 3 * inputs * (least * items + 1) * 16 > shared_block - 4096
            continue
        assert threads % 32 == 0
        assert 32 <= threads <= most
        assert blocks in (1, 2, 4, 8, 16)
        assert blocks <= largest
        assert blocks * threads * items >= words
        assert (threads - 32) * blocks * items < words  # no warp of every block without work
        assert stages in (3, 4)
        assert shared == stages * stage
        assert shared <= shared_block - 3072  # static variables
        assert 1 <= per_sm <= native.blocks_of(registers, threads)
        assert per_sm * (shared + 4096) <= shared_sm


@pytest.mark.parametrize("vec", [1, 4, 8])
def test_rows_of_one_team_begin_alike(native, vec):
    for rows in (1, 2, 7, 8, 9, 131, 132, 133, 16384, 2**31):
        for resident in (8, 30, 132, 396):
            teams = native.streams(rows, resident, vec)
            assert 1 <= teams <= min(rows, resident)
            assert teams == rows or teams % vec == 0


@pytest.mark.parametrize("vec", [1, 8])
def test_teams_are_no_more_than_rows_and_none_is_without(native, vec):
    for rows in (1, 2, 7, 9, 15, 16, 17, 129, 1000, 16384, 2**31):
        for resident in (8, 132, 396, 10_000):
            teams = native.teams(rows, resident, vec)
            assert 1 <= teams <= min(rows, resident)
            assert teams == rows or teams % vec == 0
    assert native.teams(16384, 396, 1) == 396
    assert [native.teams(rows, 396, 1) for rows in (1, 63, 64, 1000, 1024, 1025, 2048)] == [1, 63, 64, 64, 64, 65, 128]


def test_a_block_fits_as_often_as_its_registers_do(native):
    assert native.blocks_of(80, 256) == 3
    assert native.blocks_of(64, 256) == 4
    assert native.blocks_of(128, 512) == 1
    assert native.blocks_of(255, 512) == 1
    assert native.blocks_of(32, 32) == 16


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("vec", [1, 2, 4, 8])
def test_every_head_has_a_place_in_a_block(native, interleaved, vec):
    if interleaved and vec == 1:
        return  # a pair is one access or more
    for rotary in (0, 2, 16, 64, 96, 128, 256, 512, 2048):
        if rotary % (vec if interleaved else 2 * vec):
            continue
        for heads in (1, 2, 5, 10, 40, 72, 144, 4096):
            out = np.zeros(3, dtype=np.int32)
            native.plan_rope(heads, rotary, vec, interleaved, pointer(out))
            places, at_once, threads = out.tolist()
            assert 32 <= threads <= 1024
            assert threads % 32 == 0
            if rotary:
                assert places * vec * (1 if interleaved else 2) == rotary
                assert 1 <= at_once <= heads
                assert places * at_once <= threads


def test_lanes_cover_a_head_and_groups_cover_a_token_in_whole_warps(native):
    for vec, items, at_once in ((8, 1, 4), (8, 2, 2), (4, 1, 4), (4, 2, 2), (8, 1, 1)):
        for dim in range(vec * items, min(256, 32 * vec * items) + 1, vec * items):
            for heads in (1, 2, 5, 10, 32, 48, 96, 390, 196_608):
                out = np.zeros(5, dtype=np.int32)
                native.plan_heads(dim, vec, items, heads, pointer(out))
                lanes, in_block, chunks, tokens, threads = out.tolist()
                assert lanes in (1, 2, 4, 8, 16, 32), "a group of lanes lies in one warp"
                assert lanes * vec * items >= dim > (lanes // 2) * vec * items
                assert chunks * in_block >= heads > (chunks - 1) * in_block, "no block without a head"
                assert chunks * in_block - heads < chunks, "evenly"
                assert tokens == 1 or chunks == 1
                assert lanes * in_block * tokens <= threads <= 256
                assert threads % 32 == 0
                assert tokens * at_once * dim // 2 <= 4096, "angles of a block, of which quotient() knows the token"


def test_a_division_by_a_multiplication_is_exact_where_it_is_used(native):
    assert [native.wrong_quotient(divisor) for divisor in range(1, 257)] == [-1] * 256


# ---- ragged rows ---------------------------------------------------------------------------------------------------


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 600), st.integers(0, 15), st.integers(0, 15), st.sampled_from([2, 4]))
def test_a_ragged_row_is_moved_whole_each_element_once_and_nothing_past_it_is_read(native, width, x, y, itemsize):
    rng = np.random.default_rng(width)
    source, target = (np.zeros(width * itemsize + 128, dtype=np.uint8) for _ in range(2))
    starts = []
    for memory, place in ((source, x), (target, y)):
        first = -pointer(memory) % 16 + 32 + place * itemsize % 16
        starts.append(first)
    size = width * itemsize
    source[starts[0] : starts[0] + size] = rng.integers(0, 256, size)
    writes = np.zeros(width + 1, dtype=np.uint8)
    places = [pointer(memory) + first for memory, first in zip((source, target), starts, strict=True)]
    assert native.move_row(*places, pointer(writes), width, itemsize) == 0
    assert writes[:width].tolist() == [1] * width
    assert writes[width] == 0
    assert np.array_equal(target[starts[1] : starts[1] + size], source[starts[0] : starts[0] + size])
    assert not target[: starts[1]].any()
    assert not target[starts[1] + size :].any()


# ---- memory that is shared ---------------------------------------------------------------------------------------


def elements(first, shape, strides):
    """The addresses of a strided tensor's elements, each as often as it is reached."""
    found = np.array([first], dtype=np.int64)
    for n, step in zip(shape, strides, strict=True):
        found = (found[:, None] + np.arange(n) * step).reshape(-1)
    return found


layout = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=4)


@settings(max_examples=600, deadline=None)
@given(layout)
def test_a_tensor_is_apart_where_it_reaches_no_element_twice(native, dims):
    shape, strides = (np.array(column, dtype=np.int64) for column in zip(*dims, strict=True))
    found = elements(0, shape, strides)
    apart = len(set(found.tolist())) == len(found)
    assert native.apart_alone(len(dims), pointer(shape), pointer(strides)) == apart
    view = torch.as_strided(torch.empty(1000), shape.tolist(), strides.tolist())
    assert constraints._is_apart(view) == apart


@settings(max_examples=1500, deadline=None)
@given(layout, layout, st.integers(0, 60), st.booleans())
def test_tensors_are_apart_where_they_share_no_element(native, a, b, second, same_strides):
    if same_strides:
        b = [(n, a[i][1] if i < len(a) else step) for i, (n, step) in enumerate(b)]
    (a_shape, a_strides), (b_shape, b_strides) = (
        [np.array(column, dtype=np.int64) for column in zip(*dims, strict=True)] for dims in (a, b)
    )
    first = 1024
    of_a = (2 * first, len(a), pointer(a_shape), pointer(a_strides))
    of_b = (2 * (first + second), len(b), pointer(b_shape), pointer(b_strides))
    apart = not set(elements(first, a_shape, a_strides)) & set(elements(first + second, b_shape, b_strides))
    memory = torch.empty(1000)
    views = memory.as_strided([*a_shape], [*a_strides]), memory.as_strided([*b_shape], [*b_strides], second)
    for (one, other), (x, y) in (((of_a, of_b), views), ((of_b, of_a), views[::-1])):
        assert native.apart(*one, *other) == apart
        assert constraints._are_apart(x, y) == apart


def test_elements_of_two_sizes_share_bytes(native):
    memory = torch.zeros(8, dtype=torch.int32)
    halves = memory.view(torch.int16)
    assert constraints._are_apart(memory[::2], halves.view(8, 2)[1::2])
    assert not constraints._are_apart(memory[::2], halves[1::4])
    assert not constraints._are_apart(halves[1::4], memory[::2])


def test_what_has_no_memory_shares_none():
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return NotImplemented

    with FakeTensorMode():
        fake = torch.empty(3, 4)
    for x in (fake, torch.empty(3, 4, device="meta"), Wrapper(torch.empty(3, 4)), torch.empty(0, 4)):
        assert constraints._are_apart(x, x)
        assert constraints._is_apart(x)


def test_a_search_that_would_take_too_long_counts_as_memory_that_is_shared(monkeypatch):
    walks = [(10, 5), (7, 5), (4, 5)]
    assert not constraints._reach(13, walks)
    monkeypatch.setattr(constraints, "PATIENCE", 2)
    assert constraints._reach(13, walks)


@pytest.mark.parametrize(
    ("q", "k"),
    [
        (((6, 4, 64), (512, 64, 1), 0), ((6, 2, 64), (512, 64, 1), 256)),  # packed [tokens, heads, D]
        (((2, 6, 4, 64), (3072, 512, 64, 1), 0), ((2, 6, 2, 64), (3072, 512, 64, 1), 256)),
        (((6, 80), (161, 1), 0), ((6, 80), (161, 1), 81)),
        (((6, 80), (161, 1), 81), ((6, 80), (161, 1), 0)),
    ],
)
def test_slices_of_a_packed_tensor_are_known_to_be_apart(native, q, k):
    sides = []
    for shape, strides, first in (q, k):
        sides.append([np.array(shape, dtype=np.int64), np.array(strides, dtype=np.int64), 1024 + first])
    (qs, qt, q0), (ks, kt, k0) = sides
    assert native.apart(2 * q0, len(qs), pointer(qs), pointer(qt), 2 * k0, len(ks), pointer(ks), pointer(kt))
    assert not native.apart(2 * q0, len(qs), pointer(qs), pointer(qt), 2 * q0 + 2, len(qs), pointer(qs), pointer(qt))


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


def test_floats_have_integers_in_the_order_of_a_sort(native):
    """NaN of either sign above infinity, both zeros one, nothing at 0, which stands for no float; and the way back."""
    rng = np.random.default_rng(0)
    every = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    edges = f32(np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38)
    x = np.concatenate([every, edges, np.array([0xFFFFFFFF, 0x7F800001], dtype=np.uint32).view(np.float32)])
    order, back = np.zeros(len(x), dtype=np.uint32), np.zeros_like(x)
    native.orders(pointer(x), len(x), pointer(order), pointer(back))
    assert order.min() > 0
    np.testing.assert_array_equal(back, x)  # NaN where it was, either zero for the other
    by_order, by_value = np.argsort(order, kind="stable"), np.argsort(x, kind="stable")  # NumPy puts NaN last, too
    np.testing.assert_array_equal(by_order, by_value)


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


def test_the_cells_of_a_grid_fit_its_table(native):
    for points in (1, 2, 100, 8000, 8192):
        assert 64 <= native.cells_for(points) <= 32768
    assert native.cells_along(1.0, 1.0) == 1
    assert native.cells_along(1.0, 0.25) == 4
    assert native.cells_along(0.0, 0.25) == 1
    assert native.cells_along(float("inf"), 0.25) == 1
    assert native.cells_along(1e20, 1e-20) == 192


class Searched(NamedTuple):
    """What the grid's search found; idx -1 where there is nobody."""

    dist2: np.ndarray
    idx: np.ndarray
    looked: np.ndarray  # entries read a query, by its own search
    starts: np.ndarray  # likewise, of cells
    gave_up: np.ndarray
    crowded: int  # cells, or -1


def searched(native, queries, references, k, limit=np.inf, patience=-1):
    q, r = (np.ascontiguousarray(x, dtype=np.float32) for x in (queries, references))
    d, i = np.zeros((len(q), k), dtype=np.float32), np.zeros((len(q), k), dtype=np.int32)
    looked, starts, gave_up = (np.zeros(len(q), dtype=np.int32) for _ in range(3))
    out = (pointer(x) for x in (d, i, looked, starts, gave_up))
    crowded = native.grid_search(pointer(r), len(r), pointer(q), len(q), k, limit, patience, *out)
    nobody = i == np.iinfo(np.int32).max
    return Searched(np.where(nobody, np.inf, d), np.where(nobody, -1, i), looked, starts, gave_up.astype(bool), crowded)


def nearest(queries, references, k, limit=np.inf):
    """The same by comparing all pairs."""
    with np.errstate(all="ignore"):
        square = (queries[:, None] - references[None]) ** 2
        d = (square[..., 0] + square[..., 1]) + square[..., 2]
    out = ~np.isfinite(references).all(1)[None] | (d > np.float32(limit))
    order = np.lexsort((np.broadcast_to(np.arange(len(references)), d.shape), d, out), axis=1)[:, :k]
    out, d = np.take_along_axis(out, order, 1), np.take_along_axis(d, order, 1)
    pad = ((0, 0), (0, k - d.shape[1]))
    d, order = np.where(out, np.float32(np.inf), d), np.where(out, -1, order)
    return np.pad(d, pad, constant_values=np.inf), np.pad(order, pad, constant_values=-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("points", [1, 2, 63, 997, 8192])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_grid_finds_what_comparing_all_pairs_finds(native, kind, points, k):
    for dim in (2, 3):
        references = cloud("cpu", points, 2, kind, dim).numpy()
        near = references[:40] * np.float32(1 + 2**-20)
        queries = np.concatenate([cloud("cpu", 120, 1, kind, dim).numpy(), near, references[-20:] + np.float32(50)])
        queries = queries[np.isfinite(queries).all(1)]
        q, r = (np.pad(x, ((0, 0), (0, 3 - dim))) for x in (queries, references))
        middle = nearest(q, r, 1)[0][:, 0]
        middle = middle[np.isfinite(middle)]
        for limit in (np.inf, float(np.median(middle)) if len(middle) else 1.0):
            want_d, want_i = nearest(q, r, k, limit)
            for patience in (-1, 0, 30):  # the kernel's; and so little that most searches give up, at once or halfway
                got = searched(native, q, r, k, limit, patience)
                assert got.idx.tolist() == want_i.tolist()
                assert got.dist2.tolist() == want_d.tolist()


def directions(rng, n):
    x = rng.normal(size=(n, 3))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def over_decades(rng, n, low, high):
    """Around the origin, at distances of all scales alike."""
    return directions(rng, n) * 10 ** rng.uniform(low, high, (n, 1))


@pytest.mark.parametrize("k", [1, 8])
def test_no_cluster_outlier_or_line_makes_a_search_look_at_much_of_the_cloud(native, k):
    rng = np.random.default_rng(0)
    clustered = rng.random((20, 3))[np.arange(10_000) % 20] + 1e-3 * rng.normal(size=(10_000, 3))
    outlier = rng.random((10_000, 3))
    outlier[7] = 1e6
    line = rng.random((10_000, 1)) * np.array([1.0, 2.0, 3.0])
    for points in (clustered, outlier, line):
        got = searched(native, points[8000:], points[:8000], k)
        assert got.crowded > 0
        assert got.looked.mean() < 80
    even = rng.random((10_000, 3))
    got = searched(native, even[8000:], even[:8000], k)
    assert got.crowded == -1
    assert got.looked.mean() < (15 if k == 1 else 50)


@pytest.mark.parametrize("kind", [*TOLD_APART, "line", "two ends", "lattice", "plane x"])
@pytest.mark.parametrize("k", [1, 8])
def test_no_search_gives_up_where_a_grid_tells_the_points_apart(native, kind, k):
    if kind in ("line", "two ends", "lattice", "plane x"):
        queries, references = cloud("cpu", 4000, 1, kind), cloud("cpu", 8000, 2, kind)
    elif kind == "Igea scan" and benchmarked.scan() is None:
        pytest.skip("PREQUAL_TEST_DATA does not hold the scan")
    else:
        queries, references = benchmarked.cloud(kind, 20_000, 8000)
    got = searched(native, queries.numpy(), references.numpy(), k)
    assert not got.gave_up.any()
    assert got.looked.max() < native.patience_for(8000) / 4  # none is near it


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_search_gives_up_where_most_points_are_in_reach_and_is_exact(native, k):
    rng = np.random.default_rng(0)
    sphere, centre = directions(rng, 8000), 1e-3 * rng.normal(size=(300, 3))
    scales, round_one = over_decades(rng, 8300, -20, 20), 1.0 + over_decades(rng, 8300, -7, 0)
    for queries, references, least in (
        (centre, sphere, 1.0),
        (scales[8000:], scales[:8000], 0.9),
        (round_one[8000:], round_one[:8000], 0.6),
    ):
        q, r = queries.astype(np.float32), references.astype(np.float32)
        got = searched(native, q, r, k)
        assert got.gave_up.mean() >= least
        assert got.looked.max() <= native.patience_for(8000) + 1  # what says which grid its cell has
        assert got.starts.max() <= 2 * native.patience_for(8000) + 56  # two a row, and of the nearest 4 and 24 rows
        want_d, want_i = nearest(q, r, k)
        assert got.idx.tolist() == want_i.tolist()
        assert got.dist2.tolist() == want_d.tolist()


def test_samples_have_warps_of_which_all_some_and_no_queries_give_up(native):
    shares = set()
    for sample in prequal.knn.op.samples(torch.device("cpu")):
        q, r, k = sample.args
        if k > 8 or len(r) > 8192 or len(q) < 32 or q.shape[1] != 3 or q.dtype != torch.float32:
            continue
        gave_up = searched(native, q.numpy(), r.numpy(), k).gave_up[: len(q) // 32 * 32]
        shares |= {(k, native.lanes_for(int(n)) if n else 0) for n in gave_up.reshape(-1, 32).sum(1)}
    for k in (1, 3, 8):
        assert {(k, 0), (k, 1), (k, 2)} <= shares  # none gives up; more than half, a lane each; a third, two lanes each
    assert (2, 32) in shares  # one, by all lanes


def test_what_is_jumped_over_costs_no_patience(native):
    """Cells of one place each, and beside them searches that are long: over many cells, and in one."""
    rng = np.random.default_rng(0)
    places = np.repeat(rng.random((3, 3)), 1600, axis=0)
    sphere, decades = 5 + directions(rng, 1600), 9 + over_decades(rng, 1600, -9, 0)
    references = np.concatenate([places, sphere, decades]).astype(np.float32)
    queries = np.concatenate([places[::48], np.full((40, 3), 5.0), decades[:40]]).astype(np.float32)
    got = searched(native, queries, references, 3)
    assert not got.gave_up[:100].any()
    assert got.gave_up[100:140].all()
    assert got.gave_up[140:].sum() > 20
    assert got.looked.max() <= native.patience_for(len(references)) + 1  # what says which grid its cell has
    want_d, want_i = nearest(queries, references, 3)
    assert got.idx.tolist() == want_i.tolist()
    assert got.dist2.tolist() == want_d.tolist()


def test_a_warp_gives_each_query_as_many_lanes_as_there_are(native):
    for queries in range(1, 33):
        lanes = native.lanes_for(queries)
        assert lanes.bit_count() == 1
        assert lanes * queries <= 32 < 2 * lanes * queries


def test_of_equal_points_no_more_than_k_are_looked_at(native):
    same = np.full((8000, 3), 0.25, dtype=np.float32)
    got = searched(native, same[:5], same, 8)
    assert got.idx.tolist() == [list(range(8))] * 5
    assert got.dist2.max() == 0.0
    assert got.looked.max() <= 8 + 2  # and what says where the cell's grid is, and where the cell ends
    assert not got.gave_up.any()


# ---- FP8 -----------------------------------------------------------------------------------------------------------

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])


def every_half(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).float()


def dense_floats() -> torch.Tensor:
    """Every exponent and both signs: every mantissa of 11 bits with the last bits 0, 1 and all set; what lies about the
    middle of two FP8 numbers is among them."""
    high = torch.arange(2**20, dtype=torch.int64) << 12
    bits = torch.cat([high, high + 1, high + 0xFFF, high + 0x800])
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def torchs(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's conversion, saturating, with one NaN."""
    largest = torch.finfo(dtype).max
    value = value.clamp(-largest, largest)
    return value.masked_fill(value.isnan(), torch.nan).to(dtype).view(torch.uint8)


@formats
@pytest.mark.parametrize("kind", ["every half", "every bfloat16", "dense fp32"])
def test_conversion_to_fp8_has_the_bits_of_torchs(native, dtype, kind):
    value = {
        "every half": lambda: every_half(torch.float16),
        "every bfloat16": lambda: every_half(torch.bfloat16),
        "dense fp32": dense_floats,
    }[kind]()
    got = torch.empty(value.numel(), dtype=torch.uint8)
    native.convert(FORMATS.index(dtype), value.data_ptr(), value.numel(), got.data_ptr())
    assert torch.equal(got, torchs(value, dtype))


@formats
def test_conversion_from_fp8_has_the_values_of_torchs(native, dtype):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = torch.empty(256, dtype=torch.float32)
    native.convert_back(FORMATS.index(dtype), codes.data_ptr(), 256, got.data_ptr())
    want = codes.view(dtype).float()
    same = (got == want) & (got.signbit() == want.signbit())
    assert (same | (got.isnan() & want.isnan())).all()


@formats
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
def test_every_half_divided_by_scales_of_every_size_has_the_bits_of_torchs(native, dtype, half):
    value = every_half(half)
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp2(torch.empty(60).uniform_(-149, 127, generator=generator)).tolist()
    # the edges of the fast division, powers of two, what a group of amax 1 has, and what is no scale
    edges = [2.0**-84, 2.0**84, 2.0**-126, 1.0, 1 / 448, 1 / 57344, 3.0, -0.7, 0.0, -0.0, torch.inf, torch.nan, 1e38]
    for scale in (*edges, *scales):
        by = torch.full_like(value, scale)
        got = torch.empty(value.numel(), dtype=torch.uint8)
        for halves in (False, True):
            native.quantize(
                FORMATS.index(dtype), halves, value.data_ptr(), by.data_ptr(), value.numel(), got.data_ptr()
            )
            assert torch.equal(got, torchs(value / by, dtype)), (scale, halves)


@formats
def test_quotients_at_the_middle_of_two_fp8_numbers_have_the_bits_of_torchs(native, dtype):
    """x = (middle) * scale, rounded to fp32 or a neighbour: what one wrong last bit of the quotient would show in."""
    codes = torch.arange(1, 127 if dtype == torch.float8_e4m3fn else 124, dtype=torch.int32).to(torch.uint8)
    numbers = codes.view(dtype).float()
    middle = torch.cat([(numbers[1:] + numbers[:-1]) / 2, numbers[:1] / 2])
    generator = torch.Generator().manual_seed(1)
    by = torch.exp2(torch.empty(20_000, 1).uniform_(-20, 20, generator=generator))
    value = (middle * by).contiguous()
    for neighbour in (value, value.nextafter(torch.zeros(())), value.nextafter(torch.full((), torch.inf)), -value):
        divisor = by.expand_as(neighbour).contiguous()
        got = torch.empty(neighbour.shape, dtype=torch.uint8)
        native.quantize(
            FORMATS.index(dtype), False, neighbour.data_ptr(), divisor.data_ptr(), neighbour.numel(), got.data_ptr()
        )
        assert torch.equal(got, torchs(neighbour / divisor, dtype))


@formats
def test_a_quotient_of_eleven_bits_has_the_fp8_number_of_a_division(native, dtype):
    tested = ctypes.c_int64()
    assert native.wrong_short_quotients(FORMATS.index(dtype), ctypes.addressof(tested)) == 0
    assert tested.value > 1_000_000


def test_a_quotient_close_to_the_middle_of_two_numbers_is_rounded_as_a_division_rounds_it(native):
    tested = ctypes.c_int64()
    assert native.wrong_quotients(1, ctypes.addressof(tested)) == 0
    assert tested.value > 10_000_000


@formats
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("bound", [torch.inf, 2.0**-9])
def test_a_scale_is_that_of_the_reference_finite_and_never_too_small_to_divide_by(native, dtype, ue8m0, bound):
    from prequal.ops._fp8 import scale_of

    amax = dense_floats()
    amax = amax[amax.isfinite() & (amax >= 0)].contiguous()
    got = torch.empty_like(amax)
    native.scales(FORMATS.index(dtype), amax.data_ptr(), amax.numel(), bound, ue8m0, got.data_ptr())
    want = scale_of(amax, dtype, None if bound == torch.inf else bound, ue8m0)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert got.isfinite().all()
    assert (1 / got).isfinite().all()
    if ue8m0:
        assert (got.view(torch.int32) & 0x7FFFFF).eq(0).all()
    elif bound == torch.inf:
        assert (amax / got <= torch.finfo(dtype).max * (1 + 2.0**-23)).all()


# ---- searches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiprocessors", [1, 46, 132])
@pytest.mark.parametrize("k", [1, 10, 128])
def test_a_search_has_a_block_at_least_and_its_sample_lies_in_the_corpus(native, k, multiprocessors):
    for rows in (0, 1, 16, 17, 1000, 16_367, 16_368, 16_369, 100_000, 500_000, 1_000_003, 2**30):
        for queries in (1, 8, 9, 32, 64):
            out = (ctypes.c_int * 3)()
            native.plan_search(rows, k, queries, multiprocessors, 512, out)
            threads, blocks, tiles_a_group = out
            tiles = -(-rows // 16)
            assert threads % 32 == 0
            assert 1 <= blocks <= multiprocessors
            assert blocks <= max(1, tiles)
            assert (tiles_a_group > 0) == (tiles >= 1024)
            assert tiles_a_group == 1 or 8 * 1024 * tiles_a_group <= tiles or not tiles_a_group
            if blocks > (multiprocessors + 1) // 2 and tiles_a_group:  # lists of 8 bytes a key
                assert 6.5 * 8 * blocks * k <= rows


# ---- states of a sequence, shared out --------------------------------------------------------------------------------


# (columns of a thread, lanes of a column, blocks, the fewest and the most states) of src/ops/viterbi_decode_kept.cu
CLUSTERS = [
    (4, 8, 8, 129, 2048),
    (2, 8, 4, 129, 256),
    (2, 16, 8, 257, 512),
    (1, 1, 16, 513, 2048),
    (1, 1, 8, 513, 2048),
]


@pytest.mark.parametrize(("columns", "parts", "blocks", "fewest", "most"), CLUSTERS)
def test_every_block_of_a_cluster_has_a_state_and_every_state_a_block(native, columns, parts, blocks, fewest, most):
    """A block without one would send nothing: nobody would wait for it."""
    threads = {4: 512, 2: 512 if parts == 16 else 256, 1: 1024}[columns]
    for states in range(fewest, most + 1):
        if columns == 1:  # of these kernels a block's states begin at multiples of its most
            firsts = [rank * native.most_states_of(states, columns, blocks) for rank in range(blocks + 1)]
        else:
            firsts = [native.first_state_of(states, columns, blocks, rank) for rank in range(blocks + 1)]
        width = native.most_states_of(states, columns, blocks)
        assert firsts[0] == 0
        assert firsts[-1] >= states
        assert all(first % columns == 0 for first in firsts)
        for first, past in itertools.pairwise(firsts):
            assert first < min(past, states)
            assert past - first <= width
        if fewest < 513 and states <= 512:
            assert width // columns * parts <= threads


# ---- pieces of long rows ---------------------------------------------------------------------------------------------

CHUNK, LONG = 128, 256  # edges of a piece; a row of more is cut


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 400),
    st.lists(st.sampled_from([0, 1, 3, 100, 127, 128, 129, 255, 256, 257, 300, 384, 700]), min_size=1, max_size=7),
    st.integers(0, 300),
)
def test_every_piece_of_a_long_row_that_is_added_up_was_written_for_it(native, first, lengths, behind):
    """Also where rows begin within the edges, as those of a slice of row_ptr do."""
    ends = first + np.array([0, *lengths], dtype=np.int64).cumsum()
    edges = int(ends[-1]) + behind
    written, read = (np.zeros(2 * -(-edges // CHUNK), dtype=np.int64) for _ in range(2))
    assert native.pieces_of(pointer(ends), len(lengths), edges, LONG, pointer(written), pointer(read)) == 0
    assert written.tolist() == read.tolist()
    for row, length in enumerate(lengths):
        chunks = (int(ends[row + 1]) - 1) // CHUNK - int(ends[row]) // CHUNK + 1
        assert written.tolist().count(row) == (chunks if length > LONG else 0)


def test_the_search_in_python_knows_which_corpora_have_a_sample(native):
    """The lists of a corpus without one are longer, and fewer queries lie together."""
    out = (ctypes.c_int * 3)()
    for rows, sampled in ((chunks.SMALL_CORPUS, False), (chunks.SMALL_CORPUS + 1, True)):
        native.plan_search(rows, 10, 64, 132, 512, out)
        assert (out[2] > 0) == sampled
