"""What the archive of a run should hold, told from its events alone, and what it does hold."""

import asyncio
from pathlib import Path

from antiphon.core.loop import events as e
from antiphon.services.coordinator.journal.journal import HistoryRow, Journal
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.loop_model import RUN_ID

Epochs = dict[str, set[int]]
"""Prompt key -> epochs."""


def read_journal(folder: Path) -> tuple[list[e.JournalEvent], list[HistoryRow]]:
    """Return the events and the history of a run whose coordinator is gone."""

    async def read() -> tuple[list[e.JournalEvent], list[HistoryRow]]:
        journal = Journal(folder / JOURNAL_NAME, RUN_ID)
        found = list(journal.replay()), list(journal.history())
        await journal.close()
        return found

    return asyncio.run(read())


def archived(folder: Path) -> Epochs:
    """Return the epochs that the journal keeps of each prompt."""
    found: Epochs = {}
    for row in read_journal(folder)[1]:
        found.setdefault(row.prompt_key, set()).add(row.epoch)
    return found


def rewarded_epochs(folder: Path, epochs: int) -> Epochs:
    """Return the newest `epochs` epochs in which each training prompt was rewarded."""
    opened: dict[str, e.GroupOpened] = {}
    found: Epochs = {}
    for event in read_journal(folder)[0]:
        if isinstance(event, e.GroupOpened):
            opened[event.group_id] = event
        elif isinstance(event, e.GroupRewarded) and event.group_id in opened:
            group = opened[event.group_id]
            found.setdefault(f"train-0-{group.prompt_index}", set()).add(group.epoch)
    return {key: set(sorted(known)[-epochs:]) for key, known in found.items()}
