"""The import graph of Python packages: who is leaned on most, and who belongs together, by message passing.

    python examples/import_graph.py --json imports.json --plot imports.png
    python examples/import_graph.py --quick --device cpu     # a few packages of the standard library

Nodes are modules, read from the sources of the standard library and of the packages named, which are parsed and not
imported; an edge goes from a module to one that it imports. Rank: PageRank, each module handing its rank on in equal
shares (`edge_weight`), 50 rounds. Map: random features smoothed over both directions as a GCN layer does it (with
loops, weights 1 / sqrt(degree of both ends)) and made orthogonal in between, so that they turn into the smoothest
coordinates of the graph; two of them are drawn. Nothing is fetched.

Right first: rank and one smoothing must be those of plain torch in float64; who is wrong is not timed.

Exit codes: 0 done; 1 a wrong answer; 2 wrong use.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import pathlib
import platform
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.program import a_file, add_device, device_named, fill_numbers, in_turns, who_answers

STDLIB = "stdlib"
QUICK = ("asyncio", "email", "http", "importlib", "json", "logging", "unittest", "urllib", "xml")
SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}
VARIANTS = {"plain": "plain torch, index_add", "prequal": "prequal"}
DAMPING, ROUNDS, SMOOTHINGS, WIDTH = 0.85, 50, 100, 64
# float32 against float64: a rank is a sum of up to some thousand shares, 50 rounds; a smoothing is one sum of products.
LIMIT = 1e-4

_start = time.perf_counter()


def progress(text: str) -> None:
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", file=sys.stderr, flush=True)


# ---- the graph -------------------------------------------------------------------------------------------------------


def modules_under(root: pathlib.Path, prefix: str) -> Iterator[tuple[str, pathlib.Path, bool]]:
    """(dotted name, file, whether it is a package) of all sources below a folder."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED & set(parts[:-1]) or not all(part.isidentifier() for part in parts):
            continue
        package = parts[-1] == "__init__"
        names = [*([prefix] if prefix else []), *(parts[:-1] if package else parts)]
        if names:
            yield ".".join(names), path, package


def sources(packages: Sequence[str]) -> dict[str, tuple[pathlib.Path, bool]]:
    found: dict[str, tuple[pathlib.Path, bool]] = {}
    for package in packages:
        if package == STDLIB:
            roots = [(pathlib.Path(sysconfig.get_path("stdlib")), "")]
        else:
            spec = importlib.util.find_spec(package)
            roots = [(pathlib.Path(place), package) for place in (spec and spec.submodule_search_locations) or ()]
        for root, prefix in roots:
            for name, path, is_package in modules_under(root, prefix):
                if package != STDLIB or name.partition(".")[0] in sys.stdlib_module_names:
                    found[name] = path, is_package
    return found


