"""Processes: the main routines of the simulated processes, each as its production process runs it.

What a `serve_*` does with sockets and signals is done here with the simulated network; services,
clients, servicers and the worker's loop are the production classes.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from antiphon.api.coordinator import Coordinator
from antiphon.api.engine import Engine
from antiphon.api.learner import Learner
from antiphon.api.snapshots import Broadcast
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.dissemination.plan import TransferPlan
from antiphon.core.loop.schedule import Stage, StageKey, schedule
from antiphon.core.records import Payload, SnapshotManifest, TurnLimits
from antiphon.core.trust.access_tokens import Scope, TokenClaims
from antiphon.environments.host import HostEnvironment
from antiphon.environments.scoring.pool import InProcess
from antiphon.lineage.hosts import HostCounts
from antiphon.net.rpc.interceptor import GuardInterceptor
from antiphon.net.security.access_tokens import make_token
from antiphon.net.security.credentials import SERVICES_NAME
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import SigningKey, signing_key
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.opening import showing_life
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import register_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.learner.audits.audit_loop import audit_forever
from antiphon.services.learner.client import LearnerClient
from antiphon.services.learner.server import register_learner
from antiphon.services.learner.service import LearnerService
from antiphon.services.reward.gateway import Gateway
from antiphon.services.reward.service import RewardService
from antiphon.services.reward.sessions import Sessions
from antiphon.services.reward.turns import TurnAnswerer
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.services.stages import LoopStages
from antiphon.simulator.hosts import GatewayPlace
from antiphon.simulator.standins import arithmetic, engines, training
from antiphon.simulator.standins.training import ArithmeticAuditor
from antiphon.simulator.virtual.chunks import MemoryPayloads
from antiphon.simulator.virtual.connection import InProcessChannel
from antiphon.simulator.virtual.disk import RUN_ID, JournalDisk, MemoryJournal, MemoryStore
from antiphon.simulator.virtual.in_process import Identity, InProcessServer
from antiphon.simulator.virtual.loop import Process, VirtualLoop
from antiphon.simulator.virtual.network import Network
from antiphon.weights.rpc import BroadcastClient, register_broadcast
from antiphon.weights.service import BroadcastService

RESTART_S = 1.0
"""Pause of the supervisor before it starts a process again that ended by itself."""


@dataclass(slots=True)
class ProcessEntry:
    """A process by name: the one that runs now, and what its successor must know."""

    name: str
    process: Process | None = None
    starts: int = 0
    worker: RolloutWorker | None = None
    payloads: MemoryPayloads = field(default_factory=MemoryPayloads)
    alias: str = ""
    held: int | None = None
    away_s: float = RESTART_S
    """Pause after it ended by itself; longer once after a retirement."""


_KEY: SigningKey = signing_key(bytes(32))
TOKEN_KEY = _KEY.public
"""What checks the tokens, 32 bytes."""
_EXPIRES_AT = 1 << 40
"""Unix seconds; simulated clocks may be years wrong."""
_WORKER_SCOPES = (Scope.LEASE, Scope.SUBMIT, Scope.PULL)
_MAX_LEASES = 64


@functools.cache
def identity_of(name: str = SERVICES_NAME, scopes: tuple[Scope, ...] = (Scope.ADMIN,)) -> Identity:
    """Return what a process of that name shows; the run's own services have one in common."""
    token_id = digest_bytes(name.encode())[:32]
    token = make_token(TokenClaims(token_id, RUN_ID, name, scopes, _EXPIRES_AT, _MAX_LEASES), _KEY)
    return Identity(f"Bearer {token}", (name,))


COORDINATOR = "coordinator"
LEARNER = "learner"
PULL_WAIT_S = 6.0
"""Longer than in production: an idle reward service's questions would be most of the traffic."""

EVENTS_PER_SNAPSHOT = 25
"""Far fewer than in production: nearly every restart begins from one."""


