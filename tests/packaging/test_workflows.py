"""The workflows: thin, with the least rights, every action pinned, a release all or nothing; and what linters say.

Run by `nox -s lint`, which installs PyYAML, actionlint and zizmor; elsewhere what needs them is skipped.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: nox -s lint")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
FOLDER = REPOSITORY / ".github" / "workflows"
NAMES = sorted(path.name for path in FOLDER.glob("*.yml"))


def load(name: str) -> dict:
    data = yaml.safe_load((FOLDER / name).read_text())
    data["on"] = data.pop(True)  # YAML 1.1 reads `on` as a truth value
    return data


def steps(name: str) -> list[dict]:
    return [step for job in load(name)["jobs"].values() for step in job.get("steps", ())]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: nox -s lint")
    return found


def linted(tool: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    files = [str(path) for path in sorted(folder.glob("*.yml"))]
    options = {"actionlint": [], "zizmor": ["--offline", "--no-progress", "--persona=pedantic"]}[tool]
    return subprocess.run([program(tool), *options, *files], capture_output=True, text=True, check=False, cwd=folder)


def test_these_are_the_workflows():
    assert NAMES == ["checks.yml", "docs.yml", "gpu.yml", "release.yml", "wheels.yml"]


@pytest.mark.parametrize("tool", ["actionlint", "zizmor"])
def test_the_linter_finds_nothing(tool):
    out = linted(tool, FOLDER)
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.parametrize(
    ("tool", "before", "after", "said"),
    [
        ("actionlint", "needs: plan", "needs: plam", "plam"),
        ("actionlint", "${{ matrix.runner }}", "${{ matrix.runner", "expression"),
        (
            "zizmor",
            "actions/checkout@9c091bb21b7c1c1d1991bb908d89e4e9dddfe3e0 # v7.0.0",
            "actions/checkout@v7",
            "unpinned-uses",
        ),
        ("zizmor", "permissions: {}", "permissions: write-all", "excessive-permissions"),
        ("zizmor", 'ci/build_wheels.sh "$CELL"', "ci/build_wheels.sh ${{ github.head_ref }}", "template-injection"),
    ],
)
def test_a_broken_workflow_is_found(tool, before, after, said, tmp_path):
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    text = (FOLDER / "wheels.yml").read_text()
    assert before in text
    (folder / "wheels.yml").write_text(text.replace(before, after, 1))
    out = linted(tool, folder)
    assert out.returncode != 0
    assert said in out.stdout + out.stderr


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_allowed_that_no_job_asks_for(name):
    workflow = load(name)
    assert workflow["permissions"] == {}
    for title, job in workflow["jobs"].items():
        rights = job["permissions"]
        assert set(rights.values()) <= {"read", "write"}, title
        writes = {right for right, level in rights.items() if level == "write"}
        allowed = {
            ("release.yml", "draft"): {"contents", "id-token", "attestations"},
            ("release.yml", "index"): {"id-token"},
            ("release.yml", "publish"): {"contents"},
            ("release.yml", "site"): {"pages", "id-token"},
            ("docs.yml", "site"): {"pages", "id-token"},
        }
        assert writes == allowed.get((name, title), set()), title


@pytest.mark.parametrize("name", NAMES)
def test_runs_do_not_pile_up_and_every_job_ends(name):
    workflow = load(name)
    assert "group" in workflow["concurrency"]
    for title, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 120, title


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_pinned_by_a_commit_and_named_by_a_version(name):
    for line in (FOLDER / name).read_text().splitlines():
        if used := re.match(r"\s*(?:- )?uses: (\S+)(.*)$", line):
            own = used[1].startswith("$/.github/workflows/")
            assert own or (
                re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", used[1]) and re.fullmatch(r" # v\d+\.\d+\.\d+", used[2])
            ), line


def test_one_action_has_one_pin():
    pins: dict[str, set[str]] = {}
    for name in NAMES:
        for action, pin in re.findall(r"uses: ([\w./-]+)@(\S+ # \S+)", (FOLDER / name).read_text()):
            pins.setdefault(action, set()).add(pin)
    assert not {action: found for action, found in pins.items() if len(found) > 1}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_one_command_of_the_repository(name):
    """What a workflow does, a laptop can do: the logic lies in ci/ and nox, and a step calls it."""
    for step in steps(name):
        if command := step.get("run"):
            assert "\n" not in command.strip(), command
            assert re.search(
                r"(^|\()(python3 ci/\w+\.py|ci/\w+\.sh|bash \.ci/run|nox|sudo apt-get install)\b", command
            ), command
            assert "${{" not in command, command


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_secret_but_the_token_of_the_run(name):
    text = (FOLDER / name).read_text()
    assert "secrets." not in text
    assert "secrets:" not in text
    assert not re.search(r"(?i)password|api[-_]?token|user(name)?:", text)
    for step in steps(name):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_strangers_code_never_runs_on_the_projects_machines():
    workflow = load("gpu.yml")
    assert set(workflow["on"]) <= {"workflow_dispatch", "schedule"}
    assert workflow["jobs"]["lane"]["runs-on"] == "${{ matrix.labels }}"
    for name in NAMES:
        assert "pull_request_target" not in load(name)["on"]
        assert name == "gpu.yml" or "self-hosted" not in (FOLDER / name).read_text()


def test_a_release_is_all_or_nothing():
    jobs = load("release.yml")["jobs"]
    order = ["tag", "wheels", "draft", "index", "publish", "site"]
    assert list(jobs) == order
    assert [jobs[name].get("needs") for name in order] == [None, *order[:-1]]
    assert not [job for job in jobs.values() if "if" in job or job.get("continue-on-error")]

    def commands(name: str) -> list[str]:
        return [step.get("run") or step["uses"].partition("@")[0] for step in jobs[name]["steps"]][1:]

    dist = "actions/download-artifact"
    assert commands("draft") == [
        *(dist, "ci/release.sh gate dist", "actions/attest", 'ci/release.sh draft "$GITHUB_REF_NAME" dist'),
    ]
    assert commands("index") == [
        *(dist, "ci/release.sh gate dist", "ci/release.sh index-files dist upload", "pypa/gh-action-pypi-publish"),
    ]
    publish = jobs["index"]["steps"][-1]["with"]
    assert publish["attestations"] is True
    assert not {"user", "password"} & set(publish)
    assert commands("publish") == ['ci/release.sh publish "$GITHUB_REF_NAME"']


def test_a_released_wheel_comes_from_the_same_workflow_as_a_tried_one():
    assert load("release.yml")["jobs"]["wheels"]["uses"] == "$/.github/workflows/wheels.yml"
    assert {"pull_request", "push", "workflow_call"} <= set(load("wheels.yml")["on"])


def test_cells_and_runners_come_from_the_matrix():
    assert load("wheels.yml")["jobs"]["build"]["strategy"]["matrix"] == "${{ fromJSON(needs.plan.outputs.cells) }}"
    assert load("gpu.yml")["jobs"]["lane"]["strategy"]["matrix"] == "${{ fromJSON(needs.wheel.outputs.runners) }}"
    text = "".join((FOLDER / name).read_text() for name in NAMES)
    assert not re.search(r"\bcu\d|\bsm_\d|cp3\d\d|quay\.io", text)
