"""What stands around a call: a second walk, transforms, checkpoints, torch.compile, gradients already there."""

from __future__ import annotations

import math

import pytest
import torch
from formula_of_the_loss import CLASSES, F64, SMALL, TOKENS, close, data, every_reduction, formula, with_gradients
from torch import library

import prequal
from prequal.losses.chunks import row_elements


@every_reduction
def test_a_second_walk_through_a_kept_graph_gives_the_same_gradients(reduction, device):
    hidden, weight, target = data(device)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = prequal.linear_cross_entropy(*inputs, target, reduction=reduction, max_workspace_bytes=SMALL).sum()
    first = torch.autograd.grad(3.0 * loss, inputs, retain_graph=True)
    kept = [x.clone() for x in first]
    for x in first:
        x.zero_()  # whoever got them may do so
    close(torch.autograd.grad(3.0 * loss, inputs), kept)


def test_a_second_derivative_is_an_error(device):
    hidden, weight, target = data(device)
    loss = prequal.linear_cross_entropy(hidden.requires_grad_(), weight, target)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="its gradient has no gradient of its own"):
        grad.sum().backward()


def test_a_second_derivative_is_an_error_of_the_node_that_a_dispatch_mode_sees(device, watching_dispatch):
    hidden, weight, target = data(device)
    with watching_dispatch:
        loss = prequal.linear_cross_entropy(hidden.requires_grad_(), weight, target) + hidden.square().sum()
        (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="its gradient has no gradient of its own"):
        grad.sum().backward()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("above", [math.inf, math.nan])
@every_reduction
def test_tokens_that_are_all_ignored_have_no_gradient_whatever_comes_from_above(reduction, above, traced, device):
    """As where a sum is divided by the number of tokens that count."""
    hidden, weight, target = data(device)
    torch.compiler.reset()
    loss = torch.compile(prequal.linear_cross_entropy, backend="aot_eager") if traced else prequal.linear_cross_entropy
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    found = loss(*inputs, torch.full_like(target, -100), reduction=reduction)
    for grad in torch.autograd.grad(found, inputs, torch.full_like(found, above)):
        assert bool((grad == 0).all())


def test_functional_transforms_are_those_of_the_formula(device):
    hidden, weight, target = data(device)

    def loss(function):
        def of(x, w):
            out = function(x, w, target, z_loss=0.1)
            return out[0] if isinstance(out, tuple) else out

        return of

    def sum_of_squares(f):
        return lambda x, w: sum(g.square().sum() for g in torch.func.grad(f, (0, 1))(x, w))

    ours, theirs = loss(prequal.linear_cross_entropy), loss(formula)
    close(torch.func.grad(ours, (0, 1))(hidden, weight), torch.func.grad(theirs, (0, 1))(hidden, weight))
    tangents = (torch.ones_like(hidden), torch.ones_like(weight))
    close(
        torch.func.jvp(ours, (hidden, weight), tangents), torch.func.jvp(theirs, (hidden, weight), tangents), rtol=1e-9
    )
    second = torch.func.grad(sum_of_squares(ours))(hidden, weight)
    close([second], [torch.func.grad(sum_of_squares(theirs))(hidden, weight)], rtol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, device):
    from torch.utils.checkpoint import checkpoint

    hidden, weight, target = data(device)

    def through(x, w, y):
        return checkpoint(lambda a, b: prequal.linear_cross_entropy(2 * a, b, y), x, w, use_reentrant=reentrant)

    inputs = hidden, weight, target
    want = with_gradients(lambda x, w, y: formula(2 * x, w, y), *inputs)
    # reentrant checkpoints know backward() alone
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    (0.7 * through(x, w, target)).backward()
    close((x.grad, w.grad), want[1:])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_reduction
def test_it_compiles_without_a_graph_break(reduction, backend, device):
    inputs = data(device)
    torch.compiler.reset()

    def loss(x, w, y, bias):
        return prequal.linear_cross_entropy(
            2 * x, w, y, bias=bias, reduction=reduction, softcap=5.0, max_workspace_bytes=SMALL
        )

    named = {"bias": torch.rand(CLASSES, device=device, dtype=F64)}
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    close(with_gradients(compiled, *inputs, **named), with_gradients(loss, *inputs, **named))
    with torch.no_grad():
        close([compiled(*inputs, **named)], [loss(*inputs, **named)])


