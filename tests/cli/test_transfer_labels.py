"""`prequal transfer-labels`: right labels, whole files or none, and an error that helps for every bad input."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prequal
from prequal.cli import _mesh, transfer_labels

trimesh = pytest.importorskip("trimesh", reason="the mesh extra is not installed")
spatial = pytest.importorskip("scipy.spatial", reason="SciPy is the oracle of these tests")
Image = pytest.importorskip("PIL.Image", reason="the mesh extra is not installed")

DATA = Path(os.environ.get("PREQUAL_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def data_file(name: str) -> Path:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {DATA.name}/ beside the checkout, nor in PREQUAL_TEST_DATA")
    return path


def command(*words: object) -> int:
    """The exit code of the command line, on the CPU; argparse's own refusals included."""
    parser = argparse.ArgumentParser()
    transfer_labels.add_arguments(parser)
    try:
        return transfer_labels.run(parser.parse_args([*map(str, words), "--device", "cpu"]))
    except SystemExit as end:
        return int(end.code or 0)


def read_labels(path: Path) -> np.ndarray:
    raw = trimesh.load(path, process=False).metadata["_ply_raw"]
    return np.asarray(raw["vertex"]["data"]["label"]).reshape(-1)


def assert_nearest(vertices: np.ndarray, found: np.ndarray) -> None:
    """found[i] is the vertex whose label vertex i was given, each vertex being its own label."""
    sample = np.unique(found)
    np.testing.assert_array_equal(found[sample], sample)
    points = vertices.astype(np.float32).astype(np.float64)
    distance, nearest = spatial.cKDTree(points[sample]).query(points, k=2)
    given = np.linalg.norm(points - points[found], axis=1)
    np.testing.assert_allclose(given, distance[:, 0], rtol=1e-5, atol=0)
    clear = distance[:, 1] > distance[:, 0] * (1 + 1e-5)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(found[clear], sample[nearest[clear, 0]])


@pytest.fixture
def cube(tmp_path: Path) -> Path:
    """98 vertices on a cube, as a PLY file."""
    box = trimesh.creation.box((1, 1, 1)).subdivide().subdivide()
    path = tmp_path / "cube.ply"
    box.export(path)
    return path


# Right answers -------------------------------------------------------------------------------------------------------


def own_labels(folder: Path, count: int) -> Path:
    path = folder / "own.npy"
    np.save(path, np.arange(count))
    return path


@pytest.mark.parametrize("sample", ["farthest", "random"])
def test_every_bunny_vertex_gets_the_label_of_its_nearest_sampled_vertex(sample: str, tmp_path: Path) -> None:
    source = data_file("stanford-bunny.obj")
    mesh = trimesh.load(source, process=False, maintain_order=True)
    labels = own_labels(tmp_path, 35947)
    out = tmp_path / "out.ply"
    assert command(source, "--points", 2000, "--sample", sample, "--labels", labels, "--out", out) == 0
    found = read_labels(out)
    assert len(np.unique(found)) == 2000
    assert_nearest(mesh.vertices, found)


def test_every_igea_point_gets_the_label_of_its_nearest_sampled_point(tmp_path: Path) -> None:
    source = data_file("igea_vertices.npy")
    vertices = np.load(source)
    out = tmp_path / "out.ply"
    assert command(source, "--points", 1500, "--labels", own_labels(tmp_path, len(vertices)), "--out", out) == 0
    assert_nearest(vertices, read_labels(out))


def test_of_equally_near_samples_the_lowest_vertex_index_gives_its_label(tmp_path: Path) -> None:
    lattice = np.stack(np.meshgrid(*[np.arange(9.0)] * 3), axis=-1).reshape(-1, 3)
    np.save(tmp_path / "lattice.npy", lattice)
    out = tmp_path / "out.ply"
    labels = own_labels(tmp_path, len(lattice))
    words = ("--points", 150, "--sample", "random", "--labels", labels, "--out", out)
    assert command(tmp_path / "lattice.npy", *words) == 0
    found = read_labels(out)
    sample = np.unique(found)
    distance = ((lattice[:, None] - lattice[None, sample]) ** 2).sum(axis=-1)
    assert ((distance == distance.min(axis=1, keepdims=True)).sum(axis=1) > 1).mean() > 0.3  # ties there are
    np.testing.assert_array_equal(found, sample[distance.argmin(axis=1)])


