"""What the ops on tokens of batches share: samples, the batch of each token, checks and needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.constraints import Need
from prequal.registry import BadCall, Sample

from ._rows import FLOATS, normal

WIDEST = 2**30
WIDTHS = (1, 7, 8, 31, 128, 256, 512, 1000, 1024, 1031, 1536, 4095, 4096, 4104)

Call = Callable[..., tuple[Any, ...]]


def maker(device: torch.device, tokens_at: str) -> Call:
    """Makes the tensors of one call, a letter each: t for tokens [N, C], m for rows [B, C]."""
    x = normal(device)

    def call(
        tokens: int, width: int, batches: int = 3, *, dtype: torch.dtype, rows: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        rows = dtype if rows is None else rows
        of = itertools.count()
        return tuple(
            x(tokens, width, dtype=dtype, of=next(of)) if kind == "t" else x(batches, width, dtype=rows, of=next(of))
            for kind in tokens_at
        )

    return call


def listed(device: torch.device, tokens: int, batches: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """[N]: a batch for each token, in no order."""
    found = torch.randint(0, batches, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return found.to(device, dtype)


def offsets(device: torch.device, tokens: int, batches: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """[B + 1]: runs of tokens, the second of them empty."""
    cuts = torch.linspace(0, tokens, batches, dtype=torch.float64).long().tolist()
    return torch.tensor([*cuts[:1], *cuts[:1], *cuts[1:]] if batches > 1 else [0, tokens], device=device, dtype=dtype)


def samples_of(
    device: torch.device, tokens_at: str, kwargs: Mapping[str, Mapping[str, Any]], place: int
) -> Iterator[Sample]:
    """place: that of the argument batch, behind the tensors of `tokens_at`; what stands between is left out."""
    call = maker(device, tokens_at)
    assert place == len(tokens_at)

    def by_list(tokens: int, width: int, batches: int = 3, **of: Any) -> tuple[Any, ...]:
        return (*call(tokens, width, batches, **of), listed(device, tokens, batches))

    def by_ptr(tokens: int, width: int, batches: int = 3, **of: Any) -> tuple[Any, ...]:
        return (*call(tokens, width, batches, **of), None, offsets(device, tokens, batches))

    yield Sample("quick", by_list(5, 128, dtype=torch.bfloat16))
    for dtype in FLOATS:
        name = c.short(dtype)
        # every width of one dtype, and what another one's code has of its own
        all_of_it = dtype == torch.bfloat16
        for width in WIDTHS if all_of_it else (1, 31, 128, 1000, 1031, 4096):
            yield Sample(f"{name} width {width}", by_list(7, width, dtype=dtype))
        for width in (8192, 16384, 16392, 32771, 65536) if all_of_it else (8192, 32771):
            yield Sample(f"{name} wide {width}", by_ptr(3, width, 2, dtype=dtype))
        yield Sample(f"{name} offsets", by_ptr(37, 264, 4, dtype=dtype))
        yield Sample(f"{name} offsets, odd", by_ptr(37, 265, 4, dtype=dtype))
        if all_of_it:
            yield Sample(f"{name} one batch", by_ptr(9, 1024, 1, dtype=dtype))
            yield Sample(f"{name} more batches than tokens", by_list(5, 72, 40, dtype=dtype))
            wide = call(33, 1024, 2, dtype=dtype)
            yield Sample(f"{name} int64 batches", (*wide, listed(device, 33, 2, torch.int64)))
            yield Sample(f"{name} int64 offsets", (*wide, None, offsets(device, 33, 2, torch.int64)))
            yield Sample(f"{name} every second batch of a list", (*wide, listed(device, 66, 2)[::2]))
        yield Sample(f"{name} many tokens", by_list(1031, 136, dtype=dtype))
        yield Sample(f"{name} many tokens in runs", by_ptr(2053, 40, 5, dtype=dtype))
        yield Sample(f"{name} fp32 rows", by_list(5, 256, dtype=dtype, rows=torch.float32))
        yield Sample(f"{name} fp32 rows, odd", by_list(5, 257, dtype=dtype, rows=torch.float32))
        big = call(12, 400, 2, dtype=dtype)
        some = tuple(t[::2, 16:160] if kind == "t" else t[:, 8:152] for t, kind in zip(big, tokens_at, strict=True))
        yield Sample(f"{name} slices", (*some, listed(device, 6, 2)))
        odd = tuple(t[::2, 1:160] if kind == "t" else t[:, 3:162] for t, kind in zip(big, tokens_at, strict=True))
        yield Sample(f"{name} misaligned", (*odd, listed(device, 6, 2)))
        turned = tuple(t.t() if kind == "t" else t[:, :12] for t, kind in zip(big, tokens_at, strict=True))
        yield Sample(f"{name} transposed", (*turned, listed(device, 400, 2)))
        yield Sample(f"{name} no tokens", by_list(0, 64, dtype=dtype))
        yield Sample(f"{name} no columns", by_list(4, 0, dtype=dtype))
        for what, named in kwargs.items():
            yield Sample(f"{name} {what}", by_list(6, 160, dtype=dtype), named)
            yield Sample(f"{name} {what}, odd", by_list(6, 161, dtype=dtype), named)
    yield Sample("float64", by_list(5, 50, dtype=torch.float64))


# ---- the batch of each token -------------------------------------------------------------------------------------


class Places:
    """Each token's row of what is given for batches; of a token without a batch, NaN."""

    def __init__(self, batch: Tensor | None, ptr: Tensor | None, tokens: int, count: int) -> None:
        if batch is None:
            assert ptr is not None
            at = torch.arange(tokens, device=ptr.device, dtype=ptr.dtype)
            batch = torch.searchsorted(ptr.contiguous(), at, right=True) - 1
        self.count = count
        self.outside = ((batch < 0) | (batch >= count))[:, None]
        self.rows = batch.clamp(0, max(count - 1, 0)).long()

    def of(self, rows: Tensor, wide: torch.dtype) -> Tensor:
        """[B, C] to [N, C]."""
        if self.count == 0:
            return rows.new_full((len(self.rows), rows.shape[1]), torch.nan, dtype=wide)
        return rows.to(wide)[self.rows].masked_fill(self.outside, torch.nan)

    def sums(self, values: Tensor) -> Tensor:
        """[N, C] to [B, C]: the same bits in every run, as of the kernels (index_add is of atomics on a GPU)."""
        zero = values.new_zeros((self.count, values.shape[1]))
        if self.count == 0:
            return zero
        return zero.index_put((self.rows,), values.masked_fill(self.outside, 0.0), accumulate=True)


