"""The static index of ci/make_index.py: real installers install from it, and what is wrong is refused with its name."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import venv
from html.parser import HTMLParser

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "ci")]  # programs and helpers, no package

from making_wheels import make_wheel

import make_index

MODULE = b"no machine code"  # nothing here loads it


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheels(tmp_path) -> pathlib.Path:
    """One for CUDA 12, two versions for CUDA 13, one without CUDA."""
    folder = tmp_path / "wheels"
    make_wheel(folder, module=MODULE, toolkit="12.9", build="129cu")
    make_wheel(folder, module=MODULE, toolkit="13.0")
    make_wheel(folder, module=MODULE, toolkit="13.0", version="1.1")
    make_wheel(folder)
    return folder


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attributes))


# ---- what is written -------------------------------------------------------------------------------------------------


def test_every_cuda_major_has_an_index_of_its_own_read_from_the_manifests(wheels, tmp_path):
    make_index.make_index(wheels, tmp_path / "out")
    files = {path.parent.parent.name: set() for path in (tmp_path / "out").glob("*/files/*.whl")}
    for path in (tmp_path / "out").glob("*/files/*.whl"):
        files[path.parent.parent.name].add(path.name)
    assert files == {
        "cu12": {"prequal-1.0-129cu-cp312-abi3-manylinux_2_28_x86_64.whl"},
        "cu13": {f"prequal-{version}-cp312-abi3-manylinux_2_28_x86_64.whl" for version in ("1.0", "1.1")},
        "cpu": {"prequal-1.0-py3-none-any.whl"},
    }


@pytest.mark.parametrize("index", ["cu12", "cu13", "cpu"])
def test_html_and_json_say_the_same_of_every_file_and_it_is_true(index, wheels, tmp_path):
    make_index.make_index(wheels, tmp_path / "out")
    simple = tmp_path / "out" / index / "simple"
    assert [link["href"] for link in Links((simple / "index.html").read_text()).found] == ["prequal/"]
    assert json.loads((simple / "index.json").read_text())["projects"] == [{"name": "prequal"}]

    page = json.loads((simple / "prequal" / "index.json").read_text())
    links = Links((simple / "prequal" / "index.html").read_text()).found
    assert page["meta"] == {"api-version": "1.1"}
    assert page["name"] == "prequal"
    assert page["versions"] == sorted({file["filename"].split("-")[1] for file in page["files"]})
    assert len(links) == len(page["files"]) > 0
    for file, link in zip(page["files"], links, strict=True):
        data = (simple / "prequal" / file["url"]).resolve().read_bytes()
        metadata = (simple / "prequal" / f"{file['url']}.metadata").resolve().read_bytes()
        assert data == (wheels / file["filename"]).read_bytes()
        assert metadata.startswith(b"Metadata-Version: ")
        assert file["size"] == len(data)
        assert file["hashes"] == {"sha256": sha256(data)}
        assert file["core-metadata"] == {"sha256": sha256(metadata)}
        assert link["href"] == f"{file['url']}#sha256={sha256(data)}"
        assert link["data-core-metadata"] == link["data-dist-info-metadata"] == f"sha256={sha256(metadata)}"
        assert link["data-requires-python"] == file["requires-python"] == ">=3.11"


def test_with_a_base_url_the_wheels_stay_where_they_are_and_their_metadata_is_written(wheels, tmp_path):
    make_index.make_index(wheels, tmp_path / "out", "https://example.org/v1/")
    page = json.loads((tmp_path / "out/cu13/simple/prequal/index.json").read_text())
    assert {file["url"] for file in page["files"]} == {
        f"https://example.org/v1/{file['filename']}" for file in page["files"]
    }
    assert not list((tmp_path / "out").glob("*/files/*.whl"))
    assert len(list((tmp_path / "out").glob("*/files/*.whl.metadata"))) == 4


def test_the_same_wheels_give_the_same_index(wheels, tmp_path):
    trees = []
    for name in ("a", "b"):
        make_index.make_index(wheels, tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        trees.append({path.relative_to(tmp_path / name): path.read_bytes() for path in files})
    assert trees[0] == trees[1]


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(folder: pathlib.Path, out: pathlib.Path, capsys, *more: str) -> str:
    before = sorted(path for path in out.parent.rglob("*"))
    assert make_index.main([str(folder), str(out), *more]) == 1
    assert sorted(path for path in out.parent.rglob("*")) == before  # nothing written, nothing left behind
    return capsys.readouterr().err


def test_a_folder_without_wheels_or_none_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert "expected wheels, found none" in refused(tmp_path / "empty", tmp_path / "out", capsys)
    assert "expected a folder of wheels" in refused(tmp_path / "none", tmp_path / "out", capsys)


def test_all_broken_wheels_are_named_at_once(wheels, tmp_path, capsys):
    (wheels / "prequal-2-py3-none-any.whl").write_text("no archive")
    (wheels / "prequal.whl").write_bytes((wheels / "prequal-1.0-py3-none-any.whl").read_bytes())
    make_wheel(wheels, version="3", members={"prequal/_build.json": None})
    make_wheel(wheels, version="4", members={"prequal-4.dist-info/METADATA": "Name: other\nVersion: 4\n"})
    said = refused(wheels, tmp_path / "out", capsys)
    assert "prequal-2-py3-none-any.whl: expected a readable wheel" in said
    assert "prequal.whl: expected a name like" in said
    assert "prequal-3-py3-none-any.whl: expected a member prequal/_build.json, found none" in said
    assert "prequal-4-py3-none-any.whl: the name says prequal 4, METADATA says other 4" in said


def test_a_name_that_is_there_twice_is_refused_unless_the_cuda_differs(wheels, tmp_path, capsys):
    make_wheel(wheels / "more", module=MODULE, toolkit="12.9")
    make_index.make_index(wheels, tmp_path / "fine")
    assert "twice" in refused(wheels, tmp_path / "out", capsys, "--base-url", "https://example.org")
    make_wheel(wheels / "more", module=MODULE, toolkit="13.0")
    name = "prequal-1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
    said = refused(wheels, tmp_path / "out", capsys)
    assert f"{name}: twice, as {wheels / 'more' / name} and {wheels / name}" in said


@pytest.mark.parametrize("url", ["example.org", "ftp://example.org", "https://"])
def test_a_base_url_that_is_none_is_refused(url, wheels, tmp_path, capsys):
    assert "--base-url: expected" in refused(wheels, tmp_path / "out", capsys, "--base-url", url)


def test_a_folder_that_is_no_index_is_never_replaced(wheels, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("the only copy")
    assert "it stays as it is" in refused(wheels, tmp_path / "out", capsys)
    assert "holds the wheels" in refused(wheels, wheels, capsys)
    assert "holds the wheels" in refused(wheels, tmp_path, capsys)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert "found something else" in refused(wheels, tmp_path / "link", capsys)


def test_an_index_is_replaced_whole_and_stays_when_the_new_one_fails(wheels, tmp_path, monkeypatch):
    out = tmp_path / "out"
    make_index.make_index(wheels, out)
    before = (out / "cu13/simple/prequal/index.html").read_bytes()

    def full(*arguments: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(make_index.shutil, "copyfile", full)
        with pytest.raises(OSError, match="no space left"):
            make_index.make_index(wheels, out)
    assert (out / "cu13/simple/prequal/index.html").read_bytes() == before

    for path in wheels.glob("*129cu*"):
        path.unlink()
    make_index.make_index(wheels, out)
    assert sorted(path.name for path in out.glob("c*")) == ["cpu", "cu13"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "wheels"]


# ---- real installers -------------------------------------------------------------------------------------------------


class Server(http.server.SimpleHTTPRequestHandler):
    """A static server. With `negotiate`, it answers the installers' first wish, which is JSON."""

    negotiate = False
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".metadata": "text/plain"}  # noqa: RUF012

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        json_file = pathlib.Path(self.translate_path(self.path)) / "index.json"
        if self.negotiate and json_file.is_file() and "application/vnd.pypi.simple.v1+json" in self.headers["Accept"]:
            data = json_file.read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        else:
            super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


