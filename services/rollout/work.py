"""Work in flight: the groups that a worker has leased and the coordinator has not taken back yet.

Finished groups are handed in several at a time until each was answered: an answer comes after the
coordinator's transaction, so one group after the other would make the time of a transaction the pace of the
whole worker.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.api.engine import EngineOutput
from antiphon.core.errors import RefusedError
from antiphon.core.records import GroupSubmission, Lease, SubmitVerdict
from antiphon.services.rollout.engine.driver import EngineDriver
from antiphon.services.rollout.group import GroupInFlight, split_request_id
from antiphon.services.rollout.progress import TokenRate, usable_prefix
from antiphon.services.rollout.weights import Delay
from antiphon.system import failpoints
from antiphon.system.wakeup import Wakeup


class WorkInFlight:
    """Groups that are sampled, and finished ones until their submission was answered, by lease id."""

    def __init__(self, change: Wakeup) -> None:
        """Start with nothing; `change` is notified when a completion ended, since there is room then."""
        self._change = change
        self.worker_id = ""
        """What the coordinator calls this worker; empty before it is registered."""
        self.groups: dict[str, GroupInFlight] = {}
        self.finished: dict[str, GroupSubmission] = {}
        self.unusable: set[str] = set()
        """Leases to give back: another version was loaded while they were on their way."""
        self.tokens_generated = 0
        self.token_rate = TokenRate()

    @property
    def idle(self) -> bool:
        """Whether nothing is sampled and nothing waits to be handed in."""
        return not self.groups and not self.finished

    @property
    def samples(self) -> int:
        """Requests that the engine is sampling: a group's ended ones make room for other groups."""
        return sum(len(group.unfinished()) for group in self.groups.values())

    def by_pin(self) -> tuple[int, int]:
        """Return (groups whose lease names a version, other groups) of those that are sampled."""
        pinned = sum(group.lease.version is not None for group in self.groups.values())
        return pinned, len(self.groups) - pinned

    def take(self, lease: Lease, engine: EngineDriver) -> None:
        """Sample a lease from where its last holder came to."""
        group = GroupInFlight(lease, asyncio.get_running_loop().time(), usable_prefix(lease, engine))
        # The coordinator keeps what it sent along.
        group.note_kept(group.prefixes[i].stop if i in group.prefixes else 0 for i in range(len(lease.seeds)))
        if group.complete:  # its last holder was lost between its last token and handing in
            self._finish(group)
        else:
            self.groups[lease.lease_id] = group
            engine.add(group.requests())

    def collect(self, outputs: Sequence[EngineOutput]) -> None:
        """Take in completions from the engine; those of groups that are not sampled any more are dropped."""
        for output in outputs:
            self.tokens_generated += len(output.token_ids)
            lease_id, sample_index = split_request_id(output.request_id)
            group = self.groups.get(lease_id)
            if group is None:
                continue
            elapsed_s = asyncio.get_running_loop().time() - group.started_at
            self.token_rate.measure(elapsed_s, len(output.token_ids))
            group.outputs[sample_index] = output
            if group.complete:
                del self.groups[lease_id]
                self._finish(group)
            else:
                self._change.notify()

    def _finish(self, group: GroupInFlight) -> None:
        now = asyncio.get_running_loop().time()
        self.finished[group.lease.lease_id] = group.submission(self.worker_id, now)
        self._change.notify()


def samples_with(lease: Lease, held_version: int | None, loading: bool) -> bool:
    """Return whether a worker may sample a lease, that holds a version and may be loading another."""
    return held_version is not None and lease.version in (None, None if loading else held_version)


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception in a group that is no group itself."""
    first = group.exceptions[0]
    return first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


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
