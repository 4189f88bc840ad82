"""Scores of suites: estimators against enumeration, and intervals."""

from itertools import combinations

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
