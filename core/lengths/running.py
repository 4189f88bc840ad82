"""Running groups: when a group that is being sampled should end, and who would end it sooner.

What is remembered of a prompt predicts its longest completion before it begins. The first completions of a
group that end say it better, and for prompts that were never seen too: a group's completions are of like
lengths, and how far the longest lies behind the first that ended is learned from the groups before.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

GROUPS_REMEMBERED = 256
"""Newest groups that say how lengths within a group differ."""
GROUPS_NEEDED = 16
"""Fewer than these say nothing about that."""
LEASES_REMEMBERED = 8
"""Newest leases of a worker that say how fast it is."""
WORKERS_REMEMBERED = 4096
SOONER = 0.5
"""Another worker must need less than this share of the time that is left, or a group stays where it is."""


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """What is known of a group that one worker samples from its first token on."""

    worker_id: str
    age_s: float
    """Seconds since it was leased."""
    samples: int
    remembered: float | None
    """Tokens that its longest completion should have; None where that is not known."""
    tokens: int = 0
    """Most tokens that are known of one of its completions."""
    ended: Sequence[int] = ()
    """Tokens of its completions that ended."""


class GroupEnds:
    """How groups ended lately, and how fast each worker samples them."""

    def __init__(self) -> None:
        self._groups: deque[list[int]] = deque(maxlen=GROUPS_REMEMBERED)
        self._leases: dict[str, deque[float]] = {}

    def add(self, worker_id: str, seconds: float, counts: Sequence[int]) -> None:
        """Take in a group that one worker sampled from its first token to its last.

        Args:
            worker_id: which.
            seconds: that it took.
            counts: tokens of the completions.
        """
        if not counts or min(counts) < 1:
            return
        self._groups.append(sorted(counts))
        if worker_id not in self._leases and len(self._leases) >= WORKERS_REMEMBERED:
            self.forget(next(iter(self._leases)))
        leases = self._leases.setdefault(worker_id, deque(maxlen=LEASES_REMEMBERED))
        leases.append(seconds / max(counts))

    def forget(self, worker_id: str) -> None:
        """Forget how fast a worker was."""
        self._leases.pop(worker_id, None)

    def pace(self, worker_id: str) -> float | None:
        """Return the seconds that a worker takes for a token of a group's longest completion."""
        leases = self._leases.get(worker_id)
        return None if leases is None else median(leases)

    @property
    def uneven(self) -> bool:
        """Return whether one worker is so much faster than another that a group may be worth moving."""
        paces = [median(leases) for leases in self._leases.values()]
        return bool(paces) and min(paces) < SOONER * max(paces)

    def longest(self, group: RunningGroup) -> float | None:
        """Return the tokens that a group's longest completion should have; None where nothing says it."""
        found, count = group.remembered, len(group.ended)
        alike = [counts for counts in self._groups if len(counts) == group.samples]
        if 0 < count < group.samples and len(alike) >= GROUPS_NEEDED:
            found = max(group.ended) * median(counts[-1] / counts[count - 1] for counts in alike)
        return None if found is None else max(found, float(group.tokens))

    def sooner_at(self, group: RunningGroup, worker_id: str) -> bool:
        """Return whether a worker that goes on from what is known ends a group well before its holder."""
        longest, home, away = self.longest(group), self.pace(group.worker_id), self.pace(worker_id)
        if longest is None or home is None or away is None:
            return False
        return (longest - group.tokens) * away < SOONER * (longest * home - group.age_s)
