"""One worker process of the provisioning benchmark: the production worker around an engine of imposed rate.

Lengths and the groups that are filtered follow from a prompt's index, so that each `PROMPTS` prompts in a
row have the same tokens and the same acceptance. The engine keeps to a timetable: what a step's arithmetic
takes is taken off its sleep. A version is on its way for as long as is imposed; a worker that pauses samples
nothing meanwhile.
"""

import asyncio
import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.benchmarks.parts.lengths.worker import LengthEngine
from antiphon.benchmarks.parts.lengths.worker import WorkerOrder as Lengths
from antiphon.benchmarks.parts.preemption.worker import NoWeights
from antiphon.core.records import SnapshotManifest
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.simulator.standins.engines import ArithmeticEngine
from antiphon.system.logs import configure_logs

PROMPTS = 20
MEAN_TOKENS = 40
_OFFSETS = (-8, -4, 0, 4, 8)
PAUSE_S = 600.0
"""No pause lasts longer."""


def tokens_of(index: int) -> int:
    """Return the tokens of each completion of a prompt; `MEAN_TOKENS` on average over `PROMPTS` prompts."""
    return MEAN_TOKENS + _OFFSETS[index % len(_OFFSETS)]


def is_accepted(index: int, acceptance: float) -> bool:
    """Return whether the rewards of a prompt's group differ; its length says nothing of that."""
    blocks = PROMPTS // len(_OFFSETS)
    return index % PROMPTS // len(_OFFSETS) < round(acceptance * blocks)


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What one worker process is told."""

    address: str
    name: str
    engine_step_s: float
    """Seconds in which each completion gets a token."""
    broadcast_s: float
    """From an announced version until the worker holds it."""
    pauses: bool


class ImposedEngine(LengthEngine):
    """Gives every completion a token each `engine_step_s` seconds, but for pauses."""

    def __init__(self, order: WorkerOrder, resumed: threading.Event) -> None:
        super().__init__(Lengths("", "", 0.0, 0.0, step_scoped=False, shuffled=False))
        self._step_s, self._resumed, self._next_s = order.engine_step_s, resumed, 0.0

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Take in requests, each with the length of its prompt."""
        ArithmeticEngine.add(
            self,
            [
                dataclasses.replace(
                    r, sampling=dataclasses.replace(r.sampling, max_tokens=tokens_of(r.prompt_token_ids[-1]))
                )
                for r in requests
            ],
        )

    def step(self) -> list[EngineOutput]:
        """Wait for the timetable, then advance every request by one token."""
        self._resumed.wait(PAUSE_S)
        now = time.monotonic()
        self._next_s = max(self._next_s, now - self._step_s) + self._step_s
        time.sleep(max(0.0, self._next_s - now))
        return super().step()


class SlowWeights(NoWeights):
    """Snapshots that take their time, and stop the engine meanwhile where that is asked for."""

    def __init__(self, order: WorkerOrder, resumed: threading.Event) -> None:
        self._order, self._resumed = order, resumed

    async def fetch(self, manifest: SnapshotManifest, find: object = None) -> None:
        """Bring nothing, late."""
        if self._order.pauses:
            self._resumed.clear()
        try:
            await asyncio.sleep(self._order.broadcast_s)
        finally:
            self._resumed.set()


async def work(order: WorkerOrder) -> None:
    """Sample until the run ends or a signal says to leave."""
    client, resumed = CoordinatorClient(order.address), threading.Event()
    resumed.set()
    worker = RolloutWorker(
        client,
        order.name,
        "",
        lambda config: ImposedEngine(order, resumed),
        lambda config: SlowWeights(order, resumed),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    try:
        await worker.run(lambda: None)
    finally:
        await client.close()


def main() -> None:
    """Read the order and obey it."""
    configure_logs("warning")
    asyncio.run(work(WorkerOrder(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
