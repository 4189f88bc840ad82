"""Stages: what each stage of the loop asks of the services; the flow and the simulator run the same.

Every call has a deadline and is repeated while its peer is away; a stage that makes no progress for
services.stall_timeout_s ends with the name of what it waits for. The clock is the event loop's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import BatchRef, SnapshotManifest
from antiphon.core.status import EvaluationRecord
from antiphon.services.coordinator.api import Coordinator, StageReply
from antiphon.services.learner.api import Learner, StepResult
from antiphon.services.rpc.retry import retry_unavailable

POLL_S = 5.0
"""Longest single long poll."""
HALTED_WAIT_S = 5.0
"""How long a stage that finds the run halted waits for the stage that caused it to give the reason."""

_T = TypeVar("_T")


class LoopStages:
    """The stages of one run.

    Each raises UnavailableError when a service stays away or nothing moves for the stall timeout,
    and IntegrityError when the run is paused; it continues when it is started again.
    """

    def __init__(self, config: RunConfig, coordinator: Coordinator, learner: Learner) -> None:
        self._config = config
        self._coordinator = coordinator
        self._learner = learner
        self._stall_timeout_s = config.services.stall_timeout_s

    async def collect(self, step: int) -> None:
        """Open `step` and wait until every group of it was handed in."""
        await self.reach("coordinator.open_step", lambda: self._coordinator.open_step(step))
        await self._end("collect", step, self._stall_timeout_s)

    async def reward(self, step: int) -> BatchRef:
        """Wait until the groups of an opened step are rewarded and its batch is sealed."""
        reply = await self._end("reward", step, self._stall_timeout_s)
        assert reply.batch is not None
        return reply.batch

    async def step(self, step: int) -> StepResult:
        """Train on the sealed batch of `step`; version step + 1 is committed when this returns."""
        return await self.reach("learner.step", lambda: self._learner.step(step))

    async def broadcast(self, version: int) -> SnapshotManifest:
        """Publish `version` and wait until every active worker holds it or a newer one.

        In fixed mode a worker swaps only when the next step's groups need it, so there the stage
        ends when the snapshot is announced and the lease rule does the rest.
        """
        manifest = await self.reach("learner.publish", lambda: self._learner.publish(version))
        if self._config.loop.mode == "elastic":
            await self._end("broadcast", version, self._config.broadcast.transfer_timeout_s)
        return manifest

    async def evaluate(self, version: int) -> EvaluationRecord:
        """Queue the held-out prompts for `version` and wait for the score."""
        await self.reach("coordinator.open_evaluation", lambda: self._coordinator.open_evaluation(version))
        reply = await self._end("evaluate", version, self._stall_timeout_s)
        assert reply.evaluation is not None
        return reply.evaluation

    async def reach(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Make a call, repeated while its peer is away for up to the stall timeout."""
        return await retry_unavailable(what, attempt, self._stall_timeout_s)

    async def _end(self, stage: str, number: int, limit_s: float) -> StageReply:
        clock = asyncio.get_running_loop().time
        best, since = -1.0, clock()
        while True:
            reply = await self.reach(
                "coordinator.await_stage", lambda: self._coordinator.await_stage(stage, number, POLL_S)
            )
            if reply.done:
                return reply
            if reply.halted:
                await asyncio.sleep(HALTED_WAIT_S)
                raise IntegrityError(reply.halted)
            if reply.progress > best:
                best, since = reply.progress, clock()
            elif clock() - since > limit_s:
                raise UnavailableError(
                    f"{stage} {number} made no progress for {limit_s:g} s; it waits for {reply.waiting_for}"
                )
