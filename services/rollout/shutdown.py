"""Shutdown: what a worker that is asked to stop still does, within its grace time.

It reports to the coordinator at once what it has, so that a kill costs nothing from then on. It finishes
the groups that are surely finished soon, gives the leases of the others back with everything sampled,
and says that it leaves. It waits only a short time for a coordinator that does not answer: that one is
most likely being stopped too.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from antiphon.core.errors import UnavailableError
from antiphon.core.loop.leases import finishes_in_time
from antiphon.core.records import LeaseProgress
from antiphon.services.rollout.engine.driver import EngineDriver
from antiphon.services.rollout.group import GroupInFlight
from antiphon.services.rollout.progress import gather, tokens_left
from antiphon.services.rollout.work import WorkInFlight
from antiphon.system.wakeup import Wakeup

FINISHING_SHARE = 0.5
"""Part of the grace time in which a group must surely be finished, or it is handed over at once."""
HAND_OVER_S = 3.0
"""Of the grace time, kept for handing over what was not finished after all; and how long a coordinator
is waited for that does not answer."""

_log = structlog.get_logger(__name__)


class SendHeartbeat(Protocol):
    """Sends a heartbeat at once, apart from the regular ones."""

    async def __call__(
        self, progress: tuple[LeaseProgress, ...], *, released: tuple[str, ...] = (), leaving: bool = False
    ) -> None:
        """Report progress, leases that are given back, and leaving."""


class Shutdown:
    """The end of one worker, from the moment it is asked to stop."""

    def __init__(self, worker_name: str, work: WorkInFlight, send: SendHeartbeat, change: Wakeup) -> None:
        """What is handed over leaves `work`; `change` is notified when a group was finished or handed in."""
        self._name = worker_name
        self._work, self._send, self._change = work, send, change
        self._asked = asyncio.Event()
        self._deadline = 0.0

    @property
    def asked(self) -> bool:
        """Whether the worker was asked to stop."""
        return self._asked.is_set()

    def ask(self, grace_s: float) -> None:
        """Begin; the worker is gone within `grace_s` seconds."""
        self._deadline = asyncio.get_running_loop().time() + grace_s
        self._asked.set()

    async def run(self, engine: EngineDriver, step_timeout_s: float) -> None:
        """Wait until it is asked for; then finish, hand over, and leave."""
        await self._asked.wait()
        try:
            await self._leave(engine, step_timeout_s)
        except UnavailableError as error:
            _log.warning(
                "worker.no_answer", worker=self._name, groups=len(self._work.groups), reason=str(error)
            )

    async def _leave(self, engine: EngineDriver, step_timeout_s: float) -> None:
        clock = asyncio.get_running_loop().time
        groups = list(self._work.groups.values())
        progress = await gather(groups, engine, step_timeout_s)
        await self._send(progress)
        finish_s = FINISHING_SHARE * (self._deadline - clock())
        per_token = self._work.token_rate.seconds_per_token
        late = [g for g in groups if not finishes_in_time(tokens_left(g, progress), per_token, finish_s)]
        await self.hand_over(engine, late, step_timeout_s)
        while not self._work.idle and (left_s := self._deadline - HAND_OVER_S - clock()) > 0:
            await self._change.wait(left_s)
        await self.hand_over(engine, list(self._work.groups.values()), step_timeout_s)
        await self._send((), leaving=True)

    async def hand_over(
        self, engine: EngineDriver, groups: Sequence[GroupInFlight], step_timeout_s: float
    ) -> None:
        """Stop sampling groups and give their leases back, everything sampled included.

        Raises:
            UnavailableError: when the coordinator does not answer within `HAND_OVER_S`.
        """
        sampled = self._work.groups
        running = [group for group in groups if group.lease.lease_id in sampled]
        if not running:
            return
        progress = await gather(running, engine, step_timeout_s, stop=True)
        # What was finished meanwhile is on its way as a submission.
        released = [g.lease.lease_id for g in running if sampled.pop(g.lease.lease_id, None) is not None]
        _log.info("worker.handed_over", worker=self._name, groups=len(released))
        await self._send(progress, released=tuple(released))
