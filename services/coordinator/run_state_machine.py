"""Run state machine: the one place where events are applied, journalled and followed up.

Nothing awaits between a decision and `record`, so no one sees half a change. What follows from
an event without a call (refills, stale groups, the next batch, lost workers) happens here. The
service and its queues above decide and answer; of this they use

- what is known: `state`, `leases`, `fleet`, `submissions`, `archive`, `prompts`, `seeds`;
- what changes it: `record`, then `settle` where more may follow; `take_back`, `lose`, `loaded`;
- whom to wake: `work`, `submitted`, `rewarded`, `sealed`, or all of them with `wake_all`;
- whether anything can be done: `check`, `check_open`, `blocked_reason`.

While the journal or the store has no place nothing new is taken in, and callers get the reason; if it
cannot be used at all, the state machine fails as a whole and a restart continues from the journal.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, BlockedError, IntegrityError, UnavailableError
from antiphon.core.loop import admission, assembly, speculation
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase, GroupState, heldout_group_id
from antiphon.core.loop.leases import HeldLease
from antiphon.core.loop.places import place_to_move_to
from antiphon.core.loop.run_state import fold, new_state
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.fleet import Fleet, Member
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.journal.archive import Archive
from antiphon.services.coordinator.journal.journal import RETRY_S, HistoryEdit, Journal, TrainedRow
from antiphon.services.coordinator.journal.pinned import check_same_run, check_totals, pinned_values
from antiphon.services.coordinator.journal.state_snapshots import SNAPSHOT_EVERY, StateSnapshots
from antiphon.services.coordinator.journal.submissions import Submissions
from antiphon.services.coordinator.prompts import GroupSeeds, PromptSource, RestingPrompts
from antiphon.services.coordinator.run_ahead import RunAheadPlanner
from antiphon.services.coordinator.running_leases import RunningLeases
from antiphon.services.coordinator.sealing import (
    answers_of,
    finish_evaluation,
    gather,
    left_out_rows,
    seal_batch,
)
from antiphon.system import failpoints
from antiphon.system.wakeup import Wakeup, WorkQueue

LONGEST_REASON = 500
"""Characters of a reason that the journal keeps."""
IDLE_S = 30.0
"""Longest that the sealing loop sleeps before it looks again."""
SHORTEST_TICK_S = 0.2
LONGEST_TICK_S = 1.0
"""How often deadlines are looked at, within these bounds half a heartbeat."""

_log = structlog.get_logger("coordinator")
_Event = TypeVar("_Event", bound=e.JournalEvent)


class RunStateMachine:
    """State, journal and what follows from events."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        journal: Journal,
        store: ArtifactStore,
        prompts: PromptSource,
        clock: Callable[[], float],
        snapshot_every: int = SNAPSHOT_EVERY,
        lease_key: bytes = b"",
    ) -> None:
        """Prepare; `lease_key` is what lease ids of a new run are made with, 32 bytes, drawn where not given.

        The journal keeps it, and a run that has one goes on with that.
        """
        self.config = config
        self.run_id = run_id
        self.journal = journal
        self.store = store
        self.prompts = prompts
        self.clock = clock
        self.lease_key = lease_key or secrets.token_bytes(32)
        self.state = new_state(config)
        self.leases = RunningLeases(config)
        self.fleet = Fleet(config.coordinator.heartbeat_s, config.broadcast.uplink_bytes_per_s)
        self.archive = Archive(config.drafting)
        self.submissions = Submissions(self.state, journal)
        self.seeds = GroupSeeds(config, prompts)
        self._snapshots = StateSnapshots(journal, self.state, snapshot_every)
        self.failure: AntiphonError | None = None
        self.work = WorkQueue()
        """There is news for workers; for what became leasable see `offer`."""
        self.submitted = Wakeup()
        """Groups wait for a reward service."""
        self.rewarded = Wakeup()
        """A batch may have become complete."""
        self.sealed = Wakeup()
        """A batch was sealed, or those that wait for one should look again."""
        self.failed = asyncio.Event()
        journal.on_failure = self.fail
        self.planner = RunAheadPlanner(
            config, clock, self.fleet.speeds, lambda: self.state.lengths, self.fleet.supply, self.fleet.places
        )
        self._newest_held = -1
        self._sealing: frozenset[str] = frozenset()  # groups whose batch is being written
        self._store_blocked: UnavailableError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Rebuild the state, give running leases fresh deadlines and begin.

        Raises:
            ConfigError: when the configuration differs from the one the run was opened with.
            IntegrityError: when the journal contradicts itself.
        """
        pinned = pinned_values(self.config, getattr(self.prompts, "files", None))
        if self.journal.empty:
            opening: list[e.JournalEvent] = [e.RunOpened(self.run_id, pinned, self.clock())]
        else:
            fold(self.state, self.journal.replay(after=self._snapshots.restore()))
            check_same_run(self.run_id, self.state.pinned, pinned)
            check_totals(self.state, self.journal.totals())
            opening = [] if self.state.finished else [e.RunResumed(self.clock(), self.journal.silent_s())]
        known = await self.journal.payload(payloads.LEASE_KEY)
        self.lease_key = known or self.lease_key
        await self._take_up_leases()
        keep = None if known else {payloads.LEASE_KEY: self.lease_key}
        await self.record(*opening, keep=keep, history=self.archive.load(self.journal.history()))
        await self.settle()
        background = (
            self._seal_batches,
            self._finish_evaluations,
            self._watch_deadlines,
            self._plan_run_ahead,
        )
        looked_at = isinstance(self.prompts, RestingPrompts)
        self._tasks = [] if looked_at else [self._spawn(work()) for work in background]
        _log.info("run.ready", run=self.run_id, committed=len(self.state.commits))

    async def _take_up_leases(self) -> None:
        """Give running leases fresh deadlines, and fetch what was handed over before."""
        now = self.clock()
        for group in self.state.groups.values():
            if group.phase not in (GroupPhase.OPEN, GroupPhase.LEASED):
                continue
            body = await self.journal.payload(payloads.prefix_name(group.group_id)) if group.attempt else None
            kept = None if body is None else payloads.load_prefix(body)
            if group.phase is GroupPhase.LEASED:
                self.leases.begin(group.lease_id, group, group.worker_id, now, kept)
                if group.twin_lease_id:
                    self.leases.begin(group.twin_lease_id, group, group.twin_worker_id, now, kept)
            elif kept is not None:
                self.leases.partial_groups.wait(group.group_id, kept)

    async def close(self) -> None:
        """Stop what runs in the background and write what waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.journal.close()

    @property
    def blocked_reason(self) -> str:
        """Return why nothing can be recorded at the moment; empty when it can."""
        blocked = self.journal.blocked or self._store_blocked
        return "" if blocked is None else str(blocked)

    def check(self) -> None:
        """Raise why the state machine failed, if it did."""
        if self.failure is not None:
            raise self.failure

    def check_open(self) -> None:
        """Raise why nothing new is taken in: the state machine failed, or nothing can be recorded now.

        Raises:
            BlockedError: while the journal or the store has no place; callers try again.
        """
        self.check()
        if reason := self.blocked_reason:
            raise BlockedError(reason)

    def record(
        self,
        *events: e.JournalEvent,
        keep: Mapping[str, bytes] | None = None,
        forget: Sequence[str] = (),
        history: HistoryEdit | None = None,
        trained: TrainedRow | None = None,
    ) -> "asyncio.Future[None]":
        """Apply events now and journal them; await the result to know that they are on disk.

        Raises:
            AntiphonError: when the state machine failed before.
        """
        self.check()
        for event in events:
            self.planner.observe(event, self.state)
            self.state.apply(event)
        self.submissions.forget(forget)
        dump = self._snapshots.due(len(events))
        return self.journal.enqueue(events, keep, forget, history, trained, dump)

    def settle(self) -> "asyncio.Future[None]":
        """Do what follows from the state: drop groups, refill steps, wake who waits."""
        dropped = assembly.dropped(self.state, self.config, self._sealing)
        # Filtered groups stay readable beside the batch that books them, so until then their payloads stay.
        keeps = self.config.record.samples > 0
        gone = [event.group_id for event in dropped if not (keeps and event.reason == "filtered")]
        found: list[e.JournalEvent] = list(dropped)
        for step in self.state.unsealed_steps():
            found.extend(admission.refills(self.state, self.config, step))
        written = self.record(*found, forget=gone)
        if found:
            self.offer(len(found))
        self.rewarded.notify()
        return written

    def take_back(self, held: HeldLease, reason: str, hung: bool = False, discard: bool = False) -> None:
        """End a lease without a submission; its group is offered again, with what is kept of it.

        `hung`: its worker's engine stood still. `discard`: what is kept cannot be used, and is forgotten.
        """
        now = self.clock()
        silent_s = self.leases.silent_s(held, now)
        if hung:
            silent_s = max(silent_s, self.leases.engines.stands_still_s(held.worker_id))
        group = self.state.groups.get(held.group_id)
        sampled = 0 if group is None else self.leases.wasted_tokens(group, held.lease_id)
        kept = self.leases.stop(held.lease_id)
        if group is None or group.phase is not GroupPhase.LEASED:
            return
        if held.lease_id not in (group.lease_id, group.twin_lease_id):
            return
        tokens, keep = 0, {}
        forget = [payloads.prefix_name(held.group_id)] if discard else []
        kept = None if discard else kept
        if kept is not None and not group.twin_lease_id:  # else its twin continues
            self.leases.partial_groups.wait(held.group_id, kept)
            tokens = kept.tokens
            keep = {payloads.prefix_name(held.group_id): payloads.dump_prefix(kept)}
        expired = e.LeaseExpired(
            group_id=held.group_id,
            lease_id=held.lease_id,
            worker_id=held.worker_id,
            reason=reason,
            at_s=now,
            tokens=sampled,
            kept=tokens,
            silent_s=silent_s,
            hung=hung,
        )
        self.record(expired, keep=keep, forget=forget)
        _log.info("lease.expired", group=held.group_id, worker=held.worker_id, reason=reason, kept=tokens)
        if hung and group.group_id in self.state.open_groups:
            self.move_back(group, None if kept is None else kept.oldest_version)
        self.offer(1)

    def move_back(self, group: GroupState, oldest_version: int | None) -> None:
        """Give the place of a group that holds up its step to those behind it.

        `oldest_version` is that of what was sampled for it so far, None if it is begun again.
        """
        loop = self.config.loop
        if group.version is not None:  # it trains at its own step
            return
        last = None if oldest_version is None else oldest_version + loop.max_staleness
        behind = place_to_move_to(self.state, group, loop.prompts_per_step, last)
        if behind is not None:
            self.record(e.GroupMovedBack(group.group_id, behind))
            _log.info("group.moved_back", group=group.group_id, behind=behind)
            self.rewarded.notify()

    @staticmethod
    def version_wanted(member: Member, evaluated: int | None) -> int | None:
        """Return the version that a worker of elastic mode should sample with before any newer one, or None.

        It is the one whose held-out prompts wait. A worker that holds a newer one already goes back only if
        it was asked to (`LeaseGranter`).
        """
        went_on = evaluated is not None and (member.held_version or 0) > evaluated
        return None if went_on and member.sent_wanted != evaluated else evaluated

    def tell(self, member: Member) -> int | None:
        """Note that a worker is told of the newest version now; return what it is to sample with before."""
        member.sent_newest = self.state.newest_version
        if self.config.loop.mode == "elastic":
            evaluated = admission.version_to_evaluate(self.state, self.config)
            member.sent_wanted = self.version_wanted(member, evaluated)
            return member.sent_wanted
        return None

    def offer(self, groups: int) -> None:
        """Wake as many waiting workers as groups may have become leasable; what makes one leasable says
        it."""
        if self.config.loop.mode == "fixed":
            self.work.notify()  # what one of them should load depends on what the others do
        else:
            self.work.offer(groups)

    def lose(self, member: Member, reason: str) -> None:
        """Count a worker as lost and offer its groups again."""
        self.fleet.lose(member)
        self.leases.forget_worker(member.worker_id)
        self.record(e.WorkerLost(member.worker_id, reason, self.clock()))
        _log.warning("worker.lost", worker=member.worker_id, reason=reason)
        for held in self.leases.of_worker(member.worker_id):
            self.take_back(held, f"worker lost: {reason}")
        self.work.notify()

    def lose_named(self, name: str, reason: str) -> None:
        for member in self.fleet.named(name):
            self.lose(member, reason)

    def loaded(self, member: Member) -> None:
        """Note that a worker samples with another version now."""
        if member.held_version is not None:
            self.record(e.WorkerLoaded(member.worker_id, member.held_version))
            if member.held_version > self._newest_held:
                self._newest_held = member.held_version
                self.work.notify()  # the window of what may be in flight begins further on now
            else:
                self.offer(0)

    def fail(self, error: AntiphonError) -> None:
        """Stop everything: from now on every call raises `error`."""
        if self.failure is None:
            self.failure = error
            _log.error("coordinator.failed", reason=str(error))
        self.failed.set()
        self.wake_all()

    def wake_all(self) -> None:
        for wakeup in (self.work, self.submitted, self.rewarded, self.sealed):
            wakeup.notify()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AntiphonError):
            self.fail(error)
        elif error is not None:
            _log.error("coordinator.broke", exc_info=error)
            self.fail(IntegrityError(f"the coordinator broke ({error!r}); its log has the details"))

    async def _seal_batches(self) -> None:
        # The table library sets itself up on first use, which takes a while; no batch should wait for it.
        await asyncio.to_thread(encode_batch, [])
        while self.failure is None:
            plan = assembly.plan_seal(self.state, self.config)
            if plan is None:
                await self.rewarded.wait(IDLE_S)
            else:
                await self._seal(plan)

    async def _seal(self, plan: assembly.SealPlan) -> None:
        self._sealing = frozenset(group.group_id for group in (*plan.used, *plan.filtered))
        ingredients = await gather(plan, self.config, self.submissions, self.prompts)
        tally = self.state.since_seal.copy()
        looked_up = self.submissions, self.prompts
        kept = await left_out_rows(plan, tally, *looked_up) if self.config.record.samples else []
        held = [group.group_id for group in tally.filtered]
        sealing = partial(seal_batch, plan, ingredients, tally, self.config, self.store, kept)
        event = await self._until_stored(sealing)
        failpoints.reach("coordinator.seal.before")
        written, taken, self._sealing = self.record(event, forget=held), self._sealing, frozenset()
        await written
        self.submissions.forget(taken)
        _log.info("batch.sealed", step=event.step, trajectories=event.trajectories, digest=event.digest[:12])
        self.sealed.notify()
        self.work.notify()
        await self.settle()

    async def _finish_evaluations(self) -> None:
        while self.failure is None:
            evaluations = self.state.evaluations.items()
            over = [v for v, found in evaluations if not found.finished and found.rewarded >= found.prompts]
            if not over:
                await self.rewarded.wait(IDLE_S)
            for version in over:
                found, keeps = self.state.evaluations[version], self.config.record.samples > 0
                await self.record()  # until the last of them can be read again
                rows = await answers_of(version, found, self.submissions, self.prompts) if keeps else []
                event = await self._until_stored(partial(finish_evaluation, version, found, rows, self.store))
                held = [heldout_group_id(version, index) for index in range(found.prompts)]
                await self.record(event, forget=held)
                self.rewarded.notify()

    async def _until_stored(self, sealing: Callable[[], _Event]) -> _Event:
        """Write files, again and again while the store has no place for them; return what they end."""
        since = self.clock()
        while True:
            try:
                event = await asyncio.to_thread(sealing)
            except UnavailableError as error:
                if self.clock() - since >= self.config.services.outage_timeout_s:
                    raise
                self._store_blocked = error
                _log.error("store.blocked", reason=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                self._store_blocked = None
                return event

    async def _plan_run_ahead(self) -> None:
        while self.failure is None and not self.state.finished:
            await self.sealed.wait(IDLE_S)
            if await self.planner.plan_if_due():
                self.work.notify()

    async def _watch_deadlines(self) -> None:
        tick = min(LONGEST_TICK_S, max(SHORTEST_TICK_S, self.config.coordinator.heartbeat_s / 2))
        while self.failure is None:
            await asyncio.sleep(tick)
            now = self.clock()
            for member in self.fleet.silent(now):
                self.lose(member, f"no heartbeat for {now - member.seen_s:.1f} s")
            for held in self.leases.expired(now):
                self.take_back(held, f"no sign of life for {self.config.coordinator.lease_s:g} s")
            if self.leases.may_be_late(now):
                self.offer(speculation.missing_groups(self.state, self.config))
