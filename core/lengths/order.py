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
- two_tier: the fastest workers take the long groups, and of them few at once, so that each token takes less
  time; the others take the rest. With one worker and the few longest groups this is isolation.

A worker much slower than the fastest begins at the short end.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

SLOW = 0.5
"""A worker below this share of the fastest one's pace begins at the short end."""


class Policy(StrEnum):
    """How groups are ordered by length."""

    ARRIVAL = "arrival"
    LONGEST_FIRST = "longest_first"
    ALTERNATING = "alternating"
    TWO_TIER = "two_tier"


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """A policy with what it needs to be carried out."""

    policy: Policy
    long_workers: int = 0
    """two_tier: so many of the fastest workers take the long groups."""
    long_tokens: float = math.inf
    """two_tier: a group is long from so many predicted tokens of its longest completion on."""
    long_groups: int = 0
    """two_tier: groups that such a worker samples at once."""


ARRIVAL = LeaseOrder(Policy.ARRIVAL)


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

    rank: int = 0
    """How many of them are faster."""
    workers: int = 1
    """How many there are."""
    share: float = 1.0
    """Its pace over that of the fastest."""
    held: int = 0
    """Groups that it samples."""


class WaitingGroups:
    """The groups that may be leased, in order."""

    def __init__(self, order: LeaseOrder, groups: Iterable[WaitingGroup] = ()) -> None:
        self._order = order
        self._steps: tuple[dict[int, list[tuple[float, int]]], ...] = ({}, {})
        """Short and long groups: step -> (minus tokens, number), ascending."""
        self._count = 0
        for group in groups:
            self.add(group)

    def __len__(self) -> int:
        return self._count

    def add(self, group: WaitingGroup) -> None:
        """Add one group."""
        order = self._order
        long = order.policy is Policy.TWO_TIER and group.tokens >= order.long_tokens
        tokens = 0.0 if order.policy is Policy.ARRIVAL else group.tokens
        bisect.insort(self._steps[long].setdefault(group.step, []), (-tokens, group.number))
        self._count += 1

    def take(self, worker: AskingWorker, most: int) -> list[int]:
        """Remove and return the numbers of up to `most` groups for a worker, the first to sample first."""
        order, taken = self._order, list[int]()
        tiers: Sequence[dict[int, list[tuple[float, int]]]] = self._steps
        if order.policy is Policy.TWO_TIER and worker.rank < min(order.long_workers, worker.workers):
            tiers = (self._steps[1], self._steps[0])
            most = min(most, max(0, order.long_groups - worker.held)) if self._steps[1] else most
        for tier in tiers:
            while tier and len(taken) < most:
                step = min(tier)
                taken += self._deal(tier[step], worker, most - len(taken))
                if not tier[step]:
                    del tier[step]
        self._count -= len(taken)
        return taken

    def _deal(self, line: list[tuple[float, int]], worker: AskingWorker, most: int) -> list[int]:
        """Remove up to `most` groups of one step."""
        policy, count = self._order.policy, min(most, len(line))
        dealt = policy in (Policy.LONGEST_FIRST, Policy.TWO_TIER)
        stride = max(1, min(worker.workers, len(line) // count)) if dealt else 1
        places = [index * stride for index in range(count)]
        if policy is not Policy.ARRIVAL and worker.share < SLOW:
            places = [len(line) - 1 - place for place in places]
        taken = [line[place][1] for place in places]
        for place in sorted(places, reverse=True):
            del line[place]
        return taken
