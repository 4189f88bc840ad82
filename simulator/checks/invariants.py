"""Invariants: what must hold after every event of a run, whatever goes wrong, checked by a witness.

The witness keeps its own short records, made from what reached the disk and from what the processes
received; it shares no code with the state it watches over. It knows every token that may occur, because
the stand-ins compute instead of sampling.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from antiphon.core.checks import submission_digest
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.loop import events as e
from antiphon.core.records import GroupSubmission, Lease, StepCommit, SubmitVerdict, TurnLimits
from antiphon.lineage.rollout_table import decode_batch
from antiphon.services.coordinator.journal.journal import StoredEvent
from antiphon.simulator.checks import reasons
from antiphon.simulator.checks.batch_files import Authorship, BatchFiles
from antiphon.simulator.checks.records import GroupRecord, LeaseHolders, WorkerHours, wrongly_struck
from antiphon.simulator.standins import arithmetic

ACKNOWLEDGED = (SubmitVerdict.ACCEPTED, SubmitVerdict.ALREADY_ACCEPTED, SubmitVerdict.STALE)
"""Answers after which a worker forgets its group."""


@dataclass(slots=True)
class Witness:
    """Watches one run and writes down what must not be."""

    config: RunConfig
    reward_rarity: int
    failure_rarity: int
    now: Callable[[], float]
    limits: TurnLimits | None = None
    """Of conversations; None for a task without."""
    violations: list[str] = field(default_factory=list)
    events: int = 0
    commits: list[tuple[float, e.StepCommitted]] = field(default_factory=list)
    """With the second at which each was on the disk."""
    sealed: list[e.BatchSealed] = field(default_factory=list)
    """The newest batch of each step."""
    snapshots: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    hours: WorkerHours = field(default_factory=WorkerHours)
    holders: LeaseHolders = field(init=False)
    authorship: Authorship = field(default_factory=Authorship)
    _groups: dict[str, GroupRecord] = field(default_factory=dict)
    _line: list[str] = field(default_factory=list)
    """Living training groups of elastic mode in the order in which they must train."""
    _lease_ids: set[str] = field(default_factory=set)
    _seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _seed_owners: dict[int, tuple[object, ...]] = field(default_factory=dict)
    _prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _trained: dict[int, str] = field(default_factory=dict)
    _trained_before: set[tuple[int, str]] = field(default_factory=set)
    _voided: dict[int, list[str]] = field(default_factory=dict)
    """Step -> digests of its voided batches."""
    _evaluations: set[int] = field(default_factory=set)
    """Versions that are evaluated, which a worker that has gone on may go back to."""
    _reopened: set[int] = field(default_factory=set)
    """Steps whose batch was voided and that have no other yet."""
    _rows: dict[str, int] = field(default_factory=dict)
    """Rows of each file by its digest."""
    _files: BatchFiles = field(init=False)
    _requeued: int = 0
    _decided_s: float = 0.0
    """When the event at hand was made, by the coordinator's time of day."""
    _finished: bool = False

    def __post_init__(self) -> None:
        self.holders = LeaseHolders(self.config.coordinator.lease_s)
        self._files = BatchFiles(
            self.config, self.reward_rarity, self.failure_rarity, self.authorship, self.limits
        )

    @property
    def _batches(self) -> int:
        return len(self.sealed) - len(self._reopened)

    def _unless_empty(self, group_id: str, found: str) -> None:
        """Report what was found wrong with a group, if anything was."""
        if found:
            self.report(f"group {group_id} {found}")

    def report(self, sentence: str) -> None:
        self.violations.append(f"at {self.now():.3f} s: {sentence}")

    # What reached the disk.

    def on_disk(self, rows: Sequence[StoredEvent]) -> None:
        for row in rows:
            self.events += 1
            if row.seq != self.events:
                self.report(f"event {row.seq} follows event {self.events - 1}")
            self.counts[row.kind] += 1
            event, self._decided_s = e.load_event(row.kind, row.body), row.at
            self.hours.look(event)
            if (look := getattr(self, f"_{row.kind.replace('.', '_')}", None)) is not None:
                look(event)  # the method that has the name of its kind

    def _group(self, group_id: str, what: str, *phases: str) -> GroupRecord:
        group = self._groups.setdefault(group_id, GroupRecord())
        if group.phase not in phases:
            self.report(f"group {group_id} was {what} while {group.phase}")
        return group

    def _run_finished(self, event: e.RunFinished) -> None:
        if self._finished:
            self.report("the run was finished twice")
        self._finished = True

    def _group_opened(self, event: e.GroupOpened) -> None:
        if event.group_id in self._groups:
            self.report(f"group {event.group_id} was opened twice")
        self._groups[event.group_id] = GroupRecord(step=event.step)
        if event.step is None:
            self._line.append(event.group_id)
            newest = max(self.snapshots, default=-1)
            found = reasons.too_many_open(len(self._line), self._batches, newest, self.config)
            self._unless_empty(event.group_id, found and f"was opened, but {found}")

    def _group_moved_back(self, event: e.GroupMovedBack) -> None:
        self._group(event.group_id, "moved back", "open", "leased", "submitted")
        before = self._line.index(event.group_id)
        self._line.remove(event.group_id)
        place = self._line.index(event.behind) + 1
        if place <= before:
            self.report(f"group {event.group_id} was moved to an earlier place, before others")
        self._line.insert(place, event.group_id)

    def _evaluation_opened(self, event: e.EvaluationOpened) -> None:
        self._evaluations.add(event.version)
        for index in range(event.prompts):
            self._groups[f"v{event.version:06d}-e{index:04d}"] = GroupRecord(evaluation=event.version)

    def _lease_granted(self, event: e.LeaseGranted) -> None:
        group = self._group(event.group_id, "leased", "open")
        if event.attempt != group.attempt + 1:
            self.report(f"attempt {event.attempt} of group {event.group_id} follows {group.attempt}")
        if event.lease_id in self._lease_ids:
            self.report(f"lease {event.lease_id} was granted twice")
        self._lease_ids.add(event.lease_id)
        group.phase, group.attempt, group.lease_id = "leased", event.attempt, event.lease_id

    def _lease_duplicated(self, event: e.LeaseDuplicated) -> None:
        group = self._group(event.group_id, "duplicated", "leased")
        if group.twin_id:
            self.report(f"group {event.group_id} was duplicated twice at the same time")
        if event.attempt != group.attempt + 1 or event.lease_id in self._lease_ids:
            self.report(f"duplicate {event.lease_id} of group {event.group_id} is no new attempt")
        self._lease_ids.add(event.lease_id)
        group.attempt, group.twin_id = event.attempt, event.lease_id

    def _lease_expired(self, event: e.LeaseExpired) -> None:
        group = self._group(event.group_id, "taken back", "leased")
        if found := self.holders.wrongly_ended(event, self.now(), self._decided_s):
            self.report(found)
        if event.lease_id not in (group.lease_id, group.twin_id):
            self.report(f"lease {event.lease_id} of group {event.group_id} expired, but it was not running")
        elif group.twin_id:
            left = group.twin_id if event.lease_id == group.lease_id else group.lease_id
            group.lease_id, group.twin_id = left, ""
        else:
            group.phase = "open"
            self._requeued += event.waste != "duplicate"

    def _group_submitted(self, event: e.GroupSubmitted) -> None:
        group = self._group(event.group_id, "handed in", "open", "leased")
        if group.phase == "leased" and event.lease_id not in (group.lease_id, group.twin_id):
            self.report(f"group {event.group_id} was handed in under a lease that another one had replaced")
        self._exactly(event.group_id, group, {event.oldest_version, event.newest_version})
        self.authorship.submitted(event)
        group.phase, group.oldest, group.digest = "submitted", event.oldest_version, event.payload_digest
        group.twin_id = ""

    def _exactly(self, group_id: str, group: GroupRecord, versions: set[int | None]) -> None:
        """A version's score is of answers that it sampled from their first token to their last."""
        if group.evaluation is not None and versions != {group.evaluation}:
            self.report(f"group {group_id} scores version {group.evaluation}, but {versions} sampled it")

    def _group_rewarded(self, event: e.GroupRewarded) -> None:
        group = self._group(event.group_id, "rewarded", "submitted")
        group.phase = "ended" if group.evaluation is not None else "rewarded"
        group.rewards, group.failed = event.rewards, dict(event.failures)

    def _group_dropped(self, event: e.GroupDropped) -> None:
        allowed = {
            "stale_on_arrival": ("submitted",),
            "filtered": ("rewarded",),
            "untrusted": ("rewarded",),
        }
        phases = allowed.get(event.reason, ())  # none is dropped for another reason
        group = self._group(event.group_id, f"dropped ({event.reason})", *phases)
        group.phase, group.stale = "ended", event.reason == "stale_on_arrival"
        if event.reason == "untrusted":
            self._unless_empty(event.group_id, self.authorship.wrongly_dropped(event.group_id))
            if self.config.loop.mode == "fixed":
                group.phase = "open"  # it is sampled again, by others
                return
        if event.reason == "filtered":
            found = reasons.wrongly_chosen(self.config, False, group.rewards, group.failed)
            self._unless_empty(event.group_id, found)
        if event.group_id in self._line:
            place = self._line.index(event.group_id)
            if group.stale:
                step = self._batches + place // self.config.loop.prompts_per_step
                bound = self.config.loop.max_staleness
                self._unless_empty(event.group_id, reasons.not_stale(group.oldest, step, bound))
            del self._line[place]

    def _batch_sealed(self, event: e.BatchSealed) -> None:
        if event.step not in self._reopened and event.step != len(self.sealed):
            self.report(f"step {event.step} was sealed after {len(self.sealed)} others")
        for found in self.authorship.wrongly_sealed(event.group_ids, self.now()):
            self.report(found)
        bound = self.config.loop.max_staleness
        for group_id in (*event.group_ids, *event.filtered_ids):
            group = self._group(group_id, f"sealed into step {event.step}", "rewarded")
            group.phase = "ended"
            used = group_id in event.group_ids
            self._unless_empty(
                group_id, reasons.wrongly_chosen(self.config, used, group.rewards, group.failed)
            )
            if not 0 <= event.step - group.oldest <= bound:
                self.report(
                    f"group {group_id} of version {group.oldest} trains at step {event.step}, beyond {bound}"
                )
        if self.config.loop.mode == "elastic":
            taken = {*event.group_ids, *event.filtered_ids}
            if taken != set(self._line[: len(taken)]):
                self.report(f"step {event.step} overtakes: {sorted(taken - set(self._line[: len(taken)]))}")
            self._line = [group_id for group_id in self._line if group_id not in taken]
        if event.step in self._reopened:
            if event.trajectories:
                self.report(f"step {event.step} was skipped, but its batch trains {event.trajectories}")
            self._reopened.remove(event.step)
            self.sealed[event.step] = event
        else:
            self.sealed.append(event)

    def _batch_voided(self, event: e.BatchVoided) -> None:
        if event.step in self._reopened or event.step >= len(self.sealed) or event.step < len(self.commits):
            self.report(f"step {event.step} was voided, but it had no batch that waited for the learner")
            return
        if self.sealed[event.step].digest != event.digest:
            self.report(f"step {event.step} was voided, but its batch is another one")
        self._reopened.add(event.step)
        self._voided.setdefault(event.step, []).append(event.digest)
        # Another batch may have the same bytes, when nothing of either trains.
        self._trained_before.add((event.step, self._trained.pop(event.step, "")))

    def _step_committed(self, event: e.StepCommitted) -> None:
        if event.step != len(self.commits):
            self.report(f"step {event.step} was committed after {len(self.commits)} others")
        if event.step in self._reopened:
            self.report(f"step {event.step} was committed, but its batch was voided")
        if event.step >= len(self.sealed) or self.sealed[event.step].digest != event.batch_digest:
            self.report(f"step {event.step} was committed on a batch that is not the sealed one")
        before = (event.step, event.batch_digest) in self._trained_before
        if self._trained.get(event.step) != event.batch_digest and not before:
            self.report(f"step {event.step} was committed, but its batch was never trained on")
        self.commits.append((self.now(), event))

    def _worker_struck(self, event: e.WorkerStruck) -> None:
        if found := wrongly_struck(event):
            self.report(found)

    def _worker_quarantined(self, event: e.WorkerQuarantined) -> None:
        if found := self.authorship.quarantined(event, self.now()):
            self.report(found)

    def _snapshot_announced(self, event: e.SnapshotAnnounced) -> None:
        if event.version > len(self.commits):
            self.report(
                f"version {event.version} was announced before step {event.version - 1} was committed"
            )
        if self.snapshots.setdefault(event.version, event.weights_digest) != event.weights_digest:
            self.report(f"version {event.version} was announced with two kinds of weights")
        known = self.weights(event.version)
        if known is not None and known != event.weights_digest:
            self.report(f"version {event.version} was announced with other weights than were committed")

    def weights(self, version: int) -> str | None:
        """Return the digest of a committed version, or None."""
        if version == 0:
            return arithmetic.BASE_WEIGHTS
        return self.commits[version - 1][1].weights_digest if version <= len(self.commits) else None

    # What the processes received and did.

    def leased(self, lease: Lease) -> None:
        """A worker was given a lease."""
        if lease.lease_id not in self._lease_ids:
            self.report(f"lease {lease.lease_id} was given to a worker before it was on the disk")
        if self._seeds.setdefault(lease.group_id, lease.seeds) != lease.seeds:
            self.report(f"group {lease.group_id} was leased with other seeds than before")
        self._unless_empty(lease.group_id, reasons.false_beginning(lease))
        held_out = self._groups.get(lease.group_id, GroupRecord()).evaluation
        owner = (lease.prompt_key, lease.epoch) if held_out is not None else (lease.group_id,)
        self._unless_empty(lease.group_id, reasons.seeds_taken(self._seed_owners, lease.seeds, owner))
        self._prompts[lease.prompt_key] = lease.prompt_token_ids

    def answered(self, submission: GroupSubmission, verdict: SubmitVerdict) -> None:
        """A worker was told what became of its group, and forgets it."""
        if verdict not in ACKNOWLEDGED:
            return
        group = self._groups.get(submission.group_id)
        if group is not None:
            self._exactly(
                submission.group_id, group, {s.version for t in submission.trajectories for s in t.spans}
            )
        if group is None or not group.digest:
            self.report(f"group {submission.group_id} was acknowledged, but it is not on the disk")
        elif group.digest != submission_digest(submission):
            self.report(f"group {submission.group_id} was acknowledged, but another body is on the disk")
        elif group.stale != (verdict is SubmitVerdict.STALE):
            self.report(f"group {submission.group_id} was answered {verdict}, which it is not")

    def committed(self, commit: StepCommit) -> None:
        """The learner was told that its step is committed."""
        if commit.step >= len(self.commits):
            self.report(f"step {commit.step} was acknowledged to the learner, but it is not on the disk")

    def rewarded(self, group_id: str) -> None:
        """A reward service was told that its rewards were taken."""
        if self._groups.get(group_id, GroupRecord()).phase not in ("rewarded", "ended"):
            self.report(f"the rewards of group {group_id} were acknowledged, but they are not on the disk")

    def held(self, worker: str, before: int | None, version: int | None) -> None:
        """A worker process said which version it samples with, after having said another before."""
        if (
            self.config.loop.mode == "elastic"
            and before is not None
            and (version is None or (version < before and version not in self._evaluations))
        ):
            self.report(f"{worker} went back from version {before} to {version}")

    def trained(self, step: int, payload: bytes) -> int:
        """The learner trains on a file, for the first time or again after a crash; return its rows."""
        digest = digest_bytes(payload)
        now = self.sealed[step].digest if step < len(self.sealed) and step not in self._reopened else None
        if digest == now:
            if self._trained.setdefault(step, digest) != digest:
                self.report(f"step {step} was trained on two different files")
        elif digest not in self._voided.get(step, ()):  # the learner may have got that a moment before
            self.report(f"step {step} trains on a file that is not on the disk as its batch")
        if digest not in self._rows:
            rows = decode_batch(payload)
            self._rows[digest] = len(rows)
            for problem in self._files.problems(step, rows, self.snapshots, self._seeds):
                self.report(problem)
        return self._rows[digest]

    # At the end.

    def close(self, finished: bool) -> None:
        """Look at the records once the run is over; `finished`: it was declared complete."""
        if not finished:
            return
        if len(self.commits) != self.config.run.steps:
            self.report(f"the run finished with {len(self.commits)} of {self.config.run.steps} steps")
        left = Counter(group.phase for group in self._groups.values() if group.phase != "ended")
        # A refilling step that reached its limit takes fewer groups than were opened for it.
        if left and not (self.config.loop.filter == "refill" and self.config.loop.mode == "elastic"):
            self.report(f"the run is over, but groups never ended: {dict(left)}")

    def balance(self, requeued: int, dropped_stale: int, filtered: int, newest: int | None) -> None:
        """Compare the coordinator's counters with the witness' own records."""
        ours = {
            "groups offered again": (requeued, self._requeued),
            "committed versions": (len(self.commits), self.counts["step.committed"]),
        }
        if self._reopened and self._finished:
            self.report(f"the run is finished, but steps {sorted(self._reopened)} have no batch")
        stale = sum(batch.groups_dropped_stale for batch in self.sealed)
        if dropped_stale < stale:
            self.report(f"batches count {stale} stale groups, the run {dropped_stale}")
        booked = sum(batch.groups_filtered for batch in self.sealed)
        if filtered < booked:
            self.report(f"batches count {booked} filtered groups, the run {filtered}")
        for what, (theirs, mine) in ours.items():
            if theirs != mine:
                self.report(f"{what}: the coordinator counts {theirs}, the journal has {mine}")
        if newest != max(self.snapshots, default=None):
            self.report(
                f"the newest version is {newest}, but {max(self.snapshots, default=None)} on the disk"
            )
