"""Judgements: what a model that judges said of each answer, and what it cost, in a file of the run's folder.

They are kept by the digest of all that they depend on, so that no score is paid for twice, also after a
restart. Asked for again is a reply that came when its process was killed, and one without a score: its cost
is kept, but what was wrong with the server may be mended.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from antiphon.core.errors import UnavailableError
from antiphon.core.reporting.shortcuts import Differences

JUDGEMENTS_FILE = "judgements.sqlite"
WAIT_S = 10.0
"""Longest wait for another process that writes."""
_ORDER = "In the other order of reference and response the judge gave {} more"
_TABLE = """CREATE TABLE IF NOT EXISTS judgements (
    digest TEXT PRIMARY KEY, other_order_of TEXT NOT NULL, share REAL, reply TEXT NOT NULL,
    failure TEXT NOT NULL, tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL,
    requests INTEGER NOT NULL, seconds REAL NOT NULL, usd REAL NOT NULL) WITHOUT ROWID"""
_ADD = """INSERT INTO judgements VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO UPDATE SET
    share = excluded.share, reply = excluded.reply, failure = excluded.failure,
    tokens_in = tokens_in + excluded.tokens_in, tokens_out = tokens_out + excluded.tokens_out,
    requests = requests + excluded.requests, seconds = seconds + excluded.seconds, usd = usd + excluded.usd
    WHERE share IS NULL"""
_SUMS = """SELECT count(*), sum(share IS NULL), sum(requests), sum(tokens_in + tokens_out), sum(usd),
    sum(seconds) FROM judgements"""
_PAIRS = """SELECT b.share - a.share FROM judgements b JOIN judgements a ON a.digest = b.other_order_of
    WHERE a.share IS NOT NULL AND b.share IS NOT NULL ORDER BY a.digest"""


class Judgement(NamedTuple):
    """What a model said of an answer, in the order of the table; sums are those of all its requests."""

    share: float | None
    """The way through the judge's scale, 0..1; None where the reply has no score."""
    reply: str
    """The last one."""
    failure: str
    """Why there is no score; empty with one."""
    tokens_in: int
    tokens_out: int
    requests: int
    """Those that were answered."""
    seconds: float
    usd: float


class Judgements:
    """The judgements of a run; None as a path keeps them in memory.

    Raises:
        UnavailableError: from each method, when the file cannot be used.
    """

    def __init__(self, path: Path | None = None) -> None:
        with _usable():
            if path is not None:
                path.touch(mode=0o600)
            self._file = sqlite3.connect(path or ":memory:", timeout=WAIT_S, isolation_level=None)
            # Without a flush for each: a killed process loses nothing, a machine without power the last ones.
            for order in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", _TABLE):
                self._file.execute(order)

    def find(self, digest: str) -> Judgement | None:
        """Return the judgement of this name, if it has a score."""
        with _usable():
            query = "SELECT * FROM judgements WHERE digest = ? AND share IS NOT NULL"
            row = self._file.execute(query, (digest,)).fetchone()
        return None if row is None else Judgement(*row[2:])

    def add(self, digest: str, judgement: Judgement, other_order_of: str = "") -> None:
        """Keep a judgement, the first with a score; `other_order_of` names the one in the usual order."""
        with _usable():
            self._file.execute(_ADD, (digest, other_order_of, *judgement))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def judgement_lines(run_dir: Path) -> list[str]:
    """Say how many judgements a model gave in a run, what they cost, and what another order changed."""
    path, order = run_dir / JUDGEMENTS_FILE, Differences()
    if not path.is_file():
        return []
    try:
        url = f"file:{quote(str(path.absolute()))}?mode=ro"
        with contextlib.closing(sqlite3.connect(url, timeout=WAIT_S, uri=True)) as file:
            count, failed, requests, tokens, usd, seconds = file.execute(_SUMS).fetchone()
            for (difference,) in file.execute(_PAIRS):
                order.add(difference)
    except sqlite3.Error as error:
        return [f"{JUDGEMENTS_FILE} cannot be read: {error}"]
    if not count:
        return []
    said = (
        f"A model gave {count:,} judgements in {requests:,} requests of {seconds / requests:.2f} s, for "
        f"{tokens:,} tokens and ${usd:,.2f}; {failed:,} have no score."
    )
    return [said, *order.lines(_ORDER, "answers that were judged twice")]


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise UnavailableError(f"{JUDGEMENTS_FILE} in the run's folder cannot be used: {error}") from error
