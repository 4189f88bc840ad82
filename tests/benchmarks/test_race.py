"""The arithmetic of the races: link rates, levels, intervals, and what breaks a promise."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks.end_to_end import MECHANISMS, compare
from antiphon.benchmarks.parts.race.runs import (
    covered,
    link_rate,
    lower_end,
    reached_at,
    repeated_share,
    seconds_at,
)
from antiphon.benchmarks.reward_parity import Run
from antiphon.benchmarks.versus_trl import compare as compare_sides
from antiphon.benchmarks.versus_trl import compare_each

SIZES = st.floats(1.0, 1e12)


@given(SIZES, st.integers(1, 64), st.floats(0.01, 10.0), st.floats(0.01, 1e4))
def test_a_link_takes_the_share_of_the_step_that_it_was_made_for(
    payload: float, workers: int, share: float, busy_s: float
) -> None:
    rate = link_rate(payload, workers, share, busy_s)
    assert rate is not None and payload * workers / rate == pytest.approx(share * busy_s)


def test_no_share_is_no_cap_and_a_negative_one_is_refused() -> None:
    assert link_rate(1e6, 2, 0.0, 3.0) is None
    with pytest.raises(ValueError, match="give a share from 0"):
        link_rate(1e6, 2, -0.5, 3.0)


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20), st.floats(0.01, 1.0))
def test_a_level_is_reached_between_the_evaluations_around_it(scores: list[float], level: float) -> None:
    versions = [5 * place for place in range(len(scores))]
    found = reached_at(level, versions, scores)
    if found is None:
        assert max(scores) < level
    else:
        before = [score for version, score in zip(versions, scores, strict=True) if version < found]
        assert all(score < level for score in before) and found <= versions[-1]


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20))
def test_seconds_of_whole_versions_are_those_at_which_their_steps_ended(steps: list[float]) -> None:
    ends = [sum(steps[: place + 1]) for place in range(len(steps))]
    assert seconds_at(0, ends) == 0.0
    assert [seconds_at(v + 1, ends) for v in range(len(ends))] == pytest.approx(ends)


def test_an_interval_is_student_s() -> None:
    low = lower_end([0.0, 1.0, 2.0, 3.0, 4.0])
    assert low is not None and 2.0 - low == pytest.approx(2.776 * 2.5**0.5 / 5**0.5, rel=1e-3)
    assert lower_end([1.0, 1.0]) == 1.0 and lower_end([1.0]) is None


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=20))
def test_covered_seconds_are_at_most_the_sum_and_at_least_the_longest(
    spans: list[tuple[float, float]],
) -> None:
    times = [(begin, begin + length) for begin, length in spans]
    lengths = [end - begin for begin, end in times]
    assert max(lengths) - 1e-9 <= covered(times) <= sum(lengths) + 1e-9


def a_run(seconds: float, **changed: Any) -> dict[str, Any]:
    usual = {"rollout_s": 3.0, "training_s": 1.0, "delivery_s": 2.0, "reward": 0.8, "samples": 96}
    usual |= {"reward_before": 0.5, "repeated_share": 0.7, "seconds_per_step_first_epoch": seconds + 1.0}
    return {"seconds_per_step": seconds, "staleness_max": 0, "tokens_per_pass": None, **usual, **changed}


def pair(
    baseline: dict[str, Any], antiphon: dict[str, Any], drafted: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    drafted = drafted or a_run(4.0)
    return {"alone": a_run(4.0), "baseline": baseline, "antiphon": antiphon, "drafted": drafted}


def test_end_to_end_compares_pairs_and_names_its_mechanisms() -> None:
    seeds = [pair(a_run(6.0), a_run(2.0, staleness_max=2)), pair(a_run(6.0), a_run(3.0))]
    rows = [("baseline", 6.0), *((name, 3.0) for name in MECHANISMS)]
    short = [pair(a_run(1.1), a_run(1.0))]
    result, samples, *violated = compare({0.5: seeds, 0.0: seeds}, [rows], [0.5, 0.0], short)
    assert (samples["ratio"], samples["ratio_without_link"], violated) == ([3.0, 2.0], [3.0, 2.0], [[], []])
    assert samples["ratio_over_drafted"] == samples["ratio_over_drafted_without_link"] == [2.0, 1.3333]
    assert samples["ratio_first_epoch"] == [2.3333, 1.75] and samples["ratio_short_answers"] == [1.1]
    assert (result["reward_gain"], result["repeated_share"]) == (0.3, 0.7)
    assert result["broadcast_share"] == 0.5 and result["reward_equal"] is True
    assert [line["mechanism"] for line in result["ablation"]] == ["baseline", *MECHANISMS]
    del seeds[0]["drafted"]  # at another link than the first it does not run
    one_seed, samples, *_ = compare({0.5: seeds[1:], 2.0: seeds[:1]}, [], [0.5])
    assert one_seed["reward_equal"] is None and one_seed["ablation"] == []
    assert one_seed["ratio_over_drafted_without_link"] is None and samples["ratio_first_epoch"] == [1.75]


@pytest.mark.parametrize(
    ("baseline", "antiphon", "said"),
    [
        (a_run(6.0, staleness_max=1), a_run(2.0), "of the baseline side was 1 versions old"),
        (a_run(6.0), a_run(2.0, staleness_max=3), "3 versions old, the bound is 2"),
        (a_run(6.0), a_run(2.0, samples=95), "96 groups were consumed by the baseline, 95"),
        (a_run(6.0, delivery_s=3.0), a_run(2.0), "took 0.75 of rollout and training"),
        (a_run(6.0), a_run(2.0, reward=0.7), "0.100 below the baseline's"),
        (a_run(2.0), a_run(2.0), "gain nothing"),
    ],
)
def test_end_to_end_says_what_does_not_hold(
    baseline: dict[str, Any], antiphon: dict[str, Any], said: str
) -> None:
    _, _, violated, at_size = compare({0.5: [pair(baseline, antiphon)]}, [], [0.5])
    (sentence,) = violated + at_size
    assert said in sentence


def test_a_drafted_side_that_is_not_synchronous_is_said() -> None:
    late = pair(a_run(6.0), a_run(2.0), a_run(4.0, staleness_max=1))
    assert compare({0.5: [late]}, [], [0.5])[2] == ["a sample of the drafted side was 1 versions old"]


def test_repeated_grams_are_those_of_the_longest_answers_that_stood_before() -> None:
    again, new = [*range(10), *range(10)], list(range(100, 118))
    assert repeated_share([new, again, *([1] * 5 for _ in range(80))]) == pytest.approx(3 / 13)
    assert repeated_share([new]) == repeated_share([[1, 2]]) == repeated_share([]) == 0.0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 8))
def test_a_share_of_repeated_grams_is_one_of_positions(answer: list[int], size: int) -> None:
    grams = [tuple(answer[at : at + size]) for at in range(len(answer) - size + 1)]
    again = sum(gram in grams[:at] for at, gram in enumerate(grams))
    assert repeated_share([answer], size) == pytest.approx(again / len(grams) if grams else 0.0)


def side(scores: list[float], step_s: float, rate: float) -> Run:
    ends = [step_s * (place + 1) for place in range(10)]
    return Run([0, 5, 10], scores, ends, [2 * end for end in ends], 1.0, rate, 2 * rate)


def test_versus_trl_takes_the_level_where_it_gains_least_and_trl_s_best_setting() -> None:
    ours, theirs = side([0.1, 0.7, 0.9], 1.0, 300.0), side([0.1, 0.75, 0.85], 4.0, 100.0)
    slow = side([0.1, 0.75, 0.85], 5.0, 90.0)
    result, samples, violated = compare_sides({0: ours}, {0: [slow, theirs]}, [0.7, 0.8])
    assert samples["wall_seconds_ratio_by_level.0.7"] == [pytest.approx(4 * (60 / 65), abs=1e-4)]
    assert samples["wall_seconds_ratio_by_level.0.8"] == [pytest.approx(4.0, abs=1e-4)]
    assert result["wall_seconds_ratio"] == result["cpu_seconds_ratio"] == pytest.approx(3.6923)
    assert (result["generation_ratio"], result["training_ratio"], violated) == (3.0, 3.0, [])


def test_versus_trl_tells_further_precisions_apart() -> None:
    fast, slow = side([0.1, 0.7, 0.9], 1.0, 300.0), side([0.1, 0.6, 0.6], 2.0, 100.0)
    theirs = {0: [side([0.1, 0.7, 0.9], 4.0, 100.0)]}
    result, samples, violated = compare_each({"bfloat16": {0: fast}, "float32": {0: slow}}, theirs, [0.7])
    assert result["wall_seconds_ratio"] == 4.0 and result["float32.wall_seconds_ratio"] is None
    assert samples["antiphon_last_reward"] == [0.9] and samples["float32.antiphon_last_reward"] == [0.6]
    assert violated == ["float32: held-out reward 0.7 was reached by TRL and not here"]


def test_versus_trl_without_trl_has_no_ratios_and_one_never_reached_is_said() -> None:
    ours, theirs = side([0.1, 0.6, 0.6], 1.0, 1.0), side([0.1, 0.75, 0.85], 4.0, 1.0)
    result, _, violated = compare_sides({0: ours}, {}, [0.7])
    assert result["wall_seconds_ratio"] is None and result["generation_ratio"] is None and violated == []
    result, _, violated = compare_sides({0: ours}, {0: [theirs]}, [0.7])
    assert result["cpu_seconds_ratio"] is None and violated == [
        "held-out reward 0.7 was reached by TRL and not here"
    ]
