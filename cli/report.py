"""report: one self-contained HTML page about a run, finished or not."""

import asyncio
from pathlib import Path


def report(run: str | None = None, /, *, out: Path | None = None) -> int:
    """Write the page: learning curve, staleness, overlap timeline, throughput, where the seconds went.

    Args:
        run: the run's id; by default the newest.
        out: file to write; by default report.html in the run's folder.
    """
    from antiphon.core.config import load_config
    from antiphon.core.reporting.run_view import RunView
    from antiphon.lineage.store.artifact_store import ArtifactStore
    from antiphon.report.page import build_report
    from antiphon.runs.attach import attached, read_events
    from antiphon.runs.directory import home_directory, store_directory
    from antiphon.runs.finding import find_run
    from antiphon.runs.samples import explainer

    home = home_directory()
    directory = find_run(home, run)

    async def write() -> Path:
        async with attached(directory, store_directory(home)) as (coordinator, _):
            view = await read_events(coordinator, RunView())
            status = await coordinator.status()
        store = ArtifactStore(store_directory(home))
        target = out or directory / "report.html"
        build_report(
            directory, store, view, status, target, explainer(load_config(directory / "config.yaml"))
        )
        return target

    print(asyncio.run(write()))
    return 0
