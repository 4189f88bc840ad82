"""Charts: what is drawn of runs, as plain data.

A page carries them as JSON, which its script draws (`templates/charts.js`); `report.pictures` draws the same
as SVG files. Colours are names of the page's palette.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

PALETTE: Mapping[str, str] = {
    "ink": "#1d2329",
    "muted": "#5d6873",
    "grid": "#e3e7eb",
    "paper": "#fff",
    "page": "#f6f7f8",
    "blue": "#2f6db3",
    "orange": "#d9822b",
    "green": "#3d8f6a",
    "violet": "#7a62b8",
    "red": "#c23b3b",
}
"""The light palette; the dark one stands in `templates/style.css`."""
CYCLE = ("blue", "orange", "green", "violet", "red", "muted")
"""Colours of series that have none of their own, in order."""
MOST_POINTS = 400
"""Points of one series that are drawn and can be read; of more, every n-th."""
SMOOTHING_STEPS = 5
"""Steps of the running mean drawn over the noisy values of single batches."""
MOST_MARKS = 8
"""Marked places that one panel shows."""
SECONDS = "seconds from the first lease"
"""What every time axis of a run counts."""

_T = TypeVar("_T")
Point = tuple[float, float]
Marks = Sequence[tuple[float, str]]
"""Places on x that get a dotted line and a word."""


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
    """line, dots (with a line through them), points (dots alone), faint, or bars."""
    hidden: bool = False
    """It can be read, but is not drawn."""
    words: Sequence[str] = ()
    """What is read at each point, where that is not its value."""

    def plain(self) -> dict[str, Any]:
        """Return values that JSON keeps, thinned out."""
        points = thin(self.points)
        plain = {
            "name": self.name,
            "colour": self.colour,
            "style": self.style,
            "x": [_short(x, 7) for x, _ in points],
            "y": [_short(y) for _, y in points],
            "spread": [_short(half) for half in thin(self.spread)],
            "words": thin(self.words),
            "hidden": self.hidden,
        }
        return {name: value for name, value in plain.items() if value}


@dataclass(frozen=True, slots=True)
class Panel:
    """One axes with curves."""

    x: str
    """What x counts: `learner step`."""
    series: Sequence[Series]
    y: str = ""
    """What y is, with its unit; stands above the axes."""
    low: float | None = None
    high: float | None = None
    left: float | None = None
    """Where x begins."""
    marks: Marks = ()
    whole: bool = False
    """x counts whole things."""

    def plain(self) -> dict[str, Any]:
        """Return values that JSON keeps."""
        plain = {name: getattr(self, name) for name in ("x", "y", "low", "high", "left", "whole")}
        known = {name: value for name, value in plain.items() if value is not None}
        return {
            **known,
            "marks": some_marks(self.marks),
            "series": [series.plain() for series in self.series],
        }


@dataclass(frozen=True, slots=True)
class Box:
    """One stretch of work in a lane."""

    start: float
    stop: float
    slot: int = 0
    """Its place above the others of its lane."""
    shade: float = 1.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker or stage against the clock."""

    name: str
    colour: str
    boxes: Sequence[Box]
    counted: str
    """What the numbers of `told` are: step or version; "" for a number of groups."""
    told: Sequence[int | None]
    """What it did at moments that divide the window evenly; None where it did nothing."""
    slots: int = 1
    tall: bool = False
    """It is 2.4 times as high as others."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lanes below each other, all against the same clock."""

    start: float
    stop: float
    lanes: Sequence[Lane]
    marks: Marks = ()
    x: str = SECONDS

    def plain(self) -> dict[str, Any]:
        """Return values that JSON keeps; instants count from `start`."""
        digits = max(0, 4 - math.floor(math.log10(self.stop - self.start)))

        def box(found: Box) -> list[Any]:
            edges = [round(max(found.start, self.start) - self.start, digits)]
            edges.append(round(min(found.stop, self.stop) - self.start, digits))
            more = [found.slot, found.shade, found.text]
            return edges if more == [0, 1.0, ""] else [*edges, *more]

        return {
            "start": round(self.start, 3),
            "stop": round(self.stop, 3),
            "x": self.x,
            "marks": some_marks(self.marks),
            "lanes": [
                {
                    "name": lane.name,
                    "colour": lane.colour,
                    "counted": lane.counted,
                    "slots": lane.slots,
                    "tall": lane.tall,
                    "boxes": [box(found) for found in lane.boxes],
                    "told": list(lane.told),
                }
                for lane in self.lanes
            ],
        }


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a bar."""

    name: str
    """With its numbers, as the legend says it."""
    colour: str
    percent: float


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars below each other, each the whole of something in parts."""

    x: str
    rows: Sequence[tuple[str, str, Sequence[Part]]]
    """(name, words at its end, parts)"""
    legend: Sequence[tuple[str, str]] = ()
    """(name, colour) of parts that occur."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of a page."""

    name: str
    """Unique on its page."""
    label: str
    """Says to those who cannot see it what the chart shows."""
    drawn: Sequence[Panel] | Lanes | Bars
    height: int = 240
    """Of each panel, CSS pixels."""
    small: bool = False
    """It stands in a row of several."""

    def plain(self) -> dict[str, Any]:
        """Return values that JSON keeps, for the page's script; bars need none."""
        plain: dict[str, Any] = {"height": self.height}
        if isinstance(self.drawn, Lanes):
            return plain | {"lanes": self.drawn.plain()}
        panels = () if isinstance(self.drawn, Bars) else self.drawn
        return plain | {"panels": [panel.plain() for panel in panels]}


def plain_charts(charts: Iterable[Chart | None]) -> dict[str, Any]:
    """Return what the page's script draws, by name."""
    drawn = (chart for chart in charts if chart is not None and not isinstance(chart.drawn, Bars))
    return {chart.name: chart.plain() for chart in drawn}


def some_marks(marks: Marks) -> list[tuple[float, str]]:
    """Return at most MOST_MARKS of the marks."""
    return [*marks[:: -(-len(marks) // MOST_MARKS) or 1]]


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


def _short(value: float, digits: int = 5) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
