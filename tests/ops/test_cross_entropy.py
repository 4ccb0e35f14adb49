"""The ops on chunks of logits, against torch in float64. tests/losses has the loss that is made of them."""

from __future__ import annotations

import pytest
import torch

import prequal

ROWS, CLASSES = 7, 133


def chunk(device):
    """logits [n, V], target [n], coefficients [n, 4], class_weight [V], all for float64."""
    generator = torch.Generator().manual_seed(0)
    logits, coefficients, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)
        for shape in ((ROWS, CLASSES), (ROWS, 4), (CLASSES,))
    )
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator).to(device)
    target[2] = CLASSES + 3  # of another slice
    return 3 * logits, target, coefficients, weight.abs()


def of_the_formula(logits, target, coefficients, weight, softcap):
    """(stats [n, 4], the gradient [n, V] of a lse + b lse^2 / 2 - c z[target] - d sum(w z))"""
    x = logits.detach().clone().requires_grad_()
    z = softcap * torch.tanh(x / softcap) if softcap else x
    largest, lse = z.amax(1), z.logsumexp(1)
    inside = target < CLASSES
    picked = torch.where(inside, z.gather(1, target.clamp(max=CLASSES - 1)[:, None])[:, 0], 0.0)
    weighed = (z * weight).sum(1)
    a, b, c, d = coefficients.unbind(1)
    (a * lse + b * lse.square() / 2 - c * picked - d * weighed).sum().backward()
    stats = torch.stack((largest, (z - largest[:, None]).exp().sum(1), picked, weighed / CLASSES), 1)
    return stats.detach(), x.grad


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_statistics_and_gradient_are_those_of_the_formula(device, softcap):
    logits, target, coefficients, weight = chunk(device)
    stats, gradient = of_the_formula(logits, target, coefficients, weight, softcap)
    found = prequal.cross_entropy_stats(logits, target, weight, softcap=softcap)
    torch.testing.assert_close(found, stats, rtol=1e-12, atol=1e-11)
    lse = found[:, 0] + found[:, 1].log()
    out = prequal.cross_entropy_gradient_(logits, lse, target, coefficients, weight, softcap=softcap)
    assert out is logits
    torch.testing.assert_close(logits, gradient, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_one_launch_is_the_two_ops(device, softcap):
    logits, target, coefficients, weight = chunk(device)
    stats, gradient = of_the_formula(logits, target, coefficients, weight, softcap)
    found = torch.full_like(stats, 7.0)
    prequal.cross_entropy_chunk_(logits, found, target, coefficients, weight, softcap=softcap)
    torch.testing.assert_close(found, stats, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(logits, gradient, rtol=1e-12, atol=1e-11)


def test_a_row_of_zero_coefficients_has_a_gradient_of_zeros_whatever_its_logits(device):
    logits, target, coefficients, weight = (x.float() if x.is_floating_point() else x for x in chunk(device))
    logits[3, 5], logits[4] = torch.nan, torch.inf
    coefficients[3:5] = 0.0
    prequal.cross_entropy_chunk_(logits, torch.empty(ROWS, 4, device=device), target, coefficients, weight)
    assert logits[3:5].eq(0).all()
    assert logits.isfinite().all()


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_scaling_multiplies_and_leaves_what_a_factor_of_one_would(device, factor):
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(1)).to(device)
    want = x * factor
    assert prequal.scale_unless_one_(x, torch.full((1,), factor, device=device)) is x
    assert torch.equal(x, want)


@pytest.mark.gpu
@pytest.mark.large
def test_rows_past_2_31_logits_are_those_rows(cuda):
    classes, rows = 131_077, 16_400  # 2^31 logits are 16,383.4 rows
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    logits = torch.randn(64, classes, device=cuda, dtype=torch.bfloat16).repeat(-(-rows // 64), 1)[:rows]
    target = torch.arange(rows, device=cuda) * 7919 % classes
    coefficients = torch.ones(rows, 4, device=cuda)
    coefficients[:, 3] = 0
    last = logits[-20:].clone()
    stats, of_last = torch.empty(rows, 4, device=cuda), torch.empty(20, 4, device=cuda)
    prequal.cross_entropy_chunk_(logits, stats, target, coefficients)
    prequal.cross_entropy_chunk_(last, of_last, target[-20:], coefficients[-20:])
    assert torch.equal(logits[-20:], last)
    assert torch.equal(stats[-20:], of_last)
    assert prequal.stats()["cross_entropy_chunk_"][str(cuda)] == {"fast": 2, "reference": {}}
