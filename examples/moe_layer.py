"""MoE layers of Mixtral's and of DeepSeek-V3's shape: plain torch, torch with grouped products, prequal.

    python examples/moe_layer.py --json moe.json
    python examples/moe_layer.py --quick --device cpu     # a rehearsal at tiny sizes

The layer: a router, each token's experts (a gated MLP each), their sum by weight. Plain torch goes from expert to
expert, as transformers does, and asks the GPU for the tokens of each. With grouped products nothing is asked: tokens
are sorted by expert, one product takes all of them. prequal routes, sorts and adds up by `moe_route`, `moe_permute`,
`moe_unpermute`, and the gate is `swiglu_packed`; the products are torch's in every variant, by its grouped product
where the dtype is bfloat16, else expert by expert. Weights are random; nothing is fetched. DeepSeek's shared expert is
left out.

Right first: every variant must choose the same experts, and its output and gradients must be as near to plain torch in
a wider dtype as plain torch is; who is wrong is not timed.

Exit codes: 0 done; 1 a wrong answer; 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import prequal
from prequal.bench.program import a_file, add_device, device_named, fill_numbers, in_turns, who_answers

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VARIANTS = {"plain": "plain torch, by expert", "grouped": "torch, grouped products", "prequal": "prequal"}
OURS = ("moe_route", "moe_permute", "moe_unpermute", "swiglu_packed")
# Variants round at other places than plain torch: against the wider dtype one may be so much further away.
FACTOR, LAST_BITS = 1.25, 1e-6

_start = time.perf_counter()


def progress(text: str) -> None:
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", file=sys.stderr, flush=True)


# ---- the layer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    inner: int  # of one expert
    experts: int
    k: int
    score: str = "softmax"
    groups: int | None = None
    topk_groups: int | None = None
    scale: float = 1.0


# Mixtral-8x7B's and DeepSeek-V3's config.json
SHAPES = (
    Shape("mixtral", 4096, 14336, 8, 2),
    Shape("deepseek", 7168, 2048, 256, 8, "sigmoid", 8, 4, 2.5),
)
TINY = {"mixtral": (64, 96), "deepseek": (64, 32)}  # hidden, inner; experts and choices stay


class Layer:
    """Weights, and the ways to compute with them."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(0)

        def normal(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            made = torch.randn(sizes, generator=generator, device=device, dtype=dtype)
            return made.mul_(sizes[-1] ** -0.5)

        hidden, inner, experts = shape.hidden, shape.inner, shape.experts
        self.router = normal(experts, hidden, dtype=torch.float32)
        self.up = normal(experts, 2 * inner, hidden)  # gate, then up
        self.down = normal(experts, hidden, inner)
        self.bias = None
        if shape.score == "sigmoid":  # a router that was balanced by its bias
            self.bias = 0.1 * torch.rand(experts, generator=generator, device=device)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.router)  # in float32 in every variant

    # plain torch

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As transformers has it."""
        shape = self.shape
        if shape.score == "softmax":
            weights, experts = logits.softmax(1).topk(shape.k)
            return weights / weights.sum(1, keepdim=True), experts
        scores = logits.sigmoid()
        groups, kept = shape.groups or 1, shape.topk_groups or 1
        best = scores if self.bias is None else scores + self.bias
        two = best.unflatten(1, (groups, -1)).topk(2, dim=2).values.sum(2)
        closed = torch.ones_like(two, dtype=torch.bool).scatter(1, two.topk(kept, dim=1).indices, False)
        experts = (
            best.masked_fill(closed.repeat_interleave(shape.experts // groups, 1), -torch.inf).topk(shape.k).indices
        )
        weights = scores.gather(1, experts)
        return weights / (weights.sum(1, keepdim=True) + 1e-20) * shape.scale, experts

    def plain(self, x: Tensor) -> Tensor:
        weights, experts = self.route(self.logits(x))
        out = torch.zeros_like(x)
        for e in range(self.shape.experts):
            token, choice = (experts == e).nonzero(as_tuple=True)
            if not len(token):
                continue
            gate, up = F.linear(x[token], self.up[e].to(x.dtype)).chunk(2, dim=1)
            y = F.linear(F.silu(gate) * up, self.down[e].to(x.dtype))
            out = out.index_add(0, token, y * weights[token, choice, None].to(x.dtype))
        return out

    def grouped(self, x: Tensor) -> Tensor:
        weights, experts = self.route(self.logits(x))
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.shape.experts, dtype=flat.dtype, device=x.device)
        ends = counts.scatter_add(0, flat, torch.ones_like(flat)).cumsum(0)
        token = order // self.shape.k
        gate, up = products(x[token], self.up, ends).chunk(2, dim=1)
        y = products(F.silu(gate) * up, self.down, ends)
        return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None].to(x.dtype))

    # prequal

    def prequal(self, x: Tensor) -> Tensor:
        shape = self.shape
        what: dict[str, Any] = {"score": shape.score, "bias": self.bias, "scale": shape.scale}
        what |= {"groups": shape.groups, "topk_groups": shape.topk_groups}
        weights, experts, counts = prequal.moe_route(self.logits(x), shape.k, **what)
        rows, row_map, offsets = prequal.moe_permute(x, experts, counts)
        y = prequal.swiglu_packed(products(rows, self.up, offsets[1:]))
        return prequal.moe_unpermute(products(y, self.down, offsets[1:]), row_map, weights)


def products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows, which end at ends[e], times its weight [E, out, in] transposed."""
    grouped = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is not None and rows.dtype == torch.bfloat16:
        return grouped(rows, weights.transpose(1, 2), offs=ends.to(torch.int32))
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = [F.linear(part, weight) for part, weight in zip(rows.split(sizes), weights, strict=True) if len(part)]
    return torch.cat(parts) if parts else rows.new_zeros((0, weights.shape[1]))


