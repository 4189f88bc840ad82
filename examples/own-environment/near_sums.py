"""Near sums: the nearer an answer is, the more it is worth."""

import re
from typing import ClassVar

import numpy as np

from antiphon.environments.environment import Problem
from antiphon.environments.generated import GeneratedEnvironment


class NearSums(GeneratedEnvironment):
    """Three numbers to add and take away; an answer that is off by one is worth a half."""

    defaults: ClassVar = {"largest": 9}

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        a, b, c = random.integers(0, self.parameters["largest"], 3, endpoint=True)
        prompt = f"State the final answer to the following arithmetic problem: {a} + {b} - {c} ="
        return prompt, str(a + b - c)

    def score(self, problem: Problem, completion: str) -> float:
        found = re.search(r"<answer>(-?\d{1,9})</answer>\s*$", completion)
        return 1 / (1 + abs(int(found[1]) - int(problem.answer))) if found else 0.0
