"""Reading a journal that no coordinator has open, without changing a byte of it.

Opening a journal for writing brings it to the present schema and fences others off. A command that only
looks must do neither. A finished run can also be asked through a journal that is made of its recorded events:
the file that the ledger keeps, which lacks payloads and history.
"""

import json
from collections.abc import Generator, Iterable
from contextlib import closing
from itertools import islice
from pathlib import Path

import sqlalchemy as sa

from antiphon.core.errors import IntegrityError
from antiphon.core.status import Event
from antiphon.lineage.run_events import read_events
from antiphon.services.coordinator.journal.databases import open_sql_store, sql_place
from antiphon.services.coordinator.journal.store import StoredEvent, TrainedRow, WriteBatch

PAGE_EVENTS = 1000
_ROWS = sa.text("SELECT seq, at, kind, body FROM events WHERE seq > :after ORDER BY seq LIMIT 1000")
"""What every revision of the schema has."""


class JournalLog:
    """The log of a run that rests, as `antiphon.api.sink.LogSource`."""

    def __init__(self, place: Path | str, run_id: str) -> None:
        """Name the journal, as for `events_of`; nothing is opened yet."""
        self._place, self._run_id = place, run_id

    def page(self, after_seq: int, wait_s: float) -> list[Event]:
        """Return the next events after one; nothing is waited for, since nothing more comes."""
        with closing(events_of(self._place, self._run_id, after_seq)) as events:
            return list(islice(events, PAGE_EVENTS))

    def interrupt(self) -> None:
        """Do nothing: no call waits."""


def event_bodies(place: Path | str, run_id: str) -> Generator[str]:
    """Yield the body of every event, as JSON; see `events_of`."""
    with closing(events_of(place, run_id)) as events:
        yield from (event.data_json for event in events)


def events_of(place: Path | str, run_id: str, after_seq: int = 0) -> Generator[Event]:
    """Yield the events of a run's journal after one, in order; nothing where there is no journal.

    Args:
        place: path of an SQLite file, or a URL postgresql://...
        run_id: the run.
        after_seq: number of the event before the first.

    Raises:
        ConfigError: when a coordinator has it open, or the URL is none.
        IntegrityError: when it is damaged or no journal.
        UnavailableError: when its database cannot be reached.
    """
    database = sql_place(place, run_id)
    connection = None
    try:
        connection = database.connect_to_read()
        after = after_seq
        while connection and (rows := connection.execute(_ROWS, {"after": after}).all()):
            yield from (Event(row.seq, row.at, row.kind, str(row.body)) for row in rows)
            after = rows[-1].seq
    except sa.exc.SQLAlchemyError as error:
        raise database.explained(error) from error
    finally:
        if connection is not None:
            connection.close()
        database.release()


def opened_with(place: Path | str, run_id: str) -> tuple[dict[str, str], bool]:
    """Return what a run was opened with, and whether it has committed a step; ({}, False) without a journal.

    Raises:
        ConfigError, IntegrityError, UnavailableError: as for `event_bodies`.
    """
    with closing(event_bodies(place, run_id)) as bodies:
        opened = next(bodies, None)
        pinned = {} if opened is None else json.loads(opened)["pinned"]
        return pinned, any('"batch_digest"' in body for body in bodies)


def make_journal(place: Path, run_id: str, recorded: bytes) -> None:
    """Write the journal of a run from its recorded events.

    Args:
        place: path of the SQLite file; there must be none.
        run_id: the run.
        recorded: what `lineage.run_events.pack_events` made.

    Raises:
        IntegrityError: when the bytes are no recorded events, or contradict themselves.
        UnavailableError: when it cannot be written.
    """
    events = [StoredEvent(e.seq, e.at, e.kind, e.data_json) for e in read_events(recorded)]
    if not events:
        raise IntegrityError("the recorded events are none at all; take another copy of them")
    store = open_sql_store(place, run_id)
    try:
        store.write(WriteBatch(events=events, trained=_trained(events)))
    finally:
        store.close()


def _trained(events: Iterable[StoredEvent]) -> list[TrainedRow]:
    """Return the rows of committed steps, as the coordinator wrote them beside the events."""
    groups: dict[int, tuple[str, ...]] = {}
    found = []
    for event in events:
        if event.kind == "batch.sealed":
            sealed = json.loads(event.body)
            groups[sealed["step"]] = tuple(sealed["group_ids"])
        elif event.kind == "step.committed":
            step = json.loads(event.body)
            if step["step"] not in groups:
                raise IntegrityError(f"the recorded events commit step {step['step']} before its batch")
            digests = step["weights_digest"], step["batch_digest"]
            found.append(TrainedRow(step["step"], step["version"], *digests, groups[step["step"]]))
    return found
