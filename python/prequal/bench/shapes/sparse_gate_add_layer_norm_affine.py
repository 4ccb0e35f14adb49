"""The fused pair and its gradient, beside the chain that it replaces: 3,664 to 30,227 tokens of 1,024."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, near, normal, short
from prequal.bench.sparse import TOKENS, WIDTH, batches, near_chain, rows
from prequal.registry import Cost

from .sparse_batch_mul_add import eager as gate_and_add
from .sparse_layer_norm_affine import eager as norm
from .sparse_layer_norm_affine import row_bytes


@prequal.sparse_gate_add_layer_norm_affine.cost
def _(h, gate, residual, scale, shift, batch, ptr, *, eps, add_one):
    # h and residual read, both results written
    return Cost(4 * h.numel() * h.element_size() + 2 * row_bytes(scale, len(h)), 9 * h.numel())


@prequal.sparse_gate_add_layer_norm_affine_backward.cost
def _(grad, grad_total, h, gate, total, scale, batch, ptr, *, eps, add_one, gate_grad, scale_grad, shift_grad):
    # both gradients and total read, dh and dresidual written; for the gate's gradient h read, too
    tokens = (6 if gate_grad else 5) * h.numel() * h.element_size()
    sums = gate_grad * gate.numel() * gate.element_size()
    sums += (scale_grad + shift_grad) * scale.numel() * scale.element_size()
    return Cost(tokens + row_bytes(scale, len(h)) + sums, 15 * h.numel())


def eager(
    h: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, batch: Tensor, ptr: None = None
) -> Any:
    total = gate_and_add(h, gate, residual, batch)
    return norm(total, scale, shift, batch), total


def ours_apart(
    h: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, batch: Tensor, ptr: None = None
) -> Any:
    total = prequal.sparse_batch_mul_add(h, gate, residual, batch)
    return prequal.sparse_layer_norm_affine(total, scale, shift, batch), total


BF16 = torch.bfloat16


def cases() -> Iterator[Case]:
    for quick, (tokens,) in each([(n,) for n in TOKENS]):

        def make(device: torch.device, tokens=tokens) -> tuple[Any, ...]:
            h, residual = (normal(device, tokens, WIDTH, dtype=BF16, seed=seed) for seed in (1, 2))
            gate, scale, shift = rows(device, 2, WIDTH, BF16, 3)
            return h, gate, residual, scale, shift, batches(device, tokens)

        yield Case(
            "sparse_gate_add_layer_norm_affine",
            f"{short(BF16)} [{tokens}, {WIDTH}], 2 batches",
            make,
            quick=quick,
            others=[Other("torch eager", eager, near_chain), Other("prequal's two ops", ours_apart, near, "peer")],
            compiled=eager,
            compare_compiled=near_chain,
        )

        def make_gradient(device: torch.device, tokens=tokens) -> tuple[Any, ...]:
            grad, more, h, total = (normal(device, tokens, WIDTH, dtype=BF16, seed=seed) for seed in (1, 2, 3, 4))
            gate, scale = rows(device, 2, WIDTH, BF16, 2)
            return grad, more, h, gate, total, scale, batches(device, tokens)

        yield Case(
            "sparse_gate_add_layer_norm_affine_backward",
            f"{short(BF16)} [{tokens}, {WIDTH}], 2 batches, backward",
            make_gradient,
            quick=quick,
        )
