"""Run charts: what a run learned, when its stages worked, how stale its data was, where seconds and tokens
went; and what a plan expects."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import NamedTuple

from antiphon.core.capacity.planner import Assessment, Plan
from antiphon.core.drafting.statistics import drafting_rates
from antiphon.core.loop.work_account import Use
from antiphon.core.metrics import LEARNER_METRICS, staleness_metric
from antiphon.core.reporting.deliveries import Deliveries
from antiphon.core.reporting.figures import interval, score_name
from antiphon.core.reporting.run_view import Bar, RunView, StepFacts, merge
from antiphon.core.reporting.suite_scores import SuiteResult
from antiphon.report.charts import (
    CYCLE,
    SECONDS,
    SMOOTHING_STEPS,
    Bars,
    Box,
    Chart,
    Lane,
    Lanes,
    Marks,
    Panel,
    Part,
    Point,
    Series,
    frame,
    smooth,
    smoothed,
)

ZOOM_STEPS = 6
"""Steps that the close view shows."""
FINEST_GAPS = 4000
"""Gaps between bars that are narrower than this part of the window are not drawn."""
TALL = 2.4
"""Height of a worker's lane in the close view, in those of other lanes."""
MOMENTS = 160
"""Moments of a window that can be read."""
THROUGHPUT_BINS = 48
STALENESS_READ = 8
"""Largest staleness whose own KL can be read."""
SHADES = (0.45, 0.7, 0.95)
"""Of groups, by the policy version they were leased under."""
LANE_COLOURS = {
    "reward": "violet",
    "training": "orange",
    "publishing": "green",
    "broadcast": "green",
    "evaluation": "muted",
}
"""Colours of all lanes but those of workers."""
USE_COLOURS = {
    Use.USEFUL: "green",
    Use.OPEN: "blue",
    Use.FILTERED: "violet",
    Use.STALE: "orange",
    Use.DUPLICATE: "muted",
    Use.PREEMPTED: "red",
    Use.VOIDED: "ink",
    Use.UNTRUSTED: "paper",
    Use.IDLE: "grid",
}
"""What became of work, in the order in which it is drawn; the start of engines is no part of it."""


def learning_curve(view: RunView, suites: Sequence[SuiteResult] = ()) -> Chart | None:
    """Draw training reward, held-out pass@1 and suites over steps, and seconds; None without any reward."""
    rewards = [(s.step, s.at_s, s.reward_mean) for s in view.steps if s.reward_mean is not None]
    held = view.evaluations
    if not rewards and not held:
        return None
    values = [*(reward for _, _, reward in rewards), *(e.reward_mean for e in held)]

    def series(place: int, evaluated_at: Sequence[float]) -> list[Series]:
        points = [(float(reward[place]), reward[2]) for reward in rewards]
        training = [
            Series("training reward of one batch", "orange", points, style="faint"),
            Series(f"mean of the last {SMOOTHING_STEPS} batches", "orange", smoothed(points)),
        ]
        return [*(training if points else ()), *([_held_out(evaluated_at, view)] if held else ())]

    low, high = frame(values, view.reward_range)
    steps, seconds = series(0, [e.version for e in held]), series(1, [e.at_s for e in held])
    marks = break_marks(view, *view.window)
    panels = [
        Panel("learner step, policy version", steps, y="reward", low=low, high=high, whole=True),
        Panel(SECONDS, seconds, y="reward", low=low, high=high, left=0.0, marks=marks),
    ]
    if suites:
        drawn = [
            _suite(name, CYCLE[place % len(CYCLE)], [one for one in suites if one.suite == name])
            for place, name in enumerate(dict.fromkeys(one.suite for one in suites))
        ]
        panels.append(Panel("policy version", drawn, y="suites, 95% interval", low=0.0, high=1.0, whole=True))
    label = f"Training reward and held-out {score_name(view.reward_range)} over steps and over seconds"
    return Chart("learning", label, panels, height=290)


def _held_out(places: Sequence[float], view: RunView) -> Series:
    held, within = view.evaluations, view.reward_range
    points = [(float(x), e.reward_mean) for x, e in zip(places, held, strict=True)]
    spread = [interval(e.reward_mean, e.prompts, within) for e in held]
    return Series(f"held-out {score_name(within)}, 95% interval", "blue", points, spread, style="dots")


def _suite(name: str, colour: str, results: Sequence[SuiteResult]) -> Series:
    found = [(float(one.version or 0), next(iter(one.scores.values()))) for one in results]
    spread = [(score.high - score.low) / 2 for _, score in found]
    return Series(name, colour, [(x, score.mean) for x, score in found], spread, style="dots")


def break_marks(view: RunView, start_s: float, stop_s: float) -> list[tuple[float, str]]:
    """Return where the clock stood still between two instants."""
    return [(at_s, "break") for at_s in view.breaks if start_s < at_s < stop_s]


