"""One worker process of the preemption benchmark: the production worker around a paced engine."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.api.engine import EngineOutput
from antiphon.benchmarks.parts.kills.standins import WitnessClient
from antiphon.core.dissemination.network_log import NetworkLog
from antiphon.core.records import SnapshotManifest
from antiphon.services.rollout.weights import WeightSource
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.simulator.standins.engines import ArithmeticEngine
from antiphon.system.logs import configure_logs


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What one worker process is told."""

    address: str
    name: str
    folder: str
    """Gets the file of what was acknowledged to the worker."""
    engine_step_s: float
    """Real seconds of an engine step."""
    start_at: float
    """On the machine's monotonic clock: when it may register."""


class PacedEngine(ArithmeticEngine):
    """The simulator's engine in real time: its owner's thread sleeps in `step`."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s

    def step(self) -> list[EngineOutput]:
        """Sleep, then advance every request by one token."""
        time.sleep(self._step_s)
        return super().step()


class NoWeights(WeightSource):
    """Snapshots without a byte: the digest is all that the engine takes."""

    bytes_fetched = 0
    network = NetworkLog()

    async def fetch(self, manifest: SnapshotManifest, find: object = None) -> None:
        """Bring nothing."""

    def open(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        """Return the digest as the weights."""
        return {"weights": manifest.weights_digest}

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        """Forget nothing."""


async def work(order: WorkerOrder) -> None:
    """Wait for the time to join, then sample until the run ends or a signal says to leave."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, order.start_at - loop.time()))
    coordinator = WitnessClient(order.address, Path(order.folder) / f"{order.name}.acknowledged")
    worker = RolloutWorker(
        coordinator,
        order.name,
        "",
        lambda config: PacedEngine(order.engine_step_s),
        lambda config: NoWeights(),
    )
    loop.add_signal_handler(signal.SIGTERM, worker.stop)
    try:
        await worker.run(lambda: None)
    finally:
        await coordinator.close()


def main() -> None:
    """Read the order and obey it."""
    configure_logs("warning")
    asyncio.run(work(WorkerOrder(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
