"""Lease order: which of the groups that may be leased a worker gets.

A group keeps its place in the line whatever its length (`core.loop.places`), so the order of leasing decides
when a group is sampled and by whom, never with which others it trains. What may be leased at all was decided
before by the staleness bound. A group of an earlier step is always preferred, for its batch is needed first.

- arrival: as opened.
- longest_first: the longest of a step first, so that none begins when the others end. A worker that asks for
  several at once is dealt every n-th of the order, n workers being active: all get long and short ones.
- alternating: the longest first too, but a worker gets neighbours of the order: who asks first the longest,
  who asks last the shortest. Who had short groups is the first to ask again, so each worker has long and
  short ones in turn: two steps balance, which needs S >= 1, and groups that run together end together.

A worker much slower than the fastest begins at the short end.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

SLOW = 0.5
"""A worker below this share of the fastest one's pace begins at the short end."""


class LeaseOrder(StrEnum):
    """How groups are ordered."""

    ARRIVAL = "arrival"
    LONGEST_FIRST = "longest first"
    ALTERNATING = "alternating"


def order_by_length(max_staleness: int) -> LeaseOrder:
    """Return the order of a run whose remembered lengths predict, see docs/decisions/lease-order.md.

    >>> order_by_length(0), order_by_length(1)
    (<LeaseOrder.LONGEST_FIRST: 'longest first'>, <LeaseOrder.ALTERNATING: 'alternating'>)
    """
    return LeaseOrder.ALTERNATING if max_staleness else LeaseOrder.LONGEST_FIRST


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A group that may be leased."""

    number: int
    """Its place among those that may be leased: the lower, the earlier it trains."""
    step: int
    """At which it trains."""
    tokens: float
    """That its longest completion is predicted to need."""


@dataclass(frozen=True, slots=True)
class AskingWorker:
    """A worker that asks for groups, among the active ones."""

    workers: int = 1
    """How many there are."""
    share: float = 1.0
    """Its pace over that of the fastest."""


class WaitingGroups:
    """The groups that may be leased, in order."""

    def __init__(self, order: LeaseOrder, groups: Iterable[WaitingGroup] = ()) -> None:
        self._order = order
        self._steps: dict[int, list[tuple[float, int]]] = {}
        """Step -> (minus tokens, number), ascending."""
        self._count = 0
        for group in groups:
            self.add(group)

    def __len__(self) -> int:
        return self._count

    def add(self, group: WaitingGroup) -> None:
        """Add one group."""
        tokens = 0.0 if self._order is LeaseOrder.ARRIVAL else group.tokens
        bisect.insort(self._steps.setdefault(group.step, []), (-tokens, group.number))
        self._count += 1

    def take(self, worker: AskingWorker, most: int) -> list[int]:
        """Remove and return the numbers of up to `most` groups for a worker, the first to sample first."""
        taken = list[int]()
        while self._steps and len(taken) < most:
            step = min(self._steps)
            taken += self._deal(self._steps[step], worker, most - len(taken))
            if not self._steps[step]:
                del self._steps[step]
        self._count -= len(taken)
        return taken

    def _deal(self, line: list[tuple[float, int]], worker: AskingWorker, most: int) -> list[int]:
        """Remove up to `most` groups of one step."""
        count = min(most, len(line))
        dealt = self._order is LeaseOrder.LONGEST_FIRST
        stride = max(1, min(worker.workers, len(line) // count)) if dealt else 1
        places = [index * stride for index in range(count)]
        if self._order is not LeaseOrder.ARRIVAL and worker.share < SLOW:
            places = [len(line) - 1 - place for place in places]
        taken = [line[place][1] for place in places]
        for place in sorted(places, reverse=True):
            del line[place]
        return taken
