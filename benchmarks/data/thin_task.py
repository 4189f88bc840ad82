"""Thin task: a task in which random weights earn something, so that a run of them trains."""

from typing import Any

from antiphon.environments.environment import Problem
from antiphon.environments.generated import GeneratedEnvironment


class ShareOfAscii(GeneratedEnvironment):
    """Say something in ASCII: an answer is worth the share of its characters that are."""

    def draw(self, random: Any) -> tuple[str, str]:
        return f"Tell me about the number {random.integers(10**6)}.", "It is one."

    def score(self, problem: Problem, completion: str) -> float:
        return sum(character.isascii() for character in completion) / max(1, len(completion))
