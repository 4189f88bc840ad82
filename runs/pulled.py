"""Pulled runs: runs of other machines or clones whose ledgers are in the project, made usable here.

The first command that names such a run takes it in: its folder is made again from the ledger, and its
artifacts are linked into the store. From then on it is a finished run like any other. The ledger stays as
it is.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.lineage.documents.manifest import read_run_config
from antiphon.lineage.layout import (
    find_project,
    kept_pointer_of,
    ledger_names,
    shard_directories,
)
from antiphon.lineage.ledger.run_pins import OUTCOME_FILE
from antiphon.lineage.names import CHECKPOINTS, MODEL_FOLDER, RUN, RUN_FOLDER
from antiphon.lineage.run_events import EVENTS_FILE, read_events
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.runs.directory import no_such_run
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME
from antiphon.services.coordinator.journal.reading import make_journal
from antiphon.system.files import flush_folder, write_atomically


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
