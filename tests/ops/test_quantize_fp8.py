"""quantize_fp8 and dequantize_fp8 against a table of all FP8 numbers, at the edges of the formats, and in a product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal
import prequal.bench.shapes.quantize_fp8  # declares the costs
from prequal.ops import _fp8 as fp8
from prequal.ops.quantize_fp8 import every_half
from prequal.registry import Cost

pytestmark = pytest.mark.usefixtures("bitwise_paths_serve")
E4M3, E5M2 = fp8.DTYPES
formats = pytest.mark.parametrize("dtype", fp8.DTYPES, ids=["e4m3", "e5m2"])
granularities = pytest.mark.parametrize("granularity", fp8.GRANULARITIES)


def normal(device, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def bits(x):
    return x.view(torch.uint8).cpu()


def nearest(value, dtype):
    """The codes of the numbers nearest to the values, of two as near the even one, by a table of all numbers."""
    codes = np.arange(0x7F if dtype == E4M3 else 0x7C, dtype=np.uint8)
    numbers = torch.from_numpy(codes).view(dtype).double().numpy()
    size = np.abs(value)
    middle = (numbers[1:] + numbers[:-1]) / 2
    below, above = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    found = np.where(below == above, below, np.where(below % 2 == 0, below, above))
    return np.where(np.isnan(value), 0x7F, found | np.where(np.signbit(value), 0x80, 0)).astype(np.uint8)


@formats
@granularities
def test_it_is_the_number_nearest_to_the_quotient(device, granularity, dtype):
    x = normal(device, 200, 300)
    q, scale = prequal.quantize_fp8(x, granularity, dtype)
    wide = x.cpu().numpy()
    want = np.empty_like(wide, dtype=np.uint8)
    scale = scale.cpu().numpy().reshape(fp8.scale_shape(x.shape, granularity, "row"))
    down, across = {"tensor": (200, 300), "token": (1, 300), "block_1x128": (1, 128), "block_128x128": (128, 128)}[
        granularity
    ]
    for i, r in enumerate(range(0, 200, down)):
        for j, c in enumerate(range(0, 300, across)):
            part = wide[r : r + down, c : c + across]
            one = scale[0] if granularity == "tensor" else scale[i, j]
            assert one == np.float32(np.abs(part).max() / np.float32(torch.finfo(dtype).max))
            want[r : r + down, c : c + across] = nearest(part / one, dtype)
    np.testing.assert_array_equal(bits(q).numpy(), want)


@formats
@granularities
def test_a_zero_tensor_has_a_scale_of_one_and_keeps_the_signs_of_its_zeros(device, granularity, dtype):
    x = torch.zeros(130, 200, device=device)
    x[:, 1::2] = -0.0
    q, scale = prequal.quantize_fp8(x, granularity, dtype)
    assert scale.eq(1).all()
    assert bits(q)[:, ::2].eq(0).all()
    assert bits(q)[:, 1::2].eq(0x80).all()


@granularities
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subnormal_values_have_a_finite_scale_and_a_finite_reciprocal_of_it(device, granularity, dtype):
    x = torch.full((3, 200), 2.0**-130, device=device).to(dtype)
    q, scale = prequal.quantize_fp8(x, granularity)
    assert scale.eq(2.0**-126).all()
    assert (1 / scale).isfinite().all()
    assert q.float().eq(2.0**-4).all()


@formats
@granularities
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_infinity_leave_the_others_unharmed(device, granularity, dtype, of):
    x = normal(device, 130, 300, dtype=of)
    hole = torch.zeros(130, 300, dtype=torch.bool, device=device)
    hole[::7, ::5] = True
    plain = torch.where(hole, 0.0, x)
    want, want_scale = prequal.quantize_fp8(plain, granularity, dtype)
    for value in (torch.nan, torch.inf, -torch.inf, -torch.nan):
        spoiled = torch.where(hole, value, x)
        q, scale = prequal.quantize_fp8(spoiled, granularity, dtype)
        assert torch.equal(scale, want_scale)
        assert torch.equal(bits(q)[~hole.cpu()], bits(want)[~hole.cpu()])
        in_holes = q.float()[hole]
        if value != value:
            assert bits(q)[hole.cpu()].eq(0x7F).all()
        else:
            assert in_holes.eq(torch.finfo(dtype).max if value > 0 else -torch.finfo(dtype).max).all()


@granularities
def test_rows_of_nothing_finite_have_a_scale_of_one(device, granularity):
    for value in (torch.nan, torch.inf):
        assert prequal.quantize_fp8(torch.full((3, 130), value, device=device), granularity)[1].eq(1).all()


@formats
@granularities
def test_back_again_is_within_half_a_step(device, granularity, dtype):
    x = normal(device, 150, 400)
    q, scale = prequal.quantize_fp8(x, granularity, dtype)
    back = prequal.dequantize_fp8(q, scale, granularity, torch.float32)
    relative, subnormal = (2.0**-4, 2.0**-10) if dtype == E4M3 else (2.0**-3, 2.0**-17)
    # and the roundings of the scale, the quotient and the product
    assert ((back - x).abs() <= (relative + 2.0**-21) * x.abs() + subnormal * scale.max()).all()


@formats
@granularities
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_comes_back_as_its_number_times_its_scale(device, granularity, dtype, of):
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    shapes = ((1, 256), (3, 8), (5, 24), (300, 40), (7, 1), (3, 150, 400), (2, 5000), (9, 131), (3, 4104), (0, 8))
    for *rows, width in shapes:
        q = numbers.view(torch.uint8).repeat(-(-(width * max(1, int(np.prod(rows)))) // 256) + 1).view(dtype)
        q = q[: int(np.prod(rows)) * width].reshape(*rows, width)
        shape = prequal.quantize_fp8(torch.zeros(q.shape), granularity)[1].shape
        scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
        got = prequal.dequantize_fp8(q.to(device), scale.to(device), granularity, of)
        want = (q.float() * fp8.spread(scale, q.shape, granularity)).to(of)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


@granularities
def test_a_scale_that_is_given_is_what_divides_and_comes_back_as_a_copy(device, granularity):
    x = normal(device, 140, 300)
    q, scale = prequal.quantize_fp8(x, granularity)
    again, copy = prequal.quantize_fp8(x, granularity, scale=scale)
    assert torch.equal(bits(again), bits(q))
    assert torch.equal(copy, scale)
    assert copy.data_ptr() != scale.data_ptr()
    halved, _ = prequal.quantize_fp8(x, granularity, scale=scale * 0.5)
    assert halved.float().abs().max() == 448


@granularities
def test_column_layout_has_the_same_scales_the_other_way_round(device, granularity):
    x = normal(device, 260, 300)
    q, scale = prequal.quantize_fp8(x, granularity)
    same, other = prequal.quantize_fp8(x, granularity, scale_layout="column")
    assert torch.equal(bits(q), bits(same))
    assert torch.equal(other, scale if granularity == "tensor" else scale.t())
    back = [prequal.dequantize_fp8(q, s, granularity, scale_layout=w) for s, w in ((scale, "row"), (other, "column"))]
    assert torch.equal(*back)


@granularities
def test_powers_of_two_lie_at_and_above_the_plain_scale(device, granularity):
    x = normal(device, 140, 300)
    _, plain = prequal.quantize_fp8(x, granularity)
    _, scale = prequal.quantize_fp8(x, granularity, ue8m0=True)
    assert (scale.view(torch.int32) & 0x7FFFFF).eq(0).all()
    assert (scale >= plain).all()
    assert (scale < 2 * plain).all()


@granularities
def test_a_bound_saturates_what_is_too_large(device, granularity):
    x = normal(device, 140, 300)
    q, scale = prequal.quantize_fp8(x, granularity, scale_upper_bound=0.001)
    assert scale.eq(torch.tensor(0.001)).all()
    assert q.float()[x > 0.448].eq(448).all()
    _, scale = prequal.quantize_fp8(x, granularity, scale_upper_bound=0.001, ue8m0=True)
    assert scale.eq(2.0**-10).all()


@granularities
def test_nothing_requires_a_gradient(device, granularity):
    x = normal(device, 3, 40).requires_grad_()
    q, scale = prequal.quantize_fp8(x, granularity)
    assert not q.requires_grad
    assert not scale.requires_grad


@granularities
def test_the_gradient_of_the_way_back_is_that_of_the_product(granularity):
    q = normal(torch.device("cpu"), 3, 150).requires_grad_()
    shape = fp8.scale_shape(q.shape, granularity, "row")
    scale = normal(torch.device("cpu"), *shape, seed=1).requires_grad_()

    def back(q, scale):
        return prequal.dequantize_fp8(q, scale, granularity, torch.float32)

    def product(q, scale):
        return q * fp8.spread(scale, q.shape, granularity)

    weights = normal(torch.device("cpu"), 3, 150, seed=2)
    got, want = (torch.autograd.grad((f(q, scale) * weights).sum(), (q, scale)) for f in (back, product))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_the_declared_costs_are_what_is_read_and_written():
    x = torch.ones(6, 256, dtype=torch.bfloat16)
    op, back = prequal.quantize_fp8.op, prequal.dequantize_fp8.op
    assert op.cost_of(op.bind((x, "token"))) == Cost(6 * 256 * 3 + 6 * 4, 5 * 6 * 256)
    assert op.cost_of(op.bind((x, "block_1x128"))).bytes == 6 * 256 * 3 + 12 * 4
    q, scale = prequal.quantize_fp8(x, "token")
    assert back.cost_of(back.bind((q, scale, "token"))).bytes == 6 * 256 * 3 + 6 * 4


@formats
@granularities
@pytest.mark.parametrize("of", [torch.float16, torch.bfloat16])
def test_every_half_has_the_bits_of_the_reference(device, granularity, dtype, of):
    x = every_half(of).to(device)
    op = prequal.quantize_fp8.op
    for named in ({}, {"ue8m0": True}, {"scale": torch.full((1,), 0.37, device=device)}):
        if granularity != "tensor" and "scale" in named:
            continue
        got = prequal.quantize_fp8(x, granularity, dtype, **named)
        assert op.contract.compare(got, op.reference(x, granularity, dtype, **named)) is None


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def served(cuda, name="quantize_fp8"):
    return prequal.stats()[name][str(cuda)]["reference"] == {}


@pytest.mark.gpu
def test_a_bitwise_path_does_not_serve_before_it_is_qualified(cuda):
    prequal.runtime_state.gate.unqualify()
    x = normal(cuda, 4, 64)
    prequal.quantize_fp8(x, "token")
    assert prequal.stats()["quantize_fp8"][str(cuda)]["reference"] == {"not_qualified": 1}
    prequal.qualify("quantize_fp8", cuda)
    prequal.quantize_fp8(x, "token")
    assert prequal.stats()["quantize_fp8"][str(cuda)]["fast"] == 1


@pytest.mark.gpu
@formats
@granularities
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 127, 129, 4095, 4097, 8192, 16392, 33000])
def test_kernels_have_the_bits_of_the_reference_at_every_width(cuda, granularity, dtype, of, width):
    x = normal(cuda, 261, width, dtype=of)
    got = prequal.quantize_fp8(x, granularity, dtype)
    assert served(cuda)
    op = prequal.quantize_fp8.op
    assert op.contract.compare(got, op.reference(x, granularity, dtype)) is None


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("layout", fp8.LAYOUTS)
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16])
def test_groups_of_any_number_of_rows_have_the_bits_of_the_reference(cuda, dtype, layout, of):
    op = prequal.quantize_fp8.op
    for rows in (1, 2, 7, 8, 9, 131):
        for width in (8, 127, 1024, 1032, 9000, 16384):
            for gap in (0, 16):
                x = normal(cuda, rows, width + gap, dtype=of)[:, :width]
                got = prequal.quantize_fp8(x, "block_1x128", dtype, scale_layout=layout)
                assert op.contract.compare(got, op.reference(x, "block_1x128", dtype, scale_layout=layout)) is None
                again = prequal.quantize_fp8(x, "block_1x128", dtype, scale=got[1], scale_layout=layout)
                assert all(torch.equal(bits(a), bits(b)) for a, b in zip(again, got, strict=True))
    assert served(cuda)


@pytest.mark.gpu
@formats
@granularities
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [127, 300, 1024, 4095, 33_001])
def test_scales_of_any_size_that_are_given_divide_as_the_reference_divides(cuda, granularity, dtype, of, width):
    x = normal(cuda, 133, width, dtype=of)
    shape = fp8.scale_shape(x.shape, granularity, "row")
    sizes = torch.tensor([1e-30, 0.37, 1e30, 0.0, torch.inf, -2.0, 3e-3, torch.nan, 1.0], device=cuda)
    op = prequal.quantize_fp8.op
    for first in range(len(sizes)):
        place = torch.arange(torch.Size(shape).numel(), device=cuda) + first
        scale = sizes[place % len(sizes)].reshape(shape)
        got = prequal.quantize_fp8(x, granularity, dtype, scale=scale)
        assert torch.equal(bits(got[0]), bits(op.reference(x, granularity, dtype, scale=scale)[0]))
    assert served(cuda)


@pytest.mark.gpu
def test_more_tiles_than_a_grid_is_high_and_deep_are_reached(cuda):
    op = prequal.quantize_fp8.op
    for shape in ((65_537 * 128 + 3, 8), (65_540, 3, 8)):
        x = normal(cuda, *shape, dtype=torch.bfloat16)
        got = prequal.quantize_fp8(x, "block_128x128")
        assert served(cuda)
        assert op.contract.compare(got, op.reference(x, "block_128x128")) is None


@pytest.mark.gpu
@granularities
@pytest.mark.parametrize("shift", range(8))
def test_every_misalignment_gives_the_bits_of_the_aligned_one(cuda, granularity, shift):
    for width in (7, 128, 300, 1031, 4096):
        x = normal(cuda, 5, width + 8, dtype=torch.bfloat16)[:, shift : shift + width]
        got, want = prequal.quantize_fp8(x, granularity), prequal.quantize_fp8(x.contiguous(), granularity)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(bits(a), bits(b))


@pytest.mark.gpu
@granularities
def test_a_captured_graph_finds_new_scales_at_each_replay(cuda, granularity):
    x = normal(cuda, 300, 4096, dtype=torch.bfloat16)
    prequal.quantize_fp8(x, granularity)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scale = prequal.quantize_fp8(x, granularity)
    for factor in (3.0, 0.01):
        x.mul_(factor)
        graph.replay()
        want = prequal.quantize_fp8.op.reference(x, granularity)
        assert torch.equal(bits(q), bits(want[0]))
        assert torch.equal(scale, want[1])
    assert served(cuda)


@pytest.mark.gpu
@granularities
def test_a_side_stream_is_where_it_runs(cuda, granularity):
    x = torch.zeros(2048, 4096, device=cuda, dtype=torch.bfloat16)
    source = normal(cuda, 2048, 4096, dtype=torch.bfloat16)
    prequal.quantize_fp8(x, granularity)
    busy = torch.rand(4096, 4096, device=cuda)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy = busy @ busy
            busy = busy / busy.norm()
        x.copy_(source)
        got = prequal.quantize_fp8(x, granularity)
    stream.synchronize()
    op = prequal.quantize_fp8.op
    assert op.contract.compare(got, op.reference(source, granularity)) is None


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("granularity", ["tensor", "token", "block_1x128", "block_128x128"])
def test_rows_past_two_to_the_31_elements_are_reached(cuda, granularity):
    rows, width = (2**31 // 4096) + 128, 4096
    if torch.cuda.mem_get_info()[0] < 5 * rows * width:
        pytest.skip("not enough GPU memory")
    x = torch.ones(rows, width, device=cuda, dtype=torch.bfloat16)
    x[-1] = torch.linspace(-2, 2, width, device=cuda)
    q, scale = prequal.quantize_fp8(x, granularity)
    assert served(cuda)
    last = x[-128:].contiguous()
    given = {"scale": scale} if granularity == "tensor" else {}
    want, want_scale = prequal.quantize_fp8.op.reference(last, granularity, **given)
    assert torch.equal(bits(q[-128:]), bits(want))
    assert torch.equal(scale[-want_scale.shape[0] :], want_scale)
    assert bits(q[:128]).eq(bits(q[:1, :1])).all()


@pytest.mark.gpu
def test_more_rows_than_a_grid_has_blocks_of_short_ones(cuda):
    x = normal(cuda, 1_000_003, 8, dtype=torch.float16)
    op = prequal.quantize_fp8.op
    assert op.contract.compare(prequal.quantize_fp8(x, "token"), op.reference(x, "token")) is None


def needs_fp8_products():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch._scaled_mm needs sm_89")


def operands(cuda, rows=256, inner=1024, columns=384):
    x = normal(cuda, rows, inner, dtype=torch.bfloat16)
    weight = normal(cuda, columns, inner, dtype=torch.bfloat16, seed=1) * inner**-0.5
    return x, weight


def check_product(got, x, weight, q, q_scale, w, w_scale, by, weight_by):
    a, b = (
        prequal.dequantize_fp8(q, q_scale, by, torch.float32),
        prequal.dequantize_fp8(w, w_scale, weight_by, torch.float32),
    )
    want = a.double() @ b.double().t()
    # one rounding to bfloat16; and a tensor core's partial sums, which keep 14 bits or more of the largest term
    bound = 2.0**-8 * want.abs() + 2.0**-11 * (a.abs().double() @ b.abs().double().t())
    assert ((got.double() - want).abs() <= bound).all()
    # each operand is off by at most 2^-4 of a value, at random: 2^-4 / sqrt(3) in the mean, sqrt(2) of that in all
    exact = x.double() @ weight.double().t()
    assert (got.double() - exact).norm() <= 0.055 * exact.norm()


@pytest.mark.gpu
def test_scaled_mm_takes_a_scale_for_a_tensor(cuda):
    needs_fp8_products()
    x, weight = operands(cuda)
    (q, q_scale), (w, w_scale) = (prequal.quantize_fp8(y) for y in (x, weight))
    got = torch._scaled_mm(q, w.t(), q_scale, w_scale, out_dtype=torch.bfloat16)
    check_product(got, x, weight, q, q_scale, w, w_scale, "tensor", "tensor")
    assert served(cuda)


@pytest.mark.gpu
def test_scaled_mm_takes_a_scale_a_token_and_in_column_layout_a_scale_an_output(cuda):
    needs_fp8_products()
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("a scale a row needs sm_90")
    x, weight = operands(cuda)
    q, q_scale = prequal.quantize_fp8(x, "token")
    w, w_scale = prequal.quantize_fp8(weight, "token", scale_layout="column")
    got = torch._scaled_mm(q, w.t(), q_scale, w_scale, out_dtype=torch.bfloat16)
    check_product(got, x, weight, q, q_scale, w, w_scale.t().contiguous(), "token", "token")
    assert served(cuda)


@pytest.mark.gpu
def test_scaled_mm_takes_blocks_of_128_columns_by_blocks_of_128_by_128(cuda):
    needs_fp8_products()
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("scales by blocks of 128 need sm_90")
    if tuple(int(part) for part in torch.version.cuda.split(".")[:2]) < (12, 9):
        pytest.skip("scales by blocks of 128 need cuBLASLt of CUDA 12.9")
    x, weight = operands(cuda)
    q, q_scale = prequal.quantize_fp8(x, "block_1x128", scale_layout="column")
    w, w_scale = prequal.quantize_fp8(weight, "block_128x128")
    try:
        got = torch._scaled_mm(q, w.t(), q_scale.t(), w_scale.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError) as error:
        if "nvalid scaling configuration" not in str(error):
            raise
        pytest.skip(f"this torch takes no scales by blocks of 128: {str(error).splitlines()[0]}")
    check_product(got, x, weight, q, q_scale.t().contiguous(), w, w_scale, "block_1x128", "block_128x128")
    assert served(cuda)
