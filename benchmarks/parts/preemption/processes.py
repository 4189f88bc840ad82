"""Preemption for real: a fleet of worker processes over gRPC that are killed and replaced as a schedule says.

Time is scaled: `scale` seconds of the schedule pass in one real second. Coordinator, reward
service, learner service and the flow, which walks production's stages, share this process. Afterwards the
journal and every batch are audited.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from antiphon.api.coordinator import Coordinator
from antiphon.benchmarks.parts.kills.audit import audit
from antiphon.benchmarks.parts.kills.standins import LightTrainer
from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.preemption.fleet import FleetRun, Site, shares, steps_per_hour
from antiphon.benchmarks.parts.preemption.schedule import Stay
from antiphon.benchmarks.parts.preemption.worker import WorkerOrder
from antiphon.core.config import RunConfig
from antiphon.environments.scoring.pool import InProcess
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store
from antiphon.net.rpc.serving import stop_server
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal, journal_place
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.service import LearnerService
from antiphon.services.learner.training import TrainedStep
from antiphon.services.reward.service import RewardService
from antiphon.simulator.processes import Flow
from antiphon.simulator.standins.engines import ArithmeticEnvironment, ArithmeticPrompts, JsonDecoder
from antiphon.simulator.standins.training import ArithmeticPublisher
from antiphon.weights.payload_store import PAYLOADS, PayloadStore

JOIN_S = 60.0
"""Real seconds that the first workers may take to be there."""
LEAD_S = 4.0
"""Real seconds that a replacement is started early, for its imports; it joins when it is due."""


class Fleet:
    """Starts and kills worker processes as a schedule says."""

    def __init__(self, site: Site, stays: Sequence[Stay], scale: float, address: str, folder: Path) -> None:
        self._stays, self._scale, self._address, self._folder = stays, scale, address, folder
        self._engine_step_s = site.engine_step_s / scale
        self._running: dict[Stay, subprocess.Popen[bytes]] = {}

    def start_first(self) -> int:
        """Start those that are there from the beginning and return how many they are."""
        first = [stay for stay in self._stays if stay.start_s <= 0.0]
        for stay in first:
            self._spawn(stay, 0.0)
        return len(first)

    async def follow(self, begun: float, span_s: float) -> None:
        """Keep to the schedule until the span is over; `begun` is its beginning on the loop's clock."""
        clock, scale = asyncio.get_running_loop().time, self._scale
        comings = [(stay.start_s, 0, stay) for stay in self._stays if 0.0 < stay.start_s < span_s]
        goings = [(stay.stop_s, 1, stay) for stay in self._stays if stay.stop_s < span_s]
        plan = [(max(0.0, at - LEAD_S * scale), 0, stay) for at, _, stay in comings] + goings
        for at, leaves, stay in sorted(plan, key=lambda entry: entry[:2]):
            await asyncio.sleep(max(0.0, begun + at / scale - clock()))
            if leaves:
                process = self._running.pop(stay)
                process.kill()
                await asyncio.to_thread(process.wait, 10)
            else:
                self._spawn(stay, begun + stay.start_s / scale)
        await asyncio.sleep(max(0.0, begun + span_s / scale - clock()))

    def _spawn(self, stay: Stay, start_at: float) -> None:
        name = f"w{stay.slot}-{int(stay.start_s)}"
        order = WorkerOrder(self._address, name, str(self._folder), self._engine_step_s, start_at)
        with (self._folder / "workers.log").open("ab") as out:
            self._running[stay] = subprocess.Popen(
                [sys.executable, "-P", "-m", WorkerOrder.__module__, json.dumps(asdict(order))],
                cwd=PROJECT,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def close(self) -> None:
        """Kill those that are left."""
        for process in self._running.values():
            process.kill()
            process.wait(10)


class TimedTrainer(LightTrainer):
    """Takes as long for a step as the fleet's learner does."""

    def __init__(self, checkpoints: CheckpointStore, step_s: float) -> None:
        super().__init__(checkpoints)
        self._step_s = step_s

    def train(self, step: int, payload: bytes) -> TrainedStep:
        """Sleep, then train on the batch file of `step`."""
        time.sleep(self._step_s)
        return super().train(step, payload)


def open_learner(
    config: RunConfig, folder: Path, store: ArtifactStore, coordinator: Coordinator, step_s: float
) -> LearnerService:
    """Return production's learner service around a trainer that takes `step_s` for a step."""
    trainer = TimedTrainer(CheckpointStore(folder / "checkpoints", config.learner.checkpoints_kept), step_s)
    payloads, kept = PayloadStore(folder / PAYLOADS), config.broadcast.snapshots_kept
    publisher = ArithmeticPublisher(config.run.name, payloads, kept)
    learner = LearnerService(config, trainer, publisher, store, coordinator)
    learner.origin = "127.0.0.1:1"  # the workers' engines take the digest of a snapshot, so none is fetched
    return learner


async def run_fleet(
    site: Site, stays: Sequence[Stay], span_s: float, seed: int, scale: float, folder: Path
) -> FleetRun:
    """Serve one run for `span_s` scaled seconds, then audit what it left in `folder`."""
    config, clock = site.scenario(seed, span_s, scale).run_config(), asyncio.get_running_loop().time
    folder.mkdir()
    run_id, store = config.run.name, open_store(folder / "store", config.record)
    journal = Journal(journal_place(config, folder), run_id)
    state_machine = RunStateMachine(config, run_id, journal, store, ArithmeticPrompts(), clock)
    await state_machine.start()
    server, port = await start_coordinator(CoordinatorService(state_machine), "127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    client, rewarding = CoordinatorClient(address), CoordinatorClient(address)
    environment = ArithmeticEnvironment(config, 1)
    reward = RewardService(rewarding, InProcess(environment), JsonDecoder(), run_id, "reward", JOIN_S)
    fleet = Fleet(site, stays, scale, address, folder)
    learner = open_learner(config, folder, store, client, site.train_s / scale)
    await learner.restore()
    await learner.publish(0)
    tasks = [asyncio.ensure_future(reward.run(lambda: None))]
    try:
        expected = fleet.start_first()
        async with asyncio.timeout(JOIN_S):
            while sum(member.held_version == 0 for member in state_machine.fleet.living()) < expected:
                await asyncio.sleep(0.05)
        begun, begun_at = clock(), time.time()
        tasks.append(asyncio.ensure_future(Flow(config, client, learner).run()))
        following = asyncio.ensure_future(fleet.follow(begun, span_s))
        await asyncio.wait([following, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # says what went wrong
        await following
        wasted, preempted = shares(state_machine.state.work_accounts.account(clock()))
        events = await state_machine.journal.read(0, 10**9)
    finally:
        fleet.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=10)
        await learner.close()
        for closing in (client, rewarding):
            await closing.close()
        await stop_server(server)
        await state_machine.close()
    found = await audit(folder, config)
    commits = [row.at for row in events if row.kind == "step.committed"]
    wrong = {"lost": found.lost, "twice": found.twice, "beyond": found.beyond_bound, "wrong": found.wrong}
    return FleetRun(
        steps_per_hour=steps_per_hour([(at - begun_at) * scale for at in commits], site.train_s, span_s),
        wasted_share=wasted,
        preempted_share=preempted,
        continued=sum(row.kind == "lease.granted" and '"continued":0' not in row.body for row in events),
        violations=tuple(f"{name}: {count}" for name, count in wrong.items() if count),
    )
