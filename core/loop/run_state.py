"""Run state: the fold of a run's events, and nothing that is not in them.

`RunState.apply` is the only way anything changes, so a state rebuilt from the journal equals the one that
was lost. What may be done is decided in `core.loop.admission` and `core.loop.assembly`, which return events.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError
from antiphon.core.lengths.memory import LengthMemory
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import (
    EvaluationState,
    GroupOutcome,
    GroupPhase,
    GroupState,
    Receipt,
    Sampled,
    Scored,
    Tally,
    committed_step,
    heldout_group,
    newest_scored,
    requested_group,
    sealed_batch,
    voided_batch,
)
from antiphon.core.loop.turns import answer_key
from antiphon.core.loop.work_account import Use, WorkAccounts
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import BatchRef, StepCommit
from antiphon.core.run_clock import RunClock
from antiphon.core.status import OrderState, WorkerOrder
from antiphon.core.trust.audit import Sums
from antiphon.core.trust.reputation import Standing
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.core.voided_batch import VoidedBatch

REWARD_RANGE = "the reward range of environment.name"
"""Under this name a run keeps its environment's range for good, where that is not 0..1."""
ENVIRONMENT_FILES = "the digest of environment.name's files"
"""The same of these, where there are any on the coordinator's machine."""


@dataclass(slots=True)
class RunState:
    """Everything that outlives a coordinator process."""

    group_size: int
    payload_retention_steps: int
    run_id: str = ""
    pinned: dict[str, str] = field(default_factory=dict)
    opened_steps: int = 0
    next_number: int = 0  # training groups opened so far in elastic mode, or requests of clients
    groups: dict[str, GroupState] = field(default_factory=dict)
    open_groups: dict[str, GroupState] = field(default_factory=dict)  # those that wait for a worker
    evaluating: int = 0  # how many of `groups` are held-out prompts
    requested: int = 0  # how many of `groups` clients asked for
    sampled: dict[str, Sampled] = field(default_factory=dict)  # those of clients that ended, by group
    receipts: dict[str, Receipt] = field(default_factory=dict)
    sealed: list[BatchRef] = field(default_factory=list)  # newest batch of each step; voided if `reopened`
    reopened: list[int] = field(default_factory=list)  # steps whose batch was voided, without another yet
    voided: list[VoidedBatch] = field(default_factory=list)  # oldest void first
    sealed_groups: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step -> groups whose payloads the journal still keeps; those of voided batches stand last."""
    commits: list[StepCommit] = field(default_factory=list)
    snapshots: dict[int, str] = field(default_factory=dict)  # announced version -> digest of its weights
    newest_version: int | None = None  # the newest announced one
    evaluations: dict[int, EvaluationState] = field(default_factory=dict)
    since_seal: Tally = field(default_factory=Tally)
    recent_scored: list[Scored] = field(default_factory=list)  # answers, since the run was started last
    groups_dropped_stale: int = 0
    groups_filtered: int = 0
    groups_requeued: int = 0
    trajectories_failed: int = 0
    last_failure: str = ""  # why the last of them was not scored
    staleness_histogram: dict[int, int] = field(default_factory=dict)
    registrations: dict[str, int] = field(default_factory=dict)
    sampling_rule: str = ""  # of the first worker; "" also in journals from before there was a choice
    revoked: dict[str, str] = field(default_factory=dict)  # token id or worker name -> why
    standings: dict[str, Standing] = field(default_factory=dict)  # what is known of each worker, by name
    orders: dict[str, WorkerOrder] = field(default_factory=dict)  # of the pool's workers, by name
    work_accounts: WorkAccounts = field(default_factory=WorkAccounts)
    clock: RunClock = field(default_factory=RunClock)
    lengths: LengthMemory = field(default_factory=LengthMemory)
    paused_reason: str = ""
    finished: bool = False
    _places: dict[str, int] | None = field(default=None, init=False, repr=False, compare=False)
    """What `places` returns; None where it has to be counted."""

    @property
    def next_seal(self) -> int:
        """Return the oldest step that has no batch."""
        return self.reopened[0] if self.reopened else len(self.sealed)

    @property
    def batches(self) -> int:
        """Return how many steps have a batch, voided ones left out."""
        return len(self.sealed) - len(self.reopened)

    def authors(self, group: GroupState) -> list[str]:
        """Return for each sample of a group that was handed in who sampled most of its tokens."""
        tokens = [Counter({group.worker_id: count}) for count in group.token_counts]
        for index, worker_id, start, stop in self.receipts[group.group_id].authors:
            tokens[index].update({worker_id: stop - start, group.worker_id: start - stop})
        return [name_of_worker(count.most_common(1)[0][0]) for count in tokens]

    def is_sealed(self, step: int) -> bool:
        """Return whether a step has a batch that is not voided."""
        return 0 <= step < len(self.sealed) and step not in self.reopened

    def unsealed_steps(self) -> list[int]:
        """Return the opened steps that have no batch, ascending: in this order batches are sealed."""
        return [*self.reopened, *range(len(self.sealed), self.opened_steps)]

    @property
    def training_groups(self) -> int:
        return len(self.groups) - self.evaluating - self.requested

    def barred(self, worker_name: str) -> str:
        """Return why a worker is shut out, or "" when it is not."""
        standing = self.standings.get(worker_name)
        return self.revoked.get(worker_name) or (standing.quarantined if standing else "")

    def training(self) -> Iterable[GroupState]:
        """Yield the living training groups in the order of their places: as opened, unless moved back."""
        return (group for group in self.groups.values() if group.trains)

    def places(self) -> Mapping[str, int]:
        """Return the place of each living training group by id, counted from 0 in the order of `training`."""
        if self._places is None:
            self._places = {group.group_id: place for place, group in enumerate(self.training())}
        return self._places

    def of_step(self, step: int) -> list[GroupState]:
        """Return the living groups of a step of fixed mode, by index."""
        found = [group for group in self.groups.values() if group.step == step]
        return sorted(found, key=lambda group: group.number)

    def apply(self, event: e.JournalEvent) -> None:
        """Advance by one event; IntegrityError when it contradicts the state."""
        _apply(event, self)
        group_id = getattr(event, "group_id", None)
        if group_id is None:
            return
        group = self.groups.get(group_id)
        if group is not None and group.phase is GroupPhase.OPEN:
            self.open_groups[group_id] = group
        else:
            self.open_groups.pop(group_id, None)

    def _group(self, group_id: str, *phases: GroupPhase) -> GroupState:
        group = self.groups.get(group_id)
        if group is None or group.phase not in phases:
            state = "is not known" if group is None else f"is {group.phase}"
            raise IntegrityError(f"the journal contradicts itself: group {group_id} {state}, not {phases}")
        return group


def range_of(pinned: Mapping[str, str]) -> RewardRange:
    """Return the range of rewards among the values that a run keeps for good."""
    low, high = json.loads(pinned[REWARD_RANGE]) if REWARD_RANGE in pinned else UNIT_RANGE
    return low, high


def new_state(config: RunConfig) -> RunState:
    """Return the state of a run before its first event."""
    state = RunState(config.loop.group_size, config.coordinator.payload_retention_steps)
    state.work_accounts.orphan_s = config.services.orphan_s
    return state


def fold(state: RunState, events: Iterable[e.JournalEvent]) -> RunState:
    """Apply events in order and return the same state."""
    for event in events:
        state.apply(event)
    return state


def _run_opened(event: e.RunOpened, state: RunState) -> None:
    state.run_id, state.pinned = event.run_id, dict(event.pinned)


def _run_resumed(_: e.RunResumed, state: RunState) -> None:
    state.paused_reason, state.recent_scored = "", []


def _run_paused(event: e.RunPaused, state: RunState) -> None:
    state.paused_reason = event.reason


def _run_finished(event: e.RunFinished, state: RunState) -> None:
    state.finished = True


def _step_opened(event: e.StepOpened, state: RunState) -> None:
    state.opened_steps = max(state.opened_steps, event.step + 1)


def _group_opened(event: e.GroupOpened, state: RunState) -> None:
    if event.group_id in state.groups:
        raise IntegrityError(f"the journal contradicts itself: group {event.group_id} was opened twice")
    state.groups[event.group_id] = GroupState(
        group_id=event.group_id,
        number=event.number,
        split="train",
        prompt_index=event.prompt_index,
        epoch=event.epoch,
        samples=state.group_size,
        step=event.step,
        version=event.version,
        refill=event.refill,
    )
    if state._places is not None:
        state._places[event.group_id] = len(state._places)
    if event.step is None:
        state.next_number = max(state.next_number, event.number + 1)


def _lease_granted(event: e.LeaseGranted, state: RunState) -> None:
    group = state._group(event.group_id, GroupPhase.OPEN)
    group.phase = GroupPhase.LEASED
    group.lease_id, group.worker_id, group.attempt = event.lease_id, event.worker_id, event.attempt
    group.held_version, group.leased_at_s = event.held_version, event.at_s
    group.holders[event.lease_id] = name_of_worker(event.worker_id)
    if not event.continued:
        group.turns = {}


def _lease_expired(event: e.LeaseExpired, state: RunState) -> None:
    group = state._group(event.group_id, GroupPhase.LEASED)
    if group.twin_lease_id and event.lease_id in (group.lease_id, group.twin_lease_id):
        if event.lease_id == group.lease_id:
            group.lease_id, group.worker_id = group.twin_lease_id, group.twin_worker_id
        group.twin_lease_id = group.twin_worker_id = ""
        return
    group.phase, group.lease_id, group.worker_id = GroupPhase.OPEN, "", ""
    if not event.kept:
        group.turns = {}
    state.groups_requeued += event.waste != "duplicate"  # then it is handed in at the same moment


def _lease_duplicated(event: e.LeaseDuplicated, state: RunState) -> None:
    group = state._group(event.group_id, GroupPhase.LEASED)
    if group.twin_lease_id:
        raise IntegrityError(f"the journal contradicts itself: group {event.group_id} was duplicated twice")
    group.twin_lease_id, group.twin_worker_id = event.lease_id, event.worker_id
    group.holders[event.lease_id] = name_of_worker(event.worker_id)
    group.attempt = event.attempt


def _group_moved_back(event: e.GroupMovedBack, state: RunState) -> None:
    group = state._group(event.group_id, GroupPhase.OPEN, GroupPhase.LEASED, GroupPhase.SUBMITTED)
    line = [other for other in state.groups.values() if other is not group]
    line.insert(line.index(state._group(event.behind, *GroupPhase)) + 1, group)
    state.groups = {other.group_id: other for other in line}
    state._places = None


def _group_submitted(event: e.GroupSubmitted, state: RunState) -> None:
    group = state._group(event.group_id, GroupPhase.OPEN, GroupPhase.LEASED)
    # Journals from before newest_version was kept have evaluations that later versions went on with.
    sampled_by = {event.oldest_version, event.newest_version}
    if None not in sampled_by and group.evaluation is not None and sampled_by != {group.evaluation}:
        raise IntegrityError(
            f"the journal contradicts itself: {event.group_id} was sampled by versions {sampled_by}"
        )
    group.phase = GroupPhase.SUBMITTED
    group.lease_id, group.worker_id, group.attempt = event.lease_id, event.worker_id, event.attempt
    group.oldest_version, group.token_counts = event.oldest_version, event.token_counts
    group.generation_s, group.submitted_at_s = event.generation_s, event.at_s
    group.drafting = event.drafting
    group.twin_lease_id = group.twin_worker_id = ""
    group.turns = {}
    state.lengths.add(group.prompt_index, event.token_counts if group.trains else ())
    receipt = Receipt(event.lease_id, event.payload_digest, state.next_seal, authors=event.authors)
    state.receipts[event.group_id] = receipt


def _samples_requested(event: e.SamplesRequested, state: RunState) -> None:
    if event.group_id in state.groups:
        raise IntegrityError(f"the journal contradicts itself: group {event.group_id} was opened twice")
    state.groups[event.group_id] = requested_group(event)
    state.requested += 1
    state.next_number = event.number + 1


def _samples_finished(event: e.SamplesFinished, state: RunState) -> None:
    state._group(event.group_id, GroupPhase.OPEN if event.refusal else GroupPhase.SUBMITTED)
    state.work_accounts.close_group(event.group_id, Use.STALE if event.refusal else Use.USEFUL)
    del state.groups[event.group_id]
    state.requested -= 1
    state.sampled[event.group_id] = Sampled(len(state.commits), event.refusal)


def _samples_forgotten(event: e.SamplesForgotten, state: RunState) -> None:
    for group_id in event.group_ids:
        del state.sampled[group_id]
        state.receipts.pop(group_id, None)


def _turn_answered(event: e.TurnAnswered, state: RunState) -> None:
    group = state._group(event.group_id, GroupPhase.OPEN, GroupPhase.LEASED)
    group.answers[answer_key(event.sample_index, event.row_digest)] = event


def _turn_sampled(event: e.TurnSampled, state: RunState) -> None:
    group = state._group(event.group_id, GroupPhase.OPEN, GroupPhase.LEASED)
    known = group.turns.get(event.sample_index, ())
    before = tuple(turn for turn in known if turn.start < event.start)
    group.turns[event.sample_index] = (*before, event)
    group.turns_sampled += 1


def _group_rewarded(event: e.GroupRewarded, state: RunState) -> None:
    group = state._group(event.group_id, GroupPhase.SUBMITTED)
    state.recent_scored = newest_scored(
        state.recent_scored, state.authors(group), dict(event.failures), state.group_size
    )
    state.trajectories_failed += len(event.failures)
    state.last_failure = event.failures[-1][1] if event.failures else state.last_failure
    if group.evaluation is None:
        group.phase = GroupPhase.REWARDED
        group.rewards, group.rewarded_at_s = event.rewards, event.at_s
        group.failures, group.said, group.parts = dict(event.failures), dict(event.said), event.parts
        return
    evaluation = state.evaluations[group.evaluation]
    evaluation.rewards[group.prompt_index] = event.rewards
    evaluation.tokens[group.prompt_index] = group.token_counts
    evaluation.failures |= {group.prompt_index: dict(event.failures)} if event.failures else {}
    evaluation.said |= {group.prompt_index: dict(event.said)} if event.said else {}
    state.work_accounts.close_group(event.group_id, Use.USEFUL)
    del state.groups[event.group_id]
    state.evaluating -= 1


def _group_dropped(event: e.GroupDropped, state: RunState) -> None:
    group = state.groups.pop(event.group_id, None)
    if group is None:
        raise IntegrityError(f"the journal contradicts itself: unknown group {event.group_id} was dropped")
    state._places = None
    if event.reason == "untrusted":
        if group.step is not None:  # a step of fixed mode needs this very group
            group.offer_again()
            state.groups[event.group_id] = group
            del state.receipts[event.group_id]
        return
    if event.reason != "filtered":
        receipt = state.receipts.get(event.group_id)
        if receipt is not None and event.reason == "stale_on_arrival":
            state.receipts[event.group_id] = dataclasses.replace(receipt, stale=True)
        state.groups_dropped_stale += 1
        state.since_seal.groups_stale += 1
        state.since_seal.tokens_stale += sum(group.token_counts)
        return
    state.groups_filtered += 1
    state.since_seal.filtered.append(GroupOutcome.of(group))


def _batch_sealed(event: e.BatchSealed, state: RunState) -> None:
    again = event.step in state.reopened
    if not again and event.step != len(state.sealed):
        raise IntegrityError(f"the journal contradicts itself: step {event.step} was sealed out of order")
    gone = event.groups_filtered - len(event.filtered_ids)
    booked = state.since_seal.filtered[:gone]
    for group_id in (*event.group_ids, *event.filtered_ids):
        booked.append(GroupOutcome.of(state._group(group_id, GroupPhase.REWARDED)))
        del state.groups[group_id]
    state._places = None
    state.groups_filtered += len(event.filtered_ids)
    for staleness, count in event.staleness:
        state.staleness_histogram[staleness] = state.staleness_histogram.get(staleness, 0) + count
    rewards = [reward for group in booked for reward in group.rewards]
    reference = sealed_batch(event, rewards, state.voided)
    if again:
        state.reopened.remove(event.step)
        state.sealed[event.step] = reference
    else:
        state.sealed.append(reference)
    spent = state.sealed_groups.get(event.step, ())
    state.sealed_groups[event.step] = (*event.group_ids, *event.filtered_ids, *spent)
    state.since_seal = state.since_seal.without(gone, event.groups_dropped_stale, event.tokens_dropped_stale)


def _batch_voided(event: e.BatchVoided, state: RunState) -> None:
    if not state.is_sealed(event.step) or event.step < len(state.commits):
        raise IntegrityError(f"the journal contradicts itself: step {event.step} had no batch to void")
    batch = state.sealed[event.step]
    for staleness, count in batch.staleness_histogram.items():
        state.staleness_histogram[staleness] -= count
    state.staleness_histogram = {age: count for age, count in state.staleness_histogram.items() if count}
    state.reopened = sorted([*state.reopened, event.step])
    state.voided.append(voided_batch(batch, event.reason, event.operator))


def _step_committed(event: e.StepCommitted, state: RunState) -> None:
    if event.step != len(state.commits) or not state.is_sealed(event.step):
        raise IntegrityError(f"the journal contradicts itself: step {event.step} was committed out of order")
    state.commits.append(committed_step(event, state.clock.times()))
    oldest_kept = event.step - state.payload_retention_steps
    state.sealed_groups = {s: ids for s, ids in state.sealed_groups.items() if s >= oldest_kept}
    living = state.groups.keys() | state.sampled.keys()
    state.receipts = {g: r for g, r in state.receipts.items() if r.step >= oldest_kept or g in living}


def _snapshot_announced(event: e.SnapshotAnnounced, state: RunState) -> None:
    state.snapshots[event.version] = event.weights_digest
    state.newest_version = max(event.version, state.newest_version or 0)


def _evaluation_opened(event: e.EvaluationOpened, state: RunState) -> None:
    state.evaluations[event.version] = EvaluationState(event.prompts, event.samples)
    state.evaluating += event.prompts
    for index in range(event.prompts):
        group = heldout_group(event.version, index, event.samples)
        state.groups[group.group_id] = state.open_groups[group.group_id] = group


def _evaluation_finished(event: e.EvaluationFinished, state: RunState) -> None:
    evaluation = state.evaluations[event.version]
    evaluation.finished, evaluation.samples_digest = True, event.samples_digest


def _worker_registered(event: e.WorkerRegistered, state: RunState) -> None:
    state.registrations[event.worker_name] = state.registrations.get(event.worker_name, 0) + 1
    state.sampling_rule = state.sampling_rule or event.sampling_rule


def _worker_ordered(event: e.WorkerOrdered, state: RunState) -> None:
    state.orders[event.worker_name] = WorkerOrder(
        event.worker_name,
        OrderState(event.state),
        event.instance,
        event.reason,
        event.up_s,
        event.left_s,
    )


def _access_revoked(event: e.AccessRevoked, state: RunState) -> None:
    state.revoked.setdefault(event.name, event.reason)


def _standing_after(change: Callable[[Standing, Any], Standing]) -> Callable[[Any, RunState], None]:
    """Return what a handler does that changes what is known of one worker."""

    def handle(event: Any, state: RunState) -> None:
        state.standings[event.worker_name] = change(state.standings.get(event.worker_name, Standing()), event)

    return handle


def _audited(known: Standing, event: e.GroupAudited) -> Standing:
    if event.unaudited:
        return known.skip_group(event.unaudited)
    return known.pass_group(Sums(event.tokens, event.missed, event.near), event.most, event.kept_cache)


_pardon = _standing_after(lambda standing, event: standing.pardon())


def _worker_pardoned(event: e.WorkerPardoned, state: RunState) -> None:
    _pardon(event, state)
    state.revoked.pop(event.worker_name, None)


_HANDLERS: dict[type[e.JournalEvent], Callable[[Any, RunState], None]] = {
    e.RunOpened: _run_opened,
    e.RunResumed: _run_resumed,
    e.RunPaused: _run_paused,
    e.RunFinished: _run_finished,
    e.StepOpened: _step_opened,
    e.GroupOpened: _group_opened,
    e.LeaseGranted: _lease_granted,
    e.LeaseDuplicated: _lease_duplicated,
    e.LeaseExpired: _lease_expired,
    e.GroupMovedBack: _group_moved_back,
    e.GroupSubmitted: _group_submitted,
    e.TurnAnswered: _turn_answered,
    e.TurnSampled: _turn_sampled,
    e.GroupRewarded: _group_rewarded,
    e.SamplesRequested: _samples_requested,
    e.SamplesFinished: _samples_finished,
    e.SamplesForgotten: _samples_forgotten,
    e.GroupDropped: _group_dropped,
    e.BatchSealed: _batch_sealed,
    e.BatchVoided: _batch_voided,
    e.StepCommitted: _step_committed,
    e.SnapshotAnnounced: _snapshot_announced,
    e.EvaluationOpened: _evaluation_opened,
    e.EvaluationFinished: _evaluation_finished,
    e.WorkerRegistered: _worker_registered,
    e.WorkerOrdered: _worker_ordered,
    e.AccessRevoked: _access_revoked,
    e.GroupAudited: _standing_after(_audited),
    e.WorkerStruck: _standing_after(
        lambda known, event: known.strike(event.check not in ("refused", "scoring"), event.gross)
    ),
    e.WorkerQuarantined: _standing_after(lambda known, event: known.shut_out(event.reason)),
    e.WorkerPardoned: _worker_pardoned,
}


def _apply(event: e.JournalEvent, state: RunState) -> None:
    state.clock.apply(event)
    handle = _HANDLERS.get(type(event))
    if handle is not None:  # others are for people
        handle(event, state)
    state.work_accounts.apply(event)
