"""post_train: the overlapping loop of rollout, reward, training and broadcast as a Prefect flow.

Every stage of every step that takes time is one task run, so the run page's timeline shows the overlap. The
flow moves handles: tokens and weights travel between the services.
"""

import threading
from contextlib import ExitStack, nullcontext
from typing import Annotated, Any
from uuid import UUID

import httpx
import structlog
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.flows.driver import drive
from antiphon.flows.form import FurtherFields, UsualFields, filled, with_fields
from antiphon.flows.prefect_resilience import (
    await_server,
    hold_events,
    note_how_to_continue,
    remember_flow_run,
)
from antiphon.flows.run_page import RunPage
from antiphon.flows.told import ToldView, hear_logs
from antiphon.lineage.run_overview import note_cancelled
from antiphon.models.learning_rate import with_learning_rate
from antiphon.runs.directory import choose_run, home_directory, is_finished
from antiphon.runs.live_run import LiveRun, claim_run, current_run
from antiphon.runs.outcome import RunOutcome
from antiphon.tasks.stages import TASKS

_log = structlog.get_logger(__name__)

CANCEL_POLL_S = 5.0
"""Pause between two looks at the flow run's state; each costs the server some 15 ms of CPU."""

EVENTS_S = 30.0
"""Longest wait for the last task states to reach the server."""

NO_SIGNAL = "NoSignal"
"""Name of the state, a failed one, in which a run ends none of whose steps trained anything."""

CANCEL_REASON = "cancelled from Prefect"


class FlowCancelled(AntiphonError):
    """The flow run was cancelled on its page."""


def watch_cancellation(run: LiveRun, flow_run_id: UUID) -> None:
    """Stop the run when its flow run is cancelled, unless it has its outcome; returns when it is over."""
    with get_client(sync_client=True) as client:
        while not run.wait_stopped(CANCEL_POLL_S):
            try:
                state = client.read_flow_run(flow_run_id).state
            except (PrefectException, httpx.HTTPError, OSError) as error:
                _log.warning("prefect.unreachable", error=str(error)[:200])
                continue
            if state is not None and state.type in {StateType.CANCELLING, StateType.CANCELLED}:
                if is_finished(run.run_dir):
                    return  # its outcome is written: what is left of its end must not be missing
                run.stop(CANCEL_REASON)


def name_of_this_run() -> str:
    """Return the id of the run that the current flow run is going to make; it is its name from the start."""
    if (run := current_run()) is not None:
        return run.run_id
    given = flow_run.get_parameters()
    config, run_id = RunConfig.model_validate(filled(given["config"])), given.get("run_id") or None
    try:
        resolved = with_learning_rate(with_fields(config, given.get("more") or {}))
        return choose_run(resolved, run_id, home_directory(), fresh=False).run_id
    except AntiphonError:  # the flow itself says what is wrong
        return run_id or config.run.name


@flow(
    name="post_train",
    flow_run_name=name_of_this_run,
    task_runner=ThreadPoolTaskRunner(max_workers=96),
    persist_result=False,
    validate_parameters=True,
    on_cancellation=[note_how_to_continue],
    on_crashed=[note_how_to_continue],
)
def post_train(
    config: Annotated[RunConfig, UsualFields],
    run_id: str = "",
    more: Annotated[dict[str, Any] | None, FurtherFields] = None,
) -> Any:
    """Post-train a policy: rollout, reward, training and broadcast, overlapped within the bound.

    Args:
        config: what a run depends on; fields that are left out are those of examples/quickstart.yaml.
        run_id: a run to continue; empty starts the configuration's next one.
        more: fields that are seldom changed, in the sections of docs/configuration.md.
    """
    config = with_learning_rate(with_fields(config, more or {}))
    hold_events()
    flow_run_id, home, entered = UUID(str(flow_run.get_id())), home_directory(), current_run()
    shown = entered.display if entered is not None else None
    told = shown if isinstance(shown, ToldView) else ToldView(RunDisplay())
    if entered is not None and entered.interrupt is not None:
        entered.interrupt.listen()
    with ExitStack() as stack:
        stack.enter_context(hear_logs(told))
        try:
            run = entered or claim_run(config, run_id or None, home, told)
            if entered is None:
                stack.callback(run.close)
            remember_flow_run(run.run_dir, str(flow_run_id))
            stack.enter_context(RunPage(run, told, flow_run_id))
            with nullcontext() if entered else run:
                outcome = _drive(run, flow_run_id)
        except FlowCancelled as error:
            told.stopped(str(error))
            return Cancelled(message=str(error))
        except AntiphonError as error:
            told.stopped(str(error))
            await_server()
            raise
        await_server()
    if outcome.no_signal:
        return Failed(name=NO_SIGNAL, message=outcome.no_signal[0])
    return outcome.summary()


def _drive(run: LiveRun, flow_run_id: UUID) -> RunOutcome:
    """Submit all stages of a run whose services are up and return what came of it."""
    watcher = threading.Thread(target=watch_cancellation, args=(run, flow_run_id), name="cancel", daemon=True)
    watcher.start()
    try:
        drive(
            run,
            lambda stage, number, after: TASKS[stage].submit(run.run_id, number, wait_for=after),
            run.committed,
        )
        return run.finish()
    except AntiphonError as error:
        if run.stop_reason == CANCEL_REASON:
            note_cancelled(run.run_dir)
            raise FlowCancelled("The run was cancelled; start it again to continue it.") from error
        raise
    finally:
        run.stop("the flow ended")
        watcher.join(2 * CANCEL_POLL_S)


def flush_events() -> None:
    """Send what Prefect still has for its server, so that the kept database is complete."""
    EventsWorker.drain_all(timeout=EVENTS_S, at_exit=False)
