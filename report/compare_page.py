"""Comparison page: several runs on one page that needs nothing else, no network and no server.

Reward over steps, seconds, tokens and dollars, what differs between the configurations, and every figure
side by side.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from antiphon.core.reporting.figures import VersionTotals, interval, share
from antiphon.report.charts import CYCLE, SMOOTHING_STEPS, Chart, Panel, Series, plain_charts, smoothed
from antiphon.report.comparison import SCORES, ComparedRun, Comparison
from antiphon.report.render import render
from antiphon.system.files import write_atomically

Place = Callable[[VersionTotals], float]
AXES: tuple[tuple[str, str, Place], ...] = (
    ("steps", "learner step, policy version", lambda totals: float(totals.version)),
    ("seconds", "seconds since the first lease", lambda totals: totals.wall_s),
    ("tokens", "completion tokens sampled", lambda totals: float(totals.tokens_sampled)),
    ("dollars", "dollars", lambda totals: totals.dollars),
)
"""Each curve's x: name, what it counts, and where a version stands on it."""


def build_comparison_page(comparison: Comparison, out: Path) -> Path:
    """Write the page to `out` and return its path.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    runs, parameters = comparison.runs, comparison.parameters
    drawn = {name: draw_curves(runs, name, label, place) for name, label, place in AXES}
    page = render(
        "compare.html",
        title="Comparison of " + ", ".join(run.run_id for run in runs),
        brand="Antiphon comparison",
        heading=f"{len(runs)} runs",
        facts=[run.run_id for run in runs],
        cards=[(run.run_id, share(run.figures.reward_last), _more(run)) for run in runs],
        drawn=drawn,
        charts=plain_charts(drawn.values()),
        names=[run.run_id for run in runs],
        parameters=[(key, *map(json.dumps, values)) for key, values in parameters.items()],
        figures=[(label, *texts) for label, _, texts in comparison.figures],
        over_seeds=seed_rows(comparison),
        seed_head=SEED_HEAD,
        warnings=comparison.warnings,
        notes=_notes(drawn, bool(comparison.over_seeds)),
    )
    write_atomically(out, page.encode("utf-8"))
    return out


def seed_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a row for each group of runs that differ in their seed alone: name, seeds, scores, as texts."""
    return [
        (
            group.name,
            ", ".join(str(run.config.run.seed) for run in group.runs),
            *(
                f"{share(group.scores[name][0])} ± {share(group.scores[name][1])}"
                if name in group.scores
                else "–"
                for name in SCORES
            ),
        )
        for group in comparison.over_seeds
    ]


SEED_HEAD = ("runs", "seeds", "pass@1 before", "after", "best")
"""What `seed_rows` holds; scores are means over the runs with their 95% intervals."""


def draw_curves(runs: Sequence[ComparedRun], name: str, label: str, place: Place) -> Chart | None:
    """Draw training reward and held-out pass@1 of all runs; None where no run has moved on this axis."""
    places = [{totals.version: place(totals) for totals in run.totals} for run in runs]
    if not any(known.values() and max(known.values()) > 0 for known in places):
        return None
    training, held = [], []
    for index, (run, known) in enumerate(zip(runs, places, strict=True)):
        colour = CYCLE[index % len(CYCLE)]
        points = [(known[version], reward) for version, reward in run.rewards if version in known]
        training.append(Series(run.run_id, colour, smoothed(points)))
        scored = [found for found in run.evaluations if found[0] in known]
        spread = [interval(reward, prompts) for _, reward, prompts in scored]
        points = [(known[version], reward) for version, reward, _ in scored]
        held.append(Series(run.run_id, colour, points, spread, style="dots"))
    words = (f"training reward, mean of {SMOOTHING_STEPS} batches", "held-out pass@1, 95% interval")
    panels = [
        Panel(label, series, y=y, low=0.0, high=1.0, left=0.0, whole=name == "steps")
        for series, y in zip((training, held), words, strict=True)
    ]
    label = f"Training reward and held-out pass@1 of each run over {name}"
    return Chart(f"reward-{name}", label, panels, height=280)


def _more(run: ComparedRun) -> str:
    best = run.figures.best_version
    return f"held-out, from {share(run.figures.reward_first)}" + (
        "" if best is None else f"; best {share(run.figures.reward_best)} of v{best}"
    )


def _notes(drawn: dict[str, Chart | None], over_seeds: bool) -> list[str]:
    notes = [
        "Seconds, tokens and dollars are what had been spent when a version was made; start-ups and breaks "
        "are not among them.",
    ]
    if not over_seeds:
        notes.append(
            "One run of each configuration says little about their difference: repeat each with a few seeds."
        )
    if drawn["dollars"] is None:
        notes.append(
            "No run has a price: record.worker_usd_per_hour and record.learner_usd_per_hour give the axis of "
            "dollars."
        )
    return notes
