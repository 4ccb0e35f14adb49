"""linear_bias and linear_relu against fp64, their gradients, and that the epilogue leaves no ReLU of its own."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import prequal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = {"linear_bias": F.linear, "linear_relu": lambda *args: F.linear(*args).relu()}
every_op = pytest.mark.parametrize("name", list(OPS))


def inputs(device, dtype, rows, inner, outer):
    generator = torch.Generator().manual_seed(rows + inner + outer)
    x = torch.randn(rows, inner, generator=generator).to(device, dtype)
    weight = (torch.randn(outer, inner, generator=generator) * inner**-0.5).to(device, dtype)
    return x, weight, torch.randn(outer, generator=generator).to(device, dtype)


@every_op
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(65, 256, 136), (1, 8, 8), (33, 100, 36)])
def test_it_is_near_fp64(device, dtype, shape, name):
    args = inputs(device, dtype, *shape)
    got = getattr(prequal, name)(*args)
    rtol, atol = getattr(prequal, name).op.contract.bounds[dtype]
    torch.testing.assert_close(got.double(), OPS[name](*(x.double() for x in args)), rtol=rtol, atol=atol)
    if device.type == "cuda":
        assert prequal.stats()[name][str(device)] == {"fast": 1, "reference": {}}


@every_op
def test_the_gradients_are_those_of_the_chain(device, name):
    args = [x.double().requires_grad_() for x in inputs(device, torch.float32, 9, 24, 12)]
    grad = torch.randn(9, 12, generator=torch.Generator().manual_seed(1)).to(device).double()
    got = torch.autograd.grad(getattr(prequal, name)(*args), args, grad)
    for a, b in zip(got, torch.autograd.grad(OPS[name](*args), args, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@every_op
def test_the_gradients_can_be_differentiated(name):
    args = [x.double().requires_grad_() for x in inputs(torch.device("cpu"), torch.float32, 3, 5, 4)]
    assert torch.autograd.gradcheck(getattr(prequal, name), args)
    assert torch.autograd.gradgradcheck(getattr(prequal, name), args)


@every_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradients_of_halves_are_near_those_of_fp64(device, dtype, name):
    every = inputs(device, dtype, 64, 128, 72)
    grad = torch.randn(64, 72, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    asking = [t.clone().requires_grad_() for t in every]
    out = getattr(prequal, name)(*asking)
    got = torch.autograd.grad(out, asking, grad)
    wide = [t.double().requires_grad_() for t in every]
    # by the result's own signs: near zero those of fp64 may be others
    dh = grad.double() * (out.double() > 0 if name == "linear_relu" else 1)
    want = torch.autograd.grad(F.linear(*wide), wide, dh)
    # sums of 64 to 128 terms near 1, rounded to the dtype
    step = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=4 * step, atol=24 * step)


@every_op
def test_only_the_gradients_that_are_asked_for_are_computed(device, name):
    x, weight, bias = inputs(device, torch.float32, 5, 24, 8)
    bias.requires_grad_()
    getattr(prequal, name)(x, weight, bias).sum().backward()
    assert bias.grad is not None
    assert x.grad is None
    assert weight.grad is None


@every_op
def test_it_is_compiled_once_for_every_width(device, name):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(getattr(prequal, name), backend=counter, fullgraph=True, dynamic=True)
    for shape in ((5, 24, 16), (7, 48, 40), (9, 17, 31)):
        args = inputs(device, torch.float32, *shape)
        torch.testing.assert_close(compiled(*args), getattr(prequal, name)(*args))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_keeps_nan_and_makes_no_negative_number(device, dtype):
    x, weight, bias = inputs(device, dtype, 64, 128, 72)
    x[3] = torch.nan
    got = prequal.linear_relu(x, weight, bias)
    assert got[3].isnan().all()
    assert (got[:3] >= 0).all()
    assert (got[4:] >= 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_epilogue_leaves_no_relu_of_its_own(cuda, dtype):
    args = inputs(cuda, dtype, 4096, 1024, 4096)
    report = prequal.verify_replacement(OPS["linear_relu"], prequal.linear_relu, args, gone=["aten::relu"])
    assert report.after.launches < report.before.launches


@pytest.mark.gpu
@every_op
def test_no_second_activation_is_allocated(cuda, name):
    args = inputs(cuda, torch.bfloat16, 4096, 256, 4096)
    getattr(prequal, name)(*args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = getattr(prequal, name)(*args)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 4096 * 4096 * 2
    del out
