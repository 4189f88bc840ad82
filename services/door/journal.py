"""Journal: what the door must find again: sessions, models, samplers, and every call with what came of it.

One SQLite file. What several callers write at one moment is one transaction, flushed once, and each
caller goes on when it is on the disk.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from antiphon.core.errors import UnavailableError
from antiphon.system.wakeup import Wakeup, end_tasks

Statement = tuple[str, tuple[Any, ...]]
Kind = Literal["session", "model", "sampler"]
Form = Literal["json", "protobuf", "error"]
"""Of an answer; an error is JSON."""
_TABLES = """
CREATE TABLE IF NOT EXISTS things (kind TEXT, id TEXT, said BLOB, PRIMARY KEY (kind, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS futures (
    id TEXT PRIMARY KEY, of TEXT, seq INTEGER, call TEXT, body BLOB, step INTEGER, form TEXT, answer BLOB,
    told_at REAL
);
"""


class Row(NamedTuple):
    """One call, as a restart finds it; body and answer stay in the file."""

    id: str
    of: str
    """Model or sampler; "" for neither."""
    seq: int
    call: str
    """Last part of its path."""
    step: int | None
    form: Form | None
    told_at: float | None
    """When a client first heard the answer, Unix seconds."""


def keep(kind: Kind, name: str, said: bytes) -> Statement:
    """Return what keeps a thing in place of what had its name."""
    return "INSERT OR REPLACE INTO things VALUES (?, ?, ?)", (kind, name, said)


def remove(kind: Kind, name: str) -> Statement:
    """Return what removes a thing."""
    return "DELETE FROM things WHERE kind = ? AND id = ?", (kind, name)


def begin(name: str, of: str, seq: int, call: str, body: bytes) -> Statement:
    """Return what keeps a call that has no answer yet."""
    columns = "(id, of, seq, call, body)"  # a row whose removal a full disk lost is replaced
    return f"INSERT OR REPLACE INTO futures {columns} VALUES (?, ?, ?, ?, ?)", (name, of, seq, call, body)


def stepping(name: str, step: int) -> Statement:
    """Return what notes which step a call makes."""
    return "UPDATE futures SET step = ? WHERE id = ?", (step, name)


def answer(name: str, form: Form, said: bytes) -> Statement:
    """Return what keeps the answer to a call."""
    return "UPDATE futures SET form = ?, answer = ? WHERE id = ?", (form, said, name)


def told(name: str, at: float) -> Statement:
    """Return what notes when an answer was first told."""
    return "UPDATE futures SET told_at = ? WHERE id = ?", (at, name)


def forget(name: str) -> Statement:
    """Return what removes a call and its answer."""
    return "DELETE FROM futures WHERE id = ?", (name,)


@dataclass(slots=True)
class _Waiting:
    statements: list[Statement] = field(default_factory=list)
    written: asyncio.Future[None] | None = None


class Journal:
    """The file of one home's door; `open_journal` makes one."""

    def __init__(self, path: Path) -> None:
        """Open the file, and make it where it is missing."""
        self._path, self._waiting, self._asked = path, _Waiting(), Wakeup()
        try:
            path.touch(mode=0o600)
            # Written by a thread of its own, read by the loop's: each has its own connection.
            self._writer = self._connect()
            self._writer.executescript(_TABLES)
            self._reader = self._connect()
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from error

    def things(self, kind: Kind) -> Iterator[bytes]:
        """Yield the things of a kind."""
        for (said,) in self._reader.execute("SELECT said FROM things WHERE kind = ?", (kind,)):
            yield said

    def rows(self) -> Iterator[Row]:
        """Yield the calls, those of each model in order."""
        names = ", ".join(Row._fields)
        yield from map(Row._make, self._reader.execute(f"SELECT {names} FROM futures ORDER BY of, seq"))

    def body(self, name: str) -> bytes:
        """Return what was asked."""
        return bytes(self._one("body", name))

    def answer(self, name: str) -> bytes:
        """Return what came of a call that has an answer."""
        return bytes(self._one("answer", name))

    def note(self, *statements: Statement) -> None:
        """Write something with what is written next; nobody waits for it."""
        self._waiting.statements += statements

    async def write(self, *statements: Statement) -> None:
        """Write something, and return when it is on the disk.

        Raises:
            UnavailableError: when the file cannot be written; nothing of it is then.
        """
        self._waiting.statements += statements
        if self._waiting.written is None:
            self._waiting.written = asyncio.get_running_loop().create_future()
            self._asked.notify()
        await asyncio.shield(self._waiting.written)

    async def serve(self, thread: ThreadPoolExecutor) -> None:
        """Write what is given, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            if self._waiting.written is None:
                await self._asked.wait(1.0)
            taken, self._waiting = self._waiting, _Waiting()
            if not taken.statements:
                continue
            try:
                await loop.run_in_executor(thread, self._commit, taken.statements)
            except UnavailableError as error:
                if taken.written is not None:
                    taken.written.set_exception(error)
            else:
                if taken.written is not None:
                    taken.written.set_result(None)

    def close(self) -> None:
        """Write what nobody waits for, and close the file."""
        self._commit(self._waiting.statements)
        self._reader.close()
        self._writer.close()

    def _commit(self, statements: list[Statement]) -> None:
        try:
            with self._writer:
                self._writer.execute("BEGIN")
                for text, values in statements:
                    self._writer.execute(text, values)
        except (sqlite3.Error, OverflowError, ValueError) as error:  # also of values that no row can have
            raise self._unusable(error) from error

    def _one(self, column: str, name: str) -> Any:
        found = self._reader.execute(f"SELECT {column} FROM futures WHERE id = ?", (name,)).fetchone()
        return found[0]

    def _connect(self) -> sqlite3.Connection:
        made = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=10.0)
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("PRAGMA synchronous=FULL")
        return made

    def _unusable(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self._path} cannot be used: {error}; free space, or give ANTIPHON_HOME another"
        )


@asynccontextmanager
async def open_journal(path: Path) -> AsyncIterator[Journal]:
    """Write a journal while the block lasts.

    Raises:
        UnavailableError: when the file cannot be used.
    """
    journal, thread = Journal(path), ThreadPoolExecutor(1, "door-journal")
    writing = asyncio.create_task(journal.serve(thread))
    try:
        yield journal
    finally:
        await end_tasks(writing)
        thread.shutdown()
        journal.close()
