"""Charts are drawn from evidence, without a display, the same bytes each time."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from making_evidence import record, row

pytest.importorskip("matplotlib")

from PIL import Image

from prequal.bench import charts


def grown(size: int, ours: float):
    return row(f"[{size}]", ours, torch_eager=2 * ours) | {"series": "width 4096", "size": size}


ROWS = [
    row("wide", 70.0, torch_eager=120.0, torch_compile=90.0, liger_kernel=60.0),
    *(grown(64, 3.0), grown(1024, 6.0), grown(16384, 70.0)),
]


def test_every_chart_is_a_png_and_an_svg(tmp_path):
    made = charts.draw([record(ROWS)], tmp_path)
    names = {"rms_norm.latency", "rms_norm.speedup", "rms_norm.ceiling", "rms_norm.memory", "rms_norm.growth"}
    assert {path.name for path in made} == {f"{n}{s}" for n in {*names, "scorecard"} for s in (".png", ".svg")}
    for path in made:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert image.width > 600
                assert len(image.convert("RGB").getcolors(1 << 24)) > 10
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_time_grows_over_declared_bytes_where_no_series_is_named():
    def sized(case: str, us: float, size: int, op: str = "rms_norm"):
        return row(case, us, torch_eager=2 * us) | {"bytes": size, "op": op}

    rows = [sized("a", 3.0, 1 << 20), sized("b", 70.0, 1 << 28), sized("c", 90.0, 1 << 28, "rms_norm_backward")]
    (axes,) = charts.growth(record(rows)).axes
    assert axes.get_xlabel() == "bytes that a call cannot do without"
    told = {text.get_text() for legend in axes.figure.legends for text in legend.get_texts()}
    assert told == {"prequal", "torch eager", "these bytes at the rate of a copy"}  # the gradient has one size only
    floor = next(line for line in axes.get_lines() if line.get_label().startswith("these bytes"))
    assert floor.get_ydata()[1] == pytest.approx((1 << 28) / 4.25e6)
    assert charts.growth(record(rows[1:])) is None


def test_the_same_evidence_gives_the_same_bytes(tmp_path):
    first = charts.draw([record(ROWS)], tmp_path / "a")
    second = charts.draw([record(ROWS)], tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_evidence_without_the_numbers_of_a_chart_makes_none(tmp_path):
    bare = row("a")
    for figures in bare["by"].values():
        del figures["peak_bytes"]
    made = charts.draw([record([bare | {"bytes": None}])], tmp_path)
    assert {path.name for path in made} == {"rms_norm.latency.png", "rms_norm.latency.svg"}
    assert charts.draw([record([])], tmp_path) == []


def test_speed_up_is_over_the_fastest_of_each_kind():
    found = charts.speed_ups(row("a", 50.0, torch_eager=100.0, liger_kernel=75.0, quack=40.0))
    assert found == {"eager": (2.0, "torch eager"), "peer": (0.8, "quack")}


def test_rows_from_before_kinds_were_written_are_told_by_name():
    names = ("prequal k=8", "torch.cdist + argmin", "torch.compile", "liger_kernel")
    assert [charts.kind_of(name, {}) for name in names] == ["prequal", "eager", "compiled", "peer"]


def test_no_two_series_share_colour_hatch_or_marker():
    styles = charts._style(["prequal", "torch eager", "torch.compile", "a", "b", "c", "d", "e"])
    for part in range(3):
        assert len({style[part] for style in styles.values()}) == len(styles)


def test_matplotlib_is_imported_only_to_draw():
    code = (
        "import sys, prequal; assert not [m for m in sys.modules if m.startswith('prequal.bench')];"
        "from prequal.cli import bench, ablate; import prequal.bench.charts, prequal.bench.runner;"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
