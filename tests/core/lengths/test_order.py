"""Orders of leasing: every group is given exactly once, and whom each order gives it to."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.lengths.order import LeaseOrder, take

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=24)


class Waiting:
    """Groups that wait, until they are taken."""

    def __init__(self, order: LeaseOrder, lengths: list[int], per_step: int = 100) -> None:
        self.order = order
        self.left = {i: (i, i // per_step, float(tokens)) for i, tokens in enumerate(lengths)}

    def take(self, most: int = 1, workers: int = 1, share: float = 1.0) -> list[int]:
        taken = take(self.order, self.left.values(), most, workers, share)
        for number in taken:
            del self.left[number]
        return taken


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(LeaseOrder), LENGTHS, st.lists(st.integers(1, 4), min_size=1), st.integers(1, 4))
def test_every_group_is_given_exactly_once_to_whoever_asks(
    order: LeaseOrder, lengths: list[int], asks: list[int], workers: int
) -> None:
    groups = Waiting(order, lengths, per_step=4)
    given_out: list[int] = []
    turn = 0
    while groups.left:
        most = asks[turn % len(asks)]
        taken = groups.take(most, workers)
        assert 1 <= len(taken) <= most
        given_out += taken
        turn += 1
    assert sorted(given_out) == list(range(len(lengths)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LeaseOrder), LENGTHS)
def test_an_earlier_step_comes_first(order: LeaseOrder, lengths: list[int]) -> None:
    groups = Waiting(order, lengths, per_step=5)
    taken = [groups.take()[0] for _ in lengths]
    assert [number // 5 for number in taken] == sorted(number // 5 for number in taken)


@pytest.mark.parametrize("order", LeaseOrder)
def test_equal_lengths_are_taken_as_they_come(order: LeaseOrder) -> None:
    groups = Waiting(order, [4] * 6)
    assert [groups.take()[0] for _ in range(6)] == list(range(6))


def test_longest_first_deals_and_alternating_gives_neighbours() -> None:
    lengths = [1, 2, 3, 4]
    dealt = Waiting(LeaseOrder.LONGEST_FIRST, lengths)
    assert dealt.take(2, workers=2) == [3, 1]
    assert dealt.take(2, workers=2) == [2, 0]
    neighbours = Waiting(LeaseOrder.ALTERNATING, lengths)
    assert neighbours.take(2, workers=2) == [3, 2]
    assert neighbours.take(2, workers=2) == [1, 0]


def test_a_slow_worker_begins_at_the_short_end() -> None:
    groups = Waiting(LeaseOrder.LONGEST_FIRST, [1, 2, 3, 4])
    assert groups.take(workers=2, share=0.1) == [0]
    assert Waiting(LeaseOrder.ARRIVAL, [1, 2]).take(workers=2, share=0.1) == [0]
