"""Canvas: charts drawn by matplotlib as SVG that follows the page's light or dark palette.

A chart has a drawing for a wide page and, where that would be too small to read on a phone, a narrow
one; the page shows the one that fits. Colours are placeholders that become the page's own variables,
text stays text, and equal data gives equal SVG.
"""

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

INK, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
BLUE, ORANGE, GREEN, VIOLET, RED = "#050505", "#060606", "#070707", "#080808", "#090909"
NAMES = ("ink", "muted", "grid", "paper", "blue", "orange", "green", "violet", "red")
VARIABLES = dict(zip((INK, MUTED, GRID, PAPER, BLUE, ORANGE, GREEN, VIOLET, RED), NAMES, strict=True))
"""Placeholder colour -> CSS variable without its dashes."""

WIDE_IN, NARROW_IN = 9.6, 3.4
"""Width of a drawing that fills a wide page; of one that fills a phone's, or a third of a wide one.

The page's stylesheet shows them about 960 and 306 CSS pixels wide, where text of 8.5 points is more than
10 pixels high in either.
"""

SETTINGS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "text.parse_math": False,
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True, slots=True)
class Reading:
    """What the page tells of one axes where a reader points at it."""

    label: str
    """What x counts, such as `learner step`."""
    names: Sequence[str]
    """What is read at each point."""
    colours: Sequence[str]
    points: Sequence[tuple[float, str, Sequence[str]]]
    """(x, x in words, a value in words for each name; empty where there is none), in order of x."""

    def plain(self) -> dict[str, Any]:
        """Return plain values for the page's script; colours by the names of its variables."""
        return {
            "label": self.label,
            "names": list(self.names),
            "colours": [VARIABLES[colour] for colour in self.colours],
            "points": [[round(x, 4), words, list(values)] for x, words, values in self.points],
        }


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart of a page."""

    name: str
    wide: str
    """SVG for a wide page; for every page where `narrow` is empty."""
    narrow: str = ""
    readings: tuple[Reading, ...] = field(default=())
    """One for each axes that can be read, in the order in which the drawings name their places."""

    def plain_readings(self) -> list[dict[str, Any]]:
        """Return the readings as plain values, for the page's script."""
        return [reading.plain() for reading in self.readings]


Draw = Callable[[Figure, bool], Sequence[tuple[Axes, Reading]]]
"""Draws into a figure, narrow or not, and returns what can be read of which axes."""


def paint(
    name: str,
    label: str,
    draw: Draw,
    *,
    wide_in: tuple[float, float] | None = None,
    narrow_in: tuple[float, float] | None = None,
) -> Plot:
    """Draw a chart in the sizes that are given, in inches: for a wide page, for a narrow one, or for both.

    Args:
        name: unique on its page.
        label: says to those who cannot see it what the chart shows.
        draw: draws it; called once for each size.
        wide_in: width and height for a wide page.
        narrow_in: width and height for a phone; without it the wide drawing serves both, and the other
            way round.
    """
    drawings = {}
    readings: tuple[Reading, ...] = ()
    for kind, size in (("wide", wide_in), ("narrow", narrow_in)):
        if size is not None:
            drawings[kind], readings = _svg(f"{name}-{kind}", size, draw, label, narrow=kind == "narrow")
    both = list(drawings.values())
    return Plot(name, both[0], both[1] if len(both) > 1 else "", readings)


def bars(axes: Axes, boxes: Sequence[tuple[float, float, float, float]], colour: str, **style: Any) -> None:
    """Draw rectangles (x, y, width, height) as one shape, which keeps the page small."""
    if boxes:
        shapes = [_rectangle(*box) for box in boxes]
        axes.add_patch(PathPatch(Path.make_compound_path(*shapes), facecolor=colour, linewidth=0, **style))


def _rectangle(x: float, y: float, width: float, height: float) -> Path:
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
    return Path(corners, closed=True)


def _svg(
    name: str, size: tuple[float, float], draw: Draw, label: str, *, narrow: bool
) -> tuple[str, tuple[Reading, ...]]:
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        read = draw(figure, narrow)
        if (layout := figure.get_layout_engine()) is not None:
            layout.execute(figure)  # once; while it is in force, saving would do so twice
            figure.set_layout_engine("none")
        sink = io.StringIO()
        # Not `savefig`, which draws everything once more to learn what a layout would change.
        FigureCanvasSVG(figure).print_svg(sink, metadata={"Date": None, "Creator": None})
    places = [_place(axes, size) for axes, _ in read]
    text = sink.getvalue()
    head, _, body = text[text.index("<svg") + len("<svg") :].partition(">")
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    more = f" data-axes='{json.dumps(places, separators=(',', ':'))}'" if places else ""
    text = f'<svg role="img" aria-label="{escape(label)}"{more}{head}>{_compact(body)}'
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for placeholder, variable in VARIABLES.items():
        text = text.replace(placeholder, f"var(--{variable})")
    return text, tuple(reading for _, reading in read)


def _place(axes: Axes, size: tuple[float, float]) -> list[float]:
    """Return left, top, right and bottom in the drawing's units, and the x values at left and right."""
    width, height = 72 * size[0], 72 * size[1]
    box = axes.get_position()
    edges = (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
    return [*(round(edge, 1) for edge in edges), *(round(float(x), 4) for x in axes.get_xlim())]


def _compact(svg: str) -> str:
    """Leave out what no reader sees: names of groups, empty shapes, fonts, digits beyond a hundredth."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<path d="[^"]*" style="fill: none"/>', "", svg)
    svg = re.sub(r'(<g) id="(?!figure_1")[^"]*"', r"\1", svg)
    svg = re.sub(r" font-family: [^;]*;", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{3,}", _hundredths, tag[0]), svg)
    svg = re.sub(r"([MLQCz])\s+", r"\1", re.sub(r"\s*\n\s*", "\n", svg))
    svg = re.sub(r"<g>\s*</g>", "", svg)
    return re.sub(r"\n(?=[MLQCz\"])", "", svg)


def _hundredths(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
