"""The answerer of turns reads each reply of a row once, and says what one that reads all of them says."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.message_sizes import PAGE_BYTES
from antiphon.core.messages import Ended, Message, Reply
from antiphon.core.records import TurnAnswer, TurnLimits, TurnToAnswer
from antiphon.environments.conversation import ConversationEnvironment, user
from antiphon.environments.scoring.conversations import Conversations
from antiphon.environments.scoring.messages import Turn
from antiphon.models.rendering import Renderer
from antiphon.services.reward.turns import TurnAnswerer, answer_turns
from tests.support.talking import Talking

ENDS = 9
"""A reply that begins with this token ends its trajectory."""


class Counting:
    """A renderer that notes what it reads, and conversations that say what they were asked."""

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []
        self.environment = cast(ConversationEnvironment, Talking("echo"))

    def reply(self, context: Sequence[int], turn: Sequence[int], tools: Any) -> Reply:
        self.read.append(tuple(turn))
        return Reply(" ".join(map(str, [len(context), *turn])))

    def following(
        self, context: Sequence[int], turn: Sequence[int], said: Sequence[Message], tools: Any
    ) -> tuple[int, ...]:
        return tuple(ord(character) % 8 for character in said[0].content[:3])

    async def answer(self, trajectory: str, key: str, seed: int, replies: Sequence[Reply]) -> Turn:
        if replies[-1].text.split()[1] == str(ENDS):
            return Ended(1.0)
        return (user("; ".join(reply.text for reply in replies)),)

    async def forget(self, trajectory: str) -> None:
        pass


def made(parts: Counting) -> TurnAnswerer:
    return TurnAnswerer(cast(Conversations, parts), cast(Renderer, parts), seed=0)


def question(sample: int, turns: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> TurnToAnswer:
    row, observed = list(turns[0]), []
    for answer, turn in zip(said, turns[1:], strict=True):
        observed.append((len(row), len(row) + len(answer)))
        row += [*answer, *turn]
    tokens = np.array(row, dtype=np.int32)
    return TurnToAnswer("g", sample, "d", "train-0-1", (1, 2), tokens, tuple(observed), TurnLimits(9, 999))


def test_each_reply_of_a_trajectory_is_read_once() -> None:
    async def story() -> None:
        parts = Counting()
        answer, turns, said = made(parts), [(3, 4)], list[tuple[int, ...]]()
        for turn in ((5,), (6, 7), (ENDS,)):
            found = await answer(question(0, turns, said))
            said.append(found.token_ids)
            turns.append(turn)
        assert (await answer(question(0, turns, said))).reward == 1.0
        assert parts.read == [(3, 4), (5,), (6, 7), (ENDS,)] and not answer._read

    asyncio.run(story())


@given(data=st.data())
def test_whatever_rows_come_under_a_name_the_answer_is_that_to_the_row(data: st.DataObject) -> None:
    """Such as those of another attempt, a repeated question, or an older one."""
    tokens = st.lists(st.integers(3, ENDS), min_size=1, max_size=3)
    rows = st.lists(tokens, min_size=1, max_size=4)

    async def story() -> None:
        used = made(Counting())
        asked: list[TurnToAnswer] = []
        for _ in range(data.draw(st.integers(1, 6))):
            sample = data.draw(st.integers(0, 1))
            turns = data.draw(rows)
            said = data.draw(st.lists(tokens, min_size=len(turns) - 1, max_size=len(turns) - 1))
            longer = [one for one in asked if one.sample_index == sample]
            one = question(sample, turns, said)
            if longer and data.draw(st.booleans()):
                one = data.draw(st.sampled_from(longer))
            asked.append(one)
            expected: TurnAnswer = await made(Counting())(one)
            assert await used(one) == expected

    asyncio.run(story())


def test_answers_that_are_too_large_together_travel_in_several_messages() -> None:
    async def story() -> None:
        said = tuple(range(300, 300 + (1 << 20)))
        asked = [question(sample, [(3,)], []) for sample in range(8)]
        messages: list[list[int]] = []
        heard: list[int] = []
        all_heard = asyncio.Event()

        class Asking:
            async def pull_turns(self, client_id: str, limit: int, wait_s: float) -> list[TurnToAnswer]:
                if not asked:
                    await asyncio.Event().wait()
                found, asked[:] = list(asked), []
                return found

            async def submit_turns(self, answers: Sequence[TurnAnswer]) -> None:
                messages.append([5 * len(one.token_ids) for one in answers])
                heard.extend(one.sample_index for one in answers)
                assert {one.service for one in answers} == {"c"}
                if len(heard) == 8:
                    all_heard.set()

        async def answer(turn: TurnToAnswer) -> TurnAnswer:
            return TurnAnswer(turn.group_id, turn.sample_index, turn.row_digest, said)

        answering = asyncio.create_task(answer_turns(cast(Any, Asking()), answer, "c", 9.0, 9.0))
        async with asyncio.timeout(60):
            await all_heard.wait()
        answering.cancel()
        assert sorted(heard) == list(range(8))
        assert len(messages) > 1 and all(sum(sizes) <= PAGE_BYTES for sizes in messages)

    asyncio.run(story())
