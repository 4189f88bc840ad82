"""Shortcuts: what rewards move with although it should not matter, such as the length of an answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LONGER = "Within a group the longer half of the completions earned {} more than the shorter half"
"""What `longer_less_shorter` says of a run."""


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

    def lines(self, sentence: str, counted: str) -> list[str]:
        """Say them in a sentence with a place for the mean; nothing while there are fewer than two.

        >>> said = Differences()
        >>> said.add(0.5), said.add(0.25)
        (None, None)
        >>> said.lines("Green ones earned {} more", "groups")
        ['Green ones earned 0.375 ± 0.245 more (mean and 95% interval of 2 groups).']
        """
        if self.count < 2:
            return []
        half = 1.96 * math.sqrt(self.squares / (self.count - 1) / self.count)
        said = sentence.format(f"{self.mean:.3f} ± {half:.3f}")
        return [f"{said} (mean and 95% interval of {self.count:,} {counted})."]


def longer_less_shorter(completions: Sequence[tuple[int, float]]) -> float | None:
    """Return the mean reward of the longer half less that of the shorter half; None where all are as long.

    The halves are those above and below the middle length; what is just as long is in neither.

    Args:
        completions: length in tokens and reward of each of one group.

    >>> longer_less_shorter([(10, 0.0), (20, 1.0), (30, 1.0)])
    1.0
    """
    lengths = sorted(length for length, _ in completions)
    if not lengths or lengths[0] == lengths[-1]:
        return None
    middle = (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2
    longer = [reward for length, reward in completions if length > middle]
    shorter = [reward for length, reward in completions if length < middle]
    if not longer or not shorter:  # more than half are as long as the longest, or the shortest
        longer = [reward for length, reward in completions if length == lengths[-1]]
        shorter = [reward for length, reward in completions if length == lengths[0]]
    return sum(longer) / len(longer) - sum(shorter) / len(shorter)
