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


def llama(x, weight, eps):
    """The eager chain of transformers' LlamaRMSNorm."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gemma(x, weight, eps):
    """The eager chain of transformers' GemmaRMSNorm."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


def inputs(device, dtype, rows=64, width=1024):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, width, generator=generator).to(device, dtype)
    return x, (1 + 0.2 * torch.randn(width, generator=generator)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_rounding_keeps_the_roundings_of_llamas_chain(device, dtype):
    x, weight = inputs(device, dtype)
    want = llama(x, weight, 1e-5)
    same = (prequal.rms_norm(x, weight, 1e-5, exact_rounding=True) == want).float().mean()
    fast = (prequal.rms_norm(x, weight, 1e-5) == want).float().mean()
    assert same > 0.999  # the order of the sum decides a last bit of the norm now and then
    assert fast < 0.95  # one rounding fewer shows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_offset_of_one_is_gemmas_weight(device, dtype):
    x, weight = inputs(device, dtype)
    got = prequal.rms_norm(x, weight - 1, 1e-6, weight_offset=1.0)
    assert (got == gemma(x, weight - 1, 1e-6)).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 129, 4096, 4095])
def test_the_gradient_agrees_with_that_of_fp64(device, dtype, width):
    generator = torch.Generator().manual_seed(width)
    x, grad = (torch.randn(33, width, generator=generator).to(device, dtype) for _ in range(2))
    weight = torch.randn(width, generator=generator).to(device, dtype)
    asking = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    got = torch.autograd.grad(prequal.rms_norm(*asking, 1e-5), asking, grad)
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    want = torch.autograd.grad(F.rms_norm(exact[0], (width,), exact[1], 1e-5), exact, grad.double())
    # one rounding at the store, and what the sums lost: 33 terms near 1
    bound = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).abs() <= 1.01 * bound * b.abs() + 2e-5).all()


def test_a_frozen_weight_costs_no_gradient(device):
    x, weight = torch.randn(3, 16, device=device, requires_grad=True), torch.ones(16, device=device)
    prequal.rms_norm(x, weight).sum().backward()
    assert x.grad is not None
    dx, dweight = prequal.rms_norm_backward(torch.ones(3, 16, device=device), x.detach(), weight, weight_grad=False)
    torch.testing.assert_close(dx, x.grad)
    assert dweight.shape == (0,)


def test_the_double_backward_of_the_gradient_is_that_of_its_formula():
    generator = torch.Generator().manual_seed(3)
    grad, x = (torch.randn(2, 5, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(prequal.rms_norm_backward, (grad, x, weight))


def test_a_saved_value_that_is_written_over_is_noticed(device):
    x = torch.randn(3, 16, device=device, requires_grad=True)
    y = x * 2
    out = prequal.rms_norm(y).sum()
    with torch.no_grad():
        prequal.fused_add_rms_norm_(y, torch.ones_like(y))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "fused_add_rms_norm"])
def test_a_weight_of_another_dtype_counts_in_float32_and_is_the_references_case(device, name, other):
    op = getattr(prequal, name).op
    x, weight = torch.randn(4, 40, device=device), torch.randn(40, device=device).to(other)
    before = (x, x.clone()) if name == "fused_add_rms_norm" else (x,)
    got, want = (getattr(prequal, name)(*before, w) for w in (weight, weight.float()))
    assert op.contract.compare(got, want) is None
    assert op.unmet_need(op.bind((*before, weight))).name == "dtype"
    assert op.unmet_need(op.bind((*before, weight.float()))) is None
    if device.type == "cuda":
        assert prequal.stats()[name][str(device)] == {"fast": 1, "reference": {"unsupported_input:dtype": 1}}


@pytest.mark.gpu
def test_training_goes_by_the_kernels_both_ways(cuda):
    x = torch.randn(5, 256, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(256, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    prequal.rms_norm(x, weight).sum().backward()
    torch.compile(lambda: prequal.rms_norm(x, weight), fullgraph=True, backend="aot_eager")().sum().backward()
    for name in ("rms_norm", "rms_norm_backward"):
        assert prequal.stats()[name][str(cuda)] == {"fast": 2, "reference": {}}


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 1031, 4096, 4095, 8192, 65536, 131072])
def test_the_gradient_of_many_rows_is_deterministic_and_right(cuda, width):
    rows = 40_000_000 // width
    generator = torch.Generator(cuda).manual_seed(width)
    grad, x = (torch.randn(rows, width, device=cuda, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(width, device=cuda, generator=generator)
    first, second = (prequal.rms_norm_backward(grad, x, weight) for _ in range(2))
    assert prequal.stats()["rms_norm_backward"][str(cuda)] == {"fast": 2, "reference": {}}
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    op = prequal.rms_norm_backward.op
    assert op.contract.compare(first, op.reference(grad, x, weight)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", range(8))
def test_every_misalignment_of_input_gives_the_bits_of_the_aligned_one(cuda, dtype, shift):
    """The sums are taken over the same columns by the same threads wherever a row lies."""
    for width in (1, 7, 31, 257, 1021, 4095, 8191, 20_001, 70_001):
        memory = torch.randn(5, width + 8, device=cuda).to(dtype)
        x = memory[:, shift : shift + width]
        weight = torch.randn(width + 8, device=cuda).to(dtype)[shift : shift + width]
        assert torch.equal(prequal.rms_norm(x, weight), prequal.rms_norm(x.contiguous(), weight.clone()))


@pytest.mark.gpu
def test_nothing_beside_a_ragged_row_is_written(cuda):
    for width in (1, 7, 33, 255, 257, 4095):
        memory = torch.full((9, width + 6), 7.0, device=cuda, dtype=torch.bfloat16)
        stream = torch.ones(9, width, device=cuda, dtype=torch.bfloat16)
        prequal.fused_add_rms_norm_(memory[:, 3 : 3 + width], stream)
        assert prequal.stats()["fused_add_rms_norm_"][str(cuda)]["reference"] == {}
        assert memory[:, :3].eq(7).all()
        assert memory[:, 3 + width :].eq(7).all()
        assert stream.eq(8).all()


@pytest.mark.gpu
@pytest.mark.large
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_trace_of_torchscript_computes_and_does_not_remember(device):
    x, other, weight = (torch.randn(*shape, device=device) for shape in ((3, 64), (3, 64), (64,)))
    traced = torch.jit.trace(lambda x, weight: prequal.rms_norm(x, weight) + 1, (x, weight))
    torch.testing.assert_close(traced(other, weight), prequal.rms_norm(other, weight) + 1)
