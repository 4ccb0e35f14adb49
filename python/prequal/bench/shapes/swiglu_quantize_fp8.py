"""swiglu_quantize_fp8, beside the activation alone and the two ops one after the other."""

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
from .swiglu import FLOPS


@prequal.swiglu_quantize_fp8.cost
def _(gate, up, granularity, dtype, *, exact_rounding, scale_upper_bound, ue8m0, scale_layout):
    bytes = 2 * gate.numel() * gate.element_size() + quantized_bytes(gate, granularity, scale_layout)
    return Cost(bytes if gate.numel() else 0, (FLOPS + 5) * gate.numel())


def eager(gate: Tensor, up: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return eager_quantize(F.silu(gate) * up, granularity, dtype)


def apart(gate: Tensor, up: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return prequal.quantize_fp8(prequal.swiglu(gate, up), granularity, dtype)


def alone(gate: Tensor, up: Tensor, granularity: str, dtype: torch.dtype) -> Tensor:
    return prequal.swiglu(gate, up)


SHAPES = (
    *((16384, 14336, BF16, by) for by in BY),
    *((4096, 14336, BF16, by) for by in BY),
    *((16384, 2048, BF16, "token"), (64, 14336, BF16, "token")),
)


def cases() -> Iterator[Case]:
    for quick, (rows, width, dtype, granularity) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype, granularity=granularity) -> Any:
            gate, up = (normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
            return gate, up, granularity, E4M3

        yield Case(
            "swiglu_quantize_fp8",
            f"{short(dtype)} [{rows}, {width}], {granularity}",
            make,
            quick=quick,
            others=[
                Other("torch eager", eager, near_fp8),
                Other("one after the other", apart, near_fp8, "peer"),
                Other("the activation alone", alone, no_standard, "peer"),
            ],
            compiled=eager,
            compare_compiled=near_fp8,
        )