def test_the_written_bunny_has_the_same_vertices_and_faces_in_the_same_order(tmp_path: Path) -> None:
    source = data_file("stanford-bunny.obj")
    out = tmp_path / "out.ply"
    assert command(source, "--points", 500, "--out", out) == 0
    theirs = trimesh.load(source, process=False, maintain_order=True)
    ours = trimesh.load(out, process=False)
    assert ours.vertices.shape == (35947, 3)
    np.testing.assert_array_equal(ours.vertices, theirs.vertices.astype(np.float32))
    np.testing.assert_array_equal(ours.faces, theirs.faces)
    labels = read_labels(out)
    assert sorted(set(labels)) == list(range(8))
    np.testing.assert_array_equal(ours.visual.vertex_colors[:, :3], _mesh.label_colours(labels))
    assert len(np.unique(ours.visual.vertex_colors, axis=0)) == 8


def test_the_agreement_is_the_count_of_right_labels(cube: Path, tmp_path: Path, capsys: Any) -> None:
    truth = np.random.default_rng(3).integers(0, 3, 98).astype(np.uint16)
    np.save(tmp_path / "truth.npy", truth)
    out = tmp_path / "out.ply"
    assert command(cube, "--points", 40, "--labels", tmp_path / "truth.npy", "--out", out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    right = int((read_labels(out) == truth).sum())
    assert 40 <= right < 98
    assert result["agreement"] == {"agree": right, "of": 98, "agree_unsampled": right - 40, "of_unsampled": 58}


def test_a_sample_of_all_vertices_agrees_wholly(cube: Path, tmp_path: Path, capsys: Any) -> None:
    words = ("--points", 98, "--labels", own_labels(tmp_path, 98), "--out", tmp_path / "out.ply")
    assert command(cube, *words) == 0
    text = capsys.readouterr().out
    assert "100.00 % (98 of 98) of all vertices" in text
    assert "none to compare of those outside the sample" in text


def test_vertices_that_are_not_finite_are_grey_unlabelled_and_never_sampled(tmp_path: Path, capsys: Any) -> None:
    points = np.random.default_rng(0).random((60, 3), np.float32)
    bad = [3, 17, 59]
    points[3, 0], points[17], points[59, 2] = np.nan, np.inf, -np.inf
    np.save(tmp_path / "cloud.npy", points)
    out = tmp_path / "out.ply"
    for sample in ("farthest", "random"):
        words = ("--sample", sample, "--points", 57, "--out", out, "--view", tmp_path / "view.png")
        assert command(tmp_path / "cloud.npy", "--labels", own_labels(tmp_path, 60), *words) == 0
        expected = np.where(np.isin(np.arange(60), bad), -1, np.arange(60))
        np.testing.assert_array_equal(read_labels(out), expected)
        assert "3 vertices are not finite" in capsys.readouterr().out
    raw = trimesh.load(out, process=False)
    np.testing.assert_array_equal(np.asarray(raw.visual.vertex_colors)[bad, :3], [_mesh.GREY] * 3)
    np.testing.assert_array_equal(np.isfinite(raw.vertices).all(axis=1), expected >= 0)


@pytest.mark.parametrize(("shift", "scale"), [(3e6, 1.0), (0.0, 2.0**70), (0.0, 2.0**-80)])
def test_labels_do_not_depend_on_where_the_mesh_lies_or_on_its_unit(shift: float, scale: float, tmp_path: Path) -> None:
    # Multiples of 1/256, so that moving and scaling them is exact.
    points = np.random.default_rng(1).integers(0, 2560, (500, 3)) / 256
    for name, cloud in (("plain", points), ("moved", (points + shift) * scale)):
        np.save(tmp_path / f"{name}.npy", cloud)
        words = ("--points", 80, "--labels", own_labels(tmp_path, 500), "--out", tmp_path / f"{name}.ply")
        assert command(tmp_path / f"{name}.npy", *words) == 0
    np.testing.assert_array_equal(read_labels(tmp_path / "moved.ply"), read_labels(tmp_path / "plain.ply"))
    back = trimesh.load(tmp_path / "moved.ply", process=False).vertices
    np.testing.assert_allclose(back, (points + shift) * scale, rtol=1e-6, atol=0)
    if shift:
        np.testing.assert_array_equal(back, points + shift)  # written as double


# Sampling and clustering ---------------------------------------------------------------------------------------------


def cloud_mesh(points: np.ndarray) -> _mesh.Mesh:
    return _mesh.Mesh("cloud", points.astype(np.float64), np.empty((0, 3), np.int32))


def test_farthest_sampling_takes_the_farthest_vertex_each_time() -> None:
    points = np.random.default_rng(5).integers(0, 100, (400, 3)).astype(np.float64)
    chosen = _mesh.sample_farthest(cloud_mesh(points), 60, seed=7)
    first = int(np.random.default_rng(7).integers(400))
    expected = [first]
    for _ in range(59):
        nearest = ((points[:, None] - points[None, expected]) ** 2).sum(axis=-1).min(axis=1)
        expected.append(int(nearest.argmax()))
    np.testing.assert_array_equal(chosen, sorted(expected))


@pytest.mark.parametrize("choose", [_mesh.sample_farthest, _mesh.sample_random])
def test_a_sample_holds_no_vertex_twice_even_among_duplicates(choose: Callable[..., np.ndarray]) -> None:
    mesh = cloud_mesh(np.repeat(np.eye(3), 10, axis=0))
    np.testing.assert_array_equal(choose(mesh, 30, 0), np.arange(30))
    chosen = choose(mesh, 12, 0)
    assert len(set(chosen)) == 12
    assert (np.diff(chosen) > 0).all()


def test_kmeans_parts_what_is_apart_and_numbers_clusters_by_size() -> None:
    rng = np.random.default_rng(2)
    sizes = (50, 200, 120)
    truth = np.repeat([2, 0, 1], sizes)
    rows = np.repeat([[0, 0, 0], [50, 0, 0], [0, 50, 0]], sizes, axis=0) + rng.random((370, 3))
    for seed in range(5):
        np.testing.assert_array_equal(_mesh.kmeans(rows, 3, seed), truth)


def test_kmeans_takes_as_many_clusters_as_rows_and_fewer_distinct_rows_than_clusters() -> None:
    rows = np.random.default_rng(0).random((40, 3))
    assert sorted(_mesh.kmeans(rows, 40, 0)) == list(range(40))
    assert set(_mesh.kmeans(np.repeat(rows[:2], 20, axis=0), 8, 0)) == {0, 1}
    assert set(_mesh.kmeans(np.zeros((5, 3)), 5, 0)) == {0}


def test_normals_point_out_of_a_sphere() -> None:
    sphere = trimesh.creation.icosphere(3)
    mesh = _mesh.Mesh("sphere", np.array(sphere.vertices), np.array(sphere.faces, np.int32))
    assert mesh.normals is not None
    np.testing.assert_allclose(mesh.normals, sphere.vertices, atol=0.02)


@pytest.mark.parametrize("sample", ["farthest", "random"])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(sample: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{k}.ply" for k in range(3)]
    for out, seed in zip(files, (4, 4, 5), strict=True):
        assert command("demo:knot", "--points", 300, "--sample", sample, "--seed", seed, "--out", out) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (read_labels(files[0]) != read_labels(files[2])).any()


# Reading -------------------------------------------------------------------------------------------------------------


def test_the_demo_is_a_closed_mesh_that_faces_outwards() -> None:
    mesh = _mesh.load_mesh("demo:knot")
    knot = trimesh.Trimesh(mesh.vertices, mesh.faces, process=False)
    assert len(mesh.vertices) == 6400
    assert knot.is_watertight
    assert knot.is_winding_consistent
    assert knot.volume > 0


@pytest.mark.parametrize("suffix", [".ply", ".off", ".obj", ".glb"])
def test_vertices_and_faces_keep_their_order_in_each_format(suffix: str, tmp_path: Path) -> None:
    box = trimesh.creation.box((1, 2, 3)).subdivide()
    path = tmp_path / f"box{suffix}"
    box.export(path)
    mesh = _mesh.load_mesh(str(path))
    np.testing.assert_allclose(mesh.vertices, box.vertices, atol=1e-6)
    np.testing.assert_array_equal(mesh.faces, box.faces)


def test_an_stl_file_keeps_its_three_vertices_a_face(tmp_path: Path) -> None:
    trimesh.creation.box().export(tmp_path / "box.stl")
    mesh = _mesh.load_mesh(str(tmp_path / "box.stl"))
    assert mesh.vertices.shape == (36, 3)
    np.testing.assert_array_equal(mesh.faces, np.arange(36).reshape(12, 3))


def test_the_parts_of_a_scene_are_placed_and_a_mirrored_one_stays_right_side_out(tmp_path: Path) -> None:
    scene = trimesh.Scene()
    box = trimesh.creation.box()
    mirror = np.diag([-1.0, 1.0, 1.0, 1.0])
    mirror[0, 3] = 5
    scene.add_geometry(box)
    scene.add_geometry(box, transform=mirror)
    scene.export(tmp_path / "scene.glb")
    mesh = _mesh.load_mesh(str(tmp_path / "scene.glb"))
    assert len(mesh.vertices) == 16
    assert mesh.vertices[:, 0].max() == pytest.approx(5.5)
    assert trimesh.Trimesh(mesh.vertices, mesh.faces, process=False).volume == pytest.approx(2)


def test_a_byte_order_mark_costs_an_obj_file_no_vertex(tmp_path: Path) -> None:
    path = tmp_path / "marked.obj"
    path.write_bytes(b"\xef\xbb\xbfv 1 2 3\nv 4 5 6\nv 7 8 10\nf 1 2 3\n")
    mesh = _mesh.load_mesh(str(path))
    np.testing.assert_array_equal(mesh.vertices, [[1, 2, 3], [4, 5, 6], [7, 8, 10]])
    np.testing.assert_array_equal(mesh.faces, [[0, 1, 2]])


@pytest.mark.parametrize("lines", [1, 3, 4, 5])
def test_a_text_ply_file_that_was_cut_off_is_refused(lines: int, untouched: Path, tmp_path: Path, capsys: Any) -> None:
    header = ["ply", "format ascii 1.0", "element vertex 4", *(f"property float {axis}" for axis in "xyz")]
    header += ["element face 2", "property list uchar int vertex_indices", "end_header"]
    body = ["0 0 0", "1 0 0", "0 1 0", "1 1 0", "3 0 1 2", "3 1 3 2"]
    path = tmp_path / "cloud.ply"
    path.write_text("\n".join([*header, *body, "", ""]))
    mesh = _mesh.load_mesh(str(path))
    assert (mesh.vertices.shape, mesh.faces.shape) == ((4, 3), (2, 3))
    path.write_text("\n".join([*header, *body[:lines], ""]))
    assert command(path, "--out", untouched / "out.ply") == 2
    refused(capsys, "MESH", "cloud.ply", f"6 elements, got {lines}")


def test_a_name_that_the_output_cannot_spell_is_told_all_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    source = tmp_path / "n\u00e9.npy"
    np.save(source, np.random.default_rng(0).random((9, 3)))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="strict"))
    assert command(source, "--out", tmp_path / "out.ply") == 0
    sys.stdout.flush()
    assert b"n\\xe9.npy: 9 vertices" in written.getvalue()


