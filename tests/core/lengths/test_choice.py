"""The choice of an order: what is predicted of each, and when arrival stays."""

import math

import numpy as np
import pytest

from antiphon.core.lengths.choice import choose_order, describe_order, two_tier_orders
from antiphon.core.lengths.makespan import Loop, WorkerPace, seconds_per_step
from antiphon.core.lengths.memory import ComparedGroup
from antiphon.core.lengths.order import ARRIVAL, LeaseOrder, Policy

PACE = WorkerPace(alpha=0.01, beta=0.0005, places=16)


def long_tailed(count: int, shuffled: bool = False) -> list[ComparedGroup]:
    """Return groups of four whose longest completions are known exactly, or predicted by chance."""
    random = np.random.default_rng(5)
    groups = []
    for _ in range(count):
        median = 200 * math.exp(0.9 * random.standard_normal())
        counts = tuple(int(max(1, median * math.exp(0.2 * x))) for x in random.standard_normal(4))
        groups.append(ComparedGroup(float(max(counts)), counts))
    if shuffled:
        order = random.permutation(count)
        groups = [
            ComparedGroup(groups[j].predicted, group.counts) for j, group in zip(order, groups, strict=True)
        ]
    return groups


def loop(max_staleness: int, workers: int = 2, step_scoped: bool = False) -> Loop:
    return Loop((PACE,) * workers, max_staleness, prompts_per_step=16, learner_s=1.0, step_scoped=step_scoped)


def test_one_completion_takes_its_tokens_at_the_pace_of_its_load() -> None:
    pace = WorkerPace(alpha=0.5, beta=0.25, places=2)
    alone = Loop((pace,), 0, prompts_per_step=1, learner_s=3.0, broadcast_s=2.0, reward_s=1.0)
    group = ComparedGroup(4.0, (4, 2))
    # Two tokens beside the other at 1 s, two alone at 0.75 s; then reward, step and broadcast in turn.
    assert seconds_per_step(alone, ARRIVAL, [group], steps=4) == pytest.approx(3.5 + 1.0 + 3.0 + 2.0)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_alternation_pays_where_workers_take_a_step_at_a_time(max_staleness: int) -> None:
    groups, scoped = long_tailed(96), loop(max_staleness, step_scoped=True)
    by_arrival = seconds_per_step(scoped, ARRIVAL, groups, 6)
    assert by_arrival / seconds_per_step(scoped, LeaseOrder(Policy.ALTERNATING), groups, 6) > 1.1


def test_auto_never_takes_what_is_predicted_to_be_slower() -> None:
    for shuffled in (False, True):
        choice = choose_order("auto", long_tailed(64, shuffled), loop(1))
        assert choice.step_s <= choice.arrival_s
        assert choice.order == ARRIVAL or choice.step_s < 0.97 * choice.arrival_s


def test_an_order_must_be_worth_it_against_what_was_measured_by_arrival() -> None:
    groups, scoped = long_tailed(64), loop(1, step_scoped=True)
    free = choose_order("auto", groups, scoped)
    assert free.order.policy is Policy.ALTERNATING
    assert choose_order("auto", groups, scoped, free.step_s / 0.96) == free
    # The loop itself does better in the order of arrival than any walk of it.
    assert choose_order("auto", groups, scoped, free.step_s / 0.98).order == ARRIVAL
    assert choose_order("two_tier", groups, loop(1, workers=4), 0.01).order.policy is Policy.TWO_TIER


def test_what_is_asked_for_is_taken_and_what_cannot_be_is_arrival() -> None:
    groups = long_tailed(64)
    assert choose_order("longest_first", (), None).order.policy is Policy.LONGEST_FIRST
    assert choose_order("alternating", (), None).order.policy is Policy.ALTERNATING
    assert choose_order("arrival", groups, loop(1)).order == ARRIVAL
    assert choose_order("auto", groups, None).order == ARRIVAL
    assert choose_order("two_tier", groups, loop(1, workers=4)).order.policy is Policy.TWO_TIER
    assert choose_order("two_tier", groups, loop(1, workers=1)).order == ARRIVAL
    assert list(two_tier_orders(groups, (PACE,))) == []


def test_equal_lengths_leave_the_order_of_arrival() -> None:
    groups = [ComparedGroup(50.0, (50, 50))] * 32
    assert choose_order("auto", groups, loop(1)).order == ARRIVAL


def test_the_choice_is_said_in_words() -> None:
    choice = choose_order("longest_first", (), None)
    assert describe_order(choice, None, False) == "arrival (rank correlation of lengths not known yet)"
    assert describe_order(choice, 0.1, False) == "arrival (rank correlation of lengths 0.10)"
    assert describe_order(choice, 0.9, True) == "longest first (rank correlation of lengths 0.90)"
