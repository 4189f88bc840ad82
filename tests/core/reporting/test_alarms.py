"""Alarms fire where something is lost, and not where a run is only noisy."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.records import StepCommit
from antiphon.core.reporting.alarms import (
    ALARMS,
    IDLE_STEPS,
    WINDOW,
    StepAlarms,
    Turn,
    space_alarm,
    stall_alarm,
    status_alarms,
)
from antiphon.core.status import EvaluationRecord, RunStatus

RUNS = Path(__file__).resolve().parents[2] / "data" / "grpo_runs.json"
VOCABULARY = 151_936


def find_alarms(commits, *limits, **more):
    return StepAlarms(commits).find(*limits, **more)


def commits_of(figures):
    return [StepCommit(t, t + 1, f"{t:064x}", "b" * 64, metrics) for t, metrics in enumerate(figures)]


def names_at_any_time(commits, vocabulary=VOCABULARY):
    shown, names = StepAlarms(), set()
    for commit in commits:
        shown.add(commit)
        names |= {alarm.name for alarm in shown.find(2, vocabulary)}
    return names


def test_of_three_real_runs_only_the_collapsed_one_raises_alarms():
    runs = {}
    for name, recorded in json.loads(RUNS.read_text())["runs"].items():
        rewards = [{"reward_mean": int(digit) / 8} for digit in recorded["reward_eighths"]]
        entropies = [{"entropy_estimate": value} for value in recorded["entropy"]] or [{}] * len(rewards)
        runs[name] = [a | b for a, b in zip(rewards, entropies, strict=True)]
    assert len(runs) == 3
    raised = {run: names_at_any_time(commits_of(figures)) for run, figures in runs.items()}
    collapsed = raised.pop("7_5_plus_kl_metrics")
    assert collapsed == {"reward_collapse", "entropy_explosion"}
    assert set().union(*raised.values()) == set()


def test_a_collapse_of_negative_rewards_is_one_too():
    figures = [{"reward_mean": -3.0 + 0.02 * t} for t in range(150)]
    assert names_at_any_time(commits_of(figures)) == set()
    figures += [{"reward_mean": -3.0}] * (WINDOW + 10)
    assert names_at_any_time(commits_of(figures)) == {"reward_collapse"}


@given(st.lists(st.floats(-1.0, 1.0), min_size=0, max_size=30), st.floats(-5.0, 5.0))
def test_a_run_that_never_learned_has_nothing_to_lose(noise, level):
    assert find_alarms(commits_of([{"reward_mean": level}] * 200), 2) == ()
    assert find_alarms(commits_of([{"reward_mean": x} for x in noise]), 2) == ()


@pytest.mark.parametrize(
    ("figure", "value", "name"),
    [
        ("entropy_estimate", 1e-5, "entropy_collapse"),
        ("entropy_estimate", 11.9, "entropy_explosion"),
        ("kl_k3.staleness_0", 0.4, "sampler_divergence"),
        ("effective_sample_share", 0.1, "useless_batches"),
        ("entropy_estimate", 0.4, None),
        ("kl_k3.staleness_0", 0.005, None),
        ("effective_sample_share", 0.9, None),
        ("staleness_mean", 1.5, None),
    ],
)
def test_levels(figure, value, name):
    found = find_alarms(commits_of([{figure: value}] * 60), 2, VOCABULARY)
    assert [alarm.name for alarm in found] == ([name] if name else [])
    assert find_alarms(commits_of([{figure: value}] * 8), 2, VOCABULARY) == ()
    empty = find_alarms(commits_of([{figure: value, "trajectories": 0.0}] * 60), 2, VOCABULARY)
    assert [alarm.name for alarm in empty] == ["no_signal"]


@pytest.mark.parametrize("nothing", [{"trajectories": 0.0}, {"trajectories": 64.0, "gradient_norm": 0.0}])
def test_steps_in_a_row_that_train_nothing_are_said_however_short_the_run(nothing):
    useful = {"trajectories": 64.0, "gradient_norm": 0.3}
    assert find_alarms(commits_of([*[nothing] * 4, useful, *[nothing] * (IDLE_STEPS - 1)]), 2) == ()
    (alarm,) = find_alarms(commits_of([useful, *[nothing | {"reward_mean": 1.0}] * IDLE_STEPS]), 2)
    assert (alarm.name, alarm.step) == ("no_signal", IDLE_STEPS)
    why = "no group's rewards differed" if nothing["trajectories"] == 0 else "the gradient was zero"
    assert alarm.text == f"5 steps in a row trained nothing: {why}; all rewards were 1"
    assert find_alarms(commits_of([*[nothing] * 9, useful]), 2) == ()


def test_weights_that_stay_the_same_are_no_signal_either():
    useful = {"trajectories": 64.0, "gradient_norm": 0.3, "reward_mean": 0.25}
    same = [StepCommit(t, t + 1, "a" * 64, "b" * 64, useful) for t in range(IDLE_STEPS + 1)]
    assert find_alarms(same[:-1], 2) == ()  # the first one changed those of version 0
    (alarm,) = find_alarms(same, 2)
    assert alarm.name == "no_signal" and alarm.step == IDLE_STEPS
    assert (
        alarm.text == "5 steps in a row trained nothing: the weights did not change; the mean reward is 0.25"
    )


def test_a_short_run_that_is_over_is_judged_by_all_of_its_steps():
    nothing = {"trajectories": 0.0, "gradient_norm": 0.0, "reward_mean": 0.0}
    two = commits_of([nothing] * 2)
    assert find_alarms(two, 2, steps=3) == ()
    (alarm,) = find_alarms(two, 2, steps=2)
    assert alarm.name == "no_signal" and alarm.text.startswith("2 steps in a row trained nothing")
    useful = {"trajectories": 64.0, "gradient_norm": 0.3}
    assert find_alarms(commits_of([useful, nothing]), 2, steps=2) == ()
    assert find_alarms((), 2, steps=0) == ()


def test_staleness_at_the_bound_is_an_alarm_only_where_groups_were_dropped():
    waiting = {"staleness_mean": 1.99, "groups_dropped_stale": 0.0}
    assert find_alarms(commits_of([waiting] * 60), 2) == ()
    (alarm,) = find_alarms(commits_of([*[waiting] * 59, waiting | {"groups_dropped_stale": 3.0}]), 2)
    assert alarm.name == "staleness_at_bound" and "3 groups were dropped as too old" in alarm.text


def test_answers_that_are_cut_off_are_said_where_nothing_is_trained():
    nothing = {"trajectories": 0.0, "reward_mean": 0.0, "completion_tokens_mean": 63.0}
    (alarm,) = find_alarms(commits_of([nothing] * 5), 2, max_tokens=64)
    assert "nearly all answers were cut off at sampling.max_tokens=64" in alarm.text
    (alarm,) = find_alarms(commits_of([nothing | {"completion_tokens_mean": 40.0}] * 5), 2, max_tokens=64)
    assert "cut off" not in alarm.text


def test_a_policy_that_earned_and_earns_nothing_any_more_has_collapsed():
    """The advice for it is a lower learning rate, not harder prompts or a higher temperature."""
    earning = {"trajectories": 64.0, "gradient_norm": 0.3, "reward_mean": 0.145}
    nothing = {"trajectories": 0.0, "gradient_norm": 0.0, "reward_mean": 0.0}
    for earlier in (3, 60):
        (alarm,) = find_alarms(commits_of([*[earning] * earlier, *[nothing] * IDLE_STEPS]), 2)
        assert alarm.name == "reward_collapse"
        assert alarm.text.endswith("all rewards were 0, after 0.145 before")
    (alarm,) = find_alarms(commits_of([earning, *[nothing | {"reward_mean": 1.0}] * IDLE_STEPS]), 2)
    assert alarm.name == "no_signal"
    fix = next(kind.fix for kind in ALARMS if kind.name == "reward_collapse")
    assert "lower learning rate" in fix


def test_rewards_that_were_luck_do_not_collapse() -> None:
    nothing = {"trajectories": 0.0, "gradient_norm": 0.0, "reward_mean": 0.0}
    lucky = {"trajectories": 8.0, "gradient_norm": 0.1, "reward_mean": 1 / 32}
    some = [lucky, nothing, nothing, lucky, nothing, lucky]
    (alarm,) = find_alarms(commits_of([*some, *[nothing] * IDLE_STEPS]), 2)
    assert alarm.name == "no_signal"
    (alarm,) = find_alarms(commits_of([*some, *[lucky] * IDLE_STEPS, *[nothing] * IDLE_STEPS]), 2)
    assert alarm.name == "reward_collapse"


def scored(*scores: float, prompts: int = 256) -> RunStatus:
    records = tuple(
        EvaluationRecord(10 * place, prompts, prompts, score, 8.0) for place, score in enumerate(scores)
    )
    return RunStatus("r", 60, 60, 60, 60, 60, 0, 0, 0, 0, 0, 0, 0, {}, evaluations=records)


@pytest.mark.parametrize(
    ("scores", "fallen"),
    [
        ((), False),
        ((0.1,), False),
        ((0.145, 0.5, 0.89), False),
        ((0.89, 0.86), False),
        ((0.0, 0.0), False),
        ((0.145, 0.0), True),
        ((0.2, 0.79, 0.6), True),
        ((0.2, 0.79, 0.6, 0.78), False),
        ((1.0, 0.9), True),
    ],
)
def test_a_held_out_score_that_fell_by_more_than_chance_is_an_alarm(scores: tuple, fallen: bool) -> None:
    alarms = status_alarms(scored(*scores))
    assert bool(alarms) == fallen
    for alarm in alarms:
        assert f"is {scores[-1]:.1%}, after {max(scores):.1%} of version" in alarm.text
        assert alarm.name in {kind.name for kind in ALARMS}


def test_a_fall_among_a_handful_of_prompts_is_chance() -> None:
    assert status_alarms(scored(1.0, 0.0, prompts=4)) == ()
    assert status_alarms(scored(1.0, 0.0, prompts=32)) != ()


def test_a_synchronous_run_is_at_its_bound_by_design():
    assert find_alarms(commits_of([{"staleness_mean": 0.0}] * 60), 0) == ()


def test_a_stall_names_the_counter_that_stands_still():
    turn = Turn(3, 9, "micro-batch", "the learner is training step 3")
    assert stall_alarm(300.0, 300.0, turn) is None
    alarm = stall_alarm(301.0, 300.0, turn)
    assert alarm.name == "stall" and alarm.text.startswith("step 3: no micro-batch for 301 s; the learner")


def test_every_alarm_has_a_meaning_and_a_mend():
    assert len({kind.name for kind in ALARMS}) == len(ALARMS)
    assert all(kind.meaning and kind.fix for kind in ALARMS)
    assert space_alarm(1 << 40, "runs") is None


@pytest.mark.parametrize("low", [-1.0, -50.0, 7.0])
def test_alarms_are_the_same_in_a_range_that_lies_elsewhere(low: float) -> None:
    """The rewards of a run, all of them lower or higher by the same, raise the same alarms."""
    rng = np.random.default_rng(3)
    kinds = set()
    for _ in range(60):
        rewards = rng.random(60) * rng.choice([1.0, 0.02])
        rewards[rng.integers(20, 60) :] *= rng.choice([1.0, 0.0])
        idle = rng.random(60) < rng.choice([0.0, 0.9])
        facts = [
            {"trajectories": float(not idle[i]) * 8.0, "gradient_norm": 0.1, "reward_mean": rewards[i]}
            for i in range(60)
        ]
        moved = [{**one, "reward_mean": one["reward_mean"] + low} for one in facts]
        names, others = (
            [alarm.name for alarm in StepAlarms(commits_of(one), within).find(2)]
            for one, within in ((facts, (0.0, 1.0)), (moved, (low, low + 1.0)))
        )
        assert names == others
        kinds |= set(names)
    assert "no_signal" in kinds and "reward_collapse" in kinds


def test_a_held_out_score_of_another_range_falls_as_a_share_of_it() -> None:
    for scores in ((0.89, 0.86), (0.2, 0.79, 0.6), (0.145, 0.0)):
        moved = [200.0 * score - 100.0 for score in scores]
        status = dataclasses.replace(scored(*moved), reward_range=(-100.0, 100.0))
        assert bool(status_alarms(status)) == bool(status_alarms(scored(*scores)))
        for alarm in status_alarms(status):
            assert f"is {moved[-1]:,.4g}, after {max(moved):,.4g} of version" in alarm.text


def test_answers_that_could_not_be_scored_are_counted_apart_from_wrong_ones() -> None:
    status = dataclasses.replace(scored(0.0), trajectories_failed=3, last_failure="it hung")
    (alarm,) = status_alarms(status)
    assert alarm.name == "unscored" and alarm.text == "3 answers could not be scored; the last: it hung"
