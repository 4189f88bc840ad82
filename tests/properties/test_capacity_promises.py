"""The capacity model against the loop itself: staleness within (4), no deadlock, the rule at the knee."""

import numpy as np
import pytest

from antiphon.core.capacity.model import (
    LoopShape,
    largest_staleness,
    least_staleness,
    pace,
    required_supply,
)
from tests.support.walked_schedules import Schedule, random_schedule, walk

SCHEDULES = 150


def test_staleness_stays_within_the_equation_and_nothing_deadlocks(test_seed: int) -> None:
    attained = 0
    for number in range(SCHEDULES):
        schedule = random_schedule(np.random.default_rng([test_seed, number]))
        walked = walk(schedule, np.random.default_rng([test_seed, number, 1]))
        bound = largest_staleness(schedule.shape, schedule.publish_interval, schedule.run_ahead)
        assert walked.staleness_max <= bound, (test_seed, number)
        assert walked.steps == schedule.steps, (test_seed, number)
        attained += walked.staleness_max == bound
    assert attained > SCHEDULES // 20, "the equation is loose, or the schedules are tame"


def test_the_gate_holds_the_bound_and_nothing_deadlocks(test_seed: int) -> None:
    for number in range(SCHEDULES):
        schedule = random_schedule(np.random.default_rng([test_seed, number]), gated=True)
        walked = walk(schedule, np.random.default_rng([test_seed, number, 1]))
        assert schedule.max_staleness is not None
        assert walked.staleness_max <= schedule.max_staleness, (test_seed, number)
        assert walked.steps == schedule.steps, (test_seed, number)


@pytest.mark.parametrize(
    ("interval", "broadcast", "pauses", "acceptance"),
    [
        *((1, 0.2, True, 1.0), (1, 0.5, True, 1.0), (2, 0.5, True, 1.0)),
        *((2, 1.2, True, 1.0), (3, 0.5, True, 1.0)),
        *((1, 0.5, False, 1.0), (2, 1.2, False, 1.0), (4, 4.0, False, 1.0), (1, 0.5, False, 0.7)),
    ],
)
def test_the_rule_is_where_the_learner_stops_waiting(
    interval: int, broadcast: float, pauses: bool, acceptance: float
) -> None:
    steps = 40
    for factor, waits in ((0.93, True), (1.05, False)):
        shape = LoopShape(32, 10.0, 10.0 * broadcast, 2.0, acceptance, pauses)
        supply = factor * required_supply(shape, interval)
        slots = round(supply * shape.group_s * 4)
        # Slots are whole, so the completion's length carries the supply.
        shape = LoopShape(32, 10.0, 10.0 * broadcast, slots / supply, acceptance, pauses)
        ahead = 2.0 + 2.0 * np.ceil(broadcast)
        walked = walk(
            Schedule(shape, interval, (slots,), run_ahead=ahead, steps=steps, counted_from=16),
            np.random.default_rng(3),
        )
        idle = 1.0 - shape.train_s / walked.step_s
        assert (idle > 0.02) == waits, (factor, idle)


@pytest.mark.parametrize("bound", range(5))
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize(("broadcast_s", "group_s"), [(5.0, 20.0), (12.0, 4.0), (1.0, 9.0), (25.0, 8.0)])
def test_a_small_bound_costs_what_the_model_says(
    bound: int, interval: int, broadcast_s: float, group_s: float
) -> None:
    if bound < interval - 1:
        return
    shape = LoopShape(8, 10.0, broadcast_s, group_s)
    # This many slots that a batch takes one completion: collecting is as long as a group.
    schedule = Schedule(shape, interval, (8 * 12,), max_staleness=bound, steps=40)
    walked = walk(schedule, np.random.default_rng(0))
    # Where broadcasts are longer than the interval, which versions are sent depends on when they end.
    rel = 0.12 if broadcast_s > interval * shape.train_s else 0.03
    assert walked.step_s == pytest.approx(pace(shape, bound, interval, 8 * 12 / group_s).step_s, rel=rel)


@pytest.mark.parametrize("interval", [2, 3, 4])
@pytest.mark.parametrize("newest", [0, 1, 2])
@pytest.mark.parametrize("sampling", [0.85, 1.0, 2.5])
@pytest.mark.parametrize("broadcast", [0.4, 1.0])
def test_versions_that_serve_many_batches_must_sample_them(
    interval: int, newest: int, sampling: float, broadcast: float
) -> None:
    """S from kappa - 1 to 2 kappa - 2, near and beyond the edge of the supply."""
    bound = interval - 1 + newest
    if bound > 2 * interval - 2:
        return
    train_s, size = 10.0, 24
    supply = size / (sampling * train_s)
    # A quarter of a batch is sampled at once: what a version must sample is what takes time, not one length.
    shape = LoopShape(size, train_s, broadcast * train_s, size / 4 / supply)
    schedule = Schedule(shape, interval, (size // 4,), max_staleness=bound, steps=60, counted_from=12)
    walked = walk(schedule, np.random.default_rng(0))
    planned = pace(shape, bound, interval, supply)
    assert planned.step_s == pytest.approx(walked.step_s, rel=0.05)


@pytest.mark.parametrize("acceptance", [1.0, 0.75, 0.5, 0.3])
@pytest.mark.parametrize(("interval", "broadcast"), [(1, 0.25), (2, 0.4), (3, 0.5)])
@pytest.mark.parametrize("length", [0.3, 1.0, 2.5])
def test_at_the_least_staleness_no_learner_waits_also_when_groups_are_filtered(
    acceptance: float, interval: int, broadcast: float, length: float
) -> None:
    train_s, size = 10.0, 32
    shape = LoopShape(size, train_s, broadcast * train_s, 1.0, acceptance)
    supply = required_supply(shape, interval)
    slots = max(2, round(length * train_s * supply))
    shape = LoopShape(size, train_s, broadcast * train_s, slots / supply, acceptance)
    bound = least_staleness(shape) + interval - 1
    schedule = Schedule(shape, interval, (slots // 2, slots - slots // 2), max_staleness=bound, steps=40)
    walked = walk(schedule, np.random.default_rng(0))
    assert walked.step_s <= 1.03 * train_s, (bound, walked.step_s / train_s)
