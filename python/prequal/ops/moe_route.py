"""Which experts a token goes to, with what weights, and how many tokens each expert gets."""

import itertools

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Tolerance
from prequal.registry import BadCall, Sample, op

from ._moe import MOST_CHOSEN, counts_of, spaced_logits
from ._rows import FLOATS, wide_of

MOST_EXPERTS, MOST_GROUPS = 1024, 32  # of the kernel
LEAST_SUM = 1e-20  # added to a sum of sigmoids: a row of zeros has weights of zero


def with_bias(device, experts, of=0):
    """Multiples of 1/16: apart from what the scores' own differences add up to."""
    generator = torch.Generator().manual_seed(experts + of)
    return (torch.rand(experts, generator=generator).argsort() / 16).to(torch.float32).to(device)


def samples(device):
    def logits(tokens, experts, dtype=torch.float32, of=0):
        return spaced_logits(device, tokens, experts, dtype, of)

    yield Sample("quick", (logits(24, 64, torch.bfloat16), 6))
    for dtype in FLOATS:
        name = c.short(dtype)
        for tokens, experts, k in (
            *((1, 1, 1), (3, 2, 2), (257, 8, 2), (31, 7, 3), (5, 8, 8), (600, 64, 6), (33, 60, 4), (17, 128, 8)),
            *((65, 160, 6), (9, 192, 7), (40, 256, 8), (7, 384, 8), (5, 512, 10), (3, 1024, 32), (3, 1021, 5)),
            *((4, 33, 32), (6, 40, 17), (2, 257, 31), (11, 13, 13)),
        ):
            yield Sample(f"{name} {tokens} x {experts}, {k}", (logits(tokens, experts, dtype), k))
        for score, renormalize in itertools.product(("softmax", "sigmoid"), (True, False)):
            what = {"score": score, "renormalize": renormalize, "scale": 2.5}
            for experts, k in ((8, 2), (64, 6), (100, 5), (256, 8), (1000, 4)):
                named = f"{name} {experts} experts, {score}" + ("" if renormalize else ", as they are")
                yield Sample(named, (logits(19, experts, dtype), k), what)
        wide = logits(20, 300, dtype)
        yield Sample(f"{name} slices", (wide[::2, 8:264], 8))
        yield Sample(f"{name} misaligned", (wide[:, 3:67], 6))
        yield Sample(f"{name} misaligned, few", (wide[:, 1:9], 2))
        yield Sample(f"{name} one row for all", (wide[:1, :64].expand(5, 64), 3))
        yield Sample(f"{name} transposed", (wide.t()[:64].contiguous().t(), 3))
        yield Sample(f"{name} no tokens", (logits(0, 64, dtype), 6))
        yield Sample(f"{name} all equal", (torch.zeros(9, 256, dtype=dtype, device=device), 8))
        sigmoids, as_they_are = {"score": "sigmoid", "renormalize": False}, {"renormalize": False}
        yield Sample(f"{name} mostly equal", (logits(9, 256, dtype).clamp(max=1.0), 8), sigmoids)
        yield Sample(f"{name} far from zero", (64 * logits(9, 64, dtype) - 2000, 6), as_they_are)
    for experts, k, groups, kept in (
        *((256, 8, 8, 4), (160, 6, 8, 3), (64, 4, 32, 5), (60, 5, 3, 1), (8, 2, 2, 1), (12, 3, 4, 2), (256, 8, 8, 8)),
        *((1024, 32, 16, 7), (384, 8, 1, 1), (96, 3, 12, 4), (33, 2, 11, 1), (20, 2, 20, 2)),
    ):
        named = f"{experts} experts, {kept} of {groups} groups"
        for score in ("sigmoid", "softmax"):
            what = {"score": score, "groups": groups, "topk_groups": kept}
            yield Sample(f"{named}, {score}", (logits(21, experts), k), what | {"bias": with_bias(device, experts)})
    deepseek = {"score": "sigmoid", "groups": 8, "topk_groups": 4, "scale": 2.5}
    for dtype in FLOATS:
        bias = with_bias(device, 256).to(dtype)
        yield Sample(f"{c.short(dtype)} bias like logits", (logits(40, 256, dtype), 8), deepseek | {"bias": bias})
    yield Sample("groups, no bias", (logits(40, 64), 4), {"score": "sigmoid", "groups": 8, "topk_groups": 3})
    yield Sample("bias, no groups", (logits(40, 8), 2), {"score": "sigmoid", "bias": with_bias(device, 8)})
    yield Sample("every second of a bias", (logits(40, 32), 2), {"bias": with_bias(device, 64)[::2]})
    bias = with_bias(device, 64)
    bias[::2] = -torch.inf
    yield Sample("a bias that closes experts", (logits(40, 64), 4), {"bias": bias, "renormalize": False})
    yield Sample("33 groups", (logits(5, 66), 2), {"groups": 33, "topk_groups": 3})
    yield Sample("1,025 experts", (logits(3, 1025), 2))
    yield Sample("float64", (logits(5, 64, torch.float64), 6))
    yield Sample("float64 bias", (logits(5, 64), 6), {"bias": with_bias(device, 64).double()})


