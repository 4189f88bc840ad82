"""Attach: the coordinator of a running run, or of one that rests, made from its journal to answer questions.

A stopped run has no coordinator; its journal has everything a coordinator knows, so this process opens it
for as long as the question takes. Nothing is served, so no one else can ask it.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.api.coordinator import Coordinator
from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.core.records import StepCommit
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import EvaluationRecord, RunStatus
from antiphon.lineage.run_events import EventPacker
from antiphon.net.security.credentials import VARIABLE, Credentials, find_credentials, lets_others_in
from antiphon.net.security.local_run import local_credentials
from antiphon.runs.directory import store_directory
from antiphon.runs.finding import find_run
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.system.files import write_atomically

POLL_S = 5.0
"""Longest single wait for an evaluation."""

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
        async with CoordinatorClient(address, ANSWER_S, credentials=credentials) as client:
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
    async with CoordinatorClient(address, ANSWER_S, credentials=credentials) as client:
        return await client.commits(-1)


@asynccontextmanager
async def attached(directory: Path) -> AsyncIterator[tuple[Coordinator, bool]]:
    """Yield a coordinator of the run in a home's folder and whether the run is running.

    Raises:
        UnavailableError: when the journal could not be replayed in time.
    """
    config = load_config(directory / "config.yaml")
    address = coordinator_address(directory, config)
    credentials = run_credentials(directory, config)
    if address is not None and await look(address, directory.name, credentials) is not None:
        async with CoordinatorClient(address, credentials=credentials) as client:
            yield client, True
        return
    async with _resting(directory, config) as coordinator:
        yield coordinator, False


@asynccontextmanager
async def _resting(directory: Path, config: RunConfig) -> AsyncIterator[Coordinator]:
    from antiphon.lineage.store.artifact_store import open_store
    from antiphon.services.coordinator.journal.journal import journal_place
    from antiphon.services.coordinator.journal.opening import open_journal, showing_life
    from antiphon.services.coordinator.prompts import RestingPrompts
    from antiphon.services.coordinator.run_state_machine import RunStateMachine
    from antiphon.services.coordinator.service import CoordinatorService
    from antiphon.system.logs import configure_logs

    configure_logs("warning")  # its log is of no use here; standard output is for the answer
    run_id, place, outage_s = (
        directory.name,
        journal_place(config, directory),
        config.services.outage_timeout_s,
    )
    store = open_store(store_directory(directory.parents[1]), config.record)
    clock = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(START_S):
                journal = await open_journal(place, run_id, outage_s, hung_s=None)
                # Its model and its environment may not be on this machine, and nobody will ask for a prompt.
                machine = RunStateMachine(config, run_id, journal, store, RestingPrompts(), clock)
                stack.push_async_callback(machine.close)
                await machine.start()
        except TimeoutError:
            raise UnavailableError(
                f"the journal of {run_id} could not be replayed in {START_S:g} s"
            ) from None
        await stack.enter_async_context(showing_life(journal, machine.fail))
        yield CoordinatorService(machine)
        machine.check()


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


def held_out_scores(
    home: Path, run: str | None, version: int | None, timeout_s: float
) -> tuple[str, list[EvaluationRecord]]:
    """Return a run's id and its held-out scores, oldest version first.

    Without an id it is the newest run; without a version, every one that was evaluated.

    Raises:
        ConfigError: when there is no such run, or `version` was not evaluated and cannot be.
        UnavailableError: when the evaluation took longer than `timeout_s`.
    """
    directory = find_run(home, run)

    async def ask() -> list[EvaluationRecord]:
        async with attached(directory) as (coordinator, running):
            if version is None:
                return (await coordinator.status()).scores
            return [await _score(coordinator, directory.name, version, running, timeout_s)]

    return directory.name, asyncio.run(ask())


def write_scores(run_id: str, scores: Sequence[EvaluationRecord], path: Path) -> None:
    """Write scores as JSON, whole or not at all."""
    content = {"run": run_id, "evaluations": plain_scores(scores)}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def plain_scores(scores: Sequence[EvaluationRecord]) -> list[dict[str, Any]]:
    """Return scores as plain values; pass@1 is the mean reward."""
    return [{"version": e.version, "pass_at_1": e.reward_mean, "prompts": e.prompts} for e in scores]


async def _score(
    coordinator: Coordinator, run_id: str, version: int, running: bool, timeout_s: float
) -> EvaluationRecord:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    status = await coordinator.status()
    measured = ", ".join(str(e) for e in sorted(status.scored)) or "none"
    if version not in status.scored:
        if not running or status.finished:
            raise ConfigError(
                f"--version {version} of {run_id} was not evaluated and the run is not running; "
                f"evaluated versions: {measured}"
            )
        if status.newest_version is None or version > status.newest_version:
            raise ConfigError(
                f"--version {version} of {run_id} is not published; newest is {status.newest_version}"
            )
        await coordinator.open_evaluation(version)
    while True:
        left_s = max(0.0, deadline - loop.time())
        reply = await coordinator.await_stage("evaluate", version, min(POLL_S, left_s))
        if reply.evaluation is not None:
            return reply.evaluation
        if reply.halted or left_s <= POLL_S:
            reason = reply.halted or f"it took longer than {timeout_s:g} s; it waits for {reply.waiting_for}"
            raise UnavailableError(f"version {version} was not evaluated: {reason}")
