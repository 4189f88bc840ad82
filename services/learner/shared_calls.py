"""Shared calls: work that several callers ask for is done once, and whoever comes back gets its result."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

MOST_WAIT_S = 30.0
"""Longest that a call is held open."""
OUTCOME_S = 60.0
"""How long a result is kept for a caller that does not come back for it."""

_T = TypeVar("_T")
_log = structlog.get_logger("learner")


class SharedCalls:
    """Calls by name; each is under way at most once."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._closing = False

    def running(self) -> list[str]:
        """Return the names of what is under way."""
        return [name for name, task in self._under_way.items() if not task.done()]

    def close(self) -> None:
        """Cancel what is under way."""
        self._closing = True
        for task in list(self._under_way.values()):
            task.cancel()

    async def once(self, name: str, begin: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Join the call of that name that is under way, or begin it, and return its result."""
        task = await self.join(name, begin, None)
        return task.result()

    async def join(
        self, name: str, begin: Callable[[], Coroutine[Any, Any, _T]], wait_s: float | None
    ) -> "asyncio.Task[_T]":
        """Join the call of that name that is under way, or begin it, for up to `wait_s` seconds.

        A caller that gives up leaves the work going: a thread cannot be called back, and the next caller
        will want its result. Whoever finds it done takes it away.
        """
        task = self._under_way.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(begin(), name=name)
            self._under_way[name] = task
            task.add_done_callback(lambda done: self._ended(name, done))
        await asyncio.wait({task}, timeout=None if wait_s is None else min(max(0.0, wait_s), MOST_WAIT_S))
        if task.done():
            self._forget(name, task)
        return task

    def _ended(self, name: str, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("call.failed", call=name, error=str(error))
        if not self._closing:
            asyncio.get_running_loop().call_later(OUTCOME_S, self._forget, name, task)

    def _forget(self, name: str, task: asyncio.Task[Any]) -> None:
        if self._under_way.get(name) is task:
            del self._under_way[name]