# A weight is a quotient of exponentials, or of sigmoids, and a sum. With u = 2^-24: an exponential is right to 2 u and
# its argument, a difference of two floats, to u of itself: 2^7 u for the largest whose exponential is no zero. A sum of
# at most 1,024 of them in parts of 32 has 37 roundings, and no more in parts of 8 or 16; a quotient 2 to 4, the scale
# one. Two paths that share exponentials differ by the sums: 2 (37 + 4 + 1) u = 5.0e-6; those that do not, by
# (2^7 + 4) u = 7.9e-6 more. atol: what is left of exponentials below the normal numbers.
TOLERANCE = Tolerance({torch.float32: (1.4e-5, 1e-37), torch.float64: (1e-12, 1e-300)})


@op(samples=samples, contract=TOLERANCE)
def moe_route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    groups: int | None = None,
    topk_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k experts of each token, their weights, and how many tokens each expert gets: the router of an MoE layer.

    Args:
        logits: [T, E], floating: what the router's matrix product says of each token and expert.
        k: experts a token, 1 to min(E, 32).
        score: "softmax" or "sigmoid": what makes scores of logits.
        renormalize: the weights of a token are its scores over their sum (Mixtral, DeepSeek-V3); else the scores.
        bias: [E], floating, or None: added to the scores for the choice alone, never to the weights (DeepSeek-V3's
            ``e_score_correction_bias``). It has no gradient.
        groups: None, or a divisor of E: experts that follow each other are groups of E / groups, and only those of the
            best groups are chosen. Given with topk_groups.
        topk_groups: how many groups are kept: those whose two best experts, bias and all, add up to the most (a group
            of one expert: that one).
        scale: every weight is multiplied by it (DeepSeek-V3's ``routed_scaling_factor``).

    Returns:
        weights: [T, k], float32 (float64 for float64), best expert first.
        experts: [T, k], int32, in the order of the weights: distinct, each in 0 to E - 1.
        counts: [E], int32: how often each expert stands in experts. They add up to T * k.

    Without bias and groups, experts are chosen by their logits, which are in the order of the scores and have no
    rounding. With either, by the scores in float32 (float64) plus bias. Among equals the lower expert comes first, and
    the lower group.

    Weights: ``softmax`` renormalised is the softmax of the k chosen logits; else that of all E, of which k are taken;
    ``sigmoid`` renormalised is ``s / (sum(s) + 1e-20)``. Computed in float32 (float64 for float64).

    Every row has an answer. All negative is nothing special. An expert at -inf comes last, with a weight of 0; where
    all that are chosen are at -inf, a softmax over them is NaN, as torch's is, and sigmoids are 0. An expert at inf
    comes first; a softmax over it is NaN, as torch's is, its sigmoid is 1. NaN counts as larger than infinity, as
    torch's sort has it: it is chosen first, and every weight of that token whose arithmetic meets it is NaN; experts
    stay distinct and in range, and other tokens untouched. With a bias or groups all this is said of scores plus bias:
    an expert at -inf has a score of 0, and one NaN or inf makes a softmax NaN for every expert, so that the lowest are
    chosen. Zeros of both signs are equal.

    The gradient of weights flows to logits, through the chosen experts; the choice itself has none. It is computed by
    torch from the choice of the forward call, without atomics, and can be differentiated again.

    Raises:
        TypeError: logits, or bias, is not a floating tensor; k, groups or topk_groups is no int; groups without
            topk_groups, or the other way round; score is no str, renormalize no bool, scale no number.
        ValueError: logits not [T, E] with E from 1; k out of range, or more than the experts of topk_groups groups;
            another score; a bias of another shape; groups that do not divide E; two devices.

    Contract: Tolerance for weights (TOLERANCE in the source, with its arithmetic), experts and counts equal. With a
    bias or groups two paths compare scores that each has rounded; experts are promised where what they are compared by
    is further apart than a few roundings of float32. The kernel's sigmoid is computed as torch's on a GPU is.

    Source: Jiang et al., Mixtral of Experts, 2024; DeepSeek-AI, DeepSeek-V3 Technical Report, 2024.
    """
    x = logits.to(wide_of(logits))
    experts = choice(x.detach(), k, score, None if bias is None else bias.detach(), groups, topk_groups)
    weights = weights_of(x, experts, score, renormalize) * scale
    return weights, experts.to(torch.int32), counts_of(experts, logits.shape[1])


def choice(x: Tensor, k: int, score: str, bias: Tensor | None, groups: int | None, topk_groups: int | None) -> Tensor:
    """[T, E] to [T, k] int64, best first."""
    if bias is None and groups is None:
        return x.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    best = x.softmax(1) if score == "softmax" else x.sigmoid()
    if bias is not None:
        best = best + bias.to(x.dtype)
    order = best.sort(dim=1, descending=True, stable=True).indices
    if groups is not None:
        size = x.shape[1] // groups
        two = best.unflatten(1, (groups, size)).sort(dim=2, descending=True).values[:, :, :2].sum(2)
        kept = two.sort(dim=1, descending=True, stable=True).indices[:, :topk_groups]
        dropped = torch.ones_like(two, dtype=torch.uint8).scatter(1, kept, 0)
        behind = dropped.gather(1, order // size)  # a mask of -inf would be equal to a bias of -inf
        order = order.gather(1, behind.sort(dim=1, stable=True).indices)
    return order[:, :k].contiguous()


def weights_of(x: Tensor, experts: Tensor, score: str, renormalize: bool) -> Tensor:
    """[T, k], before they are scaled."""
    if score == "softmax":
        return x.gather(1, experts).softmax(1) if renormalize else x.softmax(1).gather(1, experts)
    weights = x.gather(1, experts).sigmoid()
    return weights / (weights.sum(1, keepdim=True) + LEAST_SUM) if renormalize else weights


@moe_route.check
def _(logits, k, *, score, renormalize, bias, groups, topk_groups, scale):
    c.is_tensor("logits", logits)
    if not isinstance(score, str):
        raise TypeError(f"score: expected a str, got {type(score).__name__}")
    c.is_bool("renormalize", renormalize)
    if bias is not None:
        c.is_tensor("bias", bias)
    c.is_number("scale", scale)
    c.same_device(logits=logits, bias=bias)
    c.is_floating("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits: expected shape [T, E], E from 1, got {list(logits.shape)}")
    experts = logits.shape[1]
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score: expected 'softmax' or 'sigmoid', got {score!r}")
    if bias is not None:
        c.has_shape("bias", bias, (experts,))
        c.is_floating("bias", bias)
    c.in_range("k", k, 1, min(experts, MOST_CHOSEN))
    for name, value, other, given in (
        ("groups", groups, "topk_groups", topk_groups),
        ("topk_groups", topk_groups, "groups", groups),
    ):
        if value is None and given is not None:
            raise TypeError(f"{name}: expected an int beside {other}, got NoneType")
    if groups is None:
        return
    c.in_range("groups", groups, 1, experts)
    if experts % groups:
        raise ValueError(f"groups: expected a divisor of the {experts} experts, got {groups}")
    c.in_range("topk_groups", topk_groups, 1, groups)
    if k > (left := topk_groups * (experts // groups)):
        raise ValueError(f"k: expected at most the {left} experts of topk_groups groups, got {k}")


moe_route.kernel(
    needs=[
        c.at_most("logits", 1, MOST_EXPERTS),
        c.at_most("logits", 0, torch.iinfo(torch.int32).max),
        c.Need("size", f"groups <= {MOST_GROUPS}", lambda args: (args["groups"] or 0) <= MOST_GROUPS),
        c.unit_stride("logits"),
        c.dtype_of_or("bias", "logits", torch.float32),
        c.dtype_in("logits", *FLOATS),
    ]
)


@moe_route.backward(saves=("logits",), keeps=(1,), constant=("bias",))
def _(saved, kept, grad_weights, grad_experts, grad_counts):
    """Of each row, p = the weights before they are scaled: what a weight gains, the others of its sum lose."""
    logits, (experts,) = saved["logits"], kept
    x, at = logits.to(wide_of(logits)), experts.to(torch.int64)
    g = grad_weights * saved["scale"]
    if saved["score"] == "softmax" and not saved["renormalize"]:
        p = x.softmax(1)
        dx = p * (torch.zeros_like(x).scatter(1, at, g) - (g * p.gather(1, at)).sum(1, keepdim=True))
        return {"logits": dx.to(logits.dtype)}
    picked = x.gather(1, at)
    if saved["score"] == "softmax":
        p = picked.softmax(1)
        d = p * (g - (g * p).sum(1, keepdim=True))
    else:
        s = picked.sigmoid()
        if saved["renormalize"]:
            total = s.sum(1, keepdim=True) + LEAST_SUM
            g = (g - (g * s).sum(1, keepdim=True) / total) / total
        d = g * s * (1 - s)
    return {"logits": torch.zeros_like(x).scatter(1, at, d).to(logits.dtype)}


@moe_route.bad_calls
def _(device):
    x, bias = torch.ones(4, 8, device=device), torch.ones(8, device=device)
    yield BadCall(([1.0], 2), TypeError, r"logits: expected a torch.Tensor, got list")
    yield BadCall((x.long(), 2), TypeError, r"logits: expected a floating dtype, got int64")
    yield BadCall((x[0], 2), ValueError, r"logits: expected shape \[T, E\], E from 1, got \[8\]")
    yield BadCall((x[:, :0], 2), ValueError, r"logits: expected shape \[T, E\], E from 1, got \[4, 0\]")
    yield BadCall((x, 0), ValueError, r"k: expected 1 to 8, got 0")
    yield BadCall((x, 9), ValueError, r"k: expected 1 to 8, got 9")
    yield BadCall((torch.ones(2, 64, device=device), 33), ValueError, r"k: expected 1 to 32, got 33")
    yield BadCall((x, 2.0), TypeError, r"k: expected an int, got float")
    yield BadCall((x, 2), ValueError, r"score: expected 'softmax' or 'sigmoid', got 'tanh'", {"score": "tanh"})
    yield BadCall((x, 2), TypeError, r"score: expected a str, got int", {"score": 3})
    yield BadCall((x, 2), TypeError, r"renormalize: expected a bool, got int", {"renormalize": 1})
    yield BadCall((x, 2), TypeError, r"scale: expected a float, got str", {"scale": "2"})
    yield BadCall((x, 2), TypeError, r"bias: expected a torch.Tensor, got int", {"bias": 3})
    yield BadCall((x, 2), TypeError, r"bias: expected a floating dtype, got int64", {"bias": bias.long()})
    yield BadCall((x, 2), ValueError, r"bias: expected shape \[8\], got \[7\]", {"bias": bias[1:]})
    yield BadCall((x, 2), TypeError, r"topk_groups: expected an int beside groups, got NoneType", {"groups": 2})
    yield BadCall((x, 2), TypeError, r"groups: expected an int beside topk_groups, got NoneType", {"topk_groups": 2})
    for groups, kept, what in (
        (3, 1, "groups: expected a divisor of the 8 experts, got 3"),
        (9, 1, "groups: expected 1 to 8, got 9"),
        (4, 5, "topk_groups: expected 1 to 4, got 5"),
        (4, 0, "topk_groups: expected 1 to 4, got 0"),
    ):
        yield BadCall((x, 2), ValueError, what, {"groups": groups, "topk_groups": kept})
    too_few = r"k: expected at most the 2 experts of topk_groups groups, got 3"
    yield BadCall((x, 3), ValueError, too_few, {"groups": 4, "topk_groups": 1})
    if device.type == "cuda":
        yield BadCall(
            (x, 2), ValueError, r"bias: expected a tensor on cuda:\d like logits, got cpu", {"bias": bias.cpu()}
        )
