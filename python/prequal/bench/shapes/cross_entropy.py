"""The kernels of linear_cross_entropy, on chunks of logits. benchmarks/linear_cross_entropy.py measures the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other
from prequal.bench.rows import each, near, normal, short
from prequal.registry import OPS, Cost

FLOPS = 6  # a logit: the exponential is one of them


def walked(logits: Tensor, times: int, *others: Tensor | None) -> Cost:
    small = sum(x.numel() * x.element_size() for x in others if x is not None) if logits.numel() else 0
    return Cost(times * logits.numel() * logits.element_size() + small, FLOPS * logits.numel())


@prequal.cross_entropy_stats.cost
def _(logits, target, class_weight, *, first_class, softcap):
    return walked(logits, 1, target, class_weight)


@prequal.cross_entropy_gradient_.cost
def _(logits, lse, target, coefficients, class_weight, *, first_class, softcap):
    return walked(logits, 2, lse, target, coefficients, class_weight)


@prequal.cross_entropy_chunk_.cost
def _(logits, stats, target, coefficients, class_weight, *, first_class, softcap):
    return walked(logits, 2, stats, target, coefficients, class_weight)


@prequal.scale_unless_one_.cost
def _(x, factor):
    return Cost(0)  # where the factor is 1, nothing is read but the factor


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (
    *((1024, 131072, BF16), (1024, 128256, BF16), (512, 262144, BF16), (4096, 32000, BF16), (8192, 4096, BF16)),
    *((1024, 131072, FP16), (512, 131072, FP32), (1024, 50257, BF16), (16, 128256, BF16)),
)


def chunk(device: torch.device, rows: int, classes: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(rows)
    logits = normal(device, rows, classes, dtype=dtype)
    lse = torch.logsumexp(logits.float(), 1)
    target = torch.randint(0, classes, (rows,), device=device, generator=generator)
    coefficients = torch.zeros(rows, 4, device=device)
    coefficients[:, 0] = coefficients[:, 2] = 1 / 8192
    return {
        "logits": logits,
        "lse": lse,
        "target": target,
        "coefficients": coefficients,
        "stats": torch.zeros(rows, 4, device=device),
    }


# In the order of each op's arguments, and how it is said in a case's name
ARGUMENTS = {
    "cross_entropy_stats": (("logits", "target"), "statistics"),
    "cross_entropy_chunk_": (("logits", "stats", "target", "coefficients"), "statistics and gradient"),
    "cross_entropy_gradient_": (("logits", "lse", "target", "coefficients"), "gradient"),
}


def cases() -> Iterator[Case]:
    for op, (names, what) in ARGUMENTS.items():
        for quick, (rows, classes, dtype) in each(SHAPES):

            def make(device: torch.device, rows=rows, classes=classes, dtype=dtype, names=names) -> tuple[Any, ...]:
                made = chunk(device, rows, classes, dtype)
                return tuple(made[name] for name in names)

            eager = OPS[op].reference
            yield Case(
                op,
                f"{short(dtype)} [{rows}, {classes}], {what}",
                make,
                quick=quick,
                others=[Other("torch eager", eager, near)],
                compiled=eager,
                compare_compiled=near,
            )
    for quick, value in ((True, 1.0), (False, 0.5)):

        def make_scale(device: torch.device, value=value) -> tuple[Any, ...]:
            return normal(device, 131072, 4096, dtype=BF16), torch.full((1,), value, device=device)

        yield Case(
            "scale_unless_one_",
            f"bfloat16 [131072, 4096], by {value}",
            make_scale,
            quick=quick,
            others=[Other("torch eager", OPS["scale_unless_one_"].reference, near)],
        )
