"""Judgements: what a model that judges said of each answer, and what it cost, in a file of the run's folder.

Each is kept (`lineage.kept`) under the digest of all that it depends on, so no score is paid for twice. Asked
for again is a reply that came when its process was killed, and one without a score: its cost is kept, but
what was wrong with the server may be mended.
"""

import contextlib
import sqlite3
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from antiphon.core.reporting.shortcuts import Differences
from antiphon.lineage.kept import WAIT_S

JUDGEMENTS = "judgements"
JUDGEMENTS_FILE = f"{JUDGEMENTS}.sqlite"
"""Its one table, and its name."""
_ORDER = "In the other order of reference and response the judge gave {} more"
_SUMS = """SELECT count(*), sum(share IS NULL), sum(requests), sum(tokens_in + tokens_out), sum(usd),
    sum(seconds) FROM judgements"""
_PAIRS = """SELECT b.share - a.share FROM judgements b JOIN judgements a ON a.digest = b.other_order_of
    WHERE a.share IS NOT NULL AND b.share IS NOT NULL ORDER BY a.digest"""


class Judgement(NamedTuple):
    """What a model said of an answer; sums are those of all its requests."""

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
    other_order_of: str = ""
    """Digest of the one in the usual order, where this is in the other."""

    def after(self, earlier: "Judgement | None") -> "Judgement":
        """Return this one with the costs of an earlier one, which had no score."""
        if earlier is None:
            return self
        costs = ("tokens_in", "tokens_out", "requests", "seconds", "usd")
        return self._replace(**{name: getattr(earlier, name) + getattr(self, name) for name in costs})


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
