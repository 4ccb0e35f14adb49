"""When a GraphPlan has paid for itself: what it costs to build, and what a call by it saves against other ways.

Wall time of whole calls from edge_index: of building the plan, of a planned call, of both as for a graph used once; of
the others their preparation (a CSR of torch.sparse, the sort that torch_geometric's `segment` needs; index_add and
scatter_reduce have none) and their call. All are timed on the device, too, the L2 flushed before, in turns. A plan
has paid for itself after (its cost - the other's preparation) / (the other's call - its own) uses, in wall time; never
where the other's call is no slower.

usage: python benchmarks/graph.py [--quick] [--rounds R] [--runs N] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.program import add_device, device_named, fill_numbers, in_turns, who_answers
from prequal.bench.shapes.message_passing import power_law, uniform

Call = Callable[[], Any]
# nodes, edges a node, features, how: float32, a weighted sum
GRAPHS = (
    *((2_000, 10, 64, uniform), (2_000, 50, 64, uniform), (20_000, 20, 64, uniform), (50_000, 10, 128, uniform)),
    *((500_000, 5, 64, uniform), (100_000, 20, 64, power_law)),
)
QUICK = ((200, 10, 16, uniform), (500, 20, 16, power_law))


def ways(x: Tensor, edge_index: Tensor, weight: Tensor) -> dict[str, tuple[Call | None, Call]]:
    """By name: what a way prepares once for a graph and its weights, and its call with that."""
    nodes = x.shape[0]
    source, target = edge_index

    def csr() -> Tensor:
        at = torch.stack((target, source))
        return torch.sparse_coo_tensor(at, weight, (nodes, nodes)).to_sparse_csr()

    def in_order() -> tuple[Tensor, Tensor, Tensor]:
        found, order = target.sort(stable=True)
        starts = torch.searchsorted(found, torch.arange(nodes + 1, device=x.device))
        return starts, source[order], weight[order]

    def messages() -> Tensor:
        return x[source] * weight[:, None]

    def by_scatter_reduce() -> Tensor:
        at = target[:, None].expand(-1, x.shape[1])
        return torch.zeros_like(x).scatter_reduce(0, at, messages(), "sum", include_self=False)

    def plan() -> prequal.GraphPlan:
        return prequal.GraphPlan(edge_index, nodes)

    made, matrix, (starts, sources, weights) = plan(), csr(), in_order()
    found: dict[str, tuple[Call | None, Call]] = {
        "prequal": (plan, lambda: prequal.message_passing(x, made, edge_weight=weight)),
        "index_add": (None, lambda: torch.zeros_like(x).index_add(0, target, messages())),
        "scatter_reduce": (None, by_scatter_reduce),
        "torch.sparse CSR": (csr, lambda: matrix @ x),
    }
    if importlib.util.find_spec("torch_geometric"):
        from torch_geometric.utils import segment

        found["torch_geometric"] = (in_order, lambda: segment(x[sources] * weights[:, None], starts, "sum"))
    return found


def uses(plan: float, other: float, own_call: float, other_call: float) -> int | None:
    """After how many uses a plan has paid for itself; None: never."""
    if other_call <= own_call:
        return None
    return max(math.ceil((plan - other) / (other_call - own_call)), 1)


def compare(graph: tuple[int, int, int, Any], rounds: int, runs: int, device: Any) -> dict[str, Any]:
    nodes, degree, width, how = graph
    on = device.torch_device
    generator = torch.Generator(on).manual_seed(nodes)
    x = torch.randn(nodes, width, device=on, generator=generator)
    weight = torch.rand(nodes * degree, device=on, generator=generator)
    edge_index = how(on, nodes, nodes * degree)
    all_ways = ways(x, edge_index, weight)
    want = prequal.message_passing(x.double(), prequal.GraphPlan(edge_index, nodes), edge_weight=weight.double())
    for name, (_, call) in all_ways.items():
        # float32 sums of up to some 10,000 messages at the hub of a power law: 2^-24 of 100, 100 times
        torch.testing.assert_close(
            call().double(), want, rtol=1e-4, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )

    calls = {name: call for name, (_, call) in all_ways.items()}
    calls |= {f"{name}, preparation": make for name, (make, _) in all_ways.items() if make is not None}
    calls["prequal, plan and call"] = lambda: prequal.message_passing(
        x, prequal.GraphPlan(edge_index, nodes), edge_weight=weight
    )
    times = in_turns(device, calls, rounds, math.ceil(runs / rounds))
    wall = {name: row["wall_us"]["median"] for name, row in times.items()}
    plan, own = wall["prequal, preparation"], wall["prequal"]
    paid = {
        name: uses(plan, wall.get(f"{name}, preparation", 0.0), own, wall[name])
        for name in all_ways
        if name != "prequal"
    }
    named = {"nodes": nodes, "edges": nodes * degree, "width": width, "graph": how.__name__}
    return {**named, "answers": who_answers(calls["prequal"]), "times": times, "paid_after_uses": paid}


def table(line: dict[str, Any]) -> str:
    head = f"{line['graph']}, {line['nodes']} nodes, {line['edges']} edges, float32 {line['width']} wide"
    rows = [f"  {'':28} {'wall us':>10} {'device us':>10}  paid after"]
    for name, row in line["times"].items():
        after = line["paid_after_uses"].get(name, "") if name in line["paid_after_uses"] else ""
        told = f"{'never' if after is None else after}"
        wall, on_device = row["wall_us"]["median"], row["device_us"]["median"]
        rows.append(f"  {name:28} {wall:10.1f} {on_device:10.1f}  {told}".rstrip())
    return "\n".join([head, *rows])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two small graphs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--runs", type=int, help="of each, in all")
    parser.add_argument("--json")
    add_device(parser)
    given = parser.parse_args(arguments)
    fill_numbers(parser, given, {"rounds": (5, 1), "runs": (30, 3)})
    device = device_named(given.device)
    lines = []
    for graph in QUICK if given.quick else GRAPHS:
        lines.append(compare(graph, given.rounds, given.runs, device))
        print(table(lines[-1]), flush=True)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"device": device.name, "cases": lines}, file)


if __name__ == "__main__":
    main()