def test_an_obj_file_keeps_its_vertices_whatever_its_texture_groups_and_encoding(tmp_path: Path) -> None:
    path = tmp_path / "seams.obj"
    path.write_bytes(
        b"# caf\xe9\nmtllib gone.mtl\no one\n"
        b"v 0 0 0 1.0\nv 1 0 0 0.5 0.5 0.5\n  v\t1 1 0\nv 0 1 0\nv 9 9 9\nvt 0 0\nvt 1 1\nvn 0 0 1\n"
        b"f 1/1/1 2/2/1 3/1/1 4/2/1\nusemtl b\ng two\nf -5//1 -4//1 \\\n -3//1\r\n"
    )
    mesh = _mesh.load_mesh(str(path))
    np.testing.assert_array_equal(mesh.vertices, [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [9, 9, 9]])
    np.testing.assert_array_equal(mesh.faces, [[0, 1, 2], [0, 2, 3], [0, 1, 2]])


def test_a_point_cloud_is_labelled_by_position_alone_and_written_without_faces(tmp_path: Path, capsys: Any) -> None:
    points = np.random.default_rng(0).random((200, 3))
    trimesh.PointCloud(points).export(tmp_path / "cloud.ply")
    out = tmp_path / "out.ply"
    assert command(tmp_path / "cloud.ply", "--points", 50, "--out", out, "--view", tmp_path / "view.png") == 0
    text = capsys.readouterr().out
    assert "(a point cloud)" in text
    assert "k-means on position\n" in text
    assert b"element face" not in out.read_bytes()
    np.testing.assert_allclose(trimesh.load(out, process=False).vertices, points, rtol=1e-6)


