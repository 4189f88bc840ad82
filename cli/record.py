"""record: bring in what MLflow or the ledger missed of a run that rests."""

import asyncio
from pathlib import Path

from antiphon.core.errors import ConfigError, UnavailableError


def record(run: str | None = None, /, *, timeout_s: float = 600.0) -> int:
    """Write what the run log has and MLflow or the ledger lack; what is there is left as it is.

    Args:
        run: the run's id; by default the newest.
        timeout_s: longest wait for MLflow and the ledger, seconds.
    """
    from antiphon.core.config import load_config
    from antiphon.lineage.recorder import Recorder
    from antiphon.models.codec import decoder
    from antiphon.runs.directory import home_directory, is_finished, lock, store_directory
    from antiphon.runs.finding import find_run

    home = home_directory()
    directory = find_run(home, run)
    config = load_config(directory / "config.yaml")
    if not (config.record.mlflow or config.record.dvc):
        raise ConfigError(
            f"run {directory.name} has record.mlflow=false and record.dvc=false, so nothing is recorded of it"
        )
    with lock(directory):
        recorder = Recorder(
            directory.name, config, directory, home, store_directory(home), decode=decoder(config.model.path)
        )
        page = directory / "report.html"
        if page.is_file():
            plots = {path.name: path.read_text() for path in sorted((directory / "plots").glob("*.svg"))}
            recorder.attach(page, plots)
        if config.record.dvc and is_finished(directory):
            recorder.record_end(asyncio.run(_events(directory, home)))
        recorder.flush(timeout_s)
        report = recorder.close(1.0)
    for writer in report.writers:
        print(f"{writer.name}: {writer.done} records written or there already")
    if not report.complete:
        reasons = [writer.failures[-1] for writer in report.writers if writer.failures]
        raise UnavailableError(
            f"the records of {directory.name} are still incomplete: {'; '.join(reasons)}; "
            "give the same command again when that is fixed"
        )
    return 0


async def _events(directory: Path, home: Path) -> bytes:
    from antiphon.runs.attach import attached, packed_events
    from antiphon.runs.directory import store_directory

    async with attached(directory, store_directory(home)) as (coordinator, _):
        return await packed_events(coordinator)
