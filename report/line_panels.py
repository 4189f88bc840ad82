"""Line panels: curves of numbers in one or several axes, with what a reader is told of each point.

Series in, SVG out, whatever they are of: one run's metrics or several runs' rewards.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from antiphon.report.canvas import (
    BLUE,
    GREEN,
    MUTED,
    NARROW_IN,
    ORANGE,
    RED,
    VIOLET,
    WIDE_IN,
    Plot,
    Reading,
    paint,
)

CYCLE = (BLUE, ORANGE, GREEN, VIOLET, RED, MUTED)
"""Colours of series that have none of their own, in order."""
MOST_POINTS = 400
"""Points of one series that are drawn and can be read; of more, every n-th."""
NARROW_HEIGHT_IN = 2.2
"""Height of each axes of a narrow drawing."""
SMOOTHING_STEPS = 5
"""Steps of the running mean drawn over the noisy values of single batches."""
DOT: dict[str, Any] = {"marker": "o", "markersize": 4}
STYLES: dict[str, dict[str, Any]] = {
    "line": {},
    "dots": DOT,
    "points": {**DOT, "linestyle": ""},
    "faint": {"alpha": 0.35, "linewidth": 1.0},
}
"""How a series can be drawn."""
MOST_MARKS = 8
"""Marked places that one panel shows."""

_T = TypeVar("_T")
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One curve."""

    name: str
    colour: str
    points: Sequence[Point]
    """(x, y) in order of x."""
    spread: Sequence[float] = ()
    """Half the width of an interval around each point; empty without intervals."""
    style: str = "line"
    """One of STYLES: line, dots (with a line through them), points (dots alone), faint."""
    hidden: bool = False
    """It can be read, but is not drawn."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One axes."""

    x: str
    """What x counts: `learner step`."""
    series: Sequence[Series]
    y: str = ""
    """What y is, with its unit; stands above the axes."""
    low: float | None = None
    high: float | None = None
    left: float | None = None
    """Where x begins."""
    marks: Sequence[tuple[float, str]] = ()
    """Places on x that get a dotted line and a word; of many only some."""
    whole: bool = False
    """x counts whole things."""


def draw_panels(
    name: str,
    label: str,
    panels: Sequence[Panel],
    *,
    height_in: float = 3.2,
    small: bool = False,
) -> Plot:
    """Draw panels beside each other for a wide page, and below each other for a narrow one.

    Args:
        name: unique on its page.
        label: says to those who cannot see it what the chart shows.
        panels: share one legend, which names every series once.
        height_in: of the wide drawing, inches.
        small: one drawing of a narrow page's width serves both, as where several charts stand in a row.
    """

    def draw(figure: Figure, narrow: bool) -> list[tuple[Axes, Reading]]:
        rows, columns = (len(panels), 1) if narrow else (1, len(panels))
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, panel in zip(grid, panels, strict=True):
            _draw_panel(axes, panel, title_pad=15 if any(panel.marks for panel in panels) else 6)
        add_legend(figure, narrow)
        return [(axes, _reading(panel)) for axes, panel in zip(figure.axes, panels, strict=True)]

    names = list(dict.fromkeys(s.name for panel in panels for s in panel.series if not s.hidden))
    rows = -(-len(names) // legend_columns(names, narrow=True)) if not small and len(names) > 1 else 0
    narrow = (NARROW_IN, NARROW_HEIGHT_IN * len(panels) + 0.18 * rows)
    return paint(name, label, draw, wide_in=None if small else (WIDE_IN, height_in), narrow_in=narrow)


def add_legend(figure: Figure, narrow: bool) -> None:
    """Name every curve or bar of a figure once, above its axes, unless there is only one."""
    known: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        known |= dict(zip(names, handles, strict=True))
    if len(known) > 1:
        figure.legend(
            [*known.values()], [*known], loc="outside upper left", ncols=legend_columns([*known], narrow)
        )


def legend_columns(names: Sequence[str], narrow: bool) -> int:
    """Return how many names stand beside each other: all of them where they fit."""
    room = 42 if narrow else 130
    if sum(len(name) + 5 for name in names) <= room:
        return len(names)
    return max(1, room // (max(map(len, names)) + 5))


def _draw_panel(axes: Axes, panel: Panel, title_pad: float) -> None:
    for series in panel.series:
        if series.hidden:
            continue
        points, spread = thin(series.points), thin(series.spread)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        style = STYLES[series.style]
        if len(points) == 1:
            style = DOT | style  # a line through one point is not seen
        if spread:
            axes.errorbar(xs, ys, spread, color=series.colour, capsize=2, label=series.name, **style)
        else:
            axes.plot(xs, ys, color=series.colour, label=series.name, **style)
    if panel.y:
        axes.set_title(panel.y, pad=title_pad)
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
    mark_places(axes, panel.marks)


def mark_places(axes: Axes, marks: Sequence[tuple[float, str]]) -> None:
    """Draw a dotted line at each place, with its word above; of many places only some."""
    for x, words in marks[:: -(-len(marks) // MOST_MARKS) or 1]:
        axes.axvline(x, color=MUTED, linewidth=0.8, linestyle=":")
        place = axes.get_xaxis_transform()
        axes.text(x, 1.02, words, transform=place, color=MUTED, ha="center")


def _reading(panel: Panel) -> Reading:
    told: dict[float, list[str]] = {}
    for place, series in enumerate(panel.series):
        for (x, y), half in zip_longest(thin(series.points), thin(series.spread)):
            words = told.setdefault(x, [""] * len(panel.series))
            words[place] = number(y) if half is None else f"{number(y)} ± {number(half)}"
    points = [(x, f"{x:.0f}" if panel.whole else number(x), words) for x, words in sorted(told.items())]
    return Reading(panel.x, [s.name for s in panel.series], [s.colour for s in panel.series], points)


def number(value: float) -> str:
    """Return a number in few digits.

    >>> [number(value) for value in (0.12345678, 1234.5, 2e-07, 150000.0)]
    ['0.1235', '1,234', '2e-07', '150,000']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thin(values: Sequence[_T]) -> list[_T]:
    """Return at most MOST_POINTS of the values and the last one."""
    every = -(-len(values) // MOST_POINTS) or 1
    return [*values[:-1:every], *values[-1:]]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the running mean over the last steps; as long as `values`."""
    windows = [values[max(0, i - SMOOTHING_STEPS + 1) : i + 1] for i in range(len(values))]
    return [sum(recent) / len(recent) for recent in windows]


def smoothed(points: Iterable[Point]) -> list[Point]:
    """Return points with the running mean of their values."""
    places = list(points)
    return [(x, y) for (x, _), y in zip(places, smooth([y for _, y in places]), strict=True)]
