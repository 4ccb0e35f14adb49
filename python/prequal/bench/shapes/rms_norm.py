"""rms_norm: wide and narrow rows, the odd width, every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import prequal
from prequal import runtime_state as state
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.device import Device, burst_us
from prequal.contracts import Tolerance
from prequal.registry import Cost


@prequal.rms_norm.cost
def _(x, weight, eps):
    # x read, y written, the weight once; two multiplications and an addition a value, one more for the weight
    bytes = 2 * x.numel() * x.element_size()
    if weight is None:
        return Cost(bytes, 3 * x.numel())
    return Cost(bytes + weight.numel() * weight.element_size(), 4 * x.numel())


# Others may round x * rsqrt to the dtype before the weight (the Llama order): one rounding more, so twice our bound and
# a little; against an error of kind, not of rounding.
OTHERS = Tolerance({torch.float32: (1e-4, 1e-6), torch.bfloat16: (2.0**-6, 1e-3), torch.float16: (2.0**-9, 1e-4)})


def near(got: Any, want: Any, args: Any) -> str | None:
    found = OTHERS.compare(got, want)
    return None if found is None else str(found)


def eager(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight, eps: liger_rms_norm(x, weight, eps)


def quack() -> Any:
    from quack import rmsnorm

    return lambda x, weight, eps: rmsnorm(x, weight, eps=eps)


PEERS = (Peer("liger_kernel", "rms_norm", liger, near), Peer("quack", "rms_norm", quack, near))

SHAPES = (
    *((16384, 4096, torch.bfloat16), (16384, 8192, torch.bfloat16), (16384, 4096, torch.float16)),
    *((8192, 4096, torch.float32), (262144, 128, torch.bfloat16), (4096, 16384, torch.bfloat16)),
    *((16384, 4095, torch.bfloat16), (64, 4096, torch.bfloat16), (1024, 4096, torch.bfloat16)),
)


def cases() -> Iterator[Case]:
    for place, (rows, width, dtype) in enumerate(SHAPES):

        def make(device: torch.device, rows=rows, width=width, dtype=dtype) -> tuple[Any, ...]:
            generator = torch.Generator(device).manual_seed(rows + width)
            x = torch.randn(rows, width, device=device, dtype=dtype, generator=generator)
            return x, torch.randn(width, device=device, dtype=dtype, generator=generator), 1e-6

        yield Case(
            "rms_norm",
            f"{str(dtype)[6:]} [{rows}, {width}]",
            make,
            quick=place == 0,
            series="bfloat16, width 4096" if (width, dtype) == (4096, torch.bfloat16) else "",
            size=rows,
            others=[Other("torch eager", eager, near)],
            compiled=eager,
            compare_compiled=near,
        )


def extra(device: Device) -> Iterator[dict[str, Any]]:
    """Host time of a small call: what route, gate and counter cost together."""
    native = state.native
    if native is None or device.torch_device.type != "cuda":
        return
    x, weight, other = (torch.randn(*s, device=device.torch_device) for s in ((64, 16), (16,), (64, 16)))

    def past_the_gate() -> object:
        native.admit(True)
        return native.rms_norm(x, weight, 1e-6)

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
    native.rms_norm(x, weight, 1e-6)  # spend the last admission
    bare = host["past route, gate and counter"].median - host["what admission costs"].median
    yield {
        "case": "host time, float32 [64, 16]",
        "by": {name: {"host_us": spread.json()} for name, spread in host.items()},
        "route_gate_counter_us": round(host["prequal.rms_norm"].median - bare, 3),
    }
