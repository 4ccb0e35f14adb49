"""linear_cross_entropy against float64 autograd of the plain formula, by torch's own cross_entropy, and its edges."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

import prequal
from prequal.ops import _cross_entropy as ce

F64 = torch.float64
TOKENS, WIDTH, CLASSES = 13, 8, 23
# three chunks of 5, 5 and 3 tokens at 23 classes in float64
SMALL = 5 * ce.row_elements(CLASSES, 8) * 8

OPTIONS = {
    "bias": {"bias": True},
    "ignored": {"ignore_index": 3},
    "smoothing": {"label_smoothing": 0.2},
    "z": {"z_loss": 0.05},
    "softcap": {"softcap": 1.5},
    "weights": {"class_weight": True},
}
ALONE = [()] + [(name,) for name in OPTIONS]
PAIRS = list(itertools.combinations(OPTIONS, 2))
EVERY = [*ALONE, *PAIRS, tuple(OPTIONS)]
every_choice = pytest.mark.parametrize("choice", EVERY, ids=lambda names: "+".join(names) or "plain")
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def data(device, *, tokens=TOKENS, width=WIDTH, classes=CLASSES, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=F64)
    weight = torch.randn(classes, width, generator=generator, dtype=F64) * width**-0.5
    target = torch.randint(0, classes, (tokens,), generator=generator)
    target[::4] = 3 % classes
    return hidden.to(device, dtype), weight.to(device, dtype), target.to(device)


def chosen(choice, device, classes=CLASSES, dtype=F64):
    """Keyword arguments of linear_cross_entropy."""
    found: dict = {}
    for name in choice:
        found |= OPTIONS[name]
    generator = torch.Generator().manual_seed(5)
    for name in ("bias", "class_weight"):
        if found.get(name):
            x = torch.rand(classes, generator=generator, dtype=F64) + 0.1
            found[name] = x.to(device, dtype if name == "bias" else F64)
    return found


def formula(
    hidden,
    weight,
    target,
    *,
    bias=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    class_weight=None,
):
    """(loss, lse) by torch's own linear and cross_entropy."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    each = F.cross_entropy(
        logits, target, class_weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    lse = logits.logsumexp(1)
    counts = target != ignore_index
    each = each + torch.where(counts, z_loss * lse**2, 0.0)
    if reduction == "none":
        return each, lse
    if reduction == "sum":
        return each.sum(), lse
    weights = counts if class_weight is None else torch.where(counts, class_weight[target.clamp(0)], 0.0)
    return each.sum() / weights.sum(), lse


def with_gradients(function, hidden, weight, target, upstream=None, **named):
    """The result, and the gradients of hidden, weight and bias where there is one."""
    inputs = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    if named.get("bias") is not None:
        named["bias"] = named["bias"].detach().clone().requires_grad_()
    loss = function(*inputs, target, **named)
    loss = loss[0] if isinstance(loss, tuple) else loss
    inputs += [named["bias"]] if named.get("bias") is not None else []
    weights = torch.linspace(-1, 2, loss.numel(), device=loss.device, dtype=loss.dtype).view(loss.shape)
    weights = torch.full_like(loss, 0.7) if loss.dim() == 0 else weights
    return [loss.detach(), *torch.autograd.grad(loss, inputs, weights if upstream is None else upstream)]


def close(got, want, rtol=1e-10, atol=1e-12):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_dtype=False)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


# ---- the formula -----------------------------------------------------------------------------------------------------


@every_reduction
@every_choice
def test_loss_and_gradients_are_those_of_the_plain_formula(choice, reduction, device):
    inputs, named = data(device), chosen(choice, device)
    want = with_gradients(formula, *inputs, reduction=reduction, **named)
    for workspace in (SMALL, ce.WORKSPACE_BYTES):
        got = with_gradients(
            prequal.linear_cross_entropy, *inputs, reduction=reduction, max_workspace_bytes=workspace, **named
        )
        close(got, want)


@every_choice
def test_without_gradients_the_loss_is_the_same_and_lse_comes_with_it(choice, device):
    inputs, named = data(device), chosen(choice, device)
    loss, lse = prequal.linear_cross_entropy(*inputs, return_lse=True, max_workspace_bytes=SMALL, **named)
    close((loss, lse), formula(*inputs, **named))
    assert not loss.requires_grad
    assert not lse.requires_grad


