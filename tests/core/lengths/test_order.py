"""Orders of leasing: every group is given exactly once, and whom each order gives it to."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.lengths.order import (
    ARRIVAL,
    AskingWorker,
    LeaseOrder,
    Policy,
    WaitingGroup,
    WaitingGroups,
)

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=24)


def waiting(order: LeaseOrder, lengths: list[int], per_step: int = 100) -> WaitingGroups:
    groups = (WaitingGroup(i, i // per_step, float(tokens)) for i, tokens in enumerate(lengths))
    return WaitingGroups(order, groups)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(Policy)), LENGTHS, st.lists(st.integers(1, 4), min_size=1), st.integers(1, 4))
def test_every_group_is_given_exactly_once_to_whoever_asks(
    policy: Policy, lengths: list[int], asks: list[int], workers: int
) -> None:
    groups = waiting(LeaseOrder(policy, 1, 5.0, 2), lengths, per_step=4)
    given_out: list[int] = []
    turn = 0
    while len(groups):
        most = asks[turn % len(asks)]
        taken = groups.take(AskingWorker(turn % workers, workers), most)
        assert 1 <= len(taken) <= most
        given_out += taken
        turn += 1
    assert sorted(given_out) == list(range(len(lengths)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([Policy.ARRIVAL, Policy.LONGEST_FIRST, Policy.ALTERNATING]), LENGTHS)
def test_an_earlier_step_comes_first(policy: Policy, lengths: list[int]) -> None:
    groups = waiting(LeaseOrder(policy), lengths, per_step=5)
    order = [groups.take(AskingWorker(), 1)[0] for _ in lengths]
    assert [number // 5 for number in order] == sorted(number // 5 for number in order)


@pytest.mark.parametrize("policy", [Policy.ARRIVAL, Policy.LONGEST_FIRST, Policy.ALTERNATING])
def test_equal_lengths_are_taken_as_they_come(policy: Policy) -> None:
    groups = waiting(LeaseOrder(policy), [4] * 6)
    assert [groups.take(AskingWorker(), 1)[0] for _ in range(6)] == list(range(6))


def test_longest_first_deals_and_alternating_gives_neighbours() -> None:
    lengths = [1, 2, 3, 4]
    dealt = waiting(LeaseOrder(Policy.LONGEST_FIRST), lengths)
    assert dealt.take(AskingWorker(workers=2), 2) == [3, 1]
    assert dealt.take(AskingWorker(workers=2), 2) == [2, 0]
    neighbours = waiting(LeaseOrder(Policy.ALTERNATING), lengths)
    assert neighbours.take(AskingWorker(workers=2), 2) == [3, 2]
    assert neighbours.take(AskingWorker(workers=2), 2) == [1, 0]


def test_a_slow_worker_begins_at_the_short_end() -> None:
    groups = waiting(LeaseOrder(Policy.LONGEST_FIRST), [1, 2, 3, 4])
    assert groups.take(AskingWorker(rank=1, workers=2, share=0.1), 1) == [0]
    assert waiting(ARRIVAL, [1, 2]).take(AskingWorker(rank=1, workers=2, share=0.1), 1) == [0]


def test_two_tiers_keep_the_long_groups_to_the_fastest_and_few_at_once() -> None:
    order = LeaseOrder(Policy.TWO_TIER, long_workers=1, long_tokens=8.0, long_groups=2)
    groups = waiting(order, [9, 1, 8, 2, 9])
    assert groups.take(AskingWorker(rank=1, workers=2), 2) == [3, 1]
    assert groups.take(AskingWorker(rank=0, workers=2, held=1), 4) == [0]
    assert groups.take(AskingWorker(rank=0, workers=2, held=2), 4) == []
    # Nothing waits for a worker that does not come.
    assert groups.take(AskingWorker(rank=1, workers=2), 4) == [4, 2]