# Telling -------------------------------------------------------------------------------------------------------------


def test_json_is_all_there_is_on_stdout_and_tells_the_path_taken(cube: Path, tmp_path: Path, capsys: Any) -> None:
    assert command(cube, "--out", tmp_path / "out.ply", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["vertices"] == 98
    assert result["points"] == 24  # a quarter of so small a mesh
    assert result["transfer"]["path"] == "reference"
    assert list(result["transfer"]["reasons"].values()) == [1]
    assert result["transfer"]["warm"] is False
    assert result["transfer"]["seconds"] > 0
    assert result["agreement"] is None


def test_the_text_names_the_path_its_reason_and_the_files(cube: Path, tmp_path: Path, capsys: Any) -> None:
    out, view = tmp_path / "out.ply", tmp_path / "view.png"
    assert command(cube, "--out", out, "--view", view) == 0
    captured = capsys.readouterr()
    assert "path       reference (" in captured.out
    assert "not warmed up, on cpu" in captured.out
    assert str(out) in captured.out
    assert str(view) in captured.out
    assert "error" not in captured.err


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"cuda:0": {"fast": 1, "reference": {}}}, ("fast", {})),
        ({"cuda:0": {"fast": 0, "reference": {"not_qualified": 1}}}, ("reference", {"not_qualified": 1})),
        ({"cuda:0": {"fast": 2, "reference": {"x": 1}}, "cpu": {"fast": 0, "reference": {}}}, ("mixed", {"x": 1})),
        ({}, ("not counted", {})),
    ],
)
def test_the_path_is_what_the_counters_gained(after: dict[str, Any], expected: tuple[str, dict[str, int]]) -> None:
    counts = transfer_labels._counts
    assert transfer_labels._path_taken(counts({"knn_gather": after}) - counts({})) == expected
    # What was counted before the call is no part of it.
    assert transfer_labels._path_taken(counts({"knn_gather": after}) - counts({"knn_gather": after}))[1] == {}


