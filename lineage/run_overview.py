"""Run overview: the state and the figures of runs, each from its own folder alone."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from antiphon.core.config import RunConfig, build_config, load_config
from antiphon.core.errors import ConfigError
from antiphon.core.reporting.config_differences import differing
from antiphon.core.reporting.figures import RunFigures, VersionTotals, figures_of, totals_of
from antiphon.lineage.documents.manifest import read_run_config
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.system.files import write_atomically
from antiphon.system.set_up import command

State = Literal["running", "finished", "cancelled", "unfinished"]
CANCELLED = "cancelled"
"""File that a cancelled run leaves in its folder; a later start makes it count no more."""
_LOCK, _OUTCOME = "lock", "outcome.json"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run as a table of runs shows it."""

    run_id: str
    state: State
    steps_total: int | None
    """None where its client decides."""
    figures: RunFigures
    begun_at: float
    """Unix seconds."""
    differs: dict[str, Any]
    """The keys in which the runs of this name differ, with this run's values."""
    next_command: str
    """What continues the run, or shows a finished or running one, or one that goes on with its client."""


def overview(directories: Iterable[Path]) -> tuple[list[RunSummary], list[str]]:
    """Return the runs in these folders, in their order, and a sentence for each that cannot be read."""
    configs: dict[Path, RunConfig] = {}
    unreadable = []
    for directory in directories:
        try:
            configs[directory] = load_config(directory / "config.yaml")
        except ConfigError as error:  # of another release, or edited
            unreadable.append(f"{directory.name}: {error}")
    differs = _differences(list(configs.values()))
    return [
        _summary(directory, config, found)
        for (directory, config), found in zip(configs.items(), differs, strict=True)
    ], unreadable


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


def state_of(directory: Path) -> State:
    """Tell whether a run goes on, reached its last step, was cancelled, or can be continued."""
    if is_running(directory):
        return "running"
    if (directory / _OUTCOME).exists():
        return "finished"
    note, lock = directory / CANCELLED, directory / _LOCK
    if note.exists() and (not lock.exists() or note.stat().st_mtime_ns >= lock.stat().st_mtime_ns):
        return "cancelled"
    return "unfinished"


def is_running(directory: Path) -> bool:
    """Tell whether a process of this machine holds the run's lock, without touching it."""
    lock = directory / _LOCK
    if not lock.exists():
        return False
    # Trying to take it, even for a moment, could refuse the run to a process that is just starting.
    wanted = str(lock.stat().st_ino)
    held = (line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
    return any(words[1] == "FLOCK" and words[5].rpartition(":")[2] == wanted for words in held)


def note_cancelled(directory: Path) -> None:
    """Note that a run was cancelled and not just interrupted."""
    write_atomically(directory / CANCELLED, b"")


def _differences(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{} for _ in configs]
    for name in {config.run.name for config in configs}:
        places = [place for place, config in enumerate(configs) if config.run.name == name]
        for key, values in differing([configs[place] for place in places]).items():
            for place, value in zip(places, values, strict=True):
                found[place][key] = value
    return found


def _summary(directory: Path, config: RunConfig, differs: dict[str, Any]) -> RunSummary:
    state = state_of(directory)
    verb = {"running": "status", "finished": "report"}.get(state, "report" if config.client_driven else None)
    again = f"run {shlex.quote(str(directory / 'config.yaml'))} --resume {directory.name}"
    return RunSummary(
        run_id=directory.name,
        state=state,
        steps_total=config.planned_steps,
        figures=read_figures(directory),
        begun_at=(directory / "config.yaml").stat().st_mtime,
        differs=differs,
        next_command=f"{command()} {f'{verb} {directory.name}' if verb else again}",
    )
