"""Journal: an append-only event log on SQLite; what was acknowledged is on the disk.

One process owns a journal. Events get their number when they are enqueued, in the order in
which the state saw them; a writer thread puts everything that waits into one transaction with a
full sync, so concurrent requests share the cost. A payload stands in the transaction of its
event, so that no event ever points at a missing one. The history for drafts stands beside the log.
"""

import asyncio
import dataclasses
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.core.events import JournalEvent, dump_event, load_event
from antiphon.services.coordinator.signals import Signal

SCHEMA_VERSION = 1
"""Raised when an older coordinator could misread the journal."""

_tables = sa.MetaData()
_meta = sa.Table(
    "meta",
    _tables,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
_events = sa.Table(
    "events",
    _tables,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
_payloads = sa.Table(
    "payloads",
    _tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
_history = sa.Table(
    "history",
    _tables,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("prompt_key", sa.Text, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("evaluated", sa.Boolean, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("prompt_key", "epoch"),
)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """The completions of one prompt in one epoch, as the archive keeps them."""

    prompt_key: str
    epoch: int
    evaluated: bool
    """Whether the prompt is held out; `epoch` is then the version that was evaluated."""
    body: bytes


@dataclass(frozen=True, slots=True)
class HistoryEdit:
    """What changes in the history; a row that is kept and gone is gone."""

    kept: tuple[HistoryRow, ...] = ()
    gone: tuple[tuple[str, int], ...] = ()
    """(prompt key, epoch) of rows to delete."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One row of the journal."""

    seq: int
    at: float
    """Unix seconds, for display only."""
    kind: str
    body: str


@dataclass(slots=True)
class _Batch:
    """What one transaction will write."""

    events: list[dict[str, Any]] = field(default_factory=list)
    payloads: dict[str, bytes] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    history: dict[tuple[str, int], HistoryRow | None] = field(default_factory=dict)
    """By prompt key and epoch, in the order of the edits; None: to be deleted."""
    done: "asyncio.Future[None] | None" = None


def _wall_clock() -> float:
    return datetime.now(UTC).timestamp()


class Journal:
    """The journal of one run, open for writing by this process alone."""

    def __init__(self, path: Path, run_id: str, wall_clock: Callable[[], float] = _wall_clock) -> None:
        """Open or create the journal.

        Args:
            path: the database file; its folder must exist.
            run_id: the run that the journal must belong to.
            wall_clock: Unix seconds, for display.

        Raises:
            ConfigError: when another process has it open, or it belongs to another run.
            IntegrityError: when the file is no journal or of another schema version.
            UnavailableError: when it cannot be written.
        """
        self._path = path
        self._wall_clock = wall_clock
        self._lock = _lock(path, run_id)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending = _Batch()
        self._flushing: asyncio.Task[None] | None = None
        self.failure: AntiphonError | None = None
        """Why nothing can be written any more, or None."""
        self.on_failure: Callable[[AntiphonError], None] | None = None
        """Told once when writing failed."""
        self.grown = Signal()
        """Notified when events reached the disk."""
        self._writing: asyncio.Future[None] | None = None
        try:
            self._connection = self._thread.submit(_connect, path, run_id).result()
            self._next_seq = self._thread.submit(self._last_seq).result() + 1
        except AntiphonError:
            self._thread.shutdown()
            self._lock.close()
            raise

    @property
    def empty(self) -> bool:
        """Tell whether nothing was ever recorded."""
        return self._next_seq == 1

    def replay(self) -> Iterator[JournalEvent]:
        """Yield every event in order; call it before anything is appended."""
        after = 0
        while rows := self._thread.submit(self._rows, after, 1000).result():
            for row in rows:
                yield load_event(row.kind, row.body)
            after = rows[-1].seq

    def history(self) -> Iterator[HistoryRow]:
        """Yield the history in the order in which it was kept; call it before anything is appended."""
        after = 0
        while rows := self._thread.submit(self._history_rows, after, 100).result():
            yield from (row for _, row in rows)
            after = rows[-1][0]

    def enqueue(
        self,
        events: Sequence[JournalEvent],
        payloads: Mapping[str, bytes] | None = None,
        forget: Sequence[str] = (),
        history: HistoryEdit | None = None,
    ) -> "asyncio.Future[None]":
        """Take events for the next transaction; await the result to know that they are on disk.

        With nothing to write, the result says when everything enqueued before is on disk. Giving
        up waiting never disturbs others who wait for the same transaction.

        Args:
            events: facts, in order.
            payloads: bodies to keep, by name, in the same transaction.
            forget: names of payloads to delete in the same transaction.
            history: what changes in the history in the same transaction.

        Raises:
            AntiphonError: when an earlier write failed; the journal takes nothing after that.
        """
        if self.failure is not None:
            raise self.failure
        loop = asyncio.get_running_loop()
        if not (events or payloads or forget or history):
            last = self._pending.done or self._writing
            if last is None:
                last = loop.create_future()
                last.set_result(None)
            return asyncio.shield(last)
        batch = self._pending
        at = self._wall_clock()
        for event in events:
            batch.events.append(
                {"seq": self._next_seq, "at": at, "kind": event.kind, "body": dump_event(event)}
            )
            self._next_seq += 1
        batch.payloads.update(payloads or {})
        batch.forgotten.extend(forget)
        _edit(batch.history, history or HistoryEdit())
        if batch.done is None:
            batch.done = loop.create_future()
            batch.done.add_done_callback(_observe)
        if self._flushing is None:
            self._flushing = loop.create_task(self._flush())
        return asyncio.shield(batch.done)

    async def payload(self, name: str) -> bytes | None:
        """Return a kept payload, or None when it was forgotten or never there."""
        return await self._in_thread(self._read_payload, name)

    async def read(self, after_seq: int, limit: int) -> list[StoredEvent]:
        """Return up to `limit` events with a number greater than `after_seq`, from the disk."""
        return await self._in_thread(self._rows, after_seq, limit)

    async def close(self) -> None:
        """Write what waits, then let go of the file."""
        if self._flushing is not None:
            await self._flushing
        await self._in_thread(self._connection.close)
        await self._in_thread(self._connection.engine.dispose)
        self._thread.shutdown()
        self._lock.close()

    async def _flush(self) -> None:
        try:
            while self._pending.done is not None:
                batch, self._pending = self._pending, _Batch()
                assert batch.done is not None
                self._writing = batch.done
                try:
                    await self._in_thread(self._write, batch)
                except AntiphonError as error:
                    self._fail(error, batch)
                    return
                batch.done.set_result(None)
                self.grown.notify()
        finally:
            self._flushing = self._writing = None

    def _fail(self, error: AntiphonError, batch: _Batch) -> None:
        self.failure = error
        for waiting in (batch.done, self._pending.done):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
        self._pending = _Batch()
        if self.on_failure is not None:
            self.on_failure(error)
        self.grown.notify()

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _write(self, batch: _Batch) -> None:
        rows = [{"name": name, "body": body} for name, body in batch.payloads.items()]
        gone = [{"gone": name} for name in batch.forgotten]
        try:
            with self._connection.begin():
                if rows:
                    self._connection.execute(_payloads.insert().prefix_with("OR REPLACE"), rows)
                if batch.events:
                    self._connection.execute(_events.insert(), batch.events)
                if gone:
                    forget = _payloads.delete().where(_payloads.c.name == sa.bindparam("gone"))
                    self._connection.execute(forget, gone)
                self._write_history(batch.history)
        except sa.exc.SQLAlchemyError as error:
            raise _in_words(error, self._path) from error

    def _write_history(self, edits: Mapping[tuple[str, int], HistoryRow | None]) -> None:
        """Write inside the running transaction."""
        if edits:
            same_key = _history.c.prompt_key == sa.bindparam("gone_key")
            same_epoch = _history.c.epoch == sa.bindparam("gone_epoch")
            gone = [{"gone_key": key, "gone_epoch": epoch} for key, epoch in edits]
            self._connection.execute(_history.delete().where(same_key, same_epoch), gone)
        if kept := [dataclasses.asdict(row) for row in edits.values() if row is not None]:
            self._connection.execute(_history.insert(), kept)

    def _history_rows(self, after: int, limit: int) -> list[tuple[int, HistoryRow]]:
        query = sa.select(_history).where(_history.c.seq > after).order_by(_history.c.seq).limit(limit)
        try:
            with self._connection.begin():
                return [(seq, HistoryRow(*row)) for seq, *row in self._connection.execute(query)]
        except sa.exc.SQLAlchemyError as error:
            raise _in_words(error, self._path) from error

    def _rows(self, after: int, limit: int) -> list[StoredEvent]:
        query = sa.select(_events).where(_events.c.seq > after).order_by(_events.c.seq).limit(limit)
        try:
            with self._connection.begin():
                return [StoredEvent(*row) for row in self._connection.execute(query)]
        except sa.exc.SQLAlchemyError as error:
            raise _in_words(error, self._path) from error

    def _read_payload(self, name: str) -> bytes | None:
        query = sa.select(_payloads.c.body).where(_payloads.c.name == name)
        try:
            with self._connection.begin():
                return self._connection.execute(query).scalar_one_or_none()
        except sa.exc.SQLAlchemyError as error:
            raise _in_words(error, self._path) from error

    def _last_seq(self) -> int:
        with self._connection.begin():
            return self._connection.execute(sa.select(sa.func.max(_events.c.seq))).scalar() or 0


def _edit(edits: dict[tuple[str, int], HistoryRow | None], change: HistoryEdit) -> None:
    for row in change.kept:
        edits.pop((row.prompt_key, row.epoch), None)
        edits[row.prompt_key, row.epoch] = row
    for key in change.gone:
        edits[key] = None


def _observe(future: "asyncio.Future[None]") -> None:
    """Mark a failure as seen: callers that do not wait for the disk hear of it on their next call."""
    if not future.cancelled():
        future.exception()


def _lock(path: Path, run_id: str) -> Any:
    lock_path = path.with_suffix(".lock")
    try:
        lock = open(lock_path, "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the journal
    except OSError as error:
        raise UnavailableError(
            f"the journal of run {run_id} cannot be opened in {path.parent}: {error.strerror}; "
            "check that the folder exists and may be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(
            f"run {run_id} already has a coordinator (process {owner} holds {path.name}); "
            "use that one, or stop it first"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _connect(path: Path, run_id: str) -> sa.Connection:
    engine = sa.create_engine(
        f"sqlite:///{path}",
        poolclass=sa.pool.NullPool,
        connect_args={"check_same_thread": False, "timeout": 10.0},
    )
    try:
        connection = engine.connect()
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        connection.exec_driver_sql("PRAGMA synchronous=FULL")
        connection.commit()
        with connection.begin():
            _tables.create_all(connection)
            known = {str(row.key): str(row.value) for row in connection.execute(sa.select(_meta))}
            if not known:
                rows = {"schema_version": str(SCHEMA_VERSION), "run_id": run_id}
                connection.execute(_meta.insert(), [{"key": k, "value": v} for k, v in rows.items()])
                known = rows
    except sa.exc.SQLAlchemyError as error:
        raise _in_words(error, path) from error
    if known.get("schema_version") != str(SCHEMA_VERSION):
        raise IntegrityError(
            f"the journal {path} has schema version {known.get('schema_version')}, but this coordinator "
            f"reads version {SCHEMA_VERSION}; use the version of Antiphon that wrote it"
        )
    if known.get("run_id") != run_id:
        raise ConfigError(
            f"the journal {path} belongs to run {known.get('run_id')!r}, not to {run_id!r}; "
            "give the run its own folder"
        )
    return connection


def _in_words(error: sa.exc.SQLAlchemyError, path: Path) -> AntiphonError:
    cause = str(getattr(error, "orig", None) or error)
    if "full" in cause or "disk I/O" in cause:
        return UnavailableError(
            f"no space is left for the journal {path} ({cause}); free some, then start the same run "
            "again: it goes on where it stopped"
        )
    if "readonly" in cause or "unable to open" in cause:
        return UnavailableError(
            f"the journal {path} cannot be written ({cause}); check that its folder exists and may be written"
        )
    if "not a database" in cause or "malformed" in cause:
        return IntegrityError(f"{path} is damaged or no journal ({cause}); restore it from a copy")
    return UnavailableError(f"the journal {path} cannot be used: {cause}; start the run again")
