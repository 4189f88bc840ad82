"""Signals: those who wait for a change are woken by it, and never wait without a deadline."""

import asyncio


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


def _answer(future: "asyncio.Future[bool]", notified: bool) -> None:
    if not future.done():
        future.set_result(notified)
