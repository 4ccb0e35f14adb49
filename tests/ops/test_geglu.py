"""geglu against torch's own chain and NumPy: what it alone computes; the rest in test_gated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prequal


def inputs(device, dtype, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(2)]


both_forms = pytest.mark.parametrize("form", ["tanh", "none"])


def test_fp64_agrees_with_numpy(device):
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 5, 33))
    erf = np.vectorize(math.erf)(gate / math.sqrt(2))
    tanh = np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    for form, inner in (("none", erf), ("tanh", tanh)):
        got = prequal.geglu(torch.tensor(gate, device=device), torch.tensor(up, device=device), form)
        np.testing.assert_allclose(got.cpu().numpy(), 0.5 * gate * (1 + inner) * up, rtol=1e-12, atol=1e-15)


@both_forms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_rounding_has_the_bits_of_the_eager_chain(device, dtype, form):
    gate, up = inputs(device, dtype, 64, 1024)
    want = F.gelu(gate, approximate=form) * up
    same = (prequal.geglu(gate, up, form, exact_rounding=True) == want).float().mean()
    assert same > 0.999  # the last bit of tanh and erf is the library's own
    assert (prequal.geglu(gate, up, form) == want).float().mean() < 0.95


@both_forms
def test_the_ends_of_the_range_are_zero_and_the_gate_itself(device, form):
    gate = torch.tensor([-1e30, -100.0, -0.0, 0.0, 100.0, 1e30, torch.nan], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        got = prequal.geglu(gate.to(dtype), torch.ones_like(gate).to(dtype), form)
        assert got[:4].eq(0).all()
        assert torch.equal(got[4:6], gate[4:6].to(dtype))
        assert got[6].isnan()
