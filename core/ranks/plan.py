"""Plan: which rows share a micro-batch, and which rank computes it.

It follows from the lengths of the rows alone, so every rank computes the whole plan and none has to be told.
All ranks get equally many micro-batches, since each of them waits for the others in every one; a rank that
lacks one gets a dummy, whose loss has no weight. One rank's plan fills micro-batches up to the budget, in
order. Of several ranks none is to wait long: the budget falls as far as it may without another round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PLAN_VERSION = 1
"""Raised when equal rows come into other micro-batches or to other ranks; part of the numerics."""
SLOTS_PER_POSITION = 4
"""Attention sees rows whole: at most this many of their tokens for each position of the budget."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The micro-batches of one update, and who computes which."""

    micro_batches: tuple[slice, ...]
    """The rows of each, in their order; every row is in one."""
    ranks: tuple[tuple[int | None, ...], ...]
    """Of each rank the numbers of its micro-batches, ascending, then None for each dummy; equally many."""


def plan_ranks(lengths: Sequence[int], common: Sequence[int], token_budget: int, ranks: int) -> RankPlan:
    """Cut rows into micro-batches of at most `token_budget` positions and deal these to ranks.

    A row longer than the budget gets a micro-batch of its own.

    Args:
        lengths: tokens of the rows, none 0.
        common: what each row has in common with the one before, tokens, which is computed once; at most the
            length of either.
        token_budget: positions computed at once.
        ranks: at least 1.

    >>> plan_ranks([4, 4, 4], [0, 0, 0], 8, 2)
    RankPlan(micro_batches=(slice(0, 2, None), slice(2, 3, None)), ranks=((0,), (1,)))
    >>> plan_ranks([9], [0], 8, 2).ranks
    ((0,), (None,))
    """
    parts = _cut(lengths, common, token_budget)
    rounds = -(-len(parts) // ranks)
    if ranks > 1:
        # The smallest budget that needs no further round: the cut is greedy, so fewer positions never make
        # fewer parts. Parts of the mean size would be the best there is.
        low, high = (
            _positions(lengths, common, slice(0, len(lengths))) // max(1, rounds * ranks) - 1,
            token_budget,
        )
        while high - low > 1:
            budget = (low + high) // 2
            found = _cut(lengths, common, budget)
            if len(found) <= rounds * ranks:
                high, parts = budget, found
            else:
                low = budget
    dealt: list[list[int | None]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    sizes = [_positions(lengths, common, part) for part in parts]
    # The longest first, each to the rank with the least to do (Graham 1969).
    for number in sorted(range(len(parts)), key=lambda number: (-sizes[number], number)):
        rank = min((rank for rank in range(ranks) if len(dealt[rank]) < rounds), key=lambda rank: loads[rank])
        dealt[rank].append(number)
        loads[rank] += sizes[number]
    own = (sorted(number for number in numbers if number is not None) for numbers in dealt)
    return RankPlan(tuple(parts), tuple((*numbers, *[None] * (rounds - len(numbers))) for numbers in own))


def _positions(lengths: Sequence[int], common: Sequence[int], part: slice) -> int:
    return sum(lengths[part]) - sum(common[part.start + 1 : part.stop])


def _cut(lengths: Sequence[int], common: Sequence[int], token_budget: int) -> list[slice]:
    starts: list[int] = []
    positions = slots = 0
    for place, (length, shared) in enumerate(zip(lengths, common, strict=True)):
        positions += length - shared
        slots += length
        if not starts or positions > token_budget or slots > SLOTS_PER_POSITION * token_budget:
            starts.append(place)
            positions = slots = length
    return [slice(start, stop) for start, stop in pairwise([*starts, len(lengths)])]
