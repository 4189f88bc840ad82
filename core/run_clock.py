"""Run clock: how long a run has worked, told from its start-ups and breaks, by its journal's events alone.

A session lasts from one opening of the journal by a coordinator to the next. It works from its first
sign of work (a lease that is granted, a group that is handed in, the learner's step) to its last event
that has a time; before that it starts up. Between two sessions there is a break. Within a session times are
the coordinator's monotonic clock; the length of a break is wall clock, since no other outlives a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OPENINGS = frozenset({"run.opened", "run.resumed"})
_WORK = frozenset({"lease.granted", "lease.duplicated", "group.submitted", "step.committed"})


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Where the seconds of a run went, up to one moment."""

    wall_s: float
    """Seconds of work: from the first lease on, less what the other two say."""
    startup_s: float
    """Seconds from each opening to the first sign of work."""
    break_s: float
    """Seconds between two sessions: from the newest event of one that has a time to the next opening."""
    breaks: int
    """Sessions that continued the work of an earlier one."""


@dataclass(slots=True)
class RunClock:
    """The fold of a run's events into its times."""

    worked_s: float = 0.0
    """Of the sessions before, as the next one."""
    startup_s: float = 0.0
    break_s: float = 0.0
    sessions: int = 0
    """Sessions that showed work, this one among them."""
    opened_s: float | None = None
    """When this session began, on its coordinator's clock, as the next two."""
    working_s: float | None = None
    """Its first sign of work; None before."""
    latest_s: float = 0.0

    def apply(self, event: Any) -> None:
        """Take in the next event of the journal."""
        kind, at_s = event.kind, getattr(event, "at_s", None)
        if self.working_s is not None and at_s is not None and kind not in _OPENINGS:
            self.latest_s = max(self.latest_s, at_s)  # as `take`, which all but a few events need no more of
        elif at_s is not None or kind in _OPENINGS:
            names = ("at_s", "break_s", "metrics")
            self.take(kind, {name: getattr(event, name) for name in names if hasattr(event, name)})

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take in the next event of the journal, by its kind and its fields."""
        at_s: float | None = fields.get("at_s")
        if kind in _OPENINGS:
            before = self.times()
            self.worked_s, self.startup_s = before.wall_s, before.startup_s
            self.break_s += fields.get("break_s", 0.0)
            self.opened_s, self.working_s, self.latest_s = at_s, None, at_s or 0.0
        elif at_s is not None:
            if self.opened_s is None:  # opened by a version that kept no time of it
                self.opened_s = at_s
            self.latest_s = max(self.latest_s, self.opened_s, at_s)
            if self.working_s is None and kind in _WORK:
                begun_s = at_s - fields.get("metrics", {}).get("train_s", 0.0)
                self.working_s = min(at_s, max(self.opened_s, begun_s))
                self.sessions += 1

    def times(self) -> RunTimes:
        """Return the times up to the newest event."""
        wall_s, startup_s = self.worked_s, self.startup_s
        if self.opened_s is not None:
            began = self.latest_s if self.working_s is None else self.working_s
            wall_s, startup_s = wall_s + self.latest_s - began, startup_s + began - self.opened_s
        return RunTimes(wall_s, startup_s, self.break_s, max(0, self.sessions - 1))