@every_reduction
@every_choice
def test_a_gradient_of_lse_is_added_to_that_of_the_loss(choice, reduction, device):
    inputs, named = data(device), chosen(choice, device)

    def total(function, **more):
        def of(*args, **named):
            loss, lse = function(*args, reduction=reduction, **named, **more)
            return loss.square().sum() + (lse * torch.linspace(-1, 1, lse.numel(), device=device, dtype=F64)).sum()

        return of

    got = with_gradients(
        total(prequal.linear_cross_entropy, return_lse=True, max_workspace_bytes=SMALL), *inputs, **named
    )
    close(got, with_gradients(total(formula), *inputs, **named))


def test_gradients_are_made_for_what_asks_and_for_nothing_else(device):
    hidden, weight, target = data(device)
    bias = torch.rand(CLASSES, device=device, dtype=F64)
    every = with_gradients(
        formula, hidden, weight, target, upstream=torch.ones((), dtype=F64, device=device), bias=bias
    )
    for asks in itertools.product((False, True), repeat=3):
        inputs = [x.clone().requires_grad_(on) for x, on in zip((hidden, weight, bias), asks, strict=True)]
        loss = prequal.linear_cross_entropy(inputs[0], inputs[1], target, bias=inputs[2])
        assert loss.requires_grad == any(asks)
        if any(asks):
            loss.backward()
        for x, on, want in zip(inputs, asks, every[1:], strict=True):
            if on:
                close([x.grad], [want])
            else:
                assert x.grad is None


def test_leading_dimensions_are_kept(device):
    hidden, weight, target = data(device, tokens=12)
    want, want_lse = formula(hidden, weight, target, reduction="none")
    loss, lse = prequal.linear_cross_entropy(
        hidden.view(3, 4, WIDTH), weight, target.view(3, 4).int(), reduction="none", return_lse=True
    )
    close((loss, lse), (want.view(3, 4), want_lse.view(3, 4)))
    one = prequal.linear_cross_entropy(hidden[0], weight, target[0])
    close([one], [want[0]])


@pytest.mark.parametrize(("tokens", "classes"), [(1, 1), (1, 2), (7, 1), (127, 3), (5, 257), (64, 1031), (3, 262_147)])
def test_sizes_that_divide_nothing(tokens, classes, device):
    inputs = data(device, tokens=tokens, classes=classes)
    for rows in (1, 3, tokens):
        got = with_gradients(
            prequal.linear_cross_entropy, *inputs, max_workspace_bytes=rows * ce.row_elements(classes, 8) * 8
        )
        close(got, with_gradients(formula, *inputs), atol=1e-11)


def test_strided_inputs(device):
    hidden, weight, target = data(device)
    wide = torch.zeros(TOKENS, 2 * WIDTH + 1, device=device, dtype=F64)
    wide[:, 1::2] = hidden
    inputs = wide[:, 1::2], weight.t().contiguous().t(), torch.stack((target, target), 1)[:, 0]
    close(
        with_gradients(prequal.linear_cross_entropy, *inputs, max_workspace_bytes=SMALL),
        with_gradients(formula, hidden, weight, target),
    )


# ---- nothing, and what is none ---------------------------------------------------------------------------------------


def test_nothing_but_ignored_tokens_is_a_mean_of_nan_a_sum_of_zero_and_no_gradient(device):
    hidden, weight, target = data(device)
    target = torch.full_like(target, -100)
    for reduction, want in (("mean", math.nan), ("sum", 0.0)):
        loss, *gradients = with_gradients(
            prequal.linear_cross_entropy, hidden, weight, target, reduction=reduction, max_workspace_bytes=SMALL
        )
        assert math.isnan(loss) if math.isnan(want) else loss == want
        assert all(bool((x == 0).all()) for x in gradients)


@every_half
def test_nothing_but_ignored_tokens_in_a_half(dtype, device):
    hidden, weight, target = data(device, dtype=dtype)
    loss, *gradients = with_gradients(
        prequal.linear_cross_entropy, hidden, weight, torch.full_like(target, -100), reduction="sum"
    )
    assert loss == 0
    assert all(bool((x == 0).all()) for x in gradients)


