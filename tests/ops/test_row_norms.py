"""row_norms against NumPy in float64, and at the edges of what float32 holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prequal
from prequal.ops.row_norms import FORMS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_it_agrees_with_numpy(device, dtype, form):
    x = torch.randn(37, 257, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    squares = np.square(x.double().cpu().numpy()).sum(1)
    want = {"norm": np.sqrt(squares), "inverse": 1 / np.sqrt(squares), "square": squares}[form]
    got = prequal.row_norms(x, form)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-12 if dtype == torch.float64 else 4e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_whole_numbers_have_no_rounding(device, dtype):
    x = torch.randint(-3, 4, (300, 1025), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    assert torch.equal(prequal.row_norms(x, "square"), x.double().square().sum(1).float())


def test_a_row_of_zeros_or_below_the_normal_numbers_has_an_inverse_of_zero(device):
    x = torch.tensor([[0.0, 0.0], [1e-30, 0.0], [1e-15, 0.0]], device=device)
    assert prequal.row_norms(x, "inverse").gt(0).tolist() == [False, False, True]


def test_a_nan_spoils_its_row_and_no_other(device):
    x = torch.ones(5, 40, device=device)
    x[2, 39], x[3, 0] = torch.nan, torch.inf
    for form, infinite in (("norm", torch.inf), ("inverse", 0.0), ("square", torch.inf)):
        got = prequal.row_norms(x, form)
        assert got.isnan().tolist() == [False, False, True, False, False]
        assert got[3] == infinite


def test_the_norm_of_a_row_does_not_depend_on_the_others(device):
    x = torch.randn(70, 129, generator=torch.Generator().manual_seed(2)).to(device)
    every = prequal.row_norms(x)
    for begin, end in ((0, 1), (3, 8), (69, 70)):
        assert torch.equal(prequal.row_norms(x[begin:end]), every[begin:end])


def test_gradients_are_those_of_the_formula():
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for form in FORMS:
        assert torch.autograd.gradcheck(lambda y: prequal.row_norms(y, form), (x,))  # noqa: B023
