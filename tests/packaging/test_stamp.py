"""Which lanes of GPU tests speak for a record of times."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def stamp():
    spec = importlib.util.spec_from_file_location("stamp", REPOSITORY / "benchmarks" / "stamp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lane(*, only=None, failed=(), gpu="H200", **digests):
    outcome = "failed" if failed else "passed"
    return {"outcome": outcome, "only": only, "failed": list(failed), "gpu": gpu, "digests": digests}


KNN = {"basename": "knn", "source_digest": "1", "gpu": "H200"}
ROPE = {"basename": "rope", "source_digest": "1", "gpu": "H200"}


def test_a_whole_lane_on_the_records_sources_speaks(stamp):
    assert stamp.outcome([lane(knn="1")], KNN) == "passed"
    assert stamp.outcome([lane(knn="1", failed=["test_registry.py::test_x"])], KNN) == "failed"


@pytest.mark.parametrize("other", [{"knn": "2"}, {}, {"knn": "1", "gpu": "A100"}])
def test_another_digest_or_gpu_is_refused(stamp, other):
    with pytest.raises(ValueError, match="knn: of other sources or another GPU"):
        stamp.outcome([lane(**other)], KNN)


def test_what_failed_counts_until_it_has_run_again(stamp):
    first = lane(knn="1", rope="0", failed=["ops/test_rope.py::test_x", "test_registry.py::test_y"])
    again = lane(knn="1", rope="1", only=["rope", "registry", "losses"])
    assert stamp.outcome([first, again], KNN) == "passed"
    assert stamp.outcome([first, again], ROPE) == "passed"
    assert stamp.outcome([first, lane(knn="1", rope="1", only=["rope"])], KNN) == "failed"


@pytest.mark.parametrize(
    ("test", "against"),
    [
        ("ops/test_rope.py::test_x[cuda]", {"rope"}),
        ("test_every_op.py::test_two_runs_give_the_same_bits[rope_-quick]", {"rope"}),
        ("test_every_op.py::test_vmap[cuda-rms_norm_backward]", {"rms_norm"}),
        ("test_every_op.py::test_vmap[cuda-rms_norm_quantize_fp8]", {"rms_norm_quantize_fp8"}),
        ("test_every_op.py::test_vmap[cuda-radius]", {"rope", "rms_norm", "rms_norm_quantize_fp8", "topk_rows"}),
        ("test_registry.py::test_x", {"rope", "rms_norm", "rms_norm_quantize_fp8", "topk_rows"}),
        ("retrieval/test_text_search.py::test_x[float32]", {"topk_rows"}),
    ],
)
def test_what_failed_counts_against_the_op_that_it_names_and_else_against_all(stamp, test, against):
    digests = {"rope": "1", "rms_norm": "1", "rms_norm_quantize_fp8": "1", "topk_rows": "1"}
    for name in digests:
        record = {"basename": name, "source_digest": "1", "gpu": "H200"}
        assert stamp.outcome([lane(failed=[test], **digests)], record) == ("failed" if name in against else "passed")


def test_the_last_lane_that_ran_the_ops_tests_speaks(stamp):
    again = lane(knn="1", rope="1", only=["rope"])
    assert stamp.outcome([lane(knn="1", rope="0"), again], ROPE) == "passed"
    with pytest.raises(ValueError, match="rope: of other sources"):
        stamp.outcome([lane(knn="1", rope="0"), lane(knn="1", rope="1", only=["knn"])], ROPE)
    with pytest.raises(ValueError, match="no lane ran the tests of rope"):
        stamp.outcome([lane(knn="1", rope="1", only=["knn"])], ROPE)


def test_a_lane_that_ended_without_naming_a_test_is_refused(stamp):
    with pytest.raises(ValueError, match="names no test that failed"):
        stamp.outcome([{**lane(knn="1"), "outcome": "failed"}], KNN)


def test_the_outcome_is_written_into_the_record(stamp, tmp_path, capsys):
    (tmp_path / "lane.json").write_text(json.dumps(lane(knn="1")))
    (tmp_path / "knn.json").write_text(json.dumps({**KNN, "gpu_tests": "not run"}))
    words = ["--lane", str(tmp_path / "lane.json"), str(tmp_path / "knn.json")]
    assert stamp.main(words) == 0
    assert json.loads((tmp_path / "knn.json").read_text()) == {**KNN, "gpu_tests": "passed"}
    (tmp_path / "knn.json").write_text(json.dumps({**KNN, "source_digest": "2"}))
    with pytest.raises(SystemExit):
        stamp.main(words)
    assert "knn: of other sources" in capsys.readouterr().err
