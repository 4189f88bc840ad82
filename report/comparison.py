"""Comparison: several runs side by side, from what each recorded of itself.

Its page needs nothing else, no network and no server: reward over steps, seconds, tokens and dollars, what
differs between the configurations, and every figure side by side.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from antiphon.core.config import RunConfig, dump_config, load_config
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.reporting.config_differences import differing
from antiphon.core.reporting.figures import (
    FIGURES,
    UNKNOWN,
    RunFigures,
    VersionTotals,
    figures_of,
    interval,
    score,
    score_name,
    totals_of,
)
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.lineage.starts import read_starts
from antiphon.lineage.suite_records import read_results
from antiphon.report.charts import (
    CYCLE,
    SMOOTHING_STEPS,
    Chart,
    Panel,
    Series,
    frame,
    plain_charts,
    smoothed,
)
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
SCORES = ("reward_first", "reward_last", "reward_best")
"""Figures whose mean over seeds is said."""
CODE_DIGITS = 12
"""Digits of a commit that are shown."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """What one run recorded of itself."""

    run_id: str
    config: RunConfig
    figures: RunFigures
    totals: Sequence[VersionTotals]
    """By version, from 0 on."""
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    """Lines of its run log, in order."""
    suites: Mapping[str, str]
    """Average on each suite of the newest version that was sampled on it."""
    code: tuple[str, ...]
    """Commits that it ran on, `+changes` where tracked files differed; empty outside a checkout."""


class SeedGroup(NamedTuple):
    """Runs that differ in their seed alone."""

    runs: Sequence[ComparedRun]
    scores: Mapping[str, tuple[float, float]]
    """The mean over the runs of each held-out score that all have, and half its 95% interval."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side; every list has one entry a run, in the order asked for."""

    runs: Sequence[ComparedRun]

    @property
    def parameters(self) -> dict[str, list[Any]]:
        """Return the keys in which the resolved configurations differ."""
        return differing([run.config for run in self.runs])

    @property
    def reward_range(self) -> RewardRange:
        """What all rewards lie in; 0..1 where nothing was evaluated."""
        ranges = [run.figures.reward_range for run in self.runs] or [UNIT_RANGE]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    @property
    def figures(self) -> list[tuple[str, str, list[str]]]:
        """Return (label, unit, texts) of every figure and suite that at least one run can say."""
        suites = dict.fromkeys(name for run in self.runs for name in run.suites)
        return [
            (
                figure.title(self.reward_range),
                figure.unit,
                [run.figures.text(figure.name) for run in self.runs],
            )
            for figure in FIGURES
            if any(getattr(run.figures, figure.name) is not None for run in self.runs)
        ] + [(name, "", [run.suites.get(name, UNKNOWN) for run in self.runs]) for name in suites]

    @property
    def over_seeds(self) -> list[SeedGroup]:
        """Return the runs that differ in their seed alone, together; only those of at least two seeds."""
        groups: dict[str, list[ComparedRun]] = {}
        for run in self.runs:
            seedless = run.config.run.model_copy(update={"seed": 0})
            groups.setdefault(dump_config(run.config.model_copy(update={"run": seedless})), []).append(run)
        found = [group for group in groups.values() if len({run.config.run.seed for run in group}) > 1]
        scores = [{name: [getattr(run.figures, name) for run in group] for name in SCORES} for group in found]
        return [
            SeedGroup(group, {name: mean_interval(known) for name, known in of.items() if None not in known})
            for group, of in zip(found, scores, strict=True)
        ]

    @property
    def warnings(self) -> list[str]:
        """Say what makes a difference between the runs hard to explain by their parameters."""
        said = []
        seeds = [run.config.run.seed for run in self.runs]
        if len(set(seeds)) > 1 and sum(len(group.runs) for group in self.over_seeds) < len(self.runs):
            said.append(f"the seed differs: {_each(self.runs, seeds)}")
        codes = [" and ".join(run.code) or "unknown" for run in self.runs]
        if len(set(codes)) > 1 or any("+" in code for code in codes):
            what = "differs" if len(set(codes)) > 1 else "had uncommitted changes"
            said.append(f"the code {what}: {_each(self.runs, codes)}")
        steps = [f"{run.figures.steps} of {run.config.run.steps}" for run in self.runs]
        if any(run.figures.steps < run.config.run.steps for run in self.runs):
            said.append(f"not all steps are done: {_each(self.runs, steps)}")
        return said


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two values, and half of its 95% interval by Student's distribution.

    >>> [round(number, 3) for number in mean_interval([0.8, 0.9, 1.0])]
    [0.9, 0.248]
    """
    from scipy.stats import t  # half a second, and few runs are compared over seeds

    return fmean(values), float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def read_run(run_dir: Path) -> ComparedRun:
    """Read one run's own record.

    Raises:
        ConfigError: when its configuration cannot be read.
    """
    config, lines, held = load_config(run_dir / "config.yaml"), read_steps(run_dir), read_evaluations(run_dir)
    starts = dict.fromkeys(
        f"{start.commit[:CODE_DIGITS]}{'+changes' * start.modified}"
        for start in read_starts(run_dir)
        if start.commit
    )
    return ComparedRun(
        run_id=run_dir.name,
        config=config,
        figures=figures_of(lines, held, config),
        totals=totals_of(lines, config),
        steps=lines,
        evaluations=held,
        suites={f"suite {one.suite}": f"v{one.version} {one.average}" for one in read_results(run_dir)},
        code=tuple(starts),
    )


def _each(runs: Sequence[ComparedRun], values: Sequence[Any]) -> str:
    return ", ".join(f"{run.run_id} {value}" for run, value in zip(runs, values, strict=True))


def build_comparison_page(comparison: Comparison, out: Path) -> Path:
    """Write the page to `out` and return its path.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    runs, names = comparison.runs, [run.run_id for run in comparison.runs]
    drawn = {name: draw_curves(runs, name, label, place) for name, label, place in AXES}
    page = render(
        "compare.html",
        title=f"Comparison of {', '.join(names)}",
        brand="Antiphon comparison",
        heading=f"{len(runs)} runs",
        facts=names,
        runs=runs,
        drawn=drawn,
        charts=plain_charts(drawn.values()),
        names=names,
        parameters=[(key, *map(json.dumps, values)) for key, values in comparison.parameters.items()],
        figures=[(label, *texts) for label, _, texts in comparison.figures],
        over_seeds=seed_rows(comparison),
        seed_head=SEED_HEAD,
        warnings=comparison.warnings,
    )
    write_atomically(out, page.encode("utf-8"))
    return out


