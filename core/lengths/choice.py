"""Choice of an order: what a run leases by, from its configuration and from what it measured of itself.

Where remembered lengths do not rank groups as they turn out, groups are taken as they come, whatever is
configured. Otherwise `auto` walks the loop under each order (`core.lengths.makespan`), with the newest groups
as they were predicted and as they were, and takes the one of least seconds per step, if that is worth it
with the older and with the newer half of these groups. A walk knows nothing of stragglers that move and of
what else a loop does, so the order must also be worth it against what was measured by arrival.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from antiphon.core.lengths.makespan import Loop, WorkerPace, seconds_per_step
from antiphon.core.lengths.memory import ComparedGroup
from antiphon.core.lengths.order import ARRIVAL, LeaseOrder, Policy

WORTH_IT = 0.03
"""Share of the seconds per step that another order must save before `auto` leaves the order of arrival."""
WALKED_STEPS = 8
WALKED_GROUPS = 128
"""Groups of a step that are walked; of larger steps, and of their fleets, a part stands for the whole."""
LONG_WORKERS = (0.125, 0.25, 0.5)
LONG_GROUPS = (0.7, 0.95)
LONG_LOADS = (0.25, 0.5)
"""two_tier: shares of the workers that take the long groups, of the groups that are short, and of the places
that a worker with long groups uses; the smallest of each is isolation of the few longest."""


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """An order, and what it is expected to give."""

    order: LeaseOrder = ARRIVAL
    step_s: float = math.nan
    """Seconds per step; NaN where they were not compared."""
    arrival_s: float = math.nan
    """Seconds per step in the order of arrival."""


def choose_order(
    asked: str,
    groups: Sequence[ComparedGroup],
    loop: Loop | None,
    measured_s: float = math.inf,
) -> OrderChoice:
    """Return the order that a run leases by while lengths predict.

    Args:
        asked: `loop.order`.
        groups: the newest groups, oldest first.
        loop: fleet and bound; None while its pace is not known: then only orders that need none are taken.
        measured_s: seconds per step that were measured in the order of arrival.
    """
    if asked in (Policy.LONGEST_FIRST, Policy.ALTERNATING):
        return OrderChoice(LeaseOrder(Policy(asked)))
    if asked == Policy.ARRIVAL or loop is None or not groups or not loop.workers:
        return OrderChoice()
    loop, middle = _part_of(loop), len(groups) // 2
    halves = [half for half in (groups[:middle], groups[middle:]) if half]

    def walked(order: LeaseOrder) -> list[float]:
        return [seconds_per_step(loop, order, half, WALKED_STEPS) for half in halves]

    by_arrival = walked(ARRIVAL)
    arrival_s = fmean(by_arrival)
    found = [(walked(order), order) for order in _candidates(asked, groups, loop)]
    if not found:
        return OrderChoice(step_s=arrival_s, arrival_s=arrival_s)
    took, order = min(found, key=lambda one: fmean(one[0]))
    # What only one half of the groups shows may be chance.
    gains = all(
        step_s <= (1.0 - WORTH_IT) * before_s for step_s, before_s in zip(took, by_arrival, strict=True)
    )
    gains = gains and fmean(took) <= (1.0 - WORTH_IT) * measured_s
    if asked == "auto" and not gains:
        return OrderChoice(step_s=arrival_s, arrival_s=arrival_s)
    return OrderChoice(order, fmean(took), arrival_s)


def describe_order(choice: OrderChoice, correlation: float | None, predicts: bool) -> str:
    """Say by what groups are leased, for people.

    >>> describe_order(OrderChoice(LeaseOrder(Policy.LONGEST_FIRST), 2.0, 2.5), 0.91, True)
    'longest first (rank correlation of lengths 0.91); expected: 2.00 s a step, by arrival 2.50'
    """
    known = "not known yet" if correlation is None else f"{correlation:.2f}"
    if not predicts:
        return f"arrival (rank correlation of lengths {known})"
    name = choice.order.policy.value.replace("_", " ")
    found = f"{name} (rank correlation of lengths {known})"
    if math.isnan(choice.step_s):
        return found
    return f"{found}; expected: {choice.step_s:.2f} s a step, by arrival {choice.arrival_s:.2f}"


def _candidates(asked: str, groups: Sequence[ComparedGroup], loop: Loop) -> Iterator[LeaseOrder]:
    if asked == "auto":
        yield LeaseOrder(Policy.LONGEST_FIRST)
        if loop.max_staleness >= 1:
            yield LeaseOrder(Policy.ALTERNATING)
        return
    yield from two_tier_orders(groups, loop.workers)


def two_tier_orders(groups: Sequence[ComparedGroup], workers: Sequence[WorkerPace]) -> Iterator[LeaseOrder]:
    """Yield the divisions of a fleet into two tiers that are tried; none of a single worker."""
    lengths = sorted(group.predicted for group in groups)
    size = max(len(group.counts) for group in groups)
    places = max(worker.places for worker in workers) // size
    seen = set[tuple[int, float, int]]()
    for workers_share in LONG_WORKERS:
        for short in LONG_GROUPS:
            for load in LONG_LOADS:
                long_workers = max(1, round(workers_share * len(workers)))
                long_tokens = lengths[min(len(lengths) - 1, int(short * len(lengths)))]
                key = (long_workers, long_tokens, max(1, int(load * places)))
                if long_workers < len(workers) and key not in seen:
                    seen.add(key)
                    yield LeaseOrder(Policy.TWO_TIER, *key)


def _part_of(loop: Loop) -> Loop:
    """Return a loop of at most `WALKED_GROUPS` groups a step, with as large a part of the workers."""
    parts = min(-(-loop.prompts_per_step // WALKED_GROUPS), len(loop.workers))
    if parts <= 1:
        return loop
    return replace(loop, workers=loop.workers[::parts], prompts_per_step=loop.prompts_per_step // parts)
