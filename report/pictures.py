"""Pictures: charts as SVG files, as MLflow and `antiphon plan` keep them. Equal charts give equal files."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from antiphon.report.charts import PALETTE, Bars, Chart, Lanes, Panel, Series

WIDE_IN, SMALL_IN = 9.6, 3.4
LANE_IN = 0.34
PIXELS_IN_AN_INCH = 90.0
SETTINGS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "text.parse_math": False,
    "font.size": 8.5,
    "text.color": PALETTE["ink"],
    "axes.edgecolor": PALETTE["grid"],
    "axes.labelcolor": PALETTE["muted"],
    "axes.titlecolor": PALETTE["muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "xtick.color": PALETTE["muted"],
    "ytick.color": PALETTE["muted"],
    "grid.color": PALETTE["grid"],
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


def pictures(charts: Iterable[Chart | None]) -> dict[str, str]:
    """Return each chart as an SVG file: name of the file -> its text."""
    return {f"{chart.name}.svg": picture(chart) for chart in charts if chart is not None}


def picture(chart: Chart) -> str:
    """Draw one chart as an SVG file."""
    width = SMALL_IN if chart.small else WIDE_IN
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": chart.name}):
        figure = Figure(layout="constrained")
        match chart.drawn:
            case Lanes() as lanes:
                height = 0.7 + LANE_IN * sum(lane.height for lane in lanes.lanes)
                _draw_lanes(figure.subplots(), lanes)
            case Bars() as bars:
                height = 1.0 + 0.42 * len(bars.rows)
                _draw_bars(figure.subplots(), bars)
            case panels:
                height = chart.height / PIXELS_IN_AN_INCH
                for axes, panel in zip(
                    figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True
                ):
                    _draw_panel(axes, panel)
        handles = {
            name: handle
            for axes in figure.axes
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if len(handles) > 1:
            columns = max(1, int(13 * width) // max(len(name) + 5 for name in handles))
            figure.legend([*handles.values()], [*handles], loc="outside upper left", ncols=columns)
        figure.set_size_inches(width, height)
        sink = io.StringIO()
        FigureCanvasSVG(figure).print_svg(sink, metadata={"Date": None, "Creator": None})
    text = sink.getvalue()
    return text[text.index("<svg") :]


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for series in panel.series:
        if not series.hidden:
            _draw_series(axes, series)
    axes.set_title(panel.y, pad=15 if panel.marks else 6)
    axes.set_xlabel(panel.x)
    if panel.low is not None or panel.high is not None:
        axes.set_ylim(panel.low, panel.high)
    if panel.left is not None:
        axes.set_xlim(left=panel.left)
    low, high = axes.get_xlim()
    if panel.whole and high - low < 1:  # around a single step
        axes.set_xlim(low - 0.5, high + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=panel.whole, min_n_ticks=1 if panel.whole else 2))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y")
    _mark(axes, panel.marks)


def _draw_series(axes: Axes, series: Series) -> None:
    xs, ys = [x for x, _ in series.points], [y for _, y in series.points]
    colour = PALETTE[series.colour]
    if series.style == "bars":
        axes.bar(xs, ys, color=colour, width=0.7)
        return
    dotted = series.style in ("dots", "points") or len(xs) == 1
    style: dict[str, Any] = {"marker": "o" if dotted else "", "markersize": 4}
    if series.style == "points":
        style["linestyle"] = ""
    if series.style == "faint":
        style |= {"alpha": 0.35, "linewidth": 1.0}
    axes.plot(xs, ys, color=colour, label=series.name, **style)
    if spread := series.spread:
        least, most = ([y + sign * half for y, half in zip(ys, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, least, most, color=colour, alpha=0.16, linewidth=0)


def _draw_lanes(axes: Axes, lanes: Lanes) -> None:
    top, middles = 0.0, []
    for lane in lanes.lanes:
        tall = lane.height
        each = (tall - 0.28) / lane.slots
        for shade in dict.fromkeys(box.shade for box in lane.boxes):
            for slot in range(lane.slots):
                boxes = [box for box in lane.boxes if (box.shade, box.slot) == (shade, slot)]
                spans = [(box.start, box.stop - box.start) for box in boxes]
                rows = (top + 0.14 + slot * each, 0.9 * each if lane.slots > 1 else each)
                axes.broken_barh(spans, rows, color=PALETTE[lane.colour], alpha=shade, linewidth=0)
        middles.append(top + tall / 2)
        for box in lane.boxes:
            low, high = max(box.start, lanes.start), min(box.stop, lanes.stop)
            if box.text and high - low > 0.03 * (lanes.stop - lanes.start):
                middle = (low + high) / 2, middles[-1]
                axes.text(*middle, box.text, ha="center", va="center", color=PALETTE["paper"])
        top += tall
    axes.set_yticks(middles, [lane.name for lane in lanes.lanes])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(lanes.start, lanes.stop), ylim=(top, -0.1), xlabel=lanes.x)
    axes.grid(axis="x")
    _mark(axes, lanes.marks)


def _draw_bars(axes: Axes, bars: Bars) -> None:
    for row, (name, words, parts) in enumerate(bars.rows):
        left = 0.0
        axes.barh(row, 100.0, color=PALETTE["grid"], height=0.4)
        for part in parts:
            axes.barh(row, part.percent, left=left, color=PALETTE[part.colour], height=0.4)
            left += part.percent
        axes.text(0, row - 0.26, name, va="bottom")
        axes.text(100, row - 0.26, words, va="bottom", ha="right")
    for name, colour in bars.legend.items():
        axes.barh(0, 0.0, color=PALETTE[colour], label=name)
    axes.set(xlim=(0, 100), ylim=(len(bars.rows) - 0.5, -0.6), yticks=[], xlabel=bars.x)
    axes.spines["left"].set_visible(False)


def _mark(axes: Axes, marks: Sequence[tuple[float, str]]) -> None:
    for x, words in marks:
        axes.axvline(x, color=PALETTE["muted"], linewidth=0.8, linestyle=":")
        axes.text(x, 1.02, words, transform=axes.get_xaxis_transform(), color=PALETTE["muted"], ha="center")
