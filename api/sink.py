"""Sink: what follows a run's log and keeps what it says somewhere: MLflow, a ledger, a file, a service.

A follower (`lineage.follower`) hands a sink the records of the log in order, and notes how far it is once the
sink has answered. A process may die between the two, so a sink is handed records again that it has: it
knows them by `seq`, or by their kind and number, and writes nothing twice. `record.sinks` names further ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from antiphon.core.config import RunConfig
from antiphon.core.reporting.deliveries import VersionDeliveries
from antiphon.core.status import Event


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One thing that the log says of a run."""

    seq: int
    """Number of its event in the journal, from 1 on."""
    at: float
    """Unix seconds."""
    kind: str
    """The event's kind: `snapshot.announced`, `step.committed` or `evaluation.finished`."""
    number: int
    """The learner step; of a snapshot or an evaluation its policy version."""
    line: Mapping[str, Any]
    """What the run log says of it (`lineage.run_log`); of a snapshot its version and `weights_digest`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What there is to draw at `number`, by the names of MLflow's charts."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run that a sink is opened for."""

    run_id: str
    run_dir: Path
    """The run's folder; what a sink keeps on this machine may lie there."""
    config: RunConfig


@dataclass(frozen=True, slots=True)
class RunEnd:
    """What is known when a sink is closed; the run may go on later, and is followed again then."""

    complete: bool = False
    """The run has trained its last step."""
    report: Path | None = None
    """The run's page, where it was written."""
    plots: Mapping[str, str] = field(default_factory=dict)
    """File name -> SVG."""
    deliveries: Sequence[VersionDeliveries] = ()
    """How versions came to the workers."""
    events: bytes = b""
    """The journal's events of a finished run, packed (`lineage.run_events`)."""


class Sink(Protocol):
    """One place that keeps what the log says; all calls come from one thread.

    Each may raise UnavailableError or OSError for an outage: it is repeated until it succeeds. ConfigError
    says that nothing more will be taken until somebody changes something, any other error of the product that
    these records are refused; then they are handed over one by one.

    Two members are left out where they are not needed. `place: str` names where the records are, once the
    sink is open: when it is not what it was, all of the log is handed over again. `release()` lets go of what
    the sink holds where `close` did not succeed.
    """

    @property
    def name(self) -> str:
        """What reports and its cursor's file call it: a-z, 0-9, _ and -, and no other sink has it."""

    def open(self) -> None:
        """Get ready, before the first `write`; what an earlier process wrote is still there."""

    def write(self, records: Sequence[LogRecord]) -> None:
        """Keep records, the oldest first; those that it has already change nothing."""

    def close(self, end: RunEnd) -> None:
        """Keep the last of it and let go."""


class LogSource(Protocol):
    """Where the events of a run's journal are read: its coordinator, or the journal of a run that rests."""

    def page(self, after_seq: int, wait_s: float) -> Sequence[Event]:
        """Return the next events after one, oldest first, waiting up to `wait_s` seconds for the first.

        Empty when there are none.

        Raises:
            UnavailableError: when the log cannot be read now.
            IntegrityError: when it can never be read.
        """

    def interrupt(self) -> None:
        """Let calls that wait return at once."""