def test_a_long_job_reports_lines_without_control_characters_to_a_log(capsys: Any, monkeypatch: Any) -> None:
    from prequal.cli import _progress

    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: float(next(clock)))
    with _progress.Progress("sampling", 10) as progress:
        for done in range(10):
            progress.update(done)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert 2 <= len(lines) < 10
    assert all(line.startswith("sampling: ") and line.isprintable() for line in lines)


def test_the_picture_shows_both_views_in_the_labels_colours(cube: Path, tmp_path: Path) -> None:
    view = tmp_path / "view.png"
    for up in ("x", "y", "z"):
        assert command(cube, "--out", tmp_path / "out.ply", "--view", view, "--up", up) == 0
        with Image.open(view) as image:
            picture = np.asarray(image.convert("RGB")).astype(int)
        assert picture.shape == (960, 1600, 3)
        colourful = np.ptp(picture[100:860], axis=2) > 40
        assert 0.1 < colourful[:, :800].mean() < 0.8
        assert 0.1 < colourful[:, 800:].mean() < 0.8
        assert not colourful[:, 790:810].any()


def test_nearer_triangles_hide_farther_ones_in_the_picture() -> None:
    from prequal.cli import _render

    # The unit square at the back (faces 0, 1) and at the front (faces 2, 3), and a sliver outside the picture.
    square = np.array([[2, 2], [18, 2], [18, 18], [2, 18]], float)
    xy = np.concatenate([square, square + np.array([8, 0]), [[-50, -9], [-40, -9], [-45, 900]]])
    depth = np.array([0.2] * 4 + [0.7] * 4 + [1.0] * 3)
    faces = np.array([[0, 1, 2], [0, 2, 3], [4, 5, 6], [4, 6, 7], [8, 9, 10]])
    expected = np.zeros((20, 30), int)
    expected[2:18, 2:18], expected[2:18, 10:26] = 1, 2
    for order in (faces, faces[::-1]):
        buffer = _render._Buffer(30, 20)
        _render._draw_triangles(buffer, xy, depth, order)
        front = np.isclose(buffer.depth, 0.7, atol=1e-6) * 2 + np.isclose(buffer.depth, 0.2, atol=1e-6)
        np.testing.assert_array_equal(front, expected)
        np.testing.assert_array_equal(buffer.item >= 0, expected > 0)


