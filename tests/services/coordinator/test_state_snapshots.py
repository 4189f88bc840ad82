"""A restart begins from the newest snapshot of the state, and from the events where there is none to read."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from antiphon.benchmarks.parts.postgres import postgres_server
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import RunState, fold, new_state
from antiphon.services.coordinator.journal.journal import Journal, StateSnapshots
from antiphon.services.coordinator.journal.store import SNAPSHOTS_KEPT
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.light_parties import run_parties, served
from tests.support.loop_model import RUN_ID, make_config

EVERY = 20
NEWEST = "seq = (SELECT max(seq) FROM state_snapshots)"
CONFIG = make_config(steps=8, lease_s=30.0)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, needs_system: Callable[[str], str]
) -> Iterator[Path | str]:
    if request.param == "sqlite":
        yield tmp_path / JOURNAL_NAME
        return
    with postgres_server(needs_system("postgresql")) as server:
        yield server.url


async def whole_run(folder: Path, place: Path | str) -> None:
    async with served(CONFIG, folder, place=place, snapshot_every=EVERY) as site:
        await run_parties(site.client(), CONFIG, seed=4)


def restored(place: Path | str) -> tuple[RunState, int, RunState]:
    """Return the state from the newest snapshot and its tail, where that began, and the whole fold."""
    journal = Journal(place, RUN_ID)
    state = new_state(CONFIG)
    seq = StateSnapshots(journal, state).restore()
    fold(state, journal.replay(seq))
    whole = fold(new_state(CONFIG), journal.replay())
    asyncio.run(journal.close())
    return state, seq, whole


def test_a_restart_reads_the_newest_snapshot_and_the_events_after_it(
    tmp_path: Path, place: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(whole_run(tmp_path, place))
    journal = Journal(place, RUN_ID)
    last, kept = journal.last_seq, journal.snapshots()
    asyncio.run(journal.close())
    assert len(kept) == SNAPSHOTS_KEPT and kept[0].seq > kept[1].seq >= kept[0].seq - 3 * EVERY
    state, seq, whole = restored(place)
    assert 0 <= last - seq < EVERY and state == whole
    read: list[e.JournalEvent] = []
    replay = Journal.replay

    def counted(self: Journal, after: int = 0) -> Iterator[e.JournalEvent]:
        for event in replay(self, after):
            read.append(event)
            yield event

    monkeypatch.setattr(Journal, "replay", counted)

    async def again() -> RunState:
        async with served(CONFIG, tmp_path, place=place, snapshot_every=EVERY) as site:
            return site.service.state_machine.state

    assert len(asyncio.run(again()).commits) == CONFIG.run.steps and len(read) == last - seq


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        (f"UPDATE state_snapshots SET body = substr(body, 2) WHERE {NEWEST}", 1),
        (f"UPDATE state_snapshots SET form = 'another' WHERE {NEWEST}", 1),
        ("UPDATE state_snapshots SET form = 'another'", None),
        ("DELETE FROM state_entries WHERE name = 'sealed' AND place = 0", None),
        ("UPDATE state_snapshots SET seq = seq + 100000", None),
        ("DELETE FROM state_snapshots", None),
    ],
)
def test_a_snapshot_that_cannot_be_read_gives_way_to_the_events(
    tmp_path: Path, change: str, begins: int | None
) -> None:
    path = tmp_path / JOURNAL_NAME
    asyncio.run(whole_run(tmp_path, path))
    with closing(sqlite3.connect(path)) as database:
        seqs = [seq for (seq,) in database.execute("SELECT seq FROM state_snapshots ORDER BY seq DESC")]
        database.execute(change)
        database.commit()
    with capture_logs() as logs:
        state, seq, whole = restored(path)
    assert state == whole and seq == (0 if begins is None else seqs[begins])
    said = [entry for entry in logs if entry["event"] == "state_snapshot.unreadable"]
    assert len(said) == (0 if change == "DELETE FROM state_snapshots" else 2 if begins is None else 1)

    async def go_on() -> None:
        async with served(CONFIG, tmp_path, snapshot_every=1) as site:
            await site.client().pause("to write one more event")

    if "seq + 100000" not in change:  # the next snapshot is good, over entries that were there or were lost
        asyncio.run(go_on())
        state, seq, whole = restored(path)
        assert state == whole and seq > seqs[0]