def imported(tree: ast.AST, name: str, is_package: bool) -> Iterator[tuple[str, ...]]:
    """Of each import the names that it may mean, the longest first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                up = parts[: len(parts) - node.level + is_package]
                base = ".".join([*up, *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def import_graph(packages: Sequence[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """Modules, and who imports whom, once each."""
    found = sources(packages)
    names = list(found)
    place = {name: i for i, name in enumerate(names)}
    edges: set[tuple[int, int]] = set()
    for name, (path, is_package) in found.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what others have written
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for meant in imported(tree, name, is_package):
            target = next((place[other] for other in meant if other in place), None)
            if target is not None and target != place[name]:
                edges.add((place[name], target))
    return names, sorted(edges)


def largest_component(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """The nodes of the largest part that hangs together, and its edges numbered in them: others would be the smoothest
    features of all, and no map."""
    root = list(range(count))

    def root_of(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for a, b in edges:
        root[root_of(a)] = root_of(b)
    members: dict[int, list[int]] = {}
    for node in range(count):
        members.setdefault(root_of(node), []).append(node)
    nodes = max(members.values(), key=len)
    place = {node: i for i, node in enumerate(nodes)}
    return nodes, [(place[a], place[b]) for a, b in edges if a in place]


# ---- what is computed over it ----------------------------------------------------------------------------------------

Pass = Callable[[Tensor], Tensor]


class Graph:
    """Edges with weights, twice: as they are, in shares of rank; and in both directions with loops, normalised."""

    def __init__(self, count: int, edges: list[tuple[int, int]], device: torch.device) -> None:
        self.count = count
        self.edges = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous().to(device)
        out = torch.bincount(self.edges[0], minlength=count)
        self.shares = 1.0 / out[self.edges[0]].float()
        self.hangs = out == 0
        loops = torch.arange(count, device=device).expand(2, -1)
        self.both = torch.cat((self.edges, self.edges.flip(0), loops), 1).contiguous()
        degree = torch.bincount(self.both[1], minlength=count).float()
        self.degree = degree
        self.smoothing = (degree[self.both[0]] * degree[self.both[1]]).rsqrt()

    def passes(self, variant: str) -> tuple[Pass, Pass]:
        """Of rank, and of smoothing."""
        return tuple(  # type: ignore[return-value]
            self._by_plan(edges, weight) if variant == "prequal" else self._plain(edges, weight)
            for edges, weight in ((self.edges, self.shares), (self.both, self.smoothing))
        )

    def _by_plan(self, edges: Tensor, weight: Tensor) -> Pass:
        plan = prequal.GraphPlan(edges, self.count)
        return lambda x: prequal.message_passing(x, plan, edge_weight=weight)

    def _plain(self, edges: Tensor, weight: Tensor) -> Pass:
        return lambda x: torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * weight[:, None].to(x.dtype))

    def rank(self, shared: Pass, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N], summing to 1. What a module without imports has is shared out to all."""
        rank = torch.full((self.count, 1), 1 / self.count, dtype=dtype, device=self.edges.device)
        for _ in range(ROUNDS):
            lost = rank[self.hangs].sum()
            rank = (1 - DAMPING) / self.count + DAMPING * (shared(rank) + lost / self.count)
        return rank[:, 0]

    def coordinates(self, smooth: Pass) -> Tensor:
        """[N, 2]: of the smoothest features those after the first, which says the degrees; over its root."""
        features = self.features()[:, :3]
        for _ in range(SMOOTHINGS):
            # half of itself: no feature that flips its sign is among the smoothest
            features = torch.linalg.qr(0.5 * (features + smooth(features.contiguous())))[0]
        return features[:, 1:] * self.degree.rsqrt()[:, None]

    def features(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.count, WIDTH, generator=generator).to(self.edges.device)


def what_is_wrong(graph: Graph, variant: str) -> list[str]:
    shared, smooth = graph.passes(variant)
    true_shared, true_smooth = graph.passes("plain")
    x = graph.features()
    wrong = []
    for name, got, want in (
        ("rank", graph.rank(shared), graph.rank(true_shared, torch.float64)),
        ("smoothing", smooth(x), true_smooth(x.double())),
    ):
        distance = float((got - want).norm() / want.norm())
        if not distance <= LIMIT:  # written so that a NaN is wrong
            wrong.append(f"{name}: {distance:.2e}, limit {LIMIT:.0e}")
    return wrong


# ---- times, and telling ----------------------------------------------------------------------------------------------


