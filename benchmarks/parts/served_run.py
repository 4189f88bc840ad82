"""Served run: production's services of one run in this process, for workers in processes of their own.

The trainer takes the seconds that are imposed on it, and the flow walks production's stages.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from antiphon.benchmarks.parts.imposed_worker import WorkerOrder
from antiphon.benchmarks.parts.kills.standins import open_light_learner
from antiphon.core.config import RunConfig
from antiphon.core.coordinator.loop_state import PromptSource
from antiphon.environments.scoring.pool import InProcess
from antiphon.lineage.store.artifact_store import open_store
from antiphon.net.rpc.serving import stop_server
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal, StoredEvent, journal_place
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.reward.service import RewardService
from antiphon.services.reward.turns import Answer
from antiphon.simulator.processes import Flow
from antiphon.simulator.standins.engines import ArithmeticEnvironment, ArithmeticPrompts, JsonDecoder
from antiphon.weights.payload_store import PAYLOADS, PayloadStore

JOIN_S = 120.0
"""Real seconds that the first workers may take to be there."""


@dataclass(slots=True)
class ServedRun:
    """A run whose services are up; made by `served_run`."""

    folder: Path
    address: str
    machine: RunStateMachine
    flow: Flow
    workers: list["Popen[bytes]"] = field(default_factory=list)

    async def start(self, orders: Sequence[WorkerOrder]) -> None:
        """Start workers, which are killed at the end, and wait until all of them hold version 0.

        Raises:
            TimeoutError: when that takes too long.
        """
        self.workers += [order.start(self.address, self.folder) for order in orders]
        async with asyncio.timeout(JOIN_S):
            while sum(member.held_version == 0 for member in self.machine.loop.fleet.living()) < len(orders):
                await asyncio.sleep(0.05)

    async def events(self) -> list[StoredEvent]:
        """Return the journal so far."""
        return await self.machine.journal.read(0, 10**9)


@asynccontextmanager
async def served_run(
    config: RunConfig,
    folder: Path,
    train_s: float,
    environment: ArithmeticEnvironment | None = None,
    lease_key: bytes = b"",
    prompts: PromptSource | None = None,
    answer: Answer | None = None,
) -> AsyncIterator[ServedRun]:
    """Serve a run until the end of the block; version 0 is published.

    Args:
        config: of the run.
        folder: gets everything that it leaves.
        train_s: seconds of a learner step.
        environment: by default the stand-in whose every group has rewards that differ.
        lease_key: what ids of leases are made with; drawn where not given.
        prompts: by default those of the stand-in.
        answer: answers turns, where the task has any.
    """
    folder.mkdir(exist_ok=True)
    name, clock = config.run.name, asyncio.get_running_loop().time
    store = open_store(folder / "store", config.record)
    journal = Journal(journal_place(config, folder), name)
    prompts = prompts or ArithmeticPrompts()
    machine = RunStateMachine(config, name, journal, store, prompts, clock, lease_key=lease_key)
    await machine.start()
    server, port = await start_coordinator(CoordinatorService(machine), "127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    client, scoring = CoordinatorClient(address), CoordinatorClient(address)
    scorer = InProcess(environment or ArithmeticEnvironment(config, 1))
    reward = RewardService(scoring, scorer, JsonDecoder(), name, "reward", JOIN_S, answer=answer)
    payloads = PayloadStore(folder / PAYLOADS)
    learner = open_light_learner(config, name, folder, store, payloads, client, train_s)
    learner.origin = "127.0.0.1:1"  # the workers' engines take the digest of a snapshot, so none is fetched
    await learner.restore()
    await learner.publish(0)
    rewarding = asyncio.ensure_future(reward.run(lambda: None))
    run = ServedRun(folder, address, machine, Flow(config, client, learner))
    try:
        yield run
    finally:
        for process in run.workers:
            process.kill()
            process.wait(10)
        rewarding.cancel()
        await asyncio.wait([rewarding], timeout=10)
        await learner.close()
        await client.close()
        await scoring.close()
        await stop_server(server)
        await machine.close()
