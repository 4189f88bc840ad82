"""Pictures: charts as SVG files, as MLflow and `antiphon plan` keep them. Equal charts give equal files.

They show what a page's script draws (`templates/charts.js`), at one width and in the light palette. What is
placed here, in pixels, `templates/picture.svg` draws.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from antiphon.report.charts import PALETTE, Bars, Chart, Lanes, Marks, Panel, Series
from antiphon.report.render import render

WIDE, SMALL = 864.0, 306.0
LETTER, LINE, LANE, BAR = 6.2, 15, 31, 40
"""Width of a letter; heights of a line of text, of a lane, and of a bar with its name."""


class Scale(NamedTuple):
    """An axis: values from `low` to `high` stand between two pixels."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)

    def ticks(self, most: int, whole: bool = False) -> list[tuple[float, str]]:
        """Return (pixel, number) of about `most` round values."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(times for times in (1, 2, 5, 10) if times * power >= 0.999 * rough)
        step = max(1, round(step)) if whole else step
        places = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        largest = max(abs(self.low), abs(self.high))
        digits = max(4, 1 + math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
        values = [place * step for place in places]
        return [(self.at(v), f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.{digits}g}") for v in values]

    def words(self, marks: Marks) -> list[tuple[float, float, str]]:
        """Return (pixel of the line, of the middle of its words, words) of marked places."""
        found = [(self.at(value), LETTER * len(words) / 2, words) for value, words in marks]
        return [(x, min(max(x, self.start + half), self.stop - half), words) for x, half, words in found]


def pictures(charts: Iterable[Chart | None]) -> dict[str, str]:
    """Return each chart as an SVG file: name of the file -> its text."""
    return {f"{chart.name}.svg": picture(chart) for chart in charts if chart is not None}


def picture(chart: Chart) -> str:
    """Draw one chart as an SVG file."""
    width, drawn = SMALL if chart.small else WIDE, chart.drawn
    named = drawn.legend if isinstance(drawn, Bars) else {}
    if not isinstance(drawn, Bars | Lanes):
        named = {s.name: s.colour for panel in drawn for s in panel.series if not s.hidden}
    legend, x, top = list[tuple[str, str, float, float]](), 4.0, float(LINE)
    for name, colour in named.items() if len(named) > 1 else ():
        wide = 32 + LETTER * len(name)
        if x > 4 and x + wide > width:
            x, top = 4.0, top + LINE
        legend.append((name, colour, x, top))
        x += wide
    top += LINE if legend else -LINE
    match drawn:
        case Lanes():
            axes, height = (
                [_lanes(drawn, top + LINE, width)],
                LINE + LANE * sum(lane.height for lane in drawn.lanes),
            )
        case Bars():
            axes, height = [], BAR * len(drawn.rows) - LINE
        case _:
            each, height = width / len(drawn), chart.height - 3 * LINE
            axes = [_panel(one, i * each, (i + 1) * each - 16, top, height) for i, one in enumerate(drawn)]
    size = {"width": width, "height": round(top + height + 3 * LINE, 1), "top": top}
    bars = drawn if isinstance(drawn, Bars) else None
    return render("picture.svg", label=chart.label, legend=legend, axes=axes, bars=bars, ink=PALETTE, **size)


def _panel(panel: Panel, left: float, right: float, top: float, height: float) -> dict[str, Any]:
    shown = [series for series in panel.series if not series.hidden]
    xs = [x for series in shown for x, _, _ in _rows(series)]
    ys = [y + half for series in shown for _, y, spread in _rows(series) for half in (-spread, spread)]
    bars = any(series.style == "bars" for series in shown)
    low, high = _range(xs, panel.left, None, 0.6 / max(1, len(xs) - 1) if bars else 0.02)
    if panel.whole and high - low < 1:
        low, high = low - 0.5, high + 0.5
    up = Scale(*_range(ys, panel.low, panel.high, 0.06), top + height, top + LINE * (3 if panel.marks else 2))
    rows = up.ticks(5)
    across = Scale(low, high, left + 8 + LETTER * max(len(words) for _, words in rows), right)
    curves = [
        {
            "series": series,
            "points": [(across.at(x), up.at(y)) for x, y, _ in _rows(series)],
            "band": [(across.at(x), up.at(y + half)) for x, y, half in _rows(series)]
            + [(across.at(x), up.at(y - half)) for x, y, half in reversed(_rows(series))],
        }
        for series in shown
    ]
    wide = 0.7 * (across.stop - across.start) / (high - low)
    ticks = across.ticks(6, panel.whole)
    known = {"x": panel.x, "y": panel.y, "left": left, "across": across, "up": up, "bar": wide, "lanes": ()}
    return known | {"rows": rows, "ticks": ticks, "curves": curves, "marks": across.words(panel.marks)}


def _rows(series: Series) -> list[tuple[float, float, float]]:
    """Return (x, y, half of the interval) of the points that have a value."""
    rows = zip_longest(series.points, series.spread, fillvalue=0.0)
    return [(x, y, half) for (x, y), half in rows if all(map(math.isfinite, (x, y, half)))]  # type: ignore[misc]


def _range(
    values: Sequence[float], low: float | None, high: float | None, room: float
) -> tuple[float, float]:
    """Return the ends of an axis: those given, else those of the values and a little room."""
    least = min(values, default=0.0) if low is None else low
    most = max(least, max(values, default=1.0) if high is None else high)
    more = (most - least or abs(most) or 1.0) * room
    return least - more if low is None else low, most + more if high is None else high


def _lanes(drawn: Lanes, top: float, width: float) -> dict[str, Any]:
    left, rows = 14 + LETTER * max(len(lane.name) for lane in drawn.lanes), []
    across, y = Scale(drawn.start, drawn.stop, left, width - 12), top
    for lane in drawn.lanes:
        tall = LANE * lane.height - 8
        each, base = tall / lane.slots, y + LANE * lane.height - 4
        shapes: dict[float, str] = {}
        for box in lane.boxes:
            begin, wide = across.at(box.start), across.at(box.stop) - across.at(box.start)
            shape = f"M{begin} {base - box.slot * each:.1f}h{wide:.1f}v{-0.92 * each:.1f}h{-wide:.1f}z"
            shapes[box.shade] = shapes.get(box.shade, "") + shape
        ends = [(across.at(box.start), across.at(box.stop), box.text) for box in lane.boxes if box.text]
        texts = [(round((a + b) / 2, 1), text) for a, b, text in ends if b - a > LETTER * len(text) + 4]
        rows.append((lane, base - tall / 2 + 4, shapes, texts))
        y += LANE * lane.height
    known = {"x": drawn.x, "across": across, "up": Scale(0, 1, y, top), "lanes": rows, "curves": ()}
    return known | {"ticks": across.ticks(8), "marks": across.words(drawn.marks)}