def group_of(module: str) -> str:
    """The package that a module is drawn with: of nested ones the first two names."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else parts[0]


def plot(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    top = result["top"][:15][::-1]
    left.barh([name for name, _ in top], [100 * rank for _, rank in top], color="#0072B2")
    left.set(xlabel="share of rank, %")
    nodes = result["mapped"]
    # by their order: a few far modules would press all others into a point
    order = torch.tensor(result["coordinates"]).argsort(0).argsort(0).tolist()
    groups = [group_of(result["modules"][node]) for node in nodes]
    largest = sorted(set(groups), key=lambda group: (-groups.count(group), group))[:7]
    colours = dict(
        zip(largest, ("#0072B2", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#E69F00", "#222222"), strict=False)
    )
    for group in [None, *largest]:
        mine = [i for i, g in enumerate(groups) if (g if g in colours else None) == group]
        if mine:
            right.scatter(
                [order[i][0] for i in mine],
                [order[i][1] for i in mine],
                s=[6 + 4000 * result["rank"][nodes[i]] for i in mine],
                color=colours.get(group or "", "#BBBBBB"),
                alpha=0.6,
                linewidths=0,
                label=group or "others",
            )
    right.set(xlabel="order by the second smoothest feature", ylabel="order by the third", xticks=[], yticks=[])
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(frameon=False, ncols=8, loc="outside lower center")
    for handle in legend.legend_handles:
        handle.set_sizes([30])
    figure.suptitle(result["title"], fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_device(parser)
    parser.add_argument("--packages", default=None, help=f"installed ones, or {STDLIB}; default: {STDLIB},torch")
    parser.add_argument("--quick", action="store_true", help="a few packages of the standard library, few runs")
    parser.add_argument("--rounds", type=int, default=None, help="5; 1 with --quick")
    parser.add_argument("--runs", type=int, default=None, help="of each variant, a round: 20; 2 with --quick")
    parser.add_argument("--json", type=a_file, help="write all figures here")
    parser.add_argument("--plot", type=a_file, help="write a PNG of ranks and map here")
    args = parser.parse_args(argv)
    default = ",".join(QUICK) if args.quick else f"{STDLIB},torch"
    args.packages = [name.strip() for name in (args.packages or default).split(",") if name.strip()]
    for name in args.packages:
        if name != STDLIB and ("." in name or importlib.util.find_spec(name) is None):
            parser.error(f"--packages: expected installed packages, got {name!r}")
    fill_numbers(parser, args, {"rounds": (5, 1), "runs": (20, 2)})
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    device = device_named(args.device)
    progress(f"reading {', '.join(args.packages)}")
    modules, edges = import_graph(args.packages)
    if not edges:
        print("FAILED: no imports between modules were found")
        return 1
    graph = Graph(len(modules), edges, torch.device(args.device))
    title = f"{len(modules)} modules, {len(edges)} imports: {', '.join(args.packages)}"
    print(title)
    wrong = {name: what_is_wrong(graph, name) for name in VARIANTS}
    for name, found in wrong.items():
        for line in found:
            print(f"  WRONG {VARIANTS[name]}: {line}")
    right = [name for name in VARIANTS if not wrong[name]]
    passes = {name: graph.passes(name) for name in right}
    x = graph.features()
    times: dict[str, Any] = {}
    if right:
        progress("timing")
        works = {
            "rank, 50 rounds": {name: lambda name=name: graph.rank(passes[name][0]) for name in right},
            f"one smoothing, {WIDTH} wide": {name: lambda name=name: passes[name][1](x) for name in right},
        }
        for what, calls in works.items():
            rows = in_turns(device, calls, args.rounds, args.runs, walls=False)
            times[what] = {name: row["device_us"] for name, row in rows.items()}
    for what, rows in times.items():
        print(f"\n{what:<34}{'device ms':>10}{'quartiles':>18}")
        for name, row in rows.items():
            quartiles = f"{row['q1'] / 1e3:.3f}–{row['q3'] / 1e3:.3f}"
            print(f"  {VARIANTS[name]:<32}{row['median'] / 1e3:>10.3f}{quartiles:>18}")
    result: dict[str, Any] = {
        "schema": 1,
        "title": title,
        "device": device.name,
        "arguments": {name: value for name, value in vars(args).items() if name not in ("json", "plot")},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "prequal": prequal.__version__,
        },
        "wrong": wrong,
        "times_us": times,
    }
    if "prequal" in right:
        shared, smooth = passes["prequal"]
        rank = graph.rank(shared).tolist()
        order = sorted(range(len(modules)), key=lambda i: (-rank[i], modules[i]))
        print("\nmost leaned on")
        for i in order[:10]:
            print(f"  {modules[i]:<32}{100 * rank[i]:>10.2f} %")
        result |= {
            "path": who_answers(lambda: smooth(x))["message_passing_csr"],
            "modules": modules,
            "edges": edges,
            "rank": rank,
        }
        result["top"] = [(modules[i], rank[i]) for i in order[:50]]
        nodes, inner = largest_component(len(modules), edges)
        part = Graph(len(nodes), inner, torch.device(args.device))
        result |= {"mapped": nodes, "coordinates": part.coordinates(part.passes("prequal")[1]).tolist()}
        print(f"\nwho answers: message_passing_csr {result['path']}")
        if args.plot:
            plot(args.plot, result)
            progress(f"wrote {args.plot}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        progress(f"wrote {args.json}")
    failed = [VARIANTS[name] for name in VARIANTS if wrong[name]]
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
