"""Reading a journal that no coordinator has open, without changing a byte of it.

Opening a journal for writing brings it to the present schema and fences others off. A command
that only looks must do neither.
"""

import json
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from antiphon.services.coordinator.journal.databases import sql_place

_ROWS = sa.text("SELECT seq, body FROM events WHERE seq > :after ORDER BY seq LIMIT 1000")
"""What every revision of the schema has."""


def event_bodies(place: Path | str, run_id: str) -> Generator[str]:
    """Yield the body of every event of a run's journal, as JSON, in order; nothing where there is none.

    Args:
        place: path of an SQLite file, or a URL postgresql://...
        run_id: the run.

    Raises:
        ConfigError: when a coordinator has it open, or the URL is none.
        IntegrityError: when it is damaged or no journal.
        UnavailableError: when its database cannot be reached.
    """
    database = sql_place(place, run_id)
    connection = None
    try:
        connection = database.connect_to_read()
        after = 0
        while connection and (rows := connection.execute(_ROWS, {"after": after}).all()):
            yield from (str(row.body) for row in rows)
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
