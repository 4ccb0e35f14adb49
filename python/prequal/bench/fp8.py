"""What the shape lists of the FP8 ops share: the eager chains, and the standard of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prequal.contracts import Tolerance
from prequal.ops import _fp8 as fp8

E4M3 = torch.float8_e4m3fn
# Others take amax / largest in the dtype of x, or multiply by a reciprocal: a step of FP8 where that decides.
OTHERS = Tolerance({**fp8.Q_AND_SCALE, torch.bfloat16: (2.0**-6, 1e-2)})


def near_fp8(got: Any, want: Any, args: Any) -> str | None:
    """Of q and scale, whatever its shape."""
    q, scale, *rest = got
    found = OTHERS.compare((q, scale.reshape(want[1].shape), *rest), want)
    return None if found is None else str(found)


def eager_quantize(x: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As a model's code writes it: no word about NaN, infinity or a row of zeros."""
    wide = x.float()
    largest = torch.finfo(dtype).max
    amax = fp8.by_group(wide.abs(), granularity, torch.amax)
    scale = amax.clamp(min=1e-12) / largest
    q = (wide / fp8.spread(scale, x.shape, granularity)).clamp(-largest, largest).to(dtype)
    return q, scale


def quantized_bytes(x: Tensor, granularity: str, layout: str = "row") -> int:
    """q and the scales, written once."""
    scales = 1
    for size in fp8.scale_shape(x.shape, granularity, layout):
        scales *= size
    return x.numel() + 4 * scales


def torchao_quantize() -> Callable[..., Any]:
    """torchao's own primitives, which are meant to be compiled."""
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    def quantize(x: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = {
            "tensor": list(x.shape),
            "token": [1, x.shape[-1]],
            "block_1x128": [1, fp8.BLOCK],
            "block_128x128": [fp8.BLOCK, fp8.BLOCK],
        }[granularity]
        scale = _choose_scale_float8(x, size, dtype)
        return _quantize_affine_float8(x, scale, dtype), scale

    return torch.compile(quantize, dynamic=False)


def not_whole(args: Any) -> str | None:
    """torchao's blocks divide the shape."""
    x, granularity, *_ = args
    columns, rows = x.shape[-1] % fp8.BLOCK, x.shape[-2] % fp8.BLOCK
    if (granularity.startswith("block") and columns) or (granularity == "block_128x128" and rows):
        return "blocks that do not divide the shape"
    return None
