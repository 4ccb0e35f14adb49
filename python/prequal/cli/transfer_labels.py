"""`prequal transfer-labels`: label a sample of a mesh, carry the labels to every vertex with `knn_gather`.

The everyday use of nearest-neighbour transfer in one command: a segmenter runs on 8,000 points, the mesh has 36,000
vertices. Results go to stdout, progress and errors to stderr. Exit code 0: done; 1: the transfer or the writing
failed; 2: the command line cannot be carried out; 130: interrupted. Only 0 leaves output files.
"""

# NumPy, torch and Pillow are imported where they are used: this module is imported to print `prequal --help`.
from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ._progress import InputError, note

if TYPE_CHECKING:
    from ._mesh import Array, Mesh

PROG = "prequal transfer-labels"
HELP = "label a sample of a mesh's vertices and transfer the labels to all of them"
DEFAULT_POINTS = 8000
DEFAULT_CLUSTERS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("mesh", metavar="MESH", help="mesh file (.ply, .obj, .stl, .off, .glb, ...), [N, 3] .npy cloud, or demo:knot")
    add("--out", required=True, metavar="FILE.ply", help="coloured mesh to write, with a `label` for every vertex")
    add("--view", metavar="FILE.png", help="picture to write, from the front and from three-quarters")
    add("--up", choices=("x", "y", "z"), default="y", help="axis that points up in the picture (default: %(default)s)")
    add(
        "--points",
        type=int,
        metavar="M",
        help=f"vertices in the labelled sample (default: {DEFAULT_POINTS}, or a quarter of the vertices if fewer)",
    )
    add("--sample", choices=("farthest", "random"), default="farthest", help="how it is chosen (default: %(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--labels",
        metavar="FILE.npy",
        help="the true label of every vertex, an integer [N] array: the sample takes its labels from here and the "
        "transfer is compared with it",
    )
    source.add_argument(
        "--clusters",
        type=int,
        metavar="K",
        help=f"without --labels: k-means clusters of the sample's positions and normals (default: {DEFAULT_CLUSTERS})",
    )
    add("--seed", type=int, default=0, help="of the sampling and the clustering (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        result = _transfer_labels(args)
    except InputError as error:
        return _fail(2, str(error))
    except KeyboardInterrupt:
        return _fail(130, "interrupted; nothing was written")
    except (RuntimeError, OSError, MemoryError) as error:
        # A failing device or a full disk. What is left, such as a TypeError, is a bug here and shows its traceback.
        return _fail(1, f"{type(error).__name__}: {error}; nothing was written")
    _tell(json.dumps(result, indent=2) if args.json else _as_text(result))
    return 0


def _tell(text: str) -> None:
    try:
        print(text)
    except UnicodeEncodeError:  # a file's name in letters that stdout has not, or in no encoding; the files are there
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "backslashreplace").decode(encoding))


def _fail(code: int, message: str) -> int:
    note(f"{PROG}: error: {message}")
    return code


def _transfer_labels(args: argparse.Namespace) -> dict[str, Any]:
    try:
        from . import _mesh
    except ImportError as error:
        raise InputError("MESH", "NumPy to read it with", f"{error}: pip install 'prequal[mesh]'") from None

    started = time.perf_counter()
    # All that can be refused is refused before the work, cheapest first.
    out, view = _check_outputs(args)
    if args.seed < 0:
        raise InputError("--seed", "an integer from 0", str(args.seed))
    device = _pick_device(args.device)
    mesh = _mesh.load_mesh(args.mesh)
    points = _check_points(args.points, mesh)
    truth = None if args.labels is None else _load_labels(args.labels, mesh)
    clusters = _check_clusters(args.clusters, points)

    choose = _mesh.sample_farthest if args.sample == "farthest" else _mesh.sample_random
    sample = choose(mesh, points, args.seed)
    if truth is not None:
        sample_labels = truth[sample]
    else:
        sample_labels = _mesh.kmeans(_mesh.cluster_features(mesh, sample), clusters, args.seed)
    labels, transfer = _transfer(mesh, sample, sample_labels, device)
    agreement = None if truth is None else _agreement(mesh, sample, labels, truth)

    result: dict[str, Any] = {
        "mesh": args.mesh,
        "vertices": len(mesh.vertices),
        "faces": len(mesh.faces),
        "vertices_not_finite": int((~mesh.finite).sum()),
        "points": points,
        "sample": args.sample,
        "seed": args.seed,
        "labels_from": args.labels or ("k-means on position" + (" and normal" if mesh.normals is not None else "")),
        "labels": len(set(sample_labels.tolist())),
        "transfer": transfer.as_dict(),
        "agreement": agreement,
        "out": args.out,
        "view": args.view,
    }
    outputs: list[tuple[Path, Callable[[BinaryIO], None]]] = [(out, partial(_mesh.write_ply, mesh=mesh, labels=labels))]
    if view is not None:
        from . import _render

        title, subtitle = _captions(mesh, result)
        draw = partial(_render.write_picture, mesh=mesh, labels=labels, up=args.up, title=title, subtitle=subtitle)
        outputs.append((view, draw))
    _mesh.write_files(outputs)
    result["seconds_in_all"] = round(time.perf_counter() - started, 3)
    return result


