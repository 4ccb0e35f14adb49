"""fused_add_rms_norm, fresh and in place. Its gradient is rms_norm_backward with what comes from the stream added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.rows import each, near, normal, short
from prequal.registry import Cost


def cost(x, residual, weight, eps, *, weight_offset, exact_rounding):
    # both read, both results written, the weight once; an addition more than rms_norm
    bytes = 4 * x.numel() * x.element_size()
    if weight is None:
        return Cost(bytes, 4 * x.numel())
    return Cost(bytes + weight.numel() * weight.element_size(), 5 * x.numel())


prequal.fused_add_rms_norm.cost(cost)
prequal.fused_add_rms_norm_.cost(cost)


def eager(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, eps), total


def eager_in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    x.copy_(F.rms_norm(residual, (x.shape[-1],), weight, eps))


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return lambda x, residual, weight, eps: liger_fused_add_rms_norm(x, residual, weight, eps)


PEERS = (Peer("liger_kernel", "fused_add_rms_norm", liger, near),)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (
    *((16384, 4096, BF16), (16384, 2048, BF16), (16384, 8192, BF16), (4096, 16384, BF16), (8192, 4096, FP32)),
    *((4096, 32768, BF16), (4096, 65536, BF16), (4096, 131072, BF16), (2048, 262144, BF16)),
    *((16384, 4095, BF16), (64, 4096, BF16), (1, 4096, BF16)),
)
IN_PLACE = ((16384, 4096, BF16), (4096, 4096, BF16), (64, 4096, BF16))


def cases() -> Iterator[Case]:
    for op, shapes, function in (
        ("fused_add_rms_norm", SHAPES, eager),
        ("fused_add_rms_norm_", IN_PLACE, eager_in_place),
    ):
        for quick, (rows, width, dtype) in each(shapes):

            def make(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
                x, residual = (normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
                return x, residual, normal(device, width, dtype=dtype), 1e-6

            yield Case(
                op,
                f"{short(dtype)} [{rows}, {width}]{', in place' if op.endswith('_') else ''}",
                make,
                quick=quick,
                others=[Other("torch eager", function, near)],
                compiled=function,
                compare_compiled=near,
            )
