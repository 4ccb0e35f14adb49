"""Meshes for the command line: reading, sampling, clustering, writing.

NumPy only, apart from the formats that trimesh reads. One rule runs through the file: vertex i of the file stays
vertex i, since a label array and the written mesh are both indexed by it. Nothing merges, splits or reorders.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ._progress import InputError, Progress

Array = npt.NDArray[Any]

INSTALL_HINT = "pip install 'prequal[mesh]'"
GREY = (150, 150, 150)  # a vertex without a label


@dataclass
class Mesh:
    name: str
    vertices: Array  # [N, 3] float64, non-finite rows kept
    faces: Array  # [F, 3] int32, empty for a point cloud

    @cached_property
    def finite(self) -> Array:
        """[N] bool: the vertices that have a place in space."""
        finite: Array = np.all(np.isfinite(self.vertices), axis=1)
        return finite

    @cached_property
    def drawable_faces(self) -> Array:
        """[G, 3] int32: the faces whose three vertices are finite."""
        return self.faces[self.finite[self.faces].all(axis=1)]

    @cached_property
    def unit_vertices(self) -> Array:
        """[N, 3] float32 for distance work, in an order of nearness that float32 can hold.

        Coordinates of ordinary size pass unchanged. A scan in map coordinates (a small thing far from the origin)
        is moved to its own centre first, and one measured in units where a squared distance would overflow or
        vanish is scaled by a power of two, which is exact.
        """
        points = self.vertices
        placed = points[self.finite]
        low, high = placed.min(axis=0), placed.max(axis=0)
        reach = float(np.max(high / 2 - low / 2)) * 2
        if not float(np.abs(placed).max()) <= 64 * reach:
            points = points - (low / 2 + high / 2)
        if reach > 0 and not 2.0**-20 <= reach <= 2.0**20:
            # Two steps, since 2**exponent itself may lie outside float64 for the smallest extents.
            exponent = -math.frexp(reach)[1] if math.isfinite(reach) else -1024
            points = np.ldexp(np.ldexp(points, exponent // 2), exponent - exponent // 2)
        return points.astype(np.float32)

    @cached_property
    def normals(self) -> Array | None:
        """[N, 3] float32 area-weighted unit normals (zero where a vertex has no face), None for a point cloud."""
        faces = self.drawable_faces
        if len(faces) == 0:
            return None
        points = self.unit_vertices.astype(np.float64)
        a, b, c = (points[faces[:, corner]] for corner in range(3))
        weighted = np.cross(b - a, c - a)
        total = np.zeros((len(points), 3))
        for axis in range(3):
            share = weighted[:, axis]
            for corner in range(3):
                total[:, axis] += np.bincount(faces[:, corner], weights=share, minlength=len(points))
        length = np.linalg.norm(total, axis=1, keepdims=True)
        unit: Array = np.divide(total, length, out=np.zeros_like(total), where=length > 0).astype(np.float32)
        return unit


# Reading -----------------------------------------------------------------------------------------------------------


def load_mesh(source: str) -> Mesh:
    """A mesh file, a `.npy` point cloud, or `demo:<name>`. Raises InputError for whatever is not one of these."""
    if source.startswith("demo:"):
        if source not in DEMOS:
            raise InputError("MESH", f"a mesh file or one of {', '.join(DEMOS)}", repr(source))
        vertices, faces = DEMOS[source]()
        return Mesh(source, vertices, faces)

    path = Path(source)
    check_readable(path, "MESH", "a mesh file (.ply, .obj, .stl, .off, .glb, ...) or an [N, 3] .npy point cloud")
    suffix = path.suffix.lower()
    if suffix == ".npy":
        vertices, faces = _points_from_npy(path), np.empty((0, 3), np.int32)
    elif suffix == ".obj":
        vertices, faces = _read_obj(path)
    else:
        vertices, faces = _read_with_trimesh(path)

    if len(vertices) == 0:
        raise InputError("MESH", "a mesh with at least one vertex", f"{path.name!r} with none (empty, or not a mesh)")
    if len(faces) and (faces.min() < 0 or faces.max() >= len(vertices)):
        wrong = int(faces.min() if faces.min() < 0 else faces.max())
        raise InputError(
            "MESH", f"faces that index the {len(vertices)} vertices", f"vertex index {wrong} in {path.name!r}"
        )
    mesh = Mesh(path.name, vertices, faces.astype(np.int32))
    if not mesh.finite.any():
        raise InputError("MESH", "at least one vertex with finite coordinates", f"none among {len(vertices)}")
    return mesh


def check_readable(path: Path, argument: str, expected: str) -> None:
    try:
        if path.is_dir():
            raise InputError(argument, expected, f"the folder {str(path)!r}")
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise InputError(argument, expected, f"{str(path)!r}, which is no regular file")
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(argument, expected, f"{str(path)!r} ({error.strerror})") from None


def load_array(path: Path, argument: str, expected: str) -> Array:
    """One plain array from a .npy file. Never unpickles: a label file may come from anywhere."""
    check_readable(path, argument, expected)
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # a damaged header raises anything from EOFError to tokenize's own error
        # NumPy takes whatever lacks its magic bytes for a pickle, and tells how to load that unsafely.
        why = "pickled objects, or not a .npy file" if "pickle" in str(error) else _one_line(error)
        raise InputError(argument, expected, f"{str(path)!r}, which NumPy refuses: {why}") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(argument, expected, f"{str(path)!r}, an .npz archive")
    return array


def _points_from_npy(path: Path) -> Array:
    expected = "a .npy array [N, 3] of real numbers"
    array = load_array(path, "MESH", expected)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "fiu":
        raise InputError("MESH", expected, f"shape {list(array.shape)}, dtype {array.dtype} in {path.name!r}")
    return array.astype(np.float64)


def _read_obj(path: Path) -> tuple[Array, Array]:
    """Positions and triangles of an OBJ file, in the file's own order.

    trimesh duplicates and regroups the vertices of an OBJ file that carries texture coordinates, materials or
    groups, which would put a label array indexed by the file out of step; so this format is read here.
    """
    positions: list[tuple[float, float, float]] = []
    triangles: list[tuple[int, int, int]] = []
    number = 0
    try:
        # latin-1 decodes any byte: names and comments in the file may be in any encoding and are not looked at.
        with path.open(encoding="latin-1") as lines:
            for line in lines:
                number += 1
                if number == 1:
                    line = line.removeprefix("\xef\xbb\xbf")  # UTF-8's mark, which some editors put first
                while line.endswith("\\\n"):
                    line = line[:-2] + " " + next(lines, "")
                    number += 1
                kind, *words = line.split() or [""]
                if kind == "v":
                    x, y, z = words[:3]  # a weight or a colour may follow
                    positions.append((float(x), float(y), float(z)))
                elif kind == "f":
                    corners = [int(word.partition("/")[0]) for word in words]
                    # One-based, or counted back from the latest vertex when negative.
                    corners = [i - 1 if i > 0 else len(positions) + i if i < 0 else -1 for i in corners]
                    if len(corners) < 3:
                        raise ValueError(f"a face of {len(corners)} vertices")
                    triangles += [(corners[0], b, c) for b, c in pairwise(corners[1:])]
        return np.array(positions, np.float64).reshape(-1, 3), np.array(triangles, np.int64).reshape(-1, 3)
    except (ValueError, OverflowError) as error:
        reason = f"{path.name!r}, line {number}: {_one_line(error)}"
        raise InputError("MESH", "an OBJ mesh file", reason) from None


def _read_with_trimesh(path: Path) -> tuple[Array, Array]:
    try:
        import trimesh
    except ImportError:
        raise InputError(
            "MESH", f"trimesh to read {path.suffix or 'this'} files", f"no trimesh here: {INSTALL_HINT}"
        ) from None
    if path.suffix.lower() == ".ply":
        _check_ply_is_whole(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about textures and materials, which are not used
            loaded = trimesh.load(str(path), process=False, maintain_order=True, skip_materials=True, fix_texture=False)
            return _flatten(loaded)
    except (KeyboardInterrupt, InputError):
        raise
    except ImportError as error:
        if error.name == "charset_normalizer":  # to guess the encoding of bytes that are not UTF-8
            reason = f"{path.name!r}, which is neither binary {path.suffix} nor text"
        else:
            reason = f"{path.name!r}, for which trimesh wants a further package: {_one_line(error)}"
    except Exception as error:  # third-party parsers on arbitrary bytes: any exception means "not such a file"
        reason = f"{path.name!r}, which trimesh refuses: {_one_line(error)}"
    raise InputError("MESH", "a mesh file that trimesh reads", reason)


def _check_ply_is_whole(path: Path) -> None:
    """Of a text file that was cut off, trimesh takes the vertices and faces that are left, without a word."""
    with path.open("rb") as stream:
        if stream.readline().strip() != b"ply":
            return
        text, elements = False, 0
        for line in stream:
            words = line.split()
            if words == [b"end_header"]:
                break
            text |= words[:2] == [b"format", b"ascii"]
            if len(words) == 3 and words[0] == b"element" and words[2].isdigit():
                elements += int(words[2])
        lines = sum(1 for line in stream if line.strip()) if text else elements
    if lines < elements:
        raise InputError("MESH", f"in {path.name!r} a line for each of its header's {elements} elements", str(lines))


def _flatten(loaded: Any) -> tuple[Array, Array]:
    """One vertex and face array from a trimesh Trimesh, PointCloud or Scene; scene parts in the scene's order."""
    if hasattr(loaded, "geometry") and hasattr(loaded, "graph"):
        placed = [loaded.graph[node] for node in loaded.graph.nodes_geometry]
        parts = [(loaded.geometry[name], np.asarray(matrix, np.float64)) for matrix, name in placed]
    else:
        parts = [(loaded, np.eye(4))]

    vertices: list[Array] = []
    faces: list[Array] = []
    count = 0
    for part, matrix in parts:
        points = np.asarray(part.vertices, np.float64)
        if points.size == 0:
            points = points.reshape(0, 3)
        if points.ndim != 2 or points.shape[1] != 3 or hasattr(part, "entities"):
            raise ValueError("it holds a drawing, not a mesh")
        triangles = np.asarray(getattr(part, "faces", ()), np.int64).reshape(-1, 3)
        if np.linalg.det(matrix[:3, :3]) < 0:
            triangles = triangles[:, ::-1]  # a mirrored part would otherwise be inside out
        if not np.array_equal(matrix, np.eye(4)):
            points = points @ matrix[:3, :3].T + matrix[:3, 3]
        vertices.append(points)
        faces.append(triangles + count)
        count += len(points)
    if not parts:
        return np.empty((0, 3)), np.empty((0, 3), np.int64)
    return np.concatenate(vertices), np.concatenate(faces)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 120 else text[:117] + "..."


