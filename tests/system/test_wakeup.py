"""Signals: who waits is woken once, nobody waits without an end, and no cancellation is lost."""

import asyncio

import pytest

from antiphon.system.wakeup import Wakeup


def test_all_who_wait_are_woken_and_nothing_is_remembered() -> None:
    async def act() -> None:
        signal = Wakeup()
        signal.notify()
        waiting = [asyncio.ensure_future(signal.wait(60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "woken by what was before"
        signal.notify()
        assert await asyncio.gather(*waiting) == [True, True, True]
        assert not await signal.wait(0.001) and not await signal.wait(0.0) and not await signal.wait(-1.0)

    asyncio.run(act())


def test_a_cancellation_that_meets_the_signal_is_not_lost() -> None:
    async def act() -> None:
        signal = Wakeup()
        task = asyncio.ensure_future(signal.wait(60.0))
        await asyncio.sleep(0)
        signal.notify()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        given_up = asyncio.ensure_future(signal.wait(60.0))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        signal.notify()  # nobody waits any more
        assert given_up.cancelled()

    asyncio.run(act())
