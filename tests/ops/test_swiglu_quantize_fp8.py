"""swiglu_quantize_fp8: the two ops one after the other, to the bit."""

from __future__ import annotations

import pytest
import torch

import prequal
import prequal.bench.shapes.swiglu_quantize_fp8  # declares the cost
from prequal.ops import _fp8 as fp8
from prequal.registry import Cost

pytestmark = pytest.mark.usefixtures("bitwise_paths_serve")


def inputs(device, dtype, rows, width):
    generator = torch.Generator().manual_seed(width)
    return [torch.randn(rows, width, generator=generator).to(device, dtype) for _ in range(2)]


def same(got, want):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", fp8.BY_ROW)
def test_it_is_the_two_ops_one_after_the_other(device, granularity, dtype, exact):
    for width in (1, 127, 128, 1031, 4096, 14336, 33_000):
        gate, up = inputs(device, dtype, 131, width)
        got = prequal.swiglu_quantize_fp8(gate, up, granularity, exact_rounding=exact)
        assert same(got, prequal.quantize_fp8(prequal.swiglu(gate, up, exact_rounding=exact), granularity))
    for name in ("swiglu_quantize_fp8", "swiglu", "quantize_fp8"):
        seen = prequal.stats()[name][str(device)]
        assert (seen["reference"] == {}) == (device.type == "cuda")


@pytest.mark.parametrize("granularity", fp8.BY_ROW)
def test_halves_of_one_tensor_need_no_copy(device, granularity):
    both = inputs(device, torch.bfloat16, 33, 512)[0]
    gate, up = both.chunk(2, dim=-1)
    got = prequal.swiglu_quantize_fp8(gate, up, granularity)
    assert same(got, prequal.quantize_fp8(prequal.swiglu_packed(both), granularity))


def test_nothing_requires_a_gradient(device):
    gate, up = inputs(device, torch.float32, 3, 40)
    assert not any(y.requires_grad for y in prequal.swiglu_quantize_fp8(gate.requires_grad_(), up))


def test_the_declared_cost_is_what_is_read_and_written():
    x = torch.ones(6, 256, dtype=torch.bfloat16)
    op = prequal.swiglu_quantize_fp8.op
    assert op.cost_of(op.bind((x, x))) == Cost(6 * 256 * 5 + 6 * 4, 13 * 6 * 256)
