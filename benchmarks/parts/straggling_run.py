"""Straggling run: services and workers of one run as tasks of this process, with or without trouble.

What is real and what is a stand-in says `benchmarks/stragglers.py`.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.api.coordinator import Coordinator
from antiphon.api.engine import EngineOutput
from antiphon.benchmarks.parts.kills.standins import (
    LightTrainer,
    LinkedClient,
    LinkedSource,
    PacedEngine,
    open_light_learner,
)
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.server import serve_coordinator
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.client import LearnerClient
from antiphon.services.learner.server import serve_learner
from antiphon.services.learner.service import LearnerService
from antiphon.services.learner.training import TrainedStep
from antiphon.services.reward.server import serve_reward
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.simulator.processes import Flow
from antiphon.simulator.standins.engines import (
    ArithmeticEngine,
    ArithmeticEnvironment,
    ArithmeticPrompts,
    JsonDecoder,
)
from antiphon.system.processes import StopRequest
from antiphon.weights.payload_store import PayloadStore

HOST = "127.0.0.1"
WORKERS = 8
HANGING = "hanging"
TRAIN_S = 1.0
"""One learner step; rollout of a step takes about half of it."""
ENGINE_STEP_S = 0.04
LINK_S = 0.1
"""What a snapshot takes on a usual link."""
SLOW_LINK = 20.0
JOIN_AT, HANG_AT = 0.25, 0.5
"""Shares of the steps after which trouble begins."""
WARM_UP_STEPS = 4
SERVICE_S = 60.0
"""Longest start of a service."""
RUN_FACTOR, RUN_S = 4.0, 60.0
"""A run that takes this many times the learner's own seconds, and so many seconds more, has ended."""


def make_config(steps: int, seed: int) -> RunConfig:
    """Return a run of small steps that the learner limits."""
    return build_config(
        {
            "run": {"name": "stragglers", "steps": steps, "seed": seed},
            "environment": {"train_size": 400, "heldout_size": 4},
            "evaluation": {"prompts": 4, "interval": 0},
            "loop": {"max_staleness": 2, "prompts_per_step": 8, "group_size": 4, "filter": "none"},
            "sampling": {"max_tokens": 24},
            "rollout": {"concurrent_groups": 2},
            "learner": {"checkpoint_interval": 1000},
            "coordinator": {"lease_s": 3.0, "heartbeat_s": 0.2},
            "services": {"stall_timeout_s": RUN_S},
            "drafting": {"enabled": False},
        }
    )


@dataclass
class Trouble:
    """What begins at which step; without trouble nothing does."""

    steps: int
    joins: asyncio.Event = field(default_factory=asyncio.Event)
    hangs: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    """The run is over: a thread that stands still may end."""
    hung_at: float | None = None
    """Unix second at which an engine stopped."""
    begun: list[float] = field(default_factory=list)
    """Monotonic second at which each step began to train."""

    def train(self, step: int, loop: asyncio.AbstractEventLoop) -> None:
        """A step begins to train; called in the learner's thread."""
        self.begun.append(time.monotonic())
        if step == int(JOIN_AT * self.steps):
            loop.call_soon_threadsafe(self.joins.set)
        if step == int(HANG_AT * self.steps):
            self.hangs.set()

    def seconds_per_step(self) -> float:
        """Return the mean time from one step's beginning to the next one's, without the first ones."""
        return (self.begun[-1] - self.begun[WARM_UP_STEPS]) / (len(self.begun) - 1 - WARM_UP_STEPS)


class SteadyEngine(PacedEngine):
    """Takes `ENGINE_STEP_S` for a token of every request; with `trouble`, it hangs when told to."""

    def __init__(self, trouble: Trouble | None = None) -> None:
        super().__init__()
        self._trouble = trouble

    def step(self) -> list[EngineOutput]:
        """Advance every request by one token, or stand still."""
        trouble = self._trouble
        if trouble is not None and trouble.hangs.is_set():
            trouble.hung_at = trouble.hung_at or time.time()
            trouble.released.wait()
            return []
        time.sleep(ENGINE_STEP_S)
        return ArithmeticEngine.step(self)


