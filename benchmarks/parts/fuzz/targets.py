"""Fuzz targets: every service on loopback, and every change that a call makes counted.

They run in a thread of their own, so that calls can be made from anywhere. The learner
has a light engine, and a coordinator of its own: what it tells it is no call that is counted.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from antiphon.benchmarks.parts.kills.standins import open_light_learner
from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import lease_id_of
from antiphon.core.records import PROTOCOL_VERSION, Prompt
from antiphon.lineage.store.artifact_store import open_store
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import JOURNAL_NAME, start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.learner.server import register_learner
from antiphon.services.learner.service import LearnerService
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from antiphon.weights.server import register_broadcast
from antiphon.weights.service import BroadcastService

RUN_ID = "run-1"
LEASE_KEY = bytes(32)
CALL_S = 60.0
_T = TypeVar("_T")


class Prompts:
    """Prompts without an environment."""

    def prompt(self, split: str, index: int) -> Prompt:
        """Return a prompt of two tokens."""
        return Prompt(f"{split}-0-{index}", (1, 2 + index % 5))


class CountingStateMachine(RunStateMachine):
    """Counts the events that were recorded."""

    recorded = 0

    def record(self, *events: e.JournalEvent, **options: Any) -> "asyncio.Future[None]":
        """Record and count."""
        self.recorded += len(events)
        return super().record(*events, **options)


def house_config() -> RunConfig:
    """Return a run in which nothing happens by itself: leases and heartbeats last for weeks."""
    return build_config(
        {
            "run": {"steps": 1000, "seed": 7},
            "environment": {"train_size": 10, "heldout_size": 3},
            "evaluation": {"prompts": 3},
            "loop": {"prompts_per_step": 4, "group_size": 2, "max_staleness": 64},
            "sampling": {"max_tokens": 8},
            "coordinator": {"lease_s": 1e6, "heartbeat_s": 1e6, "payload_retention_steps": 2},
            "broadcast": {"snapshots_kept": 80},
            "services": {"stall_timeout_s": 0.3},
        }
    )


class RunningServices:
    """Every service, and what they hold at the moment."""

    def __init__(
        self,
        state_machine: CountingStateMachine,
        learner: LearnerService,
        addresses: dict[str, str],
        loop: Any,
    ) -> None:
        self.state_machine = state_machine
        self.addresses = addresses
        """host:port by the name of the service."""
        self._learner = learner
        self._loop = loop

    def picture(self) -> tuple[object, ...]:
        """Return what a call that is refused must leave as it is."""

        async def look() -> tuple[object, ...]:
            state_machine = self.state_machine
            members = [(m.worker_id, m.state, m.held_version) for m in state_machine.fleet.living()]
            leases = len(state_machine.leases.expired(float("inf")))
            version = (await self._learner.status()).version
            return state_machine.recorded, tuple(members), leases, state_machine.failure, version

        return self._run(look())

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)


def known_values() -> dict[str, list[Any]]:
    """Return values that mean something to the services."""
    groups = [f"g{number:07d}" for number in range(6)]
    return {
        "worker_name": ["w", "v"],
        "worker_id": ["w-1", "w-2", "v-1", "w-3"],
        "group_id": groups,
        "lease_id": [lease_id_of(LEASE_KEY, group, attempt) for group in groups for attempt in (1, 2)],
        "protocol_version": [PROTOCOL_VERSION],
        "run_id": [RUN_ID, ""],
        "held_version": [0],
        "version": [0],
        "step": [0, 1],
        "groups": [1, 3],
        "limit": [1, 4],
        "wait_s": [0.0, 0.01, -1.0],
        "after_seq": [0, 5, 10_000],
        "follow": [False],
        "finish_reason": ["stop", "length"],
        "sample_index": [0, 1],
        "start": [0],
        "stop": [1],
        "generation_s": [0.5],
        "reward": [0.0, 1.0],
        "name": ["w", "v"],
    }


@contextmanager
def open_services(folder: Path) -> Iterator[RunningServices]:
    """Serve a coordinator and an origin until the block is left."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="services", daemon=True)
    thread.start()
    stop = asyncio.Event()
    ready: list[RunningServices] = []
    serving = asyncio.run_coroutine_threadsafe(_serve(folder, ready, stop), loop)
    try:
        asyncio.run_coroutine_threadsafe(_until(ready, serving), loop).result(CALL_S)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        serving.result(CALL_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CALL_S)
        loop.close()


async def _until(ready: list[RunningServices], serving: Any) -> None:
    while not ready:
        if serving.done():
            serving.result()
        await asyncio.sleep(0.01)


async def _serve(folder: Path, ready: list[RunningServices], stop: asyncio.Event) -> None:
    state_machine, behind = await _state_machine(folder / "run"), await _state_machine(folder / "behind")
    service = CoordinatorService(state_machine, audits=AuditQueue(state_machine, bytes(32)))
    learner = await _learner(folder / "behind", behind)
    chunks = BroadcastService(PayloadStore(folder / PAYLOADS))
    servers = {
        "Coordinator": await start_coordinator(service, "127.0.0.1", 0),
        "Broadcast": await start_server("127.0.0.1", 0, lambda s: register_broadcast(s, chunks), []),
        "Learner": await start_server("127.0.0.1", 0, lambda s: register_learner(s, learner), []),
    }
    addresses = {name: f"127.0.0.1:{port}" for name, (_, port) in servers.items()}
    ready.append(RunningServices(state_machine, learner, addresses, asyncio.get_running_loop()))
    await stop.wait()
    for server, _ in servers.values():
        await stop_server(server, grace_s=0.1)
    await learner.close()
    for one in (state_machine, behind):
        await one.close()


async def _state_machine(folder: Path) -> CountingStateMachine:
    config, clock = house_config(), asyncio.get_running_loop().time
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / JOURNAL_NAME, RUN_ID)
    store = open_store(folder / "store", config.record)
    state_machine = CountingStateMachine(
        config, RUN_ID, journal, store, Prompts(), clock, lease_key=LEASE_KEY
    )
    await state_machine.start()
    return state_machine


async def _learner(folder: Path, state_machine: CountingStateMachine) -> LearnerService:
    """Return a learner that holds version 0; batches never come, and it soon stops waiting for one."""
    learner = open_light_learner(
        state_machine.config,
        RUN_ID,
        folder,
        state_machine.store,
        PayloadStore(folder / PAYLOADS),
        CoordinatorService(state_machine),
    )
    await learner.restore()
    learner.origin = "127.0.0.1:1"
    return learner
