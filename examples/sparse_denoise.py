"""The denoise loop of a sparse-3D generator: eager, fused, without null-context attention, both, and torch.compile'd.

    python examples/sparse_denoise.py --json denoise.json --plot denoise.png
    python examples/sparse_denoise.py --quick --device cpu     # a rehearsal on a tiny model

A diffusion transformer over active voxels: 24 blocks of width 1,024 with AdaLN, self-attention with QK norm and rotary
voxel positions, cross-attention to the tokens of an image, an MLP of four times the width; 15 Euler steps with batched
classifier-free guidance, over ten token counts from 3,664 to 30,227. Weights are random; nothing is fetched. Right
first: the null context must give the bits of the loop without it, fusions must be as near to float32 as eager is, and
who is wrong is said. Then the tables of the VARCO3D 2.0 article, made anew: latency, launches, memory, leave one out.

Of the token counts the article tells the two ends and, rounded, three between (3.9K, 13.4K, 24K); the rest is chosen.

Exit codes: 0 done; 1 a wrong answer; 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prequal
from prequal.bench.ablate import ablate, rounds_needed
from prequal.bench.program import a_file, add_device, device_named, who_answers
from prequal.bench.replacement import observe

COUNTS = (3_664, 3_907, 5_413, 7_411, 9_791, 13_411, 16_903, 20_507, 24_007, 30_227)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EPS, QK_EPS = 1e-6, 1e-12
IN_CHANNELS, RESOLUTION, GUIDANCE = 8, 64, 3.0
FUSIONS = (
    "qk_rms_norm_rope_qkv_inplace",
    "qk_rms_norm_cross_inplace",
    "sparse_layer_norm_affine",
    "sparse_batch_mul_add_",
    "sparse_gate_add_layer_norm_affine",
    "linear_gelu",
)
PATHS = {
    "pure_eager": "eager",
    "kernel_fusion": "kernel fusion",
    "null_context": "null context",
    "combined": "kernel fusion and null context",
    "prior_exact_null": "null context, projected each time",
    "prior_exact_combined": "the same and kernel fusion",
    "compiled": "torch.compile",
}
DEFAULT = "pure_eager,kernel_fusion,null_context,combined,compiled"
NULL_PATHS = {"null_context": False, "combined": True, "prior_exact_null": False, "prior_exact_combined": True}
# Both round at every step, at other places: after one step a path may be a quarter further from float32 than eager is.
FACTOR, LAST_BITS = 1.25, 1e-6

_start = time.perf_counter()


def progress(text: str) -> None:
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", file=sys.stderr, flush=True)


def fusion(name: str) -> Callable[..., Any]:
    return getattr(prequal, name)


def absent_fusions() -> list[str]:
    return [name for name in FUSIONS if not hasattr(prequal, name)]


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    blocks: int = 24
    width: int = 1024
    heads: int = 16
    tokens: int = 1374  # of the image: 37 × 37 patches, a class token and four registers
    context: int = 1024

    @property
    def head(self) -> int:
        return self.width // self.heads


TINY = Size(blocks=2, width=64, heads=4, tokens=29, context=48)


@dataclass(frozen=True)
class Layout:
    """The tokens of both guided halves, [2N]: the conditional ones first."""

    tokens: int  # N
    batch: Tensor  # [2N] of int64
    ptr: Tensor  # [3] of int64
    cos: Tensor  # [2N, D/2] of float32
    sin: Tensor

    @classmethod
    def of(cls, coords: Tensor, size: Size) -> Layout:
        """coords: [N, 3], integers. Every axis has D//2//3 frequencies; what is left over is not rotated."""
        bands = size.head // 2 // 3
        frequency = 10000.0 ** (-torch.arange(bands, device=coords.device, dtype=torch.float64) / max(bands, 1))
        angle = (coords[:, :, None].double() * frequency).flatten(1)  # [N, 3 bands]
        angle = F.pad(angle, (0, size.head // 2 - angle.shape[1])).float().repeat(2, 1)
        n = len(coords)
        batch = torch.arange(2, device=coords.device).repeat_interleave(n)
        return cls(n, batch, torch.tensor([0, n, 2 * n], device=coords.device), angle.cos(), angle.sin())


class FloatNorm(nn.LayerNorm):
    """As the public generators have it: in float32, and back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class HeadNorm(nn.Module):
    """[..., H, D]: unit length times gamma times sqrt(D), in float32, and back."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size.heads, size.head))
        self.scale = size.head**0.5

    def forward(self, x: Tensor) -> Tensor:
        return (F.normalize(x.float(), dim=-1, eps=QK_EPS) * self.gamma * self.scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[M, H, D] by [M, D/2], pairs side by side."""
    if torch.compiler.is_compiling():  # complex numbers are not for its code generator
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, N, H, D], [B, L, H, D] twice, to [B N, H D]. Both halves have the same tokens: nothing is padded."""
    h = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
    return h.transpose(1, 2).flatten(2).flatten(0, 1)


class SelfAttention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.to_qkv = nn.Linear(size.width, 3 * size.width)
        self.q_norm, self.k_norm = HeadNorm(size), HeadNorm(size)
        self.to_out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, layout: Layout, fused: bool) -> Tensor:  # [2N, C]
        qkv = self.to_qkv(x).unflatten(-1, (3, self.size.heads, self.size.head))
        if fused:
            gammas = self.q_norm.narrow, self.k_norm.narrow
            fusion("qk_rms_norm_rope_qkv_inplace")(qkv, *gammas, layout.cos, layout.sin, eps=QK_EPS)
        else:
            q, k, v = qkv.unbind(1)
            q, k = (rotate(norm(part), layout.cos, layout.sin) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
            qkv = torch.stack((q, k, v), dim=1)
        return self.to_out(attend(*qkv.unflatten(0, (2, -1)).unbind(2)))


class CrossAttention(nn.Module):
    fused = False

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.to_q = nn.Linear(size.width, size.width)
        self.to_kv = nn.Linear(size.context, 2 * size.width)
        self.q_norm, self.k_norm = HeadNorm(size), HeadNorm(size)
        self.to_out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x: [B N, C]; context: [B, L, Dc]"""
        heads = self.size.heads, self.size.head
        q = self.to_q(x).unflatten(-1, heads)
        kv = self.to_kv(context).unflatten(-1, (2, *heads))  # [B, L, 2, H, D]
        if self.fused:
            fusion("qk_rms_norm_cross_inplace")(q, kv.flatten(0, 1), self.q_norm.narrow, self.k_norm.narrow, QK_EPS)
            k, v = kv.unbind(2)
        else:
            k, v = kv.unbind(2)
            q, k = self.q_norm(q), self.k_norm(k)
        return self.to_out(attend(q.unflatten(0, (len(context), -1)), k, v))


class Mlp(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor, fused: bool) -> Tensor:
        if fused:
            return self.down(fusion("linear_gelu")(x, self.up.weight, self.up.bias, "tanh"))
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = FloatNorm(size.width, EPS, elementwise_affine=False)
        self.norm2 = FloatNorm(size.width, EPS)
        self.norm3 = FloatNorm(size.width, EPS, elementwise_affine=False)
        self.self_attn, self.cross_attn, self.mlp = SelfAttention(size), CrossAttention(size), Mlp(size)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(size.width, 6 * size.width))

    def modulated(self, t: Tensor) -> tuple[Tensor, ...]:
        """[2, C] to shift, scale, gate of the attention, and of the MLP: [2, C] each."""
        return self.modulation(t).chunk(6, dim=-1)

    def forward(self, x: Tensor, t: Tensor, context: Tensor, layout: Layout) -> Tensor:
        """Eager, and what is compiled. x: [2N, C]"""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulated(t)
        batch = layout.batch
        h = self.norm1(x) * (1 + scale_a[batch]) + shift_a[batch]
        x = x + self.self_attn(h, layout, False) * gate_a[batch]
        x = x + self.cross_attn(self.norm2(x), context)
        h = self.norm3(x) * (1 + scale_m[batch]) + shift_m[batch]
        return x + self.mlp(h, False) * gate_m[batch]

    def null_forward(self, x: Tensor, t: Tensor, context: Any, layout: Layout, null: Any) -> Tensor:
        """Eager, with the null half of the cross-attention from its row. `null`: (null context, the layer's name)"""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulated(t)
        batch = layout.batch
        h = self.norm1(x) * (1 + scale_a[batch]) + shift_a[batch]
        x = x + self.self_attn(h, layout, False) * gate_a[batch]
        self.add_cross(x, self.norm2, context, layout, null)
        h = self.norm3(x) * (1 + scale_m[batch]) + shift_m[batch]
        return x + self.mlp(h, False) * gate_m[batch]

    def add_cross(self, x: Tensor, norm: Callable[[Tensor], Tensor], context: Any, layout: Layout, null: Any) -> None:
        """x += the cross-attention of norm(x); where the row serves, of the conditional half alone."""
        if null is None:
            x += self.cross_attn(norm(x), context)
            return
        null_context, name = null
        row = null_context.row(name, x, context)
        if row is None:
            x += null_context.answer(name, norm(x), context)
            return
        n = layout.tokens
        x[:n] += self.cross_attn(norm(x[:n]), context.condition)
        x[n:] += row


class Denoiser(nn.Module):
    """x: [N, 8]; t: a number; context: [2, L, Dc] or symbolic -> velocities of both halves, [2N, 8]"""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.input = nn.Linear(IN_CHANNELS, size.width)
        self.embed = nn.Sequential(nn.Linear(size.width, size.width), nn.SiLU(), nn.Linear(size.width, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.output = nn.Linear(size.width, IN_CHANNELS)
        half = size.width // 2
        frequency = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
        self.register_buffer("frequency", frequency, persistent=False)

    def use(self, fused: bool) -> None:
        for block in self.blocks:
            block.cross_attn.fused = fused

    def narrowed(self, dtype: torch.dtype) -> Denoiser:
        """Norms stay float32, as in the public generators; their values are of `dtype`, and fusions take them so."""
        for parameter in self.parameters():
            parameter.data.copy_(parameter.to(dtype))
        for block in self.blocks:
            # rows of a batch of two, as a modulation has them
            block.affine = [p.to(dtype).repeat(2, 1) for p in (block.norm2.weight, block.norm2.bias)]
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)
            elif isinstance(module, HeadNorm):
                module.narrow = module.gamma.to(dtype)
        return self

    def begin(self, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        angle = 1000.0 * t * self.frequency.float()
        wave = torch.cat((angle.cos(), angle.sin())).to(x.dtype).expand(2, -1)
        return self.input(x).repeat(2, 1), self.embed(wave)

    def end(self, x: Tensor) -> Tensor:
        return self.output(F.layer_norm(x.float(), x.shape[-1:], eps=EPS).to(x.dtype))

    def eager(self, x: Tensor, t: float, context: Any, layout: Layout, null: Any = None, block: Any = None) -> Tensor:
        h, emb = self.begin(x, t)
        for i, each in enumerate(self.blocks):
            if null is not None:
                h = each.null_forward(h, emb, context, layout, (null, str(i)))
            else:
                h = (block or Block.forward)(each, h, emb, context, layout)
        return self.end(h)

    def fused(self, x: Tensor, t: float, context: Any, layout: Layout, null: Any = None) -> Tensor:
        """Two chains of a block are one op each: gate · h + residual, and the norm that follows it."""
        pair = fusion("sparse_gate_add_layer_norm_affine")
        affine, ptr = fusion("sparse_layer_norm_affine"), layout.ptr
        h, emb = self.begin(x, t)
        modulations = [block.modulated(emb) for block in self.blocks]
        y = affine(h, modulations[0][1], modulations[0][0], ptr=ptr, eps=EPS)
        for i, block in enumerate(self.blocks):
            _, _, gate_a, shift_m, scale_m, gate_m = modulations[i]
            attended = block.self_attn(y, layout, True)
            # of the whole stream, although a row may serve the null half: the norm comes with the pass that adds
            y, h = pair(attended, gate_a, h, *block.affine, ptr=ptr, eps=EPS, add_one=False)
            named = None if null is None else (null, str(i))
            block.add_cross(h, lambda part, y=y: y[: len(part)], context, layout, named)
            y = block.mlp(affine(h, scale_m, shift_m, ptr=ptr, eps=EPS), True)
            if i + 1 < len(self.blocks):
                shift, scale = modulations[i + 1][:2]
                y, h = pair(y, gate_m, h, scale, shift, ptr=ptr, eps=EPS)
            else:
                fusion("sparse_batch_mul_add_")(y, gate_m, h, ptr=ptr)
        return self.output(prequal.layer_norm(h, None, None, EPS))


def random_weights(model: Denoiser) -> None:
    """Norms and gammas around 1; biases of their own, or every null row would be zero; gates that let all through."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            if name.endswith(("gamma", "norm2.weight")):
                parameter.copy_(1 + 0.05 * noise)
            else:
                parameter.copy_(noise * (0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))


# ---- assets and paths ------------------------------------------------------------------------------------------------


def surface(tokens: int, device: torch.device) -> Tensor:
    """[N, 3]: the voxels nearest to a sphere, as many as wanted, on a grid that grows with them."""
    side = max(RESOLUTION, math.ceil((tokens / 2) ** 0.5) * 2)
    axis = torch.arange(side, device=device, dtype=torch.float32) - (side - 1) / 2
    distance = (axis.square()[:, None, None] + axis.square()[:, None] + axis.square()).sqrt()
    nearest = (distance - 0.4 * side).abs().flatten().topk(tokens, largest=False).indices
    return torch.stack((nearest // side**2, nearest // side % side, nearest % side), dim=1)


class Bench:
    """The model, and for every token count its voxels, its noise and its image."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.dtype = args, torch.device(args.device), DTYPES[args.dtype]
        self.size, self.steps = args.size, args.steps
        with torch.device(self.device):
            self.model = Denoiser(self.size)
        random_weights(self.model)
        self.model.narrowed(self.dtype).eval().requires_grad_(False)
        generator = torch.Generator(self.device).manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

        self.condition = noise(1, self.size.tokens, self.size.context)
        self.layouts = {n: Layout.of(surface(n, self.device), self.size) for n in args.counts}
        self.noise = {n: noise(n, IN_CHANNELS) for n in args.counts}
        self.nulls: dict[bool, prequal.NullContext] = {}
        self._compiled: Any = None

    def qualify(self, fused: bool) -> Any:
        """The null context of the cross-attentions as they are with or without fusions, at every token count."""
        self.model.use(fused)
        layers = {
            str(i): prequal.CrossAttention(
                block.cross_attn,
                "to_out",
                lambda context, module=block.cross_attn: module.to_kv(context)[..., self.size.width :],
                self.size.width,
            )
            for i, block in enumerate(self.model.blocks)
        }
        self.nulls[fused] = prequal.NullContext(layers, canonical_rows=self.args.canonical_rows)
        shapes = [(n,) for n in self.args.counts]
        return self.nulls[fused].qualify(prequal.GuidedCondition(self.condition), shapes=shapes)

    def context(self, path: str) -> Any:
        """What the loop is conditioned on: a tensor with its zeros, or a symbol for it."""
        if path in NULL_PATHS:
            return prequal.GuidedCondition(self.condition)
        return torch.cat([self.condition, torch.zeros_like(self.condition)])

    def velocity(self, path: str, x: Tensor, t: float, context: Any, layout: Layout) -> Tensor:
        null = self.nulls[NULL_PATHS[path]] if path in NULL_PATHS else None
        if path in ("kernel_fusion", "combined", "prior_exact_combined"):
            return self.model.fused(x, t, context, layout, null)
        return self.model.eager(x, t, context, layout, null, self.compiled() if path == "compiled" else None)

    def compiled(self) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(Block.forward, dynamic=True)
        return self._compiled

    @contextmanager
    def as_path(self, path: str) -> Iterator[None]:
        self.model.use(path in ("kernel_fusion", "combined", "prior_exact_combined"))
        with torch.no_grad():
            if path.startswith("prior_exact"):
                with prequal.reference("null_context"):
                    yield
            else:
                yield

    def denoise(self, path: str, tokens: int, steps: int | None = None) -> Callable[[], Tensor]:
        """The whole loop: [N, 8] of noise to [N, 8]."""
        count = self.steps if steps is None else steps

        def call() -> Tensor:
            with self.as_path(path):
                x, layout, context = self.noise[tokens], self.layouts[tokens], self.context(path)
                for i in range(count):
                    both = self.velocity(path, x, 1 - i / count, context, layout)
                    positive, negative = both.chunk(2)
                    x = x - (negative + GUIDANCE * (positive - negative)) / count
                return x

        return call

    def one_velocity(self, path: str, tokens: int) -> Tensor:
        with self.as_path(path):
            return self.velocity(path, self.noise[tokens], 0.7, self.context(path), self.layouts[tokens])

    def truth(self, tokens: int) -> Tensor:
        """One velocity from the same rounded weights, in float32 (float64 where the model is float32)."""
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        with torch.device(self.device):
            model = Denoiser(self.size)
        model.load_state_dict(self.model.state_dict())
        model.to(wide).eval()
        context = self.context("pure_eager").to(wide)
        with torch.no_grad():
            return model.eager(self.noise[tokens].to(wide), 0.7, context, self.layouts[tokens])


# ---- right first -----------------------------------------------------------------------------------------------------


def distance(got: Tensor, want: Tensor) -> float:
    difference = got.to(want.dtype) - want
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(want))


def compared(bench: Bench, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One velocity of the smallest asset, against the wider dtype."""
    tokens = min(bench.args.counts)
    truth = bench.truth(tokens)
    eager = distance(bench.one_velocity("pure_eager", tokens), truth)
    limit = FACTOR * eager + LAST_BITS
    found = {}
    for path in paths:
        progress(f"comparing {path}")
        ours = distance(bench.one_velocity(path, tokens), truth)
        # written so that a NaN is wrong
        wrong = [] if ours <= limit else [f"one velocity: {ours:.2e} from the wider dtype, limit {limit:.2e}"]
        found[path] = {"distance": ours, "limit": limit, "wrong": wrong}
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- then times ------------------------------------------------------------------------------------------------------


def timed(bench: Bench, device: Any, paths: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[int, Tensor]]]:
    """Wall time of the whole synchronised loop. Paths take turns, and every round starts with another one."""
    rows: dict[str, Any] = {path: {} for path in paths}
    outputs: dict[str, dict[int, Tensor]] = {path: {} for path in paths}
    for tokens in bench.args.counts:
        times: dict[str, list[float]] = {path: [] for path in paths}
        for path in paths:
            bench.denoise(path, tokens, 1)()
        spent, done = 0.0, 0
        while done < bench.args.rounds and (done == 0 or spent < bench.args.seconds):
            turn = done % len(paths)
            for path in [*paths[turn:], *paths[:turn]]:
                kept: list[Tensor] = []
                call = bench.denoise(path, tokens)
                times[path] += device.wall_us(lambda call=call, kept=kept: kept.append(call()), 1)
                outputs[path][tokens] = kept[0]
                spent += times[path][-1] / 1e6
            done += 1
        for path in paths:
            rows[path][tokens] = {"ms": statistics.median(times[path]) / 1e3, "runs": done}
        if "compiled" in rows:
            rows["compiled"][tokens]["graphs"] = graphs_compiled()
        progress(f"{tokens:,} tokens: " + ", ".join(f"{path} {rows[path][tokens]['ms']:.0f} ms" for path in paths))
    return rows, outputs


def summary(rows: Mapping[str, Any], base: str) -> dict[str, dict[str, float]]:
    """Of each path against `base`: each asset's reduction, averaged with equal weight; geometric mean of speed-ups."""
    found = {}
    for path, row in rows.items():
        ratios = [row[tokens]["ms"] / rows[base][tokens]["ms"] for tokens in row]
        found[path] = {
            "reduction_percent": 100 * (1 - statistics.fmean(ratios)),
            "geometric_mean_speedup": 1 / statistics.geometric_mean(ratios),
            "least_reduction_percent": 100 * (1 - max(ratios)),
            "largest_reduction_percent": 100 * (1 - min(ratios)),
        }
    return found


def graphs_compiled() -> int:
    """In this process so far."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


def left_out(bench: Bench, path: str, tokens: int) -> Any:
    try:
        return ablate(
            bench.denoise(path, tokens, 1),
            name=f"one step of {path}, {tokens} tokens",
            rounds=bench.args.ablate_rounds,
            progress=progress,
        )
    except ValueError as error:
        return str(error)


# ---- telling ---------------------------------------------------------------------------------------------------------


def latency_table(rows: Mapping[str, Any], base: str) -> str:
    lines = [f"{'tokens':>8}" + "".join(f"{path:>22}" for path in rows)]
    for tokens in rows[base]:
        cells = []
        for path in rows:
            ms, eager = rows[path][tokens]["ms"], rows[base][tokens]["ms"]
            cells.append(f"{ms:>11.1f} ms {100 * (ms / eager - 1):>+6.1f}%")
        lines.append(f"{tokens:>8,}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def summary_table(found: Mapping[str, Mapping[str, float]], base: str) -> str:
    lines = [f"{'against ' + base:<36}{'mean reduction':>16}{'least–largest':>18}{'geomean':>10}"]
    for path, row in found.items():
        if path != base:
            span = f"{row['least_reduction_percent']:.1f}–{row['largest_reduction_percent']:.1f} %"
            lines.append(
                f"  {PATHS[path]:<34}{row['reduction_percent']:>14.2f} %{span:>18}"
                f"{row['geometric_mean_speedup']:>9.3f}×"
            )
    return "\n".join(lines)


def plot(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = ("#0072B2", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#222222")
    markers = "osD^vP"
    rows = result["latency"]
    base = result["base"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    counts = [int(tokens) for tokens in rows[base]]
    left.plot(counts, [row["ms"] / 1e3 for row in rows[base].values()], color="#E69F00", marker="x", label=PATHS[base])
    others = [name for name in rows if name != base]
    for name, colour, marker in zip(others, colours, markers, strict=False):
        style = {"color": colour, "marker": marker, "markersize": 4, "label": PATHS[name]}
        left.plot(counts, [row["ms"] / 1e3 for row in rows[name].values()], **style)
        ratio = [100 * (1 - a["ms"] / b["ms"]) for a, b in zip(rows[name].values(), rows[base].values(), strict=True)]
        right.plot(counts, ratio, **{**style, "label": "_"})
    right.axhline(0, color="#E69F00", linestyle="dashed", linewidth=1)
    left.set(xlabel="active tokens", ylabel="denoise latency, s", ylim=(0, None))
    right.set(xlabel="active tokens", ylabel=f"reduction against {PATHS[base]}, %")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=4, loc="outside lower center")
    figure.suptitle(result["title"], fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two assets, two steps")
    parser.add_argument("--counts", default=None, help="token counts, with commas; default: the ten")
    parser.add_argument("--steps", type=int, default=None, help="default: 15")
    parser.add_argument("--paths", default=DEFAULT, help=f"out of {', '.join(PATHS)}; pure_eager is always there")
    parser.add_argument("--canonical-rows", default="1,16,64,256,1024", help="candidates for the null row, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="of every asset, at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="after which an asset gets no further round")
    parser.add_argument(
        "--ablate", default=None, help="token counts to leave one out at; default: the least, and 13,411"
    )
    parser.add_argument("--ablate-rounds", type=int, default=rounds_needed(8))
    parser.add_argument("--json", type=a_file, help="write all figures here")
    parser.add_argument("--plot", type=a_file, help="write a PNG of latency and reduction here")
    args = parser.parse_args(argv)
    args.size = TINY if args.quick else Size()

    def numbers(name: str, text: str) -> list[int]:
        try:
            found = [int(part.replace("_", "")) for part in text.split(",") if part.strip()]
        except ValueError:
            found = []
        if not found or min(found) < 1:
            parser.error(f"--{name}: expected positive numbers with commas between, got {text!r}")
        return found

    args.counts = numbers("counts", args.counts) if args.counts else [41, 96] if args.quick else list(COUNTS)
    args.counts = sorted(set(args.counts))
    args.canonical_rows = numbers("canonical-rows", args.canonical_rows)
    defaults = sorted({args.counts[0], args.counts[len(args.counts) // 2]})
    args.ablate = numbers("ablate", args.ablate) if args.ablate else defaults
    for tokens in args.ablate:
        if tokens not in args.counts:
            parser.error(f"--ablate: expected counts out of {args.counts}, got {tokens}")
    args.steps = args.steps if args.steps is not None else 2 if args.quick else 15
    wanted = [name.strip() for name in args.paths.split(",") if name.strip()]
    for name in wanted:
        if name not in PATHS:
            parser.error(f"--paths: expected names out of {', '.join(PATHS)}, got {name!r}")
    args.paths = [name for name in PATHS if name in wanted or name == "pure_eager"]
    for name in ("steps", "rounds", "ablate_rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    device = device_named(args.device)
    size = args.size
    what = f"{size.blocks} blocks of {size.width}, {args.steps} steps, {args.dtype}, {device.name}"
    progress(f"building the model: {what}")
    bench = Bench(args)
    result: dict[str, Any] = {
        "schema": 1,
        "title": f"sparse-3D denoise loop, {what}",
        "device": device.name,
        "size": vars(size),
        "arguments": {name: value for name, value in vars(args).items() if name not in ("json", "plot", "size")},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "prequal": prequal.__version__},
        "base": "pure_eager",
        "absent": {},
    }

    paths = list(args.paths)
    fused = {"kernel_fusion", "combined", "prior_exact_combined"}
    missing = absent_fusions()
    if missing and fused & set(paths):
        text = f"this prequal has no {', '.join(missing)}"
        for path in sorted(fused & set(paths)):
            result["absent"][path] = text
            print(f"{path}: left out: {text}")
        paths = [path for path in paths if path not in fused]

    failed: list[str] = []
    result["qualification"] = {}
    for is_fused in sorted({NULL_PATHS[path] for path in paths if path in NULL_PATHS}):
        progress("qualifying the null context" + (", with fusions" if is_fused else ""))
        report = bench.qualify(is_fused)
        print(report)
        result["qualification"]["fused" if is_fused else "eager"] = {
            "path": report.path,
            "canonical_rows": report.canonical_rows,
            "reason": report.reason,
            "detail": report.detail,
        }

    answers = compared(bench, paths)
    result["answers"] = answers
    print("distance of one velocity from the wider dtype, relative:")
    for path, row in answers.items():
        print(f"  {PATHS[path]:<34} {row['distance']:.3e} (limit {row['limit']:.3e})")
        for wrong in row["wrong"]:
            print(f"    WRONG {wrong}")
            failed.append(path)
    right = [path for path in paths if not answers[path]["wrong"]]

    rows, outputs = timed(bench, device, right)
    result["latency"] = {path: {str(n): row for n, row in each.items()} for path, each in rows.items()}
    result["summary"] = summary(rows, "pure_eager")
    print(f"\nwhole denoise loop, {args.steps} steps\n{latency_table(rows, 'pure_eager')}")
    print(f"\n{summary_table(result['summary'], 'pure_eager')}")
    if "compiled" in right:
        graphs = [rows["compiled"][tokens]["graphs"] for tokens in args.counts]
        print(
            f"graphs that torch.compile had made: {graphs[0]} after the first token count, {graphs[-1]} after the last"
        )

    result["bits"] = {}
    for path, base in (
        ("null_context", "pure_eager"),
        ("prior_exact_null", "pure_eager"),
        ("combined", "kernel_fusion"),
        ("prior_exact_combined", "kernel_fusion"),
    ):
        if path in outputs and base in outputs:
            differ = [n for n in args.counts if not same_bits(outputs[path][n], outputs[base][n])]
            result["bits"][path] = {"against": base, "differ_at": differ}
            told = f"DIFFER at {differ}" if differ else f"equal at all {len(args.counts)} token counts"
            print(f"raw bits of the result, {path} against {base}: {told}")
            if differ:
                failed.append(f"bits of {path}")
    result["drift"] = {
        path: max(distance(each[n].float(), outputs["pure_eager"][n].float()) for n in args.counts)
        for path, each in outputs.items()
    }
    told = ", ".join(f"{path} {value:.2e}" for path, value in result["drift"].items() if path != "pure_eager")
    print(f"largest distance of a result from eager's after {args.steps} steps: {told or 'nothing to compare'}")

    least, most = min(args.counts), max(args.counts)
    result["launches"], result["peak_bytes"], result["who_answers"] = {}, {}, {}
    for path in right:
        progress(f"launches and memory: {path}")
        step = bench.denoise(path, least, 1)
        seen = observe(step)
        result["launches"][path] = {
            "a_step": seen.launches if device.capability else None,
            "ops": sum(seen.ops.values()),
        }
        result["peak_bytes"][path] = device.peak_bytes(bench.denoise(path, most, 1))
        result["who_answers"][path] = who_answers(step)
    print(f"\n{'a step':<36}{'CUDA launches':>15}{'× steps':>12}{'ops':>8}{'peak GiB at ' + format(most, ','):>22}")
    for path in right:
        launches, peak = result["launches"][path]["a_step"], result["peak_bytes"][path]
        cells = ("–", "–") if launches is None else (f"{launches:,}", f"{launches * args.steps:,}")
        memory = "–" if peak is None else f"{peak / 2**30:.3f}"
        print(f"  {PATHS[path]:<34}{cells[0]:>15}{cells[1]:>12}{result['launches'][path]['ops']:>8,}{memory:>22}")
    for path, ops in result["who_answers"].items():
        if ops:
            print(f"who answers in {path}: " + ", ".join(f"{op} {by}" for op, by in sorted(ops.items())))

    result["ablate"] = {}
    path = next((name for name in ("combined", "kernel_fusion", "null_context") if name in right), None)
    for tokens in args.ablate if path else ():
        progress(f"leaving one out of {path} at {tokens:,} tokens")
        found = left_out(bench, path or "", tokens)
        result["ablate"][str(tokens)] = {"not_done": found} if isinstance(found, str) else found.data()
        table = found if isinstance(found, str) else found.table()
        print(f"\nleaving one out of {path}, one step of {tokens:,} tokens\n{table}")

    result["failed"] = failed
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        progress(f"wrote {args.json}")
    if args.plot:
        plot(args.plot, result)
        progress(f"wrote {args.plot}")
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
