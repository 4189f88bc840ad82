"""Run clock: the seconds in which a run worked, read off its journal's wall clock.

It shows 0 until the first lease and stands still during every break: from the last event before the
journal was opened again to the first sign of work after that. What it leaves out has names of its own.
"""

from dataclasses import dataclass

WORK = frozenset(
    (
        "lease.granted",
        "lease.duplicated",
        "group.submitted",
        "group.rewarded",
        "batch.sealed",
        "step.committed",
    )
)
"""Kinds of events that show a run at work."""


@dataclass(frozen=True, slots=True)
class Break:
    """A stretch in which the run did not work."""

    at_s: float
    """Where the clock stood."""
    break_s: float
    """From the last event to the moment at which a coordinator opened the journal again."""
    startup_s: float
    """From then to the first sign of work."""


class RunClock:
    """Gives each event its second; events come in the order of the journal."""

    def __init__(self) -> None:
        self.startup_s = 0.0
        """From the first event to the first lease."""
        self.breaks: list[Break] = []
        self._first: float | None = None
        self._last = 0.0
        self._zero: float | None = None
        """Unix seconds at which the clock would show 0, breaks so far left out."""
        self._stood_from: float | None = None
        self._opened = 0.0

    def read(self, kind: str, at: float) -> float:
        """Return the second of an event of this kind that was written at `at`, Unix seconds."""
        if self._first is None:
            self._first = at
        if self._zero is None and kind in WORK:
            self._zero, self.startup_s = at, at - self._first
        if self._zero is None:
            return 0.0
        if kind == "run.resumed":
            self._stood_from = self._last if self._stood_from is None else self._stood_from
            self._opened = at
        if self._stood_from is not None and kind in WORK:
            gap, startup = self._opened - self._stood_from, at - self._opened
            self.breaks.append(Break(self._stood_from - self._zero, gap, startup))
            self._zero += gap + startup
            self._stood_from = None
        self._last = at
        return (at if self._stood_from is None else self._stood_from) - self._zero
