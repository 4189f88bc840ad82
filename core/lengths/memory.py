"""Length memory: how long the completions of each prompt were, and whether that says how long they will be.

Of each prompt the longest completion of its groups is kept, the newer ones counting more. A
prediction is only worth something if it ranks groups as they then turn out: `correlation` is Spearman's rank
correlation of the longest completion as predicted and as seen, over the newest groups that had a prediction.

The memory is part of the run's state: it changes with `group.submitted` alone, so a restart of the
coordinator finds it as it was.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PROMPTS_REMEMBERED = 65_536
"""Prompts whose lengths are kept; those that were sampled longest ago go first."""
GROUPS_COMPARED = 256
"""Newest groups that had a prediction, by which predictions are judged."""
GROUPS_NEEDED = 32
"""Fewer than these say nothing about predictions: by chance 32 of them reach 0.4 once in 80 times."""
LEAST_CORRELATION = 0.4
"""Below it groups are taken as they come."""
NEWEST = 0.6
"""Weight of a prompt's newest group; the others have the rest."""


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """One group as it was predicted and as it was."""

    predicted: float
    """Tokens of its longest completion."""
    counts: tuple[int, ...]
    """Tokens of its completions."""

    @property
    def longest(self) -> int:
        return max(self.counts)


@dataclass(slots=True)
class LengthMemory:
    """What is remembered of the lengths of a run's training groups."""

    prompts: dict[int, float] = field(default_factory=dict)
    """Prompt -> tokens of the longest completion of its groups, for which the others wait; the
    prompt that was sampled longest ago first."""
    compared: list[ComparedGroup] = field(default_factory=list)
    """Oldest first."""
    added: int = 0
    """Groups taken in so far."""

    def add(self, prompt_index: int, counts: Sequence[int]) -> None:
        """Take in a finished group of a prompt.

        Args:
            prompt_index: of the training split.
            counts: tokens of its completions; a group without any is ignored.
        """
        if not counts:
            return
        longest, before = float(max(counts)), self.prompts.pop(prompt_index, None)
        if before is not None:
            self.compared = [*self.compared, ComparedGroup(before, tuple(counts))][-GROUPS_COMPARED:]
            longest = NEWEST * longest + (1.0 - NEWEST) * before
        elif len(self.prompts) >= PROMPTS_REMEMBERED:
            del self.prompts[next(iter(self.prompts))]
        self.prompts[prompt_index] = longest
        self.added += 1

    def predict(self, prompt_index: int) -> float | None:
        """Return the tokens that the longest completion of a prompt's next group should have; None when the
        prompt was never sampled."""
        return self.prompts.get(prompt_index)

    def correlation(self) -> float | None:
        """Return Spearman's rank correlation of predicted and seen lengths, -1..1.

        None while too few groups can be compared, or where all predictions or all lengths are equal.
        """
        if len(self.compared) < GROUPS_NEEDED:
            return None
        predicted = [group.predicted for group in self.compared]
        return rank_correlation(predicted, [group.longest for group in self.compared])


def predicts(correlation: float | None) -> bool:
    """Return whether lengths rank groups well enough to order them by.

    >>> predicts(0.8), predicts(0.1), predicts(None)
    (True, False, False)
    """
    return correlation is not None and correlation >= LEAST_CORRELATION


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, equal values sharing their mean rank; None where one side has only
    equal values.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 90.0])
    1.0
    """
    first, second = _ranks(left), _ranks(right)
    first, second = first - first.mean(), second - second.mean()
    scale = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return float((first * second).sum()) / scale if scale > 0.0 else None


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    _, place, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2.0)[place]
    return ranks
