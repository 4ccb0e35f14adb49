"""A build manifest that is anything but right is a problem, never an exception and never half a manifest."""

import dataclasses
import json

import pytest

from prequal.runtime.manifest import CudaBuild, Manifest, OpBuild, load

DIGEST = "0123456789abcdef" * 4
GOOD = {
    "schema": 1,
    "version": "0.1.0",
    "commit": "ab" * 20,
    "dirty": False,
    "python_abi": "cp312-abi3",
    "cuda": {"toolkit": "13.0", "nvcc": "13.0.88", "minimum_driver": "580"},
    "archs": ["80", "86", "89", "90"],
    "ptx": [],
    "sass_source": "cuobjdump",
    "ops": {"rms_norm": {"digest": DIGEST, "evidence": ["90"]}},
    "source_digest": DIGEST,
}


def written(tmp_path, content):
    path = tmp_path / "_build.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def changed(field, value):
    data = json.loads(json.dumps(GOOD))
    *parents, last = field.split(".")
    target = data
    for parent in parents:
        target = target[parent]
    target[last] = value
    return data


def test_a_good_manifest_is_read_whole(tmp_path):
    manifest = load(written(tmp_path, GOOD))
    assert manifest.problem is None
    assert manifest.cuda == CudaBuild("13.0", "13.0.88", "580")
    assert manifest.archs == ("80", "86", "89", "90")
    assert manifest.ops["rms_norm"] == OpBuild(DIGEST, ("90",))


def test_it_is_read_once(tmp_path):
    path = written(tmp_path, GOOD)
    first = load(path)
    path.unlink()
    assert load(str(path)) is first


def test_it_cannot_be_changed(tmp_path):
    manifest = load(written(tmp_path, GOOD))
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.archs = ()
    with pytest.raises(TypeError):
        manifest.ops["knn"] = OpBuild(DIGEST, ())


@pytest.mark.parametrize("field", ["commit", "dirty", "python_abi", "cuda"])
def test_what_a_build_may_not_know_may_be_null(tmp_path, field):
    manifest = load(written(tmp_path, changed(field, None)))
    assert manifest.problem is None
    assert getattr(manifest, field) is None


def test_fields_of_later_builds_are_left_alone(tmp_path):
    assert load(written(tmp_path, changed("built_with", {"cmake": "4"}))).problem is None


def assert_only_a_problem(manifest, says):
    assert says in manifest.problem
    assert manifest == Manifest(problem=manifest.problem)


def test_an_absent_manifest_is_a_problem_that_names_the_file(tmp_path):
    assert_only_a_problem(load(tmp_path / "_build.json"), f"{tmp_path / '_build.json'} does not exist")


def test_a_folder_in_its_place_is_a_problem(tmp_path):
    (tmp_path / "_build.json").mkdir()
    assert_only_a_problem(load(tmp_path / "_build.json"), "cannot be read")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"null", b"[]", b'"text"', b"1", b"{}", b"[" * 200_000],
    ids=["empty", "cut", "not utf-8", "null", "list", "text", "number", "no fields", "deep"],
)
def test_a_file_that_is_no_manifest_is_a_problem(tmp_path, content):
    assert_only_a_problem(load(written(tmp_path, content)), str(tmp_path))


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_missing_field_is_named(tmp_path, field):
    data = {name: value for name, value in GOOD.items() if name != field}
    assert_only_a_problem(load(written(tmp_path, data)), f"{field}: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 2),
        ("schema", True),
        ("schema", "1"),
        ("version", 1),
        ("version", ""),
        ("commit", "ab"),
        ("commit", 0),
        ("dirty", "no"),
        ("dirty", 0),
        ("python_abi", "py3"),
        ("cuda", "13.0"),
        ("cuda", {}),
        ("cuda.toolkit", 13.0),
        ("cuda.nvcc", None),
        ("cuda.minimum_driver", 580),
        ("archs", "80"),
        ("archs", [80]),
        ("archs", ["sm_80"]),
        ("ptx", None),
        ("sass_source", "hope"),
        ("ops", []),
        ("ops.rms_norm", None),
        ("ops.rms_norm.digest", "0"),
        ("ops.rms_norm.evidence", [9.0]),
        ("source_digest", DIGEST.upper()),
    ],
)
def test_a_wrong_field_is_named_with_what_was_found(tmp_path, field, value):
    manifest = load(written(tmp_path, changed(field, value)))
    assert_only_a_problem(manifest, field)
    assert "found" in manifest.problem or "missing" in manifest.problem
