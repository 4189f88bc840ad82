"""post_train: the overlapping loop of rollout, reward, training and broadcast as a Prefect flow.

Every stage of every step is one task run, so the run page's timeline shows the overlap. The
flow moves handles: tokens and weights travel between the services.
"""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, cast
from uuid import UUID

import httpx
import structlog
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectException, UnfinishedRun
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError
from antiphon.flows.driver import Handle, StageSkipped, drive
from antiphon.flows.hooks import clear_up, remember_flow_run
from antiphon.flows.prefect_resilience import await_server, hold_events
from antiphon.flows.run_page import RunPage
from antiphon.lineage.run_overview import note_cancelled
from antiphon.runs.context import RunContext
from antiphon.runs.directory import home_directory
from antiphon.runs.launch import open_run
from antiphon.runs.outcome import RunOutcome
from antiphon.tasks.stages import TASKS

_log = structlog.get_logger(__name__)

CANCEL_POLL_S = 2.0
"""Pause between two looks at the flow run's state."""

EVENTS_S = 30.0
"""Longest wait for the last task states to reach the server."""

NO_SIGNAL = "NoSignal"
"""Name of the state, a failed one, in which a run ends none of whose steps trained anything."""

CANCEL_REASON = "cancelled from Prefect"


class PrefectHandle:
    """A stage that runs as a Prefect task."""

    def __init__(self, future: PrefectFuture[Any]) -> None:
        self.future = future
        self._ended = threading.Event()
        future.add_done_callback(lambda _: self._ended.set())

    def wait(self) -> None:
        try:
            self.future.result(raise_on_failure=True)
        except UnfinishedRun as error:  # Prefect leaves a task pending whose upstream failed
            raise StageSkipped("a stage before this one failed") from error

    def done(self) -> bool:
        return self._ended.is_set()


class PrefectStages:
    """Submits stages as Prefect tasks of the current flow run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def submit(self, stage: str, number: int, after: Sequence[Handle]) -> Handle:
        futures = [cast("PrefectHandle", handle).future for handle in after]
        return PrefectHandle(TASKS[stage].submit(self._run_id, number, wait_for=futures))


def watch_cancellation(run: RunContext, flow_run_id: UUID) -> None:
    """Stop the run when its flow run is cancelled; returns when the run is over."""
    with get_client(sync_client=True) as client:
        while not run.wait_stopped(CANCEL_POLL_S):
            try:
                state = client.read_flow_run(flow_run_id).state
            except (PrefectException, httpx.HTTPError, OSError) as error:
                _log.warning("prefect.unreachable", error=str(error)[:200])
                continue
            if state is not None and state.type in {StateType.CANCELLING, StateType.CANCELLED}:
                run.stop(CANCEL_REASON)


@flow(
    name="post_train",
    flow_run_name="{run_id}",
    task_runner=ThreadPoolTaskRunner(max_workers=96),
    persist_result=False,
    validate_parameters=True,
    on_cancellation=[clear_up],
    on_crashed=[clear_up],
)
def post_train(config: RunConfig, run_id: str = "") -> Any:
    """Post-train a policy: rollout, reward, training and broadcast, overlapped within the bound.

    Args:
        config: everything the run depends on; defaults are the demo's.
        run_id: a run to continue; empty starts the configuration's next one.
    """
    hold_events()
    flow_run_id = UUID(str(flow_run.get_id()))
    home, remember = home_directory(), partial(remember_flow_run, flow_run_id=str(flow_run_id))
    with open_run(config, run_id or None, home, remember) as live:
        page = RunPage(live.context, flow_run_id, home)
        watcher = threading.Thread(
            target=watch_cancellation, args=(live.context, flow_run_id), name="cancel", daemon=True
        )
        watcher.start()
        try:
            stages = PrefectStages(live.context.run_id)
            drive(live.context, stages, live.committed)
            outcome: RunOutcome = live.finish()
        except AntiphonError:
            if live.context.stop_reason == CANCEL_REASON:
                note_cancelled(live.context.run_dir)
                return Cancelled(message="The run was cancelled; start it again to continue it.")
            await_server()
            raise
        finally:
            page.close()
            live.context.stop("the flow ended")
            watcher.join(2 * CANCEL_POLL_S)
    await_server()
    if outcome.no_signal:
        return Failed(name=NO_SIGNAL, message=outcome.no_signal[0])
    return outcome.summary()


def flush_events() -> None:
    """Send what Prefect still has for its server, so that the kept database is complete."""
    EventsWorker.drain_all(timeout=EVENTS_S, at_exit=False)
