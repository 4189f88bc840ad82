"""Run figures: the figures of a run, read from its folder; the run may be going on, rest or be finished."""

from pathlib import Path

from antiphon.core.config import build_config
from antiphon.core.reporting.figures import RunFigures, VersionTotals, figures_of, totals_of
from antiphon.lineage.documents.manifest import read_run_config
from antiphon.lineage.run_log import read_evaluations, read_steps


def read_figures(run_dir: Path) -> RunFigures:
    """Return the figures of the run in a folder, up to its last recorded step.

    Raises:
        ConfigError: when its configuration cannot be read.
    """
    return figures_of(read_steps(run_dir), read_evaluations(run_dir), build_config(read_run_config(run_dir)))


def read_totals(run_dir: Path) -> list[VersionTotals]:
    """Return what each version of the run had cost when it was made, version 0 first.

    Raises:
        ConfigError: when its configuration cannot be read.
    """
    return totals_of(read_steps(run_dir), build_config(read_run_config(run_dir)))
