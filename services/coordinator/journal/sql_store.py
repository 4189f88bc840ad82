"""SQL store: a journal's rows in a relational database, the same for SQLite and PostgreSQL.

Every write is one transaction that first checks the epoch. What differs between the databases
(locks, sessions, sentences for errors) is in `databases`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError
from antiphon.services.coordinator.journal import schema
from antiphon.services.coordinator.journal.store import (
    SNAPSHOTS_KEPT,
    HistoryRow,
    JournalStore,
    StateRow,
    StoredEvent,
    StoreTotals,
    WriteBatch,
    Written,
    numbers_of,
)
from antiphon.system import failpoints

_T = TypeVar("_T")


class SqlPlace(Protocol):
    """One database, and how this process claims it."""

    name: str
    """What errors call the place, without secrets."""

    def connect(self) -> sa.Connection:
        """Claim the place and return a connection; called again after the connection was lost.

        Raises:
            ConfigError: when another process holds the place.
            UnavailableError: when it cannot be reached.
        """

    def connect_to_read(self) -> sa.Connection | None:
        """Return a connection that reads a place that no one holds, without writing; None without one.

        Raises:
            ConfigError: when a process holds the place.
            SQLAlchemyError: when it cannot be reached or read.
        """

    def explained(self, error: sa.exc.SQLAlchemyError) -> AntiphonError:
        """Return what an error of the database means."""

    def show_life(self) -> None:
        """Leave a sign that the holder of the place works, for a successor that waits; called after each use.

        Raises:
            IntegrityError: when what was used is no longer what has the place's name.
        """

    def release(self) -> None:
        """Let another process have the place."""


class Statement:
    """A statement of every transaction, translated once: that costs more than the database needs for it."""

    def __init__(self, dialect: sa.Dialect, statement: sa.Executable, *names: str) -> None:
        """`names` are its parameters, in the order in which rows bring them."""
        compiled = statement.compile(dialect=dialect, column_keys=list(names))  # type: ignore[attr-defined]
        self._text, self._names = str(compiled), names
        self._positional = bool(compiled.positiontup)
        assert not self._positional or tuple(compiled.positiontup) == names

    def run(self, connection: sa.Connection, rows: Sequence[tuple[Any, ...]] = ()) -> sa.CursorResult[Any]:
        """Run it for each row, or once where it has no parameters."""
        if rows and not self._positional:
            return connection.exec_driver_sql(
                self._text, [dict(zip(self._names, row, strict=True)) for row in rows]
            )
        return connection.exec_driver_sql(self._text, list(rows) or None)


class SqlStore(JournalStore):
    """A journal in a database, open for writing by this process alone."""

    def __init__(self, place: SqlPlace, run_id: str) -> None:
        """Claim the place, bring it to the present schema and raise its epoch.

        Raises:
            ConfigError: when another process holds it, or it belongs to another run.
            IntegrityError: when it is no journal, or another version wrote it.
            UnavailableError: when it cannot be reached or written.
        """
        self._place = place
        self._connection = place.connect()
        self._unsure = False
        """Whether the last write may have got through without our knowing."""
        try:
            with self._connection.begin():
                self._epoch = schema.prepare(self._connection, run_id, place.name)
        except sa.exc.SQLAlchemyError as error:
            self.close()
            raise place.explained(error) from error
        except AntiphonError:
            self.close()
            raise
        self._locks_rows = self._connection.dialect.name != "sqlite"
        insert = postgresql.insert if self._locks_rows else sqlite.insert
        upsert = insert(schema.payloads)
        upsert = upsert.on_conflict_do_update(index_elements=["name"], set_={"body": upsert.excluded.body})
        entry = insert(schema.state_entries)
        # Entries of a snapshot that could not be read are there already.
        self._grow = entry.on_conflict_do_update(
            index_elements=["name", "place"], set_={"body": entry.excluded.body}
        )
        payloads, history, dialect = schema.payloads, schema.history, self._connection.dialect
        same_row = sa.and_(
            history.c.prompt_key == sa.bindparam("gone_key"), history.c.epoch == sa.bindparam("gone_epoch")
        )
        self._read_epoch = Statement(dialect, schema.epoch_query(self._locks_rows))
        self._keep = Statement(dialect, upsert, "name", "body")
        self._forget = Statement(
            dialect, payloads.delete().where(payloads.c.name == sa.bindparam("gone")), "gone"
        )
        self._append = Statement(dialect, schema.events.insert(), "seq", "at", "kind", "body")
        self._drop_history = Statement(dialect, history.delete().where(same_row), "gone_key", "gone_epoch")
        self._keep_history = Statement(
            dialect, history.insert().inline(), "prompt_key", "epoch", "evaluated", "body"
        )

    @property
    def place(self) -> str:
        return self._place.name

    @property
    def epoch(self) -> int:
        return self._epoch

    def is_ours(self) -> bool:
        try:
            return self._read(lambda: schema.read_epoch(self._connection)) == self._epoch
        except ConfigError:  # the connection was lost, and another process has the place by now
            return False

    def last_seq(self) -> int:
        return self._read(self._last_seq)

    def totals(self) -> StoreTotals:
        def count(table: sa.Table) -> int:
            return self._connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()

        return self._read(lambda: StoreTotals(count(schema.steps), count(schema.trained)))

    def events(self, after: int, limit: int) -> list[StoredEvent]:
        table = schema.events
        query = sa.select(table).where(table.c.seq > after).order_by(table.c.seq).limit(limit)
        return self._read(lambda: [StoredEvent(*row) for row in self._connection.execute(query)])

    def snapshots(self) -> list[StateRow]:
        query = sa.select(schema.state_snapshots).order_by(schema.state_snapshots.c.seq.desc())
        return self._read(lambda: [StateRow(*row) for row in self._connection.execute(query)])

    def entries(self, name: str, after: int, limit: int) -> list[str]:
        table = schema.state_entries
        places = sa.and_(table.c.place >= after, table.c.place < after + limit)
        query = sa.select(table.c.body).where(table.c.name == name, places).order_by(table.c.place)
        return self._read(lambda: [body for (body,) in self._connection.execute(query)])

    def history(self, after: int, limit: int) -> list[tuple[int, HistoryRow]]:
        table = schema.history
        query = sa.select(table).where(table.c.seq > after).order_by(table.c.seq).limit(limit)
        return self._read(lambda: [(seq, HistoryRow(*row)) for seq, *row in self._connection.execute(query)])

    def payload(self, name: str) -> bytes | None:
        query = sa.select(schema.payloads.c.body).where(schema.payloads.c.name == name)
        return self._read(lambda: self._connection.execute(query).scalar_one_or_none())

    def write(self, batch: WriteBatch) -> Written:
        failpoints.reach("coordinator.commit.before")
        try:
            self._reconnect()
            with self._connection.begin():
                if self._read_epoch.run(self._connection).scalar_one() != self._epoch:
                    return Written.OVERTAKEN
                if not (self._unsure and batch.events and self._last_seq() >= batch.events[-1].seq):
                    self._insert(batch)
                failpoints.reach("coordinator.commit.inside")
        except ConfigError:
            return Written.OVERTAKEN
        except sa.exc.IntegrityError as error:
            raise IntegrityError(
                f"the journal {self.place} refuses what contradicts it ({_cause(error)}); "
                "keep it for an inquiry and start the run again"
            ) from error
        except sa.exc.SQLAlchemyError as error:
            self._unsure = True
            raise self._place.explained(error) from error
        self._unsure = False
        self._place.show_life()
        failpoints.reach("coordinator.commit.after")
        return Written.DONE

    def close(self) -> None:
        self._connection.close()
        self._connection.engine.dispose()
        self._place.release()

    def _insert(self, batch: WriteBatch) -> None:
        """Write inside the running transaction; payloads before the events that point at them."""
        run = self._connection.execute
        if batch.payloads:
            self._keep.run(self._connection, list(batch.payloads.items()))
        if batch.events:
            rows = [(event.seq, event.at, event.kind, event.body) for event in batch.events]
            self._append.run(self._connection, rows)
        if batch.entries:
            entries = [{"name": n, "place": at, "body": body} for (n, at), body in batch.entries.items()]
            run(self._grow, entries)
        if batch.snapshots:
            table = schema.state_snapshots
            run(table.insert(), [dataclasses.asdict(row) for row in batch.snapshots])
            newest = sa.select(table.c.seq).order_by(table.c.seq.desc()).limit(SNAPSHOTS_KEPT).subquery()
            oldest = sa.select(sa.func.min(newest.c.seq)).scalar_subquery()
            run(table.delete().where(table.c.seq < oldest))
        if batch.trained:
            run(schema.steps.insert(), [_step(row) for row in batch.trained])
        if numbers := numbers_of(batch.trained):
            places = [{"group_id": group, "step": step, "place": place} for group, step, place in numbers]
            run(schema.trained.insert(), places)
        if batch.forgotten:
            self._forget.run(self._connection, [(name,) for name in batch.forgotten])
        if batch.history:
            self._drop_history.run(self._connection, list(batch.history))
        kept = [row for row in batch.history.values() if row is not None]
        if kept:
            completions = [(row.prompt_key, row.epoch, row.evaluated, row.body) for row in kept]
            self._keep_history.run(self._connection, completions)

    def _last_seq(self) -> int:
        return self._connection.execute(sa.select(sa.func.max(schema.events.c.seq))).scalar() or 0

    def _read(self, query: Callable[[], _T]) -> _T:
        try:
            self._reconnect()
            with self._connection.begin():
                found = query()
            self._place.show_life()
            return found
        except sa.exc.SQLAlchemyError as error:
            raise self._place.explained(error) from error

    def _reconnect(self) -> None:
        """Claim the place again after the database went away; the epoch shows whether it is still ours."""
        if self._connection.invalidated or self._connection.closed:
            self._connection.close()
            self._connection = self._place.connect()


def _step(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("step", "version", "weights_digest", "batch_digest")}


def _cause(error: sa.exc.SQLAlchemyError) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split())
