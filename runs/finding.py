"""Finding: a run by its name, here or pulled, and its artifacts, here or in a copy that someone brought.

A pulled run is one of another machine or clone whose ledger is in the project. The first command that names
it takes it in: its folder is made again from the ledger, and its artifacts are linked into the store. From
then on it is a finished run like any other. The ledger stays as it is.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ConfigError
from antiphon.lineage.documents.manifest import read_run_config
from antiphon.lineage.documents.replay_copy import BareCopy, ReplayCopy, find_copy
from antiphon.lineage.layout import (
    find_project,
    kept_pointer_of,
    ledger_names,
    ledger_project,
    shard_directories,
)
from antiphon.lineage.names import CHECKPOINTS, MODEL_FOLDER, OUTCOME_FILE, RUN, RUN_FOLDER, VERSIONS
from antiphon.lineage.run_events import EVENTS_FILE, read_events
from antiphon.lineage.saved_weights import MODEL
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.runs.directory import is_finished, list_runs, no_such_run, store_directory
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME
from antiphon.services.coordinator.journal.reading import make_journal
from antiphon.system.files import flush_folder, write_atomically

RECORD = "record.json"
"""In the folder of a supervised training: what it was, for its report and its replay."""


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


def find_sft(home: Path, name: str | None) -> Path | None:
    """Return the folder of a supervised training of this name, where there is one that has trained."""
    folder = home / "sft" / (name or "").removeprefix("sft/")
    return folder if name and (folder / RECORD).is_file() else None


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
    finished = [directory.name for directory in list_runs(home) if is_over(directory)]
    pulled = sorted(pulled_runs(home))
    if not finished and len(pulled) != 1:
        there = f"; pulled are {', '.join(pulled)}" if pulled else ""
        raise ConfigError(f"no run under {home / 'runs'} is finished{there}; name one, or finish it first")
    return finished[-1] if finished else pulled[0]


def is_over(directory: Path) -> bool:
    """Return whether a run is finished, or has no end: one that a client drives."""
    return is_finished(directory) or (directory / MODEL).exists()


def ledger_folders(home: Path) -> list[Path]:
    """Return the folders of ledgers that runs of this home use, and the usual one; none without a project."""
    try:
        project = find_project(None, home)
    except ConfigError:
        return []
    usual = RunConfig().record.ledger
    configs = [read_run_config(path.parent) for path in (home / "runs").glob("*/config.yaml")]
    named = {usual, *(str(config.get("record", {}).get("ledger", usual)) for config in configs)}
    return [folder for name in sorted(named) if (folder := project / name).is_dir()]


def pulled_runs(home: Path) -> dict[str, Path]:
    """Return the runs whose artifacts are in a ledger here and that have no folder here: name -> ledger's."""
    return {
        name: folder
        for folder in ledger_folders(home)
        for name in ledger_names(folder)
        if (folder / name / RUN).is_file() and not (home / "runs" / name / "config.yaml").exists()
    }


def missing_run(home: Path, run_id: str) -> str:
    """Say that a run is not here, and what brings it where that is known."""
    folders = ledger_folders(home)
    for folder in folders:
        if (pointer := kept_pointer_of(folder / run_id)).exists():
            return f"run {run_id} was not pulled to this machine; `dvc pull {pointer}` brings it"
    return no_such_run(home, run_id, folders)


def take_in(home: Path, store_root: Path, run_id: str) -> Path:
    """Make the folder of a pulled run, and link its artifacts into the store; return the folder.

    Raises:
        ConfigError: when no ledger here has the run's artifacts, or it was not finished when they were
            written.
        IntegrityError: when what the ledger holds is damaged.
        UnavailableError: when there is no space.
    """
    folder = pulled_runs(home).get(run_id)
    if folder is None:
        raise ConfigError(missing_run(home, run_id))
    shards = shard_directories(folder, run_id)
    files = {
        path.relative_to(shard).as_posix(): path
        for shard in shards
        for path in shard.rglob("*")
        if path.is_file()
    }
    if f"{RUN_FOLDER}/{EVENTS_FILE}" not in files:
        raise ConfigError(
            f"run {run_id} was not finished when its ledger {folder / run_id} was written, so only `antiphon "
            "replay` and `antiphon lineage` can use it; finish it where it runs, then push and pull again"
        )
    store = ArtifactStore(store_root)
    for rel, path in files.items():
        if rel.partition("/")[0] not in (RUN_FOLDER, MODEL_FOLDER, CHECKPOINTS):
            store.take(path)
    (home / "runs").mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=home / "runs", prefix=".taking-"))
    try:
        for rel, path in files.items():
            if rel.startswith(f"{RUN_FOLDER}/") and path.name != EVENTS_FILE:
                shutil.copyfile(path, making / path.name)
        shutil.copyfile(files[RUN], making / RUN)
        directory = home / "runs" / run_id
        outcome = json.loads((making / OUTCOME_FILE).read_bytes()) | {"run_dir": str(directory)}
        write_atomically(
            making / OUTCOME_FILE, (json.dumps(outcome, indent=2, sort_keys=True) + "\n").encode()
        )
        recorded = files[f"{RUN_FOLDER}/{EVENTS_FILE}"].read_bytes()
        make_journal(making / JOURNAL_NAME, run_id, recorded)
        began = next(read_events(recorded)).at
        os.utime(making / "config.yaml", (began, began))  # runs are listed by when they began
        making.chmod(0o755)
        os.replace(making, directory)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    flush_folder(directory.parent)
    return directory
