"""Groups that are being sampled: the hint of a completion that ended, and where a group would end sooner."""

import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks.parts.lengths import draw_groups
from antiphon.core.lengths.running import GROUPS_NEEDED, GroupEnds, RunningGroup

GROUP = RunningGroup("slow", age_s=10.0, samples=2, remembered=100.0, tokens=10)


def measured(**paces: float) -> GroupEnds:
    ends = GroupEnds()
    for worker, pace in paces.items():
        for _ in range(GROUPS_NEEDED):
            ends.add(worker, 40 * pace, (20, 40))
    return ends


def test_the_first_completion_that_ended_says_how_long_its_group_is() -> None:
    ends = measured(slow=1.0)
    assert ends.longest(GROUP) == 100.0
    assert ends.longest(replace(GROUP, ended=(30,))) == 60.0  # whatever is remembered
    assert ends.longest(replace(GROUP, ended=(30,), remembered=None, tokens=70)) == 70.0
    assert ends.longest(replace(GROUP, remembered=None)) is None  # a prompt that was never seen
    assert GroupEnds().longest(replace(GROUP, ended=(30,))) == 100.0  # nothing says how groups end
    assert ends.longest(replace(GROUP, samples=3, ended=(30,))) == 100.0


def test_the_hint_is_better_than_what_is_remembered() -> None:
    groups = draw_groups(300, 4, 300.0, seed=3)
    ends, hinted, remembered = GroupEnds(), [], []
    for group in groups:
        shortest = min(group.counts)
        found = ends.longest(RunningGroup("w", 0.0, 4, group.predicted, shortest, (shortest,)))
        assert found is not None
        hinted.append(abs(math.log(found / group.longest)))
        remembered.append(abs(math.log(group.predicted / group.longest)))
        ends.add("w", 1.0, group.counts)
    assert median(hinted[GROUPS_NEEDED:]) < 0.8 * median(remembered[GROUPS_NEEDED:])


@pytest.mark.parametrize(
    ("paces", "group", "moves"),
    [
        ({"slow": 1.0, "fast": 0.1}, GROUP, True),  # 9 s against 90 s
        ({"slow": 1.0, "fast": 0.6}, GROUP, False),  # 54 s are not worth it
        ({"slow": 1.0, "fast": 1.0}, GROUP, False),
        ({"slow": 1.0, "fast": 0.1}, replace(GROUP, age_s=95.0), False),  # it ends by itself
        ({"slow": 1.0, "fast": 0.1}, replace(GROUP, remembered=None), False),
        ({"slow": 1.0, "fast": 0.1}, replace(GROUP, remembered=None, ended=(10,)), True),  # 1 s against 10 s
        ({"fast": 0.1}, GROUP, False),  # nobody knows how fast its holder is
        ({"slow": 1.0}, GROUP, False),
    ],
)
def test_a_group_moves_to_who_would_end_it_well_before_its_holder(
    paces: dict[str, float], group: RunningGroup, moves: bool
) -> None:
    assert measured(**paces).sooner_at(group, "fast") is moves


def test_a_worker_that_left_is_forgotten_and_an_empty_group_says_nothing() -> None:
    ends = measured(slow=1.0, fast=0.1)
    assert ends.uneven
    ends.forget("slow")
    assert not ends.uneven and ends.pace("slow") is None
    ends.add("slow", 5.0, (0, 0))
    assert ends.pace("slow") is None


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.floats(0.01, 10.0), st.floats(0.0, 500.0))
def test_workers_of_equal_pace_exchange_no_group(lengths: list[int], pace: float, age_s: float) -> None:
    """What a holder has sampled so far grows with the age of its lease."""
    ends = GroupEnds()
    for length in lengths:
        ends.add("a", pace * length, (length,))
        ends.add("b", pace * length, (length,))
    group = RunningGroup("a", age_s, 1, 500.0, min(500, int(age_s / pace)))
    assert not ends.sooner_at(group, "b")
