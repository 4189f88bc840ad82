"""Progress counter: what one thread of the learner does, and how much of it is done.

The thread counts as it goes; callers that wait for it read, from any thread, and count their patience
from the last change. What works without a break, as writing a checkpoint does, is looked at instead.
"""

from collections.abc import Callable

from antiphon.core.status import LearnerProgress


class ProgressCounter:
    """One thread's work in words and one number that never falls."""

    def __init__(self) -> None:
        self._doing = "idle"
        self._counted = "step"
        self._counter = 0
        self._look: Callable[[], int] = lambda: 0
        self._seen = 0
        """The most that `_look` returned."""

    def begin(self, doing: str, counted: str) -> None:
        """Say what is done from now on, and what is counted of it, in the singular.

        Beginning counts nothing: work that fails and is begun again makes no progress.
        """
        self._doing = doing
        self.counting(counted)

    def counting(self, counted: str, look: Callable[[], int] = lambda: 0) -> None:
        """Say what is counted from now on; `look` returns how much was done since, where no one can tell."""
        self._counter, self._seen = self.read().counter, 0
        self._look, self._counted = look, counted

    def add(self, count: int = 1) -> None:
        """Count what was done."""
        self._counter += count

    def end(self) -> None:
        """Say that nothing is done for the moment."""
        self.begin("idle", "step")

    def read(self) -> LearnerProgress:
        """Return what is done now."""
        self._seen = max(self._seen, self._look())
        return LearnerProgress(self._doing, self._counter + self._seen, self._counted)
