"""Turn tasks: two small tasks with turns, which the examples train on.

environment.name: antiphon.environments.turn_tasks:Guess    (examples/game.yaml)
environment.name: antiphon.environments.turn_tasks:Sums     (examples/tools.yaml)
"""

import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from antiphon.core.messages import Ended, Message, Reply
from antiphon.core.seeds import generator
from antiphon.environments.conversation import user
from antiphon.environments.environment import Problem
from antiphon.environments.generated import GeneratedConversations
from antiphon.environments.tools import ToolConversation


class _Guessing:
    """One game: the number is drawn from the conversation's seed."""

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        least, top = map(int, re.findall(r"\d+", problem.text))
        self.number = int(generator("guess", seed).integers(least, top, endpoint=True))
        return [user(problem.text)]

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        guess = re.fullmatch(r"\s*(\d{1,6})\s*", reply.text)
        if guess is None:
            return Ended(0.0, reason="no number")
        if int(guess[1]) == self.number:
            return Ended(1.0, reason="found")
        return [user("higher" if int(guess[1]) < self.number else "lower")]


class Guess(GeneratedConversations):
    """A number to guess, after "higher" and "lower" within `environment.max_turns` guesses."""

    only_compares = True
    defaults: ClassVar = {"least": 3, "most": 15}
    """Numbers that may be the right one besides the least."""
    conversation = _Guessing

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        least = random.integers(1, 16, endpoint=True)
        top = least + random.integers(self.parameters["least"], self.parameters["most"], endpoint=True)
        return f"Guess my number from {least} to {top}.", ""


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class _Adding(ToolConversation):
    functions = (add,)

    def said(self, reply: Reply) -> Ended:
        return Ended(float(reply.text.strip() == self.problem.answer))


class Sums(GeneratedConversations):
    """Two numbers to add, with a tool that adds."""

    only_compares = True
    defaults: ClassVar = {"most": 99}
    conversation = _Adding

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        a, b = random.integers(1, self.parameters["most"], 2, endpoint=True)
        return f"What is {a} + {b}?", str(a + b)
