"""A run and its Prefect server: what happens while the server is away, and after a cancellation or a crash.

Stages are orchestrated in the flow's own process, so they need no server. Their states travel as events,
which are held back in order until the server takes them: none is lost, and each has an id, so none counts
twice. Only the end needs an answer, and waits for it.

A cancelled or crashed flow run leaves no service, and its page says how to continue. The kernel ends a run's
services with the flow's process, so these hooks find nothing to stop on an ordinary day. They look all the
same, because the flow's process may be the one that hangs.
"""

import json
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import structlog
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectException

from antiphon.flows.run_page import artifact_key
from antiphon.lineage.run_overview import is_running
from antiphon.runs.directory import home_directory, is_finished, list_runs
from antiphon.runs.servers.prefect_server import answers
from antiphon.system.files import write_atomically

_log = structlog.get_logger(__name__)

GRACE_S = 10.0
"""Seconds a service that was left behind gets between SIGTERM and SIGKILL."""

AWAY_S = 900
"""Longest absence of the server that events are held back for, seconds."""

LOOK_S = 1.0
"""Pause between two looks at a server that is away."""

NAME = "prefect.json"
"""File of a run directory that names the flow run which runs it."""


def remember_flow_run(run_dir: Path, flow_run_id: str) -> None:
    """Write down which flow run runs it, whole or not at all."""
    write_atomically(run_dir / NAME, (json.dumps({"flow_run_id": flow_run_id}) + "\n").encode())


def find_run_of(home: Path, flow_run_id: str) -> Path | None:
    """Return the directory of a flow run's newest run, or None when it had none."""
    for directory in reversed(list_runs(home)):
        path = directory / NAME
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["flow_run_id"] == flow_run_id:
            return directory
    return None


def end_services(run_dir: Path) -> list[int]:
    """End every process that still serves the run in `run_dir`; return the ids of those found."""
    found: list[psutil.Process] = []
    for ready in sorted((run_dir / "services").glob("*.json")):
        process = _serving(int(json.loads(ready.read_text(encoding="utf-8"))["pid"]), run_dir.name)
        if process is not None:
            found.append(process)
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(found, timeout=GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return [process.pid for process in found]


def _serving(pid: int, run_id: str) -> psutil.Process | None:
    """Return the process, unless it is gone or its id was given to one that is not of this run."""
    try:
        process = psutil.Process(pid)
        return process if any(run_id in word for word in process.cmdline()) else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def clear_up(flow: Any, flow_run: Any, state: Any) -> None:
    """End what a cancelled or crashed run left behind and write on its page how to continue."""
    run_dir = find_run_of(home_directory(), str(flow_run.id))
    if run_dir is None:
        return
    # Who has the run open ends its services when it closes it.
    left = [] if is_running(run_dir) else end_services(run_dir)
    if left:
        _log.warning("services.left", run=run_dir.name, pids=left)
    if is_finished(run_dir):
        return
    cancelled = str(state.type.value).startswith("CANCEL")
    note = ArtifactCreate(
        key=artifact_key("going-on", run_dir.name),
        type="markdown",
        data=how_to_continue(run_dir, "cancelled" if cancelled else "crashed", len(left)),
        description="How to continue this run",
        flow_run_id=flow_run.id,
    )
    try:
        with get_client(sync_client=True) as client:
            client.create_artifact(note)
    except (PrefectException, httpx.HTTPError, OSError) as error:
        _log.warning("prefect.unreachable", error=str(error)[:200])


def how_to_continue(run_dir: Path, what: str, stopped: int) -> str:
    """Return the note for the page of a run that was not finished."""
    services = f"{stopped} of its services still ran and were ended." if stopped else "No service was left."
    return (
        f"# {run_dir.name}: {what}\n\n{services} What was committed is in the journal; a new run of "
        "the deployment with the same configuration continues from there, and so does\n\n"
        f"    ./antiphon run {shlex.quote(str(run_dir / 'config.yaml'))} --resume {run_dir.name}\n"
    )


def hold_events() -> None:
    """Keep task states for a server that is away instead of giving each up within seconds."""
    if os.environ.get("PREFECT_API_URL", "").startswith("http"):
        # The client makes about one attempt a second.
        EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=AWAY_S)


def await_server(timeout_s: float = AWAY_S) -> bool:
    """Wait until the server of PREFECT_API_URL answers; False when it stayed away for `timeout_s`."""
    url = os.environ.get("PREFECT_API_URL", "")
    started = time.perf_counter()
    said = False
    while url and not answers(f"{url}/health"):
        if time.perf_counter() - started > timeout_s:
            return False
        if not said:
            _log.warning("prefect.unreachable", waiting_s=timeout_s, url=url)
            said = True
        time.sleep(LOOK_S)
    return True