def _demo_knot(along: int = 320, around: int = 20) -> tuple[Array, Array]:
    """A trefoil knot of 6,400 vertices, its tube modelled with a travelling ripple."""
    t = np.linspace(0, 2 * np.pi, along, endpoint=False)[:, None]
    u = np.linspace(0, 2 * np.pi, around, endpoint=False)[None, :]

    def curve(s: Array) -> Array:
        return np.stack([np.sin(s) + 2 * np.sin(2 * s), np.cos(s) - 2 * np.cos(2 * s), -1.2 * np.sin(3 * s)], axis=-1)

    step = 1e-3
    here, ahead, behind = curve(t), curve(t + step), curve(t - step)
    tangent = _unit(ahead - behind)
    bend = ahead - 2 * here + behind
    normal = _unit(bend - tangent * (bend * tangent).sum(axis=-1, keepdims=True))
    binormal = np.cross(tangent, normal)
    radius = 0.46 * (1 + 0.15 * np.cos(3 * u - 6 * t) + 0.07 * np.cos(18 * t))
    vertices = here + radius[..., None] * (np.cos(u)[..., None] * normal + np.sin(u)[..., None] * binormal)

    i = np.arange(along)[:, None]
    j = np.arange(around)[None, :]
    i1, j1 = (i + 1) % along, (j + 1) % around
    a, b, c, d = (p * around + q for p, q in ((i, j), (i1, j), (i1, j1), (i, j1)))
    faces = np.stack([a, c, b, a, d, c], axis=-1).reshape(-1, 3)
    return vertices.reshape(-1, 3), faces.astype(np.int32)


