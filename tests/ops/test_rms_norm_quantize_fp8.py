"""rms_norm_quantize_fp8: the two ops one after the other, to the bit where that is said."""

from __future__ import annotations

import pytest
import torch

import prequal
import prequal.bench.shapes.rms_norm_quantize_fp8  # declares the cost
from prequal.ops import _fp8 as fp8
from prequal.registry import Cost

pytestmark = pytest.mark.usefixtures("bitwise_paths_serve")


def inputs(device, dtype, rows, width):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=generator).to(device, dtype)
    return x, (1 + 0.2 * torch.randn(width, generator=generator)).to(device, dtype)


def bits(x):
    return x.view(torch.uint8)


def same(got, want):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
def test_it_is_the_two_ops_one_after_the_other(granularity, dtype):
    x, weight = inputs(torch.device("cpu"), dtype, 5, 300)
    named = {"ue8m0": True, "scale_layout": "column"}
    got = prequal.rms_norm_quantize_fp8(x, weight, 1e-5, granularity, torch.float8_e5m2, weight_offset=1.0, **named)
    y = prequal.rms_norm(x, weight, 1e-5, weight_offset=1.0)
    assert same(got, prequal.quantize_fp8(y, granularity, torch.float8_e5m2, **named))


def check_kernels_one_after_the_other(cuda, x, weight, granularity, **named):
    got = prequal.rms_norm_quantize_fp8(x, weight, 1e-5, granularity, **named)
    want = prequal.quantize_fp8(prequal.rms_norm(x, weight, 1e-5, **named), granularity)
    for name in ("rms_norm_quantize_fp8", "rms_norm", "quantize_fp8"):
        assert prequal.stats()[name][str(cuda)]["reference"] == {}
    assert same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
@pytest.mark.parametrize("width", [8, 128, 264, 1024, 1032, 2048, 2056, 4096, 4104, 8192, 16384, 20_000])
def test_whole_words_have_the_bits_of_the_two_kernels(cuda, width, granularity, dtype, exact):
    x, weight = inputs(cuda, dtype, 1201, width)
    check_kernels_one_after_the_other(cuda, x, weight, granularity, exact_rounding=exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
@pytest.mark.parametrize("width", [1, 4095, 4097, 20_001, 70_001])
def test_other_rows_have_the_bits_of_the_two_kernels(cuda, width, granularity, dtype):
    x, weight = inputs(cuda, dtype, 261, width)
    check_kernels_one_after_the_other(cuda, x, weight, granularity)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_of", ["float32", "none"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
@pytest.mark.parametrize("width", [264, 1032, 4096, 8192])
def test_every_weight_gives_the_bits_of_the_two_kernels(cuda, width, granularity, offset, weight_of):
    x, weight = inputs(cuda, torch.bfloat16, 301, width)
    weight = weight.float() if weight_of == "float32" else None
    for exact in (False, True):
        check_kernels_one_after_the_other(cuda, x, weight, granularity, weight_offset=offset, exact_rounding=exact)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
def test_an_offset_of_the_weight_gives_the_bits_of_the_two_kernels(cuda, granularity):
    for width in (264, 1032, 4096, 8192):
        x, weight = inputs(cuda, torch.bfloat16, 301, width)
        for exact in (False, True):
            check_kernels_one_after_the_other(cuda, x, weight, granularity, weight_offset=1.0, exact_rounding=exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
def test_nan_and_infinity_have_the_bits_of_the_two_kernels(cuda, granularity, dtype):
    for width in (264, 1032, 4096, 8192, 4095):
        x, weight = inputs(cuda, dtype, 5, width)
        x[0, 3], x[1, 5], x[2] = torch.nan, torch.inf, 0.0
        weight[7] = torch.inf
        check_kernels_one_after_the_other(cuda, x, weight, granularity)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
def test_a_captured_graph_finds_new_scales_at_each_replay(cuda, granularity):
    x, weight = inputs(cuda, torch.bfloat16, 300, 4096)
    prequal.rms_norm_quantize_fp8(x, weight, 1e-5, granularity)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = prequal.rms_norm_quantize_fp8(x, weight, 1e-5, granularity)
    weight.mul_(3.0)
    graph.replay()
    assert same(got, prequal.quantize_fp8(prequal.rms_norm(x, weight, 1e-5), granularity))


@pytest.mark.gpu
def test_scaled_mm_takes_the_result(cuda):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("a scale a row needs sm_90")
    x, weight = inputs(cuda, torch.bfloat16, 256, 1024)
    # not rows of x: a tensor core truncates its sum again and again, which adds up where all terms have one sign
    other, _ = inputs(cuda, torch.bfloat16, 128, 1032)
    w, w_scale = prequal.quantize_fp8(other[:, :1024], "token", scale_layout="column")
    q, scale = prequal.rms_norm_quantize_fp8(x, weight, 1e-5)
    got = torch._scaled_mm(q, w.t(), scale, w_scale, out_dtype=torch.bfloat16).double()
    a = prequal.dequantize_fp8(q, scale, "token", torch.float32).double()
    b = prequal.dequantize_fp8(w, w_scale, "token", torch.float32, scale_layout="column").double()
    # one rounding to bfloat16; and a tensor core's partial sums, which keep 14 bits or more of the largest term
    assert ((got - a @ b.t()).abs() <= 2.0**-8 * (a @ b.t()).abs() + 2.0**-11 * (a.abs() @ b.abs().t())).all()


def test_nothing_requires_a_gradient(device):
    x = torch.randn(3, 40, device=device, requires_grad=True)
    assert not any(y.requires_grad for y in prequal.rms_norm_quantize_fp8(x))


def test_the_declared_cost_is_what_is_read_and_written():
    x, weight = torch.ones(6, 256, dtype=torch.bfloat16), torch.ones(256)
    op = prequal.rms_norm_quantize_fp8.op
    assert op.cost_of(op.bind((x, weight))) == Cost(6 * 256 * 3 + 6 * 4 + 1024, 9 * 6 * 256)
