"""fused_add_rms_norm_quantize_fp8: the two ops one after the other, to the bit where that is said."""

from __future__ import annotations

import pytest
import torch

import prequal
import prequal.bench.shapes.fused_add_rms_norm_quantize_fp8  # declares the cost
from prequal.ops import _fp8 as fp8
from prequal.registry import Cost

pytestmark = pytest.mark.usefixtures("bitwise_paths_serve")


def inputs(device, dtype, rows, width):
    generator = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(rows, width, generator=generator).to(device, dtype) for _ in range(2))
    return x, residual, (1 + 0.2 * torch.randn(width, generator=generator)).to(device, dtype)


def same(got, want):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


def one_after_the_other(x, residual, weight, eps, granularity, **named):
    y, total = prequal.fused_add_rms_norm(x, residual, weight, eps, **named)
    return *prequal.quantize_fp8(y, granularity), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
def test_it_is_the_two_ops_one_after_the_other(granularity, dtype):
    args = inputs(torch.device("cpu"), dtype, 5, 300)
    got = prequal.fused_add_rms_norm_quantize_fp8(*args, 1e-5, granularity, weight_offset=1.0)
    assert same(got, one_after_the_other(*args, 1e-5, granularity, weight_offset=1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
@pytest.mark.parametrize("width", [8, 264, 1024, 1032, 4096, 4104, 8192, 8200, 16384, 20_000])
def test_whole_words_have_the_bits_of_the_two_kernels(cuda, width, granularity, dtype, exact):
    args = inputs(cuda, dtype, 1201, width)
    got = prequal.fused_add_rms_norm_quantize_fp8(*args, 1e-5, granularity, exact_rounding=exact)
    want = one_after_the_other(*args, 1e-5, granularity, exact_rounding=exact)
    for name in ("fused_add_rms_norm_quantize_fp8", "fused_add_rms_norm", "quantize_fp8"):
        assert prequal.stats()[name][str(cuda)]["reference"] == {}
    assert same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
@pytest.mark.parametrize("width", [1, 4095, 20_001, 70_001])
def test_other_rows_have_the_bits_of_the_two_kernels(cuda, width, granularity, dtype):
    x, residual, weight = inputs(cuda, dtype, 261, width)
    got = prequal.fused_add_rms_norm_quantize_fp8(x, residual, weight, 1e-5, granularity)
    assert prequal.stats()["fused_add_rms_norm_quantize_fp8"][str(cuda)]["reference"] == {}
    assert same(got, one_after_the_other(x, residual, weight, 1e-5, granularity))
    assert torch.equal(got[2], x + residual)


def test_nothing_requires_a_gradient(device):
    x, residual, _ = inputs(device, torch.float32, 3, 40)
    out = prequal.fused_add_rms_norm_quantize_fp8(x.requires_grad_(), residual.requires_grad_())
    assert not any(y.requires_grad for y in out)


def test_the_declared_cost_is_what_is_read_and_written():
    x, weight = torch.ones(6, 256, dtype=torch.bfloat16), torch.ones(256)
    op = prequal.fused_add_rms_norm_quantize_fp8.op
    assert op.cost_of(op.bind((x, x, weight))) == Cost(6 * 256 * 7 + 6 * 4 + 1024, 10 * 6 * 256)
