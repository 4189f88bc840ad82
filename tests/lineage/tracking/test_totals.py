"""What versions had cost, and what a run says of itself, from the run log alone."""

from typing import Any

import pytest

from antiphon.core.config import RunConfig, build_config
from antiphon.core.metrics import SUMMARY_METRICS, TOTAL_METRICS
from antiphon.core.reporting.figures import FIGURES, figures_of, totals_of
from antiphon.lineage.tracking.mlflow_sink import summarise, total_metrics


def config(**record: float) -> RunConfig:
    return build_config({"record": record, "loop": {"group_size": 4}, "rollout": {"workers": 2}})


def line(step: int, **timings: Any) -> dict[str, Any]:
    tokens = 100 * (step + 1)  # of two groups; a third was filtered, which had as many as one of them
    batch = {"tokens": tokens, "staleness_histogram": {"0": 6, "1": 2}, "groups_dropped_stale": 1}
    batch |= {"groups": 2, "groups_filtered": 1, "completion_tokens_mean": tokens / 8}
    clocks = {"at": 1000.0 + 10 * (step + 1), "wall_s": 10.0 * (step + 1), "train_s": 4.0}
    return {"step": step, "version": step + 1, "batch": batch, "metrics": {}, "timings": clocks | timings}


def evaluation(version: int, reward: float) -> dict[str, Any]:
    return {"version": version, "prompts": 8, "reward_mean": reward, "completion_tokens_mean": 9.0}


def test_a_version_has_cost_what_the_steps_before_it_cost() -> None:
    prices = config(worker_usd_per_hour=1.8, learner_usd_per_hour=3.6)
    found = totals_of([line(0), line(1, workers={"a": 1}), line(2, workers={"a": 1, "b": 1, "c": 1})], prices)
    assert [(t.version, t.tokens_trained, t.tokens_sampled, t.wall_s) for t in found] == [
        (0, 0, 0, 0),
        (1, 100, 150, 10),
        (2, 300, 450, 20),
        (3, 600, 900, 30),
    ]
    # Ten seconds each, first at the two workers of the configuration, then at those that took part.
    assert [t.dollars for t in found] == pytest.approx([0.0, 0.02, 0.035, 0.06])
    assert set(total_metrics(found[0])) == {metric.name for metric in TOTAL_METRICS}


def test_a_clock_that_falls_back_costs_nothing() -> None:
    found = totals_of([line(0), line(1, wall_s=5.0), line(2)], config(learner_usd_per_hour=3600.0))
    assert [t.wall_s for t in found] == [0.0, 10.0, 10.0, 30.0]
    assert [t.dollars for t in found] == [0.0, 10.0, 10.0, 30.0]


def test_a_summary_says_when_each_reward_was_reached_and_at_what_price() -> None:
    lines = [
        line(0, workers={"a": 6, "b": 2}),
        line(1, workers={"a": 8}),
        line(2, workers={"a": 8}),
    ]
    held = [evaluation(0, 0.1), evaluation(2, 0.6), evaluation(3, 0.55)]
    found = summarise(lines, held, config(learner_usd_per_hour=3.6))
    assert found["summary/steps_to_reward_0.5"] == 2 and found["summary/steps_to_reward_0.25"] == 2
    assert found["summary/wall_s_to_reward_0.5"] == 20 and found["summary/tokens_to_reward_0.5"] == 450
    assert found["summary/tokens_trained_to_reward_0.5"] == 300
    assert found["summary/dollars_to_reward_0.5"] == pytest.approx(0.02)
    assert "summary/steps_to_reward_0.75" not in found
    figures = figures_of(lines, held, config(learner_usd_per_hour=3.6)).numbers()
    assert {name: found[f"summary/{name}"] for name in figures} == figures
    assert set(figures) <= {figure.name for figure in FIGURES} and figures["reward_best"] == 0.6
    assert found["summary/workers"] == pytest.approx(4 / 3) and found["summary/workers_seen"] == 2
    assert found["summary/worker_share.b"] == pytest.approx(2 / 24)
    known = {f"summary/{metric.name}" for metric in SUMMARY_METRICS}
    assert {name if "worker_share" not in name else "summary/worker_share.NAME" for name in found} <= known


def test_a_run_without_steps_says_nothing() -> None:
    assert summarise([], [evaluation(0, 1.0)], config()) == {}
