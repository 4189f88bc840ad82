"""Turns: the reward service has the environment answer the turns of trajectories that go on.

It reads the replies from the row's tokens and makes tokens of what the environment says. Answers travel as
they come, those that are ready together in one message. Nothing is kept: an answer that got lost is asked for
again, and the environment's conversation is built again from the row where need be.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import ContractError
from antiphon.core.message_sizes import group_bytes, page
from antiphon.core.messages import Ended, Reply
from antiphon.core.records import FinishReason, TurnAnswer, TurnToAnswer
from antiphon.core.seeds import conversation_seed
from antiphon.core.spans import turns_of
from antiphon.core.status import RunStatus
from antiphon.environments.scoring.conversations import Conversations
from antiphon.environments.scoring.messages import Failed
from antiphon.models.rendering import Renderer
from antiphon.net.rpc.retry import retry_unavailable

PULL_TURNS = 64
"""Most turns taken at once."""
ATTEMPTS = 3
"""How often a turn is asked whose process could not answer."""
READ_BEFORE = 4096
"""Trajectories whose replies are remembered."""
AT_ONCE = 16_384
"""Turns that wait for the environment at the same time."""

Answer = Callable[[TurnToAnswer], Awaitable[TurnAnswer]]
"""Has the environment answer one turn; what it does wrong is an answer too."""


class Hosting(ABC):
    """Has hosts answer turns."""

    answered: "asyncio.Queue[TurnAnswer]"
    """What they have said."""

    @abstractmethod
    def asked(self, turn: TurnToAnswer) -> None:
        """Take a question, which may come again."""

    @abstractmethod
    def sent(self, answers: Sequence[TurnAnswer]) -> None:
        """Hear of answers that the coordinator has journalled."""

    @abstractmethod
    def heard(self, status: RunStatus, unfinished: Sequence[str]) -> None:
        """Hear how the run stands, and which groups are not handed in yet; every few seconds."""

    @abstractmethod
    async def look(self) -> None:
        """Look at what time brings, for ever; an error ends the service."""


_log = structlog.get_logger(__name__)


class TurnAnswerer:
    """Has an environment answer the turns of rows."""

    def __init__(self, conversations: Conversations, renderer: Renderer, seed: int) -> None:
        """Answer by `conversations`, in the form of `renderer`; `seed` is `environment.seed`."""
        self._conversations, self._renderer, self._seed = conversations, renderer, seed
        self._read: dict[str, tuple[TurnToAnswer, tuple[Reply, ...]]] = {}
        """The last question about each trajectory that goes on, and the replies in its row."""

    async def __call__(self, turn: TurnToAnswer) -> TurnAnswer:
        """Return the answer to a turn; where there is none the trajectory has failed."""
        answer = await self._answer(turn)
        if answer.finish_reason is not None:
            self._read.pop(_name_of(turn), None)
            await self._conversations.forget(_name_of(turn))
        return answer

    def _replies_before(self, turn: TurnToAnswer) -> tuple[Reply, ...]:
        """Return those replies of a row that were read before, the first ones."""
        last, replies = self._read.pop(_name_of(turn), (turn, ()))
        while len(self._read) >= READ_BEFORE:
            del self._read[next(iter(self._read))]
        size = last.token_ids.size
        next_starts = [start for start, _ in turn.observed[len(last.observed) :]][:1]
        goes_on = (
            turn.observed[: len(last.observed)] == last.observed
            and next_starts in ([], [size])
            and np.array_equal(turn.token_ids[:size], last.token_ids)
        )
        return replies[: len(turn.observed)] if goes_on else ()

    async def _answer(self, turn: TurnToAnswer) -> TurnAnswer:
        environment = self._conversations.environment
        answer = partial(TurnAnswer, turn.group_id, turn.sample_index, turn.row_digest)
        row, prompt = turn.token_ids.tolist(), list(turn.prompt_token_ids)
        replies, sampled = self._replies_before(turn), turns_of(turn)
        for start, stop in sampled[len(replies) :]:
            reply = self._renderer.reply(prompt + row[:start], row[start:stop], environment.tools)
            replies = (*replies, reply)
        self._read[_name_of(turn)] = turn, replies
        seed = conversation_seed(self._seed, turn.prompt_key)
        for _ in range(ATTEMPTS):
            said = await self._conversations.answer(_name_of(turn), turn.prompt_key, seed, replies)
            # A process that was killed says nothing of the trajectory, whose conversation is built again.
            if not (isinstance(said, Failed) and said.infrastructure and environment.rebuildable):
                break
        if isinstance(said, Ended):
            over, parts = FinishReason.ENVIRONMENT, dict(said.parts)
            return answer(finish_reason=over, reward=said.reward, parts=parts, reason=said.reason)
        if isinstance(said, Failed):
            return answer(finish_reason=FinishReason.FAILED, failure=said.reason)
        unfinished = getattr(environment, "unfinished_reward", environment.reward_range[0])
        if len(replies) >= turn.limits.turns:
            return answer(finish_reason=FinishReason.TURNS, reward=unfinished)
        if len(row) >= turn.limits.tokens:
            return answer(finish_reason=FinishReason.TOKENS, reward=unfinished)
        start = sampled[-1][0]
        try:
            tokens = self._renderer.following(prompt + row[:start], row[start:], said, environment.tools)
        except ContractError as error:
            return answer(finish_reason=FinishReason.FAILED, failure=str(error))
        if len(row) + len(tokens) >= turn.limits.tokens:
            return answer(finish_reason=FinishReason.TOKENS, reward=unfinished)
        return answer(token_ids=tokens)


def _name_of(turn: TurnToAnswer) -> str:
    """Return what a trajectory's conversation is called."""
    return f"{turn.group_id}/{turn.sample_index}"


async def answer_turns(
    coordinator: Coordinator,
    answer: Answer | Hosting,
    client_id: str,
    limit_s: float,
    pull_wait_s: float,
) -> None:
    """Answer turns until cancelled.

    Args:
        coordinator: the run's coordinator, or a client of it.
        answer: answers one turn, or is who has hosts answer them.
        client_id: distinguishes several services of one run.
        limit_s: longest time that the coordinator may be away.
        pull_wait_s: how long one request for turns may be held open.

    Raises:
        UnavailableError: when the coordinator was away for longer than `limit_s`.
    """
    hosting = answer if isinstance(answer, Hosting) else None
    answered: asyncio.Queue[TurnAnswer] = asyncio.Queue() if hosting is None else hosting.answered
    room = asyncio.Semaphore(AT_ONCE)

    async def work(ask: Answer, turn: TurnToAnswer) -> None:
        try:
            answered.put_nowait(await ask(turn))
        finally:
            room.release()

    async def send() -> None:
        while True:
            together = [replace(await answered.get(), service=client_id)]
            while not answered.empty():
                together.append(replace(answered.get_nowait(), service=client_id))
            while together:
                fitting = page(together, lambda said: group_bytes(1, 0, len(said.token_ids)))
                handing_in = partial(coordinator.submit_turns, fitting)
                await retry_unavailable("coordinator.submit_turns", handing_in, limit_s)
                if hosting is not None:
                    hosting.sent(fitting)
                _log.debug("turns.answered", turns=len(fitting))
                del together[: len(fitting)]

    pulling = partial(coordinator.pull_turns, client_id, PULL_TURNS, pull_wait_s)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        while True:
            for turn in await retry_unavailable("coordinator.pull_turns", pulling, limit_s):
                if isinstance(answer, Hosting):
                    answer.asked(turn)
                else:
                    await room.acquire()
                    tasks.create_task(work(answer, turn))
