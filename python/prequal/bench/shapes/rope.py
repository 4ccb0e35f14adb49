"""rope, fresh and in place: Llama's 32 and 8 heads of 128, at 4 to 32 thousand tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.rows import each, near, normal, short
from prequal.registry import Cost


def table_bytes(q, cos, positions, rotary):
    """What must be read of the tables: with positions, tokens may share rows."""
    rows = 0 if positions is not None else q.shape[-3]
    return 2 * rows * (rotary // 2) * cos.element_size()


@prequal.rope.cost
def _(q, k, cos, sin, positions, *, interleaved, rotary_dim, inverse, exact_rounding):
    values = q.numel() + k.numel()
    rotary = q.shape[-1] if rotary_dim is None else rotary_dim
    tables = table_bytes(q, cos, positions, rotary) if values else 0
    return Cost(2 * values * q.element_size() + tables, 3 * values * rotary // max(q.shape[-1], 1))


@prequal.rope_.cost
def _(q, k, cos, sin, positions, *, interleaved, rotary_dim, inverse, exact_rounding):
    rotary = q.shape[-1] if rotary_dim is None else rotary_dim
    values = (q.numel() + k.numel()) * rotary // max(q.shape[-1], 1)
    tables = table_bytes(q, cos, positions, rotary) if values else 0
    return Cost(2 * values * q.element_size() + tables, 3 * values)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """transformers' chain, tokens first; the tables are doubled as it has them, in q's dtype."""
    cos, sin = (torch.cat((t, t), dim=-1)[: q.shape[-3], None].to(q.dtype) for t in (cos, sin))
    return turned(q, cos, sin), turned(k, cos, sin)


def eager_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> None:
    for x, y in zip((q, k), eager(q, k, cos, sin), strict=True):
        x.copy_(y)


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_rope

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> None:
        doubled = [torch.cat((t, t), dim=-1)[None] for t in (cos, sin)]
        liger_rope(q.transpose(1, 2), k.transpose(1, 2), *doubled)  # works in place

    return call


PEERS = (Peer("liger_kernel", "rope_", liger, near),)

BF16 = torch.bfloat16
SHAPES = ((4096, 32, 8, 128), (8192, 32, 8, 128), (32768, 32, 8, 128), (4096, 32, 32, 128), (64, 32, 8, 128))


def cases() -> Iterator[Case]:
    for op, function, note in (("rope", eager, ""), ("rope_", eager_in_place, ", in place")):
        for quick, (tokens, heads, of_keys, dim) in each(SHAPES):

            def make(device: torch.device, shape=(tokens, heads, of_keys, dim)) -> tuple[Any, ...]:
                tokens, heads, of_keys, dim = shape
                angle = torch.arange(tokens, device=device)[:, None] * 10000.0 ** (
                    -torch.arange(dim // 2, device=device, dtype=torch.float32) / (dim // 2)
                )
                q = normal(device, 1, tokens, heads, dim, dtype=BF16, seed=1)
                k = normal(device, 1, tokens, of_keys, dim, dtype=BF16, seed=2)
                return q, k, angle.cos(), angle.sin(), None

            yield Case(
                op,
                f"{short(BF16)}, {tokens} tokens, {heads} and {of_keys} heads of {dim}{note}",
                make,
                quick=quick,
                others=[Other("torch eager", function, near)],
                compiled=function,
                compare_compiled=near,
            )

        def make_packed(device: torch.device) -> tuple[Any, ...]:
            angle = torch.rand(4096, 64, device=device)
            qkv = normal(device, 4096, 48, 128, dtype=BF16)
            return qkv[:, :32], qkv[:, 32:40], angle.cos(), angle.sin(), torch.arange(4096, device=device)

        yield Case(op, f"bfloat16, 4096 tokens, packed qkv, positions{note}", make_packed)
        yield Case(
            op, f"bfloat16, 4096 tokens, packed qkv, interleaved{note}", make_packed, named={"interleaved": True}
        )
