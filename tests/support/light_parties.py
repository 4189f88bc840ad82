"""Light workers, judges and learners that talk to a coordinator over the contract alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from antiphon.api.coordinator import Coordinator
from antiphon.core.checks import TokenRules
from antiphon.core.config import RunConfig
from antiphon.core.coordinator.loop_state import Decision, PromptSource
from antiphon.core.errors import UnavailableError
from antiphon.core.loop import events as e
from antiphon.core.records import (
    PROTOCOL_VERSION,
    BatchRef,
    GroupRewards,
    GroupSubmission,
    Lease,
    Prompt,
    PromptHistory,
    SampleReward,
    StepCommit,
    SubmitVerdict,
)
from antiphon.core.requests import LeaseRequest, WorkerHello
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store
from antiphon.net.rpc.serving import stop_server
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import SNAPSHOT_EVERY, Journal
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import JOURNAL_NAME, start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from tests.support.loop_model import RUN_ID, light_manifest, light_reward, light_trajectory

Score = Callable[[int, np.ndarray], SampleReward]
"""Sample and its tokens -> what a judge says."""


class LightPrompts:
    """Prompts without an environment."""

    def __init__(self, rules: TokenRules | None = None) -> None:
        self.rules = rules

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(f"{split}-0-{index}", (1, 2 + index % 5))


def hello(name: str = "w", protocol: int = PROTOCOL_VERSION, run_id: str = RUN_ID) -> WorkerHello:
    return WorkerHello(worker_name=name, protocol_version=protocol, run_id=run_id, concurrent_groups=4)


def sample_lease(lease: Lease, worker_id: str, version: int) -> GroupSubmission:
    return GroupSubmission(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        worker_id=worker_id,
        trajectories=tuple(
            light_trajectory(seed, version, index, lease.prompt_key) for index, seed in enumerate(lease.seeds)
        ),
        generation_s=0.01,
    )


@dataclass
class Served:
    """A coordinator that is being served in this process."""

    address: str
    service: CoordinatorService
    store: ArtifactStore
    clients: list[CoordinatorClient] = field(default_factory=list)

    def client(self) -> CoordinatorClient:
        client = CoordinatorClient(self.address, timeout_s=10.0)
        self.clients.append(client)
        return client


@asynccontextmanager
async def served(
    config: RunConfig,
    folder: Path,
    run_id: str = RUN_ID,
    place: Path | str | None = None,
    port: int = 0,
    snapshot_every: int = SNAPSHOT_EVERY,
    prompts: PromptSource | None = None,
) -> AsyncIterator[Served]:
    """Serve a coordinator on loopback."""
    store = open_store(folder / "store", config.record)
    journal = Journal(place or folder / JOURNAL_NAME, run_id)
    state_machine = RunStateMachine(
        config,
        run_id,
        journal,
        store,
        prompts or LightPrompts(),
        asyncio.get_running_loop().time,
        snapshot_every,
    )
    await state_machine.start()
    service = CoordinatorService(state_machine)
    server, bound = await start_coordinator(service, "127.0.0.1", port)
    site = Served(f"127.0.0.1:{bound}", service, store)
    try:
        yield site
    finally:
        for client in site.clients:
            await client.close()
        await stop_server(server, grace_s=0.1)
        await state_machine.close()


class LightWorker:
    """Samples at once; loads what it is told to; may be slow and may lose leases."""

    def __init__(self, coordinator: Coordinator, name: str, rng: np.random.Generator) -> None:
        self.coordinator = coordinator
        self.name = name
        self.rng = rng
        self.elastic = True
        self.delay_s = 0.0
        self.lose_share = 0.0
        self.wants_history = True
        self.histories: dict[str, PromptHistory | None] = {}
        """What came with the lease of each group."""
        self.held: int | None = None
        self.acknowledged: dict[str, GroupSubmission] = {}
        self.verdicts: list[SubmitVerdict] = []

    async def run(self) -> None:
        while True:
            try:
                await self._serve()
                return
            except UnavailableError:
                await asyncio.sleep(0.05)

    async def _serve(self) -> None:
        welcome = await self.coordinator.register(hello(self.name))
        worker_id = welcome.worker_id
        while True:
            groups = int(self.rng.integers(1, 4))
            request = LeaseRequest(worker_id, self.held, groups, 2.0, self.wants_history)
            reply = await self.coordinator.lease_group(request)
            self.histories |= {lease.group_id: lease.history for lease in reply.leases}
            if reply.run_finished:
                return
            if "register again" in reply.reason:
                raise UnavailableError(reply.reason)
            for lease in self.rng.permutation(len(reply.leases)):
                await self._work(reply.leases[int(lease)], worker_id)
            wanted = reply.newest_version if self.elastic else reply.wanted_version
            if wanted is not None and wanted != self.held:
                assert await self.coordinator.latest_manifest(wanted) is not None
                self.held = wanted

    async def _work(self, lease: Lease, worker_id: str) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s * float(self.rng.random()))
        if self.rng.random() < self.lose_share:
            return
        version = lease.version if lease.version is not None else self.held
        assert version is not None
        submission = sample_lease(lease, worker_id, version)
        verdict = await self.coordinator.submit_group(submission)
        self.verdicts.append(verdict)
        if verdict in (SubmitVerdict.ACCEPTED, SubmitVerdict.ALREADY_ACCEPTED):
            self.acknowledged[lease.group_id] = submission


def light_score(index: int, token_ids: np.ndarray) -> SampleReward:
    """Reward a sample as `light_reward`."""
    return SampleReward(index, light_reward(token_ids))


async def reward_all(
    coordinator: Coordinator, rng: np.random.Generator, delay_s: float = 0.0, score: Score = light_score
) -> None:
    """Judge until cancelled."""
    while True:
        try:
            reply = await coordinator.pull_for_reward("judge", int(rng.integers(1, 6)), 2.0)
            for group in reply.groups:
                if delay_s:
                    await asyncio.sleep(delay_s * float(rng.random()))
                rewards = (score(i, one.token_ids) for i, one in enumerate(group.trajectories))
                await coordinator.submit_rewards([GroupRewards(group.group_id, tuple(rewards))])
        except UnavailableError:
            await asyncio.sleep(0.05)


async def insist(call, *arguments):  # type: ignore[no-untyped-def]
    """Repeat a call while the coordinator is away."""
    while True:
        try:
            return await call(*arguments)
        except UnavailableError:
            await asyncio.sleep(0.05)


async def train_all(
    coordinator: Coordinator, config: RunConfig, store: ArtifactStore | None = None
) -> list[BatchRef]:
    """Be the flow and the learner: open, train, commit and publish every step."""
    loop, refs = config.loop, []
    await insist(coordinator.announce_snapshot, light_manifest(0))
    for step in range(config.run.steps):
        ahead = min(config.run.steps - 1, step + loop.max_staleness)
        await insist(coordinator.open_step, ahead)
        while True:
            reply = await insist(coordinator.await_stage, "reward", step, 5.0)
            if reply.batch is not None:
                break
        refs.append(reply.batch)
        if store is not None:
            assert len(decode_batch(store.get(reply.batch.digest))) == reply.batch.trajectories
        version = step + 1
        commit = StepCommit(step, version, light_manifest(version).weights_digest, reply.batch.digest)
        await insist(coordinator.commit_step, commit)
        if version % loop.publish_interval == 0:
            await insist(coordinator.announce_snapshot, light_manifest(version))
    for found in (
        await insist(coordinator.status)
    ).evaluations:  # as the flow does: a run ends with its scores
        while not found.complete:
            found = (
                await insist(coordinator.await_stage, "evaluate", found.version, 5.0)
            ).evaluation or found
    await insist(coordinator.finish)
    return refs


def _running(tasks: list[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if not task.done()]


async def run_parties(
    client: Coordinator,
    config: RunConfig,
    seed: int,
    *,
    workers: int = 2,
    delay_s: float = 0.0,
    lose_share: float = 0.0,
    store: ArtifactStore | None = None,
    limit_s: float = 60.0,
    score: Score = light_score,
) -> tuple[list[BatchRef], list[LightWorker]]:
    """Run a whole run against a coordinator."""
    rng = np.random.default_rng(seed)
    crew = []
    for index in range(workers):
        worker = LightWorker(client, f"w{index}", np.random.default_rng(rng.integers(2**32)))
        worker.delay_s, worker.lose_share = delay_s, lose_share
        worker.elastic = config.loop.mode == "elastic"
        crew.append(worker)
    tasks = [asyncio.ensure_future(worker.run()) for worker in crew]
    tasks += [asyncio.ensure_future(reward_all(client, rng, delay_s, score)) for _ in range(2)]
    training = asyncio.ensure_future(train_all(client, config, store))
    try:
        async with asyncio.timeout(limit_s):
            while not training.done():
                await asyncio.wait([training, *_running(tasks)], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            refs = training.result()
    finally:
        for task in (training, *tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    return refs, crew


def decided(*events: e.JournalEvent) -> Decision[None]:
    """Return the decision that these events happened."""
    yield from events
