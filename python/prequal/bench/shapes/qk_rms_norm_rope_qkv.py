"""qk_rms_norm_rope_qkv, in place and fresh, and its gradient: 3,664 to 30,227 tokens, 16 heads of 64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, near_gradient, normal, short
from prequal.bench.sparse import DIM, HEADS, TOKENS, voxels
from prequal.contracts import Tolerance
from prequal.registry import Cost


def angle_bytes(cos, sin, coords):
    if coords is not None:
        return coords[:, 1:].numel() * coords.element_size()  # the batch is not looked at
    return sum(t.numel() * t.element_size() for t in (cos, sin))


def gamma_bytes(qkv, *gammas):
    return sum(g.numel() * g.element_size() for g in gammas) if len(qkv) else 0


@prequal.qk_rms_norm_rope_qkv.cost
def _(qkv, q_gamma, k_gamma, cos, sin, coords, *, eps, interleaved, exact_rounding, base):
    small = angle_bytes(cos, sin, coords) + gamma_bytes(qkv, q_gamma, k_gamma)
    return Cost(2 * qkv.numel() * qkv.element_size() + small, 7 * qkv.numel() * 2 // 3)


@prequal.qk_rms_norm_rope_qkv_inplace.cost
def _(qkv, q_gamma, k_gamma, cos, sin, coords, *, eps, interleaved, exact_rounding, base):
    small = angle_bytes(cos, sin, coords) + gamma_bytes(qkv, q_gamma, k_gamma)
    values = qkv.numel() * 2 // 3
    return Cost(2 * values * qkv.element_size() + small, 7 * values)


@prequal.qk_rms_norm_rope_qkv_backward.cost
def _(grad, qkv, q_gamma, k_gamma, cos, sin, coords, *, eps, interleaved, base):
    # grad and q, k read, dqkv and the gradients of the gammas written
    small = angle_bytes(cos, sin, coords) + gamma_bytes(qkv, q_gamma, k_gamma)
    sums = sum(g.numel() * g.element_size() for g in (q_gamma, k_gamma))
    values = qkv.numel()
    return Cost((2 * values + values * 2 // 3) * qkv.element_size() + small + sums, 12 * values * 2 // 3)


def turned(x: Tensor, gamma: Tensor, turn: Tensor) -> Tensor:
    y = (F.normalize(x.float(), dim=-1) * gamma * x.shape[-1] ** 0.5).to(x.dtype)
    z = torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2)) * turn
    return torch.view_as_real(z).flatten(-2).to(x.dtype)


def eager(qkv: Tensor, q_gamma: Tensor, k_gamma: Tensor, cos: Tensor, sin: Tensor, coords: None = None) -> Tensor:
    """The chain of the public sparse transformers: normalise, round, complex product, round, stack."""
    turn = torch.complex(cos, sin)[:, None]
    q, k, v = qkv.unbind(1)
    return torch.stack((turned(q, q_gamma, turn), turned(k, k_gamma, turn), v), dim=1)


def eager_in_place(
    qkv: Tensor, q_gamma: Tensor, k_gamma: Tensor, cos: Tensor, sin: Tensor, coords: None = None
) -> None:
    qkv.copy_(eager(qkv, q_gamma, k_gamma, cos, sin))


def real(x: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = (F.normalize(x.float(), dim=-1) * gamma * x.shape[-1] ** 0.5).to(x.dtype).float()
    a, b = y[..., 0::2], y[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def without_complex(
    qkv: Tensor, q_gamma: Tensor, k_gamma: Tensor, cos: Tensor, sin: Tensor, coords: None = None
) -> Tensor:
    """The same for torch.compile, which makes no code for complex numbers."""
    cos, sin = cos[:, None], sin[:, None]
    q, k, v = qkv.unbind(1)
    return torch.stack((real(q, q_gamma, cos, sin), real(k, k_gamma, cos, sin), v), dim=1)


def without_complex_in_place(
    qkv: Tensor, q_gamma: Tensor, k_gamma: Tensor, cos: Tensor, sin: Tensor, coords: None = None
) -> None:
    cos, sin = cos[:, None], sin[:, None]
    for part, gamma in ((0, q_gamma), (1, k_gamma)):
        qkv[:, part] = real(qkv[:, part], gamma, cos, sin)


# A rounding before the turn, which ours has not: a step of values up to 8.
STEPS = Tolerance({torch.bfloat16: (2.0**-6, 2.0**-4)})


def near_chain(got: Any, want: Any, args: Any) -> str | None:
    found = STEPS.compare(got, want)
    return None if found is None else str(found)


BF16 = torch.bfloat16


def tables(device: torch.device, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    pairs = dim // 2 // 3
    frequency = 10000.0 ** (-torch.arange(pairs, device=device) / max(pairs, 1))
    angle = F.pad((voxels(device, tokens)[:, 1:, None] * frequency).flatten(1), (0, dim // 2 - 3 * pairs))
    return angle.cos(), angle.sin()


def cases() -> Iterator[Case]:
    for op, chain, to_compile, note in (
        ("qk_rms_norm_rope_qkv_inplace", eager_in_place, without_complex_in_place, ", in place"),
        ("qk_rms_norm_rope_qkv", eager, without_complex, ""),
    ):
        for quick, (tokens,) in each([(n,) for n in TOKENS]):
            what = f"{short(BF16)} [{tokens}, 3, {HEADS}, {DIM}]"

            def make(device: torch.device, tokens=tokens) -> tuple[Any, ...]:
                qkv = normal(device, tokens, 3, HEADS, DIM, dtype=BF16)
                gammas = (1 + 0.1 * normal(device, HEADS, DIM, dtype=BF16, seed=seed) for seed in (1, 2))
                return qkv, *gammas, *tables(device, tokens, DIM)

            def make_coords(device: torch.device, tokens=tokens, make=make) -> tuple[Any, ...]:
                return (*make(device)[:3], None, None, voxels(device, tokens))

            yield Case(op, f"{what}, coordinates{note}", make_coords, quick=quick and bool(note))
            yield Case(
                op,
                f"{what}, tables{note}",
                make,
                quick=quick,
                others=[Other("torch eager", chain, near_chain)],
                compiled=to_compile,
                compare_compiled=near_chain,
            )
        yield Case(
            op, f"{short(BF16)} [30227, 3, {HEADS}, {DIM}], half layout{note}", make, named={"interleaved": False}
        )

    for quick, (tokens,) in each([(n,) for n in TOKENS]):

        def make_gradient(device: torch.device, tokens=tokens) -> tuple[Any, ...]:
            grad, qkv = (normal(device, tokens, 3, HEADS, DIM, dtype=BF16, seed=seed) for seed in (1, 2))
            gammas = (1 + 0.1 * normal(device, HEADS, DIM, dtype=BF16, seed=seed) for seed in (1, 2))
            return grad, qkv, *gammas, *tables(device, tokens, DIM)

        yield Case(
            "qk_rms_norm_rope_qkv_backward",
            f"{short(BF16)} [{tokens}, 3, {HEADS}, {DIM}], backward",
            make_gradient,
            quick=quick,
            compiled=prequal.qk_rms_norm_rope_qkv_backward.op.reference,
            compare_compiled=near_gradient,
        )
