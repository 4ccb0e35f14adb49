"""rms_norm against torch's own, on every path, and where its formula has edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prequal
import prequal.bench.shapes.rms_norm  # declares the cost
from prequal.registry import Cost


def test_fp64_agrees_with_numpy(device):
    x, weight = np.random.default_rng(0).normal(size=(5, 33)), np.linspace(-1, 1, 33)
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    got = prequal.rms_norm(torch.tensor(x, device=device), torch.tensor(weight, device=device))
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_agrees_with_torch_within_the_rounding_of_the_dtype(device, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 129, generator=generator).to(device, dtype)
    weight = torch.randn(129, generator=generator).to(device, dtype)
    got = prequal.rms_norm(x, weight, 1e-5)
    want = F.rms_norm(x.double(), (129,), weight.double(), 1e-5)
    # one rounding at the store: half an ulp, and for fp32 the roundings of the sum
    bound = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert ((got.double() - want).abs() <= 1.01 * bound * want.abs() + 1e-7).all()


def test_a_zero_row_stays_zero_and_eps_zero_makes_it_nan(device):
    x = torch.zeros(2, 16, device=device)
    assert prequal.rms_norm(x).eq(0).all()
    assert prequal.rms_norm(x, None, 0.0).isnan().all()


def test_a_nan_spoils_its_row_and_no_other(device):
    x = torch.ones(3, 16, device=device)
    x[1, 5] = torch.nan
    assert prequal.rms_norm(x).isnan().all(dim=1).tolist() == [False, True, False]


def test_scaling_the_input_changes_nothing_when_eps_is_zero(device):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(device)
    torch.testing.assert_close(prequal.rms_norm(4096.0 * x, None, 0.0), prequal.rms_norm(x, None, 0.0), rtol=0, atol=0)


def test_double_backward_is_that_of_the_formula():
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(prequal.rms_norm, (x, weight))
    assert torch.autograd.gradgradcheck(prequal.rms_norm, (x, weight))


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_reached(cuda):
    rows, width = (2**31 // 4096) + 3, 4096
    if torch.cuda.mem_get_info()[0] < 3 * rows * width * 2:
        pytest.skip("not enough GPU memory")
    x = torch.ones(rows, width, device=cuda, dtype=torch.bfloat16)
    x[-1] = 2.0
    x[-1, 0] = 0.0
    got = prequal.rms_norm(x)
    assert prequal.stats()["rms_norm"][str(cuda)]["fast"] == 1
    want = prequal.rms_norm.op.reference(x[-2:])
    assert prequal.rms_norm.op.contract.compare(got[-2:], want) is None


@pytest.mark.gpu
def test_more_rows_than_a_grid_of_short_ones_has_blocks(cuda):
    x = torch.randn(1_000_003, 8, device=cuda, dtype=torch.float16)
    assert prequal.rms_norm.op.contract.compare(prequal.rms_norm(x), prequal.rms_norm.op.reference(x)) is None


def test_the_declared_cost_is_what_is_read_and_written():
    x, weight = torch.ones(6, 10, dtype=torch.bfloat16), torch.ones(10)
    op = prequal.rms_norm.op
    assert op.cost_of(op.bind((x,))) == Cost(2 * 120, 180)
    assert op.cost_of(op.bind((x, weight))) == Cost(2 * 120 + 40, 240)
