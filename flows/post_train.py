"""post_train: the overlapping loop of rollout, reward, training and broadcast as a Prefect flow.

Every stage of every step that takes time is one task run, so the run page's timeline shows the overlap. The
flow moves handles: tokens and weights travel between the services.

Stages are orchestrated in the flow's own process, so they need no server. Their states travel as events,
which are held back in order until the server takes them: none is lost, and each has an id, so none counts
twice. Only the end needs an answer, and waits for it. The kernel ends a run's services with the flow's
process, so a cancelled or crashed flow run leaves none; its page says how to continue.
"""

import json
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import httpx
import structlog
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import FlowRunContext
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectException
from prefect.futures import PrefectConcurrentFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.environments.registry import refuse_client, with_sizes
from antiphon.flows.driver import drive
from antiphon.flows.form import FurtherFields, UsualFields, filled, with_fields
from antiphon.flows.run_page import CANCEL_REASON, RunPage, artifact_key
from antiphon.flows.told import ToldView, hear_logs
from antiphon.models.learning_rate import with_learning_rate
from antiphon.runs.directory import choose_run, home_directory, is_finished, list_runs
from antiphon.runs.live_run import claim_run, current_run
from antiphon.runs.servers.prefect_server import answers
from antiphon.system.files import write_atomically
from antiphon.system.set_up import program_name
from antiphon.tasks.stages import TASKS

_log = structlog.get_logger(__name__)

AWAY_S = 900
"""Longest absence of the server that events are held back for, seconds."""

LOOK_S = 1.0
"""Pause between two looks at a server that is away."""

FLOW_RUN_FILE = "prefect.json"
"""File of a run directory that names the flow run which runs it."""

EVENTS_S = 30.0
"""Longest wait for the last task states to reach the server."""

NO_SIGNAL = "NoSignal"
"""Name of the state, a failed one, in which a run ends none of whose steps trained anything."""

CANCELLED = "The run was cancelled; start it again to continue it."


def remember_flow_run(run_dir: Path, flow_run_id: str) -> None:
    """Write down which flow run runs it, whole or not at all."""
    write_atomically(run_dir / FLOW_RUN_FILE, (json.dumps({"flow_run_id": flow_run_id}) + "\n").encode())


def find_run_of(home: Path, flow_run_id: str) -> Path | None:
    """Return the directory of a flow run's newest run, or None when it had none."""
    for directory in reversed(list_runs(home)):
        path = directory / FLOW_RUN_FILE
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["flow_run_id"] == flow_run_id:
            return directory
    return None


def note_how_to_continue(flow: Any, flow_run: Any, state: Any) -> None:
    """Write on the page of a cancelled or crashed flow run how to continue its run.

    Prefect gives the arguments by these names.
    """
    run_dir = find_run_of(home_directory(), str(flow_run.id))
    if run_dir is None or is_finished(run_dir):
        return
    note = ArtifactCreate(
        key=artifact_key("going-on", run_dir.name),
        type="markdown",
        data=f"# {run_dir.name}: {'crashed' if state.is_crashed() else 'cancelled'}\n\n"
        "What was committed is in the journal; a new run of the deployment with the same configuration "
        "continues from there, and so does\n\n"
        f"    {program_name()} run {shlex.quote(str(run_dir / 'config.yaml'))} --resume {run_dir.name}\n",
        description="How to continue this run",
        flow_run_id=flow_run.id,
    )
    try:
        with get_client(sync_client=True) as client:
            client.create_artifact(note)
    except (PrefectException, httpx.HTTPError, OSError) as error:
        _log.warning("prefect.unreachable", error=str(error)[:200])