@dataclass(slots=True)
class SharedRun:
    """What all processes of one simulated run share: the network, and disks that outlive them."""

    loop: VirtualLoop
    network: Network
    config: RunConfig
    journal: JournalDisk
    store: MemoryStore
    learner_disk: training.LearnerDisk
    reward_rarity: int
    failure_rarity: int
    limits: TurnLimits | None
    """Of conversations; None where the task has none."""
    answer_s: Callable[[], float]
    """Seconds that an environment takes to answer the next turn."""
    conversation_dies: Callable[[], bool]
    """Whether the process of the next turn's conversation dies instead."""
    engine_step_s: Callable[[str], float]
    """Seconds of the next engine step of a worker."""
    chunk_s: Callable[[str], float]
    """Seconds by which a worker's link delays the next chunk; 0 as a rule."""
    alters_chunk: Callable[[str], bool]
    """Whether the next chunk of a worker arrives with other bytes."""
    upload_s: Callable[[str], float]
    """Seconds by which it delays the next group that is handed in; 0 as a rule."""
    learner_step_s: Callable[[], float]
    trained: Callable[[int, bytes], int]
    """Called with each step that is trained and its file; returns how many rows that has."""
    state_machines: list[RunStateMachine]
    """Of every coordinator so far, the living one last."""
    wall_clock: Callable[[], float]
    """What coordinators take for the time of day; nothing may depend on it."""
    audit_secret: bytes
    """32 bytes that decide which groups are audited."""
    gateway: GatewayPlace | None = None
    """The newest one that hosts may ask."""
    host_counts: dict[str, HostCounts] = field(default_factory=dict)
    """What became of each host's episodes."""

    def channel(self, address: str, worker: str = "") -> Any:
        """Return a channel for a worker of that name, or for the run's own services."""
        identity = identity_of(worker, _WORKER_SCOPES) if worker else identity_of()
        return InProcessChannel(self.network, address, identity)

    def coordinator(self, worker: str = "") -> CoordinatorClient:
        return CoordinatorClient(COORDINATOR, channel=self.channel(COORDINATOR, worker))


async def serve_coordinator(shared: SharedRun, process: Process, clock_offset_s: float) -> None:
    """Serve the run until the state machine fails, and raise why.

    `clock_offset_s`: monotonic clocks of two processes have nothing to do with each other.
    """
    loop = shared.loop
    journal = MemoryJournal(shared.journal, shared.wall_clock)
    state_machine = RunStateMachine(
        shared.config,
        RUN_ID,
        journal,
        shared.store,
        engines.ArithmeticPrompts(shared.limits),
        lambda: loop.time() + clock_offset_s,
        EVENTS_PER_SNAPSHOT,
        lease_key=bytes(32),
    )
    await state_machine.start()
    guard = Guard(
        TOKEN_KEY,
        RUN_ID,
        shared.wall_clock,
        state_machine.clock,
        revoked=lambda: state_machine.state.revoked,
        note_quota=state_machine.loop.fleet.note_quota,
        places_of=state_machine.loop.places_of,
    )
    server = InProcessServer()
    audits = AuditQueue(state_machine, shared.audit_secret)
    service = CoordinatorService(state_machine, audits=audits)
    register_coordinator(GuardInterceptor(server, guard), service)
    if shared.network.listen(COORDINATOR, process, server):
        shared.state_machines.append(state_machine)
    async with showing_life(journal, state_machine.fail):
        await state_machine.failed.wait()
    state_machine.check()


async def serve_learner(shared: SharedRun, process: Process, coordinator: Coordinator, origin: str) -> None:
    """Restore, then train and serve chunks for as long as the process lives."""
    config = shared.config
    trainer = training.ArithmeticTrainer(
        shared.learner_disk,
        shared.loop,
        shared.learner_step_s,
        config.learner.checkpoints_kept,
        shared.trained,
    )
    publisher = training.ArithmeticPublisher(
        RUN_ID,
        shared.learner_disk.payloads,
        config.broadcast.snapshots_kept,
    )
    service = LearnerService(config, trainer, publisher, shared.store, coordinator)
    service.origin = origin
    restoring = asyncio.ensure_future(service.restore())
    server = InProcessServer()
    guarded = GuardInterceptor(server, Guard(TOKEN_KEY, RUN_ID, shared.wall_clock, shared.loop.time))
    register_learner(guarded, service)
    register_broadcast(guarded, BroadcastService(shared.learner_disk.payloads))
    shared.network.listen(LEARNER, process, server)
    shared.network.listen(origin, process, server)
    await restoring
    await service.publish_again()
    async with asyncio.TaskGroup() as beside:
        beside.create_task(service.keep_announced())
        auditor = ArithmeticAuditor(shared.learner_disk.payloads)
        beside.create_task(audit_forever(coordinator, auditor.examine, f"learner-{origin}"))