def _unit(vectors: Array) -> Array:
    unit: Array = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return unit


DEMOS: dict[str, Callable[[], tuple[Array, Array]]] = {"demo:knot": _demo_knot}


# Choosing and labelling the sample -----------------------------------------------------------------------------------


def sample_random(mesh: Mesh, count: int, seed: int) -> Array:
    """[count] vertex indices, ascending, so that "lowest reference" and "lowest vertex" are the same tie rule."""
    choice = np.random.default_rng(seed).choice(np.flatnonzero(mesh.finite), count, replace=False)
    return np.sort(choice)


def sample_farthest(mesh: Mesh, count: int, seed: int) -> Array:
    """[count] vertex indices, ascending: each one chosen farthest from all chosen before it, the first by seed.

    Exact, one pass over the vertices a chosen point. The passes work in place on separate x, y, z arrays, which
    stay in cache: 8,000 of 36,000 vertices in about 0.3 s on one core, where the obvious [N, 3] expression
    takes several times that. Equal distances go to the lowest index.
    """
    candidates = np.flatnonzero(mesh.finite)
    x, y, z = np.ascontiguousarray(mesh.unit_vertices[candidates].T)
    nearest = np.full(len(candidates), np.inf, np.float32)
    distance, scratch = np.empty_like(nearest), np.empty_like(nearest)
    chosen = np.empty(count, np.int64)
    current = int(np.random.default_rng(seed).integers(len(candidates)))
    with Progress("farthest-point sampling", count) as progress:
        for k in range(count):
            chosen[k] = current
            np.subtract(x, x[current], out=distance)
            np.multiply(distance, distance, out=distance)
            for axis in (y, z):
                np.subtract(axis, axis[current], out=scratch)
                np.multiply(scratch, scratch, out=scratch)
                np.add(distance, scratch, out=distance)
            np.minimum(nearest, distance, out=nearest)
            nearest[current] = -1  # below any distance: a duplicate vertex may be chosen, the same vertex may not
            current = int(nearest.argmax())
            if k % 64 == 0:
                progress.update(k)
    return np.sort(candidates[chosen])


