"""One decoder layer with Llama-3-8B's published configuration: eager, patched by prequal, and torch.compile'd.

    python examples/llama_block.py --json block.json --plot block.png
    python examples/llama_block.py --device cpu --tokens 16 --hidden 64 --variants eager,patched     # a rehearsal

The layer is transformers' own, with random weights; nothing is fetched. Right first: outputs and every gradient of each
variant are held against the same layer in a wider dtype, and who is wrong is not timed. Then latency and peak memory
over the weights, forward and training step, in interleaved rounds; what the patch replaced, by PyTorch's profiler; and
what each op is worth, by leaving it out.

Exit codes: 0 done; 1 a wrong answer, or something that should have been replaced is still there; 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import prequal
from prequal.bench.ablate import NotMeasurable, ablate
from prequal.bench.program import a_file, add_device, device_named, in_turns, who_answers

try:
    import transformers
    from transformers import LlamaConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
except ImportError as error:
    raise SystemExit(f"llama_block.py needs transformers: pip install transformers ({error})") from error

# Meta-Llama-3-8B, config.json
PUBLISHED = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_hidden_layers": 1,  # of 32: one layer is built
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VARIANTS = {
    "eager": "transformers as it is",
    "patched": "prequal.patch",
    "compiled": "torch.compile",
    "patched-compiled": "prequal.patch, then torch.compile",
}
FLOOR = "its GEMMs and attention alone"
# What the eager layer dispatches for each op, and nothing else in it does
STANDS_FOR = {
    ("rms_norm", "fused_add_rms_norm"): ("aten::pow", "aten::mean", "aten::rsqrt"),
    ("swiglu",): ("aten::silu",),
    ("rope",): ("aten::neg", "aten::cat"),
}
# Neither eager nor patched is the other's standard: both round, at different steps. Against the wider dtype the output
# may be a quarter further away than eager's, and any one gradient half further than the worst of eager's.
OUTPUT_FACTOR, GRADIENT_FACTOR = 1.25, 1.5
LAST_BITS = 1e-6  # of float32, where eager may happen to be nearly exact

_start = time.perf_counter()


def progress(text: str) -> None:
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", file=sys.stderr, flush=True)


# ---- the block -------------------------------------------------------------------------------------------------------


def configuration(hidden: int) -> LlamaConfig:
    """The published one; another width keeps its proportions."""
    sizes = dict(PUBLISHED)
    if hidden != PUBLISHED["hidden_size"]:
        heads = max(4, hidden // 128)
        sizes |= {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 4,
            "intermediate_size": hidden * 7 // 2,
        }
    return LlamaConfig(**sizes, attn_implementation="sdpa")


class Block(nn.Module):
    """A decoder layer and the tables of its rotation, which a model computes once for all layers."""

    def __init__(self, config: LlamaConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device(device):
            self.layer = LlamaDecoderLayer(config, 0)
            cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1, dtype=dtype), torch.arange(tokens)[None])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, tokens, hidden]
        out: Any = self.layer(x, position_embeddings=(self.cos, self.sin))
        return out[0] if isinstance(out, tuple) else out  # a tuple before transformers 4.54


def random_weights(block: Block) -> dict[str, Tensor]:
    """Norms around 1; projections of 0.02 at width 4,096, as in a model, and at any other so that all parts count."""
    size = 0.02 * (PUBLISHED["hidden_size"] / block.layer.hidden_size) ** 0.5
    generator = torch.Generator(next(block.parameters()).device).manual_seed(0)
    found = {}
    for name, parameter in block.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        found[name] = (1 + 0.02 * noise if "norm" in name else size * noise).to(parameter.dtype)
    return found


class Bench:
    """The variants, the input, and the gradient that comes from above."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.dtype = DTYPES[args.dtype]
        self.wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        self.config = configuration(args.hidden)
        self.tokens, self.mode, self.exact = args.tokens, args.mode, args.exact_rounding
        self.ops = args.ops
        self.state = random_weights(self._block())
        shape = args.batch, args.tokens, self.config.hidden_size
        generator = torch.Generator(self.device).manual_seed(1)
        self.x = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
        self.above = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
        self.report: Any = None

    def _block(self, dtype: torch.dtype | None = None) -> Block:
        return Block(self.config, self.tokens, self.device, dtype or self.dtype)

    def make(self, variant: str) -> nn.Module:
        """A block of its own with the same weights."""
        block: Any = self._block()
        block.load_state_dict(self.state)
        if variant.startswith("patched"):
            self.report = prequal.patch(block, ops=self.ops, exact_rounding=self.exact, verbose=False)
        return (
            torch.compile(block, mode=None if self.mode == "default" else self.mode) if "compiled" in variant else block
        )

    def truth(self) -> dict[str, Tensor]:
        """In the wider dtype, from the same rounded weights and tables."""
        block = self._block()
        block.load_state_dict(self.state)
        return self.everything(block.to(self.wide), self.x.to(self.wide), self.above.to(self.wide))

    def everything(self, block: nn.Module, x: Tensor | None = None, above: Tensor | None = None) -> dict[str, Tensor]:
        x = (self.x if x is None else x).detach().clone().requires_grad_()
        out = block(x)
        out.backward(self.above if above is None else above)
        found = {"output": out.detach(), "gradient of the input": x.grad}
        for name, parameter in block.named_parameters():
            found[f"gradient of {name.removeprefix('_orig_mod.')}"] = parameter.grad
            parameter.grad = None
        return found

    def forward(self, block: nn.Module) -> Callable[[], Any]:
        def call() -> Tensor:
            with torch.no_grad():
                return block(self.x)

        return call

    def step(self, block: nn.Module) -> Callable[[], Any]:
        """Forward and backward; the gradients are made, and dropped before the next step."""
        x = self.x.clone().requires_grad_()

        def call() -> None:
            block(x).backward(self.above)
            x.grad = None
            block.zero_grad(set_to_none=True)

        return call

    def floor(self) -> Callable[[], Any]:
        """The layer's matrix products and its attention, one after the other: what no op of prequal's makes faster."""
        layer = self.make("eager").layer
        attention, mlp, config = layer.self_attn, layer.mlp, self.config
        batch, tokens = self.x.shape[:2]
        inner = torch.randn(batch, tokens, config.intermediate_size, device=self.device).to(self.dtype)
        heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        q, k, v = (
            torch.randn(batch, tokens, n, attention.head_dim, device=self.device).to(self.dtype).transpose(1, 2)
            for n in heads
        )

        def call() -> None:
            with torch.no_grad():
                for product in (attention.q_proj, attention.k_proj, attention.v_proj):
                    product(self.x)
                sdpa_attention_forward(attention, q, k, v, None, dropout=0.0, scaling=attention.scaling)
                for product in (attention.o_proj, mlp.gate_proj, mlp.up_proj):
                    product(self.x)
                mlp.down_proj(inner)

        return call


