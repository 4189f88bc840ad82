"""Outages: a run continues while its Prefect server is away, and reports everything afterwards.

Stages are orchestrated in the flow's own process, so they need no server. Their states travel
as events, which are held back in order until the server takes them: none is lost, and each has
an id, so none counts twice. Only the end needs an answer, and waits for it.
"""

import os
import time

import structlog
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker

from antiphon.runs.servers.prefect_server import answers

_log = structlog.get_logger(__name__)

AWAY_S = 900
"""Longest absence of the server that events are held back for, seconds."""

LOOK_S = 1.0
"""Pause between two looks at a server that is away."""


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
