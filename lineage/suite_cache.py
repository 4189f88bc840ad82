"""Suite cache: every sample of a suite that was ever drawn on this machine, by what decided its tokens.

A key is the digest of a version's weights, a suite's file and how it was sampled; a sample is found by key,
item and number. One that is there is never drawn again: each is committed as soon as it is whole, by the
worker that drew it, and a second one of the same place is refused. Several workers write at once.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from antiphon.core.errors import IntegrityError, UnavailableError

WAIT_S = 60.0
"""Longest wait for another process that writes."""
_TABLES = """
create table if not exists suites (
    key text primary key, file text not null, file_digest text not null, facts text not null);
create table if not exists samples (
    key text not null, item integer not null, sample integer not null, tokens blob not null,
    finish text not null, primary key (key, item, sample)) without rowid;
"""


@dataclass(frozen=True, slots=True)
class SuiteSample:
    """One completion of an item."""

    item: int
    sample: int
    tokens: tuple[int, ...]
    finish: str
    """As `FinishReason` says it."""


class SuiteCache:
    """The database of a home's suites; a context that closes it."""

    def __init__(self, path: Path) -> None:
        """Open it, and make it where it is missing.

        Raises:
            UnavailableError: when it cannot be opened.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained():
            self._database = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
            self._database.execute("pragma journal_mode = wal")
            self._database.executescript(_TABLES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def register(self, key: str, file: str, file_digest: str, facts: Mapping[str, Any]) -> str | None:
        """Note what a key stands for; return the digest that its file had last, where that was another."""
        with self._explained():
            last = self._database.execute(
                "select file_digest from suites where file = ? order by rowid desc limit 1", (file,)
            ).fetchone()
            row = key, file, file_digest, json.dumps(facts, sort_keys=True)
            self._database.execute("insert or replace into suites values (?, ?, ?, ?)", row)
        return None if last is None or last[0] == file_digest else str(last[0])

    def places(self, key: str) -> set[tuple[int, int]]:
        """Return item and number of every sample of a key."""
        with self._explained():
            return set(self._database.execute("select item, sample from samples where key = ?", (key,)))

    def count(self) -> int:
        """Return how many samples there are, of all keys."""
        with self._explained():
            return int(self._database.execute("select count(*) from samples").fetchone()[0])

    def add(self, samples: Iterable[tuple[str, SuiteSample]]) -> None:
        """Commit samples, each with its key.

        Raises:
            IntegrityError: when one is there already.
        """
        rows = [
            (key, one.item, one.sample, np.asarray(one.tokens, np.int32).tobytes(), one.finish)
            for key, one in samples
        ]
        with self._explained(), self._database:
            self._database.execute("begin immediate")
            self._database.executemany("insert into samples values (?, ?, ?, ?, ?)", rows)

    def samples(self, key: str) -> list[SuiteSample]:
        """Return the samples of a key, by item and number."""
        with self._explained():
            rows = self._database.execute(
                "select item, sample, tokens, finish from samples where key = ? order by item, sample", (key,)
            ).fetchall()
        return [
            SuiteSample(item, number, tuple(np.frombuffer(tokens, np.int32).tolist()), finish)
            for item, number, tokens, finish in rows
        ]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise IntegrityError(f"{self._path}: a sample was drawn twice ({error})") from error
        except sqlite3.Error as error:
            raise UnavailableError(
                f"{self._path} cannot be used ({error}); make room, or remove it"
            ) from error
