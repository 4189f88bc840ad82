"""browse: a run's trajectories in a browser, token by token."""

import asyncio
import contextlib
from pathlib import Path
from threading import Thread

from antiphon.core.errors import ConfigError
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_run
from antiphon.system.ports import ROLLOUTS_PORT


def browse(run: str | None = None, /, *, port: int = ROLLOUTS_PORT) -> None:
    """Show a run's trajectories in a browser of this machine, until Ctrl-C.

    By step, prompt, reward, staleness and reason; a group side by side, a prompt over versions, tokens
    coloured, texts searched. It shows what was recorded when it began.
    From elsewhere: ssh -L 7780:127.0.0.1:7780 HOST.

    Args:
        run: the run's id, by default the newest; or a folder: a run's, or a copy of its ledger.
        port: of 127.0.0.1 to listen on; 0 for a free one.
    """
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port} is no port; give one from 0 to 65535")
    from antiphon.lineage.rollout_index import RolloutIndex
    from antiphon.lineage.run_overview import read_figures
    from antiphon.report.browse import RolloutPages, serve
    from antiphon.runs.samples import explainer, files_of

    home = home_directory()
    place = find_run(home, None) if run is None else home / "runs" / run
    plain = run is None or (Path(run).name == run and run not in ("", ".."))
    if run is not None and not (plain and place.is_dir()) and Path(run).is_dir():
        place = Path(run).resolve()
    files = files_of(place, home)
    index = RolloutIndex(files)
    Thread(target=index.read_texts, daemon=True).start()
    figures = None if files.log is None else read_figures(files.log)

    def ready(address: str) -> None:
        print(
            f"{index.table.size:,} trajectories of run {files.run_id}: {address} (Ctrl-C ends it)", flush=True
        )

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(RolloutPages(index, figures, explainer(files.config)), port, ready))
