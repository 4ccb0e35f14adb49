"""The cases of a gated activation, apart and packed, and of its gradient, at the widths of language models' MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from prequal.registry import OPS

from .cases import Case, Other
from .rows import by_autograd, each, near, near_gradient, normal, short

Function = Callable[..., Any]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (
    *((16384, 14336, BF16), (16384, 4096, BF16), (4096, 14336, BF16), (8192, 8192, FP16), (8192, 8192, FP32)),
    *((4096, 32768, BF16), (16384, 5119, BF16), (64, 14336, BF16), (1, 14336, BF16)),
)
IN_PLACE = ((16384, 14336, BF16), (4096, 14336, BF16), (64, 14336, BF16))
PACKED = ((16384, 14336, BF16), (4096, 14336, BF16), (64, 14336, BF16))


def gated_cases(
    name: str,
    eager: Function,
    eager_in_place: Function,
    eager_packed: Function,
    split: Function,
    packed_gradient: Function,
) -> Iterator[Case]:
    """Of `name`, `name`_, `name`_packed and gradients: eager chains, and what `by_autograd` takes of the first."""
    for quick, (rows, width, dtype) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return tuple(normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2))

        yield Case(
            name,
            f"{short(dtype)} [{rows}, {width}]",
            make,
            quick=quick,
            others=[Other("torch eager", eager, near)],
            compiled=eager,
            compare_compiled=near,
        )
    for quick, (rows, width, dtype) in each(IN_PLACE):

        def make_in_place(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return tuple(normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2))

        yield Case(
            f"{name}_",
            f"{short(dtype)} [{rows}, {width}], in place",
            make_in_place,
            quick=quick,
            others=[Other("torch eager", eager_in_place, near)],
            compiled=eager_in_place,
            compare_compiled=near,
        )
    for quick, (rows, width, dtype) in each(PACKED):

        def make_packed(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return (normal(device, rows, 2 * width, dtype=dtype),)

        yield Case(
            f"{name}_packed",
            f"{short(dtype)} [{rows}, 2 x {width}]",
            make_packed,
            quick=quick,
            others=[Other("torch eager", eager_packed, near)],
            compiled=eager_packed,
            compare_compiled=near,
        )
        yield Case(
            f"{name}_packed",
            f"{short(dtype)} [{rows}, 2 x {width}], interleaved",
            make_packed,
            named={"interleaved": True},
        )
    for quick, (rows, width, dtype) in each(SHAPES):

        def make_gradient(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return tuple(normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2, 3))

        yield Case(
            f"{name}_backward",
            f"{short(dtype)} [{rows}, {width}], backward",
            make_gradient,
            quick=quick,
            others=[Other("torch eager", by_autograd(eager, split), near_gradient)],
            compiled=OPS[f"{name}_backward"].reference,
            compare_compiled=near_gradient,
        )
    for quick, (rows, width, dtype) in each(PACKED):

        def make_packed_gradient(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            return normal(device, rows, width, dtype=dtype, seed=1), normal(device, rows, 2 * width, dtype=dtype)

        yield Case(
            f"{name}_packed_backward",
            f"{short(dtype)} [{rows}, 2 x {width}], backward",
            make_packed_gradient,
            quick=quick,
            others=[Other("torch eager", packed_gradient, near_gradient)],
            compiled=OPS[f"{name}_packed_backward"].reference,
            compare_compiled=near_gradient,
        )
