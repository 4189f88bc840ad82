"""A transaction that finds no place is tried again after a pause, not in a tight loop."""

import asyncio
from pathlib import Path

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.core.loop import events as e
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.journal.store import Written

RETRY_S = 0.75


def test_each_new_try_comes_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def story() -> None:
        journal = Journal(tmp_path / "journal.db", "run-1", threaded=False, retry_s=RETRY_S)
        write, left = journal._store.write, 3

        def full(batch: object) -> Written:
            nonlocal left
            left -= 1
            if left >= 0:
                raise UnavailableError("the disk is full")
            return write(batch)  # type: ignore[arg-type]

        monkeypatch.setattr(journal._store, "write", full)
        monkeypatch.setattr(asyncio, "sleep", noted)
        async with asyncio.timeout(30.0):
            await journal.enqueue([e.StepOpened(0)])
        monkeypatch.undo()
        await journal.close()

    asyncio.run(story())
    assert [pause for pause in pauses if pause] == [RETRY_S] * 3
