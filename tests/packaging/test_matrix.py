"""ci/matrix.toml is the one place: what repeats it agrees with it, and what contradicts it is found."""

from __future__ import annotations

import copy
import http.server
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
CI = REPOSITORY / "ci"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up; refresh_pins imports matrix
    spec.loader.exec_module(module)
    return module


matrix = script("matrix")
refresh_pins = script("refresh_pins")


@pytest.fixture
def data() -> dict:
    """The matrix as data, to be spoilt."""
    return copy.deepcopy(matrix.Matrix().data)


@pytest.fixture
def repository(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the files that repeat the matrix, to be spoilt."""
    for name in ("pyproject.toml", "CMakeLists.txt", "cmake/write_manifest.py", "ci/matrix.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("CUDACXX", "PREQUAL_CELL")} | environ
    return subprocess.run(
        [sys.executable, str(CI / "matrix.py"), *words], capture_output=True, text=True, check=False, env=env
    )


# ---- what agrees ----------------------------------------------------------------------------------------------------


def test_what_repeats_the_matrix_agrees_with_it():
    assert list(matrix.Matrix().repository_problems()) == []


def test_the_tables_of_the_install_page_are_current():
    out = run("docs", "--check")
    assert out.returncode == 0, out.stderr


def test_the_stack_of_the_first_article_is_served_by_the_older_major():
    (stack,) = [s for s in matrix.Matrix().data["stacks"] if "2.7.1+cu128" in s["name"]]
    assert stack["toolkit"] == "12.9"
    assert stack["architectures"] == ["80"]
    assert stack["driver"] == ">=525"


def test_every_cell_serves_a_stack_and_the_default_stacks_cover_every_architecture():
    loaded = matrix.Matrix()
    served = {(stack["toolkit"], machine) for stack in loaded.data["stacks"] for machine in stack["machines"]}
    assert served == {(cell.toolkit, cell.machine) for cell in loaded.cells()}
    codes = {a for s in loaded.data["stacks"] if s["toolkit"] == loaded.default_toolkit for a in s["architectures"]}
    assert codes == set(loaded.architectures)


# ---- what is derived ------------------------------------------------------------------------------------------------


def test_a_workflow_gets_a_job_for_each_toolkit_and_machine():
    cells = json.loads(run("cells").stdout)["include"]
    assert [c["cell"] for c in cells] == ["cu12.9-x86_64", "cu12.9-aarch64", "cu13.0-x86_64", "cu13.0-aarch64"]
    assert all(cell["runner"].endswith("-arm") == cell["cell"].endswith("aarch64") for cell in cells)
    assert json.loads(run("cells", "--cell", "cu13.0-x86_64").stdout)["include"] == [cells[2]]


def test_the_gpu_lane_gets_a_self_hosted_runner_for_each_label():
    runners = json.loads(run("gpu").stdout)["include"]
    assert [runner["labels"] for runner in runners] == [
        ["self-hosted", "linux", "gpu", label] for label in ("sm_80", "sm_89", "sm_90")
    ]


def environment(cell: str, **options: bool) -> dict[str, str]:
    loaded = matrix.Matrix()
    return loaded.environment(loaded.cell(cell), **options)


def test_the_default_cell_takes_its_compiler_from_the_build_requirements():
    env = environment("cu13.0-x86_64", local=False)
    assert "CUDACXX" not in env
    assert "SKBUILD_WHEEL_BUILD_TAG" not in env
    assert re.fullmatch(r"\S+/manylinux_2_28_x86_64@sha256:[0-9a-f]{64}", env["CIBW_MANYLINUX_X86_64_IMAGE"])
    assert env["CIBW_BUILD"].split() == [f"cp3{n}-manylinux_x86_64" for n in (11, 12, 13)]


def test_another_major_takes_it_from_its_image_and_marks_its_files():
    env = environment("cu12.9-aarch64", local=True)
    assert env["CUDACXX"] == "/usr/local/cuda-12.9/bin/nvcc"
    assert env["SKBUILD_WHEEL_BUILD_TAG"] == "129cu"
    assert env["CIBW_ARCHS"] == "aarch64"
    assert not [name for name in env if name.endswith("_IMAGE")]


def test_every_variable_of_a_cell_reaches_the_container():
    project = matrix.tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    passed = set(project["tool"]["cibuildwheel"]["linux"]["environment-pass"])
    for cell in matrix.Matrix().cells():
        wanted = {name for name in environment(cell.name, local=True) if not name.startswith("CIBW_")}
        assert wanted <= passed, cell.name


def test_an_image_with_a_placeholder_is_not_pulled(data):
    data["images"]["12.9-x86_64"]["digest"] = matrix.PLACEHOLDER
    loaded = matrix.Matrix(data)
    with pytest.raises(SystemExit, match=r"placeholder.*refresh_pins"):
        loaded.environment(loaded.cell("cu12.9-x86_64"), local=False)


def test_an_unknown_cell_is_told_the_known_ones():
    out = run("env", "cu11.8-x86_64")
    assert out.returncode != 0
    assert "expected one of cu12.9-x86_64" in out.stderr


def test_the_audit_leaves_out_nothing_but_the_drivers_library():
    project = matrix.tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    repair = project["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"]
    assert re.findall(r"--exclude[ =](\S+)", repair) == ["libcuda.so.1"]
    assert re.findall(r"--exclude[ =](\S+)", (CI / "build_wheels.sh").read_text()) == ["libcuda.so.1"]


# ---- what is found --------------------------------------------------------------------------------------------------


def spoil(path: str, value: Any) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        *folders, last = path.split("/")
        for name in folders:
            data = data[int(name)] if isinstance(data, list) else data[name]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoil("default_toolkit", "11.8"), "default_toolkit: expected one of 12.9, 13.0, got 11.8"),
        (spoil("toolkits/12.9/build_tag", ""), "needs a build tag"),
        (spoil("toolkits/12.9/build_tag", "cu129"), "expected digits first, got 'cu129'"),
        (spoil("architectures/120/since", "13.1"), None),
        (lambda data: data["architectures"]["100"].update(built=True, since="13.0"), "CUDA 12.9 does not know it"),
        (spoil("images/13.0-x86_64/digest", "latest"), "expected sha256:"),
        (spoil("machines/riscv64", {"runner": "x"}), "images: expected"),
        (spoil("stacks/0/toolkit", "11.8"), "toolkit 11.8 is not built"),
        (spoil("stacks/0/machines", ["ppc64le"]), "machine ppc64le is not built"),
        (spoil("stacks/0/architectures", ["100"]), "sm_100 is not built"),
        (spoil("stacks/0/driver", ">=450"), "driver >=450 is not what CUDA 12.9 asks for"),
        (spoil("stacks/0/torch_cuda", "13.0"), "differ in major"),
        (spoil("gpu_runners/0/label", "sm_70"), "gpu_runners: sm_70 is not built"),
    ],
)
def test_a_contradiction_within_the_matrix_is_found(change, said, data):
    change(data)
    found = "\n".join(matrix.Matrix(data).problems())
    assert said in found if said else found == ""


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("pyproject.toml", 'default = "80;86;89;90"', 'default = "90"', "pyproject.toml, PREQUAL_CUDA_ARCHS"),
        ("pyproject.toml", "cuda-toolkit[nvcc,cccl]==13.0.*", "cuda-toolkit[nvcc,cccl]==13.1.*", "build.requires"),
        ("pyproject.toml", 'requires-python = ">=3.11"', 'requires-python = ">=3.10"', "requires-python"),
        ("pyproject.toml", 'py-api = "cp312"', 'py-api = "cp313"', "wheel.py-api"),
        ("pyproject.toml", "NVIDIA CUDA :: 12", "NVIDIA CUDA :: 11", "classifiers"),
        (
            "pyproject.toml",
            "manylinux_2_28_x86_64@sha256:e",
            "manylinux_2_28_x86_64@sha256:f",
            "manylinux-x86_64-image",
        ),
        ("pyproject.toml", '"cp313-manylinux*"', '"cp314-manylinux*"', "tool.cibuildwheel.build"),
        ("CMakeLists.txt", 'PREQUAL_CUDA_ARCHS "80;86;89;90"', 'PREQUAL_CUDA_ARCHS "80;90"', "CMakeLists.txt"),
        ("cmake/write_manifest.py", '13: "580"', '13: "570"', "MINIMUM_DRIVER"),
    ],
)
def test_a_file_that_says_something_else_is_found(file, before, after, said, repository):
    text = (repository / file).read_text()
    assert before in text
    (repository / file).write_text(text.replace(before, after))
    assert said in "\n".join(matrix.Matrix().repository_problems(repository))


def test_a_page_without_a_table_or_with_an_old_one_is_found():
    tables = matrix.Matrix().tables()
    text = (REPOSITORY / "docs" / "install.md").read_text()
    assert matrix.filled(text, tables) == text
    assert matrix.filled(text.replace("| sm_90 |", "| sm_91 |"), tables) == text
    with pytest.raises(SystemExit, match="no markers for the table stacks"):
        matrix.filled("# Installing", tables)


def test_the_wrong_compiler_in_the_container_is_found(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    out = run("check-toolkit", PREQUAL_CELL="cu12.9-x86_64", CUDACXX=str(nvcc))
    assert out.returncode == 1
    assert "expected nvcc 12.9, got 12.8" in out.stderr
    assert "got none" in run("check-toolkit", PREQUAL_CELL="cu12.9-x86_64").stderr
    assert "should come from PyPI" in run("check-toolkit", PREQUAL_CELL="cu13.0-x86_64", CUDACXX=str(nvcc)).stderr
    assert run("check-toolkit", PREQUAL_CELL="cu13.0-x86_64").returncode == 0


# ---- wheels and releases --------------------------------------------------------------------------------------------


def make_wheel(folder: pathlib.Path, cell: Any, python: str, abi: str, **said: Any) -> pathlib.Path:
    """A file with the name and manifest of such a wheel, `said` apart."""
    manifest = {
        "cuda": {"toolkit": cell.toolkit, "minimum_driver": cell.facts["minimum_driver"]},
        "archs": list(cell.architectures),
        "ptx": [],
        "sass_source": "cuobjdump",
        "dirty": False,
    } | said
    front = "-".join(filter(None, ["prequal", matrix.project_version(), cell.facts["build_tag"], python, abi]))
    path = folder / f"{front}-manylinux_2_27_{cell.machine}.manylinux_2_28_{cell.machine}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("prequal/_build.json", json.dumps(manifest))
    return path


@pytest.fixture
def release(tmp_path: pathlib.Path, data: dict) -> tuple[Any, pathlib.Path]:
    """A whole release, from a matrix whose images are all pinned."""
    for image in data["images"].values():
        image["digest"] = "sha256:" + "1" * 64
    loaded, folder = matrix.Matrix(data), tmp_path / "dist"
    folder.mkdir()
    for cell in loaded.cells():
        for python, facts in loaded.data["pythons"].items():
            make_wheel(folder, cell, python, facts["abi"])
    return loaded, folder


def test_a_whole_release_passes_and_the_index_gets_the_default_toolkits_wheels(release):
    loaded, folder = release
    version = matrix.project_version()
    assert list(loaded.release_problems(folder, version)) == []
    assert len(list(folder.glob("*.whl"))) == 8
    names = loaded.index_files(folder, version)
    assert len(names) == 4
    assert not [name for name in names if "129cu" in name]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"archs": ["80", "90"]}, "architectures: expected"),
        ({"ptx": ["90"]}, "PTX: expected [], got ['90']"),
        ({"dirty": True}, "uncommitted changes"),
        ({"sass_source": "declared"}, "how the architectures are known"),
        ({"cuda": {"toolkit": "13.0", "minimum_driver": "525"}}, "minimum driver: expected 580, got 525"),
        ({"cuda": {"toolkit": "12.9", "minimum_driver": "525"}}, "build tag: expected 129cu"),
        ({"cuda": {"toolkit": "12.8", "minimum_driver": "525"}}, "is no cell of the matrix"),
        ({"cuda": None}, "built without CUDA"),
    ],
)
def test_a_wheel_that_is_not_what_its_cell_says_stops_the_release(said, found, release):
    loaded, folder = release
    make_wheel(folder, loaded.cell("cu13.0-x86_64"), "cp312", "abi3", **said)
    assert found in "\n".join(loaded.release_problems(folder, matrix.project_version()))


def test_a_missing_a_second_and_a_strange_wheel_stop_the_release(release):
    loaded, folder = release
    version = matrix.project_version()
    (wheel,) = folder.glob("prequal-*-129cu-cp311-*aarch64.whl")
    content = wheel.read_bytes()
    wheel.unlink()
    assert list(loaded.release_problems(folder, version)) == ["missing: the wheel for cu12.9-aarch64, cp311"]
    wheel.write_bytes(content)
    (folder / wheel.name.replace("manylinux_2_27_aarch64.", "")).write_bytes(content)
    assert "a second wheel for cu12.9-aarch64, cp311" in "\n".join(loaded.release_problems(folder, version))
    wheel.rename(folder / wheel.name.replace(version, "9.9"))
    assert "not a wheel of this release" in "\n".join(loaded.release_problems(folder, version))


def test_a_large_wheel_stops_the_release_before_anything_is_uploaded(release):
    loaded, folder = release
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("prequal/large", bytes(26 * 2**20))  # stored, not deflated
    assert "MiB, the limit is 25" in "\n".join(loaded.release_problems(folder, matrix.project_version()))


def test_an_unpinned_image_stops_the_release(release):
    loaded, folder = release
    loaded.data["images"]["12.9-aarch64"]["digest"] = matrix.PLACEHOLDER
    assert "cu12.9-aarch64: its image is not pinned" in "\n".join(loaded.release_problems(folder, "0"))


def test_the_wheel_under_test_is_what_its_cell_says():
    name = os.environ.get("PREQUAL_TEST_WHEEL")
    if not name:
        pytest.skip("no wheel: set PREQUAL_TEST_WHEEL, or run `nox -s tests` or `nox -s wheel`")
    if os.environ.get("PREQUAL_CUDA_ARCHS"):
        pytest.skip("PREQUAL_CUDA_ARCHS is set: this wheel is for other architectures than a cell's")
    path = pathlib.Path(name)
    problems = list(matrix.Matrix().wheel_problems(path, allow_dirty=True))
    # before auditwheel has looked at it, a wheel has no manylinux tag
    assert [line for line in problems if "expected the platform" not in line or "linux_" not in path.name] == []


# ---- pins -----------------------------------------------------------------------------------------------------------


def test_a_refresh_rewrites_both_files_and_nothing_else(repository):
    before = {name: (repository / name).read_text() for name in ("ci/matrix.toml", "pyproject.toml")}
    digests = {image["name"]: f"sha256:{i:064x}" for i, image in enumerate(matrix.Matrix().data["images"].values(), 1)}
    moved = refresh_pins.refresh(repository, lambda name, tag: (tag, digests[name]))
    assert len(moved) == len(digests)
    loaded = matrix.Matrix(matrix.tomllib.loads((repository / "ci" / "matrix.toml").read_text()))
    assert {image["name"]: image["digest"] for image in loaded.data["images"].values()} == digests
    assert list(loaded.repository_problems(repository)) == []
    for name, old in before.items():
        new = (repository / name).read_text()
        assert re.sub(r"sha256:[0-9a-f]{64}", "", new) == re.sub(r"sha256:[0-9a-f]{64}", "", old)
    assert refresh_pins.refresh(repository, lambda name, tag: (tag, digests[name])) == []


@pytest.fixture
def registry() -> Iterator[tuple[str, list[str]]]:
    """A registry on this machine that gives a token to anybody, and a digest to whoever has one."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps({"token": "for-anybody"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            asked.append(self.path)
            if self.headers.get("Authorization") == "Bearer for-anybody":
                self.send_response(200)
                digest = "sha256:" + "a" * 64 if self.path.endswith("/latest") else "none"
                self.send_header("Docker-Content-Digest", digest)
            else:
                self.send_response(401)
                host = f"http://127.0.0.1:{self.server.server_address[1]}"
                self.send_header("WWW-Authenticate", f'Bearer realm="{host}/auth",service="here"')
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def test_a_registry_is_asked_by_its_protocol_and_believed_only_with_a_digest(registry):
    host, asked = registry
    name = f"{host}/some/image"
    assert refresh_pins.ask_registry(name, "latest", scheme="http") == ("latest", "sha256:" + "a" * 64)
    assert asked[0] == asked[2] == "/v2/some/image/manifests/latest"
    assert asked[1].startswith("/auth?service=here&scope=repository%3Asome%2Fimage%3Apull")
    with pytest.raises(SystemExit, match="expected a sha256 digest, got 'none'"):
        refresh_pins.ask_registry(name, "broken", scheme="http")
