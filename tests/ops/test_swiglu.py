"""swiglu against torch's own chain and NumPy: what it alone computes; the rest in test_gated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prequal


def inputs(device, dtype, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(2)]


def test_fp64_agrees_with_numpy(device):
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 5, 33))
    got = prequal.swiglu(torch.tensor(gate, device=device), torch.tensor(up, device=device))
    np.testing.assert_allclose(got.cpu().numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_rounding_has_the_bits_of_the_eager_chain(device, dtype):
    gate, up = inputs(device, dtype, 64, 1024)
    want = F.silu(gate) * up
    assert torch.equal(prequal.swiglu(gate, up, exact_rounding=True), want)
    assert not torch.equal(prequal.swiglu(gate, up), want)


def test_the_ends_of_the_range_are_what_the_formula_makes_of_them(device):
    for dtype in (torch.float32, torch.bfloat16):
        gate = torch.tensor([-torch.inf, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, torch.inf, torch.nan], device=device)
        got = prequal.swiglu(gate.to(dtype), torch.ones_like(gate).to(dtype))
        want = F.silu(gate.to(dtype))
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-30, equal_nan=True)
