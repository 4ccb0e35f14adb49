"""linear_cross_entropy against float64 autograd of the plain formula, and right and wrong calls."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from formula_of_the_loss import (
    CLASSES,
    F64,
    SMALL,
    TOKENS,
    WIDTH,
    chosen,
    close,
    data,
    every_choice,
    every_half,
    every_reduction,
    formula,
    with_gradients,
)

import prequal
from prequal.losses.chunks import LEAN_WORKSPACE_BYTES, row_elements
from prequal.losses.tokens import Loss
from prequal.losses.walk import finish, passes


@every_reduction
@every_choice
def test_loss_and_gradients_are_those_of_the_plain_formula(choice, reduction, device):
    inputs, named = data(device), chosen(choice, device)
    want = with_gradients(formula, *inputs, reduction=reduction, **named)
    for workspace in (SMALL, LEAN_WORKSPACE_BYTES):
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
            prequal.linear_cross_entropy, *inputs, max_workspace_bytes=rows * row_elements(classes, 8) * 8
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


@pytest.mark.parametrize("tokens", [0, 5])
def test_hidden_states_of_no_width(tokens, device):
    """All logits are 0."""
    hidden, weight, target = data(device, tokens=tokens)
    inputs = hidden[:, :0], weight[:, :0], target
    loss, *gradients = with_gradients(prequal.linear_cross_entropy, *inputs, reduction="none")
    close([loss], [torch.full((tokens,), math.log(CLASSES), device=device, dtype=F64)])
    assert [x.shape for x in gradients] == [(tokens, 0), (CLASSES, 0)]


def test_a_target_that_is_no_class_is_an_error_where_somebody_looks(device):
    hidden, weight, target = data(device)
    for wrong in (CLASSES, -1, -99, 2**40):
        target[5] = wrong
        with pytest.raises(ValueError, match=rf"target: expected classes 0 to 22 or ignore_index -100, got {wrong}"):
            prequal.linear_cross_entropy(hidden, weight, target, checked=True)


def test_a_target_that_is_no_class_is_nan_where_nobody_looks(device, monkeypatch):
    """As on a GPU: the loss of that token and its gradient, and nobody else's."""
    monkeypatch.setattr(Loss, "checked", property(lambda self: False, lambda self, value: None))
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

    def from_the_host(*args, **kwargs):
        raise AssertionError("a tensor made of a number of the host's")

    named = chosen(choice, torch.device("cpu"), dtype=dtype)
    how = Loss(
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
        sums = replace(how, wide_weight_grad=wide)
        loss, lse, made = passes(sums, *tensors, wants)
        assert loss.shape == ((TOKENS,) if reduction == "none" else ())
        if reduction != "none":
            finish(made, hidden, weight, torch.empty_like(loss))
        for of_loss, of_lse in ((torch.empty_like(loss), None), (None, torch.empty_like(lse))):
            *_, made = passes(sums, *tensors, wants, lse, (of_loss, of_lse))
            found = finish(made, hidden, weight, None)
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


@pytest.mark.parametrize("transformed", [False, True])
def test_a_small_loss_of_large_logits_keeps_its_digits(transformed, device):
    """Logits near 1,024 are multiples of 2^-6, which float32 holds; lse is rounded by 2^-14."""
    logits, weight, target = data(device, width=CLASSES, dtype=torch.float32)
    logits = (logits * 64).round() / 64 + 1024
    logits[torch.arange(TOKENS, device=device), target] += 12
    weight = torch.eye(CLASSES, device=device)

    def loss(z):
        return prequal.linear_cross_entropy(z, weight, target, reduction="none")

    got = torch.func.jvp(loss, (logits,), (logits,))[0] if transformed else loss(logits)
    want, _ = formula(logits.double(), weight.double(), target, reduction="none")
    # the sum of exponentials, 1 to 2, is rounded by 2^-23 a few times, the loss by 2^-24 of itself
    torch.testing.assert_close(got.double(), want, rtol=2**-22, atol=2**-20)


def test_a_not_a_number_in_a_token_stays_that_tokens(device):
    hidden, weight, target = data(device)
    hidden[2, 1] = math.nan
    loss, lse = prequal.linear_cross_entropy(hidden, weight, target, reduction="none", return_lse=True)
    assert loss.isnan().nonzero().tolist() == [[2]]
    assert lse.isnan().nonzero().tolist() == [[2]]


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
        ({"softcap": 1e300}, ValueError, r"softcap: expected None or 2\^-126 to 2\^127, since .* float32, got 1e\+300"),
        ({"softcap": 1e-300}, ValueError, r"softcap: expected None or 2\^-126 to 2\^127, since .* float32, got 1e-300"),
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
        ({"softcap": 0.0}, "softcap: expected None or a finite number > 0, got 0.0"),
    ):
        call = torch.compile(lambda x: prequal.linear_cross_entropy(x, weight, target, **named), backend="eager")  # noqa: B023
        with pytest.raises(Exception, match=match):
            call(hidden)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_wrong_target_is_an_error_where_it_is_traced(fullgraph, device):
    hidden, weight, target = data(device, tokens=6, dtype=torch.float32)
    hidden, target = hidden.view(2, 3, WIDTH), target.view(2, 3)
    call = torch.compile(prequal.linear_cross_entropy, backend="eager", fullgraph=fullgraph)
    for wrong, match in (
        (target.float(), "target: expected int32 or int64, got float32"),
        (target.t(), r"target: expected shape \[2, 3\], got \[3, 2\]"),
        (target.flatten(), r"target: expected shape \[2, 3\], got \[6\]"),
    ):
        torch.compiler.reset()
        with pytest.raises(Exception, match=match):
            call(hidden, weight, wrong)
    with (
        torch.autocast(device.type, torch.bfloat16),
        pytest.raises(Exception, match="weight: expected a floating dtype, got int64"),
    ):
        call(hidden, weight.long(), target)


@pytest.mark.parametrize(("needs", "chunks"), [(True, 4), (False, 32)])
def test_by_default_chunks_are_as_large_as_the_weights_gradient_where_there_is_one(needs, chunks, monkeypatch):
    monkeypatch.setattr("prequal.losses.chunks.LEAN_WORKSPACE_BYTES", 160)  # one row
    hidden, weight = torch.randn(32, 8), torch.randn(40, 8).requires_grad_(needs)  # of 8 rows the logits are as large
    prequal.reset_stats()
    prequal.linear_cross_entropy(hidden, weight, torch.arange(32))
    name = "cross_entropy_chunk_" if needs else "cross_entropy_stats"
    assert sum(prequal.stats()[name]["cpu"]["reference"].values()) == chunks
