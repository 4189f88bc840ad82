"""Advantages: whom a reward is compared with, and who has no part in that."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.loop.advantages import group_advantages, has_variance

REWARDS = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=16).map(np.array)


def test_advantages_of_a_group_with_one_right_answer() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    assert not has_variance(np.ones(4)) and not has_variance(np.zeros(0)) and has_variance(rewards)
    assert group_advantages(np.full(4, 0.1), normalise=True).tolist() == [0.0] * 4
    plain = group_advantages(rewards, normalise=False)
    assert plain.tolist() == [0.75, -0.25, -0.25, -0.25]
    scaled = group_advantages(rewards, normalise=True)
    assert scaled.sum() == pytest.approx(0.0) and scaled.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


@given(rewards=REWARDS)
def test_leave_one_out_compares_a_reward_with_the_mean_of_the_others(rewards) -> None:
    found = group_advantages(rewards, False, "leave_one_out")
    for place, reward in enumerate(rewards):
        others = np.delete(rewards, place)
        assert found[place] == pytest.approx(reward - others.mean(), abs=1e-12)


@given(rewards=REWARDS, normalise=st.booleans(), baseline=st.sampled_from(["mean", "leave_one_out"]))
def test_what_does_not_count_moves_no_other_and_gets_nothing(rewards, normalise, baseline) -> None:
    counted = np.arange(rewards.size) % 3 != 1
    found = group_advantages(rewards, normalise, baseline, counted)
    assert found[counted].tolist() == group_advantages(rewards[counted], normalise, baseline).tolist()
    assert not found[~counted].any()
    assert not group_advantages(rewards, normalise, baseline, np.zeros(rewards.size, dtype=bool)).any()
