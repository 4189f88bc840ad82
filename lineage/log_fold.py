"""Log fold: the events of a run's journal become the records that sinks keep.

What a step was made of stands in several events; the record of its commit has all of it. The fold depends on
the events alone, so that every sink says the same whenever it reads them. Its state is small and goes into
the cursor of the follower, so that nothing is read again after a restart. That is why it is not the fold of
what people see (`core.reporting.run_view`), which holds a bar for every group.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from antiphon.api.sink import LogRecord
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import sealed_batch, voided_batch
from antiphon.core.run_clock import RunClock
from antiphon.core.status import Event
from antiphon.core.voided_batch import VoidedBatch
from antiphon.lineage.run_log import evaluation_line, step_line
from antiphon.lineage.tracking.charts import heldout_metrics, step_metrics

_KINDS = frozenset(e.event_kinds())
_READ = frozenset(
    kind.kind
    for kind in (
        *(e.BatchSealed, e.BatchVoided, e.StepCommitted, e.SnapshotAnnounced),
        *(e.EvaluationOpened, e.EvaluationFinished),
    )
)
"""Kinds that say more than a time."""


class LogFold:
    """The fold of one run's events, in their order."""

    def __init__(
        self,
        workers: Callable[[str], Mapping[str, int]] = lambda timings_digest: {},
        written: Callable[[str, int], dict[str, Any] | None] = lambda kind, number: None,
    ) -> None:
        """Begin before the first event.

        Args:
            workers: returns how many trajectories each worker sampled, by the digest of a batch's timings.
            written: returns the line that the run log has of a record, by its kind and number, or None. It is
                taken as it is: another version of the fold may have made it.
        """
        self._workers, self._written = workers, written
        self._clock = RunClock()
        self._sealed: dict[int, e.BatchSealed] = {}
        self._voided: list[VoidedBatch] = []
        self._prompts: dict[int, int] = {}
        self.version = -1
        """The newest version that was announced."""

    def take(self, event: Event) -> LogRecord | None:
        """Take in the next event, and return the record that it completes.

        Raises:
            IntegrityError: for an event of a newer version of the journal, or one that cannot be read.
        """
        if event.kind not in _READ:
            if event.kind not in _KINDS:
                e.load_event(event.kind, event.data_json)  # says that another version wrote it
            self._clock.take(event.kind, json.loads(event.data_json))
            return None
        known = e.load_event(event.kind, event.data_json)
        self._clock.apply(known)
        match known:
            case e.BatchSealed():
                self._sealed[known.step] = known
            case e.BatchVoided():
                batch = sealed_batch(self._sealed.pop(known.step), (), ())
                self._voided.append(voided_batch(batch, known.reason, known.operator))
            case e.EvaluationOpened():
                self._prompts[known.version] = known.prompts
            case e.SnapshotAnnounced():
                self.version = max(self.version, known.version)
                line = {"version": known.version, "weights_digest": known.weights_digest}
                return LogRecord(event.seq, event.at, event.kind, known.version, line)
            case e.StepCommitted():
                step, sealed = known.step, self._sealed.pop(known.step, None)
                made = None if sealed is None else sealed_batch(sealed, (), self._voided)
                self._voided = [voided for voided in self._voided if voided.step != step]
                said = self._written(event.kind, step)
                if said is None or said["weights_digest"] != known.weights_digest:
                    workers = {} if made is None else self._workers(made.timings_digest)
                    said = step_line(known, made, event.at, self._clock.times(), workers)
                return LogRecord(event.seq, event.at, event.kind, step, said, step_metrics(said))
            case e.EvaluationFinished():
                prompts = self._prompts.pop(known.version, 0)
                line = self._written(event.kind, known.version) or evaluation_line(known, prompts, event.at)
                metrics = heldout_metrics(line)
                return LogRecord(event.seq, event.at, event.kind, known.version, line, metrics)
        return None

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain values."""
        return {
            "clock": dataclasses.asdict(self._clock),
            "sealed": [e.dump_event(sealed) for sealed in self._sealed.values()],
            "voided": [dataclasses.asdict(voided) for voided in self._voided],
            "prompts": list(self._prompts.items()),
            "version": self.version,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where another fold had this `state`."""
        self._clock = RunClock(**state["clock"])
        sealed = (e.load_event(e.BatchSealed.kind, body) for body in state["sealed"])
        self._sealed = {event.step: event for event in sealed if isinstance(event, e.BatchSealed)}
        self._voided = [VoidedBatch(**plain) for plain in state["voided"]]
        self._prompts = dict(state["prompts"])
        self.version = int(state["version"])
