"""Kept: what took time or money to make, by the digest of all that decides it, in a file of SQLite.

So nothing is made twice, also after a restart. Several processes read and write at once, the first row of a
name stays, and killing one loses none that `add` took; a machine without power loses the last ones.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from antiphon.core.errors import UnavailableError

WAIT_S = 10.0
"""Longest wait for another process that writes."""
_Row = TypeVar("_Row", bound=NamedTuple)


class Kept(Generic[_Row]):
    """The table of one kind of rows; a context that closes its file.

    Raises:
        UnavailableError: from each method, when the file cannot be used.
    """

    def __init__(self, path: Path | None, table: str, kind: type[_Row]) -> None:
        """Open a table, and make it where it is missing; None keeps it in memory."""
        self._place, self._kind = path or ":memory:", kind
        names = ", ".join(kind._fields)
        self._find = f"SELECT {names} FROM {table} WHERE digest = ?"
        marks = ", ?" * len(kind._fields)
        changed = ", ".join(f"{name} = excluded.{name}" for name in kind._fields)
        same = " AND ".join(f"{name} IS ?" for name in kind._fields)
        self._add = f"INSERT INTO {table} (digest, {names}) VALUES (?{marks}) ON CONFLICT (digest) DO "
        self._replace = f"{self._add} UPDATE SET {changed} WHERE {same}"
        with self._usable():
            if path is not None:
                path.touch(mode=0o600)
            self._file = sqlite3.connect(self._place, timeout=WAIT_S, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute(
                f"CREATE TABLE IF NOT EXISTS {table} (digest PRIMARY KEY, {names}) WITHOUT ROWID"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def find(self, digest: str) -> _Row | None:
        """Return the row of this name."""
        with self._usable():
            row = self._file.execute(self._find, (digest,)).fetchone()
        return None if row is None else self._kind._make(row)

    def add(self, digest: str, row: _Row, over: _Row | None = None) -> None:
        """Keep a row, the first of a name, or in place of `over`, where that is what is kept."""
        with self._usable():
            if over is None:
                self._file.execute(f"{self._add} NOTHING", (digest, *row))
            else:
                self._file.execute(self._replace, (digest, *row, *over))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise UnavailableError(f"{self._place} cannot be used: {error}") from error
