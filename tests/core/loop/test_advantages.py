"""Advantages: whom a reward is compared with, and who has no part in that."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError
from antiphon.core.loop.advantages import (
    batch_advantages,
    check_advantage,
    group_advantages,
    has_variance,
    overlong_punishment,
    own_advantages,
)

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


@given(
    rewards=st.lists(REWARDS, min_size=1, max_size=4),
    baseline=st.sampled_from(["mean", "leave_one_out", "batch"]),
    scale=st.floats(0.25, 4.0),
    shift=st.floats(-2.0, 2.0),
)
def test_over_the_batch_advantages_have_a_deviation_of_one_whatever_the_unit_of_rewards(
    rewards, baseline, scale, shift
) -> None:
    counted = [np.arange(one.size) % 3 != 1 for one in rewards]
    plain, found = (batch_advantages(rewards, counted, how, baseline) for how in (False, True))
    kept = np.concatenate(plain)[np.concatenate(counted)]
    assert not any(one[~among].any() for one, among in zip(found, counted, strict=True))
    assert abs(kept.mean()) < 1e-12
    if kept.max() - kept.min() < 0.1:
        return  # the floor of the deviation counts
    whole = np.concatenate(found)[np.concatenate(counted)]
    assert whole.std(ddof=1) == pytest.approx(1.0, abs=1e-4)
    moved = batch_advantages([scale * one + shift for one in rewards], counted, True, baseline)
    assert np.concatenate(moved) == pytest.approx(np.concatenate(found), abs=1e-3)


def test_a_group_whose_rewards_are_equal_learns_from_the_mean_of_the_batch_alone() -> None:
    rewards, counted = [np.array([1.0, 1.0]), np.array([1.0, 0.0])], [np.ones(2, bool)] * 2
    assert batch_advantages(rewards, counted, True, "mean")[0].tolist() == [0.0, 0.0]
    assert batch_advantages(rewards, counted, False, "batch")[0].tolist() == [0.25, 0.25]
    assert batch_advantages([np.ones(2)], counted[:1], True, "batch")[0].tolist() == [0.0, 0.0]
    assert batch_advantages([], [], True, "mean") == []


@given(rewards=REWARDS, counted=st.lists(st.booleans(), min_size=16, max_size=16))
def test_ones_own_that_does_as_the_built_in_one_gives_what_that_gives(rewards, counted) -> None:
    among = np.array(counted[: rewards.size])
    half = rewards.size // 2
    parts = [rewards[:half], rewards[half:]]

    def own(values, group, lengths):
        assert lengths.tolist() == [9] * len(values) and set(group) == set(range(len(set(group))))
        return np.concatenate([group_advantages(values[group == one], False) for one in sorted(set(group))])

    masks = [among[:half], among[half:]]
    found = own_advantages("a", own, parts, [np.full(len(one), 9) for one in parts], masks)
    for ours, part, mask in zip(found, parts, masks, strict=True):
        assert ours.tolist() == group_advantages(part, False, counted=mask).tolist()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda rewards, group, lengths: rewards - rewards[0], "other advantages in another order"),
        (lambda rewards, group, lengths: rewards * group, "with their groups numbered otherwise"),
        (lambda rewards, group, lengths: rewards / 0.0, "values that are not finite for 15 trajectories"),
        (lambda rewards, group, lengths: rewards[:3], r"the shape \[3\] for 15 trajectories"),
        (lambda rewards, group: rewards, "raised TypeError"),
    ],
)
def test_what_is_no_advantage_is_refused_in_one_sentence(function, words: str) -> None:
    with np.errstate(all="ignore"), pytest.raises(ConfigError, match=f"^algorithm.advantage=m:f .*{words}"):
        check_advantage("algorithm.advantage=m:f", function)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=16), st.integers(2, 200), st.integers(1, 100))
def test_a_longer_completion_is_punished_no_less_and_only_in_the_margin(
    lengths: list[int], most: int, margin: int
) -> None:
    margin = min(margin, most - 1)
    found = overlong_punishment(np.array(sorted(lengths)), most, margin)
    assert (np.diff(found) <= 0).all() and (found <= 0).all() and (found >= -1).all()
    for length, punishment in zip(sorted(lengths), found, strict=True):
        assert (punishment == 0) == (length <= most - margin) and (punishment == -1) == (length >= most)
