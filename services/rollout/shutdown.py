"""Shutdown: what a worker that is asked to stop still does, within its grace time.

It tells the coordinator at once what it has, so that a kill costs nothing from then on. It finishes
the groups that are surely finished soon, gives the leases of the others back with everything sampled,
and says that it goes. Its answers to a coordinator that is away end early: that one is most likely
being stopped too.
"""

import asyncio
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Protocol

import structlog

from antiphon.core.loop.leases import finishes_in_time
from antiphon.core.records import GroupSubmission, LeaseProgress
from antiphon.services.rollout.engine.driver import EngineDriver
from antiphon.services.rollout.group import GroupInFlight
from antiphon.services.rollout.progress import Pace, gather, tokens_left
from antiphon.system.wakeup import Wakeup

FINISHING_SHARE = 0.5
"""Part of the grace time in which a group must surely be finished, or it is handed over at once."""
LAST_WORD_S = 3.0
"""Of the grace time, kept for handing over what was not finished after all; and how long a coordinator
is waited for that does not answer."""

_log = structlog.get_logger(__name__)


class Tell(Protocol):
    """Sends a heartbeat that is no part of the rhythm."""

    async def __call__(
        self, progress: tuple[LeaseProgress, ...], *, released: tuple[str, ...] = (), leaving: bool = False
    ) -> None:
        """Tell of progress, of leases given up, and of leaving."""
        ...


class Shutdown:
    """The last minutes of one worker."""

    def __init__(
        self,
        worker_name: str,
        groups: MutableMapping[str, GroupInFlight],
        unsubmitted: Mapping[str, GroupSubmission],
        pace: Pace,
        tell: Tell,
        change: Wakeup,
    ) -> None:
        """Prepare it.

        Args:
            worker_name: for the log.
            groups: the worker's groups in flight, by lease; what is handed over is taken out.
            unsubmitted: finished groups that are on their way to the coordinator.
            pace: how fast the worker samples.
            tell: sends a heartbeat.
            change: rung when a group was finished or handed in.
        """
        self._name = worker_name
        self._groups, self._unsubmitted = groups, unsubmitted
        self._pace, self._tell, self._change = pace, tell, change

    async def leave(self, engine: EngineDriver, stop_by: float, patience_s: float) -> None:
        """Finish, hand over, say goodbye.

        Args:
            engine: samples the groups.
            stop_by: on the event loop's clock, when the worker must be gone.
            patience_s: longest wait for a step of the engine.

        Raises:
            UnavailableError: when the coordinator does not answer.
        """
        clock = asyncio.get_running_loop().time
        groups = list(self._groups.values())
        progress = await gather(groups, engine, patience_s)
        await self._tell(progress)
        finish_s = FINISHING_SHARE * (stop_by - clock())
        per_token = self._pace.seconds_per_token
        hopeless = [g for g in groups if not finishes_in_time(tokens_left(g, progress), per_token, finish_s)]
        await self._hand_over(engine, hopeless, patience_s)
        while (self._groups or self._unsubmitted) and (left_s := stop_by - LAST_WORD_S - clock()) > 0:
            await self._change.wait(left_s)
        await self._hand_over(engine, list(self._groups.values()), patience_s)
        await self._tell((), leaving=True)

    async def _hand_over(
        self, engine: EngineDriver, groups: Sequence[GroupInFlight], patience_s: float
    ) -> None:
        """Stop sampling groups and give their leases back, everything sampled included."""
        running = [group for group in groups if group.lease.lease_id in self._groups]
        if not running:
            return
        progress = await gather(running, engine, patience_s, stop=True)
        # What was finished meanwhile is on its way as a submission.
        released = [g.lease.lease_id for g in running if self._groups.pop(g.lease.lease_id, None) is not None]
        _log.info("worker.handed_over", worker=self._name, groups=len(released))
        await self._tell(progress, released=tuple(released))
