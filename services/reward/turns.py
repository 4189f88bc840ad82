"""Turns: the reward service has the environment answer the turns of trajectories that go on.

Answers travel as they come, those that are ready together in one message. Nothing is kept: an answer that got
lost is asked for again, and the environment's conversation is built again from the row where need be.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.records import TurnAnswer, TurnToAnswer
from antiphon.net.rpc.retry import retry_unavailable

PULL_TURNS = 64
"""Most turns taken at once."""
AT_ONCE = 1024
"""Turns that wait for the environment at the same time."""

Answer = Callable[[TurnToAnswer], Awaitable[TurnAnswer]]
"""Has the environment answer one turn; what it does wrong is an answer too."""

_log = structlog.get_logger(__name__)


async def answer_turns(
    coordinator: Coordinator, answer: Answer, client_id: str, limit_s: float, pull_wait_s: float
) -> None:
    """Answer turns until cancelled.

    Args:
        coordinator: the run's coordinator, or a client of it.
        answer: answers one turn.
        client_id: distinguishes several services of one run.
        limit_s: longest time that the coordinator may be away.
        pull_wait_s: how long one request for turns may be held open.

    Raises:
        UnavailableError: when the coordinator was away for longer than `limit_s`.
    """
    answered: asyncio.Queue[TurnAnswer] = asyncio.Queue()
    room = asyncio.Semaphore(AT_ONCE)

    async def work(turn: TurnToAnswer) -> None:
        try:
            answered.put_nowait(await answer(turn))
        finally:
            room.release()

    async def send() -> None:
        while True:
            together = [await answered.get()]
            while not answered.empty():
                together.append(answered.get_nowait())
            handing_in = partial(coordinator.submit_turns, together)
            await retry_unavailable("coordinator.submit_turns", handing_in, limit_s)
            _log.debug("turns.answered", turns=len(together))

    pulling = partial(coordinator.pull_turns, client_id, PULL_TURNS, pull_wait_s)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        while True:
            for turn in await retry_unavailable("coordinator.pull_turns", pulling, limit_s):
                await room.acquire()
                tasks.create_task(work(turn))