# ---- right first -----------------------------------------------------------------------------------------------------


def everything(layer: Layer, function: Callable[[Tensor], Tensor], x: Tensor, above: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients that reach tokens and router."""
    x = x.detach().clone().requires_grad_()
    layer.router.requires_grad_()
    out = function(x)
    of_x, of_router = torch.autograd.grad(out, (x, layer.router), above)
    layer.router.requires_grad_(False)
    return {"output": out.detach(), "gradient of the input": of_x, "gradient of the router": of_router}


def distances(got: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of the difference over that of the truth."""
    return {
        name: float(torch.linalg.vector_norm(got[name].to(value.dtype) - value) / torch.linalg.vector_norm(value))
        for name, value in truth.items()
    }


def what_is_wrong(ours: Mapping[str, float], plain: Mapping[str, float]) -> list[str]:
    limits = {name: FACTOR * value + LAST_BITS for name, value in plain.items()}
    # written so that a NaN is wrong
    return [f"{name}: {ours[name]:.2e}, limit {limits[name]:.2e}" for name in plain if not ours[name] <= limits[name]]


def other_choices(layer: Layer, x: Tensor) -> int:
    """Tokens that prequal sends to experts of other values than plain torch does; equals may be chosen either way."""
    shape, logits = layer.shape, layer.logits(x)
    _, theirs = layer.route(logits)
    what: dict[str, Any] = {"score": shape.score, "bias": layer.bias}
    what |= {"groups": shape.groups, "topk_groups": shape.topk_groups}
    _, ours, _ = prequal.moe_route(logits, shape.k, **what)
    values = logits if layer.bias is None else logits.sigmoid() + layer.bias
    found = [values.gather(1, experts.long()).sort(1).values for experts in (ours, theirs)]
    return int((~torch.isclose(*found, rtol=1e-6, atol=1e-6)).any(1).sum())


def compared(layer: Layer, x: Tensor, above: Tensor, variants: list[str]) -> dict[str, dict[str, Any]]:
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    truth = everything(layer, layer.plain, x.to(wide), above.to(wide))
    plain = distances(everything(layer, layer.plain, x, above), truth)
    found = {}
    for name in variants:
        progress(f"comparing {name}")
        got = plain if name == "plain" else distances(everything(layer, getattr(layer, name), x, above), truth)
        wrong = what_is_wrong(got, plain)
        if name == "prequal" and (tokens := other_choices(layer, x)):
            wrong.append(f"experts: {tokens} tokens go to others")
        found[name] = {"distances": got, "wrong": wrong}
    return found


# ---- then times ------------------------------------------------------------------------------------------------------


def calls_of(layer: Layer, x: Tensor, above: Tensor, kind: str, variants: list[str]) -> dict[str, Callable[[], Any]]:
    asking = x.detach().clone().requires_grad_()

    def forward(function: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        def call() -> Tensor:
            with torch.no_grad():
                return function(x)

        return call

    def step(function: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        """Forward, and backward to the tokens; the experts are not trained here."""
        return lambda: torch.autograd.grad(function(asking), asking, above)

    make = forward if kind == "forward" else step
    return {name: make(getattr(layer, name)) for name in variants}


# ---- telling ---------------------------------------------------------------------------------------------------------


def table(kind: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    plain = rows.get("plain", {}).get("device_us", {}).get("median")
    lines = [f"{kind:<30}{'device ms':>10}{'quartiles':>18}{'whole call':>12}{'× plain':>9}{'peak MB':>9}"]
    for name, row in rows.items():
        device, peak = row["device_us"], row["peak_bytes"]
        quartiles = f"{device['q1'] / 1e3:.3f}–{device['q3'] / 1e3:.3f}"
        times = f"{plain / device['median']:.2f}" if plain else "–"
        memory = "–" if peak is None else f"{peak / 1e6:.0f}"
        lines.append(
            f"  {VARIANTS[name]:<28}{device['median'] / 1e3:>10.3f}{quartiles:>18}"
            f"{row['wall_us']['median'] / 1e3:>12.3f}{times:>9}{memory:>9}"
        )
    return "\n".join(lines)


def one_layer(shape: Shape, args: argparse.Namespace, device: Any) -> dict[str, Any]:
    dtype, where = DTYPES[args.dtype], torch.device(args.device)
    progress(f"{shape.name}: {shape.experts} experts of {shape.hidden} × {shape.inner}, {shape.k} a token")
    layer = Layer(shape, where, dtype)
    generator = torch.Generator(where).manual_seed(1)
    x, above = (torch.randn(args.tokens, shape.hidden, generator=generator, device=where).to(dtype) for _ in range(2))
    answers = compared(layer, x, above, args.variants)
    print(f"\n{shape.name}: distance from plain torch in a wider dtype, relative")
    for name, row in answers.items():
        print(f"  {VARIANTS[name]:<28}" + ", ".join(f"{what} {d:.2e}" for what, d in row["distances"].items()))
        for wrong in row["wrong"]:
            print(f"    WRONG {wrong}")
    right = [name for name in args.variants if not answers[name]["wrong"]]
    result: dict[str, Any] = {"answers": answers, "paths": {}, "forward": {}, "step": {}}
    for kind in ("forward", "step"):
        if not right:
            break
        progress(f"timing {shape.name}: {kind}")
        result[kind] = in_turns(device, calls_of(layer, x, above, kind, right), args.rounds, args.runs)
        print(f"\n{table(kind, result[kind])}")
    if "prequal" in right:
        result["paths"] = who_answers(calls_of(layer, x, above, "forward", ["prequal"])["prequal"])
        print("\nwho answers: " + ", ".join(f"{op} {path}" for op, path in sorted(result["paths"].items())))
    return result


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=int, default=None, help="4,096; 64 with --quick")
    parser.add_argument("--shapes", default="mixtral,deepseek", help="out of mixtral, deepseek")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"out of {', '.join(VARIANTS)}")
    parser.add_argument("--quick", action="store_true", help="tiny widths, few runs")
    parser.add_argument("--rounds", type=int, default=None, help="5; 2 with --quick")
    parser.add_argument("--runs", type=int, default=None, help="of each variant, a round: 20; 2 with --quick")
    parser.add_argument("--json", type=a_file, help="write all figures here")
    args = parser.parse_args(argv)
    for option, known in (("shapes", [shape.name for shape in SHAPES]), ("variants", list(VARIANTS))):
        names = [name.strip() for name in getattr(args, option).split(",") if name.strip()]
        for name in names or [""]:
            if name not in known:
                parser.error(f"--{option}: expected names out of {', '.join(known)}, got {name!r}")
        setattr(args, option, names)
    fill_numbers(parser, args, {"tokens": (4096, 64), "rounds": (5, 2), "runs": (20, 2)})
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    device = device_named(args.device)
    result: dict[str, Any] = {
        "schema": 1,
        "title": f"MoE layers, {args.tokens} tokens, {args.dtype}{', tiny' if args.quick else ''}",
        "device": device.name,
        "arguments": {name: value for name, value in vars(args).items() if name != "json"},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "prequal": prequal.__version__,
        },
        "layers": {},
    }
    failed = []
    for shape in SHAPES:
        if shape.name not in args.shapes:
            continue
        if args.quick:
            hidden, inner = TINY[shape.name]
            shape = replace(shape, hidden=hidden, inner=inner)
        found = result["layers"][shape.name] = one_layer(shape, args, device)
        failed += [f"{shape.name} {name}" for name, row in found["answers"].items() if row["wrong"]]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        progress(f"wrote {args.json}")
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
