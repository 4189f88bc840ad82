"""What grows with a run is read in pages: no message is large, and a read ends when no page comes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.core.records import StepCommit
from antiphon.core.requests import CommitsReply
from antiphon.net.rpc.serving import stream
from antiphon.net.wire import CALLS, event_to_proto
from antiphon.services.coordinator import service as coordinator_service
from antiphon.simulator.virtual.loop import VirtualLoop
from tests.support.light_parties import run_parties, served
from tests.support.loop_model import make_config

PAGE_BYTES = 600


def test_commits_and_events_travel_in_messages_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_service, "PAGE_BYTES", PAGE_BYTES)
    config = make_config(steps=6, lease_s=30.0)

    async def act() -> None:
        async with served(config, tmp_path) as site:
            client, state = site.client(), site.service.state_machine.state
            await run_parties(client, config, seed=1)
            assert list(await client.commits(-1)) == state.commits
            assert list(await client.commits(3)) == state.commits[4:] and not list(await client.commits(5))
            pages = [page async for page in client.event_pages(0, follow=False)]
            seqs = [event.seq for page in pages for event in page]
            assert seqs == list(range(1, len(seqs) + 1)) and len(pages) > 10
            for page in pages:
                assert sum(event_to_proto(event).ByteSize() + 4 for event in page[:-1]) < PAGE_BYTES
            assert [event.seq async for event in client.watch_events(0, follow=False)] == seqs

    asyncio.run(act())


def test_a_page_of_commits_is_no_larger_than_it_says() -> None:
    """With the figures of a real step, whose estimate must not be far below what travels."""
    metrics = {f"train/some_figure_of_the_step_{number}": number / 7 for number in range(45)}
    commits = [StepCommit(step, step + 1, "a" * 64, "b" * 64, metrics, True) for step in range(4000)]

    class Machine:
        config = None
        state = type("State", (), {"commits": commits})

        def check(self) -> None:
            pass

    service = coordinator_service.CoordinatorService.__new__(coordinator_service.CoordinatorService)
    service.state_machine, service._state = Machine(), Machine.state  # type: ignore[assignment]

    async def read() -> list[CommitsReply]:
        pages = [await service.commits_after(-1)]
        while pages[-1].more:
            pages.append(await service.commits_after(pages[-1].commits[-1].step))
        return pages

    pages = asyncio.run(read())
    assert [commit for page in pages for commit in page.commits] == commits and len(pages) > 5
    for page in pages:
        size = CALLS["commits_after"].write_reply(page).ByteSize()
        assert size <= 1.1 * coordinator_service.PAGE_BYTES


class Replies:
    """A call whose replies come `pause_s` apart, and at the end no more do."""

    def __init__(self, count: int, pause_s: float) -> None:
        self.count, self.pause_s = count, pause_s

    def __call__(self, request: Any, timeout: float | None) -> "Replies":
        assert timeout is None
        return self

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(self.count):
            await asyncio.sleep(self.pause_s)
            yield number
        await asyncio.sleep(1e6)

    def cancel(self) -> None:
        pass


def test_a_long_read_goes_on_as_long_as_pages_come_and_ends_when_none_does() -> None:
    got: list[int] = []

    async def read() -> float:
        with pytest.raises(UnavailableError, match="sent nothing for 10 s"):
            async for reply in stream(Replies(500, 8.0), None, None, 10.0):
                got.append(reply)
        return asyncio.get_running_loop().time()

    ended_s = VirtualLoop(lambda: (0.0, 0.0), 1e5).run(read())
    assert got == list(range(500)) and ended_s == pytest.approx(4010.0)
