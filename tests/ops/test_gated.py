"""What holds for every gated activation: swiglu, and geglu in both forms."""

from __future__ import annotations

import pytest
import torch

import prequal

every_form = pytest.mark.parametrize(
    ("name", "form"), [("swiglu", ()), ("geglu", ("tanh",)), ("geglu", ("none",))], ids=["swiglu", "geglu", "geglu erf"]
)


def inputs(device, dtype, *shape, tensors=2):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(tensors)]


@every_form
@pytest.mark.parametrize("exact_rounding", [False, True])
@pytest.mark.parametrize("width", [1, 33, 128, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_in_place_has_the_bits_of_fresh_and_returns_the_gate(device, name, form, exact_rounding, width, dtype):
    gate, up = inputs(device, dtype, 5, width)
    want, kept = getattr(prequal, name)(gate, up, *form, exact_rounding=exact_rounding), up.clone()
    assert getattr(prequal, name + "_")(gate, up, *form, exact_rounding=exact_rounding) is gate
    assert torch.equal(gate, want)
    assert torch.equal(up, kept)


@every_form
def test_in_place_on_columns_in_turn_is_right(device, name, form):
    """Their extents interleave, and no element is in both: the reference's case, and a right one."""
    x = inputs(device, torch.float32, 5, 64)[0]
    want = getattr(prequal, name)(x[:, 0::2], x[:, 1::2], *form)
    kept = x[:, 1::2].clone()
    getattr(prequal, name + "_")(x[:, 0::2], x[:, 1::2], *form)
    assert torch.equal(x[:, 0::2], want)
    assert torch.equal(x[:, 1::2], kept)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("width", [1, 31, 4095, 4096, 100_001])
def test_in_place_on_rows_of_a_packed_tensor_touches_nothing_else(cuda, name, form, width):
    """At odd starts, where lanes move elements for each other."""
    for dtype in (torch.float32, torch.bfloat16):
        packed = torch.randn(33, 2 * width + 5, device=cuda).to(dtype)
        gate, up = packed[:, 1 : 1 + width], packed[:, width + 3 : 2 * width + 3]
        before = packed.clone()
        want = getattr(prequal, name)(gate, up, *form)
        getattr(prequal, name + "_")(gate, up, *form)
        assert torch.equal(gate, want)
        before[:, 1 : 1 + width] = want
        assert torch.equal(packed, before)
    for op in (name, name + "_"):
        assert prequal.stats()[op][str(cuda)] == {"fast": 2, "reference": {}}


@pytest.mark.gpu
@every_form
def test_in_place_allocates_nothing(cuda, name, form):
    gate, up = (torch.randn(64, 4096, device=cuda).bfloat16() for _ in range(2))
    getattr(prequal, name + "_")(gate, up, *form)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    getattr(prequal, name + "_")(gate, up, *form)
    assert torch.cuda.max_memory_allocated() == before
