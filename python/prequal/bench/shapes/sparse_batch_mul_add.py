"""sparse_batch_mul_add, fresh and in place, and its gradient: 3,664 to 30,227 tokens of 1,024."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import by_autograd, each, near, near_gradient, normal, short
from prequal.bench.sparse import TOKENS, WIDTH, batches, rows
from prequal.registry import Cost

from .sparse_layer_norm_affine import row_bytes


def cost(x, gate, residual, batch, ptr):
    # x and residual read, the sum written; a product and a sum a value
    return Cost(3 * x.numel() * x.element_size() + row_bytes(gate, len(x)), 2 * x.numel())


prequal.sparse_batch_mul_add.cost(cost)
prequal.sparse_batch_mul_add_.cost(cost)


@prequal.sparse_batch_mul_add_backward.cost
def _(grad, x, gate, batch, ptr, *, gate_grad):
    # grad read, dx written; for the gradient of the gate x read, too
    tokens = (3 if gate_grad else 2) * x.numel() * x.element_size()
    sums = gate.numel() * gate.element_size() if gate_grad else 0
    return Cost(tokens + row_bytes(gate, len(x)) + sums, (3 if gate_grad else 1) * x.numel())


def eager(x: Tensor, gate: Tensor, residual: Tensor, batch: Tensor, ptr: None = None) -> Tensor:
    return residual + x * gate[batch]


def eager_in_place(x: Tensor, gate: Tensor, residual: Tensor, batch: Tensor, ptr: None = None) -> None:
    residual.add_(x * gate[batch])


def split(grad: Tensor, x: Tensor, gate: Tensor, batch: Tensor, ptr: None = None) -> Any:
    return (x, gate, torch.zeros_like(x), batch), (x, gate), (grad,)


BF16 = torch.bfloat16
SHAPES = (*((tokens, WIDTH) for tokens in TOKENS), (30_227, 1023))


def cases() -> Iterator[Case]:
    for op, function, note in (
        ("sparse_batch_mul_add", eager, ""),
        ("sparse_batch_mul_add_", eager_in_place, ", in place"),
    ):
        for quick, (tokens, width) in each(SHAPES):

            def make(device: torch.device, tokens=tokens, width=width) -> tuple[Any, ...]:
                x, residual = (normal(device, tokens, width, dtype=BF16, seed=seed) for seed in (1, 2))
                # small, so that a residual that is written to at every run stays in range
                gate = 1e-3 * rows(device, 2, width, BF16, 1)[0]
                return x, gate, residual, batches(device, tokens)

            yield Case(
                op,
                f"{short(BF16)} [{tokens}, {width}], 2 batches{note}",
                make,
                quick=quick,
                others=[Other("torch eager", function, near)],
                compiled=function,
                compare_compiled=near,
            )
    for quick, (tokens, width) in each(SHAPES[:3]):

        def make_gradient(device: torch.device, tokens=tokens, width=width) -> tuple[Any, ...]:
            grad, x = (normal(device, tokens, width, dtype=BF16, seed=seed) for seed in (1, 2))
            return grad, x, rows(device, 2, width, BF16, 1)[0], batches(device, tokens)

        yield Case(
            "sparse_batch_mul_add_backward",
            f"{short(BF16)} [{tokens}, {width}], 2 batches, backward",
            make_gradient,
            quick=quick,
            others=[Other("torch eager", by_autograd(eager, split), near_gradient)],
        )