@pytest.mark.parametrize(
    ("points", "faces"),
    [
        ([[0, 0, 0]], []),
        ([[1e300, 0, 0]], []),
        ([[0, 0, 0], [1, 0, 0], [2, 0, 0]], []),
        ([[0, 0, 0], [1, 0, 0], [2, 0, 0]], [[0, 1, 2]]),
        ([[0, 0, 0], [1, 0, 0], [0, 1, 0], [np.nan] * 3], [[0, 1, 2], [0, 1, 3]]),
    ],
)
def test_degenerate_shapes_are_drawn_and_written(points: list[Any], faces: list[Any]) -> None:
    from prequal.cli import _render

    mesh = _mesh.Mesh("odd", np.array(points, float), np.array(faces, np.int32).reshape(-1, 3))
    labels = np.where(mesh.finite, 0, -1).astype(np.int32)
    picture, ply = io.BytesIO(), io.BytesIO()
    _render.write_picture(picture, mesh, labels, "y", "title", "subtitle")
    _mesh.write_ply(ply, mesh, labels)
    with Image.open(picture) as image:
        assert image.size == (1600, 960)


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[Path]:
    """A folder that must hold at the end what the test put there by its own hand, and nothing else."""
    folder = tmp_path / "folder"
    folder.mkdir()
    yield folder
    assert sorted(path.name for path in folder.rglob("*") if path.suffix not in {".in", ".npy"}) == []


def refused(capsys: Any, argument: str, *fragments: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    for fragment in (f"argument {argument}: expected ", ", got ", *fragments):
        assert fragment in captured.err


NOISE = np.random.default_rng(0).bytes(4000)
PNG = b"\x89PNG\r\n\x1a\n" + NOISE[:200]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"noise{suffix}", NOISE) for suffix in (".ply", ".obj", ".stl", ".off", ".glb", ".npy", ".bin", "")),
        *((f"text{suffix}", b"hello world\nthis is text\n") for suffix in (".ply", ".obj", ".stl", ".off", ".glb")),
        *((f"text{suffix}", b"hello world\nthis is text\n") for suffix in (".npy", ".txt")),
        *((f"none{suffix}", b"") for suffix in (".ply", ".obj", ".stl", ".off", ".glb", ".npy")),
        ("picture.png", PNG),
        ("picture.obj", PNG),
        ("empty.ply", b"ply\nformat ascii 1.0\nelement vertex 0\nproperty float x\nproperty float y\n"
                      b"property float z\nend_header\n"),
        ("short.ply", b"ply\nformat binary_little_endian 1.0\nelement vertex 1000000000000\nproperty float x\n"
                      b"property float y\nproperty float z\nend_header\n1234"),
        ("index.obj", b"v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 4\n"),
        ("zero.obj", b"v 0 0 0\nv 1 0 0\nv 0 1 0\nf 0 1 2\n"),
        ("back.obj", b"v 0 0 0\nv 1 0 0\nv 0 1 0\nf -9 1 2\n"),
        ("words.obj", b"v zero 0 0\n"),
        ("flat.obj", b"v 0 0\n"),
        ("giant.obj", b"v 0 0 0\nf 1 1 99999999999999999999999\n"),
        ("nan.obj", b"v nan 0 0\nv 0 inf 0\n"),
    ],
)  # fmt: skip
def test_what_is_not_a_mesh_is_refused(name: str, content: bytes, untouched: Path, tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / name
    source.write_bytes(content)
    assert command(source, "--out", untouched / "out.ply", "--view", untouched / "view.png") == 2
    refused(capsys, "MESH")


def test_a_mesh_that_is_missing_or_a_folder_is_refused(untouched: Path, capsys: Any) -> None:
    assert command(untouched / "gone.ply", "--out", untouched / "out.ply") == 2
    refused(capsys, "MESH", "gone.ply", "No such file")
    assert command(untouched, "--out", untouched / "out.ply") == 2
    refused(capsys, "MESH", "the folder")
    assert command("demo:teapot", "--out", untouched / "out.ply") == 2
    refused(capsys, "MESH", "demo:knot", "demo:teapot")


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 2)), np.zeros(3), np.zeros((4, 3), complex), np.zeros((4, 3), bool), np.zeros((0, 3)),
     np.array([["a", "b", "c"]]), np.full((3, 3), np.nan)],
)  # fmt: skip
def test_an_array_that_is_not_a_point_cloud_is_refused(array: np.ndarray, untouched: Path, capsys: Any) -> None:
    np.save(untouched / "cloud.npy", array)
    assert command(untouched / "cloud.npy", "--out", untouched / "out.ply") == 2
    refused(capsys, "MESH")


