"""Losses and gradients in bf16 and fp16, held against float64."""

from __future__ import annotations

import math

import pytest
import torch
from formula_of_the_loss import CLASSES, F64, TOKENS, close, data, error, every_half, formula, with_gradients

import prequal
from prequal.losses.chunks import row_elements


@every_half
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_in_halves_are_as_near_to_float64_as_the_eager_chains(dtype, reduction, device):
    """Eager has its logits in the half, and rounds its sum once. Sums in float32 are nearer. In the half, the sum of n
    of 8 chunks that know nothing of each other has n / 8 of the last one's variance: 8 roundings are (8 + 1) / 2 of the
    last. A library that splits a product may round it, too, before it is added: one more."""
    inputs = data(device, tokens=256, width=64, classes=1000, dtype=dtype)
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    upstream = torch.ones((), device=device) if reduction == "mean" else torch.full((256,), 1 / 256, device=device)
    truth = with_gradients(formula, *exact, upstream=upstream.double(), reduction=reduction)
    eager = with_gradients(formula, *inputs, upstream=upstream.to(dtype), reduction=reduction)
    workspace = 32 * row_elements(1000, 2) * 2
    for sums, bound in ((None, (4.5 + 1) ** 0.5), (torch.float32, 1.0)):
        got = with_gradients(
            prequal.linear_cross_entropy,
            *inputs,
            upstream=upstream,
            reduction=reduction,
            max_workspace_bytes=workspace,
            weight_grad_dtype=sums,
        )
        assert got[1].dtype == got[2].dtype == dtype
        assert error(got[1], truth[1]) <= error(eager[1], truth[1])
        assert error(got[2], truth[2]) <= bound * error(eager[2], truth[2])
        assert error(got[0], truth[0]) <= error(eager[0], truth[0]) + 1e-4


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sums", [None, torch.float32])
def test_small_probabilities_survive_fp16(reduction, sums, device):
    """p / N of 1e-7 is nothing in fp16; under a scaled loss, as GradScaler makes it, the gradient is there."""
    inputs = data(device, tokens=1100, width=16, classes=2000, dtype=torch.float16)
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    scale = 65536.0 if reduction == "mean" else 16.0
    upstream = torch.full((1100,) if reduction == "none" else (), scale, device=device)
    truth = with_gradients(formula, *exact, upstream=upstream.double(), reduction=reduction)
    got = with_gradients(
        prequal.linear_cross_entropy,
        *inputs,
        upstream=upstream,
        reduction=reduction,
        weight_grad_dtype=sums,
        max_workspace_bytes=256 * 2000 * 2,
    )
    for a, b in zip(got[1:], truth[1:], strict=True):
        assert error(a, b) < 4e-3  # logits of fp16 near 2 are 2^-10 apart, and so are probabilities of themselves


@pytest.mark.parametrize("sums", [None, torch.float32])
def test_large_class_weights_are_within_fp16_where_their_gradients_are(sums, device):
    hidden, weight, target = data(device, tokens=1100, width=16, classes=50, dtype=torch.float16)
    class_weight = 1e5 * (1 + torch.rand(50, generator=torch.Generator().manual_seed(5), dtype=F64)).to(device)
    upstream = torch.full((), 1e-5, device=device)
    truth = with_gradients(
        formula,
        hidden.double(),
        weight.double(),
        target,
        upstream=upstream.double(),
        reduction="sum",
        class_weight=class_weight,
    )
    got = with_gradients(
        prequal.linear_cross_entropy,
        hidden,
        weight,
        target,
        upstream=upstream,
        reduction="sum",
        class_weight=class_weight,
        weight_grad_dtype=sums,
        max_workspace_bytes=256 * 56 * 2,
    )
    for a, b in zip(got[1:], truth[1:], strict=True):
        assert error(a, b) < 4e-3


@every_half
@pytest.mark.parametrize("above", [math.inf, math.nan])
def test_an_upstream_gradient_that_is_no_number_is_its_own_tokens(above, dtype, device):
    inputs = data(device, dtype=dtype)
    upstream = torch.ones(TOKENS, device=device)
    one, *_ = with_gradients(prequal.linear_cross_entropy, *inputs, upstream=upstream, reduction="none")[1:]
    upstream[5] = above
    got, of_weight = with_gradients(prequal.linear_cross_entropy, *inputs, upstream=upstream, reduction="none")[1:]
    others = torch.arange(TOKENS, device=device) != 5
    assert not bool(got[5].isfinite().any())
    assert not bool(of_weight.isfinite().any())
    close([got[others]], [one[others]], rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_is_float32_and_two_calls_have_the_same_bits(dtype, device):
    inputs = data(device, tokens=77, classes=301, dtype=dtype)
    runs = [with_gradients(prequal.linear_cross_entropy, *inputs, max_workspace_bytes=20_000) for _ in range(2)]
    assert runs[0][0].dtype == torch.float32
    for a, b in zip(*runs, strict=True):
        assert prequal.contracts.Bitwise().compare(a, b) is None


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_parameters(device):
    hidden, weight, target = data(device, dtype=torch.float32)
    bias = torch.rand(CLASSES, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        got = with_gradients(prequal.linear_cross_entropy, hidden, weight, target, bias=bias)
    want = with_gradients(
        prequal.linear_cross_entropy, *(x.bfloat16() for x in (hidden, weight)), target, bias=bias.bfloat16()
    )
    assert [x.dtype for x in got] == [torch.float32] * 4
    close(got, want, rtol=0, atol=0)