class SteadyTrainer(LightTrainer):
    """Takes `TRAIN_S` for a step."""

    def __init__(self, checkpoints: CheckpointStore, begins: Callable[[int], None]) -> None:
        super().__init__(checkpoints)
        self._begins = begins

    def train(self, step: int, payload: bytes) -> TrainedStep:
        """Train on the batch file of `step`."""
        self._begins(step)
        time.sleep(TRAIN_S)
        return super().train(step, payload)


class Site:
    """The services and workers of one run, as tasks of this process."""

    def __init__(self, folder: Path, config: RunConfig, trouble: Trouble) -> None:
        self._folder, self._config, self._trouble = folder, config, trouble
        self._tasks: list[asyncio.Task[None]] = []
        self._address = ""

    async def live(self, troubled: bool) -> None:
        """Run to the last step.

        Raises:
            AntiphonError: when a service, a worker or the flow gave up.
            TimeoutError: when the run takes far too long.
        """
        try:
            async with asyncio.timeout(RUN_FACTOR * TRAIN_S * self._config.run.steps + RUN_S):
                flow = await self._start()
                for number in range(WORKERS):
                    self._add_worker(f"worker-{number}")
                if troubled:
                    self._add_worker("slow-link", link_s=SLOW_LINK * LINK_S)
                    self._add_worker(HANGING, hangs=True)
                    self._spawn(self._join_later())
                await self._until_done(self._spawn(flow))
        finally:
            self._trouble.released.set()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self) -> Coroutine[Any, Any, None]:
        """Start the services and return the flow."""
        config, folder, name = self._config, self._folder, self._config.run.name
        store = folder / "store"
        store.mkdir(parents=True)
        port = await self._serve(
            lambda ready: serve_coordinator(
                config, name, folder, store, HOST, 0, ready, ArithmeticPrompts(), stop=StopRequest()
            )
        )
        self._address = f"{HOST}:{port}"
        port = await self._serve(
            lambda ready: serve_learner(
                config, name, folder, store, self._address, HOST, 0, ready, self._open_learner
            )
        )
        rewards = (ArithmeticEnvironment(config, reward_rarity=1), JsonDecoder())
        await self._serve(lambda ready: serve_reward(config, name, self._address, HOST, 0, ready, rewards))
        return self._drive(CoordinatorClient(self._address), LearnerClient(f"{HOST}:{port}"))

    async def _drive(self, coordinator: CoordinatorClient, learner: LearnerClient) -> None:
        try:
            await Flow(self._config, coordinator, learner).run()
        finally:
            await coordinator.close()
            await learner.close()

    def _open_learner(
        self,
        config: RunConfig,
        run_id: str,
        run_dir: Path,
        store: ArtifactStore,
        payloads: PayloadStore,
        coordinator: Coordinator,
    ) -> LearnerService:
        begins = partial(self._trouble.train, loop=asyncio.get_running_loop())
        make_trainer = partial(SteadyTrainer, begins=begins)
        return open_light_learner(config, run_id, run_dir, store, payloads, coordinator, make_trainer)

    def _add_worker(self, name: str, *, link_s: float | None = LINK_S, hangs: bool = False) -> None:
        client = LinkedClient(self._address, link_s)
        worker = RolloutWorker(
            client,
            name,
            self._config.run.name,
            lambda config: SteadyEngine(self._trouble if hangs else None),
            lambda config: LinkedSource(self._folder / name, config, link_s),
        )

        async def live() -> None:
            try:
                await worker.run(lambda: None)
            except AntiphonError:
                if not hangs:  # one that noticed by itself that its engine hangs may leave
                    raise
            finally:
                await client.close()

        self._spawn(live())

    async def _join_later(self) -> None:
        await self._trouble.joins.wait()
        self._add_worker("joiner", link_s=None)

    async def _serve(self, start: Callable[[Callable[[int], None]], Coroutine[Any, Any, None]]) -> int:
        """Start a service and return its port."""
        bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = self._spawn(start(bound.set_result))
        first: set[asyncio.Future[Any]] = {task, bound}
        await asyncio.wait(first, timeout=SERVICE_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        if not bound.done():
            raise UnavailableError(f"a service was not up after {SERVICE_S:g} s")
        return bound.result()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        self._tasks.append(asyncio.ensure_future(work))
        return self._tasks[-1]

    async def _until_done(self, flow: "asyncio.Task[None]") -> None:
        while not flow.done():
            running = [task for task in self._tasks if not task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
