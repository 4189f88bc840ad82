"""Scores of suites: estimators against enumeration, and intervals."""

from collections import Counter
from itertools import combinations, product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.reporting.suite_scores import ItemSamples, majority, pass_at_k, suite_scores

ITEMS = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n), min_size=1, max_size=8)
)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    choices = [any(choice) for choice in combinations(right, k)]
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(choices) / len(choices))


@given(ITEMS)
def test_scores_lie_in_their_intervals_and_do_not_change(rewards: list[list[float]]) -> None:
    items = [ItemSamples(tuple(row)) for row in rewards]
    found = suite_scores(items, seed=3)
    n = len(rewards[0])
    assert found == suite_scores(items, seed=3)
    assert {f"avg@{n}", "pass@1", f"pass@{n}"} <= {*found} and f"maj@{n}" not in found
    assert found[f"avg@{n}"].mean == pytest.approx(found["pass@1"].mean)
    for one in found.values():
        assert 0.0 <= one.low <= one.high <= 1.0
        assert one.low - 0.5 <= one.mean <= one.high + 0.5


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=4))
def test_an_interval_is_that_of_all_suites_that_can_be_drawn(means: list[float]) -> None:
    found = suite_scores([ItemSamples((mean,)) for mean in means], seed=0)["avg@1"]
    drawn = [fmean(suite) for suite in product(means, repeat=len(means))]
    for bound, share in ((found.low, 0.025), (found.high, 0.975)):
        below = sum(mean < bound - 1e-9 for mean in drawn) / len(drawn)
        up_to = sum(mean <= bound + 1e-9 for mean in drawn) / len(drawn)
        assert below <= share + 0.025 and up_to >= share - 0.025


@given(
    st.lists(st.tuples(st.sampled_from(["", "4", "four", "5", " 5"]), st.booleans()), min_size=1, max_size=6)
)
def test_the_majority_is_what_counting_says(samples: list[tuple[str, bool]]) -> None:
    rewards = [float(right and bool(answer)) for answer, right in samples]
    camps = [
        "right" if reward else answer.strip() for (answer, _), reward in zip(samples, rewards, strict=True)
    ]
    votes = Counter(camp for camp in camps if camp)
    ahead = [camp for camp, count in votes.items() if count == max(votes.values())]
    wanted = fmean(camp == "right" for camp in ahead) if ahead else 0.0
    assert majority(rewards, [answer for answer, _ in samples]) == pytest.approx(wanted)


def test_an_interval_narrows_with_items() -> None:
    few, many = (
        suite_scores([ItemSamples((float(i % 2),)) for i in range(count)], seed=0)["avg@1"]
        for count in (20, 2000)
    )
    assert few.high - few.low > 5 * (many.high - many.low)
    assert few.low < few.mean < few.high and 0.04 < many.high - many.low < 0.05


def test_most_votes_decide_and_no_answer_has_no_vote() -> None:
    assert majority([0.0, 0.0, 1.0], ["", "", "7"]) == 1.0
    assert majority([0.0, 0.0, 1.0], ["3", "3", "7"]) == 0.0
    assert majority([0.0, 0.0], ["", ""]) == 0.0
