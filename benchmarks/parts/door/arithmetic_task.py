"""Arithmetic task: what the cookbook's `math_rl env=arithmetic` asks, as an environment of a run of ours.

Apart from the model for it: an environment is loaded where completions are judged, which has no torch.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from antiphon.core.messages import Ended, Message, Reply
from antiphon.environments.environment import Problem
from antiphon.environments.generated import GeneratedConversations

LARGEST = 100
"""Of both numbers, as in `tinker_cookbook.recipes.math_rl.arithmetic_env`."""
EXAMPLE = ("What is 4 + 5?", "9")
"""Comes before each question there."""
_INTEGER = re.compile(r"-?\d+")


class _Asked:
    """One question after the example; right when the last number of the answer is."""

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        self._sum = int(problem.answer)
        return [Message("user", EXAMPLE[0]), Message("assistant", EXAMPLE[1]), Message("user", problem.text)]

    def answer(self, reply: Reply) -> Ended:
        found = _INTEGER.findall(reply.text.replace(",", ""))
        return Ended(float(bool(found) and int(found[-1]) == self._sum))


class Arithmetic(GeneratedConversations):
    """The sums of the cookbook's recipe, with its prompts and its judgement."""

    only_compares = True
    conversation: ClassVar = _Asked

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        """Draw two numbers."""
        a, b = map(int, random.integers(0, LARGEST, 2, endpoint=True))
        return f"What is {a} + {b}?", str(a + b)
