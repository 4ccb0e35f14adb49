"""A comparison says where and by how much a promise was broken, for every dtype, and lets nothing through unseen."""

import math
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prequal import contracts
from prequal.contracts import Bitwise, Exact, Tolerance, ordered_bits

FP8 = [
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, *FP8]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
COMPLEX = [torch.complex64, torch.complex128]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

exact = Exact(ties="none")
bitwise = Bitwise()
# What accepts nothing but equality, with NaN equal to NaN: the three must agree on ordinary numbers.
STRICT = [bitwise, exact, Tolerance({})]

examples = settings(max_examples=200, deadline=None, database=None)


def from_bits(bits: int, dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize
    kind = BITS[size]
    limit = 1 << (8 * size - 1)
    value = bits if kind == torch.uint8 else bits - 2 * limit if bits >= limit else bits
    return torch.tensor([value], dtype=kind).view(dtype)


def moved(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Positive values, as many representable numbers higher."""
    return (x.view(BITS[x.element_size()]) + steps).view(x.dtype)


# ---- where, and by how much ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", STRICT, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_float_mismatch_names_index_got_want_and_ulp(contract, dtype):
    want = torch.linspace(0.5, 4.0, 12, dtype=torch.float64).to(dtype).reshape(3, 4)
    got = want.clone()
    got[2, 1] = moved(want[2, 1].reshape(1), 3)[0]
    found = contract.compare(got, want)
    assert (found.output, found.index, found.ulp, found.wrong, found.total) == (0, (2, 1), 3, 1, 12)
    assert (found.got, found.want) == (got[2, 1].item(), want[2, 1].item())
    text = f"output 0 at [2, 1]: got {found.got}, want {found.want}, 3 ulp apart ("
    assert str(found).startswith(text)
    assert str(found).endswith("; 1 of 12 values differ)")


@pytest.mark.parametrize("contract", STRICT, ids=str)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_an_integer_mismatch_names_the_place_that_is_furthest_off(contract, dtype):
    top = torch.iinfo(dtype).max
    want = torch.tensor([0, 1, 2, top], dtype=dtype)
    got = torch.tensor([1, 1, top - 1, top], dtype=dtype)
    found = contract.compare(got, want)
    assert (found.index, found.got, found.want, found.ulp, found.wrong) == ((2,), top - 1, 2, None, 2)


@pytest.mark.parametrize("contract", STRICT, ids=str)
def test_a_bool_mismatch_is_shown_as_bools(contract):
    found = contract.compare(torch.tensor([True, False]), torch.tensor([True, True]))
    assert (found.index, found.got, found.want, found.ulp) == ((1,), False, True, None)


@pytest.mark.parametrize("contract", STRICT, ids=str)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_complex_mismatch_has_the_index_of_the_value_and_the_ulp_of_its_worse_part(contract, dtype):
    want = torch.tensor([1 + 2j, 3 + 4j], dtype=dtype)
    got = want.clone()
    parts = torch.view_as_real(got)
    parts[1, 0] = moved(parts[1, :1].clone(), 1)[0]
    parts[1, 1] = moved(parts[1, 1:].clone(), 5)[0]
    found = contract.compare(got, want)
    assert (found.index, found.ulp, found.wrong, found.total) == ((1,), 5, 1, 2)
    assert (found.got, found.want) == (str(got[1].item()), "(3+4j)")


def test_the_worst_place_is_the_one_named():
    want = torch.ones(50)
    got = want.clone()
    got[7], got[31], got[44] = 1.25, -3.0, 2.0
    for contract in (*STRICT, Tolerance({torch.float32: (0.0, 0.1)})):
        found = contract.compare(got, want)
        assert (found.index, found.wrong) == ((31,), 3)


def test_a_value_without_a_size_is_worse_than_any_number():
    want = torch.zeros(4)
    got = torch.tensor([1e38, math.nan, 5.0, 0.0])
    found = exact.compare(got, want)
    assert (found.index, found.ulp) == ((1,), None)
    assert math.isnan(found.got)


def test_a_zero_dimensional_output_has_no_index_to_name():
    found = exact.compare(torch.tensor(1.0), torch.tensor(2.0))
    assert found.index == ()
    assert str(found).startswith("output 0: got 1.0, want 2.0, 8388608 ulp apart")


def test_a_place_is_in_the_indices_of_the_output_and_not_of_its_memory():
    want = torch.arange(24.0).reshape(4, 6).t()[1::2]
    got = want.clone()
    got[1, 2] += 1
    for contract in STRICT:
        assert contract.compare(got, want).index == (1, 2)
        assert contract.compare(got.contiguous(), want).index == (1, 2)
        assert contract.compare(want.contiguous(), want) is None


def test_the_first_output_that_is_wrong_is_the_one_named():
    good, bad = torch.zeros(3), torch.tensor([0.0, 0.0, 9.0])
    assert exact.compare((good, good, bad), (good, good, good)).output == 2
    assert exact.compare((bad, good), (good, bad)).output == 0
    assert exact.compare([good], good) is None
    assert exact.compare((good, good), [good, good]) is None


# ---- NaN, infinity, zero ---------------------------------------------------------------------------------------------

LOOSE = Tolerance(dict.fromkeys((torch.float64, torch.float32, torch.complex64), (0.5, 1e30)))
ALL = [*STRICT, LOOSE]


@pytest.mark.parametrize("contract", ALL, ids=["bitwise", "exact", "equal", "loose"])
@pytest.mark.parametrize(
    ("got", "want"),
    [
        *((math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (-math.inf, math.inf)),
        *((math.inf, 3e38), (3e38, math.inf), (math.nan, math.inf), (math.inf, math.nan), (1.0, -math.inf)),
    ],
)
def test_what_is_no_number_must_stand_in_the_same_place(contract, got, want):
    found = contract.compare(torch.tensor([0.0, got]), torch.tensor([0.0, want]))
    assert found.index == (1,)
    assert found.ulp is None
    assert contract.compare(torch.tensor([want]), torch.tensor([want])) is None


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_nan_is_compared_too(dtype):
    nan, one = torch.tensor([math.nan]).to(dtype), torch.tensor([1.0]).to(dtype)
    for contract in (*STRICT, Tolerance({dtype: (0.1, 0.1)})):
        assert contract.compare(nan, nan) is None
        assert contract.compare(nan, one) is not None
        assert contract.compare(one, nan) is not None


def test_the_sign_of_zero_is_a_bit_and_not_a_value():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        minus, plus = torch.tensor([-0.0], dtype=dtype), torch.tensor([0.0], dtype=dtype)
        found = bitwise.compare(minus, plus)
        assert str(found).startswith("output 0 at [0]: got -0.0, want 0.0, 0 ulp apart (raw bits must be equal")
        assert exact.compare(minus, plus) is None
        assert Tolerance({}).compare(minus, plus) is None


@pytest.mark.parametrize(
    ("dtype", "first", "second", "texts"),
    [
        (torch.float32, 0x7FC00000, 0x7FC00001, ("nan (bits 0x7fc00000)", "nan (bits 0x7fc00001)")),
        (torch.float32, 0x7FC00000, 0xFFC00000, ("nan (bits 0x7fc00000)", "nan (bits 0xffc00000)")),
        (torch.float16, 0x7E00, 0x7E01, ("nan (bits 0x7e00)", "nan (bits 0x7e01)")),
        (torch.bfloat16, 0x7FC0, 0xFFC0, ("nan (bits 0x7fc0)", "nan (bits 0xffc0)")),
        (torch.float64, 0x7FF8000000000000, 0x7FF8000000000002, ("nan (bits 0x7ff80", "nan (bits 0x7ff80")),
    ],
    ids=str,
)
def test_nan_payloads_differ_bitwise_and_are_shown_as_bits(dtype, first, second, texts):
    got, want = from_bits(first, dtype), from_bits(second, dtype)
    found = bitwise.compare(got, want)
    assert found.got.startswith(texts[0])
    assert found.want.startswith(texts[1])
    assert found.got != found.want
    assert found.ulp is None
    assert exact.compare(got, want) is None
    assert Tolerance({}).compare(got, want) is None


def test_each_part_of_a_complex_value_is_looked_at():
    nan = math.nan
    cases = [(complex(nan, 1.0), complex(1.0, nan)), (complex(math.inf, 1.0), complex(math.inf, 2e30))]
    for got, want in cases:
        a, b = (torch.tensor([x], dtype=torch.complex64) for x in (got, want))
        for contract in (*STRICT, Tolerance({torch.complex64: (1e-3, 1e-3)})):
            assert contract.compare(a, b) is not None
            assert contract.compare(a, a.clone()) is None
    near = Tolerance({torch.complex64: (1e-3, 0.0)})
    a, b = (torch.tensor([complex(math.inf, x)], dtype=torch.complex64) for x in (1.0, 1.0001))
    assert near.compare(a, b) is None


def test_a_pending_conjugation_or_negation_is_carried_out_first():
    x = torch.tensor([1 + 2j, 3 - 4j])
    for contract in STRICT:
        assert contract.compare(x.conj(), x.conj().resolve_conj()) is None
        assert contract.compare(x.conj(), x) is not None
        assert contract.compare(x.conj().imag, -x.imag) is None
        assert contract.compare(x.conj().imag, x.imag) is not None


# ---- sizes that a float64 or an int64 does not hold ------------------------------------------------------------------


def test_a_difference_that_overflows_is_a_difference():
    top = torch.finfo(torch.float64).max
    want, got = torch.tensor([top], dtype=torch.float64), torch.tensor([-top], dtype=torch.float64)
    for contract in (*STRICT, Tolerance({torch.float64: (0.5, 1e300)})):
        found = contract.compare(got, want)
        assert found.ulp == 2 * 0x7FEFFFFFFFFFFFFF
    near = Tolerance({torch.complex128: (0.1, 0.0)})
    z = torch.tensor([complex(top, top)], dtype=torch.complex128)
    assert near.compare(-z, z) is not None
    assert near.compare(0.5 * z, z) is not None
    assert near.compare(0.95 * z, z) is None
    assert near.compare(z, z.clone()) is None


@pytest.mark.parametrize("contract", STRICT, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_integers_past_2_to_53_are_not_compared_as_floats(contract, dtype):
    want = torch.tensor([2**53, 7], dtype=dtype)
    got = torch.tensor([2**53 + 1, 7], dtype=dtype)
    found = contract.compare(got, want)
    assert (found.index, found.got, found.want) == ((0,), 2**53 + 1, 2**53)


def test_the_distance_of_integers_does_not_wrap():
    info = torch.iinfo(torch.int64)
    want = torch.tensor([info.min, 0, 5], dtype=torch.int64)
    got = torch.tensor([info.max, 9, 5], dtype=torch.int64)
    assert exact.compare(got, want).index == (0,)
    near = Tolerance({torch.int64: (0.0, 10.0)})
    found = near.compare(got, want)
    assert (found.index, found.wrong) == ((0,), 1)
    high = torch.tensor([2**64 - 1, 2**63], dtype=torch.uint64)
    low = torch.tensor([2**64 - 3, 2**63 - 1], dtype=torch.uint64)
    assert Tolerance({torch.uint64: (0.0, 2.0)}).compare(high, low) is None
    assert Tolerance({torch.uint64: (0.0, 1.0)}).compare(high, low).index == (0,)


def test_an_output_is_compared_piece_by_piece_without_a_difference(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(7, 11, 13, generator=generator)
    got = want.clone()
    got[0, 0, 0] += 1
    got[6, 10, 12] += 2
    got[3, 5, 7] -= 5
    whole = [contract.compare(got, want) for contract in STRICT]
    monkeypatch.setattr(contracts, "_AT_A_TIME", 10)
    assert [contract.compare(got, want) for contract in STRICT] == whole
    assert whole[0].index == (3, 5, 7)
    assert whole[0].wrong == 3
    assert bitwise.compare(want.clone(), want) is None


# ---- what is no match before a value is looked at --------------------------------------------------------------------


@pytest.mark.parametrize("contract", STRICT, ids=str)
def test_shape_dtype_and_device_must_be_the_same(contract):
    x = torch.zeros(2, 3)
    assert str(contract.compare(x, x.t())) == "output 0: got [2, 3], want [3, 2] (shape must be the same)"
    assert str(contract.compare(x, x.double())) == (
        "output 0: got torch.float32, want torch.float64 (dtype must be the same)"
    )
    assert str(contract.compare(x, x.to("meta"))) == "output 0: got cpu, want meta (device must be the same)"
    assert contract.compare(x, x.reshape(6)) is not None
    assert contract.compare(torch.zeros(1), torch.tensor(0.0)) is not None


@pytest.mark.parametrize("contract", STRICT, ids=str)
def test_the_number_of_outputs_must_be_the_same(contract):
    x = torch.zeros(2)
    assert str(contract.compare((x, x), (x,))) == "output 0: got 2 outputs, want 1 outputs (as many outputs)"
    assert contract.compare((), (x,)) is not None
    assert contract.compare((), ()) is None


def test_an_absent_output_must_be_absent_on_both_paths():
    x = torch.zeros(2)
    assert exact.compare((x, None), (x, None)) is None
    assert str(exact.compare((x, None), (x, x))) == "output 1: got None, want a tensor (must be the same)"
    assert str(exact.compare((x, x), (x, None))) == "output 1: got a tensor, want None (must be the same)"
    assert exact.compare((x, 3), (x, 3)) is None
    assert exact.compare((x, 3), (x, 4)) is not None
    assert exact.compare((x, 1), (x, True)) is not None


@pytest.mark.parametrize("contract", STRICT, ids=str)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
def test_an_empty_output_matches_one_of_its_shape_only(contract, shape):
    assert contract.compare(torch.empty(shape), torch.empty(shape)) is None
    assert contract.compare(torch.empty(shape), torch.empty(*shape, 1)) is not None


def test_comparing_leaves_no_trace_in_autograd():
    leaf = torch.ones(3, requires_grad=True)
    for contract in STRICT:
        assert contract.compare(leaf * 1.0, torch.nn.Parameter(torch.ones(3))) is None
        assert contract.compare(leaf * 2.0, torch.ones(3)).got == 2.0


# ---- the contracts themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [(math.nan, 0.0), (0.0, math.inf), (-1e-3, 0.0), (0.0, -1.0)], ids=str)
def test_a_bound_that_would_pass_or_fail_everything_is_an_error(bounds):
    with pytest.raises(ValueError, match=r"Tolerance: expected a finite [ra]tol >= 0 for torch.float32, got"):
        Tolerance({torch.float32: bounds})


def test_two_contracts_that_differ_read_differently():
    """A lock holds the text of a contract, and a changed bound must make it stale."""
    texts = {str(Tolerance({torch.float32: bounds})) for bounds in ((1.6e-2, 0), (1.61e-2, 0), (0, 1.6e-2))}
    assert len(texts) == 3
    assert str(Exact(ties="lower")) != str(Exact(ties="higher"))
    assert len({Tolerance({torch.float32: (1e-5, 0.0)}), Tolerance({torch.float32: (1e-5, 0.0)})}) == 1


def test_the_bounds_of_a_contract_cannot_be_changed_from_outside():
    bounds = {torch.float32: (0.0, 0.0)}
    contract = Tolerance(bounds)
    bounds[torch.float32] = (1.0, 1.0)
    assert contract.compare(torch.ones(1), torch.zeros(1)) is not None


def test_kinds_are_what_the_gate_knows():
    assert [contract.kind for contract in (bitwise, Tolerance({}), exact)] == ["bitwise", "tolerance", "exact"]


def test_a_rule_says_what_was_allowed():
    found = Tolerance({torch.float32: (1e-3, 2e-4)}).compare(torch.ones(1), torch.zeros(1))
    assert "(rtol 0.001, atol 0.0002; 1 of 1 values differ)" in str(found)
    found = Tolerance({torch.float32: (1e-3, 2e-4)}).compare(torch.ones(1).half(), torch.zeros(1).half())
    assert "must be equal: no tolerance for float16" in str(found)


# ---- against numpy ---------------------------------------------------------------------------------------------------

NUMPY_FLOATS = [np.float16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", NUMPY_FLOATS, ids=lambda d: d.__name__)
@examples
@given(data=st.data())
def test_ulp_is_the_number_of_steps_of_nextafter(dtype, data):
    width = np.dtype(dtype).itemsize * 8
    start = data.draw(st.floats(width=width, allow_nan=False, allow_infinity=False))
    steps = data.draw(st.integers(0, 40))
    up = data.draw(st.booleans())
    x = y = dtype(start)
    for _ in range(steps):
        with np.errstate(over="ignore"):
            y = np.nextafter(y, dtype(np.inf if up else -np.inf))
    if not np.isfinite(y):
        return
    got, want = torch.from_numpy(np.array([y])), torch.from_numpy(np.array([x]))
    found = exact.compare(got, want)
    if y == x:
        assert found is None
    else:
        assert found.ulp == steps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FP8], ids=str)
def test_ordered_bits_keep_the_order_of_every_finite_value(dtype):
    """All of them, where there are few enough."""
    size = dtype.itemsize
    everything = torch.arange(1 << (8 * size), dtype=torch.int64)
    raw = everything.to(torch.uint8) if size == 1 else (everything - (1 << 15)).to(torch.int16)
    values = raw.view(dtype)
    wide = values.to(torch.float64)
    values, wide = values[torch.isfinite(wide)], wide[torch.isfinite(wide)]
    order = wide.argsort(stable=True)
    bits, wide = ordered_bits(values)[order], wide[order]
    steps = bits.diff()
    assert torch.equal(steps == 0, wide.diff() == 0)  # -0 and +0 alone share a number
    assert steps.unique().tolist() in ([0, 1], [1])


@pytest.mark.parametrize("dtype", NUMPY_FLOATS, ids=lambda d: d.__name__)
@examples
@given(data=st.data())
def test_the_verdicts_are_those_of_numpy(dtype, data):
    elements = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]),
        st.floats(width=np.dtype(dtype).itemsize * 8),
    )
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    want = data.draw(hnp.arrays(dtype, shape, elements=elements))
    got = want.copy()
    for index in data.draw(st.lists(st.sampled_from(list(np.ndindex(shape))), max_size=3)) if want.size else ():
        got[index] = dtype(data.draw(elements))
    rtol, atol = data.draw(st.sampled_from([(0.0, 0.0), (1e-3, 0.0), (0.0, 0.5), (1e-2, 1e-5)]))
    a, b = torch.from_numpy(np.asarray(got)), torch.from_numpy(np.asarray(want))

    assert (bitwise.compare(a, b) is None) == (got.tobytes() == want.tobytes())
    assert (exact.compare(a, b) is None) == np.array_equal(got, want, equal_nan=True)
    with np.errstate(all="ignore"):
        close = np.isclose(got.astype(np.float64), want.astype(np.float64), rtol, atol, equal_nan=True)
    found = Tolerance({b.dtype: (rtol, atol)}).compare(a, b)
    assert (0 if found is None else found.wrong) == int((~close).sum())
    if found is not None:
        assert not close[found.index]


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16, np.uint64], ids=lambda d: d.__name__)
@examples
@given(data=st.data())
def test_integers_are_equal_as_python_says(dtype, data):
    info = np.iinfo(dtype)
    integers = st.integers(int(info.min), int(info.max))
    pairs = data.draw(st.lists(st.tuples(integers, integers), min_size=1, max_size=5))
    pairs = [(x, x if data.draw(st.booleans()) else y) for x, y in pairs]
    a, b = (torch.from_numpy(np.array(column, dtype=dtype)) for column in zip(*pairs, strict=True))
    wrong = [i for i, (x, y) in enumerate(pairs) if x != y]
    for contract in STRICT:
        found = contract.compare(a, b)
        assert (0 if found is None else found.wrong) == len(wrong)
        if found is not None:
            x, y = pairs[found.index[0]]
            assert (found.got, found.want) == (x, y)
            # the worst is found in float64, which rounds both numbers before it subtracts them: 2 half ulp of 2^64
            assert abs(x - y) >= max(abs(p - q) for p, q in pairs) - 2**12


@examples
@given(bits=st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_compared_bitwise_as_raw_integers(dtype, bits):
    first, second = (from_bits(b, dtype) for b in bits)
    assert (bitwise.compare(first, second) is None) == (bits[0] == bits[1])


def test_a_float32_is_shown_as_the_number_that_it_is():
    got = struct.unpack("f", struct.pack("f", 0.1))[0]
    assert exact.compare(torch.tensor([0.1]), torch.tensor([0.0])).got == got


def test_complex_halves_are_compared():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them experimental
        want = torch.tensor([1 + 2j], dtype=torch.complex32)
        got = torch.view_as_complex(torch.tensor([[1.0, 2.001953125]], dtype=torch.float16))
        for contract in STRICT:
            assert contract.compare(got, want).ulp == 1
            assert contract.compare(want, want.clone()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("contract", STRICT, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, torch.bool], ids=str)
def test_a_comparison_on_the_gpu_says_the_same(contract, dtype, cuda):
    want = torch.arange(1, 25).reshape(4, 6).to(dtype)
    got = want.clone()
    got[2, 3] = torch.zeros((), dtype=torch.int64).to(dtype)
    on_cpu = contract.compare(got, want)
    assert on_cpu is not None
    assert contract.compare(got.to(cuda), want.to(cuda)) == on_cpu
