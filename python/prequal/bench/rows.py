"""What the shape lists of the row ops share: data, the standard of others, and others' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from prequal.contracts import Tolerance

# Others may round where ours does not (the Llama order, silu before the product): a rounding or two more, so twice our
# bound and a little; against an error of kind, not of rounding.
OTHERS = Tolerance({torch.float32: (1e-4, 1e-4), torch.bfloat16: (2.0**-6, 1e-2), torch.float16: (2.0**-9, 2e-3)})
# A sum over 16,384 rows of values near 1 is some 128; others may add partial sums that they rounded to a half before.
OTHERS_GRADIENT = Tolerance(
    {torch.float32: (1e-3, 1e-2), torch.bfloat16: (2.0**-5, 1.0), torch.float16: (2.0**-8, 0.2)}
)


def near(got: Any, want: Any, args: Any) -> str | None:
    found = OTHERS.compare(got, want)
    return None if found is None else str(found)


def near_gradient(got: Any, want: Any, args: Any) -> str | None:
    """Outputs that the op leaves empty, others may not have."""
    kept = [x for x in want if x.numel()] if isinstance(want, tuple) else want
    found = OTHERS_GRADIENT.compare(got, kept)
    return None if found is None else str(found)


def normal(device: torch.device, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed + sum(shape))
    return torch.randn(*shape, device=device, dtype=dtype, generator=generator)


def by_autograd(
    forward: Callable[..., Any], split: Callable[..., tuple[Sequence[Any], Sequence[Tensor], Sequence[Tensor]]]
) -> Callable[..., Any]:
    """The gradient of somebody's forward function: its graph is built once for each set of arguments, then walked.

    split: from the gradient op's arguments to (arguments of forward, those to differentiate by, gradients of its
    outputs).
    """
    graphs: dict[tuple[int, ...], tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}

    def gradient(*args: Any) -> tuple[Tensor, ...]:
        key = tuple(x.data_ptr() for x in args if isinstance(x, Tensor))
        if key not in graphs:
            inputs, wanted, grads = split(*args)
            fresh = {id(x): x.detach().requires_grad_() for x in wanted}
            with torch.enable_grad():
                out = forward(*(fresh.get(id(x), x) for x in inputs))
            outputs = [out] if isinstance(out, Tensor) else list(out)
            graphs.clear() if len(graphs) > 64 else None
            graphs[key] = outputs, list(fresh.values()), list(grads)
        outputs, inputs, grads = graphs[key]
        return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    return gradient


def each(shapes: Sequence[tuple[Any, ...]]) -> Iterator[tuple[bool, tuple[Any, ...]]]:
    """(in the quick list?, shape): the first is."""
    for place, shape in enumerate(shapes):
        yield place == 0, shape


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