@pytest.mark.parametrize("argument", ["--out", "--view"])
def test_a_path_that_cannot_be_written_is_refused_before_the_mesh_is_read(
    argument: str, untouched: Path, monkeypatch: Any, capsys: Any
) -> None:
    suffix = {"--out": ".ply", "--view": ".png"}[argument]
    monkeypatch.setattr(_mesh, "load_mesh", lambda source: pytest.fail("read the mesh first"))
    folder = untouched.parent / f"really{suffix}"
    folder.mkdir()
    bad = {
        untouched / f"missing/out{suffix}": "no such folder",
        folder: "a folder",
        untouched / "out.xyz": "extension .xyz",
        untouched / "out": "extension missing",
        untouched / f"{'n' * 300}{suffix}": "too long",
        untouched.parent: "a folder",
        Path(os.devnull): "not a file",
    }
    for path, why in bad.items():
        others = () if argument == "--out" else ("--out", untouched / "out.ply")
        assert command("demo:knot", argument, path, *others) == 2
        refused(capsys, argument, why)


def test_a_read_only_folder_or_file_is_refused(untouched: Path, monkeypatch: Any, capsys: Any) -> None:
    # Permission bits do not bind root, as whom containers run the tests: refuse at the call instead.
    def refuse(self: Path, mode: str = "r", **options: Any) -> Any:
        if "x" in mode:
            raise PermissionError(13, "Permission denied", str(self))
        return open(self, mode, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert command("demo:knot", "--out", untouched / "out.ply") == 2
    refused(capsys, "--out", "Permission denied")

    existing = untouched.parent / "existing.ply"
    existing.write_bytes(b"mine")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert command("demo:knot", "--out", existing) == 2
    refused(capsys, "--out", "read-only")
    assert existing.read_bytes() == b"mine"


def test_the_mesh_itself_is_not_overwritten(cube: Path, capsys: Any) -> None:
    before = cube.read_bytes()
    (cube.parent / "alias.ply").symlink_to(cube)
    for out in (cube, cube.parent / "alias.ply"):
        assert command(cube, "--out", out) == 2
        refused(capsys, "--out", "other than MESH")
    assert cube.read_bytes() == before


@pytest.mark.parametrize("points", [0, -5, 99, 10**12])
def test_too_few_or_too_many_points_are_refused(points: int, cube: Path, untouched: Path, capsys: Any) -> None:
    assert command(cube, f"--points={points}", "--out", untouched / "out.ply") == 2
    refused(capsys, "--points", "from 1 to 98", f"got {points}")


@pytest.mark.parametrize("clusters", [0, -1, 11])
def test_clusters_must_be_from_one_to_the_points(clusters: int, cube: Path, untouched: Path, capsys: Any) -> None:
    words = ("--points", 10, f"--clusters={clusters}", "--out", untouched / "out.ply")
    assert command(cube, *words) == 2
    refused(capsys, "--clusters", "from 1 to 10", f"got {clusters}")


def test_words_that_argparse_refuses_end_with_two(cube: Path, untouched: Path, capsys: Any) -> None:
    out = untouched / "out.ply"
    assert command(cube) == 2
    assert command(cube, "--out", out, "--points", "many") == 2
    assert command(cube, "--out", out, "--sample", "best") == 2
    assert command(cube, "--out", out, "--labels", "a.npy", "--clusters", 3) == 2
    assert capsys.readouterr().out == ""
    assert command(cube, "--out", out, "--seed=-1") == 2
    refused(capsys, "--seed", "got -1")


def test_cuda_without_a_device_is_refused(cube: Path, untouched: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    parser = argparse.ArgumentParser()
    transfer_labels.add_arguments(parser)
    out = str(untouched / "out.ply")
    assert transfer_labels.run(parser.parse_args([str(cube), "--out", out, "--device", "cuda"])) == 2
    refused(capsys, "--device", "got cuda")


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros(97, int), "shape [97]"),
        (np.zeros((98, 1), int), "shape [98, 1]"),
        (np.array(3), "shape []"),
        (np.zeros(98), "dtype float64"),
        (np.zeros(98, bool), "dtype bool"),
        (np.full(98, "a"), "dtype <U1"),
        (np.arange(98) - 1, "labels from -1 to 96"),
        (np.arange(98) + 2**31, "labels from 2147483648"),
        (np.full(98, 2**64 - 1, np.uint64), "18446744073709551615"),
        (np.full(98, None, object), "NumPy refuses"),
    ],
)
def test_labels_of_another_length_type_or_range_are_refused(
    array: np.ndarray, why: str, cube: Path, untouched: Path, capsys: Any
) -> None:
    np.save(untouched / "labels.npy", array, allow_pickle=True)
    assert command(cube, "--labels", untouched / "labels.npy", "--out", untouched / "out.ply") == 2
    refused(capsys, "--labels", "integer array [98]", why)


