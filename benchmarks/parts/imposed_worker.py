"""One worker process of a benchmark: the production worker around an engine of imposed pace and lengths.

The engine sleeps ``step_s + completion_s * n`` for a step of n completions and keeps to that timetable, so
that what is measured does not depend on how many cores there are. Completions end with the stand-in's own end
token, or have lengths that are imposed: `recorded` ones are those of mathematics problems, which keep their
ranks from epoch to epoch; `shuffled` draws a length for each lease instead, so that what a prompt had says
nothing of what it will have; `even` ones follow from a prompt's index, so that every `PROMPTS` prompts in a
row have the same tokens.
"""

import asyncio
import dataclasses
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.benchmarks.parts.kills.standins import WitnessClient
from antiphon.benchmarks.parts.lengths import BETWEEN_EPOCHS, WITHIN, recorded_quantile
from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.core.dissemination.reports import NetworkLog
from antiphon.core.records import FinishReason, SnapshotManifest
from antiphon.core.requests import LeaseReply, LeaseRequest
from antiphon.core.seeds import derive_seed
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.rollout.weights import WeightSource
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.standins.engines import ArithmeticEngine
from antiphon.system.logs import configure_logs

MEAN_TOKENS, MAX_TOKENS = 40, 240
"""Of even lengths, and the median of recorded ones; no completion is longer."""
PLACES = 4
"""Groups that a step-scoped worker samples at once."""
PROMPTS = 20
_OFFSETS = (-8, -4, 0, 4, 8)
CATCH_UP_S = 0.5
"""Steps that are later than this stay late."""
PAUSE_S = 600.0
"""No pause lasts longer."""


def is_accepted(index: int, acceptance: float) -> bool:
    """Return whether the rewards of a prompt's group differ; its even length says nothing of that."""
    blocks = PROMPTS // len(_OFFSETS)
    return index % PROMPTS // len(_OFFSETS) < round(acceptance * blocks)


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """How one worker process works."""

    name: str
    step_s: float
    """Real seconds of an engine step."""
    completion_s: float = 0.0
    """Seconds that each completion at once adds."""
    lengths: str = ""
    """`recorded`, `shuffled` or `even`; empty for those of the stand-in's end token."""
    step_scoped: bool = False
    """Ask for groups only when all that were given are handed in."""
    broadcast_s: float = 0.0
    """From an announced version until the worker holds it."""
    pauses: bool = False
    """Sample nothing meanwhile."""
    hangs_after: float = math.inf
    """Steps after which the engine stands still for good; the worker's heartbeats go on."""

    def start(self, address: str, folder: Path) -> "subprocess.Popen[bytes]":
        """Start the process; what is acknowledged to it is noted in the folder."""
        words = [json.dumps(asdict(self)), address, str(folder)]
        with (folder / "workers.log").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", WorkerOrder.__module__, *words],
                cwd=PROJECT,
                stdout=out,
                stderr=subprocess.STDOUT,
            )


def imposed_length(request: EngineRequest, lengths: str) -> int:
    """Return the tokens of a completion; the same for one prompt, epoch and sample on every worker."""
    index = request.prompt_token_ids[-1]
    if lengths == "even":
        return MEAN_TOKENS + _OFFSETS[index % len(_OFFSETS)]
    of_group = derive_seed("lengths", request.group if lengths == "shuffled" else index)
    scatter = math.hypot(WITHIN, BETWEEN_EPOCHS) * NormalDist().inv_cdf(_share(request.seed))
    tokens = MEAN_TOKENS * recorded_quantile(_share(of_group)) * math.exp(scatter)
    return max(1, min(MAX_TOKENS, round(tokens)))


def _share(number: int) -> float:
    """Return a number strictly between 0 and 1 that stands for an unsigned 64-bit one."""
    return ((number >> 12) + 0.5) / 2.0**52


class ImposedEngine(ArithmeticEngine):
    """The simulator's engine in real time: every completion ends where it should, as fast as it should."""

    def __init__(
        self, order: WorkerOrder, resumed: threading.Event | None = None, told: Path | None = None
    ) -> None:
        """Sample while `resumed` is set; the file `told` tells of an engine that hangs."""
        super().__init__()
        self._order, self._resumed, self._told = order, resumed, told
        self._steps = 0
        self._due: float | None = None
        """When the last step should have ended; None where nothing was sampled."""

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Serve from the next `step` on: the digest of whatever weights they are is the policy."""
        super().load_weights(version, {"weights": weights_digest}, weights_digest)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Take in requests, each with the length that is imposed on it."""
        if lengths := self._order.lengths:
            requests = [
                dataclasses.replace(
                    one, sampling=dataclasses.replace(one.sampling, max_tokens=imposed_length(one, lengths))
                )
                for one in requests
            ]
        super().add(requests)

    def step(self) -> list[EngineOutput]:
        """Wait for the timetable, then advance every request by one token."""
        self._steps += 1
        if self._steps > self._order.hangs_after:
            if self._told is not None:
                self._told.touch()
            threading.Event().wait()
        if self._resumed is not None:
            self._resumed.wait(PAUSE_S)
        now = time.monotonic()
        # What a busy machine delayed is caught up with: each step is due so long after the one before.
        due = now if self._due is None else max(self._due, now - CATCH_UP_S)
        due += self._order.step_s + self._order.completion_s * self.unfinished
        time.sleep(max(0.0, due - now))
        finished = self._imposed() if self._order.lengths else super().step()
        self._due = due if self._live else None
        return finished

    def _imposed(self) -> list[EngineOutput]:
        """Advance every request by one token; only the last one of a completion ends it."""
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
        return finished


class StepScoped(CoordinatorClient):
    """A worker's client that asks for groups only when the worker has none of its own."""

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        """Ask for groups, or only for news."""
        if request.groups < PLACES:  # it has room for fewer than all: it has some
            request = dataclasses.replace(request, groups=0, wait_s=0.0)
        return await super().lease_group(request)


class StepScopedWitness(StepScoped, WitnessClient):
    """Asks when it has none, and notes what was acknowledged."""


class ImposedWeights(WeightSource):
    """Snapshots without a byte, which take their time: the digest is all that the engine takes."""

    bytes_fetched = 0
    network = NetworkLog()

    def __init__(self, order: WorkerOrder, resumed: threading.Event) -> None:
        self._order, self._resumed = order, resumed

    async def fetch(self, manifest: SnapshotManifest, find: object = None) -> None:
        """Bring nothing, late; the engine stands still meanwhile where that is asked for."""
        if self._order.pauses:
            self._resumed.clear()
        try:
            await asyncio.sleep(self._order.broadcast_s)
        finally:
            self._resumed.set()

    def open(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        """Forget nothing."""


async def work(order: WorkerOrder, address: str, folder: Path) -> None:
    """Sample until the run ends."""
    resumed = threading.Event()
    resumed.set()
    make = StepScopedWitness if order.step_scoped else WitnessClient
    client = make(address, folder / f"{order.name}.acknowledged")
    worker = RolloutWorker(
        client,
        order.name,
        "",
        lambda config: ImposedEngine(order, resumed),
        lambda config: ImposedWeights(order, resumed),
    )
    try:
        await worker.run(lambda: None)
    finally:
        await client.close()


if __name__ == "__main__":
    configure_logs("warning")
    asyncio.run(work(WorkerOrder(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3])))
