"""Plots: what a run learned, how stale its data was, and what became of its seconds and tokens."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from antiphon.core.drafting.statistics import drafting_rates
from antiphon.core.loop.work_account import Use
from antiphon.core.reporting.figures import interval
from antiphon.core.reporting.run_view import EvaluationFacts, RunView
from antiphon.report.canvas import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    NARROW_IN,
    ORANGE,
    PAPER,
    RED,
    VIOLET,
    WIDE_IN,
    Plot,
    Reading,
    paint,
)
from antiphon.report.lanes import COLOURS, SECONDS, break_marks
from antiphon.report.line_panels import (
    SMOOTHING_STEPS,
    Panel,
    Series,
    add_legend,
    draw_panels,
    smooth,
    smoothed,
)

THROUGHPUT_BINS = 48
SMALL_IN = (NARROW_IN, 2.4)
"""Size of a chart that stands in a row of several."""
USE_COLOURS = {
    Use.USEFUL: GREEN,
    Use.OPEN: BLUE,
    Use.FILTERED: VIOLET,
    Use.STALE: ORANGE,
    Use.DUPLICATE: MUTED,
    Use.PREEMPTED: RED,
    Use.VOIDED: INK,
    Use.UNTRUSTED: PAPER,
    Use.IDLE: GRID,
}
"""What became of work, in the order in which it is drawn; the start of engines is no part of it."""


def learning_curve(view: RunView) -> Plot | None:
    """Draw training reward and held-out pass@1 against steps and against seconds; None without either."""
    rewards = [(s.step, s.at_s, s.reward_mean) for s in view.steps if s.reward_mean is not None]
    held = view.evaluations
    if not rewards and not held:
        return None
    values = [0.0, 1.0, *(reward for _, _, reward in rewards), *(e.reward_mean for e in held)]

    def series(place: int, evaluated_at: Sequence[float]) -> list[Series]:
        points = [(float(reward[place]), reward[2]) for reward in rewards]
        return [
            *(reward_series(points) if points else ()),
            *([held_out_series(evaluated_at, held)] if held else ()),
        ]

    low, high = min(values), max(values)
    steps = series(0, [e.version for e in held])
    seconds = series(1, [e.at_s for e in held])
    marks = break_marks(view, *view.window)
    panels = [
        Panel("learner step, policy version", steps, y="reward", low=low, high=high, whole=True),
        Panel(SECONDS, seconds, y="reward", low=low, high=high, left=0.0, marks=marks),
    ]
    label = "Training reward and held-out pass@1 over steps and over seconds"
    return draw_panels("learning", label, panels, height_in=3.3)


def reward_series(points: Sequence[tuple[float, float]]) -> list[Series]:
    """Return training rewards of single batches, and their running mean."""
    return [
        Series("training reward of one batch", ORANGE, points, style="faint"),
        Series(f"mean of the last {SMOOTHING_STEPS} batches", ORANGE, smoothed(points)),
    ]


def held_out_series(
    places: Sequence[float], held: Sequence[EvaluationFacts], name: str = "held-out pass@1, 95% interval"
) -> Series:
    """Return held-out scores at these places on x."""
    points = [(float(x), e.reward_mean) for x, e in zip(places, held, strict=True)]
    return Series(name, BLUE, points, [interval(e.reward_mean, e.prompts) for e in held], style="dots")


def staleness(histogram: Mapping[int, int], bound: int | None) -> Plot | None:
    """Draw how stale the trained trajectories were, and the bound; None where nothing trained."""
    total = sum(histogram.values())
    if not total:
        return None
    top = max([*histogram, bound or 0, 1])
    shares = [100 * histogram.get(s, 0) / total for s in range(top + 1)]

    def draw(figure: Figure, narrow: bool) -> list[tuple[Axes, Reading]]:
        axes = figure.subplots()
        drawn = axes.bar(range(top + 1), shares, color=GREEN, width=0.7)
        if top < 12:
            words = [f"{share:.0f}%" if share else "" for share in shares]
            axes.bar_label(drawn, words, color=MUTED, fontsize=8.5, padding=1)
        if bound is not None:
            axes.axvline(bound + 0.5, color=RED, linewidth=1.2)
            place = axes.get_xaxis_transform()
            axes.text(bound + 0.5, 1.01, f"bound S = {bound}", color=RED, ha="right", transform=place)
        axes.set(xlim=(-0.6, top + 0.7), ylim=(0, max(shares) * 1.12))
        axes.set_title("% of trained trajectories", pad=15 if bound is not None else 6)
        axes.set_xlabel("staleness, policy versions")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        points = [
            (float(s), str(s), [f"{share:.1f}% ({histogram.get(s, 0):,})"]) for s, share in enumerate(shares)
        ]
        return [(axes, Reading("staleness", ["trajectories"], [GREEN], points))]

    return paint("staleness", "Histogram of staleness", draw, narrow_in=SMALL_IN)


def throughput(view: RunView) -> Plot | None:
    """Draw tokens per second, sampled by the workers and trained on; None where nothing was sampled."""
    start, stop = view.window
    if stop <= start or not len(view.generated):
        return None
    width = (stop - start) / THROUGHPUT_BINS
    trained = [(s.at_s, s.tokens) for s in view.steps]
    series = []
    for samples, colour, label in (
        (view.generated, BLUE, "sampled by workers"),
        (trained, ORANGE, "trained on"),
    ):
        bins = [0.0] * THROUGHPUT_BINS
        for at, tokens in samples:
            if start <= at <= stop:
                bins[min(int((at - start) / width), THROUGHPUT_BINS - 1)] += tokens / width
        centres = [start + (i + 0.5) * width for i in range(THROUGHPUT_BINS)]
        series.append(Series(label, colour, list(zip(centres, smooth(bins), strict=True))))
    marks = break_marks(view, start, stop)
    panel = Panel(SECONDS, series, y="completion tokens per second", low=0, left=0, marks=marks)
    return draw_panels("throughput", "Tokens per second, sampled and trained on", [panel], small=True)


def busy(shares: Mapping[str, float]) -> Plot | None:
    """Draw the share of the run in which each worker and stage was busy; None where none was."""
    if not any(shares.values()):
        return None

    def draw(figure: Figure, narrow: bool) -> list[tuple[Axes, Reading]]:
        axes = figure.subplots()
        rows = [(name, 100 * share) for name, share in reversed([*shares.items()])]
        for row, (name, value) in enumerate(rows):
            axes.barh(row, value, color=COLOURS.get(name, BLUE), height=0.4)
            axes.barh(row, 100 - value, left=value, color=GRID, height=0.4)
            axes.text(0, row + 0.26, name, color=INK, va="bottom")
            axes.text(100, row + 0.26, f"{value:.1f}%", color=INK, va="bottom", ha="right")
        axes.set(xlim=(0, 100), ylim=(-0.4, len(rows) - 0.2), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("% of the seconds from first lease to last commit")
        return []

    height = max(SMALL_IN[1], 0.6 + 0.42 * len(shares))
    return paint("busy", "Share of time in which each stage was busy", draw, narrow_in=(NARROW_IN, height))


def work(seconds: Mapping[str, float], tokens: Mapping[str, int]) -> Plot | None:
    """Draw what became of worker seconds and of completion tokens; None where nothing was booked."""
    worked = {use: value for use, value in seconds.items() if use != Use.STARTING}
    rows: list[tuple[str, Mapping[str, float]]] = [("tokens", tokens), ("worker seconds", worked)]
    rows = [(name, booked) for name, booked in rows if sum(booked.values()) > 0]
    if not rows:
        return None

    def draw(figure: Figure, narrow: bool) -> list[tuple[Axes, Reading]]:
        axes = figure.subplots()
        left = [0.0] * len(rows)
        for use, colour in USE_COLOURS.items():
            shares = [100 * max(0.0, booked.get(use, 0)) / sum(booked.values()) for _, booked in rows]
            if any(shares):
                words = _use_words(use, dict(rows))
                axes.barh(range(len(rows)), shares, left=left, color=colour, height=0.5, label=words)
                left = [a + b for a, b in zip(left, shares, strict=True)]
        for row, (name, _) in enumerate(rows):
            axes.text(0, row + 0.3, name, color=INK, va="bottom")
        axes.set(xlim=(0, 100), ylim=(-0.4, len(rows) - 0.35), yticks=[], xlabel="% of all")
        axes.spines["left"].set_visible(False)
        add_legend(figure, narrow)
        return []

    label = "What became of worker seconds and tokens"
    height = 0.7 + 0.7 * len(rows)
    return paint("work", label, draw, wide_in=(WIDE_IN, height), narrow_in=(NARROW_IN, height + 0.9))


def _use_words(use: Use, booked: Mapping[str, Mapping[str, float]]) -> str:
    parts = []
    if seconds := booked.get("worker seconds", {}).get(use, 0):
        parts.append(f"{seconds:,.0f} s")
    if tokens := booked.get("tokens", {}).get(use, 0):
        parts.append(f"{tokens:,} tokens")
    return f"{use}: {', '.join(parts)}"


def drafting(view: RunView) -> Plot | None:
    """Draw how often drafts were right and how many tokens a pass gave; None where nothing drafted."""
    rates = [
        (float(step.step), drafting_rates(step.drafting)) for step in view.steps if step.drafting is not None
    ]
    if not rates:
        return None
    marks = [(float(step), f"epoch {epoch}") for step, epoch in view.epoch_starts()]

    def series(name: str, words: str, colour: str, scale: float = 1.0) -> Series:
        return Series(words, colour, [(step, scale * rate[name]) for step, rate in rates])

    shares = [
        series("acceptance", "acceptance", BLUE, 100),
        series("coverage", "coverage", GREEN, 100),
    ]
    passes = [series("tokens_per_pass", "tokens per pass", ORANGE)]
    panels = [
        Panel("learner step", shares, y="%", low=0, high=100, marks=marks, whole=True),
        Panel("learner step", passes, y="tokens per forward pass", low=0, marks=marks, whole=True),
    ]
    label = "Acceptance, coverage and tokens per pass of drafts over steps"
    return draw_panels("drafting", label, panels, height_in=3.0)
