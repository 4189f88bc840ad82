"""Rollout index: what is known of every trajectory of a run at once, and each of them whole when it is asked.

All comes from `SampleFiles`: the run log and the store, or a ledger alone. Texts are read after all else.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError
from antiphon.core.records import BatchRow, RowTiming
from antiphon.core.reporting.rollouts import ROLLOUT, Query, select
from antiphon.lineage.names import batch_entry, evaluation_entry
from antiphon.lineage.samples import SampleFiles
from antiphon.models.codec import SHIELD, TextCodec

HEAD = 120
"""Characters of an answer that a list shows."""
TEXT_BYTES = 1 << 30
"""Texts beyond this are not searched: they are kept in memory."""
_PARTS = {"t": "trained", "f": "filtered", "v": "held-out"}


class RolloutIndex:
    """The trajectories of one run, as far as they were recorded when it was made."""

    def __init__(self, files: SampleFiles) -> None:
        """Read all but the texts.

        Raises:
            ConfigError: when no trajectory of the run is here.
            IntegrityError: when a file was altered.
        """
        self.files, self.searched = files, 0
        self.lacks: list[str] = []
        """What is not here."""
        self._rows = lru_cache(maxsize=2)(self._read_rows)
        self._timings = lru_cache(maxsize=2)(files.timings)
        self._counts = dict[str, int]()  # file -> its trajectories, in the order of the table
        self._texts = list[pa.Array]()  # of the first files: prompt and answer of each row, in one case
        names = [f"{letter}{step}" for step in files.steps for letter in "tf"]
        names += [f"v{version}" for version in files.evaluated]
        facts, missing = list[tuple[object, ...]](), 0
        for name in names:
            rows = files.rows(_entry(name))
            if rows:
                self._counts[name] = len(rows)
            facts += [_facts(name, place, row) for place, row in enumerate(rows)]
            missing += name[0] == "t" and not rows and files.body(_entry(name)) is None
        if missing:
            self.lacks.append(f"the batches of {missing} steps")
        if not facts:
            raise ConfigError(
                f"no trajectory of run {files.run_id} is here; they are in its ledger, or in the store "
                "of the home in which it ran: bring one of these, or wait for the run's first step"
            )
        self.table = np.array(facts, ROLLOUT)
        self.codec: TextCodec | None = None
        try:
            self.codec = files.codec
        except ConfigError as error:
            self.lacks.append(f"texts, so that tokens are shown as numbers: {error}")

    def read_texts(self) -> None:
        """Read the texts that are searched, in the order of the table, as far as there is room for them.

        What cannot be read any more is added to `lacks`.
        """
        if self.codec is None:
            return
        room = TEXT_BYTES
        for name, count in self._counts.items():
            if room <= 0:
                return
            texts = [""] * count
            try:
                texts = self._read_part(name, self.codec)
            except AntiphonError as error:
                self.lacks.append(f"the texts of {count} trajectories: {error}")
            self._texts.append(pa.array(texts, pa.large_string()))
            room -= self._texts[-1].nbytes
            self.searched += count

    def _read_part(self, name: str, codec: TextCodec) -> list[str]:
        rows = self._read_rows(name)
        texts = codec.texts([ids for row in rows for ids in (row.prompt_token_ids, row.token_ids)])
        self.table["head"][self.searched :][: len(rows)] = [text[:HEAD] for text in texts[1::2]]
        pairs = zip(texts[::2], texts[1::2], strict=True)
        return [f"{prompt}{SHIELD}{answer}".casefold() for prompt, answer in pairs]

    def select(self, query: Query) -> npt.NDArray[np.intp]:
        """Return the places of all trajectories that a query means, as `core.reporting.rollouts.select`.

        A text is found anywhere in a prompt or an answer that was read, in letters of either case.
        """
        if not query.text:
            return select(self.table, query)
        search = partial(pc.match_substring_regex, pattern=re.escape(query.text.casefold()))
        with ThreadPoolExecutor() as pool:  # arrow searches without Python's lock
            found = [part.to_numpy(zero_copy_only=False) for part in pool.map(search, [*self._texts])]
        unread = np.zeros(self.table.size - sum(map(len, found)), dtype=bool)
        return select(self.table, query, np.concatenate([*found, unread]))

    def place(self, name: str) -> int:
        """Return the place of a trajectory in the table.

        Raises:
            ConfigError: when there is none of that name.
        """
        for place in np.flatnonzero(self.table["name"] == name).tolist():
            return int(place)
        raise ConfigError(f"run {self.files.run_id} has no trajectory {name[:40]!r}; names are such as t7.12")

    def trajectory(self, place: int) -> tuple[BatchRow, RowTiming | None]:
        """Return a trajectory with all of its tokens, and its timing where there is one.

        Raises:
            IntegrityError: when its file was altered.
            UnavailableError: when it is gone.
        """
        name, _, row = self.table["name"][place].partition(".")
        timings = self._timings(_entry(name))
        return self._rows(name)[int(row)], timings[int(row)] if timings else None

    def _read_rows(self, name: str) -> list[BatchRow]:
        rows = self.files.rows(_entry(name))
        if len(rows) != self._counts[name]:
            raise UnavailableError(
                f"{_entry(name)} of run {self.files.run_id} is gone since this began; bring it back, or "
                "begin again to see the rest"
            )
        return rows


def _entry(name: str) -> str:
    number = int(name[1:])
    if name[0] == "v":
        return evaluation_entry(number, "samples.parquet")
    return batch_entry(number, "parquet" if name[0] == "t" else "samples.parquet")


def _facts(name: str, place: int, row: BatchRow) -> tuple[object, ...]:
    part, number = _PARTS[name[0]], int(name[1:])
    failed = f"could not be scored: {row.failure}" if row.failure else ""
    reason = "; ".join(filter(None, (row.finish_reason.value, failed, row.said)))
    version = row.oldest_version if row.spans else -1
    when = (
        (-1, number, -1) if part == "held-out" else (number, version, number - version if row.spans else -1)
    )
    counts = row.reward, row.sample_index, row.token_ids.size
    return f"{name}.{place}", part, *when, *counts, row.group_id, row.prompt_key, reason, ""
