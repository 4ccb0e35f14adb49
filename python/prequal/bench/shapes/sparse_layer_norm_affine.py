"""sparse_layer_norm_affine and its gradient: 3,664 to 30,227 tokens of 1,024, the odd width, many batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import by_autograd, each, near_gradient, normal, short
from prequal.bench.sparse import TOKENS, WIDTH, batches, near_chain, offsets, rows
from prequal.registry import Cost


def row_bytes(used: Tensor | None, tokens: int) -> int:
    """Rows that no token is of need not be read: of B rows, at least one where there is a token."""
    return 0 if used is None or tokens == 0 else used[:1].numel() * used.element_size()


@prequal.sparse_layer_norm_affine.cost
def _(x, scale, shift, batch, ptr, *, eps, add_one):
    # x read, y written; sum, difference, square, product, factor and sum a value
    return Cost(2 * x.numel() * x.element_size() + 2 * row_bytes(scale, len(x)), 7 * x.numel())


@prequal.sparse_layer_norm_affine_backward.cost
def _(grad, x, scale, batch, ptr, *, eps, add_one, scale_grad, shift_grad):
    # grad and x read, dx written, and a row of each gradient for each of scale's
    sums = (scale_grad + shift_grad) * scale.numel() * scale.element_size()
    return Cost(3 * x.numel() * x.element_size() + row_bytes(scale, len(x)) + sums, 12 * x.numel())


def eager(x: Tensor, scale: Tensor, shift: Tensor, batch: Tensor, ptr: None = None) -> Tensor:
    """As the models write it: the norm in fp32, rows by index."""
    y = F.layer_norm(x.float(), (x.shape[1],), None, None, 1e-6).to(x.dtype)
    return y * (1 + scale[batch]) + shift[batch]


def split(grad: Tensor, x: Tensor, scale: Tensor, batch: Tensor, ptr: None = None) -> Any:
    return (x, scale, torch.zeros_like(scale), batch), (x, scale), (grad,)


BF16 = torch.bfloat16
SHAPES = (*((tokens, WIDTH, 2) for tokens in TOKENS), (30_227, 1023, 2), (30_227, 1536, 2), (30_227, WIDTH, 64))


def cases() -> Iterator[Case]:
    for quick, (tokens, width, count) in each(SHAPES):

        def make(device: torch.device, tokens=tokens, width=width, count=count) -> tuple[Any, ...]:
            scale, shift = rows(device, count, width, BF16, 2)
            return normal(device, tokens, width, dtype=BF16), scale, shift, batches(device, tokens, count)

        yield Case(
            "sparse_layer_norm_affine",
            f"{short(BF16)} [{tokens}, {width}], {count} batches",
            make,
            quick=quick,
            others=[Other("torch eager", eager, near_chain)],
            compiled=eager,
            compare_compiled=near_chain,
        )

    def make_runs(device: torch.device) -> tuple[Any, ...]:
        scale, shift = rows(device, 2, WIDTH, BF16, 2)
        return normal(device, TOKENS[0], WIDTH, dtype=BF16), scale, shift, None, offsets(device, TOKENS[0])

    yield Case("sparse_layer_norm_affine", f"{short(BF16)} [{TOKENS[0]}, {WIDTH}], offsets", make_runs)
    for quick, (tokens, width, count) in each(SHAPES[:3]):

        def make_gradient(device: torch.device, tokens=tokens, width=width, count=count) -> tuple[Any, ...]:
            grad, x = (normal(device, tokens, width, dtype=BF16, seed=seed) for seed in (1, 2))
            return grad, x, rows(device, count, width, BF16, 2)[0], batches(device, tokens, count)

        yield Case(
            "sparse_layer_norm_affine_backward",
            f"{short(BF16)} [{tokens}, {width}], {count} batches, backward",
            make_gradient,
            quick=quick,
            named={"shift_grad": False},
            others=[Other("torch eager", by_autograd(eager, split), near_gradient)],
        )