# ---- right first -----------------------------------------------------------------------------------------------------


def distances(got: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of the difference over that of the truth."""
    found = {}
    for name, value in truth.items():
        difference = got[name].to(value.dtype) - value
        found[name] = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(value))
    return found


def what_is_wrong(ours: Mapping[str, float], eager: Mapping[str, float]) -> list[str]:
    limits = {name: GRADIENT_FACTOR * max(eager.values()) + LAST_BITS for name in eager}
    limits["output"] = OUTPUT_FACTOR * eager["output"] + LAST_BITS
    # written so that a NaN is wrong
    return [f"{name}: {ours[name]:.2e}, limit {limits[name]:.2e}" for name in eager if not ours[name] <= limits[name]]


def compared(bench: Bench, blocks: dict[str, nn.Module]) -> dict[str, dict[str, Any]]:
    truth = bench.truth()
    # eager is measured whether it is asked for or not: it is the standard
    eager_block = blocks.get("eager") or bench.make("eager")
    eager = bench.everything(eager_block)
    standard = distances(eager, truth)
    found = {}
    for name, block in blocks.items():
        progress(f"comparing {name}")
        got = eager if name == "eager" else bench.everything(block)
        ours = distances(got, truth)
        found[name] = {
            "output": ours["output"],
            "worst_gradient": max(value for key, value in ours.items() if key != "output"),
            "max_difference_from_eager": float((got["output"].float() - eager["output"].float()).abs().max()),
            "wrong": what_is_wrong(ours, standard),
        }
    return found


# ---- then times ------------------------------------------------------------------------------------------------------


def should_be_gone(paths: Mapping[str, str], ops: Iterable[str] | None) -> list[str]:
    """What no reference of an op may do any more. Where a reference answers, as on a CPU, nothing is claimed."""
    asked = set(ops or prequal.integrations.patching.OPS)
    # without a gradient, an op of the patch may run as its in-place form
    answered = {op: paths.get(op, paths.get(op + "_")) for standing in STANDS_FOR for op in standing}
    return [
        name
        for standing, names in STANDS_FOR.items()
        if set(standing) <= asked and all(answered[op] == "fast" for op in standing)
        for name in names
    ]


def left_out(name: str, call: Callable[[], Any], args: argparse.Namespace) -> Any:
    try:
        return ablate(call, name=name, rounds=args.ablate_rounds, iterations=args.iterations, progress=progress)
    except NotMeasurable as error:
        return str(error)


# ---- telling ---------------------------------------------------------------------------------------------------------


def table(kind: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    eager = rows.get("eager", {}).get("device_us", {}).get("median")
    lines = [f"{kind:<36}{'device ms':>10}{'quartiles':>18}{'whole call':>12}{'× eager':>9}{'peak MB':>9}"]
    for name, row in rows.items():
        device, wall, peak = row["device_us"], row["wall_us"], row["peak_bytes"]
        times = f"{eager / device['median']:.2f}" if eager else "–"
        quartiles = f"{device['q1'] / 1e3:.3f}–{device['q3'] / 1e3:.3f}"
        memory = "–" if peak is None else f"{peak / 1e6:.0f}"
        label = VARIANTS.get(name, FLOOR)
        lines.append(
            f"  {label:<34}{device['median'] / 1e3:>10.3f}{quartiles:>18}{wall['median'] / 1e3:>12.3f}"
            f"{times:>9}{memory:>9}"
        )
    return "\n".join(lines)


def plot(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"eager": "#E69F00", "patched": "#0072B2", "compiled": "#009E73", "patched-compiled": "#56B4E9"}
    hatches = {"eager": "//", "patched": "", "compiled": "..", "patched-compiled": "xx"}
    kinds = [kind for kind in ("forward", "step") if result[kind]]
    panels: list[tuple[str, Callable[[Any], float | None]]] = [
        ("latency, ms", lambda row: row["device_us"]["median"] / 1e3),
        ("peak memory over the weights, MB", lambda row: row["peak_bytes"] and row["peak_bytes"] / 1e6),
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, (title, value) in zip(axes, panels, strict=True):
        for place, kind in enumerate(kinds):
            names = [name for name in VARIANTS if name in result[kind]]
            if axis is axes[0] and "floor" in result[kind]:
                low = value(result[kind]["floor"])
                axis.hlines(
                    low, place - 0.42, place + 0.42, colors="#222222", linestyles="dashed", label=FLOOR, zorder=3
                )
            for i, name in enumerate(names):
                height = value(result[kind][name])
                if height is None:
                    continue
                where = place + (i - (len(names) - 1) / 2) * 0.8 / len(names)
                bars = axis.bar(
                    where, height, 0.74 / len(names), color=colours[name], hatch=hatches[name], edgecolor="white"
                )
                bars.set_label(VARIANTS[name] if place == 0 else "_")
                axis.annotate(f"{height:.3g}", (where, height), ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(len(kinds)), [{"forward": "forward", "step": "training step"}[kind] for kind in kinds])
        axis.set_ylabel(title)
        axis.spines[["top", "right"]].set_visible(False)
        if not axis.patches:
            axis.text(0.5, 0.5, "not measured here", ha="center", transform=axis.transAxes)
            axis.set(xticks=[], yticks=[])
    if axes[0].patches:
        figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center")
    figure.suptitle(result["title"], fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=4096, help="another width keeps the published proportions")
    parser.add_argument("--variants", default="eager,patched,compiled", help=f"out of {', '.join(VARIANTS)}")
    parser.add_argument("--mode", default="default", help="of torch.compile: default, max-autotune-no-cudagraphs, ...")
    parser.add_argument("--ops", default=None, help="only these of prequal.patch's ops, with commas")
    parser.add_argument("--exact-rounding", action="store_true", help="as prequal.patch's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=20, help="of each variant, a round")
    parser.add_argument("--ablate-rounds", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=10, help="timed together when an op is left out")
    parser.add_argument("--json", type=a_file, help="write all figures here")
    parser.add_argument("--plot", type=a_file, help="write a PNG of latency and peak memory here")
    args = parser.parse_args(argv)
    args.variants = [name.strip() for name in args.variants.split(",") if name.strip()]
    for name in args.variants:
        if name not in VARIANTS:
            parser.error(f"--variants: expected names out of {', '.join(VARIANTS)}, got {name!r}")
    if not args.variants:
        parser.error("--variants: expected at least one name, got none")
    for name in ("batch", "tokens", "hidden", "rounds", "runs", "iterations"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if args.hidden % 8 or (args.hidden > 512 and args.hidden % 512):
        parser.error(f"--hidden: expected a multiple of 8, and of 512 where it is larger, got {args.hidden}")
    args.ops = [name.strip() for name in args.ops.split(",")] if args.ops else None
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    device = device_named(args.device)
    what = f"{args.batch} × {args.tokens} tokens, hidden {args.hidden}, {args.dtype}, {device.name}"
    progress(f"building the block: {what}")
    bench = Bench(args)
    try:
        blocks = {name: bench.make(name) for name in args.variants}
    except ValueError as error:  # names of ops, or ops of which there is nothing in this block
        print(f"llama_block.py: {error}", file=sys.stderr)
        return 2
    if bench.report is not None:
        print(bench.report, end="\n\n")

    answers = compared(bench, blocks)
    print(f"distance from the block in {str(bench.wide).removeprefix('torch.')}, relative:")
    for name, row in answers.items():
        print(
            f"  {VARIANTS[name]:<34} output {row['output']:.2e}, worst gradient {row['worst_gradient']:.2e}, "
            f"largest difference from eager {row['max_difference_from_eager']:.2e}"
        )
        for wrong in row["wrong"]:
            print(f"    WRONG {wrong}")
    right = {name: block for name, block in blocks.items() if not answers[name]["wrong"]}

    result: dict[str, Any] = {
        "schema": 1,
        "title": f"Llama-3-8B decoder layer, {what}",
        "device": device.name,
        "config": PUBLISHED | {name: getattr(bench.config, name) for name in PUBLISHED if name != "rope_theta"},
        "arguments": {name: value for name, value in vars(args).items() if name not in ("json", "plot")},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "prequal": prequal.__version__,
        },
        "patch": None if bench.report is None else str(bench.report),
        "answers": answers,
        "paths": {},
        "forward": {},
        "step": {},
        "replacement": None,
        "ablate": {},
    }
    for kind, make in (("forward", bench.forward), ("step", bench.step)):
        if right:
            progress(f"timing: {kind}")
            calls = {name: make(block) for name, block in right.items()}
            if kind == "forward":
                calls["floor"] = bench.floor()
            result[kind] = in_turns(
                device, calls, args.rounds, args.runs, done=lambda number: progress(f"round {number} of {args.rounds}")
            )
            print(f"\n{table('training step' if kind == 'step' else kind, result[kind])}")

    failed = [name for name, row in answers.items() if row["wrong"]]
    if "patched" in right:
        call = bench.forward(right["patched"])
        result["paths"] = who_answers(call)
        print("\nwho answers: " + ", ".join(f"{op} {path}" for op, path in sorted(result["paths"].items())))
        gone = should_be_gone(result["paths"], args.ops)
        progress("looking at what the patch replaced")
        try:
            eager = blocks.get("eager") or bench.make("eager")
            replacement: Any = prequal.verify_replacement(bench.forward(eager), call, (), gone)
        except prequal.ReplacementError as error:
            replacement = error.report
            failed.append("replacement")
        print(f"\n{replacement}")
        result["replacement"] = {
            "launches": [replacement.before.launches, replacement.after.launches],
            "should_be_gone": gone,
            "still_there": replacement.still_there,
            **{name: getattr(replacement, name) for name in ("ops_gone", "ops_new", "kernels_gone", "kernels_new")},
        }
        for kind, workload in (("forward", call), ("step", bench.step(right["patched"]))):
            progress(f"leaving one op out: {kind}")
            found = left_out(f"Llama block, {kind}", workload, args)
            result["ablate"][kind] = {"not_done": found} if isinstance(found, str) else found.data()
            print(f"\nleaving one out, {kind}: {found}" if isinstance(found, str) else f"\n{kind}\n{found.table()}")

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
