"""geglu, apart (fresh and in place) and packed, and its gradient: the widths of language models' MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Peer
from prequal.bench.gated import gated_cases
from prequal.bench.rows import by_autograd, near
from prequal.registry import Cost

FLOPS = 8  # a value: the exponential is one of them, as is the division


def cost(gate, up, approximate, *, exact_rounding):
    return Cost(3 * gate.numel() * gate.element_size(), FLOPS * gate.numel())


prequal.geglu.cost(cost)
prequal.geglu_.cost(cost)


@prequal.geglu_packed.cost
def _(x, approximate, *, interleaved, exact_rounding):
    return Cost(3 * (x.numel() // 2) * x.element_size(), FLOPS * (x.numel() // 2))


@prequal.geglu_backward.cost
def _(grad, gate, up, approximate):
    return Cost(5 * gate.numel() * gate.element_size(), 2 * FLOPS * gate.numel())


@prequal.geglu_packed_backward.cost
def _(grad, x, approximate, *, interleaved):
    return Cost(5 * grad.numel() * x.element_size(), 2 * FLOPS * grad.numel())


def eager(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def eager_in_place(gate: Tensor, up: Tensor, approximate: str = "tanh") -> None:
    gate.copy_(F.gelu(gate, approximate=approximate)).mul_(up)


def eager_packed(x: Tensor, approximate: str = "tanh") -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def split(grad: Tensor, gate: Tensor, up: Tensor, approximate: str = "tanh") -> Any:
    return (gate, up, approximate), (gate, up), (grad,)


def split_packed(grad: Tensor, x: Tensor, approximate: str = "tanh") -> Any:
    return (x, approximate), (x,), (grad,)


walked = by_autograd(eager_packed, split_packed)


def packed_gradient(*args: Any) -> Tensor:
    return walked(*args)[0]


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_geglu

    return lambda gate, up, approximate: liger_geglu(gate, up)


PEERS = (Peer("liger_kernel", "geglu", liger, near),)


def cases() -> Iterator[Case]:
    return gated_cases("geglu", eager, eager_in_place, eager_packed, split, packed_gradient)
