"""Run state machine: runs decisions, which means that it applies and journals what they yield and wakes who
waits for it.

Nothing awaits within a decision, so no one sees half a change, and all of it goes into one transaction. What
happens without a call happens here too: batches are sealed, evaluations end, silent workers are lost. While
the journal or the store has no place nothing new is taken in, and callers get the reason; if it cannot be
used at all, the state machine fails as a whole and a restart continues from the journal.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog

from antiphon.core.capacity.run_ahead import describe
from antiphon.core.config import RunConfig
from antiphon.core.coordinator import client_groups, consequences
from antiphon.core.coordinator.loop_state import (
    Decision,
    Effect,
    Forget,
    Keep,
    KeepHistory,
    LoopState,
    PromptSource,
    prefix_name,
    reference_name,
)
from antiphon.core.errors import AntiphonError, BlockedError, IntegrityError, UnavailableError
from antiphon.core.loop import assembly, speculation
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase, heldout_group_id
from antiphon.core.loop.partials import with_turns
from antiphon.core.loop.run_state import RunState, fold
from antiphon.core.loop.turns import answer_key, piece_of_turn
from antiphon.core.records import FloatArray, GroupSubmission
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.journal.archive import Archive
from antiphon.services.coordinator.journal.journal import (
    RETRY_S,
    SNAPSHOT_EVERY,
    HistoryEdit,
    Journal,
    StateSnapshots,
    TrainedRow,
)
from antiphon.services.coordinator.journal.pinned import check_same_run, check_totals, pinned_values
from antiphon.services.coordinator.journal.submissions import Submissions
from antiphon.services.coordinator.prompts import RestingPrompts
from antiphon.services.coordinator.sealing import (
    answers_of,
    finish_evaluation,
    left_out_rows,
    seal_batch,
)
from antiphon.system import failpoints
from antiphon.system.wakeup import Wakeup, WorkQueue

IDLE_S = 30.0
"""Longest that the sealing loop sleeps before it looks again."""
MOST_STALE_WAITS = 64
"""Waits for answers to turns whose groups are gone; beyond this number they are cleared away."""
SHORTEST_TICK_S = 0.2
LONGEST_TICK_S = 1.0
"""How often deadlines are looked at, within these bounds half a heartbeat."""

_log = structlog.get_logger("coordinator")
_Event = TypeVar("_Event", bound=e.JournalEvent)
_Reply = TypeVar("_Reply")


class RunStateMachine:
    """Runs the decisions of one run, and what follows without a call."""

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
        self.config, self.run_id, self.prompts = config, run_id, prompts
        self.journal, self.store, self.clock = journal, store, clock
        self.loop = LoopState(config, run_id, prompts, lease_key or secrets.token_bytes(32), clock())
        self.archive = Archive(config.drafting)
        self.submissions = Submissions(self.state, journal)
        self._snapshots = StateSnapshots(journal, self.state, snapshot_every)
        self.failure: AntiphonError | None = None
        self.work = WorkQueue()
        """There is news for workers."""
        self.submitted = Wakeup()
        """Groups wait for a reward service."""
        self.turns = Wakeup()
        """Turns wait for a reward service."""
        self._answered: dict[str, Wakeup] = {}
        """Those who wait for the answer to a turn, by its name."""
        self._sampled: dict[str, Wakeup] = {}
        """Those who wait for completions that a client asked for, by group."""
        self.rewarded = Wakeup()
        """A batch may have become complete."""
        self.sealed = Wakeup()
        """A batch was sealed, or those that wait for one should look again."""
        self.failed = asyncio.Event()
        journal.on_failure = self.fail
        self._newest_held = -1
        self._store_blocked: UnavailableError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> RunState:
        return self.loop.run

    async def start(self) -> None:
        """Rebuild the state, give running leases fresh deadlines and begin.

        Raises:
            ConfigError: when the configuration differs from the one the run was opened with.
            IntegrityError: when the journal contradicts itself.
        """
        files = getattr(self.prompts, "files", None)
        pinned = pinned_values(self.config, files, self.loop.reward_range)
        if self.journal.empty:
            opening: list[e.JournalEvent] = [e.RunOpened(self.run_id, pinned, self.clock())]
        else:
            fold(self.state, self.journal.replay(after=self._snapshots.restore()))
            check_same_run(self.run_id, self.state.pinned, pinned)
            check_totals(self.state, self.journal.totals())
            opening = [] if self.state.finished else [e.RunResumed(self.clock(), self.journal.silent_s())]
        known = await self.journal.payload(payloads.LEASE_KEY)
        self.loop.lease_key = known or self.loop.lease_key
        await self._take_up_leases()
        keep = {} if known else {payloads.LEASE_KEY: self.loop.lease_key}
        for event in opening:
            self.loop.apply(event, self.clock())
        await self.journal.enqueue(opening, keep, history=self.archive.load(self.journal.history()))
        await self.do(consequences.settle(self.loop))
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
        now, leases = self.clock(), self.loop.leases
        for group in self.state.groups.values():
            if group.phase not in (GroupPhase.OPEN, GroupPhase.LEASED):
                continue
            body = await self.journal.payload(prefix_name(group.group_id)) if group.attempt else None
            turns = [turn for own in group.turns.values() for turn in own]
            kept = with_turns(
                None if body is None else payloads.load_prefix(body),
                [(turn.worker_id, piece_of_turn(turn)) for turn in turns],
            )
            if group.phase is GroupPhase.LEASED:
                leases.begin(group.lease_id, group, group.worker_id, now, kept)
                if group.twin_lease_id:
                    leases.begin(group.twin_lease_id, group, group.twin_worker_id, now, kept)
            elif kept is not None:
                leases.partial_groups.wait(group.group_id, kept)

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

    def run(self, decision: Decision[_Reply]) -> _Reply:
        """Do what a decision yields and return its reply; await `written` to know that it is on the disk.

        Raises:
            AntiphonError: when the state machine failed before, and what the decision raises.
        """
        self.check()
        now, events = self.clock(), list[e.JournalEvent]()
        keep, forget = dict[str, bytes](), dict[str, None]()
        history: HistoryEdit | None = None
        trained: TrainedRow | None = None
        try:
            while True:
                effect = next(decision)
                if isinstance(effect, e.JournalEvent):
                    self.loop.apply(effect, now)
                    events.append(effect)
                    if isinstance(effect, e.StepCommitted):
                        trained = _trained(self.state, effect)
                elif isinstance(effect, GroupSubmission):
                    keep[effect.group_id] = payloads.dump(effect)
                    forget.pop(effect.group_id, None)  # the last word holds
                    self.submissions.remember(effect)
                elif isinstance(effect, Keep):
                    keep[effect.name] = payloads.dump(effect.record)
                    forget.pop(effect.name, None)
                elif isinstance(effect, Forget):
                    self.submissions.forget(effect.names)
                    if not effect.only_at_hand:
                        forget |= dict.fromkeys(effect.names)
                        if self.config.reference.used:  # it goes with its group
                            forget |= dict.fromkeys(map(reference_name, effect.names))
                        keep = {name: body for name, body in keep.items() if name not in forget}
                elif isinstance(effect, KeepHistory):
                    found = effect.prompt_key, effect.group, effect.submission, effect.rewards
                    history = self.archive.take(*found)
                else:
                    self.work.notify()
        except StopIteration as ended:
            reply: _Reply = ended.value
            return reply
        finally:  # whatever happens, what was applied is journalled
            if events or keep or forget or history:
                dump = self._snapshots.due(len(events))
                self.journal.enqueue(events, keep, tuple(forget), history, trained, dump)
                self._notify(events)

    async def do(self, decision: Decision[_Reply]) -> _Reply:
        """Run a decision and return its reply, or raise what it raises, once what it did is on the disk."""
        before = self.journal.last_seq
        try:
            reply = self.run(decision)
        except AntiphonError:
            if self.journal.last_seq > before:
                await self.written()
            raise
        await self.written()
        return reply

    def written(self) -> "asyncio.Future[None]":
        """Return what is done when everything that was enqueued before is on the disk."""
        self.check()
        return self.journal.written()

    def _notify(self, events: list[e.JournalEvent]) -> None:
        """Wake those for whom something changed, and say in the log what people should know."""
        offered, relevant, news = 0, False, False
        granted = {event.group_id for event in events if isinstance(event, e.LeaseGranted)}
        for event in events:
            match event:
                case e.GroupOpened():
                    offered += event.group_id not in granted
                case e.LeaseExpired() if event.waste != "duplicate":
                    offered += 1
                case e.GroupDropped():
                    offered += 1
                    self.rewarded.notify()
                case e.EvaluationOpened():
                    offered += event.prompts
                case e.GroupSubmitted():
                    # A place at this worker is free.
                    relevant = True
                    self.work.tell(event.worker_id)
                    self.submitted.notify()
                case e.TurnAnswered():
                    name = f"{event.group_id}/{answer_key(event.sample_index, event.row_digest)}"
                    if (waiting := self._answered.pop(name, None)) is not None:
                        waiting.notify()
                case e.SamplesRequested():
                    news = True  # which worker should load what depends on all that waits
                case e.SamplesFinished():
                    if (waiting := self._sampled.pop(event.group_id, None)) is not None:
                        waiting.notify()
                case e.WorkerLoaded():
                    relevant = True
                    # The window of what may be in flight begins further on with a newer version.
                    news |= event.version > self._newest_held
                    self._newest_held = max(self._newest_held, event.version)
                case e.GroupRewarded() | e.GroupMovedBack() | e.EvaluationFinished():
                    self.rewarded.notify()
                case e.StepOpened() | e.SnapshotAnnounced() | e.WorkerLost():
                    news = True  # for everyone another reason to wait holds now
                    self.rewarded.notify()
                case e.BatchSealed():
                    news = True
                    self.sealed.notify()
                case e.RunPaused() | e.RunFinished() | e.BatchVoided():
                    self.wake_all()
            if (fields := _LOGGED.get(type(event))) is not None:
                usual = type(event) in _USUAL and not getattr(event, "hung", False)
                log = _log.info if usual else _log.warning
                log(event.kind, **{name: getattr(event, name) for name in fields})
        # In fixed mode what one worker should load depends on what the others do.
        if news or ((offered or relevant) and self.config.loop.mode == "fixed"):
            self.work.notify()
        elif offered or relevant:
            self.work.offer(offered)

    def answered(self, name: str) -> Wakeup:
        """Return what wakes those who wait for the answer to a turn."""
        if len(self._answered) > 2 * len(self.loop.turns) + MOST_STALE_WAITS:  # of turns that are gone
            self._answered = {n: wakeup for n, wakeup in self._answered.items() if n in self.loop.turns}
        return self._answered.setdefault(name, Wakeup())

    def sampled(self, group_id: str) -> Wakeup:
        """Return what wakes those who wait for the completions of a living group."""
        return self._sampled.setdefault(group_id, Wakeup())

    def fail(self, error: AntiphonError) -> None:
        """Stop everything: from now on every call raises `error`."""
        if self.failure is None:
            self.failure = error
            _log.error("coordinator.failed", reason=str(error))
        self.failed.set()
        self.wake_all()

    def wake_all(self) -> None:
        waiting = (self.work, self.submitted, self.turns, self.rewarded, self.sealed)
        for wakeup in (*waiting, *self._answered.values(), *self._sampled.values()):
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
        self.loop.sealing = frozenset(group.group_id for group in (*plan.used, *plan.filtered))
        # Of filtered groups only where cut-off completions do not count: then their lengths are looked at.
        masks = self.config.algorithm.truncated_completions == "mask"
        sampled = {
            group.group_id: (await self.submissions.get(group.group_id), self.loop.prompt_of(group))
            for group in ((*plan.used, *plan.filtered) if masks else plan.used)
        }
        references = await self._references(plan)
        tally = self.state.since_seal.copy()
        looked_up = self.submissions, self.prompts
        kept = await left_out_rows(plan, tally, *looked_up) if self.config.record.samples else []
        sealing = partial(seal_batch, plan, sampled, tally, self.config, self.store, kept, references)
        event = await self._until_stored(sealing)
        failpoints.reach("coordinator.seal.before")

        def sealed() -> Decision[None]:
            # The batch's own payloads stay in the journal for a while, those booked with it do not.
            yield Forget(tuple(self.loop.sealing), only_at_hand=True)
            yield Forget(tuple(group.group_id for group in tally.filtered))
            self.loop.sealing = frozenset()
            yield event
            yield from consequences.settle(self.loop)

        await self.do(sealed())
        _log.info("batch.sealed", step=event.step, trajectories=event.trajectories, digest=event.digest[:12])

    async def _references(self, plan: assembly.SealPlan) -> dict[str, Sequence[FloatArray]]:
        """Return the reference model's log-probabilities of the groups of a batch, by group; often none.

        Raises:
            IntegrityError: when the journal has lost some.
        """
        found: dict[str, Sequence[FloatArray]] = {}
        if self.config.reference.used:
            await self.written()  # until the last of them can be read again
            for group in plan.used:
                body = await self.journal.payload(reference_name(group.group_id))
                if body is None:
                    raise self.submissions.lost(group.group_id)
                found[group.group_id] = payloads.load_rewards(body).reference_logprobs
        return found

    async def _finish_evaluations(self) -> None:
        while self.failure is None:
            evaluations = self.state.evaluations.items()
            over = [v for v, found in evaluations if not found.finished and found.rewarded >= found.prompts]
            if not over:
                await self.rewarded.wait(IDLE_S)
            for version in over:
                found, keeps = self.state.evaluations[version], self.config.record.samples > 0
                await self.written()  # until the last of them can be read again
                rows = await answers_of(version, found, self.submissions, self.prompts) if keeps else []
                within = self.loop.reward_range
                finishing = partial(finish_evaluation, version, found, rows, self.store, within)
                event = await self._until_stored(finishing)
                held = tuple(heldout_group_id(version, index) for index in range(found.prompts))
                await self.do(_all(event, Forget(held)))

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
        planner, section = self.loop.planner, self.config.loop
        while self.failure is None and not self.state.finished:
            await self.sealed.wait(IDLE_S)
            make = planner.due(self.clock())
            if make is not None:
                plan = await asyncio.to_thread(make)
                planner.take(plan)
                words = describe(plan, section.prompts_per_step, section.max_staleness)
                _log.info("loop.planned", places=self.loop.fleet.places(), plan=words)
                self.work.notify()

    async def _watch_deadlines(self) -> None:
        tick = min(LONGEST_TICK_S, max(SHORTEST_TICK_S, self.config.coordinator.heartbeat_s / 2))
        while self.failure is None:
            await asyncio.sleep(tick)
            self.run(consequences.overdue(self.loop, self.clock()))
            self.run(client_groups.overdue(self.loop, self.clock()))
            if self.loop.leases.may_be_late(self.clock()):
                missing = speculation.missing_groups(self.state, self.config)
                self.work.notify() if self.config.loop.mode == "fixed" else self.work.offer(missing)


_LOGGED: dict[type[e.JournalEvent], tuple[str, ...]] = {
    e.LeaseExpired: ("group_id", "worker_id", "reason", "kept"),
    e.GroupMovedBack: ("group_id", "behind"),
    e.WorkerRegistered: ("worker_id", "sampling_rule"),
    e.WorkerPriced: ("worker_id", "usd_per_hour"),
    e.WorkerOrdered: ("worker_name", "state", "reason"),
    e.WorkerLost: ("worker_id", "reason"),
    e.WorkerStruck: ("worker_name", "group_id", "check", "reason"),
    e.WorkerQuarantined: ("worker_name", "reason"),
    e.AccessRevoked: ("name", "reason"),
    e.BatchVoided: ("step", "reason"),
    e.RunPaused: ("reason",),
}
"""What the log says of an event, by its fields."""
_USUAL = (e.LeaseExpired, e.GroupMovedBack, e.WorkerRegistered, e.WorkerPriced, e.WorkerOrdered)


def _all(*effects: Effect) -> Decision[None]:
    yield from effects


def _trained(state: RunState, commit: e.StepCommitted) -> TrainedRow:
    """Return what the store keeps of a step that was just committed."""
    used = state.sealed_groups[commit.step][: state.sealed[commit.step].groups]
    return TrainedRow(commit.step, commit.version, commit.weights_digest, commit.batch_digest, used)
