"""Signals: those who wait for a change are woken by it, and never wait without a deadline."""

import asyncio


class Signal:
    """Wakes everyone who waits at the moment; nothing is remembered for those who come later."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next `notify`; False when `timeout_s` seconds passed without one."""
        if timeout_s <= 0:
            return False
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
