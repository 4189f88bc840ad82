"""Stages: what each stage of the loop asks of the services; the flow and the simulator run the same.

Every call has a deadline and is repeated while its peer is away. A stage whose counter stands still for
services.stall_timeout_s ends with the name of what it waits for; while no worker is active it waits for
services.empty_fleet_timeout_s. While the coordinator is blocked, since its disk is full or its database is
away, nothing can move, so this has a patience of its own, services.outage_timeout_s. The clock is the event
loop's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.api.learner import Learner, StepResult
from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.loop.schedule import is_evaluated
from antiphon.core.patience import Patience
from antiphon.core.records import BatchRef, SnapshotManifest
from antiphon.core.requests import StageReply
from antiphon.core.status import EvaluationRecord, LearnerProgress
from antiphon.net.rpc.retry import retry_unavailable

POLL_S = 5.0
"""Longest single long poll."""
HALTED_WAIT_S = 5.0
"""How long a stage that finds the run halted waits for the stage that caused it to give the reason."""

_log = structlog.get_logger(__name__)
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
        await self._end("collect", step)

    async def reward(self, step: int) -> BatchRef:
        """Wait until the groups of an opened step are rewarded and its batch is sealed."""
        reply = await self._end("reward", step)
        assert reply.batch is not None
        return reply.batch

    async def step(self, step: int) -> StepResult:
        """Train on the sealed batch of `step`; version step + 1 is committed when this returns.

        Its evaluation is opened before it exists: a worker must know of it before it goes on to the next one.
        """
        await self._open_evaluation(step + 1)

        async def ask() -> tuple[LearnerProgress, StepResult | None]:
            reply = await self._learner.await_step(step, POLL_S)
            return reply.progress, reply.result

        return await self.done_by_learner(f"step {step}", "learner.await_step", ask)

    async def broadcast(self, version: int) -> SnapshotManifest:
        """Publish `version` and, in elastic mode, wait until enough of the fleet holds it.

        Enough is one worker, or the share that broadcast.quorum asks for; joiners and stragglers are not
        waited for. In fixed mode a worker swaps only when the next step's groups need it, so there the
        stage ends when the snapshot is announced and the lease rule does the rest.
        """
        await self._open_evaluation(version)

        async def ask() -> tuple[LearnerProgress, SnapshotManifest | None]:
            reply = await self._learner.await_snapshot(version, POLL_S)
            return reply.progress, reply.manifest

        manifest = await self.done_by_learner(f"broadcast {version}", "learner.await_snapshot", ask)
        if self._config.loop.mode == "elastic":
            await self._end("broadcast", version)
        return manifest

    async def evaluate(self, version: int) -> EvaluationRecord:
        """Queue the held-out prompts for `version` and wait for the score."""
        await self._open_evaluation(version)
        reply = await self._end("evaluate", version)
        assert reply.evaluation is not None
        return reply.evaluation

    async def _open_evaluation(self, version: int) -> None:
        if is_evaluated(version, self._config):
            opening = partial(self._coordinator.open_evaluation, version)
            await self.reach("coordinator.open_evaluation", opening)

    async def reach(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Make a call, repeated while its peer is away for up to the stall timeout.

        Raises:
            BlockedError: when the coordinator could record nothing for services.outage_timeout_s.
        """
        outage_s = self._config.services.outage_timeout_s
        return await retry_unavailable(what, attempt, self._stall_timeout_s, outage_s=outage_s)

    async def done_by_learner(
        self, stage: str, call: str, ask: Callable[[], Awaitable[tuple[LearnerProgress, _T | None]]]
    ) -> _T:
        """Poll the learner until it has done something; its counter says whether it moves."""
        clock, limit_s = asyncio.get_running_loop().time, self._stall_timeout_s
        patience = Patience(clock())
        while True:
            progress, done = await self.reach(call, ask)
            if done is not None:
                return done
            still_s = patience.still_s(progress.counter, clock())
            if still_s > limit_s:
                raise UnavailableError(
                    f"{stage}: no {progress.counted} for {still_s:.3g} s; the learner is {progress.doing}"
                )

    async def _end(self, stage: str, number: int) -> StageReply:
        clock, services = asyncio.get_running_loop().time, self._config.services
        patience = Patience(clock())
        while True:
            asked = clock()
            reply = await self.reach(
                "coordinator.await_stage", lambda: self._coordinator.await_stage(stage, number, POLL_S)
            )
            # Nothing could move while the coordinator was away or blocked; that had a patience of its own.
            patience.excuse(max(0.0, clock() - asked - POLL_S))
            if reply.done:
                return reply
            if reply.halted:
                await asyncio.sleep(HALTED_WAIT_S)
                raise IntegrityError(reply.halted)
            still_s = patience.still_s(reply.counter, clock(), absent=reply.no_workers)
            if still_s <= (services.empty_fleet_timeout_s if reply.no_workers else services.stall_timeout_s):
                continue
            if stage == "broadcast" and reply.progress > 0:
                # Some hold it: those that do not move must not end the run of those that do.
                _log.warning("broadcast.short", version=number, waiting_for=reply.waiting_for)
                return reply
            raise UnavailableError(reply.stalled(stage, number, still_s))
