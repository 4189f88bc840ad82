"""State snapshots: the fold of the journal's events, kept in the journal every this many of them.

A restart reads the newest snapshot and the events after it, so it takes as long after ten million
events as after ten thousand. A snapshot stands in the transaction of its last event; whatever is wrong
with it, the events are the truth, and the state is folded from them again.
"""

import structlog

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.core.loop.run_state import RunState
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.journal.state_codec import (
    FORM,
    StateDump,
    dump_entries,
    dump_state,
    load_state,
)
from antiphon.services.coordinator.journal.store import StateRow

SNAPSHOT_EVERY = 20_000
"""Events between two snapshots; a restart folds this many within half a second."""
PARTS = 20
"""Of the events between two snapshots: after each, what became final is written, so that no call pays
for all of it."""

_log = structlog.get_logger("coordinator")


class StateSnapshots:
    """The snapshots of one run's state."""

    def __init__(self, journal: Journal, state: RunState, every: int = SNAPSHOT_EVERY) -> None:
        self._journal, self._state, self._every = journal, state, every
        self._seq = self._part = 0
        """The last event of the newest snapshot, and of the newest part."""
        self._known: dict[str, int] = {}
        """How many entries of each growing list the journal has."""

    def restore(self) -> int:
        """Make the state that of the newest snapshot that can be read; return the number of its last event.

        Without one the state stays as it is, and the number is 0.
        """
        for row in self._journal.snapshots():
            try:
                self._known = self._load(row)
            except IntegrityError as error:
                _log.warning("state_snapshot.unreadable", seq=row.seq, reason=str(error))
            else:
                self._seq = row.seq
                return row.seq
        return 0

    def due(self, events: int) -> StateDump | None:
        """Return what is to be kept with the last of this many events, or None while it is too early."""
        seq = self._journal.last_seq + events
        if not events or seq - max(self._seq, self._part) < max(1, self._every // PARTS):
            return None
        whole = seq - self._seq >= self._every
        dump = (dump_state if whole else dump_entries)(self._state, self._known)
        self._part = seq
        if whole:
            self._seq = seq
        for name, place, _ in dump.entries:
            self._known[name] = place + 1
        return dump

    def _load(self, row: StateRow) -> dict[str, int]:
        if row.form != FORM:
            raise IntegrityError(f"another version wrote it (form {row.form}, not {FORM})")
        if digest_bytes(row.body.encode()) != row.digest or row.seq > self._journal.last_seq:
            raise IntegrityError("it is damaged")
        return load_state(row.body, self._journal.entries, self._state)
