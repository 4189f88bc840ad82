"""Sequencer: records that come in any order are handed out in the order of their numbers.

Stages of neighbouring steps may end in either order, but a version's document names its
parent's digest. What comes too early waits; where a number never comes, the wait ends after a
few others.
"""

from collections import defaultdict
from typing import Generic, TypeVar

MOST_HELD = 16
"""Numbers that wait before a missing one is given up; stages are never that far apart."""


R = TypeVar("R")


class Sequencer(Generic[R]):
    """Hands records out once all smaller numbers are complete; used by one thread at a time."""

    def __init__(self) -> None:
        self._reached = -1
        """The last number that is complete."""
        self._held: defaultdict[int, list[R]] = defaultdict(list)
        self._complete: set[int] = set()

    def add(self, number: int, record: R, *, completes: bool = False) -> list[R]:
        """Take a record and return those that are due now, in order.

        Args:
            number: the record's number.
            record: handed out now or later, once.
            completes: whether its number is complete with it.

        >>> order = Sequencer()
        >>> order.add(1, "one", completes=True)
        []
        >>> order.add(0, "zero", completes=True)
        ['zero', 'one']
        """
        self._held[number].append(record)
        if completes:
            self._complete.add(number)
        due = self._due()
        if len(self._held) > MOST_HELD:
            self._reached = min(self._held) - 1
            due += self._due()
        return due

    def release(self) -> list[R]:
        """Return everything held, in order, whatever is missing."""
        due = []
        while self._held:
            self._reached = max(self._reached, min(self._held) - 1)
            due += self._due()
        return due

    def _due(self) -> list[R]:
        due: list[R] = []
        while self._held and (number := min(self._held)) <= self._reached + 1:
            due += self._held.pop(number)
            if number in self._complete:
                self._complete.remove(number)
                self._reached = max(self._reached, number)
        return due
