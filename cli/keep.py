"""keep: what is kept of a run beyond this machine: its ledger for git and DVC, its records, its artifacts."""

import os
import shlex
from pathlib import Path

from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.lineage import layout
from antiphon.lineage.run_events import EventPacker
from antiphon.lineage.store.artifact_store import ArtifactStore, outboxes
from antiphon.models.codec import decoder
from antiphon.runs.directory import home_directory, is_finished, lock, store_directory
from antiphon.runs.finding import find_run, ledger_folders
from antiphon.services.coordinator.journal.journal import journal_place
from antiphon.services.coordinator.journal.reading import JournalLog, events_of
from antiphon.system.set_up import beside
from antiphon.weights.payload_store import PAYLOADS, PayloadStore


def keep(
    run: str | None = None, /, *, records: bool = False, remote: bool = False, timeout_s: float = 600.0
) -> None:
    """Track a run's ledger with git and DVC; with --records or --remote, complete its records.

    Its .dvc file is written, which git and `dvc push` see. With --records the run's records are completed
    instead: each of its sinks follows the log to its end, and what they have is left as it is. With --remote
    the artifacts of all runs that wait in the outbox are sent, each to the store that its run named.

    Args:
        run: the run's id; by default the newest. `benchmarks` is the ledger of scheduled benchmarks.
        records: bring in what MLflow, the ledger or another sink missed.
        remote: send what the remote stores do not have yet, and wait until it is there.
        timeout_s: longest wait for all sinks, and for each remote store, seconds.
    """
    home = home_directory().absolute()
    if not (records or remote):
        return _keep_ledger(home, run)
    if records:
        _complete_records(home, run, timeout_s)
    if remote:
        _send(home, timeout_s)


def _keep_ledger(home: Path, run: str | None) -> None:
    name = run or find_run(home, None).name
    folders = ledger_folders(home)
    kept = [path for folder in folders for path in layout.keep(folder, name)]
    if not kept:
        known = sorted({known for folder in folders for known in layout.ledger_names(folder)})
        if name in known:
            raise ConfigError(
                f"the ledger of {name} has no list of its files yet; "
                f"`antiphon keep {name} --records` writes it"
            )
        raise ConfigError(
            f"there is no ledger {name} in {' or '.join(map(str, folders)) or 'any DVC project'}; "
            f"there are: {', '.join(known) or 'none'}"
        )
    files, dvc = shlex.join(os.path.relpath(path) for path in kept), beside("dvc")
    print(f"git and DVC track {files} now; others get the run with:")
    print(f"  git add {files} && git commit -m 'Keep {name}' && git push && {dvc} push {files}")
    print(f"  git pull && .venv/bin/dvc pull {files}     # in another clone; then ./antiphon report {name}")


def _complete_records(home: Path, run: str | None, timeout_s: float) -> None:
    from antiphon.lineage.records import Records

    directory = find_run(home, run)
    config = load_config(directory / "config.yaml")
    if not (config.record.mlflow or config.record.dvc or config.record.sinks):
        raise ConfigError(
            f"run {directory.name} has record.mlflow=false and record.dvc=false, so nothing is recorded of it"
        )
    with lock(directory):
        payloads, place = PayloadStore(directory / PAYLOADS), journal_place(config, directory)
        records = Records(
            directory.name,
            config,
            directory,
            home,
            store_directory(home),
            JournalLog(place, directory.name),
            weights_file=lambda version: payloads.checked(payloads.manifest(version)),
            adapter_file=payloads.adapter,
            decode=decoder(config.model.path),
        )
        page = directory / "report.html"
        if page.is_file():
            plots = {path.name: path.read_text() for path in sorted((directory / "plots").glob("*.svg"))}
            records.attach(page, plots)
        if config.record.dvc and is_finished(directory):
            packer = EventPacker()
            packer.add(list(events_of(place, directory.name)))
            records.finish(packer.finish())
        report = records.close(timeout_s)
    for sink in report.writers:
        print(f"{sink.name}: {sink.done} records written or there already")
    if not report.complete:
        reasons = [sink.failures[-1] for sink in report.writers if sink.failures]
        raise UnavailableError(
            f"the records of {directory.name} are still incomplete: {'; '.join(reasons)}; "
            "give the same command again when that is fixed"
        )


def _send(home: Path, timeout_s: float) -> None:
    from antiphon.lineage.store.remote_place import RemoteStore
    from antiphon.lineage.store.uploader import Uploader

    root = store_directory(home)
    waiting = [outbox for outbox in outboxes(root) if outbox.pending(1)]
    if not waiting:
        print("nothing waits")
    for outbox in waiting:
        remote = RemoteStore(outbox.url, outbox.endpoint_url)
        remote.check()
        uploader = Uploader(ArtifactStore(root, remote))
        uploader.flush(timeout_s)
        report = uploader.close(timeout_s=0.0)
        print(f"{outbox.url}: {report.uploaded} sent, {report.known} were there, {report.pending} left")
        if report.refused:
            print(f"{outbox.url}: {report.refused} put aside; {report.reason}")
        if report.pending:
            raise UnavailableError(
                f"{report.pending} artifacts did not get to {outbox.url} within {timeout_s:g} s"
                f"{': ' + report.reason if report.reason else ''}; the same command continues"
            )
