"""Plots: a run drawn as SVG that follows the page's light or dark palette.

Colours are placeholders that the page replaces with its own variables, text stays text, and
equal data gives equal SVG.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from antiphon.core.drafting.statistics import drafting_rates
from antiphon.core.loop.work_account import Use
from antiphon.lineage.report.timeline import Bar, RunPicture, merge

INK, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
BLUE, ORANGE, GREEN, VIOLET, RED = "#050505", "#060606", "#070707", "#080808", "#090909"
NAMES = ("ink", "muted", "grid", "paper", "blue", "orange", "green", "violet", "red")
VARIABLES = dict(zip((INK, MUTED, GRID, PAPER, BLUE, ORANGE, GREEN, VIOLET, RED), NAMES, strict=True))
"""Placeholder colour -> CSS variable without its dashes."""

SETTINGS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
}

SMOOTHING_STEPS = 5
"""Steps of the running mean drawn over the noisy reward of single batches."""
ZOOM_STEPS = 6
"""Steps that the close view of the timeline shows."""
FINEST_GAPS = 4000
"""Gaps between bars that are narrower than this part of the timeline are not drawn."""
THROUGHPUT_BINS = 48
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
"""What became of work, in the order in which it is drawn."""
MOST_EPOCHS_MARKED = 8
"""Epoch boundaries that one panel shows."""


def learning_curve(picture: RunPicture) -> str:
    """Draw training reward and held-out pass@1, against steps and against seconds."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        steps = [s for s in picture.steps if s.reward_mean is not None]
        rewards = [float(s.reward_mean or 0.0) for s in steps]
        held = picture.evaluations
        places: list[tuple[Any, list[float], list[float], str]] = [
            (left, [s.step for s in steps], [e.version for e in held], "learner step"),
            (right, [s.at_s for s in steps], [e.at_s for e in held], "seconds since the first lease"),
        ]
        for axes, positions, evaluated_at, label in places:
            axes.plot(positions, rewards, color=ORANGE, alpha=0.35, linewidth=1.0)
            axes.plot(positions, _smooth(rewards), color=ORANGE, label="training reward, mean of batches")
            axes.errorbar(
                evaluated_at,
                [e.reward_mean for e in held],
                yerr=[_interval(e.reward_mean, e.prompts) for e in held],
                color=BLUE,
                marker="o",
                markersize=4,
                capsize=2,
                label="held-out pass@1, 95% interval",
            )
            axes.set_xlabel(label)
            axes.grid(axis="y")
        left.set(ylim=(0.0, 1.0), ylabel="reward")
        left.legend(loc="upper left", fontsize=8)

    return _svg("learning", (9.6, 3.2), draw, "Training reward and held-out pass@1 over steps and seconds")


def completion_length(picture: RunPicture) -> str:
    """Draw the mean completion length of each step's groups."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        steps = [s for s in picture.steps if s.completion_tokens_mean is not None]
        lengths = [float(s.completion_tokens_mean or 0.0) for s in steps]
        axes.plot([s.step for s in steps], lengths, color=VIOLET, label="training")
        held = picture.evaluations
        lengths = [e.completion_tokens_mean for e in held]
        axes.plot([e.version for e in held], lengths, "o", color=BLUE, markersize=4, label="held-out")
        axes.legend(loc="lower right", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="learner step", ylabel="tokens per completion")
        axes.grid(axis="y")

    return _svg("length", (4.7, 2.8), draw, "Mean completion length over steps")


def staleness(histogram: dict[int, int], bound: int | None) -> str:
    """Draw how stale the trained trajectories were, and the bound."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        total = max(1, sum(histogram.values()))
        top = max([*histogram, bound or 0, 1])
        shares = [100 * histogram.get(s, 0) / total for s in range(top + 1)]
        bars = axes.bar(range(top + 1), shares, color=GREEN, width=0.7)
        axes.bar_label(bars, [f"{share:.0f}%" if share else "" for share in shares], color=MUTED, fontsize=8)
        if bound is not None:
            axes.axvline(bound + 0.5, color=RED, linewidth=1.2)
            axes.text(
                bound + 0.47, max(shares) * 1.08, f"bound S = {bound}", color=RED, ha="right", fontsize=8
            )
        axes.set(xlim=(-0.6, top + 0.8), ylim=(0, max(*shares, 1.0) * 1.2))
        axes.set(xlabel="staleness, policy versions", ylabel="% of trained trajectories")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _svg("staleness", (4.7, 2.8), draw, "Histogram of staleness")


def timeline(picture: RunPicture) -> str:
    """Draw the whole run: one lane per worker and plane against wall clock."""
    start, stop = picture.window
    return _timeline(picture, start, stop, "timeline", labelled=False)


