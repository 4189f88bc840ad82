"""Made log: a run's journal in memory, told step by step, for records that are made without a loop."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from antiphon.core.loop import events as e
from antiphon.core.records import BatchRef, SnapshotManifest, StepCommit
from antiphon.core.status import EvaluationRecord, Event
from antiphon.services.coordinator.journal.databases import open_sql_store
from antiphon.services.coordinator.journal.store import StoredEvent, WriteBatch
from antiphon.system.clock import wall_clock


class MadeLog:
    """The events of one run; a source of its followers."""

    def __init__(self, clock: Callable[[], float] = wall_clock) -> None:
        """Begin a log whose events come at the times of `clock`, Unix seconds."""
        self.events: list[Event] = []
        self._clock = clock
        self._grown = threading.Condition()
        self._interrupts = 0
        self._opened: set[int] = set()

    def page(self, after_seq: int, wait_s: float) -> Sequence[Event]:
        """Return the next events after one, waiting up to `wait_s` seconds for the first."""
        with self._grown:
            seen = self._interrupts
            if wait_s:
                self._grown.wait_for(lambda: len(self.events) > after_seq or self._interrupts != seen, wait_s)
            return self.events[after_seq:]

    def interrupt(self) -> None:
        """Let calls that wait return at once."""
        with self._grown:
            self._interrupts += 1
            self._grown.notify_all()

    def add(self, event: e.JournalEvent) -> None:
        """Append an event."""
        with self._grown:
            seq = len(self.events) + 1
            self.events.append(Event(seq, self._clock(), event.kind, e.dump_event(event)))
            self._grown.notify_all()

    def announce(self, manifest: SnapshotManifest) -> None:
        """Tell of a published version."""
        self.add(e.SnapshotAnnounced(manifest.version, manifest.weights_digest, manifest.origin))

    def read(self) -> list[e.JournalEvent]:
        """Return all events as the journal's own."""
        return [e.load_event(event.kind, event.data_json) for event in self.events]

    def write_journal(self, place: Path, run_id: str) -> None:
        """Write the events into a journal that rests."""
        store = open_sql_store(place, run_id)
        rows = [StoredEvent(event.seq, event.at, event.kind, event.data_json) for event in self.events]
        store.write(WriteBatch(events=rows))
        store.close()

    def begin(self, startup_s: float) -> None:
        """Tell that a coordinator opened the run at 0 s of its clock, and when it granted a first lease."""
        self.add(e.RunOpened("", {}, 0.0))
        self.add(e.LeaseGranted("g0", "l0", "w0", 1, 0, startup_s))

    def commit(
        self,
        commit: StepCommit,
        batch: BatchRef | None = None,
        at_s: float | None = None,
        plan: Mapping[str, float] | None = None,
    ) -> None:
        """Tell of a step, committed at `at_s` of the coordinator's clock, and of the batch it trained on."""
        for voided in () if batch is None else batch.replaced:
            ids = tuple(f"g{index}" for index in range(voided.groups))
            sizes = voided.trajectories, voided.groups_filtered, 0, 0
            self.add(e.BatchSealed(commit.step, ids, (), voided.digest, "", *sizes, 0.0, 0.0, ()))
            self.add(e.BatchVoided(commit.step, voided.digest, voided.reason, voided.operator))
        if batch is not None:
            self.add(
                e.BatchSealed(
                    step=batch.step,
                    group_ids=tuple(f"g{index}" for index in range(batch.groups)),
                    filtered_ids=(),
                    digest=batch.digest,
                    timings_digest=batch.timings_digest,
                    trajectories=batch.trajectories,
                    groups_filtered=batch.groups_filtered,
                    groups_dropped_stale=batch.groups_dropped_stale,
                    tokens=batch.tokens,
                    reward_mean=batch.reward_mean,
                    completion_tokens_mean=batch.completion_tokens_mean,
                    staleness=tuple(batch.staleness_histogram.items()),
                    drafting=batch.drafting,
                    trajectories_failed=batch.trajectories_failed,
                    tokens_dropped_stale=batch.tokens_dropped_stale,
                    samples_digest=batch.samples_digest,
                )
            )
        made = (commit.weights_digest, commit.batch_digest, commit.metrics, commit.published)
        expected = dict(plan) if plan else None
        self.add(e.StepCommitted(commit.step, commit.version, *made, at_s, expected, commit.exactness))

    def evaluate(self, evaluation: EvaluationRecord) -> None:
        """Tell of an evaluation; one that is not complete is only begun."""
        if evaluation.version not in self._opened:
            self._opened.add(evaluation.version)
            self.add(e.EvaluationOpened(evaluation.version, evaluation.prompts))
        if evaluation.complete:
            means = evaluation.reward_mean, evaluation.completion_tokens_mean
            self.add(e.EvaluationFinished(evaluation.version, *means, evaluation.samples_digest))
