"""One worker process of the length benchmark: the production worker around an engine of imposed lengths.

The engine sleeps ``alpha + beta * n`` seconds for a step of n completions, so that what is measured does
not depend on how many cores there are. A prompt has a length of the recorded distribution; its completions
scatter around that from sample to sample as recorded ones do, and from epoch to epoch as
`benchmarks.parts.lengths.pipeline` assumes. `shuffled` draws a length for each lease instead, so that what a
prompt had says nothing of what it will have.
"""

import asyncio
import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from antiphon.api.coordinator import HeartbeatReply, LeaseReply, LeaseRequest, WorkerHeartbeat
from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.benchmarks.parts.lengths.pipeline import BETWEEN_EPOCHS, WITHIN, recorded_quantile
from antiphon.benchmarks.parts.preemption.worker import NoWeights
from antiphon.core.records import FinishReason, GroupSubmission, SubmitVerdict
from antiphon.core.seeds import derive_seed
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.standins.engines import ArithmeticEngine
from antiphon.system.logs import configure_logs

MEDIAN_TOKENS = 40
MAX_TOKENS = 240
CATCH_UP_S = 0.5
"""Steps that are later than this stay late."""


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What one worker process is told."""

    address: str
    name: str
    alpha_s: float
    """Seconds of an engine step with one completion."""
    beta_s: float
    """Seconds that each completion at once adds."""
    step_scoped: bool
    """Ask for groups only when all that were given are handed in."""
    shuffled: bool


def imposed_length(request: EngineRequest, shuffled: bool) -> int:
    """Return the tokens of a completion; the same for one prompt, epoch and sample on every worker."""
    of_group = derive_seed("lengths", request.group if shuffled else request.prompt_token_ids[-1])
    scatter = math.hypot(WITHIN, BETWEEN_EPOCHS) * NormalDist().inv_cdf(_share(request.seed))
    tokens = MEDIAN_TOKENS * recorded_quantile(_share(of_group)) * math.exp(scatter)
    return max(1, min(MAX_TOKENS, round(tokens)))


def _share(number: int) -> float:
    """Return a number strictly between 0 and 1 that stands for an unsigned 64-bit one."""
    return ((number >> 12) + 0.5) / 2.0**52


class LengthEngine(ArithmeticEngine):
    """The simulator's engine in real time, with imposed lengths: every completion ends where it should."""

    def __init__(self, order: WorkerOrder) -> None:
        super().__init__()
        self._order = order
        self._due: float | None = None
        """When the last step should have ended; None where nothing was sampled."""

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Take in requests, each with the length that is imposed on it."""
        lengths = [imposed_length(request, self._order.shuffled) for request in requests]
        super().add(
            [
                dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=length))
                for r, length in zip(requests, lengths, strict=True)
            ]
        )

    def step(self) -> list[EngineOutput]:
        """Sleep, then advance every request by one token; only the last one of a completion ends it."""
        now = time.monotonic()
        # What a busy machine delayed is caught up with: each step is due so long after the one before.
        due = now if self._due is None else max(self._due, now - CATCH_UP_S)
        due += self._order.alpha_s + self._order.beta_s * self.unfinished
        time.sleep(max(0.0, due - now))
        finished = []
        for request_id, live in list(self._live.items()):
            at = len(live.request.prefix_token_ids) + len(live.tokens)
            token, logprob = arithmetic.token_at(self._weights, live.prompt, live.request.seed, at)
            last = at + 1 >= live.request.sampling.max_tokens
            live.tokens.append(arithmetic.END_TOKEN if last else max(1, token))
            live.logprobs.append(logprob)
            if last:
                del self._live[request_id]
                finished.append(EngineOutput(*live.sampled(0), FinishReason.STOP, request_id=request_id))
        self._due = due if self._live else None
        return finished


class StepScoped(CoordinatorClient):
    """A worker's client that asks for groups only when it has none of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As the class beside it in the order of inheritance."""
        super().__init__(*arguments, **options)
        self._held: set[str] = set()

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        """Ask for groups, or only for news."""
        if self._held:
            request = dataclasses.replace(request, groups=0, wait_s=0.0)
        reply = await super().lease_group(request)
        self._held.update(lease.lease_id for lease in reply.leases)
        return reply

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> HeartbeatReply:
        """Report; a lease that was given back or taken away is not held any more."""
        reply = await super().heartbeat(heartbeat)
        self._held.difference_update(heartbeat.released_leases, reply.cancelled_leases)
        return reply

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        """Hand in a group."""
        try:
            return await super().submit_group(submission)
        finally:
            self._held.discard(submission.lease_id)


async def work(order: WorkerOrder) -> None:
    """Sample until the run ends or a signal says to leave."""
    client = (StepScoped if order.step_scoped else CoordinatorClient)(order.address)
    engine = LengthEngine(order)
    worker = RolloutWorker(client, order.name, "", lambda config: engine, lambda config: NoWeights())
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
