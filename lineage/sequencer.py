"""In order: jobs told in any order are handed on in the order of their numbers.

Stages of neighbouring steps may end in either order, but a version's document names its
parent's digest. What comes too early waits; where a number never comes, the wait ends after a
few others.
"""

from collections import defaultdict
from collections.abc import Callable

MOST_HELD = 16
"""Numbers that wait before a missing one is given up; stages are never that far apart."""


class Sequencer:
    """Hands jobs on once their number was reached; used by one thread at a time."""

    def __init__(self, reached: int = -1) -> None:
        """Begin; `reached` is the last number whose jobs were handed on earlier."""
        self._reached = reached
        self._held: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)

    def tell(self, number: int, job: Callable[[], None], *, completes: bool = False) -> None:
        """Hand on a job when all smaller numbers are complete.

        Args:
            number: the job's place.
            job: called now or later, once.
            completes: whether it is the last job of its number.

        >>> said, order = [], Sequencer()
        >>> order.tell(1, lambda: said.append("one"), completes=True)
        >>> order.tell(0, lambda: said.append("zero"), completes=True)
        >>> said
        ['zero', 'one']
        """
        self._held[number].append(job)
        if completes:
            self._held[number].append(lambda: self._complete(number))
        self._hand_on()
        if len(self._held) > MOST_HELD:
            self._reached = min(self._held) - 1
            self._hand_on()

    def release(self) -> None:
        """Hand on everything held, in order, whatever is missing."""
        while self._held:
            self._reached = max(self._reached, min(self._held) - 1)
            self._hand_on()

    def _complete(self, number: int) -> None:
        self._reached = max(self._reached, number)

    def _hand_on(self) -> None:
        while self._held and min(self._held) <= self._reached + 1:
            for job in self._held.pop(min(self._held)):
                job()
