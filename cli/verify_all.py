"""Verify all: every run and every ledger that is here is verified, and what is left out is named."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.lineage.layout import (
    find_project,
    keeps_no_ledger,
    kept_pointer_of,
    ledger_names,
    shard_directories,
)
from antiphon.lineage.ledger.verify import Verification, verify_run, verify_store
from antiphon.lineage.names import version_entry
from antiphon.lineage.run_log import BASE_FILE
from antiphon.runs.directory import list_runs, store_directory
from antiphon.runs.pulled import ledger_folders, missing_run


@dataclass(frozen=True, slots=True)
class Verified:
    """What was looked at: what was found, or why it was left out."""

    what: str
    result: Verification | None
    left_out: str = ""


def verify_all(home: Path, run_id: str | None) -> list[Verified]:
    """Verify one run, or every run, every ledger that is here, and the whole store.

    A run that ended before anything was recorded is left out, and so is a ledger of which only the ``.dvc``
    file is here.

    Raises:
        AntiphonError: when there was nothing to verify.
        ConfigError: when there is no such run.
    """
    found = [_verified(*place, home) for place in _places(home, run_id)]
    if run_id is None:
        found.append(Verified("the store", verify_store(store_directory(home))))
    if not any(entry.result and entry.result.files for entry in found):
        reasons = "; ".join(entry.left_out for entry in found if entry.left_out)
        raise AntiphonError(
            f"there is nothing to verify: {reasons or f'{home} has no run, and no ledger is here'}"
        )
    return found


def ledger_of(run_dir: Path, home: Path) -> tuple[Path | None, str]:
    """Return the DVC project of a run's ledger, None where it keeps none, and the folder in it."""
    path = run_dir / "config.yaml"
    record = (load_config(path) if path.exists() else RunConfig()).record
    return (None if keeps_no_ledger(record, run_dir) else find_project(None, home)), record.ledger


def _places(home: Path, run_id: str | None) -> Iterator[tuple[str, Path, Path | None, str]]:
    """Yield what each is called, its run's folder, the DVC project and the folder of its ledger."""
    ledgers = {name: folder for folder in ledger_folders(home) for name in ledger_names(folder)}
    runs = [directory.name for directory in list_runs(home)]
    names = (
        [run_id] if run_id is not None else [*runs, *(name for name in sorted(ledgers) if name not in runs)]
    )
    for name in names:
        directory = home / "runs" / name
        if name in runs:
            yield f"run {name}", directory, *ledger_of(directory, home)
        elif name in ledgers:
            project = find_project(None, home)
            yield f"ledger {name}", directory, project, str(ledgers[name].relative_to(project))
        else:
            raise ConfigError(missing_run(home, name))


def _verified(what: str, run_dir: Path, project: Path | None, folder: str, home: Path) -> Verified:
    shards = [] if project is None else shard_directories(project / folder, run_dir.name)
    if not run_dir.is_dir() and not any(shard.is_dir() for shard in shards):
        return Verified(
            what, None, f"{what} was not pulled: `dvc pull {kept_pointer_of(shards[0])}` brings it"
        )
    begun = (run_dir / BASE_FILE).exists() or any((shard / version_entry(0)).exists() for shard in shards)
    if run_dir.is_dir() and not begun:
        return Verified(what, None, f"{what} ended before anything was recorded")
    return Verified(what, verify_run(run_dir, store_directory(home), project, folder))
