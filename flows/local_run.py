"""Local run: the flow in this process, against a Prefect server that is started for it if need be.

Prefect reads its variables once, when it is imported: so it is imported after they are set.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread

import httpx

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.environments.registry import refuse_client
from antiphon.flows.told import ToldView
from antiphon.runs.directory import is_finished
from antiphon.runs.interrupt import Interrupt
from antiphon.runs.live_run import RunOptions, claim_run
from antiphon.runs.outcome import RunOutcome
from antiphon.runs.servers.prefect_server import (
    HURRIED_GRACE_S,
    QUIET,
    STOP_GRACE_S,
    begin_prefect_server,
    client_environment,
    kept_running,
)
from antiphon.system.collecting import collect_as_usual_once_loaded
from antiphon.system.spared import without

SERVER_START_S = 180.0
"""Longest wait for the Prefect server, which starts beside the services."""


def run_post_train(
    config: RunConfig,
    run_id: str | None,
    home: Path,
    view: RunDisplay,
    options: RunOptions | None = None,
    interrupt: Interrupt | None = None,
) -> RunOutcome:
    """Run the flow in this process against a real Prefect server and return what came of it.

    A server is started unless PREFECT_API_URL names one; it is stopped afterwards, its
    database stays. `interrupt`, where it is entered, learns what Ctrl-C has to stop.

    Raises:
        AntiphonError: with the reason, when the run did not complete.
    """
    refuse_client(config.environment)
    os.environ["ANTIPHON_HOME"] = str(home)
    view = ToldView(view)  # the run's page shows what is said before the flow begins, too
    run = claim_run(config, run_id, home, view, options, interrupt)

    def grace_s() -> float:
        return HURRIED_GRACE_S if run.interrupted() else STOP_GRACE_S

    with ExitStack() as stack:
        stack.callback(run.close)
        server = None
        stack.enter_context(_variables(QUIET))
        if not os.environ.get("PREFECT_API_URL"):
            view.message("starting the Prefect server and the services")
            server = begun = begin_prefect_server(home, 0, home / "prefect" / "server.log")
            stack.callback(lambda: begun.stop(grace_s()))
            stack.enter_context(_variables(client_environment(server.url, home)))
        # Prefect takes seconds to import, which would otherwise come after all services are up.
        Thread(target=_load_flow, name="prefect", daemon=True).start()
        stack.enter_context(run)
        if server is not None:
            server.wait_healthy(SERVER_START_S)
            stack.enter_context(kept_running(server, home, grace_s))
        from prefect.exceptions import CancelledRun, FailedRun

        from antiphon.flows.post_train import flush_events, post_train

        stack.callback(flush_events)
        collect_as_usual_once_loaded()
        try:
            post_train(run.config, run.run_id)
        except FailedRun as error:
            if run.outcome is None:
                raise AntiphonError(f"the run did not complete: {error}") from error
            # It is complete, and trained nothing: its outcome says so.
        except CancelledRun as error:
            raise AntiphonError("the run was cancelled; start it again to continue it") from error
        except httpx.HTTPError as error:
            finished = is_finished(run.run_dir)
            raise UnavailableError(
                f"the Prefect server at {os.environ['PREFECT_API_URL']} went away before it had the end; "
                f"{'the run is complete' if finished else 'the same command continues it'}"
            ) from error
    if run.outcome is None:
        raise AntiphonError("the run did not complete")
    return run.outcome


def _load_flow() -> None:
    with without("pandas"):  # Prefect would load it to hash data frames as keys of a cache, which no task has
        import_module("antiphon.flows.post_train")


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