@every_reduction
def test_no_tokens(reduction, device):
    hidden, weight, target = data(device, tokens=0)
    loss, *gradients = with_gradients(prequal.linear_cross_entropy, hidden, weight, target, reduction=reduction)
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert loss.numel() == 0 or (math.isnan(loss) if reduction == "mean" else loss == 0)
    assert [x.shape for x in gradients] == [hidden.shape, weight.shape]
    assert bool((gradients[1] == 0).all())


def test_a_target_that_is_no_class_is_an_error_where_somebody_looks(device):
    hidden, weight, target = data(device)
    for wrong in (CLASSES, -1, -99, 2**40):
        target[5] = wrong
        with pytest.raises(ValueError, match=rf"target: expected classes 0 to 22 or ignore_index -100, got {wrong}"):
            prequal.linear_cross_entropy(hidden, weight, target, checked=True)


def test_a_target_that_is_no_class_is_nan_where_nobody_looks(device, monkeypatch):
    """As on a GPU: the loss of that token and its gradient, and nobody else's."""
    from prequal.ops import linear_cross_entropy  # the function; its module:

    module = __import__("sys").modules[linear_cross_entropy.__module__]
    monkeypatch.setattr(module.Loss, "checked", property(lambda self: False, lambda self, value: None))
    hidden, weight, target = data(device)
    want = with_gradients(formula, hidden, weight, target, reduction="none")
    for wrong in (CLASSES, -1, 2**40, -(2**40)):
        at = target.clone()
        at[5] = wrong
        loss, of_hidden, of_weight = with_gradients(
            prequal.linear_cross_entropy, hidden, weight, at, reduction="none", max_workspace_bytes=SMALL
        )
        others = torch.arange(TOKENS, device=device) != 5
        assert loss[5].isnan()
        assert of_hidden[5].isnan().all()
        assert of_weight.isnan().all()
        close((loss[others], of_hidden[others]), (want[0][others], want[1][others]))
        assert prequal.linear_cross_entropy(hidden, weight, at).isnan()


@every_reduction
@every_choice
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_neither_pass_looks_at_a_value_or_brings_one_from_the_host(dtype, choice, reduction, monkeypatch):
    """On tensors that have no values; on a GPU either would wait for the device."""
    module = __import__("sys").modules[prequal.linear_cross_entropy.__module__]

    def from_the_host(*args, **kwargs):
        raise AssertionError("a tensor made of a number of the host's")

    named = chosen(choice, torch.device("cpu"), dtype=dtype)
    how = module.Loss(
        named.get("ignore_index", -100),
        reduction,
        named.get("label_smoothing", 0.0),
        named.get("z_loss", 0.0),
        named.get("softcap", 0.0),
        False,
        SMALL // 4,
        0,
        CLASSES,
    )
    hidden, weight, target, bias, class_weight = (
        None if x is None else x.to("meta")
        for x in (*data("cpu", dtype=dtype), named.get("bias"), named.get("class_weight"))
    )
    for name in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.setattr(torch, name, from_the_host)
    tensors = hidden, weight, target, bias, class_weight
    wants = (True, True, bias is not None)
    for wide in (False, True):
        sums = module.replace(how, wide_weight_grad=wide)
        loss, lse, made = module._passes(sums, *tensors, wants)
        assert loss.shape == ((TOKENS,) if reduction == "none" else ())
        if reduction != "none":
            module._finish(made, hidden, weight, torch.empty_like(loss))
        for of_loss, of_lse in ((torch.empty_like(loss), None), (None, torch.empty_like(lse))):
            *_, made = module._passes(sums, *tensors, wants, lse, (of_loss, of_lse))
            found = module._finish(made, hidden, weight, None)
            assert [x.shape for x in found[:2]] == [hidden.shape, weight.shape]


def test_classes_that_are_masked_by_minus_infinity(device):
    hidden, weight, target = data(device)
    bias = torch.zeros(CLASSES, device=device, dtype=F64)
    bias[-4:] = -torch.inf
    target = target % (CLASSES - 4)
    loss, of_hidden, of_weight, of_bias = with_gradients(
        prequal.linear_cross_entropy, hidden, weight, target, bias=bias, max_workspace_bytes=SMALL
    )
    want = with_gradients(formula, hidden, weight, target, bias=bias)
    close((loss, of_hidden, of_weight, of_bias), want)
    assert bool((of_bias[-4:] == 0).all())


