"""record: bring in what MLflow or the ledger missed of a run that rests."""

from antiphon.core.errors import ConfigError, UnavailableError


def record(run: str | None = None, /, *, timeout_s: float = 600.0) -> int:
    """Follow the log of a run that rests with each of its sinks; what they have is left as it is.

    Args:
        run: the run's id; by default the newest.
        timeout_s: longest wait for MLflow, the ledger and other sinks, seconds.
    """
    from antiphon.core.config import load_config
    from antiphon.lineage.records import Records
    from antiphon.lineage.run_events import EventPacker
    from antiphon.models.codec import decoder
    from antiphon.runs.directory import home_directory, is_finished, lock, store_directory
    from antiphon.runs.finding import find_run
    from antiphon.services.coordinator.journal.journal import journal_place
    from antiphon.services.coordinator.journal.reading import JournalLog, events_of
    from antiphon.weights.payload_store import PAYLOADS, PayloadStore

    home = home_directory()
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
    return 0