def seed_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a row for each group of runs that differ in their seed alone: name, seeds, scores, as texts."""
    return [
        (
            f"{group.runs[0].run_id} and {len(group.runs) - 1} more",
            ", ".join(str(run.config.run.seed) for run in group.runs),
            *(
                " ± ".join(score(x, group.runs[0].figures.reward_range) for x in group.scores[name])
                if name in group.scores
                else UNKNOWN
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
    training, held, within = [], [], Comparison(runs).reward_range
    for index, (run, known) in enumerate(zip(runs, places, strict=True)):
        colour = CYCLE[index % len(CYCLE)]
        rewards = [(line["version"], line["metrics"].get("reward_mean")) for line in run.steps]
        points = [(known[at], float(y)) for at, y in rewards if at in known and y is not None]
        training.append(Series(run.run_id, colour, smoothed(points)))
        scored = [line for line in run.evaluations if line["version"] in known]
        spread = [interval(line["reward_mean"], line["prompts"], run.figures.reward_range) for line in scored]
        points = [(known[line["version"]], float(line["reward_mean"])) for line in scored]
        held.append(Series(run.run_id, colour, points, spread, style="dots"))
    called = f"held-out {score_name(within)}"
    words = (f"training reward, mean of {SMOOTHING_STEPS} batches", f"{called}, 95% interval")
    low, high = frame([y for one in (*training, *held) for _, y in one.points], within)
    panels = [
        Panel(label, series, y=y, low=low, high=high, left=0.0, whole=name == "steps")
        for series, y in zip((training, held), words, strict=True)
    ]
    label = f"Training reward and {called} of each run over {name}"
    return Chart(f"reward-{name}", label, panels, height=280)
