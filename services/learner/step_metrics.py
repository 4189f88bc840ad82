"""Step metrics: what a step reports about its tokens, overall and by how stale they were.

Ratios compare the learner at the start of an update with the behaviour policy, token by token, in
float64; the effective sample share is of the weights that were applied, after cap, mask and clip.
Estimates of KL(behaviour || learner) use the tokens the behaviour policy sampled: k1 is the mean of
-log r, k3 the mean of r - 1 - log r, with r the importance ratio.

Legend: K completion tokens of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.core.metrics import LEARNER_METRICS, staleness_metric
from antiphon.core.trust.audit import SampleStatistics
from antiphon.services.learner.objective import LOG_RATIO_LIMIT, TokenMetrics
from antiphon.services.learner.packing import MicroBatch

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """One entry per completion token of the step, [K] each."""

    log_ratio: Floats
    """Learner minus behaviour logprob, nats."""
    learner_logprobs: Floats
    altered: npt.NDArray[np.bool_]
    clipped: npt.NDArray[np.bool_]
    applied: Floats
    """As in `TokenMetrics`."""
    staleness: npt.NDArray[np.int64]


def gather(batches: Sequence[MicroBatch], metrics: Sequence[TokenMetrics]) -> TokenTable:
    """Collect the unmasked tokens of all micro-batches."""
    parts: list[tuple[npt.NDArray[np.generic], ...]] = []
    for batch, found in zip(batches, metrics, strict=True):
        real = batch.mask.numpy() > 0
        learner = found.learner_logprobs.numpy()[real].astype(np.float64)
        behaviour = batch.behaviour_logprobs.numpy()[real].astype(np.float64)
        seen = (found.altered.numpy()[real], found.clipped.numpy()[real])
        applied = found.applied.numpy()[real].astype(np.float64)
        parts.append((learner - behaviour, learner, *seen, applied, batch.staleness.numpy()[real]))
    columns: list[npt.NDArray[Any]] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return TokenTable(*columns)


def drifts(
    batches: Sequence[MicroBatch], metrics: Sequence[TokenMetrics]
) -> dict[str, tuple[SampleStatistics, ...]]:
    """Return how far each trajectory's logprobs are from the learner's, by group.

    Only trajectories that the present weights sampled are in it: others differ because the policy
    moved on. Nothing is computed for this; the loss needs these logprobs anyway.
    """
    found: dict[str, list[SampleStatistics]] = {}
    for batch, seen in zip(batches, metrics, strict=True):
        real = batch.mask.numpy() > 0
        apart = np.abs(seen.learner_logprobs.numpy() - batch.behaviour_logprobs.numpy())
        fresh = ~((batch.staleness.numpy() != 0) & real).any(-1)
        for place, (group_id, sample) in enumerate(batch.rows):
            if fresh[place]:
                own = apart[place][real[place]].astype(np.float64)
                found.setdefault(group_id, []).append(
                    SampleStatistics(sample, own.size, 0, 0, float(own.mean()))
                )
    return {group_id: tuple(samples) for group_id, samples in found.items()}


def describe_tokens(table: TokenTable) -> dict[str, float]:
    """Return the token metrics of `core.metrics`; at least one token is needed."""
    bounded = np.clip(table.log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = np.exp(bounded)
    metrics = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_share": table.clipped.mean(),
        "truncated_share": table.altered.mean(),
        "kl_k1": _k1(bounded),
        "kl_k3": _k3(bounded),
        "effective_sample_share": _effective_share(table.applied),
        "entropy_estimate": -table.learner_logprobs.mean(),
    }
    for staleness in np.unique(table.staleness):
        chosen = bounded[table.staleness == staleness]
        metrics[staleness_metric("kl_k1", int(staleness))] = _k1(chosen)
        metrics[staleness_metric("kl_k3", int(staleness))] = _k3(chosen)
        metrics[staleness_metric("tokens", int(staleness))] = float(chosen.size)
    return {name: float(value) for name, value in metrics.items()}


def empty_statistics() -> dict[str, float]:
    """Return the metrics of a step without a single trajectory."""
    return {metric.name: 0.0 for metric in LEARNER_METRICS}


def _effective_share(weights: Floats) -> float:
    """Return (sum w)^2 / sum w^2 / K (Kish 1965); 0 where no weight is left."""
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / squares / weights.size if squares else 0.0


def _k1(log_ratio: Floats) -> float:
    return float(-log_ratio.mean())


def _k3(log_ratio: Floats) -> float:
    # expm1 keeps the tiny values of an almost on-policy batch, where exp(x) - 1 is all rounding.
    return float((np.expm1(log_ratio) - log_ratio).mean())