def kmeans(features: Array, clusters: int, seed: int, rounds: int = 60) -> Array:
    """[M] int32 cluster of each row of features [M, D]; cluster 0 is the largest.

    k-means++ seeding and Lloyd rounds, with plain sums in a fixed order in place of matrix products, whose rounding
    depends on the machine's thread count: the same seed gives the same clusters everywhere. With fewer distinct rows
    than clusters, the surplus clusters stay empty.
    """
    features = features.astype(np.float64)
    rng = np.random.default_rng(seed)
    centres = features[[int(rng.integers(len(features)))]]
    nearest = _square_distance(features, centres)[:, 0]
    with Progress("k-means", clusters + rounds) as progress:
        for k in range(1, clusters):
            total = nearest.sum()
            if total == 0:
                break
            pick = int(np.searchsorted(np.cumsum(nearest), rng.random() * total, side="right"))
            pick = min(pick, int(np.flatnonzero(nearest)[-1]))
            centres = np.concatenate([centres, features[[pick]]])
            nearest = np.minimum(nearest, _square_distance(features, centres[-1:])[:, 0])
            progress.update(k)

        labels = np.full(len(features), -1, np.int64)
        rows = max(1, 2_000_000 // len(centres))  # bounds the distance block to 16 MB
        for k in range(rounds):
            before = labels
            blocks = [features[i : i + rows] for i in range(0, len(features), rows)]
            labels = np.concatenate([_square_distance(block, centres).argmin(axis=1) for block in blocks])
            if np.array_equal(labels, before):
                break
            size = np.bincount(labels, minlength=len(centres))
            for axis in range(features.shape[1]):
                total_of = np.bincount(labels, weights=features[:, axis], minlength=len(centres))
                np.divide(total_of, size, out=centres[:, axis], where=size > 0)
            progress.update(clusters + k)

    by_size = np.argsort(-np.bincount(labels, minlength=len(centres)), kind="stable")
    rank = np.empty(len(centres), np.int32)
    rank[by_size] = np.arange(len(centres), dtype=np.int32)
    return rank[labels]


def _square_distance(rows: Array, centres: Array) -> Array:
    total = np.zeros((len(rows), len(centres)))
    for axis in range(rows.shape[1]):
        total += (rows[:, axis, None] - centres[None, :, axis]) ** 2
    return total


def cluster_features(mesh: Mesh, sample: Array) -> Array:
    """[M, 6] position and normal of the sampled vertices, or [M, 3] position alone for a point cloud.

    The position is in units of the sample's own spread; a normal counts half as much, enough to part an ear's back
    from its front without breaking up the body. A point cloud's normals could only be guessed, without their sign,
    so none are used.
    """
    points = mesh.unit_vertices[sample].astype(np.float64)
    points -= points.mean(axis=0)
    spread = math.sqrt(float((points**2).sum(axis=1).mean()))
    if spread > 0:
        points /= spread
    if mesh.normals is None:
        return points
    return np.concatenate([points, 0.5 * mesh.normals[sample]], axis=1)


# Colours and writing -------------------------------------------------------------------------------------------------


def label_colours(labels: Array) -> Array:
    """[..., 3] uint8: a colour for each label, the same for the same label everywhere; grey for -1.

    Hues a golden angle apart in OKLCH, so that any run of labels is spread round the circle at even perceived
    lightness, which then alternates to part neighbours in hue.
    """
    values, inverse = np.unique(labels, return_inverse=True)
    hue = np.deg2rad((values * 137.50776 + 25) % 360)
    lightness = np.array([0.70, 0.62, 0.78])[values % 3]
    a, b = 0.135 * np.cos(hue), 0.135 * np.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = np.stack(
        [
            4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
        ],
        axis=-1,
    ).clip(0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    table = np.rint(255 * encoded).astype(np.uint8)
    table[values < 0] = GREY
    colours: Array = table[inverse.reshape(np.shape(labels))]
    return colours


def write_ply(stream: BinaryIO, mesh: Mesh, labels: Array) -> None:
    """Binary PLY: position, colour and an integer `label` a vertex; then the triangles, unchanged."""
    placed = mesh.vertices[mesh.finite]
    with np.errstate(over="ignore"):
        error = float(np.abs(placed.astype(np.float32) - placed).max())
        extent = float(np.ptp(placed, axis=0).max())
    # float where that loses nothing to speak of, as every viewer expects; double for map coordinates.
    narrow = math.isfinite(error) and error <= 1e-6 * extent
    kind, code = ("float", "<f4") if narrow else ("double", "<f8")

    rows = np.empty(
        len(mesh.vertices),
        [("xyz", code, 3), ("rgb", "u1", 3), ("label", "<i4")],
    )
    rows["xyz"] = mesh.vertices
    rows["rgb"] = label_colours(labels)
    rows["label"] = labels
    header = [
        "ply",
        "format binary_little_endian 1.0",
        "comment written by prequal transfer-labels; label -1: no label (vertex not finite)",
        f"element vertex {len(rows)}",
        *(f"property {kind} {axis}" for axis in "xyz"),
        *(f"property uchar {channel}" for channel in ("red", "green", "blue")),
        "property int label",
    ]
    if len(mesh.faces):
        header += [f"element face {len(mesh.faces)}", "property list uchar int vertex_indices"]
    stream.write("\n".join([*header, "end_header", ""]).encode("ascii"))
    stream.write(rows.tobytes())
    if len(mesh.faces):
        triangles = np.empty(len(mesh.faces), [("count", "u1"), ("corner", "<i4", 3)])
        triangles["count"] = 3
        triangles["corner"] = mesh.faces
        stream.write(triangles.tobytes())


def check_writable(target: str, argument: str, suffix: str) -> Path:
    """The real path behind target, once a file has been seen to be creatable there. Leaves nothing behind."""
    expected = f"a {suffix} file in a folder that can be written"
    path = Path(os.path.realpath(target))  # through a symbolic link: the link stays, its target is replaced
    try:
        if path.exists() and not path.is_file():
            raise InputError(argument, expected, f"{target!r} (a folder, or another thing that is not a file)")
        if path.suffix.lower() != suffix:
            raise InputError(argument, expected, f"{target!r} (extension {path.suffix or 'missing'})")
        if not path.parent.is_dir():
            raise InputError(argument, expected, f"{target!r} (no such folder: {str(path.parent)!r})")
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(argument, expected, f"{target!r} (exists and is read-only)")
        with _part_file(path) as (part, _):
            part.unlink()
    except OSError as error:
        raise InputError(argument, expected, f"{target!r} ({error.strerror})") from None
    return path


def write_files(outputs: Sequence[tuple[Path, Callable[[BinaryIO], None]]]) -> None:
    """Write every output beside its target and move all into place once all are whole, or leave none."""
    with contextlib.ExitStack() as stack:
        parts = []
        for path, write in outputs:
            part, stream = stack.enter_context(_part_file(path))
            write(stream)
            stream.close()
            parts.append((part, path))
        for part, path in parts:
            os.replace(part, path)


@contextlib.contextmanager
def _part_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    # In the target's folder, since only a move within one file system is atomic. Opened by name and not through
    # tempfile, whose files are private to the user whatever the umask says.
    part = path.parent / f".prequal-{secrets.token_hex(8)}.part"
    try:
        with part.open("xb") as stream:
            yield part, stream
    finally:
        part.unlink(missing_ok=True)