def timeline_zoom(picture: RunPicture) -> str:
    """Draw a few steps in the middle of the run, with their numbers; empty for a very short run."""
    if len(picture.steps) < 3:
        return ""
    middle = len(picture.steps) // 2
    first = max(1, middle - ZOOM_STEPS // 2)
    last = min(len(picture.steps) - 1, first + ZOOM_STEPS)
    window = picture.steps[first - 1].at_s, picture.steps[last].at_s
    return _timeline(picture, *window, "timeline-zoom", labelled=True)


def throughput(picture: RunPicture) -> str:
    """Draw tokens per second: sampled by the workers, and trained on by the learner."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        start, stop = picture.window
        width = max((stop - start) / THROUGHPUT_BINS, 1e-9)
        trained = [(s.at_s, s.tokens) for s in picture.steps]
        for samples, colour, label in (
            (picture.generated, BLUE, "sampled by workers"),
            (trained, ORANGE, "trained on"),
        ):
            bins = [0.0] * THROUGHPUT_BINS
            for at, tokens in samples:
                if start <= at <= stop:
                    bins[min(int((at - start) / width), THROUGHPUT_BINS - 1)] += tokens / width
            centres = [start + (i + 0.5) * width for i in range(THROUGHPUT_BINS)]
            axes.plot(centres, _smooth(bins), color=colour, label=label)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="seconds since the first lease", ylabel="completion tokens per second")
        axes.grid(axis="y")
        axes.legend(loc="lower right", fontsize=8)

    return _svg("throughput", (4.7, 2.8), draw, "Tokens per second by plane")


def busy(shares: Mapping[str, float]) -> str:
    """Draw each plane's busy and idle share of the run."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        names = list(shares)[::-1]
        values = [100 * shares[name] for name in names]
        axes.barh(names, values, color=[_colour(name) for name in names], height=0.6)
        axes.barh(names, [100 - v for v in values], left=values, color=GRID, height=0.6)
        for row, value in enumerate(values):
            axes.text(102, row, f"{value:.1f}%", va="center", color=INK, fontsize=8)
        axes.set(xlim=(0, 112), xlabel="% of the seconds from first lease to last commit")
        axes.tick_params(axis="y", length=0)

    return _svg("busy", (4.7, 2.8), draw, "Share of time in which each plane was busy")


def work(seconds: Mapping[str, float], tokens: Mapping[str, int]) -> str:
    """Draw what became of worker seconds and of completion tokens; empty where nothing was booked."""
    rows = [("tokens", tokens), ("worker seconds", seconds)]
    rows = [(name, booked) for name, booked in rows if sum(booked.values()) > 0]
    if not rows:
        return ""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        names = [name for name, _ in rows]
        left = [0.0] * len(rows)
        for use, colour in USE_COLOURS.items():
            shares = [100 * max(0.0, booked.get(use, 0)) / sum(booked.values()) for _, booked in rows]
            if not any(shares):
                continue
            axes.barh(names, shares, left=left, color=colour, height=0.6, label=_use_words(use, rows))
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.set(xlim=(0, 100), xlabel="% of all")
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, fontsize=8)

    return _svg("work", (9.6, 2.4), draw, "What became of worker seconds and tokens")


