"""geglu, apart and packed, and its gradient: the widths of language models' MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.rows import by_autograd, each, near, near_gradient, normal, short
from prequal.registry import Cost

FLOPS = 8  # a value: the exponential is one of them, as is the division


@prequal.geglu.cost
def _(gate, up, approximate, *, exact_rounding):
    return Cost(3 * gate.numel() * gate.element_size(), FLOPS * gate.numel())


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


def eager_packed(x: Tensor, approximate: str = "tanh") -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def split(grad: Tensor, gate: Tensor, up: Tensor, approximate: str = "tanh") -> Any:
    return (gate, up, approximate), (gate, up), (grad,)


def split_packed(grad: Tensor, x: Tensor, approximate: str = "tanh") -> Any:
    return (
        (
            x,
            approximate,
        ),
        (x,),
        (grad,),
    )


walked = by_autograd(eager_packed, split_packed)


def packed_gradient(*args: Any) -> Tensor:
    return walked(*args)[0]


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_geglu

    return lambda gate, up, approximate: liger_geglu(gate, up)


PEERS = (Peer("liger_kernel", "geglu", liger, near),)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (
    *((16384, 14336, BF16), (16384, 4096, BF16), (4096, 14336, BF16), (8192, 8192, FP16), (8192, 8192, FP32)),
    *((4096, 32768, BF16), (16384, 5119, BF16), (64, 14336, BF16), (1, 14336, BF16)),
)
PACKED = ((16384, 14336, BF16), (4096, 14336, BF16), (64, 14336, BF16))


def cases() -> Iterator[Case]:
    for quick, (rows, width, dtype) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return tuple(normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2))

        yield Case(
            "geglu",
            f"{short(dtype)} [{rows}, {width}]",
            make,
            quick=quick,
            others=[Other("torch eager", eager, near)],
            compiled=eager,
            compare_compiled=near,
        )
    for quick, (rows, width, dtype) in each(PACKED):

        def make_packed(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return (normal(device, rows, 2 * width, dtype=dtype),)

        yield Case(
            "geglu_packed",
            f"{short(dtype)} [{rows}, 2 x {width}]",
            make_packed,
            quick=quick,
            others=[Other("torch eager", eager_packed, near)],
            compiled=eager_packed,
            compare_compiled=near,
        )
        yield Case(
            "geglu_packed",
            f"{short(dtype)} [{rows}, 2 x {width}], interleaved",
            make_packed,
            named={"interleaved": True},
        )
    for quick, (rows, width, dtype) in each(SHAPES):

        def make_gradient(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return tuple(normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2, 3))

        yield Case(
            "geglu_backward",
            f"{short(dtype)} [{rows}, {width}], backward",
            make_gradient,
            quick=quick,
            others=[Other("torch eager", by_autograd(eager, split), near_gradient)],
            compiled=prequal.geglu_backward.op.reference,
            compare_compiled=near_gradient,
        )
    for quick, (rows, width, dtype) in each(PACKED):

        def make_packed_gradient(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return normal(device, rows, width, dtype=dtype, seed=1), normal(device, rows, 2 * width, dtype=dtype)

        yield Case(
            "geglu_packed_backward",
            f"{short(dtype)} [{rows}, 2 x {width}], backward",
            make_packed_gradient,
            quick=quick,
            others=[Other("torch eager", packed_gradient, near_gradient)],
            compiled=prequal.geglu_packed_backward.op.reference,
            compare_compiled=near_gradient,
        )
