"""Tracking totals: what MLflow keeps of a run's figures, by version and in the run's summary.

All of it follows from the run log's lines, so a run that is recorded late or twice says the same.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.metrics import REWARD_LEVELS
from antiphon.core.reporting.figures import VersionTotals, figures_of, totals_of


def total_metrics(totals: VersionTotals) -> dict[str, float]:
    """Return what a version had cost under the names of `core.metrics.TOTAL_METRICS`."""
    return {
        "tokens_total": float(totals.tokens_sampled),
        "tokens_trained_total": float(totals.tokens_trained),
        "wall_s": totals.wall_s,
        "cost_dollars": totals.dollars,
    }


def summarise(
    steps: Sequence[Mapping[str, Any]], held: Sequence[Mapping[str, Any]], config: RunConfig
) -> dict[str, float]:
    """Return a run's summary under the names of `core.metrics.SUMMARY_METRICS`, each with `summary/`.

    `steps` and `held` are lines of the run log, of steps and of evaluations, in order.
    """
    totals = {known.version: known for known in totals_of(steps, config)}
    if not totals:
        return {}
    metrics = figures_of(steps, held, config).numbers() | _levels(held, totals) | _workers(steps)
    return {f"summary/{name}": value for name, value in metrics.items()}


def _levels(
    evaluations: Sequence[Mapping[str, Any]], totals: Mapping[int, VersionTotals]
) -> dict[str, float]:
    metrics = {}
    for level in REWARD_LEVELS:
        reached = next((line for line in evaluations if float(line["reward_mean"]) >= level), None)
        spent = totals.get(int(reached["version"])) if reached is not None else None
        if spent is not None:
            metrics[f"steps_to_reward_{level:g}"] = float(spent.version)
            metrics[f"wall_s_to_reward_{level:g}"] = spent.wall_s
            metrics[f"tokens_to_reward_{level:g}"] = float(spent.tokens_sampled)
            metrics[f"tokens_trained_to_reward_{level:g}"] = float(spent.tokens_trained)
            metrics[f"dollars_to_reward_{level:g}"] = spent.dollars
    return metrics


def _workers(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    mixes = [mix for line in steps if (mix := line["timings"].get("workers"))]
    if not mixes:
        return {}
    counts = Counter[str]()
    for mix in mixes:
        counts.update(mix)
    total = counts.total()
    return {
        "workers": sum(map(len, mixes)) / len(mixes),
        "workers_seen": float(len(counts)),
        **{f"worker_share.{worker}": count / total for worker, count in sorted(counts.items())},
    }
