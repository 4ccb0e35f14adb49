"""What holds for every gated activation, swiglu and geglu in both forms; each by itself: test_swiglu, test_geglu."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import prequal

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# (op, its arguments behind the tensors): (torch's activation, what it loses to cancellation where gate is negative)
FORMS = {
    ("swiglu", ()): (F.silu, 2.0**-25),
    ("geglu", ("tanh",)): (functools.partial(F.gelu, approximate="tanh"), 2e-6),
    ("geglu", ("none",)): (F.gelu, 2e-6),
}
every_form = pytest.mark.parametrize(("name", "form"), FORMS, ids=["swiglu", "geglu tanh", "geglu erf"])


def inputs(device, dtype, *shape, tensors=2):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(tensors)]


def packed(gate, up, interleaved):
    if interleaved:
        return torch.stack((gate, up), dim=-1).flatten(-2)
    return torch.cat((gate, up), dim=-1)


def op_of(name, kind=""):
    return getattr(prequal, name + kind)


@every_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_it_agrees_with_fp64_within_the_rounding_of_the_dtype(device, dtype, name, form):
    gate, up = inputs(device, dtype, 7, 129)
    activation, lost = FORMS[name, form]
    want = activation(gate.double()) * up.double()
    got = op_of(name)(gate, up, *form).double()
    assert ((got - want).abs() <= 1.01 * ROUNDING[dtype] * want.abs() + lost).all()


@every_form
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [1, 8, 33, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_gives_what_apart_gives_both_ways(device, interleaved, width, dtype, name, form):
    gate, up, grad = inputs(device, dtype, 5, width, tensors=3)
    x = packed(gate, up, interleaved)
    contract = op_of(name).op.contract  # not the bits: torch's exp of strided values has another last one
    got = op_of(name, "_packed")(x, *form, interleaved=interleaved)
    assert contract.compare(got, op_of(name)(gate, up, *form)) is None
    dx = op_of(name, "_packed_backward")(grad, x, *form, interleaved=interleaved)
    want = packed(*op_of(name, "_backward")(grad, gate, up, *form), interleaved)
    assert op_of(name, "_backward").op.contract.compare(dx, want) is None


# ---- in place --------------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("exact_rounding", [False, True])
@pytest.mark.parametrize("width", [1, 33, 128, 4097])
@pytest.mark.parametrize("dtype", FLOATS)
def test_in_place_has_the_bits_of_fresh_and_returns_the_gate(device, name, form, exact_rounding, width, dtype):
    gate, up = inputs(device, dtype, 5, width)
    want, kept = op_of(name)(gate, up, *form, exact_rounding=exact_rounding), up.clone()
    assert op_of(name, "_")(gate, up, *form, exact_rounding=exact_rounding) is gate
    assert torch.equal(gate, want)
    assert torch.equal(up, kept)


@every_form
def test_in_place_on_columns_in_turn_is_right(device, name, form):
    """Their extents interleave, and no element is in both: the reference's case, and a right one."""
    x = inputs(device, torch.float32, 5, 64)[0]
    want = op_of(name)(x[:, 0::2], x[:, 1::2], *form)
    kept = x[:, 1::2].clone()
    op_of(name, "_")(x[:, 0::2], x[:, 1::2], *form)
    assert torch.equal(x[:, 0::2], want)
    assert torch.equal(x[:, 1::2], kept)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("width", [1, 31, 4095, 4096, 100_001])
def test_in_place_on_rows_of_a_packed_tensor_touches_nothing_else(cuda, name, form, width):
    """At odd starts, where lanes move elements for each other."""
    for dtype in (torch.float32, torch.bfloat16):
        both = torch.randn(33, 2 * width + 5, device=cuda).to(dtype)
        gate, up = both[:, 1 : 1 + width], both[:, width + 3 : 2 * width + 3]
        before = both.clone()
        want = op_of(name)(gate, up, *form)
        op_of(name, "_")(gate, up, *form)
        assert torch.equal(gate, want)
        before[:, 1 : 1 + width] = want
        assert torch.equal(both, before)
    for op in (name, name + "_"):
        assert prequal.stats()[op][str(cuda)] == {"fast": 2, "reference": {}}


@pytest.mark.gpu
@every_form
def test_in_place_allocates_nothing(cuda, name, form):
    gate, up = (torch.randn(64, 4096, device=cuda).bfloat16() for _ in range(2))
    op_of(name, "_")(gate, up, *form)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op_of(name, "_")(gate, up, *form)
    assert torch.cuda.max_memory_allocated() == before


# ---- the gradient ----------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_gradient_agrees_with_that_of_fp64(device, dtype, name, form):
    gate, up, grad = inputs(device, dtype, 33, 129, tensors=3)
    asking = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    got = torch.autograd.grad(op_of(name)(*asking, *form), asking, grad)
    exact = [gate.double().requires_grad_(), up.double().requires_grad_()]
    activation, _ = FORMS[name, form]
    want = torch.autograd.grad(activation(exact[0]) * exact[1], exact, grad.double())
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).abs() <= 1.01 * ROUNDING[dtype] * b.abs() + 5e-6).all()


@every_form
@pytest.mark.parametrize("interleaved", [False, True])
def test_double_backward_is_that_of_the_formula(interleaved, name, form):
    gate, up = (t.requires_grad_() for t in inputs(torch.device("cpu"), torch.float64, 2, 5))
    assert torch.autograd.gradcheck(lambda gate, up: op_of(name)(gate, up, *form), (gate, up))
    assert torch.autograd.gradgradcheck(lambda gate, up: op_of(name)(gate, up, *form), (gate, up))
    x = packed(gate, up, interleaved).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: op_of(name, "_packed")(x, *form, interleaved=interleaved), (x,))


@every_form
def test_only_the_inputs_are_saved_for_the_gradient(device, name, form):
    gate, up = (t.requires_grad_() for t in inputs(device, torch.bfloat16, 6, 40))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        op_of(name)(gate, up, *form)
    assert sorted(saved) == sorted([gate.data_ptr(), up.data_ptr()])


# ---- large, and anywhere ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.large
@every_form
def test_elements_past_two_to_the_31_are_reached(cuda, name, form):
    rows, width = 2**20 + 3, 2051
    if torch.cuda.mem_get_info()[0] < 4 * rows * width * 2:
        pytest.skip("not enough GPU memory")
    gate = torch.full((rows, width), 2.0, device=cuda, dtype=torch.bfloat16)
    up = torch.ones_like(gate)
    up[-1] = torch.linspace(-3, 3, width, device=cuda)
    got = op_of(name)(gate, up, *form)
    assert prequal.stats()[name][str(cuda)] == {"fast": 1, "reference": {}}
    want = op_of(name).op.reference(gate[-2:], up[-2:], *form)
    assert op_of(name).op.contract.compare(got[-2:], want) is None


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("shift", range(8))
def test_every_misalignment_gives_the_bits_of_the_aligned_one(cuda, shift, name, form):
    for width in (1, 31, 257, 4095, 10_001):
        gate, up, grad = (torch.randn(5, width + 8, device=cuda).bfloat16() for _ in range(3))
        views = [t[:, i : i + width] for t, i in ((grad, 0), (gate, shift), (up, 7 - shift))]
        whole = [t.clone() for t in views]
        assert torch.equal(op_of(name)(*views[1:], *form), op_of(name)(*whole[1:], *form))
        gradients = (op_of(name, "_backward")(*tensors, *form) for tensors in (views, whole))
        assert op_of(name, "_backward").op.contract.compare(*gradients) is None