def make_worker(
    shared: SharedRun,
    process: Process,
    coordinator: Coordinator,
    name: str,
    payloads: MemoryPayloads,
    make_engine: Callable[[], Engine] = engines.ArithmeticEngine,
) -> RolloutWorker:
    """Return the worker of a process, called `name` in the run; the process's name decides how fast it is."""
    address = f"{process.name}:1"
    server = InProcessServer()
    guarded = GuardInterceptor(server, Guard(TOKEN_KEY, RUN_ID, shared.wall_clock, shared.loop.time))
    register_broadcast(guarded, BroadcastService(payloads, relays=True))
    shared.network.listen(address, process, server)

    async def ask_plan(manifest: SnapshotManifest, payload: Payload) -> TransferPlan | None:
        return await coordinator.plan_transfer(worker.worker_id, manifest.version, payload.digest)

    def source(config: RunConfig) -> engines.SnapshotSource:
        timeout_s, slow = config.broadcast.transfer_timeout_s, partial(shared.chunk_s, process.name)
        alters = partial(shared.alters_chunk, process.name)

        def connect(address: str) -> Sequence[Broadcast]:
            origin = BroadcastClient(address, timeout_s, channel=shared.channel(address, name))
            return [engines.SlowLink(origin, slow, alters)]

        return engines.SnapshotSource(payloads, connect, timeout_s, ask_plan)

    worker = RolloutWorker(
        coordinator,
        name,
        RUN_ID,
        lambda config: make_engine(),
        source,
        drive=partial(engines.LoopDriver, step_s=partial(shared.engine_step_s, process.name)),
        relay_address=address,
    )
    return worker


def make_reward_service(
    shared: SharedRun, coordinator: Coordinator, client_id: str, hosted: Gateway | None = None
) -> RewardService:
    """Return the reward service of a process; `run` is its main routine, and `hosted` serves hosts."""
    environment = engines.ArithmeticEnvironment(shared.config, shared.reward_rarity, shared.failure_rarity)
    stall_timeout_s = shared.config.services.stall_timeout_s
    decoder = engines.JsonDecoder()
    conversations = engines.ArithmeticConversations(
        shared.reward_rarity, shared.failure_rarity, shared.answer_s, shared.conversation_dies
    )
    own = TurnAnswerer(conversations, cast(Any, engines.JsonRenderer()), shared.config.environment.seed)
    return RewardService(
        coordinator,
        InProcess(environment),
        decoder,
        RUN_ID,
        client_id,
        stall_timeout_s,
        pull_wait_s=PULL_WAIT_S,
        answer=None if shared.limits is None else hosted or own,
    )


async def serve_gateway(
    shared: SharedRun, process: Process, coordinator: Coordinator, client_id: str
) -> None:
    """Serve hosts in the reward service's place until the run is finished."""
    config, clock = shared.config, shared.loop.time
    sessions = Sessions(
        HostEnvironment(config.environment),
        {"train": config.loop.group_size, "heldout": config.evaluation.samples},
        vocabulary=arithmetic.VOCABULARY,
        max_tokens=config.sampling.max_tokens,
        host_timeout_s=config.gateway.host_timeout_s,
        forget_s=2.0 * config.services.stall_timeout_s,
        now=clock(),
    )
    sessions.hosts = shared.host_counts  # production keeps them in a file
    gateway = Gateway(config, sessions, cast(Any, engines.JsonDecoder()), "there is none", clock)
    shared.gateway = GatewayPlace(process, gateway)
    await make_reward_service(shared, coordinator, client_id, gateway).run(lambda: None)


async def drive_run(shared: SharedRun) -> None:
    """Do what the flow does: publish, open steps, train, evaluate, finish; it can be begun again."""
    flow = Flow(shared.config, shared.coordinator(), LearnerClient(LEARNER, channel=shared.channel(LEARNER)))
    await flow.run()


class Flow:
    """Walks the schedule as the Prefect flow does, each stage a task of the event loop."""

    def __init__(self, config: RunConfig, coordinator: Coordinator, learner: Learner) -> None:
        self._config = config
        self._coordinator = coordinator
        stages = self._stages = LoopStages(config, coordinator, learner)
        self._work: dict[str, Callable[[int], Awaitable[object]]] = {
            "collect": stages.collect,
            "reward": stages.reward,
            "step": stages.step,
            "broadcast": stages.broadcast,
            "evaluate": stages.evaluate,
        }

    async def run(self) -> None:
        """Drive the run to its end; begun again, it continues at the first step that is not committed."""
        status = await self._stages.reach("coordinator.status", self._coordinator.status)
        tasks: dict[StageKey, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            for stage in schedule(self._config, status.committed_steps, status.scored, status.evaluated):
                if stage.submitted_after is not None:
                    await tasks[stage.submitted_after]
                if stage.name in self._work:
                    before = [tasks[key] for key in stage.after]
                    tasks[stage.key] = group.create_task(self._run(stage, before))
        await self._stages.reach("coordinator.finish", self._coordinator.finish)

    async def _run(self, stage: Stage, before: list[asyncio.Task[None]]) -> None:
        for task in before:
            await task
        await self._work[stage.name](stage.number)
