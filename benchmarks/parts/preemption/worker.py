"""One worker process of the preemption benchmark: the production worker around a paced engine."""

import asyncio
import json
import signal
import sys

from antiphon.benchmarks.parts.preemption.fleet import NoWeights, PacedEngine, WorkerOrder
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.system.logs import configure_logs


async def work(order: WorkerOrder) -> None:
    """Wait for the time to join, then sample until the run ends or a signal says to leave."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, order.start_at - loop.time()))
    coordinator = CoordinatorClient(order.address)
    worker = RolloutWorker(
        coordinator,
        order.name,
        "",
        lambda config: PacedEngine(order.group_s, order.token_s),
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
