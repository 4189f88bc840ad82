"""Tracking totals: what MLflow keeps of a run's figures, by version and in the run's summary.

All of it follows from the run log's lines, so a run that is recorded late or twice says the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.metrics import REWARD_LEVELS
from antiphon.core.reporting.figures import FiguresFold, VersionTotals


def total_metrics(totals: VersionTotals) -> dict[str, float]:
    """Return what a version had cost under the names of `core.metrics.TOTAL_METRICS`."""
    return {
        "tokens_total": float(totals.tokens_sampled),
        "tokens_trained_total": float(totals.tokens_trained),
        "wall_s": totals.wall_s,
        "cost_dollars": totals.dollars,
    }


def summarise(
    lines: Iterable[Mapping[str, Any]], evaluations: Iterable[Mapping[str, Any]], config: RunConfig
) -> dict[str, float]:
    """Return a run's summary under the names of `core.metrics.SUMMARY_METRICS`, each with `summary/`.

    `lines` and `evaluations` are those of the run log, in order.
    """
    steps, held = list(lines), list(evaluations)
    fold = FiguresFold(config)
    totals = {known.version: known for line in steps for known in fold.add(line)}
    if not totals:
        return {}
    metrics = {**fold.figures(held).numbers(), **_levels(held, totals), **_workers(steps)}
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
    counts: dict[str, int] = {}
    for mix in mixes:
        for worker, count in mix.items():
            counts[worker] = counts.get(worker, 0) + int(count)
    total = sum(counts.values())
    return {
        "workers": sum(map(len, mixes)) / len(mixes),
        "workers_seen": float(len(counts)),
        **{f"worker_share.{worker}": count / total for worker, count in sorted(counts.items())},
    }
