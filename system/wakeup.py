"""Waiting: for a change, never without a deadline, and for the end of tasks by who began them."""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


class Wakeup:
    """Wakes everyone who waits at the moment; nothing is remembered for those who come later.

    A bare future and a timer: an `asyncio.Event` under `asyncio.timeout` means the same and costs
    about half as much again, and every loop of a worker and of the coordinator waits here.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[bool], None] = {}
        """In the order in which they came."""

    def notify(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            _answer(future, True)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next `notify`; False when `timeout_s` seconds passed without one."""
        return await wait_any(timeout_s, self)


async def wait_any(timeout_s: float, *wakeups: Wakeup) -> bool:
    """Wait for the next `notify` of any of `wakeups`; False when `timeout_s` seconds passed without one."""
    if timeout_s <= 0:
        return False
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bool] = loop.create_future()
    timer = loop.call_later(timeout_s, _answer, future, False)
    for wakeup in wakeups:
        wakeup._waiting[future] = None
    try:
        return await future
    finally:
        timer.cancel()
        for wakeup in wakeups:
            wakeup._waiting.pop(future, None)


@dataclass(slots=True)
class _Offer:
    """Pieces of work that came up at one moment."""

    before: int
    """Only calls that queued before this number hear of them: later ones have seen them."""
    left: int
    """Pieces that no one is known to have taken."""


class WorkQueue(Wakeup):
    """Wakes as many waiting calls as there are pieces of work, the longest waiting first.

    A call that cannot use a piece passes it on, so each call that waits hears of a piece until one takes
    it. Those who only watch (`wait`) hear of everything, and so does everybody of news (`notify`). As
    with a `Wakeup` nothing is remembered: look for work before you queue.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: dict[asyncio.Future[_Offer | None], int] = {}
        """Waiting call -> its number, in the order in which they came."""
        self._named: dict[str, dict[asyncio.Future[_Offer | None], None]] = {}
        self._number = 0

    def notify(self) -> None:
        """Wake everybody."""
        super().notify()
        queue, self._queue = self._queue, {}
        for future in queue:
            _answer(future, _Offer(0, 0))

    def offer(self, pieces: int) -> None:
        """Wake as many calls as there are pieces of new work."""
        super().notify()
        offer = _Offer(self._number, pieces)
        for _ in range(min(pieces, len(self._queue))):
            self.wake_next(offer)

    def tell(self, name: str) -> None:
        """Wake the calls of one party, for whom something has changed."""
        for future in self._named.get(name, {}):
            self._queue.pop(future, None)
            _answer(future, _Offer(0, 0))

    def call(self, name: str = "") -> "QueuedCall":
        """Return a call of a party, to be used in a `with`."""
        return QueuedCall(self, name)

    def wake_next(self, offer: _Offer) -> None:
        """Wake the next call that has not heard of an offer."""
        for future, number in self._queue.items():
            if number >= offer.before:
                return
            if not future.done():
                del self._queue[future]
                future.set_result(offer)
                return

    async def queue(self, timeout_s: float, name: str) -> _Offer | None:
        """Wait to be woken; None when `timeout_s` seconds passed without."""
        if timeout_s <= 0:
            return None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Offer | None] = loop.create_future()
        timer = loop.call_later(timeout_s, _answer, future, None)
        self._queue[future] = self._number
        self._number += 1
        named = self._named.setdefault(name, {})
        named[future] = None
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (offer := future.result()) and offer.left > 0:
                self.wake_next(offer)
            raise
        finally:
            timer.cancel()
            self._queue.pop(future, None)
            del named[future]
            if not named:
                self._named.pop(name, None)


class QueuedCall:
    """One call that waits for work; what it was woken for and did not take, the next one hears of."""

    def __init__(self, queue: WorkQueue, name: str) -> None:
        self._queue, self._name = queue, name
        self._offer: _Offer | None = None

    def __enter__(self) -> "QueuedCall":
        return self

    def __exit__(self, *error: object) -> None:
        self._pass_on()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for work or news, after a look that found nothing; False when `timeout_s` seconds passed."""
        self._pass_on()
        self._offer = await self._queue.queue(timeout_s, self._name)
        return self._offer is not None

    def took(self, pieces: int) -> None:
        """Note that the call took this many pieces of work."""
        if self._offer is not None:
            self._offer.left -= pieces
            self._offer = None

    def _pass_on(self) -> None:
        offer, self._offer = self._offer, None
        if offer is not None and offer.left > 0:
            self._queue.wake_next(offer)


def _answer(future: "asyncio.Future[_T]", answer: _T) -> None:
    if not future.done():
        future.set_result(answer)


async def end_tasks(*tasks: "asyncio.Task[object]") -> None:
    """Cancel tasks and wait until each has ended.

    The caller's own cancellation, where it comes meanwhile, stays: to await a cancelled task and pass over
    its `CancelledError` would pass over that of the caller too, and who was told to leave would go on.

    Raises:
        Exception: what one of the tasks ended with.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
