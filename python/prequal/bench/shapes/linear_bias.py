"""linear_bias and linear_relu: the MLP of a width-1,024 transformer, a router, and a projection of odd width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, near, normal, short
from prequal.registry import Cost

from .linear_gelu import no_standard

BF16 = torch.bfloat16
SHAPES = ((24_000, 1024, 4096), (3664, 1024, 4096), (16_384, 4096, 256), (16, 4096, 4096), (4096, 1000, 1001))


def cost(x, weight, bias):
    rows, (outer, inner) = x.numel() // max(x.shape[-1], 1), weight.shape
    # of no columns nothing is multiplied, and of no rows nothing is read
    read = x.numel() + (weight.numel() + outer if rows else 0)
    unit = "bf16" if x.dtype in (torch.bfloat16, torch.float16) else "fp32"
    return Cost((read + rows * outer) * x.element_size() if x.numel() else 0, 2 * rows * inner * outer, unit)


prequal.linear_bias.cost(cost)
prequal.linear_relu.cost(cost)


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def chain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).relu()


def cases() -> Iterator[Case]:
    for op, function, note in (("linear_bias", product, ""), ("linear_relu", chain, ", relu")):
        for quick, (rows, inner, outer) in each(SHAPES):

            def make(device: torch.device, rows=rows, inner=inner, outer=outer) -> tuple[Any, ...]:
                weight = normal(device, outer, inner, dtype=BF16) * inner**-0.5
                return normal(device, rows, inner, dtype=BF16), weight, normal(device, outer, dtype=BF16, seed=1)

            others = [Other("torch eager", function, near)]
            if op == "linear_relu":
                others.append(Other("the product alone", product, no_standard, "peer"))
            yield Case(
                op,
                f"{short(BF16)} [{rows}, {inner}] to {outer}{note}",
                make,
                quick=quick,
                others=others,
                compiled=function,
                compare_compiled=near,
            )
