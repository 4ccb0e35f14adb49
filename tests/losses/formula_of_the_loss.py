"""Data for losses, and what torch makes of it: the plain formula by its own cross_entropy, in any dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prequal.losses.chunks import row_elements

F64 = torch.float64
TOKENS, WIDTH, CLASSES = 13, 8, 23
# three chunks of 5, 5 and 3 tokens at 23 classes in float64
SMALL = 5 * row_elements(CLASSES, 8) * 8

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
