"""Notes: what a run says of its steps, versions and batches, which MLflow takes of many at once.

Each call of MLflow costs a few transactions whatever it carries, so a few calls for the notes of several
steps take a fraction of what a few for each step would.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon.core.reporting.figures import VersionTotals
from antiphon.lineage.tracking.system_metrics import SystemSample

MOST_NOTES = 60
"""Notes that are written together; a step brings three."""


@dataclass(frozen=True, slots=True)
class BatchNote:
    """A rollout batch, a dataset that the run trained on."""

    name: str
    digest: str
    source: Mapping[str, object]
    profile: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class VersionNote:
    """A policy version, a logged model that a step made."""

    version: int
    step: int
    params: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StepNote:
    """A step's metrics, the totals of versions known by then, and looks at the machine meanwhile."""

    step: int
    metrics: Mapping[str, float]
    at: float
    totals: Sequence[VersionTotals] = ()
    samples: Sequence[SystemSample] = ()


Note = BatchNote | VersionNote | StepNote


class Gathering:
    """Notes that come until they are taken; from any thread."""

    def __init__(self) -> None:
        self._notes: list[Note] = []
        self._open = True
        self._lock = threading.Lock()

    def add(self, note: Note) -> bool:
        """Add a note, and tell whether it came in time and found room."""
        with self._lock:
            fits = self._open and len(self._notes) < MOST_NOTES
            if fits:
                self._notes.append(note)
            return fits

    def take(self) -> list[Note]:
        """Return the notes; from now on none is added."""
        with self._lock:
            self._open = False
            return self._notes
