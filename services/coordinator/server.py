"""Coordinator server: calls answered by the service, and the process that serves a run."""

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from antiphon.api.coordinator import Coordinator
from antiphon.core.config import RunConfig
from antiphon.core.coordinator.loop_state import PromptSource
from antiphon.core.message_sizes import MESSAGE_BYTES, TRAJECTORY_BYTES
from antiphon.core.records import TurnLimits
from antiphon.lineage.store.artifact_store import open_store
from antiphon.net.rpc.calls import serve_contract
from antiphon.net.rpc.serving import Security, refusing_server, start_server, stop_server
from antiphon.net.security.credentials import (
    Credentials,
    learner_public,
    lets_others_in,
    needed_token_key,
)
from antiphon.net.security.guard import Guard
from antiphon.net.wire import CALLS, COORDINATOR, WORK_CALLS, event_to_proto
from antiphon.net.worker_kit import KIT_FILE
from antiphon.protos import coordinator_pb2
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.journal.databases import journal_gone
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, journal_place
from antiphon.services.coordinator.journal.opening import open_journal, showing_life
from antiphon.services.coordinator.metrics_page import metrics_page
from antiphon.services.coordinator.prompts import client_prompts, load_prompts
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.sealing import own_advantage
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.coordinator.work_stream import StreamServer
from antiphon.system.clock import wall_clock
from antiphon.system.processes import StopRequest

__all__ = ["JOURNAL_NAME", "serve_coordinator", "start_coordinator"]

LINGER_S = 30.0
"""After the end of a run, how long status and late callers still find it served."""

COLLECT_AFTER = 20_000
"""New objects between two looks of the garbage collector; a request makes hundreds that die at once."""
COLLECTIONS = 100, 100
"""Such looks between two at what outlived one, and between two at everything: with ten thousand groups in
flight these take 90 and 200 ms, in which no call is answered, and what a run makes has few cycles."""
_TOKEN_BYTES = 32
_SMALLEST_LIMIT = 8 << 20


async def start_coordinator(
    service: CoordinatorService, host: str, port: int, security: Security | None = None
) -> tuple[grpc.aio.Server, int]:
    """Serve `service` and return the server with its port; without `security` on loopback alone.

    Raises:
        ConfigError: when the address cannot be listened on.
    """
    return await start_server(
        host,
        port,
        lambda server: register_coordinator(server, service),
        ["antiphon.Coordinator"],
        security,
        largest_message(service.state_machine.config, service.state_machine.loop.limits),
    )


