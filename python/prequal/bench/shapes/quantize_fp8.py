"""quantize_fp8 and back: the activations and weights of language models, every granularity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.fp8 import E4M3, eager_quantize, near_fp8, not_whole, quantized_bytes, torchao_quantize
from prequal.bench.rows import each, near, normal, short
from prequal.ops import _fp8 as fp8
from prequal.registry import Cost


@prequal.quantize_fp8.cost
def _(x, granularity, dtype, *, scale, scale_upper_bound, ue8m0, scale_layout):
    # x read once, q and the scales written; a tensor's largest value takes a second read, which others may do without
    bytes = x.numel() * x.element_size() + quantized_bytes(x, granularity, scale_layout)
    given = 0 if scale is None else scale.numel() * scale.element_size()
    return Cost(bytes + given if x.numel() else 0, 5 * x.numel())


@prequal.dequantize_fp8.cost
def _(q, scale, granularity, dtype, *, scale_layout):
    bytes = q.numel() * (q.element_size() + dtype.itemsize) + scale.numel() * scale.element_size()
    return Cost(bytes if q.numel() else 0, q.numel())


def eager_back(q: Tensor, scale: Tensor, granularity: str, dtype: torch.dtype) -> Tensor:
    return (q.float() * fp8.spread(scale, q.shape, granularity)).to(dtype)


PEERS = (Peer("torchao", "quantize_fp8", torchao_quantize, near_fp8, not_whole),)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BY = fp8.GRANULARITIES
SHAPES = (
    *((8192, 8192, BF16, by, E4M3) for by in ("token", "block_1x128", "block_128x128", "tensor")),
    *((16384, 4096, BF16, by, E4M3) for by in BY),
    *((16384, 14336, BF16, by, E4M3) for by in ("token", "block_1x128")),
    *((262144, 128, BF16, "token", E4M3), (4096, 65536, BF16, "token", E4M3), (16384, 4095, BF16, "token", E4M3)),
    *((8192, 4096, FP32, "token", E4M3), (16384, 4096, FP16, "token", torch.float8_e5m2)),
    *((rows, 4096, BF16, by, E4M3) for rows in (64, 1) for by in BY),
)


def cases() -> Iterator[Case]:
    for quick, (rows, width, dtype, granularity, to) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype, granularity=granularity, to=to) -> Any:
            return normal(device, rows, width, dtype=dtype), granularity, to

        yield Case(
            "quantize_fp8",
            f"{short(dtype)} [{rows}, {width}] to {short(to)}, {granularity}",
            make,
            quick=quick,
            others=[Other("torch eager", eager_quantize, near_fp8)],
            compiled=eager_quantize,
            compare_compiled=near_fp8,
        )
    for name, named in (("column layout", {"scale_layout": "column"}), ("powers of two", {"ue8m0": True})):

        def make_blocks(device: torch.device) -> Any:
            return normal(device, 16384, 4096, dtype=BF16), "block_1x128", E4M3

        what = f"bfloat16 [16384, 4096], block_1x128, {name}"
        yield Case("quantize_fp8", what, make_blocks, named=named, peers=False)
    for quick, (rows, width, granularity) in each([(16384, 4096, by) for by in ("token", "block_1x128")]):

        def make_back(device: torch.device, rows=rows, width=width, granularity=granularity) -> Any:
            x = normal(device, rows, width, dtype=BF16)
            return *prequal.quantize_fp8.op.reference(x, granularity, E4M3), granularity, BF16

        yield Case(
            "dequantize_fp8",
            f"[{rows}, {width}] to bfloat16, {granularity}",
            make_back,
            quick=quick,
            others=[Other("torch eager", eager_back, near)],
            compiled=eager_back,
            compare_compiled=near,
        )
