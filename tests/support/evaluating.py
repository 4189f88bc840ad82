"""Environment whose scorer runs its answers: the worst that a scorer can be."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.environments.environment import Problem

FACTORY = "evaluating:make_environment"
FOLDER = str(Path(__file__).parent)
"""In which a scoring process finds this module, and the one that starts it."""
if FOLDER not in sys.path:
    sys.path.append(FOLDER)
HONEST = "won = 3 > 2"


class Evaluating:
    """Runs an answer as Python; the reward is 1 when it leaves `won` true."""

    name = "sandbox/evaluating"
    only_compares = False

    def problem(self, split: str, index: int) -> Problem:
        return Problem(f"{split}-0-{index}", "", "")

    def size(self, split: str) -> int:
        return 1 << 20

    def problem_by_key(self, key: str) -> Problem:
        if key.endswith("-missing"):
            Path("/data/missing").read_text()
        return Problem(key, "", "")

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        rewards = []
        for text in completions:
            names: dict[str, Any] = {}
            exec(text, names)
            rewards.append(float(bool(names.get("won"))))
        return rewards


class Returning(Evaluating):
    """Gives back what an answer leaves in `reward`, whatever that is."""

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        names: dict[str, Any] = {}
        exec(completions[0], names)
        return [names["reward"]]


def make_environment(
    name: str, parameters: Mapping[str, Any], seed: int, train_size: int, heldout_size: int
) -> Evaluating:
    """Build the one that `name` says."""
    return Returning() if name == "sandbox/returning" else Evaluating()
