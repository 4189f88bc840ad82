"""Shortcuts: what rewards move with although it should not matter, such as the length of an answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LONGER = "Within a group, completions longer than its mean earned {} more than shorter ones"


@dataclass(slots=True)
class Differences:
    """Differences, one by one, as their mean and its 95% interval (Welford's sums)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def add(self, value: float) -> None:
        """Take in the next one."""
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    def compare(self, completions: Sequence[tuple[int, float]]) -> None:
        """Take in what the longer completions of a group earned more than the shorter ones, on average.

        `completions` are lengths in tokens and rewards; nothing is said by those that are all as long.
        """
        middle = sum(length for length, _ in completions) / max(1, len(completions))
        longer = [reward for length, reward in completions if length > middle]
        shorter = [reward for length, reward in completions if length < middle]
        if longer and shorter:
            self.add(sum(longer) / len(longer) - sum(shorter) / len(shorter))

    def lines(self, sentence: str, counted: str) -> list[str]:
        """Say them in a sentence with a place for the mean; nothing while there are fewer than two.

        >>> Differences(2, 0.375, 0.03125).lines("Green ones earned {} more", "groups")
        ['Green ones earned 0.375 ± 0.245 more (mean and 95% interval of 2 groups).']
        """
        if self.count < 2:
            return []
        half = 1.96 * math.sqrt(self.squares / (self.count - 1) / self.count)
        said = sentence.format(f"{self.mean:.3f} ± {half:.3f}")
        return [f"{said} (mean and 95% interval of {self.count:,} {counted})."]
