"""What the ops on normalised heads share: the normalisation, the angles of voxels, checks and needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.constraints import Need
from prequal.contracts import Tolerance
from prequal.registry import BadCall

from ._rows import FLOATS

WIDEST = 256
MOST = 65536

# The two paths' fp32 values differ by the order of the sum of squares, rsqrt's 2 ulp, and the angle's cosine (2^-23 of
# a pair's values, which may cancel): under 1e-6 at values of a few. A half is rounded once, 1 ulp. With exact_rounding
# the normalised value is rounded, too, and where that falls to a neighbour the turned pair moves by that step, which
# its own size does not bound: 2^-6 in bf16 and 2^-9 in fp16 for values from 2 to 4, where all but a few lie.
TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (2.0**-7, 2.0**-6),
        torch.float16: (2.0**-10, 2.0**-9),
        torch.float64: (1e-11, 1e-11),
    }
)
# Nothing is turned: the fp32 values are relatively close, and rounded once.
PLAIN_TOLERANCE = Tolerance(
    {
        torch.float32: (1e-5, 1e-7),
        torch.bfloat16: (2.0**-7, 1e-7),
        torch.float16: (2.0**-10, 2.0**-23),
        torch.float64: (1e-12, 1e-14),
    }
)


def root_of(x: Tensor) -> float:
    """sqrt(D). math's own would make a constant of a size that torch.compile leaves open."""
    return x.shape[-1] ** 0.5


def normalised(x: Tensor, gamma: Tensor, eps: float, wide: torch.dtype) -> Tensor:
    """[N, H, D] to the same, of length sqrt(D), times gamma [H, D]."""
    x = x.to(wide)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(eps)
    return x / length * gamma.to(wide) * root_of(x)


def normalised_gradient(grad: Tensor, x: Tensor, gamma: Tensor, eps: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """(dx, dgamma) in the wide dtype."""
    g, x, root = grad.to(wide), x.to(wide), root_of(x)
    found = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    length = found.clamp_min(eps)
    xhat = x / length
    gw = g * gamma.to(wide) * root
    along = (gw * xhat).sum(-1, keepdim=True) * (found >= eps)
    return (gw - xhat * along) / length, (g * xhat).sum(0) * root


def voxel_angles(coords: Tensor, dim: int, base: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [N, D/2] of integer coordinates [N, 4]: a band of D/2/3 pairs an axis, the rest not turned."""
    pairs, an_axis = dim // 2, dim // 2 // 3
    exponent = torch.arange(an_axis, device=coords.device, dtype=torch.float64) / max(an_axis, 1)
    frequency = torch.pow(torch.tensor(base, dtype=torch.float64, device=coords.device), -exponent).to(wide)
    angle = (coords[:, 1:].to(wide)[:, :, None] * frequency).flatten(1)
    angle = torch.nn.functional.pad(angle, (0, pairs - 3 * an_axis))
    return angle.cos(), angle.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [N, H, D], cos and sin [N, D/2], all in the wide dtype."""
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    both = first * cos - second * sin, second * cos + first * sin
    return torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)


# ---- right and wrong calls ---------------------------------------------------------------------------------------


def check_gammas(q_gamma: Tensor, k_gamma: Tensor, heads: int, dim: int) -> None:
    c.is_floating("q_gamma", q_gamma)
    c.has_shape("q_gamma", q_gamma, (heads, dim))
    c.has_shape("k_gamma", k_gamma, (heads, dim))
    c.same_dtype("k_gamma", k_gamma, "q_gamma", q_gamma)


def check_even(name: str, x: Tensor) -> None:
    if x.shape[-1] % 2:
        raise ValueError(f"{name}: expected an even D, got {list(x.shape)}")


def needs(first: str, *others: str) -> tuple[Need, ...]:
    """first: the argument that says heads, D and dtype; others: like it."""
    gammas = ("q_gamma", "k_gamma")
    return (
        c.at_most(first, -1, WIDEST),
        c.at_most(first, -2, MOST),
        c.dtype_in(first, *FLOATS),
        *(c.unit_stride(name) for name in (first, *others)),
        *(c.unit_stride(name) for name in gammas),
        *(c.dtype_of_or(name, first, torch.float32) for name in gammas),
    )


def bad_gammas(call) -> Iterator[BadCall]:
    """call(error, match, q_gamma, k_gamma) of 2 heads of 8, where a gamma is None for a right one."""
    wrong = torch.ones(2, 8)
    yield call(TypeError, r"q_gamma: expected a torch.Tensor, got int", 3, None)
    yield call(TypeError, r"k_gamma: expected float32 like q_gamma, got float16", None, wrong.half())
    yield call(ValueError, r"q_gamma: expected shape \[2, 8\], got \[1, 8\]", wrong[1:], None)
    yield call(ValueError, r"k_gamma: expected shape \[2, 8\], got \[8\]", None, wrong[0])
