"""Signals: who waits is woken once, nobody waits without an end, and no cancellation is lost."""

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.simulator.virtual.loop import VirtualLoop
from antiphon.system.wakeup import Wakeup, WorkQueue


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


def test_as_many_calls_are_woken_as_there_is_work_the_longest_waiting_first() -> None:
    async def act() -> None:
        queue, woken = WorkQueue(), []

        async def wait(number: int) -> None:
            with queue.call() as call:
                assert await call.wait(60.0)
                woken.append(number)
                call.took(1)

        watching = asyncio.ensure_future(queue.wait(60.0))
        calls = [asyncio.ensure_future(wait(number)) for number in range(8)]
        await settled()
        queue.offer(3)
        await settled()
        assert woken == [0, 1, 2] and watching.result() is True
        queue.offer(1)
        calls[4].cancel()
        await settled()
        assert woken == [0, 1, 2, 3]
        queue.offer(1)
        calls[5].cancel()  # in the moment in which it was woken: the next one gets its piece
        await settled()
        assert woken == [0, 1, 2, 3, 6]
        queue.notify()
        await settled()
        assert woken == [0, 1, 2, 3, 6, 7]
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(act())


def test_a_call_that_cannot_use_a_piece_passes_it_on_and_is_not_asked_again() -> None:
    async def act() -> None:
        queue, heard = WorkQueue(), []

        async def wait(number: int) -> None:
            with queue.call() as call:
                while await call.wait(60.0):
                    heard.append(number)
                    if number == 2:
                        call.took(1)
                        return

        calls = [asyncio.ensure_future(wait(number)) for number in range(5)]
        await settled()
        queue.offer(1)
        await settled()
        assert heard == [0, 1, 2]
        queue.offer(1)  # nobody can do this one: each hears of it once, in the order of their waiting
        await settled()
        assert heard == [0, 1, 2, 3, 4, 0, 1]
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(act())


def test_a_party_is_told_without_the_others() -> None:
    async def act() -> None:
        queue = WorkQueue()

        async def wait(name: str) -> str:
            with queue.call(name) as call:
                assert await call.wait(60.0)
                return name

        calls = [asyncio.ensure_future(wait(name)) for name in "abca"]
        await settled()
        queue.tell("a")
        queue.tell("nobody's")
        await settled()
        assert [call.done() for call in calls] == [True, False, False, True]
        queue.notify()
        await asyncio.gather(*calls)
        assert not queue._queue and not queue._named

    asyncio.run(act())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass
class Party:
    """A waiting call of the model: which kind of work it can do, and how much of it."""

    kind: int
    groups: int
    timeout_s: float
    woken: int = 0
    done: bool = False


class WorkModel:
    """Work of several kinds, and calls that each can do one of them."""

    def __init__(self) -> None:
        self.queue = WorkQueue()
        self.pool: Counter[int] = Counter()
        self.parties: list[Party] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def serve(self, party: Party) -> None:
        with self.queue.call(f"w{party.kind}") as call:
            while True:
                if taken := min(party.groups, self.pool[party.kind]):
                    self.pool[party.kind] -= taken
                    call.took(taken)
                    return
                if not await call.wait(party.timeout_s):
                    return
                party.woken += 1

    def act(self, kind: str, first: int, second: int) -> None:
        if kind == "arrive":
            party = Party(first % 2, 1 + second % 3, (1.0, 5.0, 1e6)[second % 3])
            self.parties.append(party)
            task = asyncio.get_running_loop().create_task(self.serve(party))
            task.add_done_callback(lambda _: setattr(party, "done", True))
            self.tasks.append(task)
        elif kind == "work":
            self.pool[first % 2] += 1 + second % 4
            self.queue.offer(1 + second % 4)
        elif kind == "cancel" and self.tasks:
            self.tasks[first % len(self.tasks)].cancel()
        elif kind == "news":
            self.queue.notify()
        elif kind == "tell":
            self.queue.tell(f"w{first % 2}")

    def check(self) -> None:
        """No work is left that a waiting call could do."""
        waiting = {party.kind for party in self.parties if not party.done}
        assert not any(count and kind in waiting for kind, count in self.pool.items())


ACTS = st.tuples(
    st.sampled_from(["arrive", "arrive", "work", "work", "cancel", "news", "tell", "pause"]),
    st.integers(0, 50),
    st.integers(0, 50),
)


@settings(max_examples=150)
@given(st.lists(ACTS, min_size=15, max_size=60))
def test_no_wake_up_is_lost(acts: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        model = WorkModel()
        for kind, first, second in acts:
            model.act(kind, first, second)
            if first % 4 == 0:
                continue  # the next one comes within the same turn of the loop
            await asyncio.sleep(second / 10 if kind == "pause" else 1e-6)
            model.check()
        await asyncio.sleep(1e-6)
        model.check()
        for task in model.tasks:
            task.cancel()
        await asyncio.gather(*model.tasks, return_exceptions=True)
        assert not model.queue._queue and not model.queue._named

    VirtualLoop(lambda: (0.0, 0.0), 1e5).run(run())


@settings(max_examples=60)
@given(st.integers(1, 30), st.lists(st.integers(1, 4), max_size=12))
def test_calls_that_can_do_the_work_are_woken_once_for_each_piece_in_order(
    calls: int, offers: list[int]
) -> None:
    async def run() -> None:
        model, pieces = WorkModel(), 0
        for _ in range(calls):
            model.act("arrive", 0, 3 * 16 + 2)
            model.parties[-1].groups = 1
        await asyncio.sleep(1e-6)
        for count in offers:
            model.act("work", 0, count - 1)
            pieces += count
            await asyncio.sleep(1e-6)
        served = min(calls, pieces)
        assert [party.woken for party in model.parties] == [1] * served + [0] * (calls - served)
        for task in model.tasks:
            task.cancel()
        await asyncio.gather(*model.tasks, return_exceptions=True)

    VirtualLoop(lambda: (0.0, 0.0), 1e5).run(run())
