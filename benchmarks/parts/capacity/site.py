"""One run of the provisioning benchmark: production's services in this process, its workers in processes."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from antiphon.benchmarks.parts.capacity.worker import MEAN_TOKENS, PROMPTS, WorkerOrder, is_accepted
from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.preemption.processes import open_learner
from antiphon.core.capacity.model import LoopShape, least_staleness
from antiphon.core.config import RunConfig, build_config
from antiphon.core.seeds import derive_seed
from antiphon.environments.environment import Problem
from antiphon.environments.scoring.pool import InProcess
from antiphon.lineage.store.artifact_store import open_store
from antiphon.net.rpc.serving import stop_server
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal, journal_place
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.reward.service import RewardService
from antiphon.simulator.processes import Flow
from antiphon.simulator.standins.engines import ArithmeticEnvironment, ArithmeticPrompts, JsonDecoder

WORKERS = 2
PLACES = 4
"""Groups that a worker samples at once."""
GROUPS, GROUP_SIZE = 8, 2
"""Of one learner step."""
SKIPPED = 5
"""Steps at the beginning that do not count: the loop fills."""
BLOCK = 10
"""Steps whose mean counts as one value; the median of these values is taken. Lengths and acceptance repeat
after 20 prompts, of which a half or all are trained, and an interval has one or two steps: all end with 10
steps. Fewer steps are
one block. Blocks of 6, with half of the groups filtered, had 88 groups or 98, and the median was 8% off."""
JOIN_S = 120.0


@dataclass(frozen=True, slots=True)
class SupplyRun:
    """One run of the grid."""

    shape: LoopShape
    """Its `train_s` is what the learner sleeps; what a step takes beside it is measured."""
    interval: int
    supply: float
    """Completions per second of all workers."""
    steps: int
    between_s: float = 0.0
    """Seconds from the last token of a group until its place samples again, as measured."""
    headroom: int = 0
    """Versions by which the staleness bound exceeds S_min."""

    def config(self) -> RunConfig:
        """Return the run's configuration."""
        return build_config(
            {
                "run": {"name": "supply", "steps": self.steps + SKIPPED},
                "environment": {"train_size": PROMPTS, "heldout_size": 1},
                "evaluation": {"prompts": 1, "interval": 0},
                "loop": {
                    "max_staleness": least_staleness(self.shape) + self.interval - 1 + self.headroom,
                    "publish_interval": self.interval,
                    "prompts_per_step": GROUPS,
                    "group_size": GROUP_SIZE,
                    "filter": "refill",
                    "run_ahead": "bound",
                },
                "sampling": {"max_tokens": 2 * MEAN_TOKENS},
                "rollout": {"concurrent_groups": PLACES},
                "learner": {"checkpoint_interval": 1000},
                "coordinator": {"speculation": 0.0},
                "drafting": {"enabled": False},
            }
        )

    def order(self, address: str, number: int) -> WorkerOrder:
        """Return what one of the workers is told."""
        group_s = WORKERS * PLACES * GROUP_SIZE / self.supply
        if group_s <= self.between_s:
            raise SystemExit(f"{self.supply:.3g} completions/s cannot be sampled here; give a longer --train")
        step_s = (group_s - self.between_s) / MEAN_TOKENS
        return WorkerOrder(address, f"w{number}", step_s, self.shape.broadcast_s, self.shape.pauses)


class FilteringEnvironment(ArithmeticEnvironment):
    """Rewards that differ in a given share of the groups."""

    def __init__(self, config: RunConfig, acceptance: float) -> None:
        super().__init__(config, 1)
        self._acceptance = acceptance

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        """Return a reward of each completion's own where the group is to be accepted, else zeros."""
        index = int(problem.key.rpartition("-")[2])
        accepted = is_accepted(index, self._acceptance)
        return [accepted * (derive_seed("reward", text) % 10_007) / 10_007 for text in completions]


async def seconds_per_step(run: SupplyRun, folder: Path, limit_s: float) -> float:
    """Run to the last step and return the seconds from one commit to the next, the median over blocks.

    Raises:
        TimeoutError: when that takes longer than `limit_s` seconds.
    """
    config, clock = run.config(), asyncio.get_running_loop().time
    folder.mkdir()
    store, journal = (
        open_store(folder / "store", config.record),
        Journal(journal_place(config, folder), "supply"),
    )
    machine = RunStateMachine(config, "supply", journal, store, ArithmeticPrompts(), clock)
    await machine.start()
    server, port = await start_coordinator(CoordinatorService(machine), "127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    client, rewarding = CoordinatorClient(address), CoordinatorClient(address)
    environment = FilteringEnvironment(config, run.shape.acceptance)
    reward = RewardService(rewarding, InProcess(environment), JsonDecoder(), "supply", "reward", JOIN_S)
    learner = open_learner(config, folder, store, client, run.shape.train_s)
    await learner.restore()
    await learner.publish(0)
    workers = [_start(run.order(address, number), folder) for number in range(WORKERS)]
    rewards = asyncio.ensure_future(reward.run(lambda: None))
    try:
        async with asyncio.timeout(limit_s):
            while sum(member.held_version == 0 for member in machine.fleet.living()) < WORKERS:
                await asyncio.sleep(0.05)
            await Flow(config, client, learner).run()
        events = await machine.journal.read(0, 10**9)
    finally:
        for process in workers:
            process.kill()
            process.wait(10)
        rewards.cancel()
        await asyncio.wait([rewards], timeout=10)
        await learner.close()
        for closing in (client, rewarding):
            await closing.close()
        await stop_server(server)
        await machine.close()
    commits = [row.at for row in events if row.kind == "step.committed"][SKIPPED - 1 :]
    block = min(BLOCK, run.steps)
    blocks = [
        (end - begin) / block for begin, end in zip(commits[::block], commits[block::block], strict=False)
    ]
    return median(blocks)


def _start(order: WorkerOrder, folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "workers.log").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", WorkerOrder.__module__, json.dumps(asdict(order))],
            cwd=PROJECT,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
