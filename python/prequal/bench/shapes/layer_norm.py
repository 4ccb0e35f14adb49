"""layer_norm and its gradient: wide and narrow rows, the odd width, every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.rows import by_autograd, each, near, near_gradient, normal, short
from prequal.registry import Cost


@prequal.layer_norm.cost
def _(x, weight, bias, eps):
    # x read, y written, the parameters once; sum, difference, square and product a value, one more for each parameter
    parameters = sum(p.numel() * p.element_size() for p in (weight, bias) if p is not None)
    return Cost(
        2 * x.numel() * x.element_size() + parameters, (5 + (weight is not None) + (bias is not None)) * x.numel()
    )


@prequal.layer_norm_backward.cost
def _(grad, x, weight, eps, *, weight_grad, bias_grad):
    # grad and x read, dx written; the weight read and both gradients written once
    size = x.element_size() if weight is None else weight.element_size()
    parameters = ((weight is not None) + weight_grad + bias_grad) * x.shape[-1] * size
    return Cost(3 * x.numel() * x.element_size() + parameters, 12 * x.numel())


def eager(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def without_bias(x: Tensor, weight: Tensor, eps: float, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def split(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Any:
    bias = torch.zeros_like(weight)
    return (x, weight, eps, bias), (x, weight, bias), (grad,)


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias, eps: liger_layer_norm(x, weight, bias, eps)


def liger_gradient() -> Any:
    from liger_kernel.transformers.functional import liger_layer_norm

    return by_autograd(lambda x, weight, eps, bias: liger_layer_norm(x, weight, bias, eps), split)


PEERS = (
    Peer("liger_kernel", "layer_norm", liger, near),
    Peer("liger_kernel", "layer_norm_backward", liger_gradient, near_gradient),
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (
    *((16384, 4096, BF16), (16384, 2048, BF16), (16384, 8192, BF16), (4096, 16384, BF16), (8192, 4096, FP32)),
    *((4096, 32768, BF16), (4096, 65536, BF16), (4096, 131072, BF16), (4096, 262144, BF16)),
    *((16384, 4095, BF16), (64, 4096, BF16), (1, 4096, BF16)),
)
GRADIENTS = (
    *((16384, 4096, BF16), (16384, 2048, BF16), (16384, 8192, BF16), (4096, 16384, BF16)),
    *((4096, 32768, BF16), (4096, 65536, BF16), (4096, 131072, BF16), (16384, 4095, BF16), (64, 4096, BF16)),
)


def cases() -> Iterator[Case]:
    for quick, (rows, width, dtype) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            weight, bias = (normal(device, width, dtype=dtype, seed=seed) for seed in (1, 2))
            return normal(device, rows, width, dtype=dtype), weight, bias, 1e-5

        yield Case(
            "layer_norm",
            f"{short(dtype)} [{rows}, {width}]",
            make,
            quick=quick,
            others=[Other("torch eager", eager, near)],
            compiled=eager,
            compare_compiled=near,
        )
    for quick, (rows, width, dtype) in each(GRADIENTS):

        def make_gradient(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            grad, x = (normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
            return grad, x, normal(device, width, dtype=dtype), 1e-5

        yield Case(
            "layer_norm_backward",
            f"{short(dtype)} [{rows}, {width}], backward",
            make_gradient,
            quick=quick,
            others=[Other("torch eager", by_autograd(without_bias, split), near_gradient)],
            compiled=prequal.layer_norm_backward.op.reference,
            compare_compiled=near_gradient,
        )
