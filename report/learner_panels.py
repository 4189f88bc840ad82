"""Learner panels: a small chart of each number that tells whether a learner's steps are sound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from antiphon.core.metrics import LEARNER_METRICS, staleness_metric
from antiphon.core.reporting.run_view import RunView, StepFacts
from antiphon.report.canvas import BLUE, GREEN, MUTED, ORANGE, RED, VIOLET, Plot
from antiphon.report.line_panels import Panel, Point, Series, draw_panels

STALENESS_READ = 8
"""Largest staleness whose own KL can be read."""


@dataclass(frozen=True, slots=True)
class LearnerPanel:
    """A chart, its name, and what it shows."""

    title: str
    text: str
    plot: Plot


@dataclass(frozen=True, slots=True)
class Chart:
    """How a metric that every step reports is drawn."""

    title: str
    metric: str
    colour: str
    words: str
    """What its value is called."""
    low: float | None = 0.0
    """Where the axis of values begins; None follows the values."""
    read: Mapping[str, str] = field(default_factory=dict)
    """Metric -> its words; told where a reader points, and not drawn."""


CHARTS = (
    Chart("Loss", "loss", ORANGE, "loss", low=None),
    Chart("Entropy", "entropy_estimate", GREEN, "entropy"),
    Chart(
        "KL between engine and learner",
        "kl_k3",
        RED,
        "k3 estimate",
        read={"kl_k1": "k1 estimate"}
        | {staleness_metric("kl_k3", s): f"k3 of staleness {s}" for s in range(STALENESS_READ + 1)},
    ),
    Chart("Importance ratio", "ratio_mean", VIOLET, "mean", low=None, read={"ratio_max": "largest"}),
    Chart("Clip share", "clip_share", BLUE, "clipped", read={"truncated_share": "truncated or masked"}),
    Chart("Effective sample share", "effective_sample_share", VIOLET, "share", low=None),
    Chart(
        "Gradient norm", "gradient_norm", ORANGE, "before clipping", read={"learning_rate": "learning rate"}
    ),
)
_MEANINGS = {metric.name: metric for metric in LEARNER_METRICS}


def learner_panels(view: RunView) -> list[LearnerPanel]:
    """Return the charts of a run's steps; one whose numbers were not recorded is left out."""
    panels = [_of_metric(view, chart) for chart in CHARTS]
    panels += [_length(view), _filtered(view)]
    return [panel for panel in panels if panel is not None]


def _of_metric(view: RunView, chart: Chart) -> LearnerPanel | None:
    def points(metric: str) -> list[Point]:
        return _points(view, lambda step: step.metric(metric))

    series = [Series(chart.words, chart.colour, points(chart.metric))]
    series += [Series(words, MUTED, points(metric), hidden=True) for metric, words in chart.read.items()]
    metric = _MEANINGS[chart.metric]
    unit = "" if metric.unit == "1" else f", {metric.unit}"
    return _panel(chart.metric, chart.title, f"{metric.meaning}{unit}", series, chart.low)


def _length(view: RunView) -> LearnerPanel | None:
    trained = _points(view, lambda step: step.completion_tokens_mean)
    if not trained:
        return None
    held = [(float(e.version), e.completion_tokens_mean) for e in view.evaluations]
    series = [Series("training", VIOLET, trained), Series("held-out", BLUE, held, style="points")]
    return _panel("length", "Completion length", "mean tokens of a completion", series)


def _filtered(view: RunView) -> LearnerPanel | None:
    def share(step: StepFacts) -> float | None:
        groups = step.groups + step.groups_filtered
        return 100 * step.groups_filtered / groups if groups else None

    text = "% of the step's groups that were left out because all of their samples got the same reward"
    return _panel("filtered", "Groups filtered", text, [Series("filtered, %", BLUE, _points(view, share))])


def _points(view: RunView, value: Callable[[StepFacts], float | None]) -> list[Point]:
    found = [(step.step, value(step)) for step in view.steps]
    return [(float(step), y) for step, y in found if y is not None]


def _panel(
    name: str, title: str, text: str, series: Sequence[Series], low: float | None = 0.0
) -> LearnerPanel | None:
    present = [one for one in series if one.points]
    if all(one.hidden for one in present):
        return None
    panel = Panel("learner step", present, low=low, whole=True)
    plot = draw_panels(name, f"{title} over learner steps", [panel], small=True)
    sentence = text if text.startswith("k3") else text[:1].upper() + text[1:]
    return LearnerPanel(title, f"{sentence}.", plot)
