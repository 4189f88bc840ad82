"""Submitter: hands finished groups in until each was answered, several at a time.

An answer comes after the coordinator's transaction, so one group after the other would make the time of a
transaction the pace of the whole worker.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import RefusedError
from antiphon.core.records import GroupSubmission, SubmitVerdict
from antiphon.services.rollout.weights import Delay
from antiphon.services.rollout.work import WorkInFlight
from antiphon.system import failpoints
from antiphon.system.wakeup import Wakeup

MOST_AT_ONCE = 32
"""Groups that may wait for their answers at the same time."""
LOOK_AGAIN_S = 5.0
"""Longest pause before it is looked again whether something is finished; a change ends it at once."""
_log = structlog.get_logger(__name__)

Reach = Callable[[str, Callable[[], Awaitable[SubmitVerdict]]], Awaitable[SubmitVerdict]]


class Submitter:
    """Takes finished groups out of a worker's work by handing them in."""

    def __init__(
        self, coordinator: Coordinator, work: WorkInFlight, change: Wakeup, reach: Reach, delay: Delay
    ) -> None:
        """`reach` repeats a call while the coordinator is away; `delay` is awaited before each call;
        `change` is notified when a group was finished, and by this when one was answered."""
        self._coordinator, self._work, self._change = coordinator, work, change
        self._reach, self._delay = reach, delay
        self._asking: set[str] = set()

    async def run(self) -> None:
        """Hand in whatever is finished, until cancelled.

        Raises:
            UnavailableError: when the coordinator was away for too long.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                waiting = [item for item in self._work.finished.items() if item[0] not in self._asking]
                for lease_id, submission in waiting[: MOST_AT_ONCE - len(self._asking)]:
                    self._asking.add(lease_id)
                    tasks.create_task(self._hand_in(lease_id, submission))
                await self._change.wait(LOOK_AGAIN_S)

    async def _hand_in(self, lease_id: str, submission: GroupSubmission) -> None:
        await self._delay()
        failpoints.reach("worker.upload.before")
        try:
            handing_in = partial(self._coordinator.submit_group, submission)
            verdict = await self._reach("coordinator.submit_group", handing_in)
            _log.debug("group.submitted", group=submission.group_id, verdict=verdict.value)
        except RefusedError as error:  # it may have continued what another worker made up
            _log.warning("group.refused", group=submission.group_id, reason=str(error))
        failpoints.reach("worker.upload.after")
        del self._work.finished[lease_id]
        self._asking.discard(lease_id)
        self._change.notify()