# Checking the command line -------------------------------------------------------------------------------------------


def _check_outputs(args: argparse.Namespace) -> tuple[Path, Path | None]:
    from ._mesh import INSTALL_HINT, check_writable

    out = check_writable(args.out, "--out", ".ply")
    if out.exists() and out == Path(args.mesh).resolve():
        raise InputError("--out", "a file other than MESH", repr(args.out))
    if args.view is None:
        return out, None
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise InputError("--view", "Pillow to draw with", f"no Pillow here: {INSTALL_HINT}") from None
    return out, check_writable(args.view, "--view", ".png")


def _pick_device(name: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("--device", "auto or cpu where PyTorch finds no CUDA device", "cuda")
    if name == "cpu" or not available:
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def _check_points(points: int | None, mesh: Mesh) -> int:
    usable = int(mesh.finite.sum())
    if points is None:
        return max(1, min(DEFAULT_POINTS, usable // 4))
    if not 1 <= points <= usable:
        raise InputError("--points", f"an integer from 1 to {usable}, the finite vertices of {mesh.name}", str(points))
    return points


def _check_clusters(clusters: int | None, points: int) -> int:
    if clusters is None:
        return min(DEFAULT_CLUSTERS, points)
    if not 1 <= clusters <= points:
        raise InputError("--clusters", f"an integer from 1 to {points}, the number of points", str(clusters))
    return clusters


def _load_labels(source: str, mesh: Mesh) -> Array:
    from ._mesh import load_array

    count = len(mesh.vertices)
    expected = f"a .npy integer array [{count}], one label from 0 to 2147483647 a vertex of {mesh.name}"
    labels = load_array(Path(source), "--labels", expected)
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise InputError("--labels", expected, f"shape {list(labels.shape)}, dtype {labels.dtype}")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest > 2**31 - 1:
        raise InputError("--labels", expected, f"labels from {lowest} to {highest}")
    return labels.astype("int32")


# The transfer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    device: str
    seconds: float  # of the call whose labels are written
    first_seconds: float | None  # of the warm-up call before it, if there was one
    path: str  # "fast", "reference", "mixed", or "not counted"
    reasons: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "path": self.path,
            "reasons": self.reasons,
            "seconds": round(self.seconds, 6),
            "warm": self.first_seconds is not None,
            "first_call_seconds": None if self.first_seconds is None else round(self.first_seconds, 6),
        }


def _transfer(mesh: Mesh, sample: Array, sample_labels: Array, device: str) -> tuple[Array, Transfer]:
    """Labels [N] int32 for all vertices, -1 for one that is not finite."""
    import numpy as np
    import torch

    import prequal

    # All vertices are asked about: one that is not finite has no neighbour, for which knn_gather gives -1.
    queries = torch.from_numpy(mesh.unit_vertices).to(device)
    references = torch.from_numpy(mesh.unit_vertices[sample]).to(device)
    values = torch.from_numpy(np.ascontiguousarray(sample_labels)).to(device)

    def timed() -> tuple[torch.Tensor, float]:
        _synchronize(device)
        start = time.perf_counter()
        result = prequal.knn_gather(queries, references, values)
        _synchronize(device)
        return result, time.perf_counter() - start

    # On a GPU the first call also loads the kernel and may qualify it. The CPU has no such start worth repeating
    # seconds of work for.
    first = timed()[1] if device != "cpu" else None
    before = _counts(prequal.stats())
    found, seconds = timed()
    path, reasons = _path_taken(_counts(prequal.stats()) - before)

    labels: Array = found.cpu().numpy()
    return labels, Transfer(device, seconds, first, path, reasons)


def _synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def _counts(stats: Mapping[str, Any]) -> Counter[str]:
    """Calls of knn_gather so far: under "" the fast ones, else by the reference's reason."""
    counts: Counter[str] = Counter()
    for paths in stats.get("knn_gather", {}).values():
        counts[""] += paths.get("fast", 0)
        counts.update(paths.get("reference", {}))
    return counts


def _path_taken(calls: Counter[str]) -> tuple[str, dict[str, int]]:
    reasons = {reason: count for reason, count in sorted(calls.items()) if reason and count}
    fast = calls[""] > 0
    path = {(True, False): "fast", (False, True): "reference", (True, True): "mixed"}.get((fast, bool(reasons)))
    return path or "not counted", reasons


def _agreement(mesh: Mesh, sample: Array, labels: Array, truth: Array) -> dict[str, int]:
    same = (labels == truth) & mesh.finite
    others = mesh.finite.copy()
    others[sample] = False  # these were given the truth, and tell nothing about the transfer
    return {
        "agree": int(same.sum()),
        "of": int(mesh.finite.sum()),
        "agree_unsampled": int((same & others).sum()),
        "of_unsampled": int(others.sum()),
    }


# Telling -------------------------------------------------------------------------------------------------------------


def _path_text(transfer: Mapping[str, Any]) -> str:
    reasons = ", ".join(transfer["reasons"])
    return f"{transfer['path']} ({reasons})" if reasons else str(transfer["path"])


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} % ({part:,} of {whole:,})" if whole else "none to compare"


def _as_text(result: Mapping[str, Any]) -> str:
    transfer, agreement = result["transfer"], result["agreement"]
    lines = [f"mesh       {result['mesh']}: {result['vertices']:,} vertices, {result['faces']:,} faces"]
    if not result["faces"]:
        lines[0] += " (a point cloud)"
    if result["vertices_not_finite"]:
        lines.append(f"           {result['vertices_not_finite']:,} vertices are not finite: label -1, never sampled")
    lines.append(f"sample     {result['points']:,} points, {result['sample']}, seed {result['seed']}")
    lines.append(f"labels     {result['labels']:,} in the sample, from {result['labels_from']}")
    timing = _seconds_text(transfer["seconds"])
    if transfer["warm"]:
        timing += f", one warm call (the first call took {_seconds_text(transfer['first_call_seconds'])})"
    else:
        timing += ", one call, not warmed up"
    lines.append(f"transfer   {timing}, on {transfer['device']}")
    lines.append(f"path       {_path_text(transfer)}")
    if agreement is None:
        lines.append("agreement  nothing to compare with (give --labels)")
    else:
        lines.append(f"agreement  {_percent(agreement['agree'], agreement['of'])} of all vertices")
        unsampled = _percent(agreement["agree_unsampled"], agreement["of_unsampled"])
        lines.append(f"           {unsampled} of those outside the sample")
    lines += [f"wrote      {path}" for path in (result["out"], result["view"]) if path]
    return "\n".join(lines)


def _captions(mesh: Mesh, result: Mapping[str, Any]) -> tuple[str, str]:
    name = mesh.name if len(mesh.name) <= 48 else mesh.name[:45] + "..."
    title = f"{name}: {result['points']:,} labelled points to {result['vertices']:,} vertices"
    transfer = result["transfer"]
    parts = [f"knn_gather on {transfer['device']}, path {_path_text(transfer)}, {_seconds_text(transfer['seconds'])}"]
    if result["agreement"] is not None:
        agreement = result["agreement"]
        parts.append(f"agreement {_percent(agreement['agree'], agreement['of'])}")
    return title, "; ".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=HELP)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
