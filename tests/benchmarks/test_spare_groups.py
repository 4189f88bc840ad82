"""Batches of the first groups that end: what they would be, and why no run has them."""

import pytest

from antiphon.benchmarks.parts.lengths.spare_groups import walk_spare


def test_without_spare_groups_a_loop_in_step_trains_all_that_it_opens() -> None:
    row = walk_spare(4, 0, 0.0, steps=6)
    assert row.gain == pytest.approx(1.0)
    assert row.length_bias == 0.0 and row.given_up == 0.0


def test_spare_groups_gain_by_what_is_given_up_and_that_is_the_longest() -> None:
    row = walk_spare(4, 0, 0.25, steps=6)
    assert row.gain > 1.1
    assert row.given_up > 0.1 and row.length_bias < -0.1


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_with_a_bound_workers_have_work_already_and_batches_only_become_short(max_staleness: int) -> None:
    row = walk_spare(4, max_staleness, 0.125, steps=6)
    assert row.gain < 1.1
    assert row.first_bias < -0.1
