"""Journal store: what a journal asks of the place where it lies, and the rows that go there.

A store is given whole transactions to write and is used by one thread at a time. Each
opening of a store for writing has an epoch, greater than all before it; a store writes nothing
for an epoch that was overtaken. The same rows mean the same in SQLite, PostgreSQL and memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from antiphon.core.frozen import frozen


@frozen
class HistoryRow:
    """The completions of one prompt in one epoch, as the archive keeps them."""

    prompt_key: str
    epoch: int
    evaluated: bool
    """Whether the prompt is held out; `epoch` is then the version that was evaluated."""
    body: bytes


@frozen
class HistoryEdit:
    """What changes in the history; a row that is kept and gone is gone."""

    kept: tuple[HistoryRow, ...] = ()
    gone: tuple[tuple[str, int], ...] = ()
    """(prompt key, epoch) of rows to delete."""


@frozen
class StoredEvent:
    """One row of the journal."""

    seq: int
    at: float
    """Unix seconds, for display only."""
    kind: str
    body: str


@frozen
class StateRow:
    """The state of the run after one event, as `core.loop.state_codec` writes it."""

    seq: int
    form: str
    digest: str
    """blake3 of the body, 64 hex digits."""
    body: str


@frozen
class TrainedRow:
    """A step that was trained: the version it made and the groups it used up."""

    step: int
    version: int
    weights_digest: str
    batch_digest: str
    group_ids: tuple[str, ...]
    """In the order of the batch; a store takes each of them once, whatever the step."""


@frozen
class StoreTotals:
    """What a store counts by itself, to compare with the state that was folded from its events."""

    steps: int
    """Rows of committed steps; the newest version is their number."""
    trained_groups: int


@dataclass(slots=True)
class WriteBatch:
    """What one transaction will write."""

    events: list[StoredEvent] = field(default_factory=list)
    payloads: dict[str, bytes] = field(default_factory=dict)
    forgotten: dict[str, None] = field(default_factory=dict)
    """Names of payloads to delete; none of them is among `payloads`."""
    history: dict[tuple[str, int], HistoryRow | None] = field(default_factory=dict)
    """By prompt key and epoch, in the order of the edits; None: to be deleted."""
    trained: list[TrainedRow] = field(default_factory=list)
    snapshots: list[StateRow] = field(default_factory=list)
    entries: dict[tuple[str, int], str] = field(default_factory=dict)
    """By list and place: what was added to the lists of the state that only grow."""

    def keep(self, payloads: Mapping[str, bytes]) -> None:
        """Add payloads to write; what was to be deleted before is kept again."""
        for name, body in payloads.items():
            self.forgotten.pop(name, None)
            self.payloads[name] = body

    def forget(self, names: Iterable[str]) -> None:
        """Add payloads to delete, also those that were to be written."""
        for name in names:
            self.payloads.pop(name, None)
            self.forgotten[name] = None

    def edit(self, change: HistoryEdit) -> None:
        """Add what changes in the history; a later edit of the same row wins."""
        for row in change.kept:
            self.history.pop((row.prompt_key, row.epoch), None)
            self.history[row.prompt_key, row.epoch] = row
        for key in change.gone:
            self.history[key] = None


class Written(StrEnum):
    """How a transaction ended."""

    DONE = "done"
    OVERTAKEN = "overtaken"
    """Another process opened the store since; nothing was written and nothing ever will be."""


class JournalStore(Protocol):
    """Where one run's journal lies, open for writing by this process alone."""

    @property
    def place(self) -> str:
        """Return what errors call the place, without secrets."""

    @property
    def epoch(self) -> int:
        """Return the number of this opening."""

    def is_ours(self) -> bool:
        """Return whether no other process has opened the place since.

        Raises:
            UnavailableError: when it cannot be asked now.
        """

    def last_seq(self) -> int:
        """Return the number of the newest event, 0 for none."""

    def totals(self) -> StoreTotals:
        """Count what was trained."""

    def events(self, after: int, limit: int) -> list[StoredEvent]:
        """Return up to `limit` events with a number greater than `after`, in order."""

    def snapshots(self) -> list[StateRow]:
        """Return the snapshots of the state that are kept, newest first."""

    def entries(self, name: str, after: int, limit: int) -> list[str]:
        """Return the entries at `limit` places of a list of the state that only grows, from `after` on."""

    def history(self, after: int, limit: int) -> list[tuple[int, HistoryRow]]:
        """Return up to `limit` rows of history that were kept after row `after`, with their numbers."""

    def payload(self, name: str) -> bytes | None:
        """Return a payload, or None when it was forgotten or never there."""

    def write(self, batch: WriteBatch) -> Written:
        """Write everything in one transaction with a full sync, or nothing.

        A batch whose events are there already is not written twice: its first attempt had
        got through, and only the answer was lost.

        Raises:
            UnavailableError: when nothing could be written now; the same batch may be tried again.
            IntegrityError: when the batch contradicts what is there, such as a group trained twice.
        """

    def close(self) -> None:
        """Let go of the place, so that another process may open it."""


SNAPSHOTS_KEPT = 2
"""The newest is read; the one before it where the newest cannot be."""


def numbers_of(trained: Sequence[TrainedRow]) -> list[tuple[str, int, int]]:
    """Return (group id, step, place in the batch) of every group that was trained."""
    return [(group, row.step, place) for row in trained for place, group in enumerate(row.group_ids)]
