"""Live run: a wait ends with an answer, at its deadline, or at a stop, whichever comes first."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon.core.config import build_config
from antiphon.core.errors import BlockedError, UnavailableError
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.core.status import Event
from antiphon.lineage.run_events import read_events as unpacked
from antiphon.runs.clients import KEPT_EVENTS, ClientLoop, CoordinatorLog, RunStopped
from antiphon.runs.directory import RunPlace
from antiphon.runs.live_run import LiveRun, RunOptions
from tests.report.test_page import journal
from tests.support.run_views import view_of


@pytest.fixture
def clients() -> Iterator[ClientLoop]:
    """A loop that is closed afterwards."""
    loop = ClientLoop()
    yield loop
    loop.close()


def live_run(clients: ClientLoop, patience_s: float = 60.0, outage_s: float = 600.0) -> LiveRun:
    services = {"stall_timeout_s": patience_s, "outage_timeout_s": outage_s}
    place = RunPlace("run", Path(), resumed=False)
    run = LiveRun(place, build_config({"services": services}), Path(), RunDisplay(), RunOptions())
    run.clients = clients
    return run


def test_an_answer_comes_back(clients: ClientLoop) -> None:
    async def answer() -> int:
        return 7

    assert live_run(clients).call(answer) == 7


def test_a_stop_ends_a_call_that_is_under_way(clients: ClientLoop) -> None:
    run, begun, told = live_run(clients), threading.Event(), []

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    def stage() -> None:
        with pytest.raises(RunStopped, match="enough"):
            run.call(never, timeout_s=600.0)
        told.append(True)

    thread = threading.Thread(target=stage)
    thread.start()
    assert begun.wait(30.0)
    run.stop("enough")
    thread.join(30.0)
    assert told == [True]
    with pytest.raises(RunStopped, match="enough"):
        run.call(never)


def test_a_call_without_an_answer_is_given_up(clients: ClientLoop) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(UnavailableError, match="gave up after"):
        live_run(clients, patience_s=0.01).call(never, timeout_s=0.02)


def test_a_service_that_comes_back_is_heard(clients: ClientLoop) -> None:
    tries = []

    async def answer() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise UnavailableError("away")
        return len(tries)

    assert live_run(clients).call(answer) == 3


def test_an_outage_of_the_coordinators_disk_has_a_patience_of_its_own(clients: ClientLoop) -> None:
    left = 4

    async def blocked() -> int:
        nonlocal left
        left -= 1
        if left > 0:
            raise BlockedError("no space is left")
        return 7

    assert live_run(clients, patience_s=0.01).call(blocked) == 7
    left = 10**6
    run = live_run(clients, outage_s=0.01)
    with pytest.raises(UnavailableError, match=r"gave up after 0\.01 s: no space is left"):
        run.call(blocked)


def test_the_journal_is_read_once_whoever_asks_and_on_from_where_it_broke(clients: ClientLoop) -> None:
    class Coordinator:
        """Its stream of events breaks after each page."""

        events: Sequence[Event] = journal(12)[1:]

        async def event_pages(self, after_seq: int, follow: bool) -> AsyncIterator[Sequence[Event]]:
            left = [event for event in self.events if event.seq > after_seq]
            if left:
                await asyncio.sleep(0.0)
                yield left[:40]
                raise UnavailableError("gone")

    run = live_run(clients)
    run.coordinator = cast("Any", Coordinator())

    def read() -> None:
        for _ in range(1 + len(Coordinator.events) // 40):
            with suppress(UnavailableError):
                clients.run(run.read_journal(), 30.0)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert run.view.counts == view_of(Coordinator.events).counts and run.view.alarms.count == 12
    packed, last = run.call(run.packed_journal), Coordinator.events[-1]
    # The live display reads on after the ledger was given its copy.
    Coordinator.events = [*Coordinator.events, replace(last, seq=last.seq + 1)]
    with suppress(UnavailableError):
        clients.run(run.read_journal(), 30.0)
    assert len(list(unpacked(packed))) == last.seq
    assert len(list(unpacked(run.call(run.packed_journal)))) == last.seq + 1


class Paged:
    """A coordinator's log, in pages; notes after which events it was asked."""

    def __init__(self, events: int, page: int) -> None:
        self.events = [Event(seq, 0.0, "run.opened", "{}") for seq in range(1, events + 1)]
        self.page, self.asked = page, list[int]()

    async def event_pages(self, after_seq: int, follow: bool) -> AsyncIterator[Sequence[Event]]:
        self.asked.append(after_seq)
        while page := self.events[after_seq : after_seq + self.page]:
            yield page
            after_seq += len(page)


def read_all(log: CoordinatorLog, after_seq: int = 0) -> list[int]:
    found: list[int] = []
    while page := log.page(after_seq, 0.0):
        found += [event.seq for event in page]
        after_seq = found[-1]
    return found


def test_who_reads_a_log_behind_another_asks_for_nothing_but_its_end(clients: ClientLoop) -> None:
    coordinator = Paged(events=1000, page=300)
    log = CoordinatorLog(clients, cast(Any, coordinator))
    assert read_all(log) == read_all(log) == [*range(1, 1001)]
    assert coordinator.asked == [0, 300, 600, 900, 1000, 1000]
    assert read_all(log, 640) == [*range(641, 1001)] and coordinator.asked[6:] == [1000]


def test_who_reads_a_log_far_behind_gets_every_event_all_the_same(clients: ClientLoop) -> None:
    coordinator = Paged(events=3 * KEPT_EVENTS, page=700)
    log, every = CoordinatorLog(clients, cast(Any, coordinator)), [*range(1, 3 * KEPT_EVENTS + 1)]
    assert read_all(log, 5000) == every[5000:]  # one that goes on
    for _ in range(2):
        assert read_all(log) == every