def name_of_this_run() -> str:
    """Return the id of the run that the current flow run is going to make; it is its name from the start."""
    if (run := current_run()) is not None:
        return run.run_id
    given = flow_run.get_parameters()
    config, run_id = RunConfig.model_validate(filled(given["config"])), given.get("run_id") or None
    try:
        resolved = with_sizes(with_learning_rate(with_fields(config, given.get("more") or {})))
        return choose_run(resolved, run_id, home_directory(), fresh=False).run_id
    except AntiphonError:  # the flow itself says what is wrong
        return run_id or config.run.name


class StageThreads(ThreadPoolTaskRunner[Any]):  # type: ignore[misc]  # Prefect is not checked
    """Prefect's threads, which keep nothing of a stage that has ended: a long run has many thousands."""

    def __init__(self, max_workers: int | None = None) -> None:
        """Prepare as Prefect does."""
        super().__init__(max_workers)
        self._living: list[PrefectConcurrentFuture[Any]] = []

    def submit(self, *arguments: Any, **named: Any) -> PrefectConcurrentFuture[Any]:
        """Submit a stage, and forget those that ended; one thread, the flow's, does it."""
        future = super().submit(*arguments, **named)
        self._living = [*(known for known in self._living if not known.wrapped_future.done()), future]
        for ended in self._cancel_events.keys() - {known.task_run_id for known in self._living}:
            del self._cancel_events[ended]
        if (context := FlowRunContext.get()) is not None:
            context.task_run_assets.clear()  # no stage makes any
        return future


@flow(
    name="post_train",
    flow_run_name=name_of_this_run,
    task_runner=StageThreads(max_workers=96),
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
    config = with_sizes(with_learning_rate(with_fields(config, more or {})))
    hold_events()
    flow_run_id, home, entered = UUID(str(flow_run.get_id())), home_directory(), current_run()
    shown = entered.display if entered is not None else None
    told = shown if isinstance(shown, ToldView) else ToldView(RunDisplay())
    if entered is not None and entered.interrupt is not None:
        entered.interrupt.listen()
    run = entered
    with ExitStack() as stack:
        stack.enter_context(hear_logs(told))
        try:
            if run is None:
                refuse_client(config.environment)
                run = claim_run(config, run_id or None, home, told)
                stack.callback(run.close)
            remember_flow_run(run.run_dir, str(flow_run_id))
            stack.enter_context(RunPage(run, told, flow_run_id))
            with nullcontext() if entered else run:
                drive(run, partial(submit_stage, run.run_id), run.committed)
                outcome = run.finish()
        except AntiphonError as error:
            if run is not None and run.stop_reason == CANCEL_REASON:
                told.stopped(CANCELLED)
                return Cancelled(message=CANCELLED)
            told.stopped(str(error))
            await_server()
            raise
        await_server()
    if outcome.no_signal:
        return Failed(name=NO_SIGNAL, message=outcome.no_signal[0])
    return outcome.summary()


def submit_stage(run_id: str, stage: str, number: int, after: Sequence[Any]) -> Any:
    """Submit a stage as a Prefect task of the current flow run and return its future."""
    return TASKS[stage].submit(run_id, number, wait_for=after)


def flush_events() -> None:
    """Send what Prefect still has for its server, so that the kept database is complete."""
    EventsWorker.drain_all(timeout=EVENTS_S, at_exit=False)


def hold_events() -> None:
    """Keep task states for a server that is away instead of giving each up within seconds."""
    if os.environ.get("PREFECT_API_URL", "").startswith("http"):
        # The client makes about one attempt a second.
        EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=AWAY_S)


def await_server(timeout_s: float = AWAY_S) -> None:
    """Wait until the server of PREFECT_API_URL answers, or has stayed away for `timeout_s`."""
    url, ends = os.environ.get("PREFECT_API_URL", ""), time.perf_counter() + timeout_s
    if url and not (up := answers(f"{url}/health")):
        _log.warning("prefect.unreachable", waiting_s=timeout_s, url=url)
        while not up and time.perf_counter() < ends:
            time.sleep(LOOK_S)
            up = answers(f"{url}/health")
