"""What tests of compiled calls share: a call with dynamic sizes is compiled for the first sizes, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend


def floats(values: Any) -> list[Tensor]:
    values = [values] if isinstance(values, Tensor) else values
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def is_compiled_once(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> None:
    """Each call answers as the eager one, with its gradients where tensors ask for them."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for args in calls:
        got, want = compiled(*args), function(*args)
        torch.testing.assert_close(got, want)
        asking = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        if asking:
            for a, b in zip(*(gradients(out, asking) for out in (got, want)), strict=True):
                torch.testing.assert_close(a, b)
        graphs.append(counter.frame_count)
    assert len(graphs) > 1
    assert graphs == graphs[:1] * len(graphs)


def gradients(out: Any, asking: list[Tensor]) -> tuple[Tensor, ...]:
    total = torch.stack([x.masked_fill(~x.isfinite(), 0).square().sum() for x in floats(out) if x.requires_grad]).sum()
    return torch.autograd.grad(total, asking)
