"""Charts: what is drawn of runs, as plain data.

A page carries them as JSON, which its script draws (`templates/charts.js`); `report.pictures` draws the same
as SVG files. Colours are names of the page's palette.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from antiphon.core.messages import UNIT_RANGE, RewardRange

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
DIGITS = 7
"""Of a number in a page."""

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

    def __post_init__(self) -> None:
        for name in ("points", "spread", "words"):
            object.__setattr__(self, name, tuple(thin(getattr(self, name))))


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
    """Of many only some are kept."""
    whole: bool = False
    """x counts whole things."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", tuple(self.marks[:: -(-len(self.marks) // MOST_MARKS) or 1]))


def frame(rewards: Sequence[float], within: RewardRange) -> tuple[float, float]:
    """Return what an axis of rewards shows: all of 0..1, and of another range what occurs and 0.

    >>> frame([0.25, 0.5], (0.0, 1.0)), frame([-3.5, 2.0], (-100.0, 100.0))
    ((0.0, 1.0), (-3.5, 2.0))
    """
    values = [0.0, *(within if within == UNIT_RANGE else ()), *rewards]
    return min(values), max(values) if min(values) < max(values) else within[1]


class Box(NamedTuple):
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
    told: Sequence[int | None]
    """What it did at moments that divide the window evenly; None where it did nothing."""
    counted: str = ""
    """What the numbers of `told` are: step or version; "" for a number of groups."""
    slots: int = 1
    height: float = 1.0
    """In those of usual lanes."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lanes below each other, all against the same clock."""

    start: float
    stop: float
    lanes: Sequence[Lane]
    marks: Marks = ()
    x: str = ""


class Part(NamedTuple):
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

    @property
    def legend(self) -> dict[str, str]:
        """Return name -> colour of the parts; empty where each row is a single one."""
        parts = {part.name: part.colour for _, _, parts in self.rows for part in parts}
        return parts if any(len(parts) > 1 for _, _, parts in self.rows) else {}


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


def plain_charts(charts: Iterable[Chart | None]) -> dict[str, Any]:
    """Return what the page's script draws, by name, in values that JSON keeps; bars need no script."""
    return {c.name: _plain(c) for c in charts if c is not None and not isinstance(c.drawn, Bars)}


def _plain(value: Any) -> Any:
    """Return plain values without the fields that are at their defaults."""
    if dataclasses.is_dataclass(value):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: _plain(known) for field, known in fields if known != field.default}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def thin(values: Sequence[_T]) -> list[_T]:
    """Return at most MOST_POINTS of the values and the last one."""
    every = -(-len(values) // MOST_POINTS) or 1
    return [*values[:-1:every], *values[-1:]]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the running mean over the last steps; as long as `values`."""
    windows = [values[max(0, i - SMOOTHING_STEPS + 1) : i + 1] for i in range(len(values))]
    return [sum(recent) / len(recent) for recent in windows]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return points with the running mean of their values."""
    return [(x, y) for (x, _), y in zip(points, smooth([y for _, y in points]), strict=True)]
