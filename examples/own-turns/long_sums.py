"""Long sums: the policy adds two numbers at a time with a tool, and then says the sum."""

import numpy as np

from antiphon.core.messages import Ended, Reply
from antiphon.environments.generated import GeneratedConversations
from antiphon.environments.tools import ToolConversation


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class _Adding(ToolConversation):
    functions = (add,)

    def said(self, reply: Reply) -> Ended:
        return Ended(float(reply.text.split()[-1:] == [self.problem.answer]))


class LongSums(GeneratedConversations):
    """Four numbers to add, with a tool that adds two."""

    conversation = _Adding

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        numbers = random.integers(10, 99, 4).tolist()
        return f"Add {numbers}, and end with the sum alone.", str(sum(numbers))
