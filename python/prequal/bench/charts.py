"""Charts of evidence: PNG and SVG, without a display. Colours are Okabe and Ito's, which stay apart for colour-blind
readers; every series also has a hatch or a marker of its own, so that nothing rests on colour alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .runner import floor_us

INK, GRID = "#222222", "#d9d9d9"
OURS = "#0072B2"
OTHERS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Record = Mapping[str, Any]


def _rows(record: Record) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if any("device_us" in x for x in row["by"].values())]


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ours first, the others in the order in which they first appear."""
    found = dict.fromkeys(name for row in rows for name, x in row["by"].items() if "device_us" in x)
    return sorted(found, key=lambda name: name != "prequal")


def _style(names: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    found, other = {}, 0
    for name in names:
        if name == "prequal":
            found[name] = (OURS, HATCHES[0], MARKERS[0])
        else:
            place = other % len(OTHERS)
            found[name] = (OTHERS[place], HATCHES[1 + place], MARKERS[1 + place])
            other += 1
    return found


def kind_of(name: str, figures: Mapping[str, Any]) -> str:
    """eager, compiled or peer; evidence from before `kind` was written is told by its names."""
    if "kind" in figures:
        return str(figures["kind"])
    if name.startswith("prequal"):
        return "prequal"
    return "compiled" if name == "torch.compile" else "eager" if name.startswith("torch") else "peer"


def speed_ups(row: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Times faster than eager, compiled and the best peer, and who that was."""
    ours = row["by"].get("prequal", {}).get("device_us")
    found: dict[str, tuple[float, str]] = {}
    if not ours or not ours["median"]:
        return found
    for name, figures in row["by"].items():
        kind = kind_of(name, figures)
        if kind == "prequal" or "device_us" not in figures:
            continue
        ratio = figures["device_us"]["median"] / ours["median"]
        if kind not in found or ratio < found[kind][0]:
            found[kind] = (ratio, name)
    return found


# ---- drawing ------------------------------------------------------------------------------------------


def _figure(width: float, height: float, title: str, subtitle: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.suptitle(title, fontsize=13, fontweight="bold", color=INK, x=0.01, ha="left")
    axes.set_title(subtitle, fontsize=9, color="#555555", loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _subtitle(record: Record) -> str:
    return f"{record['gpu']}; {record['command']}"


def _bars(
    record: Record,
    title: str,
    label: str,
    value: Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[float, float, float] | None],
    text: Callable[[float, Mapping[str, Any]], str],
    log: bool = False,
) -> Any:
    """A group of bars a case, a bar an implementation; value(row, figures) is low, middle, high, or None for no bar."""
    rows = _rows(record)
    names = [n for n in _names(rows) if any(n in r["by"] and value(r, r["by"][n]) is not None for r in rows)]
    if not names:
        return None
    styles = _style(_names(rows))
    bars = sum(1 for row in rows for name in names if name in row["by"] and value(row, row["by"][name]) is not None)
    spans = [found for row in rows for name in names if (found := value(row, row["by"].get(name, {}))) is not None]
    highest, lowest = max(high for _, _, high in spans), min(low for low, _, _ in spans)
    # a logarithmic axis has no zero for a bar to grow from: its length would mean nothing
    dots = log and lowest > 0 and highest / lowest > 30
    figure, axes = _figure(10, 1.6 + 0.26 * bars + 0.22 * len(rows), title, _subtitle(record))
    at, ticks = 0.0, []
    seen: set[str] = set()
    for row in rows:
        first = at
        for name in names:
            found = value(row, row["by"][name]) if name in row["by"] else None
            if found is None:
                continue
            low, middle, high = found
            colour, hatch, marker = styles[name]
            style = {"color": colour, "edgecolor": "white", "label": None if name in seen else name}
            if dots:
                axes.scatter(middle, at, s=56, marker=marker, linewidth=0.6, zorder=3, **style)
            else:
                axes.barh(at, middle, 0.86, hatch=hatch, linewidth=0.5, **style)
            if (low, high) != (middle, middle):
                axes.errorbar(
                    middle,
                    at,
                    xerr=[[middle - low], [high - middle]],
                    fmt="none",
                    ecolor=INK,
                    capsize=4,
                    lw=1.2,
                    zorder=4,
                )
            axes.annotate(
                text(middle, row["by"][name]),
                (high, at),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
            )
            seen.add(name)
            at += 1
        if at > first:
            ticks.append(((first + at - 1) / 2, row["case"]))
            at += 0.7
    axes.set_yticks([place for place, _ in ticks], [_wrapped(name) for _, name in ticks])
    axes.set_ylim(at - 0.2, -0.9)
    axes.set_xlabel(label, color=INK)
    axes.grid(axis="x", color=GRID, lw=0.6)
    axes.set_axisbelow(True)
    if dots:
        axes.set_xscale("log")
        axes.set_xlim(lowest / 2, highest * 2.5)
    else:
        axes.set_xlim(0, highest * 1.18 or 1)
    figure.legend(loc="outside lower left", fontsize=9, frameon=False, ncols=min(4, len(names)))
    return figure


def _wrapped(name: str, width: int = 30) -> str:
    lines = [""]
    for word in name.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def latency(record: Record) -> Any:
    def value(row: Mapping[str, Any], figures: Mapping[str, Any]) -> tuple[float, float, float] | None:
        spread = figures.get("device_us")
        return None if spread is None else (spread["q1"], spread["median"], spread["q3"])

    def text(middle: float, figures: Mapping[str, Any]) -> str:
        return _time(middle) + ("  noisy" if figures.get("noisy") else "")

    label = "device time, µs: median, whiskers from the first to the third quartile"
    return _bars(record, f"{record['basename']}: latency, shorter is better", label, value, text, log=True)


def ceiling(record: Record) -> Any:
    def value(row: Mapping[str, Any], figures: Mapping[str, Any]) -> tuple[float, float, float] | None:
        floor = floor_us(row, record["ceilings"])
        spread = figures.get("device_us")
        if floor is None or spread is None or not spread["median"]:
            return None
        share = 100 * floor / spread["median"]
        return share, share, share

    title = f"{record['basename']}: share of the ceiling, longer is better"
    label = f"% of it reached: the declared bytes at {record['ceilings'].get('copy_TB_s')} TB/s, copied in this run"
    figure = _bars(record, title, label, value, lambda middle, figures: f"{middle:.0f} %")
    if figure is not None:
        figure.axes[0].axvline(100, color=INK, lw=1.2)
    return figure


def memory(record: Record) -> Any:
    def value(row: Mapping[str, Any], figures: Mapping[str, Any]) -> tuple[float, float, float] | None:
        peak = figures.get("peak_bytes")
        return None if peak is None else (peak / 2**20, peak / 2**20, peak / 2**20)

    title = f"{record['basename']}: peak memory, shorter is better"
    label = "MiB allocated beyond the arguments, outputs included"
    return _bars(record, title, label, value, lambda middle, figures: f"{middle:,.1f}", log=True)


def speed_up(record: Record) -> Any:
    rows = [(row, found) for row in _rows(record) if (found := speed_ups(row))]
    if not rows:
        return None
    kinds = [kind for kind in ("eager", "compiled", "peer") if any(kind in found for _, found in rows)]
    figure, axes = _figure(10, 1.8 + 0.5 * len(rows), f"{record['basename']}: times faster than", _subtitle(record))
    _ratios(axes, [(row["case"], found) for row, found in rows], kinds)
    figure.legend(loc="outside lower left", fontsize=9, frameon=False, ncols=4)
    return figure


KIND_NAMES = {"eager": "eager", "compiled": "torch.compile", "peer": "the best installed peer"}


def _ratios(axes: Any, rows: Sequence[tuple[str, Mapping[str, tuple[float, str]]]], kinds: Sequence[str]) -> None:
    """Dots on a logarithmic line; what lies left of 1 is a loss and is marked so."""
    highest, lowest = 1.0, 1.0
    for place, kind in enumerate(kinds):
        look = list(KIND_NAMES).index(kind)
        points = [(found[kind][0], y) for y, (_, found) in enumerate(rows) if kind in found]
        offset = 0.2 * (place - (len(kinds) - 1) / 2)
        axes.scatter(
            [x for x, _ in points],
            [y + offset for _, y in points],
            s=52,
            color=OTHERS[look],
            marker=MARKERS[1 + look],
            edgecolor="white",
            lw=0.6,
            label=KIND_NAMES[kind],
            zorder=3,
        )
        for x, y in points:
            text = f"{x:.2f}×" if x < 10 else f"{x:,.0f}×"
            axes.annotate(
                text if x >= 1 else f"{text}: slower",
                (x, y + offset),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
                fontweight="bold" if x < 1 else "normal",
            )
            highest, lowest = max(highest, x), min(lowest, x)
    axes.axvline(1, color=INK, lw=1.2)
    axes.axvspan(lowest / 2, 1, color="#f3f3f3", zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(min(0.7, lowest / 1.4), highest * 1.7)
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    shown = [t for t in ticks if axes.get_xlim()[0] <= t <= axes.get_xlim()[1]]
    axes.set_xticks(shown, [f"{t:g}×" for t in shown])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [_wrapped(name, 34) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("their device time over ours; left of the line prequal is the slower one", color=INK)
    axes.grid(axis="x", color=GRID, lw=0.6)
    axes.set_axisbelow(True)


def growth(record: Record) -> Any:
    """Time against size, log-log: a line an implementation and series. Where the list of cases names no series, points
    over the bytes that each case declares, an op a series, beside what these take at the rate of a copy."""
    rows = [row for row in _rows(record) if row.get("series")]
    by_bytes = not rows
    if by_bytes:
        rows = [
            {**row, "series": str(row.get("op", record["basename"])), "size": row["bytes"]}
            for row in _rows(record)
            if row.get("bytes")
        ]
    lines: dict[tuple[str, str], list[tuple[float, Mapping[str, float]]]] = {}
    for row in rows:
        for name, figures in row["by"].items():
            if "device_us" in figures:
                lines.setdefault((row["series"], name), []).append((row["size"], figures["device_us"]))
    if by_bytes:  # an op that was measured at one size says nothing of growth
        lines = {key: points for key, points in lines.items() if len({size for size, _ in points}) > 1}
    if not any(len(points) > 1 for points in lines.values()):
        return None
    figure, axes = _figure(8, 5, f"{record['basename']}: time against size", _subtitle(record))
    styles = _style(_names(rows))
    many = len({series for series, _ in lines}) > 1
    looks = dict.fromkeys(series for series, _ in lines)
    dashes = dict(zip(looks, ("-", "--", ":", "-."), strict=False))
    fills = dict(zip(looks, ("full", "none", "left", "bottom", "right", "top"), strict=False))
    for (series, name), points in lines.items():
        points.sort(key=lambda point: point[0])
        colour, _, marker = styles[name]
        xs, middles = [x for x, _ in points], [spread["median"] for _, spread in points]
        errors = [[y["median"] - y["q1"] for _, y in points], [y["q3"] - y["median"] for _, y in points]]
        axes.errorbar(
            xs,
            middles,
            yerr=errors,
            color=colour,
            marker=marker,
            fillstyle=fills.get(series, "full") if by_bytes else "full",
            ms=6,
            lw=1.8,
            ls="none" if by_bytes else dashes.get(series, "-"),
            capsize=3,
            label=f"{name}, {series}" if many else name,
        )
    rate = record["ceilings"].get("copy_TB_s")
    if by_bytes and rate:
        ends = [f({x for points in lines.values() for x, _ in points}) for f in (min, max)]
        axes.plot(
            ends, [x / rate / 1e6 for x in ends], color=INK, lw=1, ls=":", label="these bytes at the rate of a copy"
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    size = "bytes that a call cannot do without" if by_bytes else "size"
    axes.set_xlabel(size if many or by_bytes else f"size ({next(iter(lines))[0]})", color=INK)
    axes.set_ylabel("device time, µs", color=INK)
    axes.grid(which="major", color=GRID, lw=0.6)
    figure.legend(loc="outside lower left", fontsize=9, frameon=False, ncols=2 if many else 3)
    return figure


def scorecard(records: Sequence[Record]) -> Any:
    """Every op on one page: the geometric mean over its cases against each kind of other, the worst case beside."""
    rows = []
    for record in records:
        ratios: dict[str, dict[str, list[float]]] = {}
        for row in _rows(record):
            for kind, (ratio, _) in speed_ups(row).items():
                ratios.setdefault(str(row.get("op", record["basename"])), {}).setdefault(kind, []).append(ratio)
        for op, found in ratios.items():
            means = {k: (math.exp(sum(map(math.log, v)) / len(v)), "") for k, v in found.items()}
            worst = min(min(v) for v in found.values())
            rows.append((f"{op} (worst case {worst:.2f}×)", means))
    if not rows:
        return None
    kinds = [kind for kind in ("eager", "compiled", "peer") if any(kind in found for _, found in rows)]
    gpus = ", ".join(dict.fromkeys(record["gpu"] for record in records))
    title = "prequal: times faster, geometric mean over the cases of each op"
    figure, axes = _figure(10, 2.0 + 0.6 * len(rows), title, gpus)
    _ratios(axes, rows, kinds)
    figure.legend(loc="outside lower left", fontsize=9, frameon=False, ncols=4)
    return figure


def ablation(report: Mapping[str, Any]) -> Any:
    rows = report["rows"]
    if not rows:
        return None
    colours = {"adopted": OURS, "neutral": "#999999", "rejected": "#D55E00"}
    markers = {"adopted": "o", "neutral": "s", "rejected": "X"}
    subtitle = f"{report['workload']}; {report['rounds']} interleaved rounds; {report['rule']}"
    figure, axes = _figure(10, 1.8 + 0.42 * len(rows), "What each op is worth here", subtitle)
    seen: set[str] = set()
    for y, row in enumerate(rows):
        low, middle, high = row["percent"]
        verdict = row["verdict"]
        axes.errorbar(
            middle,
            y,
            xerr=[[middle - low], [high - middle]],
            color=colours[verdict],
            marker=markers[verdict],
            ms=8,
            capsize=4,
            lw=1.8,
            ls="none",
            label=None if verdict in seen else verdict,
        )
        seen.add(verdict)
    axes.axvline(0, color=INK, lw=1.2)
    axes.set_yticks(range(len(rows)), [row["op"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("% of the iteration's time with the op off that it saves", color=INK)
    axes.grid(axis="x", color=GRID, lw=0.6)
    figure.legend(loc="outside lower left", fontsize=9, frameon=False, ncols=3)
    return figure


def _time(us: float) -> str:
    return f"{us / 1000:,.2f} ms" if us >= 1000 else f"{us:.0f} µs" if us >= 100 else f"{us:.1f} µs"


# ---- files --------------------------------------------------------------------------------------------


def save(figure: Any, stem: Path) -> Iterator[Path]:
    """PNG and SVG; the same evidence gives the same bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "prequal", "svg.fonttype": "path"}):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
            path = stem.with_name(stem.name + suffix)
            figure.savefig(path, dpi=130, metadata=metadata)
            yield path


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Every chart that these records have the numbers for."""
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    charts = {"latency": latency, "speedup": speed_up, "ceiling": ceiling, "memory": memory, "growth": growth}
    for record in records:
        for name, make in charts.items():
            if (figure := make(record)) is not None:
                made += save(figure, folder / f"{record['basename']}.{name}")
    if (figure := scorecard(records)) is not None:
        made += save(figure, folder / "scorecard")
    return made
