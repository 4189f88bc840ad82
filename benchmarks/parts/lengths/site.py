"""One run of the length benchmark: production's services in this process, its workers in processes."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from antiphon.benchmarks.parts.lengths.worker import MAX_TOKENS, WorkerOrder
from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.preemption.processes import open_learner
from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop.events import BatchSealed, GroupOpened, GroupSubmitted, load_event
from antiphon.environments.scoring.pool import InProcess
from antiphon.lineage.store.artifact_store import open_store
from antiphon.net.rpc.serving import stop_server
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal, StoredEvent, journal_place
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.reward.service import RewardService
from antiphon.simulator.processes import Flow
from antiphon.simulator.standins.engines import ArithmeticEnvironment, ArithmeticPrompts, JsonDecoder

WORKERS = 2
PLACES = 4
"""Groups that a worker samples at once; a step has twice as many for each."""
PROMPTS = 48
EPOCH_STEPS = PROMPTS // (2 * WORKERS * PLACES)
"""Steps that one epoch of the prompts fills."""
LEASE_KEY = bytes(32)
"""Shuffled lengths are drawn by lease, and a pair compares orders on equal ones."""
JOIN_S = 120.0


@dataclass(frozen=True, slots=True)
class RunShape:
    """One run."""

    order: str
    max_staleness: int
    counted: int
    """Steps between the first and the last commits that count, whole epochs of them."""
    seed: int
    step_scoped: bool = True
    shuffled: bool = False
    alpha_s: float = 0.006
    beta_s: float = 0.0003
    learner_s: float = 0.35

    @property
    def skipped(self) -> int:
        """Steps at the beginning that do not count: every prompt was sampled twice, and the loop is full."""
        return 2 * EPOCH_STEPS + self.max_staleness

    @property
    def steps(self) -> int:
        """All steps; in the last ones nothing more is opened, and they do not count either."""
        return self.skipped + self.counted + EPOCH_STEPS + self.max_staleness + 1

    def config(self) -> RunConfig:
        """Return the run's configuration."""
        return build_config(
            {
                "run": {"name": "lengths", "steps": self.steps, "seed": self.seed},
                "environment": {"train_size": PROMPTS, "heldout_size": 1},
                "evaluation": {"prompts": 1, "interval": 0},
                "loop": {
                    "max_staleness": self.max_staleness,
                    "prompts_per_step": 2 * WORKERS * PLACES,
                    "group_size": 4,
                    "filter": "none",
                    "run_ahead": "bound",
                    "order": self.order,
                },
                "sampling": {"max_tokens": MAX_TOKENS},
                "rollout": {"concurrent_groups": PLACES},
                "learner": {"checkpoint_interval": 1000},
                "coordinator": {"speculation": 0.0},
                "drafting": {"enabled": False},
            }
        )


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one run came to."""

    seconds_per_step: float
    correlation: float
    """Rank correlation of remembered and sampled lengths at its end."""
    length_bias: float
    """|mean tokens of trained groups / of opened ones - 1|, over the steps that were trained."""
    order: str
    """As status says it at the end."""


async def run_once(shape: RunShape, folder: Path, limit_s: float) -> RunFigures:
    """Run to the last step.

    Raises:
        TimeoutError: when that takes longer than `limit_s` seconds.
    """
    config, clock = shape.config(), asyncio.get_running_loop().time
    store, journal = (
        open_store(folder / "store", config.record),
        Journal(journal_place(config, folder), "lengths"),
    )
    prompts = ArithmeticPrompts()
    machine = RunStateMachine(config, "lengths", journal, store, prompts, clock, lease_key=LEASE_KEY)
    await machine.start()
    service = CoordinatorService(machine)
    server, port = await start_coordinator(service, "127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    client, rewarding = CoordinatorClient(address), CoordinatorClient(address)
    environment = ArithmeticEnvironment(config, 1)
    reward = RewardService(rewarding, InProcess(environment), JsonDecoder(), "lengths", "reward", JOIN_S)
    learner = open_learner(config, folder, store, client, shape.learner_s)
    await learner.restore()
    await learner.publish(0)
    workers = [_start_worker(shape, address, number, folder) for number in range(WORKERS)]
    rewards = asyncio.ensure_future(reward.run(lambda: None))
    try:
        async with asyncio.timeout(limit_s):
            async with asyncio.timeout(JOIN_S):
                while sum(member.held_version == 0 for member in machine.fleet.living()) < WORKERS:
                    await asyncio.sleep(0.05)
            await Flow(config, client, learner).run()
        status, events = await service.status(), await machine.journal.read(0, 10**9)
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
    seconds = seconds_per_step(shape, events)
    return RunFigures(seconds, status.length_correlation, length_bias(events), status.order)


def seconds_per_step(shape: RunShape, events: Sequence[StoredEvent]) -> float:
    """Return the seconds between the commits of one epoch and of one `counted` steps later, per step.

    Times are those of an epoch's commits in the mean: single steps take 0.4 to 2.9 s in turn, for two batches
    often become complete together, and a span that begins or ends with one of them would be as wrong.
    """
    commits = [row.at for row in events if row.kind == "step.committed"][shape.skipped :]
    first, last = commits[:EPOCH_STEPS], commits[shape.counted : shape.counted + EPOCH_STEPS]
    return (fmean(last) - fmean(first)) / shape.counted


def length_bias(events: Sequence[StoredEvent]) -> float:
    """Return by how much the mean length of trained groups differs from that of those opened before them."""
    opened: list[str] = []
    tokens: dict[str, int] = {}
    trained: list[str] = []
    for row in events:
        event = load_event(row.kind, row.body)
        if isinstance(event, GroupOpened):
            opened.append(event.group_id)
        elif isinstance(event, GroupSubmitted):
            tokens[event.group_id] = sum(event.token_counts)
        elif isinstance(event, BatchSealed):
            trained += event.group_ids
    first = opened[: len(trained)]
    return abs(sum(tokens[i] for i in trained) / sum(tokens.get(i, 0) for i in first) - 1.0)


def _start_worker(shape: RunShape, address: str, number: int, folder: Path) -> "subprocess.Popen[bytes]":
    order = WorkerOrder(address, f"w{number}", shape.alpha_s, shape.beta_s, shape.step_scoped, shape.shuffled)
    with (folder / "workers.log").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", WorkerOrder.__module__, json.dumps(asdict(order))],
            cwd=PROJECT,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
