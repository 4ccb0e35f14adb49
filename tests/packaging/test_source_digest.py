"""The digest that ties evidence to sources: it covers what an op's fast path is made of, and nothing of other ops."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent

SOURCES = {
    "include/prequal/tensor.h": "// tensor\n",
    "include/prequal/rows.cuh": '#include "prequal/tensor.h"\n',
    "src/binding.h": '#include "prequal/tensor.h"\n#include <vector>\n',
    "src/ops.h": '#include "prequal/tensor.h"\n',
    "src/module.cpp": '#include "ops.h"\n',
    "src/ops/norm.cu": '#include "ops.h"\n#include "prequal/rows.cuh"\n',
    "src/ops/norm_small.cu": '#include "norm_small.h"\n',
    "src/ops/norm_small.h": "// small\n",
    "src/ops/norm_cloud.cu": '#include "ops.h"\n',
    "src/ops/norm_cloud_more.cu": '#include "ops.h"\n',
    "src/ops/cloud.cu": '#include "ops.h"\n',
    "python/prequal/ops/__init__.py": "from .norm import norm\n",
    "python/prequal/ops/_rows.py": "FLOATS = 1\n",
    "python/prequal/ops/_more.py": "from ._rows import FLOATS\n",
    "python/prequal/ops/norm.py": "from ._more import FLOATS\n",
    "python/prequal/ops/cloud.py": "import torch\n",
    "python/prequal/ops/norm_cloud.py": "import torch\n",
}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("write_manifest", REPOSITORY / "cmake" / "write_manifest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digests(tool, tree: pathlib.Path) -> dict[str, str]:
    return {name: tool.digest(files, tree) for name, files in tool.op_sources(tree).items()}


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("include/prequal/tensor.h", {"norm", "cloud", "norm_cloud"}),
        ("include/prequal/rows.cuh", {"norm"}),
        ("src/binding.h", {"norm", "cloud", "norm_cloud"}),
        ("src/ops.h", set()),
        ("src/module.cpp", set()),
        ("src/ops/norm.cu", {"norm"}),
        ("src/ops/norm_small.cu", {"norm"}),
        ("src/ops/norm_small.h", {"norm"}),
        ("src/ops/cloud.cu", {"cloud"}),
        ("src/ops/norm_cloud.cu", {"norm_cloud"}),  # of two ops that both begin its name, the longer
        ("src/ops/norm_cloud_more.cu", {"norm_cloud"}),
        ("python/prequal/ops/__init__.py", set()),
        ("python/prequal/ops/_rows.py", {"norm"}),
        ("python/prequal/ops/_more.py", {"norm"}),
        ("python/prequal/ops/norm.py", {"norm"}),
    ],
)
def test_a_changed_file_makes_stale_whoever_is_made_of_it(tool, tree, file, changed):
    before = digests(tool, tree)
    (tree / file).write_text(SOURCES[file] + "// changed\n".replace("//", "#" if file.endswith(".py") else "//"))
    after = digests(tool, tree)
    assert {name for name in before if before[name] != after[name]} == changed


def test_another_op_makes_nobody_stale(tool, tree):
    before = digests(tool, tree)
    (tree / "src/ops/other.cu").write_text('#include "prequal/rows.cuh"\n')
    (tree / "python/prequal/ops/other.py").write_text("from ._rows import FLOATS\n")
    after = digests(tool, tree)
    assert after.pop("other")
    assert after == before


def test_the_digest_does_not_depend_on_where_the_sources_lie(tool, tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    tree.rename(elsewhere)
    link = tmp_path_factory.mktemp("link") / "to"
    link.symlink_to(elsewhere)
    assert digests(tool, elsewhere) == digests(tool, link)


def test_an_include_that_cannot_be_followed_is_an_error(tool, tree):
    (tree / "src/ops/norm.cu").write_text('#include "absent.h"\n')
    with pytest.raises(FileNotFoundError, match=r"absent\.h"):
        tool.op_sources(tree)
