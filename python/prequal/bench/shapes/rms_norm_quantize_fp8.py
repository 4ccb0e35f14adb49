"""rms_norm_quantize_fp8, beside the norm alone and the two ops one after the other."""

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


@prequal.rms_norm_quantize_fp8.cost
def _(x, weight, eps, granularity, dtype, *, weight_offset, exact_rounding, scale_upper_bound, ue8m0, scale_layout):
    # x read, the weight once, q and the scales written
    bytes = x.numel() * x.element_size() + quantized_bytes(x, granularity, scale_layout)
    parameter = 0 if weight is None else weight.numel() * weight.element_size()
    return Cost(bytes + parameter if x.numel() else 0, 9 * x.numel())


def eager(x: Tensor, weight: Tensor, eps: float, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return eager_quantize(F.rms_norm(x, (x.shape[-1],), weight, eps), granularity, dtype)


def apart(x: Tensor, weight: Tensor, eps: float, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return prequal.quantize_fp8(prequal.rms_norm(x, weight, eps), granularity, dtype)


def norm_alone(x: Tensor, weight: Tensor, eps: float, granularity: str, dtype: torch.dtype) -> Tensor:
    return prequal.rms_norm(x, weight, eps)


def no_standard(got: Any, want: Any, args: Any) -> None:
    """Another function: only its time is of interest."""
    return


BF16, FP16 = torch.bfloat16, torch.float16
BY = ("token", "block_1x128")
SHAPES = (
    *((16384, 4096, BF16, by) for by in BY),
    *((16384, 8192, BF16, by) for by in BY),
    *((16384, 2048, BF16, "token"), (4096, 16384, BF16, "token"), (16384, 4096, FP16, "token")),
    *((16384, 4095, BF16, "token"), (4096, 32768, BF16, "token"), (64, 4096, BF16, "token")),
)


def cases() -> Iterator[Case]:
    for quick, (rows, width, dtype, granularity) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype, granularity=granularity) -> Any:
            x, weight = normal(device, rows, width, dtype=dtype), normal(device, width, dtype=dtype)
            return x, weight, 1e-6, granularity, E4M3

        yield Case(
            "rms_norm_quantize_fp8",
            f"{short(dtype)} [{rows}, {width}], {granularity}",
            make,
            quick=quick,
            others=[
                Other("torch eager", eager, near_fp8),
                Other("one after the other", apart, near_fp8, "peer"),
                Other("the norm alone", norm_alone, no_standard, "peer"),
            ],
            compiled=eager,
            compare_compiled=near_fp8,
        )
