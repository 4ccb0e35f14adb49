"""examples/text_search.py in its quick form: right before timed, and what it writes."""

from __future__ import annotations

import json
import re

import pytest
import torch

import prequal

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from PIL import Image

PROGRAM = "text_search"
SMALL = ["--quick", "--device", "cpu", "--rounds", "1", "--runs", "1", "--queries", "20"]


@pytest.fixture
def few_texts(program, monkeypatch, tmp_path):
    """A library of one file, beside this package."""
    (tmp_path / "made.py").write_text(
        '"""A text of four words."""\nclass Made:\n    """Another text of five words."""\n'
    )
    monkeypatch.setattr(program.sysconfig, "get_path", lambda name: str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_quick_form_compares_times_and_writes(program, few_texts, dtype, tmp_path, capsys):
    files = ["--json", str(tmp_path / "search.json"), "--plot", str(tmp_path / "search.png")]
    assert program.main([*SMALL, "--dtype", dtype, *files]) == 0
    said = capsys.readouterr().out
    assert "20 texts looked for by some of their words" in said
    result = json.loads((tmp_path / "search.json").read_text())
    assert list(result["answers"]) == list(result["times"]) == list(program.VARIANTS)
    assert all(row["wrong"] == [] for row in result["answers"].values())
    assert all(row["device_us"]["median"] > 0 for row in result["times"].values())
    for name in ("cosine_topk", "index", "rerank"):
        assert result["answers"][name]["largest_error"] <= result["answers"][name]["bound"]
    assert set(result["paths"]) == (
        {"row_norms", "topk_rows_"} if dtype == "float32" else {"topk_products"}
    )  # 20 queries
    assert all(len(rows) == 3 for rows in result["answered"].values())
    shares = [row["among k"] for row in result["found_itself"].values()]
    assert shares[-1] > shares[0]
    with Image.open(tmp_path / "search.png") as picture:
        assert picture.size[0] > 1000


def test_texts_are_read_and_not_run(program, few_texts, tmp_path):
    (tmp_path / "broken.py").write_text("this is no Python")
    (tmp_path / "loud.py").write_text('"""Three words only."""\nraise SystemExit\n')
    names, texts = program.texts(quick=True)
    assert {"made", "made.Made"} <= set(names)
    assert "prequal.api.explain" in names
    assert not {"broken", "loud"} & set(names)
    assert len(set(texts)) == len(texts) == len(names)


def test_a_text_finds_itself_by_all_of_its_words(program):
    corpus = ["red green blue yellow", "one two three four", "north south east west"]
    vectors = program.Vectors(corpus, 256)
    _, idx = prequal.cosine_topk(vectors.of([text.upper() for text in corpus]), vectors.corpus, 1)
    assert idx.flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("wrong", ["scores", "rows", "order"])
def test_a_wrong_search_is_told_and_not_timed(program, few_texts, monkeypatch, tmp_path, capsys, wrong):
    right = prequal.cosine_topk

    def search(queries, corpus, k, **named):
        scores, idx = right(queries, corpus, k, **named)
        if wrong == "scores":
            return scores + 1e-3, idx
        if wrong == "order":
            return scores.flip(1), idx.flip(1)
        others = right(queries, corpus, 100)
        return others[0][:, -k:], others[1][:, -k:]

    monkeypatch.setattr(prequal, "cosine_topk", search)
    out = tmp_path / "search.json"
    assert program.main([*SMALL, "--json", str(out)]) == 1
    said = capsys.readouterr().out
    assert re.search(
        {"scores": "WRONG scores: off by", "rows": "WRONG rows: a better", "order": "not in desc"}[wrong], said
    )
    assert "FAILED: cosine_topk" in said
    assert "cosine_topk" not in json.loads(out.read_text())["times"]


def test_nan_is_wrong(program):
    exact = torch.tensor([[0.5, 0.4, 0.3]], dtype=torch.float64)
    idx = torch.tensor([[0, 1]])
    assert program.judged((exact[:, :2].float(), idx), exact, 8)["wrong"] == []
    assert program.judged((torch.full((1, 2), torch.nan), idx), exact, 8)["wrong"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--k", "0"], "--k: expected 1 to 128, got 0"),
        (["--width", "0"], "--width: expected at least 1, got 0"),
        (["--device", "tpu"], "--device: expected cuda or cpu, got 'tpu'"),
    ],
)
def test_wrong_use_is_told(program, given, message, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main([*SMALL, *given])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_kernel_answers(program, few_texts, dtype, tmp_path):
    out = tmp_path / "search.json"
    given = ["--quick", "--device", "cuda", "--rounds", "1", "--runs", "2", "--dtype", dtype, "--json", str(out)]
    assert program.main(given) == 0
    assert set(json.loads(out.read_text())["paths"].values()) == {"fast"}