def test_a_not_a_number_in_a_token_stays_that_tokens(device):
    hidden, weight, target = data(device)
    hidden[2, 1] = math.nan
    loss, lse = prequal.linear_cross_entropy(hidden, weight, target, reduction="none", return_lse=True)
    assert loss.isnan().nonzero().tolist() == [[2]]
    assert lse.isnan().nonzero().tolist() == [[2]]


# ---- halves ----------------------------------------------------------------------------------------------------------


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
    workspace = 32 * ce.row_elements(1000, 2) * 2
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


# ---- what stands around the call -------------------------------------------------------------------------------------


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


def test_a_dispatch_mode_sees_one_node(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
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
    workspace = 5 * ce.row_elements(CLASSES, 4) * 4
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


# ---- wrong calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"hidden": [1.0]}, TypeError, r"hidden: expected a torch.Tensor, got list"),
        ({"hidden": torch.ones(13, 8).long()}, TypeError, r"hidden: expected a floating dtype, got int64"),
        ({"hidden": torch.ones(())}, ValueError, r"hidden: expected at least one dimension"),
        ({"weight": torch.ones(23, 7)}, ValueError, r"weight: expected shape \[V, 8\], got \[23, 7\]"),
        ({"weight": torch.ones(0, 8)}, ValueError, r"weight: expected at least one class"),
        ({"weight": torch.ones(23, 8).half()}, TypeError, r"weight: expected float32 like hidden, got float16"),
        ({"target": torch.ones(13)}, TypeError, r"target: expected int32 or int64, got float32"),
        ({"target": torch.ones(12).long()}, ValueError, r"target: expected shape \[13\], got \[12\]"),
        ({"bias": torch.ones(22)}, ValueError, r"bias: expected shape \[23\], got \[22\]"),
        ({"class_weight": torch.ones(22)}, ValueError, r"class_weight: expected shape \[23\], got \[22\]"),
        ({"reduction": "avg"}, ValueError, r"reduction: expected 'mean', 'sum' or 'none', got 'avg'"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing: expected 0 to 1, got 1.5"),
        ({"z_loss": -1.0}, ValueError, r"z_loss: expected a finite number >= 0, got -1.0"),
        ({"softcap": 0.0}, ValueError, r"softcap: expected None or a finite number > 0, got 0.0"),
        ({"max_workspace_bytes": 0}, ValueError, r"max_workspace_bytes: expected 1 to"),
        ({"return_lse": 1}, TypeError, r"return_lse: expected a bool, got int"),
        ({"weight_grad_dtype": torch.float64}, ValueError, r"weight_grad_dtype: expected None or torch.float32"),
        ({"vocabulary": (0, 23)}, ValueError, r"vocabulary: expected None without a process_group"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_a_wrong_call_names_the_argument(change, kind, match):
    named = {"hidden": torch.ones(13, 8), "weight": torch.ones(23, 8), "target": torch.zeros(13).long()} | change
    with pytest.raises(kind, match=match):
        prequal.linear_cross_entropy(**named)


def test_a_wrong_dtype_is_an_error_under_autocast(device):
    hidden, weight, target = data(device, dtype=torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        with pytest.raises(TypeError, match=r"weight: expected a floating dtype, got int64"):
            prequal.linear_cross_entropy(hidden, weight.long(), target)
        with pytest.raises(TypeError, match=r"weight: expected float64 like hidden, got float32"):
            prequal.linear_cross_entropy(hidden.double(), weight, target)  # which autocast leaves alone


def test_a_wrong_call_is_an_error_where_it_is_traced(device):
    hidden, weight, target = data(device)
    torch.compiler.reset()
    for named, match in (
        ({"reduction": "avg"}, "reduction: expected 'mean', 'sum' or 'none', got 'avg'"),
        ({"bias": torch.ones(7, device=device, dtype=F64)}, "bias: expected shape"),
        ({"weight_grad_dtype": torch.float64}, "weight_grad_dtype: expected None or torch.float32"),
    ):
        call = torch.compile(lambda x: prequal.linear_cross_entropy(x, weight, target, **named), backend="eager")  # noqa: B023
        with pytest.raises(Exception, match=match):
            call(hidden)


# ---- chunks ----------------------------------------------------------------------------------------------------------


def test_chunks_fit_the_workspace_and_are_as_few_as_it_allows():
    for tokens, classes, itemsize, budget in itertools.product(
        (0, 1, 127, 128, 129, 8192, 10_007), (1, 7, 32_000, 131_072, 262_147), (2, 4, 8), (1, 2**20, 2**28, 2**40)
    ):
        rows = ce.chunk_rows(tokens, classes, itemsize, budget)
        row = ce.row_elements(classes, itemsize) * itemsize
        assert row % 16 == 0
        assert classes * itemsize <= row < classes * itemsize + 16
        assert rows * row <= budget or rows <= 1
        found = ce.chunks(tokens, rows)
        assert [i for begin, end in found for i in range(begin, end)] == list(range(tokens))
        assert len(found) == -(-tokens // max(1, budget // row)), "no more chunks than the workspace asks for"
        sizes = [end - begin for begin, end in found]
        alike = -(-tokens // max(1, len(found)))
        assert rows == alike or (rows % 16 == 0 and rows < alike + 128), "of like size, but for whole tiles"
        assert all(size == rows for size in sizes[1:])
        assert all(0 < size <= rows for size in sizes[:1])


def test_the_logits_of_the_bar_have_eight_chunks_in_less_than_300_megabytes():
    rows = ce.chunk_rows(8192, 131_072, 2, ce.WORKSPACE_BYTES)
    assert rows == 1024
    assert len(ce.chunks(8192, rows)) == 8
    assert rows * 131_072 * 2 < 299e6


def test_four_mebibytes_hold_a_32nd_of_the_logits_of_512_tokens():
    rows = ce.chunk_rows(512, 128_256, 2, 4 * 2**20)
    assert rows == 16
    assert 31 * rows * ce.row_elements(128_256, 2) <= 512 * 128_256


# ---- on a GPU --------------------------------------------------------------------------------------------------------

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.gpu
@every_dtype
@every_reduction
@pytest.mark.parametrize("choice", [(), ("softcap",), tuple(OPTIONS)], ids=["plain", "softcap", "everything"])
@pytest.mark.parametrize("classes", [1000, 50_257])
def test_the_kernels_give_the_answer_of_the_references(classes, choice, reduction, dtype, cuda):
    inputs = data(cuda, tokens=300, width=64, classes=classes, dtype=dtype)
    named = chosen(choice, cuda, classes, dtype)
    named |= {
        "reduction": reduction,
        "max_workspace_bytes": 64 * ce.row_elements(classes, dtype.itemsize) * dtype.itemsize,
    }
    got = with_gradients(prequal.linear_cross_entropy, *inputs, **named)
    assert sum(sum(row["reference"].values()) for op in prequal.stats().values() for row in op.values()) == 0
    with prequal.reference():
        want = with_gradients(prequal.linear_cross_entropy, *inputs, **named)
    for a, b in zip(got, want, strict=True):  # a logit's gradient may be rounded the other way: a half's last bit
        assert error(a, b.double()) < {torch.float32: 1e-5, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype]


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_reduction
def test_no_host_synchronisation_forward_or_backward(reduction, cuda):
    hidden, weight, target = data(cuda, tokens=100, dtype=torch.bfloat16)
    named = {
        "reduction": reduction,
        "max_workspace_bytes": 30 * 48,
        **chosen(tuple(OPTIONS), cuda, dtype=torch.bfloat16),
    }
    upstream = torch.ones(100 if reduction == "none" else (), device=cuda)
    with_gradients(prequal.linear_cross_entropy, hidden, weight, target, upstream=upstream, **named)
    try:
        torch.cuda.set_sync_debug_mode("error")
        with_gradients(prequal.linear_cross_entropy, hidden, weight, target, upstream=upstream, **named)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_graph_replays_on_new_inputs(cuda):
    hidden, weight, target = data(cuda, tokens=100, dtype=torch.bfloat16)
    for _ in range(2):
        prequal.linear_cross_entropy(hidden, weight, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = prequal.linear_cross_entropy(hidden, weight, target)
    hidden.copy_(hidden.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss, prequal.linear_cross_entropy(hidden, weight, target))


@pytest.mark.gpu
@pytest.mark.parametrize("sums", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_captured_training_step_replays_on_new_inputs(dtype, sums, cuda):
    hidden, weight, target = data(cuda, tokens=100, dtype=dtype)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    named = {"max_workspace_bytes": 30 * 48, "weight_grad_dtype": sums}

    def step():
        loss = prequal.linear_cross_entropy(hidden, weight, target, **named)
        return (loss.detach(), *torch.autograd.grad(2 * loss, (hidden, weight)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    with torch.no_grad():
        hidden.copy_(hidden.flip(0).clone())
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_logits_of_512_tokens_take_a_31st_of_eagers(cuda):
    hidden, weight, target = data(cuda, tokens=512, width=64, classes=128_256, dtype=torch.bfloat16)

    def peak(call):
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    ours = peak(lambda: prequal.linear_cross_entropy(hidden, weight, target, max_workspace_bytes=4 * 2**20))
    assert 31 * ours <= peak(lambda: F.cross_entropy(F.linear(hidden, weight), target))


@pytest.mark.gpu
@pytest.mark.parametrize("sums", [None, torch.float32])
def test_memory_beyond_inputs_and_gradients_is_the_workspace(sums, cuda):
    """And in float32 what is added up there; 4 MiB are for the numbers of each token."""
    tokens, width, classes, workspace = 4096, 512, 32_000, 32 * 2**20
    hidden, weight, target = data(cuda, tokens=tokens, width=width, classes=classes, dtype=torch.bfloat16)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def step():
        hidden.grad = weight.grad = None
        loss = prequal.linear_cross_entropy(
            hidden, weight, target, max_workspace_bytes=workspace, weight_grad_dtype=sums
        )
        loss.backward()

    step()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    beyond = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
    assert beyond <= workspace + 4 * 2**20 + (0 if sums is None else 4 * weight.numel())


# ---- the vocabulary spread over ranks --------------------------------------------------------------------------------


def as_rank(rank: int, file: str, sizes: list[int]) -> None:
    """A process of its own."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(sizes))
    first, classes = sum(sizes[:rank]), sum(sizes)
    mine = slice(first, first + sizes[rank])
    even = len(set(sizes)) == 1
    place = {"process_group": dist.group.WORLD, "vocabulary": None if even else (first, classes)}
    cpu = torch.device("cpu")
    hidden, weight, target = data(cpu, classes=classes)
    for choice in [*ALONE, tuple(OPTIONS)]:
        whole = chosen(choice, cpu, classes)
        part = {k: v[mine] if isinstance(v, Tensor) else v for k, v in whole.items()}
        for reduction in ("mean", "none"):
            want = with_gradients(formula, hidden, weight, target, reduction=reduction, **whole)
            want = [x[mine] if i >= 2 else x for i, x in enumerate(want)]
            got = with_gradients(
                prequal.linear_cross_entropy,
                hidden,
                weight[mine],
                target,
                reduction=reduction,
                max_workspace_bytes=SMALL // 2,
                **part,
                **place,
            )
            close(got, want)
        both = prequal.linear_cross_entropy(hidden, weight[mine], target, return_lse=True, **part, **place)
        close(both, formula(hidden, weight, target, **whole))
    one = hidden.clone()
    one[2] = math.nan
    loss = prequal.linear_cross_entropy(one, weight[mine], target, reduction="none", **place)
    assert loss.isnan().nonzero().tolist() == [[2]]
    with pytest.raises(ValueError, match=f"target: expected classes 0 to {classes - 1}"):
        prequal.linear_cross_entropy(hidden, weight[mine], torch.full_like(target, classes), **place)
    with pytest.raises(ValueError, match=r"vocabulary: expected \(first, classes\)"):
        prequal.linear_cross_entropy(
            hidden, weight[mine], target, process_group=dist.group.WORLD, vocabulary=(classes, classes)
        )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [[12, 12], [9, 1, 17]], ids=str)
def test_a_vocabulary_spread_over_ranks_gives_the_answer_of_one(sizes, tmp_path):
    told = [str(tmp_path / "store"), *map(str, sizes)]
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), *told], stderr=subprocess.PIPE, text=True)
        for rank in range(len(sizes))
    ]
    try:
        ends = [(process.communicate(timeout=240)[1], process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all(code == 0 for _, code in ends), "\n".join(error for error, _ in ends)


if __name__ == "__main__":
    as_rank(int(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]])