def timeline(view: RunView) -> Chart | None:
    """Draw the whole run: a lane for each worker and stage; None before the first lease."""
    return _lanes(view, *view.window, "timeline", close=False)


def timeline_zoom(view: RunView) -> Chart | None:
    """Draw a few steps in the middle of the run, with their numbers; None for a very short run."""
    if len(view.steps) < 3:
        return None
    first = max(1, len(view.steps) // 2 - ZOOM_STEPS // 2)
    last = min(len(view.steps) - 1, first + ZOOM_STEPS)
    return _lanes(view, view.steps[first - 1].at_s, view.steps[last].at_s, "timeline-zoom", close=True)


def _lanes(view: RunView, start: float, stop: float, name: str, *, close: bool) -> Chart | None:
    stop = max(stop, start + 1.0)
    stages: list[tuple[str, Iterable[Bar], str]] = [
        *((f"rollout {worker}", bars, "") for worker, bars in sorted(view.rollout.items())),
        ("reward", view.reward, ""),
        ("training", view.training, "step"),
        ("publishing", view.publishing, "version"),
        ("broadcast", view.broadcast, "version"),
        ("evaluation", view.evaluating, "version"),
    ]
    lanes = []
    for lane, every, counted in stages:
        bars = [bar for bar in every if bar.stop_s > start and bar.start_s < stop]
        if not bars:
            continue
        tall = close and lane.startswith("rollout")
        boxes, slots = _groups(bars) if tall else (_spans(bars, start, stop, close and bool(counted)), 1)
        told = _told(bars, start, stop, bool(counted))
        colour, height = LANE_COLOURS.get(lane, "blue"), TALL if tall else 1.0
        lanes.append(Lane(lane, colour, boxes, told, counted, slots, height))
    label = f"Which stage worked when, second {start:.0f} to {stop:.0f}"
    drawn = Lanes(start, stop, lanes, tuple(break_marks(view, start, stop)), SECONDS)
    return Chart(name, label, drawn) if lanes else None


def _spans(bars: Sequence[Bar], start: float, stop: float, numbered: bool) -> list[Box]:
    if numbered:
        return [Box(bar.start_s, bar.stop_s, text=str(bar.number)) for bar in bars]
    return [Box(a, b) for a, b in merge(bars, start, stop, (stop - start) / FINEST_GAPS)]


def _groups(bars: Sequence[Bar]) -> tuple[list[Box], int]:
    """Return every group as a thin box, and how many of them stand above each other."""
    free: list[float] = []
    boxes = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        slot = next((i for i, until in enumerate(free) if until <= bar.start_s), len(free))
        free[slot : slot + 1] = [bar.stop_s]
        boxes.append(Box(bar.start_s, bar.stop_s, slot, SHADES[bar.number % len(SHADES)]))
    return boxes, len(free)


def _told(bars: Sequence[Bar], start: float, stop: float, counted: bool) -> list[int | None]:
    """Return what a lane did at each moment: the number of its last bar there, or how many there were."""
    pitch = (stop - start) / MOMENTS
    first_s = start + pitch / 2
    numbers: list[int | None] = [None] * MOMENTS
    for bar in bars:
        first = max(0, -int(-(bar.start_s - first_s) // pitch))
        last = min(MOMENTS - 1, int((bar.stop_s - first_s) // pitch))
        for place in range(first, last + 1):
            numbers[place] = bar.number if counted else (numbers[place] or 0) + 1
    return numbers


def staleness(histogram: Mapping[int, int], bound: int | None) -> Chart | None:
    """Draw how stale the trained trajectories were, and the bound; None where nothing trained."""
    total = sum(histogram.values())
    if not total:
        return None
    ages = range(max([*histogram, bound or 0, 1]) + 1)
    shares = [100 * histogram.get(age, 0) / total for age in ages]
    words = [f"{share:.1f}% ({histogram.get(age, 0):,})" for age, share in enumerate(shares)]
    points = [(float(age), share) for age, share in enumerate(shares)]
    marks = [] if bound is None else [(bound + 0.5, f"bound S = {bound}")]
    series = Series("trajectories", "green", points, style="bars", words=words)
    x, y = "staleness, policy versions", "% of trained trajectories"
    panel = Panel(x, [series], y=y, low=0.0, high=max(shares) * 1.12, marks=marks, whole=True)
    return Chart("staleness", "Histogram of staleness", [panel], small=True)


def throughput(view: RunView) -> Chart | None:
    """Draw tokens per second, sampled by the workers and trained on; None where nothing was sampled."""
    start, stop = view.window
    if stop <= start or not len(view.generated):
        return None
    width = (stop - start) / THROUGHPUT_BINS

    def series(name: str, colour: str, samples: Iterable[tuple[float, int]]) -> Series:
        bins = [0.0] * THROUGHPUT_BINS
        for at, tokens in samples:
            if start <= at <= stop:
                bins[min(int((at - start) / width), THROUGHPUT_BINS - 1)] += tokens / width
        centres = [start + (i + 0.5) * width for i in range(THROUGHPUT_BINS)]
        return Series(name, colour, list(zip(centres, smooth(bins), strict=True)))

    trained = [(step.at_s, step.tokens) for step in view.steps]
    curves = [series("sampled by workers", "blue", view.generated), series("trained on", "orange", trained)]
    marks = break_marks(view, start, stop)
    panel = Panel(SECONDS, curves, y="completion tokens per second", low=0, left=0, marks=marks)
    return Chart("throughput", "Tokens per second, sampled and trained on", [panel], small=True)


def busy(shares: Mapping[str, float]) -> Chart | None:
    """Draw the share of the run in which each worker and stage was busy; None where none was."""
    if not any(shares.values()):
        return None
    rows = [
        (name, f"{100 * share:.1f}%", [Part(name, LANE_COLOURS.get(name, "blue"), 100 * share)])
        for name, share in shares.items()
    ]
    drawn = Bars("% of the seconds from first lease to last commit", rows)
    return Chart("busy", "Share of time in which each stage was busy", drawn, small=True)


def work(seconds: Mapping[str, float], tokens: Mapping[str, int]) -> Chart | None:
    """Draw what became of worker seconds and of completion tokens; None where nothing was booked."""
    worked = {use: value for use, value in seconds.items() if use != Use.STARTING}
    booked: dict[str, Mapping[str, float]] = {"worker seconds": worked, "tokens": tokens}
    booked = {name: uses for name, uses in booked.items() if sum(uses.values()) > 0}
    if not booked:
        return None
    rows = []
    for name, uses in booked.items():
        whole = sum(uses.values())
        found = [(use, colour) for use, colour in USE_COLOURS.items() if uses.get(use, 0) > 0]
        parts = [Part(_use_words(use, booked), colour, 100 * uses[use] / whole) for use, colour in found]
        rows.append((name, "", parts))
    return Chart("work", "What became of worker seconds and tokens", Bars("% of all", rows))


def _use_words(use: Use, booked: Mapping[str, Mapping[str, float]]) -> str:
    parts = []
    if seconds := booked.get("worker seconds", {}).get(use, 0):
        parts.append(f"{seconds:,.0f} s")
    if tokens := booked.get("tokens", {}).get(use, 0):
        parts.append(f"{tokens:,} tokens")
    return f"{use}: {', '.join(parts)}"


def drafting(view: RunView) -> Chart | None:
    """Draw how often drafts were right and how many tokens a pass gave; None where nothing drafted."""
    rates = [(float(s.step), drafting_rates(s.drafting)) for s in view.steps if s.drafting is not None]
    if not rates:
        return None
    marks = [(float(step), f"epoch {epoch}") for step, epoch in view.epoch_starts()]

    def series(name: str, words: str, colour: str, scale: float = 1.0) -> Series:
        return Series(words, colour, [(step, scale * rate[name]) for step, rate in rates])

    shares = [series("acceptance", "acceptance", "blue", 100), series("coverage", "coverage", "green", 100)]
    passes = [series("tokens_per_pass", "tokens per pass", "orange")]
    panels = [
        Panel("learner step", shares, y="%", low=0, high=100, marks=marks, whole=True),
        Panel("learner step", passes, y="tokens per forward pass", low=0, marks=marks, whole=True),
    ]
    return Chart("drafting", "Acceptance, coverage and tokens per pass of drafts over steps", panels)


def deliveries(found: Deliveries) -> Chart | None:
    """Draw how long each version took to its slowest worker, and its bytes; None without deliveries."""
    versions = found.in_order()
    if not versions:
        return None

    def series(name: str, colour: str, values: Iterable[float], hidden: bool = False) -> Series:
        points = [(float(known.version), value) for known, value in zip(versions, values, strict=True)]
        return Series(name, colour, points, hidden=hidden)

    origin = [(known.bytes - known.relayed_bytes) / 1e6 for known in versions]
    relayed = [known.relayed_bytes / 1e6 for known in versions]
    seconds = [
        series("seconds to the last worker", "orange", [known.seconds_to_last for known in versions]),
        series("workers", "muted", [float(known.workers) for known in versions], hidden=True),
    ]
    sent = [
        series("from the origin, MB", "blue", origin),
        series("from other sources, MB", "green", relayed),
    ]
    panels = [
        Panel("policy version", seconds, y="seconds", low=0, whole=True),
        Panel("policy version", sent, y="MB to all workers", low=0, whole=True),
    ]
    label = "Seconds until the last worker had each version, and the bytes that went to the workers"
    return Chart("deliveries", label, panels)


def capacity(plan: Plan, max_staleness: int) -> Chart:
    """Draw seconds per step over the staleness bound, and seconds and dollars over the number of workers."""
    bounds = list(enumerate(plan.by_bound))
    sizes = [(one.workers, one) for one in plan.by_workers]
    marks = [(float(max_staleness), "configured")]
    if plan.least_staleness != max_staleness:
        marks.append((float(plan.least_staleness), "never waits"))
    fleet = [(float(plan.chosen.workers), "planned")]

    def panel(x: str, points: list[tuple[int, Assessment]], marks: Marks, dollars: bool = False) -> Panel:
        values = [(float(at), one.usd_per_step if dollars else one.pace.step_s) for at, one in points]
        name, colour, y = ("USD", "orange", "dollars") if dollars else ("s", "blue", "seconds")
        series = Series(f"{name} per step", colour, values, style="dots")
        return Panel(x, [series], f"{y} per step", low=0.0, marks=marks, whole=True)

    panels = [
        panel("staleness bound", bounds, marks),
        panel("workers", sizes, fleet),
        panel("workers", sizes, fleet, dollars=True),
    ]
    label = "Seconds per step by staleness bound; seconds and dollars per step by number of workers"
    return Chart("capacity", label, panels, height=290)


class LearnerPanel(NamedTuple):
    """A chart of a number that tells whether a learner's steps are sound, its name, and what it shows."""

    title: str
    text: str
    chart: Chart


_Value = Callable[[StepFacts], float | None]
_KL = {staleness_metric("kl_k3", s): f"k3 of staleness {s}" for s in range(STALENESS_READ + 1)}
METRIC_CHARTS: tuple[tuple[str, str, str, str, float | None, Mapping[str, str]], ...] = (
    ("Loss", "loss", "orange", "loss", None, {}),
    ("Entropy", "entropy_estimate", "green", "entropy", 0.0, {}),
    ("KL between engine and learner", "kl_k3", "red", "k3 estimate", 0.0, {"kl_k1": "k1 estimate"} | _KL),
    ("Importance ratio", "ratio_mean", "violet", "mean", None, {"ratio_max": "largest"}),
    ("Clip share", "clip_share", "blue", "clipped", 0.0, {"truncated_share": "truncated or masked"}),
    ("Effective sample share", "effective_sample_share", "violet", "share", None, {}),
    ("Gradient norm", "gradient_norm", "orange", "before clipping", 0.0, {"learning_rate": "learning rate"}),
)
"""Title, metric, its colour and what it is called, where the axis begins (None: it follows the values), and
metrics that can be read where a reader points, without being drawn."""
_MEANINGS = {metric.name: metric for metric in LEARNER_METRICS}


def learner_panels(view: RunView) -> list[LearnerPanel]:
    """Return the charts of a run's steps; one whose numbers were not recorded is left out."""
    panels: list[LearnerPanel] = []

    def points(value: _Value) -> list[Point]:
        known = [(step.step, value(step)) for step in view.steps]
        return [(float(step), y) for step, y in known if y is not None]

    def add(name: str, title: str, text: str, series: Sequence[Series], low: float | None = 0.0) -> None:
        present = [one for one in series if one.points]
        if any(not one.hidden for one in present):
            panel = Panel("learner step", present, low=low, whole=True)
            chart = Chart(name, f"{title} over learner steps", [panel], 190, small=True)
            sentence = text if text.startswith("k3") else text[:1].upper() + text[1:]
            panels.append(LearnerPanel(title, f"{sentence}.", chart))

    for title, name, colour, words, low, read in METRIC_CHARTS:
        series = [Series(words, colour, points(methodcaller("metric", name)))]
        series += [
            Series(said, "muted", points(methodcaller("metric", other)), hidden=True)
            for other, said in read.items()
        ]
        unit = "" if _MEANINGS[name].unit == "1" else f", {_MEANINGS[name].unit}"
        add(name, title, f"{_MEANINGS[name].meaning}{unit}", series, low)
    if trained := points(lambda step: step.completion_tokens_mean):
        held = [(float(e.version), e.completion_tokens_mean) for e in view.evaluations]
        series = [Series("training", "violet", trained), Series("held-out", "blue", held, style="points")]
        add("length", "Completion length", "mean tokens of a completion", series)

    def filtered(step: StepFacts) -> float | None:
        groups = step.groups + step.groups_filtered
        return 100 * step.groups_filtered / groups if groups else None

    text = "% of the step's groups that were left out because all of their samples got the same reward"
    add("filtered", "Groups filtered", text, [Series("filtered, %", "blue", points(filtered))])
    return panels
