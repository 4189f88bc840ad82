"""Lanes: the stages of a run as bars against one clock, and what each of them did at any moment."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from antiphon.core.reporting.run_view import Bar, RunView, merge
from antiphon.report.canvas import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    NARROW_IN,
    ORANGE,
    PAPER,
    VIOLET,
    WIDE_IN,
    Plot,
    Reading,
    bars,
    paint,
)
from antiphon.report.line_panels import mark_places

ZOOM_STEPS = 6
"""Steps that the close view shows."""
FINEST_GAPS = 4000
"""Gaps between bars that are narrower than this part of the window are not drawn."""
TALL = 2.4
"""Height of a worker's lane in the close view, in other lanes' heights."""
MOMENTS = 160
"""Moments of a window that can be read."""
SECONDS = "seconds from the first lease"
"""What every time axis of a run counts."""
COLOURS = {"reward": VIOLET, "training": ORANGE, "publishing": GREEN, "broadcast": GREEN, "evaluation": MUTED}
"""Colours of all lanes but those of workers."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker or stage."""

    name: str
    bars: Sequence[Bar]
    counted: str
    """What the bars' numbers count: `step` or `version`; empty for bars that are counted themselves."""

    @property
    def colour(self) -> str:
        return COLOURS.get(self.name, BLUE)


def timeline(view: RunView) -> Plot | None:
    """Draw the whole run: a lane for each worker and stage; None before the first lease."""
    start, stop = view.window
    return _draw(view, start, stop, "timeline", close=False)


def timeline_zoom(view: RunView) -> Plot | None:
    """Draw a few steps in the middle of the run, with their numbers; None for a very short run."""
    if len(view.steps) < 3:
        return None
    middle = len(view.steps) // 2
    first = max(1, middle - ZOOM_STEPS // 2)
    last = min(len(view.steps) - 1, first + ZOOM_STEPS)
    window = view.steps[first - 1].at_s, view.steps[last].at_s
    return _draw(view, *window, "timeline-zoom", close=True)


def break_marks(view: RunView, start_s: float, stop_s: float) -> list[tuple[float, str]]:
    """Return where the clock stood still within a window, for the charts over time."""
    return [(at_s, "break") for at_s in view.breaks if start_s < at_s < stop_s]


def _draw(view: RunView, start: float, stop: float, name: str, *, close: bool) -> Plot | None:
    lanes = [
        *(Lane(f"rollout {worker}", bars, "") for worker, bars in sorted(view.rollout.items())),
        Lane("reward", view.reward, ""),
        Lane("training", view.training, "step"),
        Lane("publishing", view.publishing, "version"),
        Lane("broadcast", view.broadcast, "version"),
        Lane("evaluation", view.evaluating, "version"),
    ]
    stop = max(stop, start + 1.0)
    lanes = [lane for lane in lanes if any(b.stop_s > start and b.start_s < stop for b in lane.bars)]
    if not lanes:
        return None
    reading = _reading(lanes, start, stop)
    room = [TALL if close and lane.name.startswith("rollout") else 1.0 for lane in lanes]

    def draw(figure: Figure, narrow: bool) -> list[tuple[Axes, Reading]]:
        axes = figure.subplots()
        top = sum(room)
        middles = []
        for lane, tall in zip(lanes, room, strict=True):
            # On a narrow page a lane's name stands above its bars, since there is no room beside them.
            height = tall - (0.44 if narrow else 0.28)
            base = top - tall + (0.04 if narrow else 0.14)
            shown = [bar for bar in lane.bars if bar.stop_s > start and bar.start_s < stop]
            if tall > 1:
                _draw_groups(axes, base, height, shown, lane.colour)
            elif close and lane.counted:
                _draw_numbered(axes, base, height, shown, lane.colour, (start, stop))
            else:
                spans = merge(shown, start, stop, (stop - start) / FINEST_GAPS)
                bars(axes, [(a, base, b - a, height) for a, b in spans], lane.colour)
            if narrow:
                place = axes.get_yaxis_transform()
                axes.text(0, base + height + 0.03, lane.name, transform=place, color=INK, va="bottom")
            middles.append(base + height / 2)
            top -= tall
        axes.set_yticks([] if narrow else middles, [] if narrow else [lane.name for lane in lanes])
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=(start, stop), ylim=(-0.1, sum(room)), xlabel=SECONDS)
        axes.grid(axis="x")
        mark_places(axes, break_marks(view, start, stop))
        return [(axes, reading)]

    height, narrow_height = 0.7 + 0.34 * sum(room), 0.6 + 0.44 * sum(room)
    label = f"Which stage worked when, second {start:.0f} to {stop:.0f}"
    return paint(name, label, draw, wide_in=(WIDE_IN, height), narrow_in=(NARROW_IN, narrow_height))


def _reading(lanes: Sequence[Lane], start: float, stop: float) -> Reading:
    """Return what each lane did at moments of the window: the step or version, or how many groups."""
    moments = [start + (stop - start) * (i + 0.5) / MOMENTS for i in range(MOMENTS)]
    columns = [_words(lane, moments) for lane in lanes]
    points = [(at, f"{at:.1f} s", words) for at, *words in zip(moments, *columns, strict=True)]
    return Reading("", [lane.name for lane in lanes], [lane.colour for lane in lanes], points)


def _words(lane: Lane, moments: Sequence[float]) -> list[str]:
    found: list[list[int]] = [[] for _ in moments]
    pitch = moments[1] - moments[0]
    for bar in lane.bars:
        first = max(0, -int(-(bar.start_s - moments[0]) // pitch))
        last = min(len(moments) - 1, int((bar.stop_s - moments[0]) // pitch))
        for place in range(first, last + 1):
            found[place].append(bar.number)
    if lane.counted:
        return [f"{lane.counted} {numbers[-1]}" if numbers else "" for numbers in found]
    return [f"{len(numbers)} group" + "s" * (len(numbers) > 1) if numbers else "" for numbers in found]


def _draw_numbered(
    axes: Axes, base: float, height: float, shown: Sequence[Bar], colour: str, window: tuple[float, float]
) -> None:
    start, stop = window
    for bar in shown:
        low, high = max(bar.start_s, start), min(bar.stop_s, stop)
        axes.broken_barh([(low, high - low)], (base, height), color=colour, edgecolor=PAPER, linewidth=0.6)
        if high - low > 0.03 * (stop - start):
            middle = ((low + high) / 2, base + height / 2)
            axes.text(*middle, str(bar.number), ha="center", va="center", color=PAPER)


def _draw_groups(axes: Axes, base: float, height: float, shown: Sequence[Bar], colour: str) -> None:
    """Draw every group as a thin bar; the shade changes with the policy version it was leased under."""
    free: list[float] = []
    placed = []
    for bar in sorted(shown, key=lambda bar: bar.start_s):
        slot = next((i for i, until in enumerate(free) if until <= bar.start_s), len(free))
        free[slot : slot + 1] = [bar.stop_s]
        placed.append((bar, slot))
    each = height / max(1, len(free))
    for shade, alpha in enumerate((0.45, 0.7, 0.95)):
        boxes = [
            (bar.start_s, base + slot * each, bar.seconds, 0.9 * each)
            for bar, slot in placed
            if bar.number % 3 == shade
        ]
        bars(axes, boxes, colour, alpha=alpha)
