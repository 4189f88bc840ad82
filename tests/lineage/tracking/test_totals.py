"""What versions had cost, and what a run says of itself, from the run log alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import RunConfig, build_config
from antiphon.core.metrics import SUMMARY_METRICS, TOTAL_METRICS
from antiphon.lineage.tracking.totals import TotalsFold, VersionTotals, summarise


def config(**record: float) -> RunConfig:
    return build_config({"record": record, "rollout": {"workers": 2}})


def line(step: int, **timings: Any) -> dict[str, Any]:
    batch = {"tokens": 100 * (step + 1), "staleness_histogram": {"0": 6, "1": 2}, "groups_dropped_stale": 1}
    clocks = {"at": 1000.0 + 10 * (step + 1), "wall_s": 10.0 * (step + 1), "train_s": 4.0}
    return {"step": step, "version": step + 1, "batch": batch, "metrics": {}, "timings": clocks | timings}


def evaluation(version: int, reward: float) -> dict[str, Any]:
    return {"version": version, "prompts": 8, "reward_mean": reward, "timings": {"at": 1.0}}


def fold(lines: list[dict[str, Any]], prices: RunConfig) -> list[VersionTotals]:
    totals = TotalsFold(prices)
    return [known for line in lines for known in totals.add(line)]


def test_a_version_has_cost_what_the_steps_before_it_cost() -> None:
    prices = config(worker_usd_per_hour=1.8, learner_usd_per_hour=3.6)
    found = fold([line(0), line(1, workers={"a": 1}), line(2, workers={"a": 1, "b": 1, "c": 1})], prices)
    assert [(t.version, t.tokens, t.wall_s) for t in found] == [
        (0, 0, 0),
        (1, 100, 10),
        (2, 300, 20),
        (3, 600, 30),
    ]
    # Ten seconds each, first at the two workers of the configuration, then at those that took part.
    assert [t.dollars for t in found] == pytest.approx([0.0, 0.02, 0.035, 0.06])
    assert set(found[0].metrics()) == {metric.name for metric in TOTAL_METRICS}


@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=4))
def test_neither_order_nor_repetition_changes_a_total(order: list[int], again: list[int]) -> None:
    told = fold([line(step) for step in (*order, *again)], config(worker_usd_per_hour=1.0))
    assert told == fold([line(step) for step in range(6)], config(worker_usd_per_hour=1.0))


def test_a_clock_that_falls_back_costs_nothing() -> None:
    found = fold([line(0), line(1, wall_s=5.0), line(2)], config(learner_usd_per_hour=3600.0))
    assert [t.wall_s for t in found] == [0.0, 10.0, 10.0, 30.0]
    assert [t.dollars for t in found] == [0.0, 10.0, 10.0, 30.0]


def test_a_summary_says_when_each_reward_was_reached_and_at_what_price() -> None:
    lines = [
        line(0, workers={"a": 6, "b": 2}, drafting_gain=0.0),
        line(1, workers={"a": 8}, drafting_gain=2.0, drafting_acceptance=0.5),
        line(2, workers={"a": 8}, drafting_gain=1.0, drafting_acceptance=1.0),
    ]
    held = [evaluation(0, 0.1), evaluation(2, 0.6), evaluation(3, 0.55)]
    found = summarise(lines, held, config(learner_usd_per_hour=3.6))
    assert found["summary/steps_to_reward_0.5"] == 2 and found["summary/steps_to_reward_0.25"] == 2
    assert found["summary/wall_s_to_reward_0.5"] == 20 and found["summary/tokens_to_reward_0.5"] == 300
    assert found["summary/dollars_to_reward_0.5"] == pytest.approx(0.02)
    assert "summary/steps_to_reward_0.75" not in found
    rewards = [found[f"summary/reward_{name}"] for name in ("first", "last", "best")]
    assert rewards == [0.1, 0.55, 0.6]
    assert found["summary/staleness_mean"] == 0.25 and found["summary/staleness_max"] == 1
    assert found["summary/groups_dropped_stale"] == 3
    # A gain of 0 means that drafting was not compared yet; later steps weigh by their tokens.
    assert found["summary/drafting_gain"] == pytest.approx((2 * 200 + 1 * 300) / 500)
    assert found["summary/drafting_acceptance"] == pytest.approx((0.5 * 200 + 1.0 * 300) / 500)
    assert found["summary/workers"] == pytest.approx(4 / 3) and found["summary/workers_seen"] == 2
    assert found["summary/worker_share.b"] == pytest.approx(2 / 24)
    assert found["summary/learner_busy_share"] == pytest.approx(12 / 30)
    known = {f"summary/{metric.name}" for metric in SUMMARY_METRICS}
    assert {name if "worker_share" not in name else "summary/worker_share.NAME" for name in found} <= known


def test_a_run_without_steps_says_nothing() -> None:
    assert summarise([], [evaluation(0, 1.0)], config()) == {}
