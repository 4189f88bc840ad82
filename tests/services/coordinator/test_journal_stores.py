"""One journal, two databases: what is promised of it holds on SQLite and on a real PostgreSQL server."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa

from antiphon.benchmarks.parts.postgres import PostgresServer, postgres_server
from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import fold, new_state
from antiphon.services.coordinator.journal.journal import HistoryEdit, HistoryRow, Journal, TrainedRow
from antiphon.services.coordinator.journal.reading import event_bodies, opened_with
from antiphon.services.coordinator.journal.store import StoreTotals
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.light_parties import run_parties, served
from tests.support.loop_model import RUN_ID, make_config

Place = Path | str
_runs = count()


@pytest.fixture(scope="module")
def server(needs_system: Callable[[str], str]) -> Iterator[PostgresServer]:
    with postgres_server(needs_system("postgresql")) as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return tmp_path / JOURNAL_NAME
    url: str = request.getfixturevalue("server").url
    return url


@pytest.fixture
def run_id() -> str:
    """A name of its own for each test: one server serves them all."""
    return f"store-{next(_runs)}"


def digest(letter: str) -> str:
    return letter * 64


def test_what_is_written_is_read_back_after_reopening(place: Place, run_id: str) -> None:
    events = [e.RunOpened(run_id, {"run.seed": "0"}), e.StepOpened(0), e.StepOpened(1)]
    kept = HistoryRow("p", 0, False, b"\x00h")
    edits = [HistoryEdit((kept, HistoryRow("q", 0, True, b"q"))), HistoryEdit((), (("q", 0),))]

    async def write() -> int:
        journal = Journal(place, run_id)
        assert journal.empty
        await journal.enqueue(events[:1], {"a": b"\x00\xff", "b": b"1"}, history=edits[0])
        await journal.enqueue(events[1:], {"b": b"2"}, forget=["a"], history=edits[1])
        assert [row.seq for row in await journal.read(1, 10)] == [2, 3]
        await journal.close()
        return journal._store.epoch

    async def read(before: int) -> None:
        journal = Journal(place, run_id)
        assert list(journal.replay()) == events and not journal.empty
        assert list(journal.history()) == [kept]
        assert journal._store.epoch == before + 1
        assert [await journal.payload(name) for name in "abc"] == [None, b"2", None]
        await journal.close()

    asyncio.run(read(asyncio.run(write())))


def test_a_break_begins_where_the_times_of_the_session_before_end(tmp_path: Path) -> None:
    steps = [e.StepOpened(step) for step in range(1500)]  # more than are read at once

    async def write() -> None:
        for at_s, events in enumerate(([e.RunOpened(RUN_ID, {}, 0.0)], steps, [e.RunPaused("typed")])):
            journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID, lambda now=1000.0 + at_s: now)
            await journal.enqueue(events)
            await journal.close()

    async def silent_s(now: float) -> float:
        journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID, lambda: now)
        silent_s = journal.silent_s()
        await journal.close()
        return silent_s

    assert asyncio.run(silent_s(1000.0)) == 0.0
    asyncio.run(write())
    assert asyncio.run(silent_s(1007.5)) == 7.5


def test_a_journal_is_read_without_being_opened(place: Place, run_id: str) -> None:
    assert list(event_bodies(place, run_id)) == []

    async def write(steps: range) -> int:
        journal = Journal(place, run_id)
        await journal.enqueue([e.StepOpened(step) for step in steps])
        with pytest.raises(ConfigError, match="already has a coordinator"):
            list(event_bodies(place, run_id))
        await journal.close()
        return journal._store.epoch

    before = asyncio.run(write(range(1500)))
    assert len(list(event_bodies(place, run_id))) == 1500
    assert asyncio.run(write(range(1500, 1501))) == before + 1  # reading was no opening


def test_a_group_is_trained_once_by_the_database_itself(place: Place, run_id: str) -> None:
    async def act() -> None:
        journal = Journal(place, run_id)
        await journal.enqueue([], trained=TrainedRow(0, 1, digest("a"), digest("b"), ("g1", "g2")))
        with pytest.raises(IntegrityError, match="refuses what contradicts it"):
            await journal.enqueue(
                [e.StepOpened(0)], trained=TrainedRow(1, 2, digest("a"), digest("b"), ("g2",))
            )
        await journal.close()
        journal = Journal(place, run_id)
        assert journal.empty and journal.totals() == StoreTotals(1, 2)  # nothing of it is there
        await journal.close()

    asyncio.run(act())


def test_a_second_coordinator_is_refused_while_the_first_lives(place: Place, run_id: str) -> None:
    journal = Journal(place, run_id)
    with pytest.raises(ConfigError, match="already has a coordinator"):
        Journal(place, run_id)
    asyncio.run(journal.close())
    asyncio.run(Journal(place, run_id).close())


def test_a_coordinator_that_lost_its_place_never_commits_again(
    place: Place, run_id: str, request: pytest.FixtureRequest
) -> None:
    async def act() -> None:
        first = Journal(place, run_id)
        await first.enqueue([e.StepOpened(0)])
        if isinstance(place, Path):
            place.with_suffix(".lock").unlink()  # as a file system without locks would have it
        else:
            cut_off(request.getfixturevalue("server"), run_id)
        second = Journal(place, run_id)
        await second.enqueue([e.StepOpened(1)])
        with pytest.raises(
            (UnavailableError, ConfigError), match=r"lost its place|already has a coordinator"
        ):
            await first.enqueue([e.StepOpened(7)], {"late": b"x"})
        await second.enqueue([e.StepOpened(2)])
        assert [event.step for event in map(steps_of, second.replay())] == [0, 1, 2]
        assert await second.payload("late") is None
        await second.close()
        with pytest.raises((UnavailableError, ConfigError)):  # not even after the other one has gone
            await first.enqueue([e.StepOpened(8)])
        await first.close()

    asyncio.run(act())


def steps_of(event: e.JournalEvent) -> e.StepOpened:
    assert isinstance(event, e.StepOpened)
    return event


def cut_off(server: PostgresServer, run_id: str) -> None:
    """End the sessions of a run at the server, as when its machine had vanished."""
    mine = f"application_name = 'antiphon {run_id}'"
    run_sql(server, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {mine}")


def run_sql(server: PostgresServer, text: str) -> None:
    engine = sa.create_engine(sa.make_url(server.url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.exec_driver_sql(text)
    engine.dispose()


def test_a_fenced_database_session_finds_its_epoch_overtaken(server: PostgresServer, run_id: str) -> None:
    async def act() -> None:
        first = Journal(server.url, run_id)
        cut_off(server, run_id)
        await Journal(server.url, run_id).close()  # came and went: the lock is free again, the epoch is not
        with pytest.raises(UnavailableError, match="lost its place"):
            await first.enqueue([e.StepOpened(7)])
        await first.close()

    asyncio.run(act())


def test_a_database_that_went_away_and_returned_loses_nothing(server: PostgresServer, run_id: str) -> None:
    async def act() -> None:
        journal = Journal(server.url, run_id, retry_s=0.05)
        await journal.enqueue([e.StepOpened(0)])
        await asyncio.to_thread(server.stop, "immediate")
        waiting = journal.enqueue([e.StepOpened(1)], {"p": b"1"})
        while journal.blocked is None:
            await asyncio.sleep(0.01)
        assert "cannot be reached" in str(journal.blocked) and not waiting.done()
        await asyncio.to_thread(server.start)
        await asyncio.wait_for(waiting, 30.0)
        assert journal.blocked is None and await journal.payload("p") == b"1"
        assert [event.step for event in map(steps_of, journal.replay())] == [0, 1]
        await journal.close()

    asyncio.run(act())


def test_what_is_kept_after_it_was_forgotten_in_one_transaction_is_there(place: Place, run_id: str) -> None:
    async def act() -> None:
        journal = Journal(place, run_id)
        await journal.enqueue([], {"old": b"1"})
        # Nothing awaits in between, so all of it goes into one transaction.
        journal.enqueue([], forget=["p", "old"])
        journal.enqueue([], {"p": b"2", "gone": b"3"})
        await journal.enqueue([], forget=["gone"])
        assert [await journal.payload(name) for name in ("p", "gone", "old")] == [b"2", None, None]
        await journal.close()

    asyncio.run(act())


def test_a_writer_that_breaks_says_so_to_all_who_wait(tmp_path: Path) -> None:
    async def act() -> None:
        told: list[str] = []
        journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID)
        journal.on_failure = lambda error: told.append(str(error))
        write = journal._store.write

        def broken(batch: object) -> object:
            raise MemoryError("no memory for this")

        journal._store.write = broken  # type: ignore[method-assign, assignment]
        first = journal.enqueue([e.StepOpened(0)])
        with pytest.raises(IntegrityError, match=r"broke.*no memory for this"):
            await asyncio.wait_for(first, 10.0)
        journal._store.write = write  # type: ignore[method-assign]
        with pytest.raises(IntegrityError, match="broke"):
            journal.enqueue([e.StepOpened(1)])
        assert len(told) == 1
        await journal.close()

    asyncio.run(act())


def test_a_journal_that_lacks_an_event_is_refused(tmp_path: Path) -> None:
    async def write() -> None:
        journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID)
        await journal.enqueue([e.StepOpened(step) for step in range(4)])
        await journal.close()

    asyncio.run(write())
    with closing(sqlite3.connect(tmp_path / JOURNAL_NAME)) as database:
        database.execute("DELETE FROM events WHERE seq = 3")
        database.commit()
    journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID)
    with pytest.raises(IntegrityError, match="lacks event 3; restore it from a copy"):
        list(journal.replay())
    asyncio.run(journal.close())


def test_a_whole_run_on_either_database(place: Place, tmp_path: Path) -> None:
    config = make_config(steps=3, lease_s=30.0)

    async def act() -> None:
        async with served(config, tmp_path, RUN_ID, place) as site:
            refs, _ = await run_parties(site.client(), config, seed=2)
            before = site.service.state_machine.state
        journal = Journal(place, RUN_ID)
        assert fold(new_state(config), journal.replay()) == before
        assert journal.totals() == StoreTotals(3, sum(ref.groups for ref in refs))
        await journal.close()

    asyncio.run(act())


def test_tables_and_events_that_disagree_are_refused(tmp_path: Path) -> None:
    config = make_config(steps=2, filter_="none")

    async def run() -> None:
        async with served(config, tmp_path) as site:
            await run_parties(site.client(), config, seed=1)

    asyncio.run(run())
    with closing(sqlite3.connect(tmp_path / JOURNAL_NAME)) as database:
        database.execute("DELETE FROM trained WHERE step = 1")
        database.commit()
    with pytest.raises(IntegrityError, match="its events say 2 steps on 6 groups, its tables 2 on 3"):
        asyncio.run(run())


def changed(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def test_a_journal_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    asyncio.run(Journal(path, RUN_ID).close())
    for change in (
        "UPDATE meta SET value = 'r9999' WHERE key = 'schema'",
        "DELETE FROM meta WHERE key = 'schema'",
    ):
        changed(path, change)
        with pytest.raises(IntegrityError, match=r"schema (r9999|of no name).*use the version of Antiphon"):
            Journal(path, RUN_ID)


def test_a_journal_whose_schema_stands_in_a_table_of_its_own_opens(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    asyncio.run(Journal(path, RUN_ID).close())
    changed(
        path,
        "DELETE FROM meta WHERE key = 'schema'",
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
        "INSERT INTO alembic_version VALUES ('r1')",
    )
    asyncio.run(Journal(path, RUN_ID).close())
    changed(path, "UPDATE alembic_version SET version_num = 'r0'")
    with pytest.raises(IntegrityError, match="has schema r0"):
        Journal(path, RUN_ID)


def test_tables_that_cannot_be_made_leave_the_place_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    changed(path, "CREATE TABLE trained (foreign_to_us TEXT)")  # the last but two that are made
    for _ in range(2):
        with pytest.raises(UnavailableError, match="table trained already exists"):
            Journal(path, RUN_ID)
    assert table_names(path) == ["trained"]


def table_names(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def test_recovered_capacity_agrees_with_the_version(tmp_path: Path) -> None:
    """However often the coordinator restarts, no more groups are opened than S allows."""
    config = make_config(steps=6, max_staleness=1, filter_="none", lease_s=30.0)

    async def leased(state_machine: RunStateMachine) -> int:
        from antiphon.core.requests import LeaseRequest
        from antiphon.services.coordinator.service import CoordinatorService
        from tests.support.light_parties import hello

        service = CoordinatorService(state_machine)
        worker = await service.register(hello())
        granted = 0
        while (reply := await service.lease_group(LeaseRequest(worker.worker_id, 0, 2, 0.0))).leases:
            granted += len(reply.leases)
        return granted

    async def act() -> None:
        from tests.support.loop_model import light_manifest

        granted = []
        for _ in range(4):
            async with served(config, tmp_path) as site:
                await site.client().announce_snapshot(light_manifest(0))
                for step in range(config.run.steps):
                    await site.client().open_step(step)
                granted.append(await leased(site.service.state_machine))
        bound = (config.loop.max_staleness + 1) * config.loop.prompts_per_step
        assert granted == [bound, 0, 0, 0]

    asyncio.run(act())


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("mysql://host/db", "no database Antiphon knows"),
        ("postgresql://me:secret@host/db", "must not hold a password"),
        ("postgresql://host/db?password=secret", "must not hold a password"),
    ],
)
def test_a_store_that_cannot_be_meant_is_refused(store: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config({"coordinator": {"journal_url": store}})


@pytest.mark.parametrize("folder", ["home %20", "who?", "a#b", "50%", "a b"])
def test_a_path_may_hold_what_a_url_would_read_otherwise(tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder / "journal.db"
    place.parent.mkdir()

    async def write() -> None:
        journal = Journal(place, "r")
        await journal.enqueue([e.RunOpened("r", {"run.seed": "0"}), e.StepOpened(0)])
        await journal.close()

    asyncio.run(write())
    assert len(list(event_bodies(place, "r"))) == 2
    assert opened_with(place, "r") == ({"run.seed": "0"}, False)
    assert {file.parent for file in tmp_path.rglob("*.db")} == {place.parent}
