"""Rollout index: what is known of every trajectory of a run at once, and each of them whole when it is asked.

All comes from `SampleFiles`: the run log and the store, or a ledger alone. Texts are read after all else.
"""

from functools import lru_cache

import numpy as np

from antiphon.core.errors import ConfigError
from antiphon.core.records import BatchRow, RowTiming
from antiphon.core.reporting.rollouts import ROLLOUT
from antiphon.lineage.names import batch_entry, evaluation_entry
from antiphon.lineage.samples import SampleFiles
from antiphon.models.codec import TextCodec

HEAD = 120
"""Characters of an answer that a list shows."""
TEXT_CHARACTERS = 1 << 30
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
        self._rows = lru_cache(maxsize=16)(files.rows)
        self._timings = lru_cache(maxsize=16)(files.timings)
        names = [f"{letter}{step}" for step in files.steps for letter in "tf"]
        names += [f"v{version}" for version in files.evaluated]
        facts, missing = list[tuple[object, ...]](), 0
        for name in names:
            rows = files.rows(_entry(name))
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
        """Read the texts that are searched, in the order of the table, as far as there is room for them."""
        if self.codec is None:
            return
        place, room = 0, TEXT_CHARACTERS
        while place < self.table.size and room > 0:
            rows = self.files.rows(_entry(self.table["name"][place].partition(".")[0]))
            prompts = {row.prompt_token_ids.tobytes(): row.prompt_token_ids for row in rows}
            texts = self.codec.texts([*prompts.values(), *(row.token_ids for row in rows)])
            asked = {ids: text.casefold() for ids, text in zip(prompts, texts, strict=False)}
            for row, text in zip(rows, texts[len(prompts) :], strict=True):
                known = asked[row.prompt_token_ids.tobytes()]
                self.table[["head", "asked", "answered"]][place] = text[:HEAD], known, text.casefold()
                place += 1
            room -= sum(map(len, texts))
            self.searched = place

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
        """
        name, _, row = self.table["name"][place].partition(".")
        timings = self._timings(_entry(name))
        return self._rows(_entry(name))[int(row)], timings[int(row)] if timings else None


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
    return f"{name}.{place}", part, *when, *counts, row.group_id, row.prompt_key, reason, "", "", ""
