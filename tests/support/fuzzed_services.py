"""Fuzzed run: what a worker says is taken in with extreme numbers, and then everyone asks for everything.

A coordinator with its production translation, without sockets. A worker registers, beats, leases and hands in
as it should, but for a few numbers of one message. Whatever becomes of that, every call of the services must
still be answered or refused in a sentence: nothing that a worker says may end what others ask for.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from antiphon.benchmarks.dishonest_workers import Prompts, house_config, sound_submission
from antiphon.benchmarks.parts.kills.standins import open_light_learner
from antiphon.core.client_records import SampleRequest
from antiphon.core.coordinator import consequences
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkReport
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import lease_id_of
from antiphon.core.records import (
    PROTOCOL_VERSION,
    GroupRewards,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    SampleReward,
    SamplingParameters,
    SnapshotManifest,
    StepCommit,
    VersionSpan,
)
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.lineage.store.artifact_store import open_store
from antiphon.net.rpc.calls import Call
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.net.wire import CALLS, WORK_CALLS
from antiphon.protos import coordinator_pb2
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.learner.server import register_learner
from antiphon.services.learner.service import LearnerService
from antiphon.services.scorer.server import register_scorer
from antiphon.services.scorer.service import ScorerService
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from antiphon.weights.rpc import register_broadcast
from antiphon.weights.service import BroadcastService
from tests.support.small_policy import make_model

RUN_ID = "run-1"
LEASE_KEY = bytes(32)
CALL_S = 60.0
_T = TypeVar("_T")


class CountingStateMachine(RunStateMachine):
    """Counts the events that were recorded."""

    recorded = 0

    def record(self, *events: e.JournalEvent, **options: Any) -> "asyncio.Future[None]":
        """Record and count."""
        self.recorded += len(events)
        return super().record(*events, **options)


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
            members = [(m.worker_id, m.state, m.held_version) for m in state_machine.loop.fleet.living()]
            leases = len(state_machine.loop.leases.expired(float("inf")))
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
    """Serve a coordinator, an origin and a scorer until the block is left."""
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
    scorer = ScorerService(make_model().eval(), 1.0)
    servers = {
        "Coordinator": await start_coordinator(service, "127.0.0.1", 0),
        "Broadcast": await start_server("127.0.0.1", 0, lambda s: register_broadcast(s, chunks), []),
        "Learner": await start_server("127.0.0.1", 0, lambda s: register_learner(s, learner), []),
        "Scorer": await start_server("127.0.0.1", 0, lambda s: register_scorer(s, scorer), []),
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


KINDS = ("hello", "heartbeat", "lease", "submission")
EXTREMES: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_INT32: [-(2**31), -1, 0, 1, 2**31 - 1],
    FieldDescriptor.TYPE_INT64: [-(2**63), -1, 0, 1, 10**15, 2**53 + 1, 2**63 - 1],
    FieldDescriptor.TYPE_FIXED64: [0, 1, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_UINT64: [0, 1, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_DOUBLE: [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 5e-324, 1e15, 1e308],
}
"""Values of each type at which something may go wrong."""
Choice = tuple[int, int]
"""Which number of a message, and which extreme value of its type."""
ANSWER_S = 0.2
MOST_STEPS = 8
"""Steps that are opened ahead; a worker that gets no lease then has said something that keeps it from one."""


def numbers_of(message: Any) -> Iterator[tuple[Callable[[Any], None], int]]:
    """Yield how each number of a message is set, and its type; those of parts that it has, too."""
    for field in message.DESCRIPTOR.fields:
        value, inner = getattr(message, field.name), field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            kind = inner.fields_by_name["value"].type
            yield from ((partial(value.__setitem__, key), kind) for key in value if kind in EXTREMES)
        elif inner is not None:
            parts = value if field.is_repeated else [value] if message.HasField(field.name) else []
            for part in parts:
                yield from numbers_of(part)
        elif field.type in EXTREMES and field.is_repeated:
            yield from ((partial(value.__setitem__, at), field.type) for at in range(len(value)))
        elif field.type in EXTREMES:
            yield partial(setattr, message, field.name), field.type


class ClaimedRun:
    """A run in which one worker after the other says what cannot be."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        """Open the run in `folder`."""
        self._runner, self._folder = runner, folder
        self._names = 0
        self._worker_id = ""
        self._opened = 0
        self._run(self._open())

    @property
    def version(self) -> int:
        """Newest version that was announced."""
        return self._machine.state.newest_version or 0

    def feed(self, kind: str, choices: Sequence[Choice]) -> str | None:
        """Send a message with some numbers extreme, then ask for everything; return what went wrong."""
        found: str | None = self._run(self._feed(kind, choices))
        return found

    def lose(self, reason: str) -> None:
        """Lose the worker of now, as after a silence; the next message is another's."""
        self._run(self._lose(reason))

    def close(self) -> None:
        """End the run."""
        self._run(self._machine.close())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    async def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        config, clock = house_config(), asyncio.get_running_loop().time
        journal = Journal(self._folder / JOURNAL_NAME, RUN_ID)
        store = open_store(self._folder / "store", config.record)
        self._machine = RunStateMachine(config, RUN_ID, journal, store, Prompts(), clock)
        await self._machine.start()
        self._service = CoordinatorService(self._machine, audits=AuditQueue(self._machine, bytes(32)))
        await self._announce(0)

    async def _announce(self, version: int) -> None:
        await self._service.announce_snapshot(
            SnapshotManifest(RUN_ID, version, f"{version:064x}", (), 0, (), "127.0.0.1:1")
        )
        await self._service.open_step(version)
        await self._service.open_evaluation(version)

    async def _feed(self, kind: str, choices: Sequence[Choice]) -> str | None:
        try:
            message, send = await self._sound(kind)
        except UnavailableError as error:  # another worker is given what this one holds
            await self._lose(str(error))
            message, send = await self._sound(kind)
        places = list(numbers_of(message))
        for which, value in choices:
            put, number = places[which % len(places)]
            put(EXTREMES[number][value % len(EXTREMES[number])])
        said = str(message).replace("\n", " ")[:300]
        try:
            async with asyncio.timeout(ANSWER_S):
                await send(message)
        except (AntiphonError, TimeoutError):  # a request for leases may be held for as long as it says
            pass
        except Exception as error:  # noqa: BLE001 - whatever else comes out is what is looked for
            return f"{kind} ended with {error!r}: {said}"
        if self._machine.failure is not None:
            return f"{kind} ended the run ({self._machine.failure}): {said}"
        wrong = [f"{call} by others: {error!r}" async for call, error in self._ask_for_everything()]
        return f"after a {kind}, {wrong[0]}: {said}" if wrong else None

    async def _lose(self, reason: str) -> None:
        name, loop = self._worker_id.rpartition("-")[0], self._machine.loop
        self._machine.run(consequences.lose_named(loop, name, reason, self._machine.clock()))

    async def _sound(self, kind: str) -> tuple[Any, Callable[[Any], Any]]:
        """Return a message as it should be, and who takes it in."""
        state = self._machine.state
        if self._machine.loop.fleet.get(self._worker_id) is None or state.barred(
            self._worker_id.rpartition("-")[0]
        ):
            self._names += 1
            hello = WorkerHello(f"x{self._names}", PROTOCOL_VERSION, RUN_ID, 4)
            self._worker_id = (await self._service.register(hello)).worker_id
        worker, version = self._worker_id, state.newest_version
        if kind == "hello":
            self._names += 1
            hello = WorkerHello(f"x{self._names}", PROTOCOL_VERSION, RUN_ID, 4, relay_address="h:1")
            return self._call(CALLS["register"], hello)
        if kind == "lease":
            return self._call(WORK_CALLS["lease"], LeaseRequest(worker, version, 1, 0.0))
        lease, held = await self._lease(worker, version or 0)
        if kind == "submission":
            return self._call(WORK_CALLS["submission"], sound_submission(lease, worker, held))
        return self._call(WORK_CALLS["heartbeat"], _heartbeat(lease, worker, held))

    def _call(self, call: Call, request: Any) -> tuple[Any, Callable[[Any], Any]]:
        return call.write_request(request), partial(call.answer, self._service)

    async def _lease(self, worker: str, version: int) -> tuple[Lease, int]:
        """Return a lease of a worker and the version it then holds, after it loaded what it was asked to and
        steps were opened for it; UnavailableError where it gets none."""
        loads = 0
        await self._service.heartbeat(WorkerHeartbeat(worker, version, None, (), 0, 0.0, 0.0))
        while True:
            reply = await self._service.lease_group(LeaseRequest(worker, version, 1, 0.0))
            if reply.leases:
                return reply.leases[0], version
            if reply.wanted_version not in (None, version) and loads < MOST_STEPS:
                version, loads = reply.wanted_version, loads + 1  # held-out prompts of an older one may wait
                await self._service.heartbeat(WorkerHeartbeat(worker, version, None, (), 0, 0.0, 0.0))
                continue
            if self._opened >= len(self._machine.state.commits) + MOST_STEPS:
                raise UnavailableError(reply.reason)
            self._opened += 1
            await self._service.open_step(self._opened)

    async def _ask_for_everything(self) -> Any:
        """Make every call of the services, and yield those that end with no error of ours."""
        machine, service = self._machine, self._service
        step, version = len(machine.state.commits), machine.state.newest_version or 0
        requests: dict[str, list[Any]] = {
            name: [call.write_request(*_arguments(call))]
            for name, call in CALLS.items()
            if name not in ("register", "finish", "pause", "worker_kit")
        }
        stages = [("collect", step), ("reward", step), ("broadcast", version), ("evaluate", version)]
        requests["await_stage"] = [
            coordinator_pb2.StageRequest(stage=s, number=n, wait_s=0.0) for s, n in stages
        ]
        for name, messages in requests.items():
            for message in messages:
                try:
                    await CALLS[name].answer(service, message)
                except AntiphonError:
                    pass
                except Exception as error:  # noqa: BLE001 - this is what is looked for
                    yield name, error
        try:
            await self._go_on(step)
            async for page in service.event_pages(max(0, machine.journal.last_seq - 20), follow=False):
                list(map(str, page))
        except AntiphonError:
            pass
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            yield "the loop", error

    async def _go_on(self, step: int) -> None:
        """Reward what was handed in, and train on what was sealed: what was claimed is counted with."""
        for group in (await self._service.pull_for_reward("reward-1", 8, 0.0)).groups:
            rewards = tuple(SampleReward(i, float(i % 2)) for i in range(len(group.trajectories)))
            await self._service.submit_rewards([GroupRewards(group.group_id, rewards)])
        for asked in await self._service.pull_for_audit("learner-1", 8, 0.0):
            await self._service.submit_audit(asked.submission.group_id, (), reason="there is no model here")
        if (make := self._machine.loop.planner.due(self._machine.clock())) is not None:
            self._machine.loop.planner.take(make())
        reply = await self._service.await_stage("reward", step, 0.0)
        if reply.batch is not None:
            made = f"{step + 1:064x}"
            await self._service.commit_step(
                StepCommit(step, step + 1, made, reply.batch.digest, {"loss": 0.0})
            )
            self._opened = max(self._opened, step + 1)
            await self._announce(step + 1)


