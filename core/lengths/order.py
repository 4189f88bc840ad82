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

from collections.abc import Iterable
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


def take(
    order: LeaseOrder,
    groups: Iterable[tuple[int, int, float]],
    most: int,
    workers: int = 1,
    share: float = 1.0,
) -> list[int]:
    """Return the numbers of up to `most` groups for a worker that asks, the first to sample first.

    Args:
        order: how groups are ordered.
        groups: those that may be leased: number (the lower, the earlier it trains), step at which it trains,
            and tokens that its longest completion is predicted to need.
        most: how many it may have.
        workers: how many are active.
        share: its pace over that of the fastest.
    """
    steps: dict[int, list[tuple[float, int]]] = {}
    for number, step, tokens in groups:
        steps.setdefault(step, []).append((0.0 if order is LeaseOrder.ARRIVAL else -tokens, number))
    taken = list[int]()
    for _, line in sorted(steps.items()):
        if not (count := min(most - len(taken), len(line))):
            break
        dealt = order is LeaseOrder.LONGEST_FIRST
        stride = max(1, min(workers, len(line) // count)) if dealt else 1
        line.sort()
        if order is not LeaseOrder.ARRIVAL and share < SLOW:
            line.reverse()
        taken += [line[place * stride][1] for place in range(count)]
    return taken
