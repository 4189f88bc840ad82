"""Change: wakes every loop of the worker that waits for something to decide on."""

import asyncio


class Change:
    """A bell without memory: whoever waits when it rings wakes up."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake everyone who waits now."""
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next ring, or for `timeout_s` seconds; False when nothing rang."""
        rung = self._rung
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that meets the ring.
            async with asyncio.timeout(timeout_s):
                await rung.wait()
        except TimeoutError:
            return False
        return True