# ---- right and wrong calls ---------------------------------------------------------------------------------------


def is_readable(x: Tensor) -> bool:
    """A plain tensor in the host's memory, under no mode or transform: its contents are there to be looked at."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and not torch.compiler.is_dynamo_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def check_tensors(first: str, **tensors: Any) -> None:
    """All on one device; the first [N, C] and floating."""
    for name, x in tensors.items():
        if name not in ("batch", "ptr") or x is not None:
            c.is_tensor(name, x)
    c.same_device(**tensors)
    x = tensors[first]
    c.is_floating(first, x)
    if x.dim() != 2:
        raise ValueError(f"{first}: expected shape [N, C], got {list(x.shape)}")


def check_like(name: str, x: Tensor, other: str, y: Tensor) -> None:
    c.same_shape(name, x, other, y)
    c.same_dtype(name, x, other, y)


def check_modulation(name: str, rows: Tensor, x: Tensor) -> None:
    c.is_floating(name, rows)
    c.has_shape(name, rows, ("B", x.shape[1]))


def check_batches(batch: Tensor | None, ptr: Tensor | None, tokens: int, count: int) -> None:
    if batch is None and ptr is None:
        raise TypeError("batch: expected a torch.Tensor where ptr is None, got NoneType")
    if batch is not None and ptr is not None:
        raise TypeError("ptr: expected None beside batch, got Tensor")
    name, given, entries = ("batch", batch, tokens) if batch is not None else ("ptr", ptr, count + 1)
    assert given is not None
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {c.short(given.dtype)}")
    c.has_shape(name, given, (entries,))
    if not is_readable(given):
        return
    if batch is not None:
        if tokens == 0:
            return
        if count == 0:
            raise ValueError(f"batch: expected no tokens where there are no batches, got {tokens}")
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= count:
            raise ValueError(f"batch: expected numbers from 0 to {count - 1}, got {low if low < 0 else high}")
        return
    at = given.tolist()
    if at[0] != 0 or at[-1] != tokens or any(a > b for a, b in itertools.pairwise(at)):
        raise ValueError(f"ptr: expected offsets that rise from 0 to {tokens}, got {at[:8]}")


def needs(tokens: Sequence[str], rows: Sequence[str], like: str | None = None) -> tuple[Need, ...]:
    """tokens: arguments [N, C], the first of which says the dtype; rows: [B, C]."""
    x = tokens[0]

    def fits(args: Mapping[str, Any]) -> bool:
        return args[rows[0]].shape[0] * max(1, args[x].shape[1]) <= 2**30

    return (
        c.at_most(x, -1, WIDEST),
        Need("size", f"{rows[0]} of at most 2^30 elements", fits),
        c.dtype_in(x, *FLOATS),
        *(need for name in rows for need in (c.unit_stride(name), c.dtype_of_or(name, x, torch.float32))),
        *(need(name) for name in tokens for need in (c.unit_stride, c.one_row_stride)),
    )


def bad_batches(device: torch.device, call: Callable[..., BadCall]) -> Iterator[BadCall]:
    """call(error, match, batch, ptr): of 2 batches of 4 tokens."""
    good = torch.tensor([0, 1, 1, 0], device=device)
    ptr = torch.tensor([0, 1, 4], device=device)
    yield call(TypeError, r"batch: expected a torch.Tensor where ptr is None, got NoneType", None, None)
    yield call(TypeError, r"ptr: expected None beside batch, got Tensor", good, ptr)
    yield call(TypeError, r"batch: expected a torch.Tensor, got list", [0, 1, 1, 0], None)
    yield call(TypeError, r"batch: expected int32 or int64, got float32", good.float(), None)
    yield call(TypeError, r"ptr: expected int32 or int64, got int16", None, ptr.short())
    yield call(ValueError, r"batch: expected shape \[4\], got \[3\]", good[1:], None)
    yield call(ValueError, r"ptr: expected shape \[3\], got \[2\]", None, ptr[1:])
    if device.type == "cuda":
        yield call(ValueError, r"batch: expected a tensor on cuda:\d like \w+, got cpu", good.cpu(), None)
    else:
        yield call(ValueError, r"batch: expected numbers from 0 to 1, got 2", good + 1, None)
        yield call(ValueError, r"batch: expected numbers from 0 to 1, got -1", good - 1, None)
        for wrong in ([0, 1, 3], [1, 2, 4], [0, 5, 4]):
            text = rf"ptr: expected offsets that rise from 0 to 4, got \[{', '.join(str(n) for n in wrong)}\]"
            yield call(ValueError, text, None, torch.tensor(wrong, device=device))
