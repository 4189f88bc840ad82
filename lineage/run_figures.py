"""Run figures: the figures of a run, read from its folder; the run may be going on, rest or be finished."""

from pathlib import Path

from antiphon.core.config import load_config
from antiphon.core.reporting.figures import FiguresFold, RunFigures, VersionTotals, figures_of
from antiphon.lineage.run_log import read_evaluations, read_steps


def read_figures(run_dir: Path) -> RunFigures:
    """Return the figures of the run in a folder, up to its last recorded step.

    Raises:
        ConfigError: when its configuration cannot be read.
    """
    config = load_config(run_dir / "config.yaml")
    return figures_of(read_steps(run_dir), read_evaluations(run_dir), config)


def read_totals(run_dir: Path) -> list[VersionTotals]:
    """Return what each version of the run had cost when it was made, version 0 first.

    Raises:
        ConfigError: when its configuration cannot be read.
    """
    fold = FiguresFold(load_config(run_dir / "config.yaml"))
    return [totals for line in read_steps(run_dir) for totals in fold.add(line)]