class Explosive:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a label file was unpickled",))


@pytest.mark.parametrize(
    "content",
    [b"", b"1 2 3\n", NOISE, pickle.dumps(Explosive()), b"\x93NUMPY\x01\x00\x10\x00{'descr': oops}  \n",
     b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8', ",
     b"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', 'fortran_order': False, 'shape': (98,), }          \n"],
)  # fmt: skip
def test_a_label_file_that_is_not_a_plain_array_is_refused_and_never_unpickled(
    content: bytes, cube: Path, untouched: Path, capsys: Any
) -> None:
    (untouched / "labels.in").write_bytes(content)
    assert command(cube, "--labels", untouched / "labels.in", "--out", untouched / "out.ply") == 2
    refused(capsys, "--labels")


def test_label_paths_that_are_missing_folders_or_archives_are_refused(
    cube: Path, untouched: Path, tmp_path: Path, capsys: Any
) -> None:
    np.savez(tmp_path / "labels.npz", np.zeros(98, int))
    for path in (untouched / "gone.npy", untouched, tmp_path / "labels.npz"):
        assert command(cube, "--labels", path, "--out", untouched / "out.ply") == 2
        refused(capsys, "--labels")


def test_labels_of_any_integer_type_and_byte_order_are_taken(cube: Path, tmp_path: Path) -> None:
    truth = np.arange(98) % 5
    found = []
    for kind in ("u1", "i1", ">i2", "<u8", ">i8"):
        np.save(tmp_path / "labels.npy", truth.astype(kind))
        assert command(cube, "--labels", tmp_path / "labels.npy", "--out", tmp_path / "out.ply") == 0
        found.append(read_labels(tmp_path / "out.ply"))
    assert all((labels == found[0]).all() for labels in found)


@pytest.mark.parametrize(("package", "argument"), [("trimesh", "MESH"), ("PIL", "--view")])
def test_a_missing_package_is_named_with_how_to_get_it(
    package: str, argument: str, cube: Path, untouched: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert command(cube, "--out", untouched / "out.ply", "--view", untouched / "view.png") == 2
    refused(capsys, argument, "pip install 'prequal[mesh]'")


# Whole files or none -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("out of memory"), 1, "out of memory")],
)
def test_a_transfer_that_ends_early_leaves_no_file(
    error: BaseException, code: int, text: str, untouched: Path, monkeypatch: Any, capsys: Any
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(prequal, "knn_gather", fail)
    assert command("demo:knot", "--points", 50, "--out", untouched / "out.ply", "--view", untouched / "v.png") == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 1)])
def test_writing_that_ends_early_leaves_the_old_files_as_they_were(
    error: BaseException, code: int, untouched: Path, monkeypatch: Any, capsys: Any
) -> None:
    from prequal.cli import _render

    def fail(stream: Any, *args: Any, **options: Any) -> None:
        stream.write(b"half of a picture")
        raise error

    old = untouched.parent / "old.ply"
    old.write_bytes(b"old")
    monkeypatch.setattr(_render, "write_picture", fail)
    assert command("demo:knot", "--points", 50, "--out", old, "--view", untouched / "view.png") == code
    assert old.read_bytes() == b"old"
    assert not list(untouched.parent.glob(".*"))
    assert "nothing was written" in capsys.readouterr().err


def test_an_output_replaces_the_file_behind_a_link_with_the_usual_permissions(cube: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.ply", tmp_path / "link.ply"
    target.write_bytes(b"old")
    link.symlink_to(target)
    plain = tmp_path / "plain"
    plain.touch()
    assert command(cube, "--out", link) == 0
    assert link.is_symlink()
    assert read_labels(target).shape == (98,)
    assert target.stat().st_mode == plain.stat().st_mode
    assert not list(tmp_path.glob(".*"))
