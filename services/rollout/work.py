"""Work in flight: groups that a worker has leased, until they are handed in or, at its end, handed over."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.api.engine import EngineOutput
from antiphon.core.errors import RefusedError, UnavailableError
from antiphon.core.loop.leases import finishes_in_time
from antiphon.core.records import GroupSubmission, Lease, LeaseProgress, SubmitVerdict
from antiphon.services.rollout.engine.driver import EngineDriver
from antiphon.services.rollout.group import GroupInFlight, split_request_id
from antiphon.services.rollout.progress import TokenRate, gather, tokens_left, usable_prefix
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


FINISHING_SHARE = 0.5
"""Part of the grace time in which a group must surely be finished, or it is handed over at once."""
HAND_OVER_S = 3.0
"""Of the grace time, kept for handing over what was not finished after all; and how long a coordinator
is waited for that does not answer."""


class SendHeartbeat(Protocol):
    """Sends a heartbeat at once, apart from the regular ones."""

    async def __call__(
        self, progress: tuple[LeaseProgress, ...], *, released: tuple[str, ...] = (), leaving: bool = False
    ) -> None:
        """Report progress, leases that are given back, and leaving."""


class Shutdown:
    """The end of one worker, from the moment it is asked to stop, within its grace time.

    It reports to the coordinator what it has, so that a kill costs nothing from then on. It finishes the
    groups that are surely finished soon, gives the leases of the others back with everything sampled, and
    says that it leaves. It waits only a short time for a coordinator that does not answer: that one is most
    likely being stopped too.
    """

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