def _use_words(use: Use, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    booked = dict(rows)
    parts = []
    if seconds := booked.get("worker seconds", {}).get(use, 0):
        parts.append(f"{seconds:,.0f} s")
    if tokens := booked.get("tokens", {}).get(use, 0):
        parts.append(f"{tokens:,} tokens")
    return f"{use}: {', '.join(parts)}"


def drafting(picture: RunPicture) -> str:
    """Draw how often drafts were right and how many tokens a pass gave; empty where nothing drafted."""
    steps = [step.step for step in picture.steps if step.drafting is not None]
    rates = [drafting_rates(step.drafting) for step in picture.steps if step.drafting is not None]
    if not rates:
        return ""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        shares = {"acceptance": "drafted tokens that were right", "coverage": "tokens drafted for"}
        for colour, (name, label) in zip((BLUE, GREEN), shares.items(), strict=True):
            left.plot(steps, [100 * rate[name] for rate in rates], color=colour, label=f"{name}: {label}")
        left.set(ylim=(0, 100), ylabel="%")
        left.legend(loc="upper left", fontsize=8)
        values = [rate["tokens_per_pass"] for rate in rates]
        right.plot(steps, values, color=ORANGE)
        right.set(ylim=(0, 1.2 * max(*values, 1.0)), ylabel="tokens per forward pass")
        for axes in (left, right):
            _mark_epochs(axes, picture.epoch_starts())
            axes.set_xlabel("learner step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y")

    return _svg("drafting", (9.6, 3.0), draw, "Acceptance, coverage and tokens per pass of drafts over steps")


def _mark_epochs(axes: Any, starts: Sequence[tuple[int, int]]) -> None:
    """Draw a line where an epoch begins, with its number above; of many epochs only some."""
    for step, epoch in starts[:: -(-len(starts) // MOST_EPOCHS_MARKED) or 1]:
        axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=":")
        place = axes.get_xaxis_transform()
        axes.text(step, 1.01, f"epoch {epoch}", transform=place, color=MUTED, fontsize=7, ha="center")


def _timeline(picture: RunPicture, start: float, stop: float, name: str, *, labelled: bool) -> str:
    lanes = [
        *((f"rollout {worker}", bars, BLUE) for worker, bars in sorted(picture.rollout.items())),
        ("reward", picture.reward, VIOLET),
        ("training", picture.training, ORANGE),
        ("publishing", picture.publishing, GREEN),
        ("broadcast", picture.broadcast, GREEN),
        ("evaluation", picture.evaluating, MUTED),
    ]
    lanes = [lane for lane in lanes if lane[1]]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, (lane, bars, colour) in enumerate(reversed(lanes)):
            if lane.startswith("rollout") and labelled:
                _draw_groups(axes, row, [b for b in bars if b.stop_s > start and b.start_s < stop], colour)
            elif labelled and lane != "reward":
                _draw_numbered(axes, row, bars, colour, (start, stop))
            else:
                gap_s = (stop - start) / FINEST_GAPS
                spans = [(a, b - a) for a, b in merge(bars, start, stop, gap_s)]
                axes.broken_barh(
                    spans, (row - 0.36, 0.72), facecolors=colour, edgecolors=PAPER, linewidth=0.3
                )
        axes.set_yticks(range(len(lanes)), [lane for lane, _, _ in reversed(lanes)])
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=(start, max(stop, start + 1.0)), ylim=(-0.6, max(len(lanes), 1) - 0.4))
        axes.set_xlabel("seconds since the first lease")
        axes.grid(axis="x")

    height = 0.9 + 0.34 * len(lanes) + (0.5 * len(picture.rollout) if labelled else 0.0)
    return _svg(name, (9.6, height), draw, "Which plane worked when")


def _draw_numbered(
    axes: Any, row: int, bars: Sequence[Bar], colour: str, window: tuple[float, float]
) -> None:
    start, stop = window
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": PAPER, "fontsize": 8}
    for bar in bars:
        low, high = max(bar.start_s, start), min(bar.stop_s, stop)
        if high <= low:
            continue
        axes.barh(row, high - low, left=low, height=0.72, color=colour, edgecolor=PAPER, linewidth=0.6)
        if high - low > 0.03 * (stop - start):
            axes.text((low + high) / 2, row, str(bar.number), **style)


def _draw_groups(axes: Any, row: int, bars: Sequence[Bar], colour: str) -> None:
    """Draw every group as a thin bar; the shade changes with the policy version it was leased under."""
    free: list[float] = []
    placed = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        slot = next((i for i, until in enumerate(free) if until <= bar.start_s), len(free))
        free[slot : slot + 1] = [bar.stop_s]
        placed.append((bar, slot))
    height = 0.84 / max(1, len(free))
    for bar, slot in placed:
        axes.barh(
            row - 0.42 + (slot + 0.5) * height,
            bar.seconds,
            left=bar.start_s,
            height=height * 0.9,
            color=colour,
            alpha=(0.45, 0.7, 0.95)[bar.number % 3],
            linewidth=0,
        )


def _colour(lane: str) -> str:
    return {"reward": VIOLET, "training": ORANGE, "broadcast": GREEN}.get(lane, BLUE)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the running mean over the last steps; as long as `values`."""
    windows = [values[max(0, i - SMOOTHING_STEPS + 1) : i + 1] for i in range(len(values))]
    return [sum(recent) / len(recent) for recent in windows]


def _interval(share: float, count: int) -> float:
    """Return the half-width of a 95% interval of a mean of `count` values in 0..1."""
    return 1.96 * math.sqrt(max(share * (1 - share), 0.0) / count) if count else 0.0


def _svg(name: str, size: tuple[float, float], draw: Callable[[Figure], None], label: str) -> str:
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        sink = io.StringIO()
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    text = sink.getvalue()
    head, _, body = text[text.index("<svg") + len("<svg") :].partition(">")
    head = f'<svg role="img" aria-label="{label}"' + re.sub(r' (?:width|height)="[^"]*"', "", head)
    text = f"{head}>{re.sub(r'<metadata>.*?</metadata>', '', body, flags=re.DOTALL)}"
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for placeholder, variable in VARIABLES.items():
        text = text.replace(placeholder, f"var(--{variable})")
    return text
