"""Comparison: several runs side by side, from what each recorded of itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from antiphon.core.config import RunConfig, dump_config, load_config
from antiphon.core.reporting.config_differences import differing
from antiphon.core.reporting.figures import FIGURES, RunFigures, VersionTotals
from antiphon.lineage.run_figures import read_figures, read_totals
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.lineage.starts import read_starts

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
    rewards: Sequence[tuple[int, float]]
    """(version that the step made, mean training reward of its batch)"""
    evaluations: Sequence[tuple[int, float, int]]
    """(version, held-out reward, prompts)"""
    code: tuple[str, ...]
    """Commits that it ran on, `+changes` where tracked files differed; empty outside a checkout."""


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs that differ in their seed alone."""

    runs: Sequence[ComparedRun]

    @property
    def name(self) -> str:
        """Return what a table calls the group."""
        return f"{self.runs[0].run_id} and {len(self.runs) - 1} more"

    @property
    def scores(self) -> dict[str, tuple[float, float]]:
        """Return the mean over the runs of each held-out score that all have, and half its 95% interval."""
        found = {}
        for name in SCORES:
            values = [getattr(run.figures, name) for run in self.runs]
            if None not in values:
                found[name] = mean_interval(values)
        return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side; every list has one entry a run, in the order asked for."""

    runs: Sequence[ComparedRun]

    @property
    def parameters(self) -> dict[str, list[Any]]:
        """Return the keys in which the resolved configurations differ."""
        return differing([run.config for run in self.runs])

    @property
    def figures(self) -> list[tuple[str, str, list[str]]]:
        """Return (label, unit, texts) of every figure that at least one run can say."""
        return [
            (figure.label, figure.unit, [run.figures.text(figure.name) for run in self.runs])
            for figure in FIGURES
            if any(getattr(run.figures, figure.name) is not None for run in self.runs)
        ]

    @property
    def over_seeds(self) -> list["SeedGroup"]:
        """Return the runs that differ in their seed alone, together; only those of at least two seeds."""
        groups: dict[str, list[ComparedRun]] = {}
        for run in self.runs:
            seedless = run.config.run.model_copy(update={"seed": 0})
            groups.setdefault(dump_config(run.config.model_copy(update={"run": seedless})), []).append(run)
        return [
            SeedGroup(group) for group in groups.values() if len({run.config.run.seed for run in group}) > 1
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
    lines = read_steps(run_dir)
    starts = dict.fromkeys(
        f"{start.commit[:CODE_DIGITS]}{'+changes' * start.modified}"
        for start in read_starts(run_dir)
        if start.commit
    )
    return ComparedRun(
        run_id=run_dir.name,
        config=load_config(run_dir / "config.yaml"),
        figures=read_figures(run_dir),
        totals=read_totals(run_dir),
        rewards=[
            (int(line["version"]), float(line["metrics"]["reward_mean"]))
            for line in lines
            if "reward_mean" in line["metrics"]
        ],
        evaluations=[
            (int(line["version"]), float(line["reward_mean"]), int(line["prompts"]))
            for line in read_evaluations(run_dir)
        ],
        code=tuple(starts),
    )


def _each(runs: Sequence[ComparedRun], values: Sequence[Any]) -> str:
    return ", ".join(f"{run.run_id} {value}" for run, value in zip(runs, values, strict=True))
