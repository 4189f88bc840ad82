"""A run and its Prefect server: what happens while the server is away, and after a cancellation or a crash.

Stages are orchestrated in the flow's own process, so they need no server. Their states travel as events,
which are held back in order until the server takes them: none is lost, and each has an id, so none counts
twice. Only the end needs an answer, and waits for it.

The kernel ends a run's services with the flow's process, so a cancelled or crashed flow run leaves none; its
page says how to continue.
"""

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import httpx
import structlog
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectException

from antiphon.flows.run_page import artifact_key
from antiphon.runs.directory import home_directory, is_finished, list_runs
from antiphon.runs.servers.prefect_server import answers
from antiphon.system.files import write_atomically

_log = structlog.get_logger(__name__)

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


def note_how_to_continue(flow: Any, flow_run: Any, state: Any) -> None:
    """Write on the page of a cancelled or crashed flow run how to continue its run."""
    run_dir = find_run_of(home_directory(), str(flow_run.id))
    if run_dir is None or is_finished(run_dir):
        return
    note = ArtifactCreate(
        key=artifact_key("going-on", run_dir.name),
        type="markdown",
        data=f"# {run_dir.name}: {'crashed' if state.is_crashed() else 'cancelled'}\n\n"
        "What was committed is in the journal; a new run of the deployment with the same configuration "
        "continues from there, and so does\n\n"
        f"    ./antiphon run {shlex.quote(str(run_dir / 'config.yaml'))} --resume {run_dir.name}\n",
        description="How to continue this run",
        flow_run_id=flow_run.id,
    )
    try:
        with get_client(sync_client=True) as client:
            client.create_artifact(note)
    except (PrefectException, httpx.HTTPError, OSError) as error:
        _log.warning("prefect.unreachable", error=str(error)[:200])


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
