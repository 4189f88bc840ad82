"""Tracking totals: what each policy version had cost, and what a run says of itself at its end.

Everything follows from the run log's lines, so a run that is recorded late or twice says the
same. A version's totals count the steps before it, whatever order they come in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.metrics import REWARD_LEVELS

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class VersionTotals:
    """What had been spent when a policy version was made."""

    version: int
    tokens: int
    """Completion tokens trained on."""
    wall_s: float
    """Seconds the run had been going, breaks left out."""
    dollars: float
    at: float
    """Unix seconds of the commit; 0 for the base."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics under the names of `core.metrics.TOTAL_METRICS`."""
        return {"tokens_total": float(self.tokens), "wall_s": self.wall_s, "cost_dollars": self.dollars}


class TotalsFold:
    """Adds up steps; a step that comes early waits for those before it."""

    def __init__(self, config: RunConfig) -> None:
        """Begin at the base, version 0, which has cost nothing."""
        self._prices = config.record
        self._workers = config.rollout.workers
        self._last = VersionTotals(0, 0, 0.0, 0.0, 0.0)
        self._early: dict[int, Mapping[str, Any]] = {}
        self._told_base = False

    def add(self, line: Mapping[str, Any]) -> list[VersionTotals]:
        """Take a line of the run log and return the totals that are now known, by version.

        A step's line gives the totals of the version it made; the first one also gives the
        base's. A step that was added before gives nothing.
        """
        if int(line["step"]) < self._last.version:
            return []
        self._early[int(line["step"])] = line
        found = []
        while (ready := self._early.pop(self._last.version, None)) is not None:
            if not self._told_base:
                self._told_base = True
                found.append(VersionTotals(0, 0, 0.0, 0.0, float(ready["timings"]["at"])))
            self._last = self._after(ready)
            found.append(self._last)
        return found

    def _after(self, line: Mapping[str, Any]) -> VersionTotals:
        timings, last = line["timings"], self._last
        at = float(timings["at"])
        wall_s = max(last.wall_s, float(timings["wall_s"]))
        workers = len(timings.get("workers") or ()) or self._workers
        rate = workers * self._prices.worker_usd_per_hour + self._prices.learner_usd_per_hour
        tokens = int((line["batch"] or {}).get("tokens", 0))
        dollars = last.dollars + (wall_s - last.wall_s) * rate / _SECONDS_PER_HOUR
        return VersionTotals(last.version + 1, last.tokens + tokens, wall_s, dollars, at)


def summarise(
    lines: Iterable[Mapping[str, Any]], evaluations: Iterable[Mapping[str, Any]], config: RunConfig
) -> dict[str, float]:
    """Return a run's summary under the names of `core.metrics.SUMMARY_METRICS`, each with `summary/`.

    `lines` and `evaluations` are those of the run log, in order.
    """
    steps, held = list(lines), list(evaluations)
    fold = TotalsFold(config)
    totals = {known.version: known for line in steps for known in fold.add(line)}
    if not totals:
        return {}
    last = totals[max(totals)]
    metrics = {
        "steps": float(len(steps)),
        "wall_s": last.wall_s,
        "tokens": float(last.tokens),
        "dollars": last.dollars,
        **_learning(held, totals),
        **_staleness(steps),
        **_drafting(steps),
        **_workers(steps),
    }
    if last.wall_s > 0:
        metrics["tokens_per_s"] = last.tokens / last.wall_s
        busy_s = sum(float(line["timings"].get("train_s", 0.0)) for line in steps)
        metrics["learner_busy_share"] = min(1.0, busy_s / last.wall_s)
    return {f"summary/{name}": value for name, value in metrics.items()}


def _learning(
    evaluations: Sequence[Mapping[str, Any]], totals: Mapping[int, VersionTotals]
) -> dict[str, float]:
    if not evaluations:
        return {}
    rewards = [float(line["reward_mean"]) for line in evaluations]
    metrics = {"reward_first": rewards[0], "reward_last": rewards[-1], "reward_best": max(rewards)}
    for level in REWARD_LEVELS:
        reached = next((line for line in evaluations if float(line["reward_mean"]) >= level), None)
        spent = totals.get(int(reached["version"])) if reached is not None else None
        if spent is not None:
            metrics[f"steps_to_reward_{level:g}"] = float(spent.version)
            metrics[f"wall_s_to_reward_{level:g}"] = spent.wall_s
            metrics[f"tokens_to_reward_{level:g}"] = float(spent.tokens)
            metrics[f"dollars_to_reward_{level:g}"] = spent.dollars
    return metrics


def _staleness(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    counts: dict[int, int] = {}
    for line in steps:
        for staleness, count in ((line["batch"] or {}).get("staleness_histogram") or {}).items():
            counts[int(staleness)] = counts.get(int(staleness), 0) + int(count)
    dropped = sum(int((line["batch"] or {}).get("groups_dropped_stale", 0)) for line in steps)
    total = sum(counts.values())
    return {
        "staleness_mean": sum(s * n for s, n in counts.items()) / total if total else 0.0,
        "staleness_max": float(max((s for s, n in counts.items() if n), default=0)),
        "groups_dropped_stale": float(dropped),
    }


def _drafting(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    metrics = {}
    for name in ("drafting_gain", "drafting_acceptance", "drafting_tokens_per_pass"):
        found = [
            (float(line["timings"][name]), max(1, int((line["batch"] or {}).get("tokens", 0))))
            for line in steps
            if line["timings"].get(name) is not None
        ]
        if name == "drafting_gain":
            found = [(value, weight) for value, weight in found if value > 0]  # 0 means not compared yet
        if found:
            metrics[name] = sum(v * w for v, w in found) / sum(w for _, w in found)
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
