"""fused_add_rms_norm_quantize_fp8, beside the step alone and the two ops one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.fp8 import E4M3, eager_quantize, near_fp8, quantized_bytes
from prequal.bench.rows import each, normal, short
from prequal.registry import Cost

from .rms_norm_quantize_fp8 import BF16, BY, no_standard


@prequal.fused_add_rms_norm_quantize_fp8.cost
def _(x, residual, weight, eps, granularity, dtype, *, scale_layout, **others):
    # both read, the weight once, the sum, q and the scales written
    bytes = 3 * x.numel() * x.element_size() + quantized_bytes(x, granularity, scale_layout)
    parameter = 0 if weight is None else weight.numel() * weight.element_size()
    return Cost(bytes + parameter if x.numel() else 0, 10 * x.numel())


Call = tuple[Tensor, Tensor, Tensor]


def eager(x: Tensor, residual: Tensor, weight: Tensor, eps: float, granularity: str, dtype: torch.dtype) -> Call:
    total = x + residual
    return *eager_quantize(F.rms_norm(total, (x.shape[-1],), weight, eps), granularity, dtype), total


def apart(x: Tensor, residual: Tensor, weight: Tensor, eps: float, granularity: str, dtype: torch.dtype) -> Call:
    y, total = prequal.fused_add_rms_norm(x, residual, weight, eps)
    return *prequal.quantize_fp8(y, granularity, dtype), total


def step_alone(x: Tensor, residual: Tensor, weight: Tensor, eps: float, granularity: str, dtype: torch.dtype) -> Any:
    return prequal.fused_add_rms_norm(x, residual, weight, eps)


SHAPES = (
    *((16384, 4096, BF16, by) for by in BY),
    *((16384, 8192, BF16, by) for by in BY),
    *((4096, 16384, BF16, "token"), (16384, 4095, BF16, "token"), (64, 4096, BF16, "token")),
)


def cases() -> Iterator[Case]:
    for quick, (rows, width, dtype, granularity) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype, granularity=granularity) -> Any:
            x, residual = (normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
            return x, residual, normal(device, width, dtype=dtype), 1e-6, granularity, E4M3

        yield Case(
            "fused_add_rms_norm_quantize_fp8",
            f"{short(dtype)} [{rows}, {width}], {granularity}",
            make,
            quick=quick,
            others=[
                Other("torch eager", eager, near_fp8),
                Other("one after the other", apart, near_fp8, "peer"),
                Other("the step alone", step_alone, no_standard, "peer"),
            ],
            compiled=eager,
            compare_compiled=near_fp8,
        )