class Negotiating(Server):
    negotiate = True


@pytest.fixture(params=[Server, Negotiating], ids=["html", "json"])
def served(request, tmp_path):
    """An index on loopback, and what was asked of it."""
    (tmp_path / "out").mkdir()
    handler = functools.partial(request.param, directory=str(tmp_path / "out"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = False  # closed before the test ends, with their sockets
        server.paths = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pip(python: str) -> list[str]:
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no pip")
    return [sys.executable, "-m", "pip", "--isolated", "--python", python, "install", "--no-cache-dir"]


def uv(python: str) -> list[str]:
    found = shutil.which("uv", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("no uv")
    return [found, "pip", "install", "--no-config", "--no-cache", "--python", python]


def clean_environment() -> dict[str, str]:
    """No settings of this machine's installers, and no proxy between them and loopback."""
    dropped = ("PIP_", "UV_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(dropped)}
    return {name: value for name, value in kept.items() if "proxy" not in name.lower()} | {"NO_PROXY": "127.0.0.1"}


def install(installer, served, tmp_path, index: str, *what: str) -> subprocess.CompletedProcess:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    url = f"http://127.0.0.1:{served.server_address[1]}/{index}/simple"
    command = [*installer(str(tmp_path / "venv" / "bin" / "python")), "--index-url", url, *what]
    return subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)


def hashed(tmp_path: pathlib.Path, digest: str, version: str = "1.1") -> list[str]:
    (tmp_path / "requirements.txt").write_text(f"prequal=={version} --hash=sha256:{digest}\n")
    return ["--no-deps", "--require-hashes", "-r", str(tmp_path / "requirements.txt")]


def version_in(tmp_path: pathlib.Path) -> str | None:
    found = [path.name for path in (tmp_path / "venv").glob("lib/python*/site-packages/prequal-*.dist-info")]
    return found[0].split("-")[1].removesuffix(".dist") if found else None


@pytest.fixture
def pure_wheels(tmp_path) -> pathlib.Path:
    """For any Python: wheels of two CUDA majors that installers of this machine will take."""
    folder = tmp_path / "wheels"
    for toolkit, version in (("12.9", "1.0"), ("13.0", "1.0"), ("13.0", "1.1")):
        cuda = {"toolkit": toolkit, "nvcc": f"{toolkit}.1", "minimum_driver": "580"}
        make_wheel(folder / toolkit, version=version, manifest={"cuda": cuda})
    return folder


@pytest.mark.parametrize("installer", [pip, uv])
def test_pip_and_uv_install_from_it_with_hashes_required(installer, served, pure_wheels, tmp_path):
    make_index.make_index(pure_wheels, tmp_path / "out")
    wheel = tmp_path / "out/cu13/files/prequal-1.1-py3-none-any.whl"
    ran = install(installer, served, tmp_path, "cu13", *hashed(tmp_path, sha256(wheel.read_bytes())))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert version_in(tmp_path) == "1.1"
    assert not [path for path in served.paths if "/cu12/" in path]  # an index of one CUDA never offers another's


@pytest.mark.parametrize("installer", [pip, uv])
def test_pip_and_uv_resolve_by_the_metadata_before_they_fetch_the_newest_wheel(
    installer, served, pure_wheels, tmp_path
):
    make_index.make_index(pure_wheels, tmp_path / "out")
    ran = install(installer, served, tmp_path, "cu13", "prequal")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert version_in(tmp_path) == "1.1"
    wheel = "/cu13/files/prequal-1.1-py3-none-any.whl"
    assert [path for path in served.paths if path.startswith("/cu13/files/")] == [f"{wheel}.metadata", wheel]


@pytest.mark.parametrize("installer", [pip, uv])
def test_pip_and_uv_refuse_a_wheel_that_is_not_the_one_of_the_hash(installer, served, pure_wheels, tmp_path):
    make_index.make_index(pure_wheels, tmp_path / "out")
    ran = install(installer, served, tmp_path, "cu13", *hashed(tmp_path, "0" * 64))
    assert ran.returncode != 0
    assert "hash" in (ran.stdout + ran.stderr).lower()
    assert version_in(tmp_path) is None


def test_pip_installs_the_wheel_that_was_built(served, tmp_path):
    name = os.environ.get("PREQUAL_TEST_WHEEL") or os.environ.get("PREQUAL_TEST_CPU_WHEEL")
    if not name:
        pytest.skip("no wheel: set PREQUAL_TEST_WHEEL, or run `nox -s tests` or `nox -s wheel`")
    wheel = pathlib.Path(name)
    if "-abi3-" in name and sys.version_info < (3, 12):
        pytest.skip("abi3 of 3.12 on an older Python")
    (tmp_path / "wheels").mkdir()
    shutil.copy(wheel, tmp_path / "wheels")
    (index,) = make_index.make_index(tmp_path / "wheels", tmp_path / "out")
    version = wheel.name.split("-")[1]
    ran = install(pip, served, tmp_path, index, *hashed(tmp_path, sha256(wheel.read_bytes()), version))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert version_in(tmp_path) == version