def _arguments(call: Any) -> list[Any]:
    """Return arguments that change little, by the names of a method's parameters."""
    known = {
        "version": 0,
        "payload": 0,
        "step": 0,
        "number": 0,
        "wait_s": 0.0,
        "limit": 0,
        "after_step": -1,
        "groups": (),
        "samples": (),
        "answers": (),
        "orders": (),
        "trajectories": 0,
        "tokens": 0,
        "request": SampleRequest("nobody", (1,), (1,), SamplingParameters(), None),
        "commit": StepCommit(0, 1, "0" * 64, "0" * 64, {}),
        "manifest": SnapshotManifest(RUN_ID, 10**6, "0" * 64, (), 0, (), ""),
    }
    _, *names = call.signature.parameters
    return [known.get(name, "nobody") for name in names]


def _heartbeat(lease: Lease, worker: str, version: int) -> WorkerHeartbeat:
    piece = PartialTrajectory(
        np.arange(1, 4, dtype=np.int32),
        np.full(3, -1.5, dtype=np.float32),
        (VersionSpan(version, 0, 3),),
        None,
        sample_index=0,
    )
    told = DeliveryRecord(version, worker, 1.0, 0.5, {"": 100}, {"": 1e6}, {}, 0.1, 0.1)
    return WorkerHeartbeat(
        worker,
        version,
        f"{version:064x}",
        (lease.lease_id,),
        100,
        1.0,
        2.0,
        progress=(LeaseProgress(lease.lease_id, (piece,)),),
        sampling=True,
        bytes_fetched=100,
        swap_error="it was refused",
        swap_failing_s=1.0,
        network=NetworkReport(0.1, 1e6, ("0" * 64,), (told,)),
        missing_abilities=("ids", "logprobs"),
    )


@contextmanager
def claimed_run(folder: Path) -> Iterator[ClaimedRun]:
    """Open a run until the block is left."""
    with asyncio.Runner() as runner:
        run = ClaimedRun(runner, folder)
        try:
            yield run
        finally:
            run.close()
