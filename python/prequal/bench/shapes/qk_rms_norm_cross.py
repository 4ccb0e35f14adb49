"""qk_rms_norm_cross, in place and fresh: 3,664 to 30,227 tokens and 1,374 of an image, 16 heads of 64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, near, normal, short
from prequal.bench.sparse import DIM, HEADS, TOKENS
from prequal.registry import Cost


def gamma_bytes(q, kv, q_gamma, k_gamma):
    """A gamma that no token needs is not read."""
    return sum(g.numel() * g.element_size() for g, x in ((q_gamma, q), (k_gamma, kv)) if len(x))


@prequal.qk_rms_norm_cross.cost
def _(q, kv, q_gamma, k_gamma, eps):
    values = q.numel() + kv.numel()
    return Cost(2 * values * q.element_size() + gamma_bytes(q, kv, q_gamma, k_gamma), 4 * values)


@prequal.qk_rms_norm_cross_inplace.cost
def _(q, kv, q_gamma, k_gamma, eps):
    values = q.numel() + kv.numel() // 2
    return Cost(2 * values * q.element_size() + gamma_bytes(q, kv, q_gamma, k_gamma), 4 * values)


@prequal.qk_rms_norm_cross_backward.cost
def _(grad_q, grad_kv, q, kv, q_gamma, k_gamma, eps):
    sums = sum(g.numel() * g.element_size() for g in (q_gamma, k_gamma))
    values = 3 * q.numel() + 2 * kv.numel() + kv.numel() // 2
    return Cost(values * q.element_size() + gamma_bytes(q, kv, q_gamma, k_gamma) + sums, 4 * values)


def normalised(x: Tensor, gamma: Tensor) -> Tensor:
    return (F.normalize(x.float(), dim=-1) * gamma * x.shape[-1] ** 0.5).to(x.dtype)


def eager(q: Tensor, kv: Tensor, q_gamma: Tensor, k_gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    k, v = kv.unbind(1)
    return normalised(q, q_gamma), torch.stack((normalised(k, k_gamma), v), dim=1)


def eager_in_place(q: Tensor, kv: Tensor, q_gamma: Tensor, k_gamma: Tensor, eps: float) -> None:
    q.copy_(normalised(q, q_gamma))
    kv[:, 0].copy_(normalised(kv[:, 0], k_gamma))


BF16 = torch.bfloat16
CONTEXT = 1374  # tokens of an image, registers included


def cases() -> Iterator[Case]:
    for op, function, note in (
        ("qk_rms_norm_cross_inplace", eager_in_place, ", in place"),
        ("qk_rms_norm_cross", eager, ""),
    ):
        for quick, (tokens,) in each([(n,) for n in TOKENS]):

            def make(device: torch.device, tokens=tokens) -> tuple[Any, ...]:
                q = normal(device, tokens, HEADS, DIM, dtype=BF16)
                kv = normal(device, CONTEXT, 2, HEADS, DIM, dtype=BF16)
                gammas = (1 + 0.1 * normal(device, HEADS, DIM, dtype=BF16, seed=seed) for seed in (1, 2))
                return q, kv, *gammas

            yield Case(
                op,
                f"{short(BF16)} [{tokens}, {HEADS}, {DIM}], context {CONTEXT}{note}",
                make,
                quick=quick,
                others=[Other("torch eager", function, near)],
                compiled=function,
                compare_compiled=near,
            )
