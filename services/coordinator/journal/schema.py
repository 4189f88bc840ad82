"""SQL schema: the tables of a journal, in SQLite and in PostgreSQL, and who may write.

A new journal gets all of its tables in the transaction that opens it, or none. The same transaction raises
the epoch, so that an earlier opener is fenced off: every commit checks the epoch.
"""

from typing import Any

import sqlalchemy as sa

from antiphon.core.errors import ConfigError, IntegrityError

SCHEMA = "r1"
"""Name of these tables, in the row `schema` of `meta`; older journals have it in a table of Alembic's."""

tables = sa.MetaData()
_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")

meta = sa.Table(
    "meta",
    tables,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
events = sa.Table(
    "events",
    tables,
    sa.Column("seq", _number, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
payloads = sa.Table(
    "payloads",
    tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
history = sa.Table(
    "history",
    tables,
    sa.Column("seq", _number, primary_key=True),
    sa.Column("prompt_key", sa.Text, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("evaluated", sa.Boolean, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("prompt_key", "epoch"),
)
fence = sa.Table(
    "fence",
    tables,
    sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", _number, nullable=False),
)
steps = sa.Table(
    "steps",
    tables,
    sa.Column("step", _number, primary_key=True, autoincrement=False),
    sa.Column("version", _number, nullable=False, unique=True),
    sa.Column("weights_digest", sa.Text, nullable=False),
    sa.Column("batch_digest", sa.Text, nullable=False),
)
trained = sa.Table(
    "trained",
    tables,
    sa.Column("group_id", sa.Text, primary_key=True),
    sa.Column("step", _number, sa.ForeignKey("steps.step"), nullable=False),
    sa.Column("place", sa.Integer, nullable=False),
)
state_snapshots = sa.Table(
    "state_snapshots",
    tables,
    sa.Column("seq", _number, primary_key=True, autoincrement=False),
    sa.Column("form", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
state_entries = sa.Table(
    "state_entries",
    tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("place", _number, primary_key=True, autoincrement=False),
    sa.Column("body", sa.Text, nullable=False),
)


def prepare(connection: sa.Connection, run_id: str, place: str) -> int:
    """Make the tables of a new journal, check whose it is and raise its epoch; call it inside a transaction.

    Args:
        connection: to the place, with its transaction begun.
        run_id: the run that the journal must belong to.
        place: how errors name it.

    Returns:
        The epoch of this opening.

    Raises:
        ConfigError: when the journal belongs to another run.
        IntegrityError: when another version of the schema wrote it.
    """
    present = set(sa.inspect(connection).get_table_names())
    known = _read_meta(connection) if "meta" in present else {}
    name = known.get("schema") or (_revision(connection) if "alembic_version" in present else None)
    if name != SCHEMA and (name or known):
        raise IntegrityError(
            f"the journal {place} has schema {name or 'of no name'}, but this coordinator reads "
            f"{SCHEMA}; use the version of Antiphon that wrote it"
        )
    if known and known.get("run_id") != run_id:
        raise ConfigError(
            f"the journal {place} belongs to run {known.get('run_id')!r}, not to {run_id!r}; "
            "give the run its own folder"
        )
    if name is None:
        tables.create_all(connection, checkfirst=False)  # a table that is there is another program's
        connection.execute(
            meta.insert(), [{"key": "run_id", "value": run_id}, {"key": "schema", "value": SCHEMA}]
        )
    return _raise_epoch(connection)


def epoch_query(share: bool) -> sa.Select[Any]:
    """Ask for the epoch; with `share`, no one raises it before the running transaction ends."""
    query = sa.select(fence.c.epoch)
    return query.with_for_update(read=True) if share else query


def read_epoch(connection: sa.Connection) -> int:
    """Return the epoch of the newest opening."""
    return int(connection.execute(epoch_query(share=False)).scalar_one())


def _raise_epoch(connection: sa.Connection) -> int:
    if not connection.execute(fence.update().values(epoch=fence.c.epoch + 1)).rowcount:
        connection.execute(fence.insert().values(one=1, epoch=1))
    return read_epoch(connection)


def _read_meta(connection: sa.Connection) -> dict[str, str]:
    return {str(row.key): str(row.value) for row in connection.execute(sa.select(meta))}


def _revision(connection: sa.Connection) -> str | None:
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
