"""Every check is a session: `nox -s tests`, `nox -s demo`, `nox -s lint`, `nox -s wheel`. CI calls the same ones."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "tests"]
ROOT = pathlib.Path(__file__).parent
PROJECT = nox.project.load_toml("pyproject.toml")
# A CPU build of torch is enough for every session here: TORCH=torch==2.9.1 picks another.
TORCH = os.environ.get("TORCH", "torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch>=2.7")


def group(name: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, name)


def commit_time(session: nox.Session) -> dict[str, str]:
    """The time of the commit that is built, for the files in the wheel; without git, the build backend's constant."""
    if "SOURCE_DATE_EPOCH" in os.environ or not (ROOT / ".git").exists():
        return {}
    out = session.run("git", "-C", str(ROOT), "log", "-1", "--format=%ct", external=True, silent=True)
    return {"SOURCE_DATE_EPOCH": str(out).strip()}


def build_wheel(
    session: nox.Session, folder: pathlib.Path, *, source: pathlib.Path = ROOT, without_cuda: bool = False
) -> pathlib.Path:
    """`pip wheel .` with build isolation, as a user would: nvcc comes from PyPI unless CUDACXX is set."""
    shutil.rmtree(folder, ignore_errors=True)
    env = commit_time(session) | ({"PREQUAL_WITH_CUDA": "OFF"} if without_cuda else {})
    session.run("python", "-m", "pip", "wheel", "--no-deps", "-w", str(folder), str(source), env=env)
    (wheel,) = folder.glob("prequal-*.whl")
    return wheel


@nox.session
def tests(session: nox.Session) -> None:
    """Build the wheel for this Python, install it, run every CPU test against what was installed."""
    session.install(TORCH)
    session.install(*group("test"), "cmake>=3.29", "ninja")
    folder = pathlib.Path(session.create_tmp()).resolve()
    wheel = build_wheel(session, folder / "dist")
    plain = build_wheel(session, folder / "dist-cpu", without_cuda=True)
    session.install(f"{wheel}[mesh,prometheus,otel]")
    session.chdir(ROOT / "tests")  # away from the sources: what is tested is what was installed
    env = {"PREQUAL_TEST_WHEEL": str(wheel), "PREQUAL_TEST_CPU_WHEEL": str(plain)}
    session.run("python", "-m", "pytest", *session.posargs, env=env)


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on a machine with nothing but Python: build, install, doctor, label a mesh, leave a picture."""
    out = ROOT / "build" / "demo"
    out.mkdir(parents=True, exist_ok=True)
    session.install(TORCH)
    wheel = build_wheel(session, pathlib.Path(session.create_tmp()).resolve() / "dist")
    session.install(f"{wheel}[mesh]")
    given = [str(pathlib.Path(word).resolve()) if os.path.exists(word) else word for word in session.posargs]
    session.chdir(out)
    session.run("python", "-m", "prequal", "doctor", success_codes=[0, 1])  # 1: the reference answers, as it must here
    session.run(
        "prequal", "transfer-labels", *(given or ["demo:knot"]), "--out", "labelled.ply", "--view", "picture.png"
    )
    session.log(f"look at {out / 'picture.png'}")


@nox.session
def wheel(session: nox.Session) -> None:
    """The wheel that is shipped: every architecture, Python 3.12 and later; then the packaging tests on it."""
    session.install("pytest>=8", "pytest-timeout", "cmake>=3.29", "ninja", "uv", *group("audit"))
    folder = ROOT / "dist"
    found = build_wheel(session, folder)
    session.run("python", "ci/audit_wheel.py", str(found), *session.posargs)  # `-- --update-budget` once it is meant
    session.run(
        "python",
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--noconftest",
        "-q",
        "tests/packaging",
        env={"PREQUAL_TEST_WHEEL": str(found)},
    )


@nox.session
def reproducible(session: nox.Session) -> None:
    """Build this commit twice, in two folders, and compare the wheels byte for byte."""
    folder = pathlib.Path(session.create_tmp()).resolve() / "reproducible"
    shutil.rmtree(folder, ignore_errors=True)
    wheels = []
    for name in ("a", "another/and a deeper/folder"):  # of another length, depth and with spaces
        source = folder / name / "prequal"
        session.run("git", "clone", "--quiet", "--no-tags", f"file://{ROOT}", str(source), external=True)
        wheels.append(build_wheel(session, folder / name / "dist", source=source))
    session.run("python", "ci/compare_wheels.py", *(str(wheel) for wheel in wheels))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy (strict on runtime/), clang-format; workflows by actionlint and zizmor; the build matrix."""
    session.install(TORCH)
    extras = PROJECT["project"]["optional-dependencies"]  # what their classes are derived from must be known to mypy
    session.install(*group("lint"), *extras["prometheus"], *extras["otel"], "numpy", "nvidia-ml-py")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    sources = [str(p) for folder in ("include", "src") for p in sorted((ROOT / folder).rglob("*")) if p.is_file()]
    session.run("clang-format", "--dry-run", "--Werror", *sources)
    session.run("python", "ci/matrix.py", "check")
    session.run("python", "ci/matrix.py", "docs", "--check")
    session.run("python", "docs/make_tables.py", "--check")  # prints the evidence that is stale, too
    # actionlint and zizmor, and that either finds what it is there for
    pytest = ("python", "-m", "pytest", "-q", "--noconftest", "-c", os.devnull)
    session.run(*pytest, "tests/packaging/test_workflows.py")