def test_one_graph_serves_every_number_of_tokens():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(
        lambda x, w, y: prequal.linear_cross_entropy(x, w, y, softcap=5.0),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    compiled = set()
    for tokens in (5, 9, 13, 20):
        inputs = data(torch.device("cpu"), tokens=tokens)
        close(with_gradients(loss, *inputs), with_gradients(lambda *args: formula(*args, softcap=5.0), *inputs))
        compiled.add(counter.frame_count)
    assert len(compiled) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_compiles_in_halves_with_lse(dtype, device):
    inputs = data(device, dtype=dtype)
    torch.compiler.reset()

    def loss(x, w, y):
        loss, lse = prequal.linear_cross_entropy(x, w, y, return_lse=True, weight_grad_dtype=torch.float32)
        return loss + 0.1 * lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    close(with_gradients(compiled, *inputs), with_gradients(loss, *inputs), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck_of_the_node_that_a_graph_holds(reduction, device):
    hidden, weight, target = data(device, dtype=torch.float32)
    args = (hidden.requires_grad_(), weight.requires_grad_(), target, None, None)
    plain = (-100, reduction, 0.1, 0.0, 0.0, False, SMALL, False, True, [True, True, False])
    library.opcheck(torch.ops.prequal.linear_cross_entropy_forward.default, (*args, *plain))


def test_a_dispatch_mode_sees_one_node(device, watching_dispatch):
    with watching_dispatch as seen:
        prequal.linear_cross_entropy(*data(device))
    assert torch.ops.prequal.linear_cross_entropy_forward.default in seen


@every_reduction
def test_a_gradient_is_added_to_the_one_that_is_there(reduction, device):
    hidden, weight, target = data(device)
    want = with_gradients(formula, hidden, weight, target, reduction=reduction)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    memory = None
    for step in range(1, 4):
        x.grad = None
        loss = prequal.linear_cross_entropy(
            x, w, target, reduction=reduction, accumulate_into_grad=True, max_workspace_bytes=SMALL
        )
        weights = torch.full_like(loss, 0.7) if reduction != "none" else torch.linspace(-1, 2, TOKENS, dtype=F64)
        loss.backward(weights.to(device))
        close((loss, x.grad, w.grad), (want[0], want[1], step * want[2]))
        assert memory in (None, w.grad.data_ptr()), "the gradient that was there is the one that is there"
        memory = w.grad.data_ptr()


def test_a_pass_that_is_asked_for_other_gradients_adds_nothing(device):
    hidden, weight, target = data(device)
    want = with_gradients(formula, hidden, weight, target, upstream=torch.ones((), dtype=F64, device=device))
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    w.grad = torch.ones_like(w)

    def loss():
        return prequal.linear_cross_entropy(x, w, target, accumulate_into_grad=True)

    loss().backward(inputs=[x])
    close((x.grad, *torch.autograd.grad(loss(), x), *torch.autograd.grad(loss(), w)), (want[1], want[1], want[2]))
    assert bool((w.grad == 1).all())


def test_a_hook_that_comes_after_the_forward_pass_is_given_the_gradient(device):
    hidden, weight, target = data(device)
    want = with_gradients(formula, hidden, weight, target, upstream=torch.ones((), dtype=F64, device=device))
    w = weight.requires_grad_()
    w.grad = torch.ones_like(w)
    loss = prequal.linear_cross_entropy(hidden, w, target, accumulate_into_grad=True)
    w.register_hook(lambda grad: 2 * grad)
    loss.backward()
    close([w.grad], [1 + 2 * want[2]])


def test_what_a_gradient_cannot_be_added_to_is_an_error(device):
    hidden, weight, target = data(device, dtype=torch.float32)
    for made, match in (
        (weight.clone().requires_grad_() * 2, "expected a leaf for weight"),
        (weight.half().requires_grad_(), "expected float32 or bfloat16 for weight, got float16"),
    ):
        with pytest.raises(ValueError, match=match):
            prequal.linear_cross_entropy(hidden.to(made.dtype), made, target, accumulate_into_grad=True)
    half = hidden.bfloat16(), weight.bfloat16().requires_grad_(), target
    with pytest.raises(
        ValueError, match="weight_grad_dtype: expected None with accumulate_into_grad, which adds in bf"
    ):
        prequal.linear_cross_entropy(*half, accumulate_into_grad=True, weight_grad_dtype=torch.float32)
    hooked = weight.clone().requires_grad_()
    hooked.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match="expected no hooks on weight"):
        prequal.linear_cross_entropy(hidden, hooked, target, accumulate_into_grad=True)


def test_every_chunk_is_counted(device):
    hidden, weight, target = data(device, dtype=torch.float32)
    workspace = 5 * row_elements(CLASSES, 4) * 4
    with torch.no_grad():
        prequal.linear_cross_entropy(hidden, weight, target, max_workspace_bytes=workspace)
    prequal.linear_cross_entropy(hidden.requires_grad_(), weight, target, max_workspace_bytes=workspace).backward()
    seen = prequal.stats()

    def calls(op):
        row = seen[op][str(device)]
        return row["fast"] + sum(row["reference"].values())

    assert {op: calls(op) for op in seen} == {
        "cross_entropy_stats": 3,
        "cross_entropy_chunk_": 3,
        "scale_unless_one_": 1,
    }
