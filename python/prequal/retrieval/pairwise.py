"""Distances between two sets of vectors from their differences: the references of ops that have no kernel yet.

Not exported: what they promise is what the ops are to promise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.ops._rows import wide_of
from prequal.ops.topk_rows import best_of

from .chunks import WORKSPACE_BYTES, parts


def check_pair(a: Tensor, b: Tensor) -> None:
    for name, x in (("a", a), ("b", b)):
        c.is_tensor(name, x)
        c.is_floating(name, x)
    c.has_shape("a", a, ("N", "D"))
    c.has_shape("b", b, ("M", int(a.shape[1])))
    c.same_dtype("b", b, "a", a)
    c.same_device(a=a, b=b)


def from_differences(a: Tensor, b: Tensor, p: float, squared: bool) -> Tensor:
    """[n, D] and [M, D] in the dtype of computation to [n, M]. The gradient at a distance of zero is zero."""
    apart = (a.unsqueeze(1) - b).abs()
    if p == float("inf"):
        found = apart.amax(2) if a.shape[1] else apart.sum(2)
        return found.square() if squared else found
    sums = apart.square().sum(2) if p == 2 else apart.pow(p).sum(2)
    if p == 1 or (p == 2 and squared):
        return sums.square() if squared and p == 1 else sums
    zero = sums == 0
    root = torch.where(zero, 1.0, sums).pow(1.0 / p) if p != 2 else torch.where(zero, 1.0, sums).sqrt()
    found = torch.where(zero, 0.0, root)
    return found.square() if squared else found


def pairwise_distance(
    a: Tensor, b: Tensor, *, p: float = 2.0, squared: bool = False, max_workspace_bytes: int = WORKSPACE_BYTES
) -> Tensor:
    """The p-norm of every difference of a row of a and a row of b.

    Args:
        a: [N, D], floating.
        b: [M, D], of a's dtype.
        p: from 1, or infinity.
        squared: the squares of the norms; for p = 2 without a root.
        max_workspace_bytes: memory for differences; those of one row of a are always made.

    Returns:
        [N, M], float32 (float64 for float64), computed in that dtype. Equal rows have a distance of exactly 0, none is
        negative or suffers by an offset of both. With gradients; at a distance of zero they are zero.

    Raises:
        TypeError: a or b is no floating tensor, or of two dtypes; p is no number, squared no bool.
        ValueError: shapes that do not fit; p below 1; two devices.
    """
    check_pair(a, b)
    c.is_number("p", p)
    if not p >= 1:
        raise ValueError(f"p: expected a number from 1, got {p}")
    c.is_bool("squared", squared)
    c.in_range("max_workspace_bytes", max_workspace_bytes, 1, 2**62)
    wide = wide_of(a)
    rows = max(1, max_workspace_bytes // max(1, b.numel() * wide.itemsize))
    x, y = a.to(wide), b.to(wide)
    found = [from_differences(x[begin:end], y, float(p), squared) for begin, end in parts(a.shape[0], rows)]
    return torch.cat(found) if found else x.new_zeros((0, b.shape[0]))


def pairwise_argmin(a: Tensor, b: Tensor, *, max_workspace_bytes: int = WORKSPACE_BYTES) -> tuple[Tensor, Tensor]:
    """The nearest row of b to each row of a, by Euclidean distance.

    Args:
        a: [N, D], floating.
        b: [M, D], of a's dtype.
        max_workspace_bytes: memory for differences; those of one row of a are always made.

    Returns:
        dist2: [N], float32 (float64 for float64), squared distances; infinity where b has no rows.
        idx: [N], int64; among equals the lowest, and -1 where b has no rows. A distance of NaN comes last.

    Raises:
        TypeError, ValueError: as pairwise_distance.
    """
    check_pair(a, b)
    c.in_range("max_workspace_bytes", max_workspace_bytes, 1, 2**62)
    wide = wide_of(a)
    dist2, idx = a.new_full((a.shape[0],), torch.inf, dtype=wide), a.new_full((a.shape[0],), -1, dtype=torch.int64)
    if not b.shape[0]:
        return dist2, idx
    rows = max(1, max_workspace_bytes // max(1, b.numel() * wide.itemsize))
    found = []
    for begin, end in parts(a.shape[0], rows):
        squares = from_differences(a[begin:end].to(wide), b.to(wide), 2.0, True)
        places = torch.arange(b.shape[0], device=b.device).expand(squares.shape)
        ranked = torch.where(squares.isnan(), -torch.inf, -squares).detach()
        where = best_of(ranked, places, 1)[1]
        found.append((squares.gather(1, where).squeeze(1), where.squeeze(1)))
    if not found:
        return dist2, idx
    return torch.cat([x for x, _ in found]), torch.cat([x for _, x in found])
