"""Finding: a run by its name, here or pulled, and its artifacts, here or in a copy that someone brought."""

from pathlib import Path

from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError
from antiphon.lineage.documents.replay_copy import BareCopy, ReplayCopy, find_copy
from antiphon.lineage.layout import ledger_project
from antiphon.lineage.names import RUN, VERSIONS
from antiphon.runs.directory import is_finished, list_runs, store_directory
from antiphon.runs.pulled import pulled_runs, take_in


def find_run(home: Path, run_id: str | None) -> Path:
    """Return the directory of a run, or of the newest one; a run that was pulled gets one first.

    Raises:
        ConfigError: when there is none; the sentence says what brings it where that is known.
    """
    directory = home / "runs" / (run_id or "")
    if run_id is not None and (directory / "config.yaml").exists():
        return directory
    if run_id is None and (runs := list_runs(home)):
        return runs[-1]
    if run_id is None:
        pulled = sorted(pulled_runs(home))
        if len(pulled) != 1:
            what = f"; name one that was pulled: {', '.join(pulled)}" if pulled else ""
            start = "" if pulled else "; start one with `antiphon demo`"
            raise ConfigError(f"there are no runs under {home / 'runs'}{what}{start}")
        (run_id,) = pulled
    return take_in(home, store_directory(home), run_id)


def find_artifacts(home: Path, run: str | None, copy: Path | None) -> tuple[ReplayCopy, Path | None]:
    """Return the artifacts of a run, and its folder of checkpoints when it ran here.

    Without an id it is the newest finished run below `home`, else the only one that was pulled, or the only
    one of `copy`, a folder with copied artifacts; without a copy they are those in the ledger of the
    project here, whether the run has a folder below `home` or was pulled.

    Raises:
        ConfigError: when there is no such run, or it has no artifacts.
        IntegrityError: when they were altered.
    """
    if copy is not None:
        return find_copy(copy, run), None
    run = run or _newest_finished(home)
    if (pulled := pulled_runs(home).get(run)) is not None:
        return find_copy(pulled / run, run), None
    directory = find_run(home, run)
    config = load_config(directory / "config.yaml")
    project = ledger_project(config.record, home)
    if project is None:
        return BareCopy(directory), None
    ledger = project / config.record.ledger / directory.name
    if not (ledger / RUN).is_file() and (directory / VERSIONS).is_dir():
        return BareCopy(directory), None  # it began before there was a project
    if not (ledger / RUN).is_file():
        raise ConfigError(
            f"run {directory.name} has no artifacts in {ledger}; a run leaves them there when it is "
            f"recorded, and after `antiphon keep {directory.name}` `dvc checkout {ledger}.dvc` brings back "
            "what was removed"
        )
    return find_copy(ledger, directory.name), directory / "checkpoints"


def _newest_finished(home: Path) -> str:
    finished = [directory.name for directory in list_runs(home) if is_finished(directory)]
    pulled = sorted(pulled_runs(home))
    if not finished and len(pulled) != 1:
        there = f"; pulled are {', '.join(pulled)}" if pulled else ""
        raise ConfigError(f"no run under {home / 'runs'} is finished{there}; name one, or finish it first")
    return finished[-1] if finished else pulled[0]
