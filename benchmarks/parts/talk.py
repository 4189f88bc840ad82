"""Talk: conversations of a benchmark, whose environment says the same to every reply, after a while."""

import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from antiphon.core.messages import Ended, Message, Reply
from antiphon.environments.conversation import user
from antiphon.environments.environment import Problem
from antiphon.environments.generated import GeneratedConversations


class Talk(GeneratedConversations):
    """Conversations that only `environment.max_turns` ends, but for `turns`."""

    only_compares = True
    defaults: ClassVar = {"answer_ms": 0, "turns": 1}

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        a, b = random.integers(1, 999, 2, endpoint=True)
        return f"What is {a} + {b}?", ""

    def conversation(self) -> "_Talking":
        return _Talking(self.parameters["turns"], self.parameters["answer_ms"] / 1000.0)


class _Talking:
    def __init__(self, turns: int, answer_s: float) -> None:
        self._left, self._answer_s = turns, answer_s

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        return [user(problem.text)]

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        time.sleep(self._answer_s)
        self._left -= 1
        if self._left == 0:
            return Ended(float(len(reply.text) % 2))
        return [user("higher" if len(reply.text) % 2 else "lower")]