def register_coordinator(server: Any, service: Coordinator) -> None:
    """Add the service to a server that was not started yet."""
    handlers = {name: partial(call.answer, service) for name, call in WORK_CALLS.items()}
    told = getattr(service, "speaks", None)  # what only greets workers does not mind who lives

    async def work(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        speakers: set[str] = set()

        async def heartbeat(body: Any) -> Any:
            if told is not None and body.worker_id not in speakers:
                speakers.add(body.worker_id)
                told(body.worker_id, 1)
            return await handlers["heartbeat"](body)

        try:
            serving = StreamServer({**handlers, "heartbeat": heartbeat}).serve(requests)
            async with aclosing(serving) as replies:
                async for several in replies:
                    yield several
        finally:
            if told is not None:
                for worker_id in speakers:
                    told(worker_id, -1)

    async def watch_events(request: Any, context: Any) -> AsyncIterator[Any]:
        async for page in service.event_pages(request.after_seq, request.follow):
            yield coordinator_pb2.EventsReply(events=[event_to_proto(event) for event in page])

    serve_contract(server, COORDINATOR, CALLS, service, Work=work, WatchEvents=watch_events)


def largest_message(config: RunConfig, limits: TurnLimits | None = None) -> int:
    """Return the bytes of the largest message that a coordinator takes in.

    That is a group of the longest completions, at 8 bytes a token and a version span for each, or a
    manifest. `limits` are those of a task with turns.
    """
    if config.client_driven:  # a client says how many completions a group has
        return MESSAGE_BYTES
    longest = config.sampling.max_tokens if limits is None else limits.tokens
    samples = max(config.loop.group_size, config.evaluation.samples)
    group = samples * (longest * _TOKEN_BYTES + TRAJECTORY_BYTES)
    return min(MESSAGE_BYTES, max(_SMALLEST_LIMIT, group))


def coordinator_guard(
    state_machine: RunStateMachine, credentials: Credentials, wall_clock: Callable[[], float]
) -> Guard:
    """Return who lets calls in to the coordinator of a run.

    Raises:
        ConfigError: when the bundle cannot check tokens.
    """
    return Guard(
        needed_token_key(credentials),
        state_machine.run_id,
        wall_clock,
        state_machine.clock,
        revoked=lambda: state_machine.state.revoked,
        note_quota=state_machine.loop.fleet.note_quota,
        places_of=state_machine.loop.places_of,
    )


async def serve_coordinator(
    config: RunConfig,
    run_id: str,
    run_dir: Path,
    store_root: Path,
    host: str,
    port: int,
    ready: Callable[[int], None],
    prompts: PromptSource | None = None,
    credentials: Credentials | None = None,
    learner_key: bytes | None = None,
    stop: StopRequest | None = None,
    wait_for_journal: bool = False,
) -> None:
    """Serve one run until it is finished or the process is asked to stop.

    Args:
        config: configuration of the run; what a run keeps for good must not have changed.
        run_id: the run.
        run_dir: its folder; the journal lies in it.
        store_root: where batches go.
        host: address to listen on.
        port: 0 picks a free one.
        ready: called with the port once the coordinator can work.
        prompts: where prompts come from; by default the environment that `config` names.
        credentials: the services' bundle; None serves without encryption, on loopback alone.
        learner_key: public key of the learner; by default the one in the bundle or the run's folder.
        stop: asks to stop; None never does.
        wait_for_journal: while the journal cannot be opened, answer every call with the reason and try
            again, for services.outage_timeout_s.

    Raises:
        ConfigError: when the configuration, the environment, the journal or the port cannot be used.
        UnavailableError: when the journal or the store can no longer be written.
    """
    stopping = asyncio.Event()
    if stop is not None:
        stop.tell(stopping.set)
    refusing = partial(refusing_server, host, port, credentials) if wait_for_journal else None
    place, outage_s = journal_place(config, run_dir), config.services.outage_timeout_s
    if wait_for_journal and isinstance(place, Path) and place.parent.is_dir() and not place.exists():
        raise journal_gone(place)  # this run had one: it must not begin again without a word
    opening = asyncio.ensure_future(open_journal(place, run_id, outage_s, refusing))
    await _unless_stopped(opening, stopping)
    if opening.cancelled():
        return
    journal = opening.result()
    if config.algorithm.advantage is not None:
        own_advantage(config.algorithm.advantage)  # found missing now, not at the first batch
    if prompts is None:
        load: Callable[[RunConfig], PromptSource] = client_prompts if config.client_driven else load_prompts
        prompts = await asyncio.to_thread(load, config)
    state_machine = RunStateMachine(
        config,
        run_id,
        journal,
        open_store(store_root, config.record),
        prompts,
        asyncio.get_running_loop().time,
    )
    await state_machine.start()
    # What was loaded and folded stays for good, so the garbage collector need not walk it again and again.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *COLLECTIONS)
    try:
        if learner_key is None:
            learner_key = learner_public(run_dir, credentials) or b""
        security = None
        if credentials is not None:
            security = Security(credentials, coordinator_guard(state_machine, credentials, wall_clock))
        audited = config.trust.audits == "all" or (
            config.trust.audits == "remote" and lets_others_in(credentials)
        )
        audits = AuditQueue(state_machine, secrets.token_bytes(32)) if audited else None
        service = CoordinatorService(state_machine, learner_key, audits, run_dir / KIT_FILE)
        server, bound = await start_coordinator(service, host, port, security)
        try:
            async with showing_life(journal, state_machine.fail), metrics_page(service, config):
                ready(bound)
                await _until_over(state_machine, stopping)
        finally:
            await stop_server(server)
    finally:
        await state_machine.close()
    state_machine.check()


async def _unless_stopped(work: "asyncio.Future[Any]", stop: asyncio.Event) -> None:
    """Wait for the end of `work`, which is cancelled when the process is asked to stop."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        work.cancel()
    await asyncio.wait({work})


async def _until_over(state_machine: RunStateMachine, stop: asyncio.Event) -> None:
    """Wait for a request to stop, a failure, or the end of the run and a while more."""
    waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(state_machine.failed.wait())]
    ended_s: float | None = None
    try:
        while not any(wait.done() for wait in waits):
            await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if state_machine.state.finished:
                ended_s = ended_s if ended_s is not None else state_machine.clock()
                if state_machine.clock() - ended_s > LINGER_S:
                    return
    finally:
        for wait in waits:
            wait.cancel()
