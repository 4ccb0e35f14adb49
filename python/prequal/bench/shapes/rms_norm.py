"""rms_norm and its gradient: wide and narrow rows, the odd width, misaligned views, every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import prequal
from prequal import runtime_state as state
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.device import Device, burst_us
from prequal.bench.rows import by_autograd, each, near, near_gradient, normal, short
from prequal.registry import Cost


@prequal.rms_norm.cost
def _(x, weight, eps, *, weight_offset, exact_rounding):
    # x read, y written, the weight once; two multiplications and an addition a value, one more for the weight
    bytes = 2 * x.numel() * x.element_size()
    if weight is None:
        return Cost(bytes, 3 * x.numel())
    return Cost(bytes + weight.numel() * weight.element_size(), 4 * x.numel())


@prequal.rms_norm_backward.cost
def _(grad, x, weight, eps, added, *, weight_offset, weight_grad):
    # grad, x and what is added read, dx written; the weight read and its gradient written once
    bytes = (3 if added is None else 4) * x.numel() * x.element_size()
    size = x.element_size() if weight is None else weight.element_size()
    parameters = (weight is not None) + weight_grad
    return Cost(bytes + parameters * x.shape[-1] * size, 9 * x.numel())


def eager(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight, eps: liger_rms_norm(x, weight, eps)


def quack() -> Any:
    from quack import rmsnorm

    return lambda x, weight, eps: rmsnorm(x, weight, eps=eps)


def split(grad, x, weight, eps, added):
    return (x, weight, eps), (x, weight), (grad,)


def liger_gradient() -> Any:
    from liger_kernel.transformers.functional import liger_rms_norm

    # in_place would write dx over grad, which is everybody's
    return by_autograd(lambda x, w, eps: liger_rms_norm(x, w, eps, 0.0, "llama", False), split)


PEERS = (
    Peer("liger_kernel", "rms_norm", liger, near),
    Peer("quack", "rms_norm", quack, near),
    Peer("liger_kernel", "rms_norm_backward", liger_gradient, near_gradient),
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# rows, width, dtype, columns before a row in its memory
SHAPES = (
    *((16384, 4096, BF16, 0), (16384, 2048, BF16, 0), (16384, 8192, BF16, 0), (16384, 4096, FP16, 0)),
    *((8192, 4096, FP32, 0), (262144, 128, BF16, 0), (4096, 16384, BF16, 0)),
    *((4096, 32768, BF16, 0), (4096, 65536, BF16, 0), (4096, 131072, BF16, 0), (4096, 262144, BF16, 0)),
    *((16384, 4095, BF16, 0), (16384, 5119, BF16, 0), (16384, 4096, BF16, 1)),
    *((64, 4096, BF16, 0), (1, 4096, BF16, 0), (1024, 4096, BF16, 0)),
)
GRADIENTS = (
    *((16384, 4096, BF16, 0), (16384, 2048, BF16, 0), (16384, 8192, BF16, 0), (4096, 16384, BF16, 0)),
    *((4096, 32768, BF16, 0), (4096, 65536, BF16, 0), (4096, 131072, BF16, 0), (4096, 262144, BF16, 0)),
    *((16384, 4095, BF16, 0), (262144, 128, BF16, 0), (8192, 4096, FP32, 0), (64, 4096, BF16, 0)),
)


def cases() -> Iterator[Case]:
    for quick, (rows, width, dtype, ahead) in each(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype, ahead=ahead) -> tuple[Any, ...]:
            x = normal(device, rows, width + ahead, dtype=dtype)[:, ahead:]
            return x, normal(device, width, dtype=dtype), 1e-6

        yield Case(
            "rms_norm",
            f"{short(dtype)} [{rows}, {width}]{', misaligned' if ahead else ''}",
            make,
            quick=quick,
            series="bfloat16, width 4096" if (width, dtype, ahead) == (4096, BF16, 0) else "",
            size=rows,
            others=[Other("torch eager", eager, near)],
            compiled=eager,
            compare_compiled=near,
        )
    for quick, (rows, width, dtype, _) in each(GRADIENTS):

        def make_gradient(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            grad, x = (normal(device, rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
            return grad, x, normal(device, width, dtype=dtype), 1e-6, None

        yield Case(
            "rms_norm_backward",
            f"{short(dtype)} [{rows}, {width}], backward",
            make_gradient,
            quick=quick,
            others=[Other("torch eager", by_autograd(eager, split), near_gradient)],
            compiled=prequal.rms_norm_backward.op.reference,
            compare_compiled=near_gradient,
        )


def extra(device: Device) -> Iterator[dict[str, Any]]:
    """Host time of a small call: what route, gate and counter cost together."""
    native = state.native
    if native is None or device.torch_device.type != "cuda":
        return
    x, weight, other = (torch.randn(*s, device=device.torch_device) for s in ((64, 16), (16,), (64, 16)))

    def past_the_gate() -> object:
        native.admit(True)
        return native.rms_norm(x, weight, 1e-6, 0.0, False)

    with torch.no_grad():
        host = burst_us(
            device,
            {
                "prequal.rms_norm": lambda: prequal.rms_norm(x, weight),
                "past route, gate and counter": past_the_gate,
                "what admission costs": lambda: native.admit(True),
                "torch.add": lambda: torch.add(x, other),
                "F.rms_norm": lambda: F.rms_norm(x, (16,), weight, 1e-6),
                "torch.ops.prequal.rms_norm": lambda: torch.ops.prequal.rms_norm(x, weight),
            },
        )
    native.admit(True)
    native.rms_norm(x, weight, 1e-6, 0.0, False)  # spend the last admission
    bare = host["past route, gate and counter"].median - host["what admission costs"].median
    yield {
        "case": "host time, float32 [64, 16]",
        "by": {name: {"host_us": spread.json()} for name, spread in host.items()},
        "route_gate_counter_us": round(host["prequal.rms_norm"].median - bare, 3),
    }
