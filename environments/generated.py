"""Generated environment: the base of an environment of your own that draws its problems from a seed.

A subclass says how one problem is drawn, and what an answer is worth or who answers it. Keys, splits that
share no problem, sizes and the check of parameters are here. The text of a problem decides its split: a
fixed quarter of all texts is held out, whatever the seed and the sizes.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from antiphon.core.errors import ConfigError
from antiphon.core.messages import UNIT_RANGE, RewardRange, Tool
from antiphon.core.seeds import derive_seed, generator
from antiphon.environments.conversation import Conversation
from antiphon.environments.environment import SPLITS, Problem, SplitEnvironment, checked, key_of
from antiphon.environments.tools import tool_of

DRAWS_PER_PROBLEM, FEWEST_DRAWS = 64, 4_096
"""Draws for each problem of a split, and in all at least, before the task counts as having too few."""


class GeneratedProblems(SplitEnvironment):
    """Problems drawn one by one; the same seed and index give the same problem on every machine."""

    only_compares: ClassVar[bool] = False
    """Whether the task does no more with a text than compare it; all else is done in a sandbox."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """The parameters that the task takes, with their values where `environment.parameters` names none."""
    reward_range: RewardRange = UNIT_RANGE
    """The least and the largest that a completion may be worth."""

    def __init__(self, parameters: Mapping[str, Any], seed: int, train_size: int, heldout_size: int) -> None:
        """Check the parameters; no problem is drawn yet.

        Raises:
            ConfigError: for a parameter that is not among `defaults`, or of another type than there.
        """
        self.parameters = checked(parameters, self.defaults)
        super().__init__(seed, train_size, heldout_size)
        self._problems: dict[str, list[Problem]] = {split: [] for split in SPLITS}
        self._texts: set[str] = set()
        self._drawn = dict.fromkeys(SPLITS, 0)

    @abstractmethod
    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        """Draw one problem: its prompt, and a right answer. All chance must come from `random`."""

    def make(self, split: str, index: int) -> Problem:
        """Return a problem, drawn when it is first asked for.

        Raises:
            ConfigError: when the task has too few different problems.
        """
        known = self._problems[split]
        while len(known) <= index:
            self._draw_into(split)
        return known[index]

    def _draw_into(self, split: str) -> None:
        """Draw until one more problem of the split is found that is not there yet."""
        most = max(FEWEST_DRAWS, DRAWS_PER_PROBLEM * self._sizes[split])
        while self._drawn[split] < most:
            text, answer = self.draw(generator("generated", split, self.seed, self._drawn[split]))
            self._drawn[split] += 1
            held_out = derive_seed("generated-split", text) % 4 == 0
            if held_out == (split == "heldout") and text not in self._texts:
                self._texts.add(text)
                place = len(self._problems[split])
                self._problems[split].append(Problem(key_of(split, self.seed, place), text, answer))
                return
        raise ConfigError(
            f"environment.{split}_size={self._sizes[split]} is more than the task has: {most} draws gave "
            f"{len(self._problems[split])} different prompts; lower it, or make the task more varied"
        )


class GeneratedEnvironment(GeneratedProblems):
    """Problems drawn from a seed, each answered once."""

    @abstractmethod
    def score(self, problem: Problem, completion: str) -> float:
        """Return what one completion is worth, in [0, 1]. What it raises is an answer that failed."""

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        """Return what each completion is worth."""
        return [self.score(problem, completion) for completion in completions]


class GeneratedConversations(GeneratedProblems):
    """Problems drawn from a seed, each the beginning of a conversation."""

    rebuildable: ClassVar[bool] = True

    @abstractmethod
    def conversation(self) -> Conversation:
        """Make the conversation of one trajectory; may be the conversation's class itself."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Return what the policy may call: the conversation's `functions`."""
        return [tool_of(function) for function in getattr(self.conversation(), "functions", ())]
