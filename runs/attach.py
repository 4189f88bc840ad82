"""Attach: the coordinator of a running run, or one started on its journal to answer questions.

A stopped run has no coordinator; its journal has everything a coordinator knows, so one is
started in this process for as long as the question takes. It grants nothing, as no worker asks it.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.api.coordinator import Coordinator
from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.records import StepCommit
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import RunStatus
from antiphon.lineage.run_events import EventPacker
from antiphon.net.security.credentials import VARIABLE, Credentials, find_credentials, lets_others_in
from antiphon.net.security.local_run import ensure_local_credentials, local_credentials
from antiphon.runs.directory import store_directory
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.prompts import RestingPrompts

ANSWER_S = 5.0
"""Longest wait for a running coordinator's answer."""

START_S = 60.0
"""Longest wait for a coordinator to replay a journal."""


def coordinator_address(directory: Path, config: RunConfig) -> str | None:
    """Return HOST:PORT of the run's coordinator as its ready file says, or None without one."""
    try:
        ready = json.loads((directory / "services" / "coordinator.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return f"{config.services.reached_at}:{ready['port']}"


def run_credentials(directory: Path, config: RunConfig) -> Credentials | None:
    """Return what a run's services know people by: a bundle that is configured, else the run's own.

    None for a run that has none, since its services never ran.

    Raises:
        ConfigError: when the bundle cannot be read, or can be read by others.
    """
    named = config.services.credentials or os.environ.get(VARIABLE)
    return find_credentials(named) or local_credentials(directory)


async def look(address: str, run_id: str, credentials: Credentials | None = None) -> RunStatus | None:
    """Ask the coordinator at `address`; None when none answers there, or for another run."""
    try:
        async with _client(address, credentials, ANSWER_S) as client:
            found = await client.status()
    except UnavailableError:
        return None
    except ContractError:
        if lets_others_in(credentials):
            raise
        return None  # the port of a coordinator that is gone went to another program
    return found if found.run_id == run_id else None


async def commits_of(address: str, credentials: Credentials | None = None) -> Sequence[StepCommit]:
    """Return all commits of the run whose coordinator answers at `address`, in order.

    Raises:
        UnavailableError: when none answers there.
    """
    async with _client(address, credentials, ANSWER_S) as client:
        return await client.commits(-1)


@asynccontextmanager
async def attached(directory: Path) -> AsyncIterator[tuple[CoordinatorClient, bool]]:
    """Yield a coordinator of the run in a home's folder and whether the run is running.

    Raises:
        UnavailableError: when the journal could not be replayed in time.
    """
    config = load_config(directory / "config.yaml")
    address = coordinator_address(directory, config)
    credentials = run_credentials(directory, config)
    if address is not None and await look(address, directory.name, credentials) is not None:
        async with _client(address, credentials) as client:
            yield client, True
        return
    credentials = ensure_local_credentials(directory)  # not another user of this machine may ask it
    async with (
        _coordinator_on(directory, config, credentials) as own,
        _client(own, credentials) as client,
    ):
        yield client, False


@asynccontextmanager
async def _client(
    address: str, credentials: Credentials | None, timeout_s: float = 10.0
) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(address, timeout_s, credentials=credentials)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def _coordinator_on(directory: Path, config: RunConfig, credentials: Credentials) -> AsyncIterator[str]:
    from antiphon.services.coordinator.server import serve_coordinator
    from antiphon.system.logs import configure_logs

    configure_logs("warning")  # its log is of no use here; standard output is for the answer
    host = "127.0.0.1"
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(
        serve_coordinator(
            config,
            directory.name,
            directory,
            store_directory(directory.parents[1]),
            host,
            0,
            bound.set_result,
            # Its model and its environment may not be on this machine, and nobody will ask for a prompt.
            RestingPrompts(),
            credentials=credentials,
            hung_s=None,
        )
    )
    try:
        ends: list[asyncio.Future[Any]] = [serving, bound]
        await asyncio.wait(ends, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        if not bound.done():
            raise UnavailableError(f"the journal of {directory.name} could not be replayed in {START_S:g} s")
        yield f"{host}:{bound.result()}"
    finally:
        serving.cancel()
        await asyncio.wait({serving}, timeout=START_S)


async def read_events(coordinator: Coordinator, view: RunView, packer: EventPacker | None = None) -> RunView:
    """Apply the journal's events to a view that has not got them yet, page by page, and pack them too.

    There is no limit to how long that takes, only to the wait for the next page. Where it fails, ask
    again with the same view.

    Raises:
        UnavailableError: when no page came in time.
    """
    async for page in coordinator.event_pages(view.seq, follow=False):
        for event in page:
            view.apply(event)
        if packer is not None:
            packer.add(page)
    return view
