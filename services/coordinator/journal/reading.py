"""Reading a journal that no coordinator has open, without changing a byte of it.

Opening a journal for writing brings it to the present schema and fences others off. A command
that only looks must do neither.
"""

import json
from collections.abc import Generator
from contextlib import closing
from itertools import islice
from pathlib import Path

import sqlalchemy as sa

from antiphon.core.status import Event
from antiphon.services.coordinator.journal.databases import sql_place

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
