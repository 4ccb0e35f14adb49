"""linear_gelu against fp64, its three paths, and that the epilogue is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import prequal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(device, dtype, rows, inner, outer):
    generator = torch.Generator().manual_seed(rows + inner + outer)
    x = torch.randn(rows, inner, generator=generator).to(device, dtype)
    weight = (torch.randn(outer, inner, generator=generator) * inner**-0.5).to(device, dtype)
    return x, weight, torch.randn(outer, generator=generator).to(device, dtype)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_near_fp64(device, dtype, approximate):
    x, weight, bias = inputs(device, dtype, 65, 256, 136)
    got = prequal.linear_gelu(x, weight, bias, approximate)
    want = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate=approximate)
    rtol, atol = prequal.linear_gelu.op.contract.bounds[dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_rounding_has_the_bits_of_the_sequential_reference(device, dtype, approximate):
    x, weight, bias = inputs(device, dtype, 65, 256, 136)
    got = prequal.linear_gelu(x, weight, bias, approximate, exact_rounding=True)
    assert torch.equal(got, F.gelu(F.linear(x, weight, bias), approximate=approximate))
    if device.type == "cuda":
        assert prequal.stats()["linear_gelu"][str(device)] == {"fast": 1, "reference": {}}


def test_the_reference_scope_is_the_sequential_path(device):
    x, weight, bias = inputs(device, torch.float32, 9, 64, 32)
    with prequal.reference("linear_gelu"):
        got = prequal.linear_gelu(x, weight, bias)
    assert torch.equal(got, F.gelu(F.linear(x, weight, bias), approximate="tanh"))
    assert prequal.stats()["linear_gelu"][str(device)]["fast"] == 0


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_gradients_are_those_of_the_chain(device, approximate, bias):
    args = [t.double() for t in inputs(device, torch.float32, 9, 24, 12)][: 2 + bias]
    grad = torch.randn(9, 12, generator=torch.Generator().manual_seed(1)).to(device).double()
    asking = [t.clone().requires_grad_() for t in args]
    given = asking if bias else [*asking, None]
    got = torch.autograd.grad(prequal.linear_gelu(*given, approximate=approximate), asking, grad)
    asking = [t.clone().requires_grad_() for t in args]
    want = torch.autograd.grad(F.gelu(F.linear(*asking), approximate=approximate), asking, grad)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradients_of_halves_are_near_those_of_fp64(device, dtype):
    every = inputs(device, dtype, 64, 128, 72)
    grad = torch.randn(64, 72, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    asking = [t.clone().requires_grad_() for t in every]
    got = torch.autograd.grad(prequal.linear_gelu(*asking), asking, grad)
    wide = [t.double().requires_grad_() for t in every]
    want = torch.autograd.grad(F.gelu(F.linear(*wide), approximate="tanh"), wide, grad.double())
    # h and its gradient are rounded to the dtype, then summed 64 to 128 at a time: sqrt(128) roundings of terms near 1
    step = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=4 * step, atol=24 * step)


def test_only_the_gradients_that_are_asked_for_are_computed(device):
    x, weight, bias = inputs(device, torch.float32, 5, 24, 8)
    bias.requires_grad_()
    prequal.linear_gelu(x, weight, bias).sum().backward()
    assert bias.grad is not None
    assert x.grad is None
    assert weight.grad is None


def test_double_backward_is_that_of_the_formula():
    every = [t.double().requires_grad_() for t in inputs(torch.device("cpu"), torch.float32, 3, 5, 4)]
    assert torch.autograd.gradcheck(prequal.linear_gelu, every)
    assert torch.autograd.gradgradcheck(prequal.linear_gelu, every)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_epilogue_leaves_no_gelu_of_its_own(cuda, dtype):
    from torch.profiler import ProfilerActivity, profile

    x, weight, bias = inputs(cuda, dtype, 4096, 1024, 4096)
    found = {}
    for exact in (False, True):
        prequal.linear_gelu(x, weight, bias, exact_rounding=exact)
        # without acc_events torch warns that events of other cycles are dropped; there is one cycle
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            prequal.linear_gelu(x, weight, bias, exact_rounding=exact)
            torch.cuda.synchronize()
        found[exact] = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert any("GeluCUDAKernel" in name for name in found[True]), "what is looked for is what the chain runs"
    assert not any("GeluCUDAKernel" in name for name in found[False])


@pytest.mark.gpu
def test_no_second_activation_is_allocated(cuda):
    x, weight, bias = inputs(cuda, torch.bfloat16, 4096, 256, 4096)
    size = 4096 * 4096 * 2
    for exact in (False, True):
        prequal.linear_gelu(x, weight, bias, exact_rounding=exact)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = prequal.linear_gelu(x, weight, bias, exact_rounding=exact)
        assert torch.cuda.max_memory_allocated() - before < 1.5 * size
        del out
