"""Retention: which published versions keep their weights in a run's ledger, and from what others are
made again.

Every version keeps its document with the digest of its weights. Weights that are not kept come from replay:
it starts at the newest checkpoint that the ledger pins, or at the base model, and repeats recorded batches.
An anchor's weights alone are no place to start, since the optimizer's state is not among them.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.loop.schedule import is_evaluated
from antiphon.core.loop.staleness import is_published
from antiphon.system.free_space import OPTIMIZER_BYTES

TOKEN_BYTES = 8
"""Of a sampled token in a batch's file: its id and its log-probability."""
GROUP_BYTES = 2500
"""Of a group's events in the journal; an answer of an evaluation is a group."""


def due(version: int, interval: int, stride: int) -> bool:
    """Return whether the checkpoint of a version is pinned: of one each `interval`, every `stride`-th.

    A stride of 0 pins none.

    >>> [version for version in range(1, 61) if due(version, interval=5, stride=4)]
    [20, 40, 60]
    """
    return stride > 0 and version > 0 and version % (interval * stride) == 0


def is_anchor(version: int, config: RunConfig) -> bool:
    """Return whether a published version keeps its weights for good, whatever becomes of the others.

    The base model and the last version do. With `record.weights: anchors` so does each
    `record.anchor_every`-th; without that number, each version whose checkpoint is pinned.

    >>> from antiphon.core.config import build_config
    >>> config = build_config({"run": {"steps": 50}, "record": {"weights": "anchors"}})
    >>> [version for version in range(51) if is_anchor(version, config)]
    [0, 20, 40, 50]
    """
    record = config.record
    if record.weights == "all" or version in (0, config.run.steps):
        return True
    if record.weights == "last":
        return False
    if record.anchor_every is not None:
        return version % record.anchor_every == 0
    return due(version, config.learner.checkpoint_interval, record.checkpoint_stride)


def keeps_weights(version: int, newest: int, scores: Mapping[int, float], config: RunConfig) -> bool:
    """Return whether the ledger keeps the weights of a published version for now.

    Besides anchors these are the newest versions that running leases and batches may still name (the
    staleness window), evaluated versions without a score so far, and the best of those that have one.

    Args:
        version: the published version.
        newest: the newest version whose weights were recorded.
        scores: held-out score of each version that has one.
        config: the run's configuration.

    >>> from antiphon.core.config import build_config
    >>> config = build_config({"record": {"weights": "last"}, "loop": {"max_staleness": 1}})
    >>> [version for version in range(31) if keeps_weights(version, 30, {0: 0.1, 10: 0.5, 20: 0.5}, config)]
    [0, 10, 29, 30]
    """
    if is_anchor(version, config) or version + config.loop.max_staleness >= newest:
        return True
    if is_evaluated(version, config) and version not in scores:
        return True
    return version == max(scores, key=lambda scored: (scores[scored], -scored), default=None)


def recompute_note(version: int, config: RunConfig) -> dict[str, Any]:
    """Return what a version's document says of making its weights again; {} for an anchor.

    >>> from antiphon.core.config import build_config
    >>> recompute_note(33, build_config({"record": {"weights": "anchors"}}))
    {'recompute': {'from_version': 20, 'batches': [20, 32]}}
    """
    if is_anchor(version, config):
        return {}
    every = config.learner.checkpoint_interval * config.record.checkpoint_stride
    start = version - version % every
    return {"recompute": {"from_version": start, "batches": [start, version - 1]}}


def disk_need(
    config: RunConfig,
    parameters: float,
    completion_tokens: float,
    *,
    ledger: bool,
    trained: float | None = None,
) -> dict[str, float]:
    """Return the bytes that a whole run leaves on its disk, by use.

    Args:
        config: of the run.
        parameters: of its model.
        completion_tokens: mean of a completion.
        ledger: the run has a ledger; without one it keeps the base, the best and the newest versions.
        trained: those of the parameters that are trained; None: all.

    >>> from antiphon.core.config import build_config
    >>> config = build_config({"run": {"steps": 200}, "model": {"dtype": "float32"}})
    >>> {use: f"{size / 1e9:.1f}" for use, size in disk_need(config, 0.6e9, 100.0, ledger=True).items()}
    {'weights': '482.4', 'checkpoints': '115.2', 'batches': '0.0', 'journal': '0.0'}
    """
    steps, loop, record, learner = config.run.steps, config.loop, config.record, config.learner
    oldest = steps - max(loop.max_staleness, (config.broadcast.snapshots_kept - 1) * loop.publish_interval)
    versions = [v for v in range(steps + 1) if is_published(v, loop.publish_interval, steps)]
    kept = sum(v >= oldest or (is_anchor(v, config) if ledger else v == 0) for v in versions)
    best = ledger is False or record.weights != "all"
    every = learner.checkpoint_interval * record.checkpoint_stride
    checkpoints = learner.checkpoints_kept + (steps // every if ledger and every else 0)
    groups = steps * loop.prompts_per_step
    answers = config.evaluation.prompts * sum(is_evaluated(v, config) for v in versions)
    weight_bytes = 4 if config.model.dtype == "float32" else 2
    return {
        "weights": min(kept + best, len(versions)) * weight_bytes * parameters,
        "checkpoints": checkpoints * OPTIMIZER_BYTES * (parameters if trained is None else trained),
        "batches": groups * loop.group_size * completion_tokens * TOKEN_BYTES,
        "journal": float((groups + answers) * GROUP_BYTES),
    }


def disk_words(need: Mapping[str, float]) -> str:
    """Say it for people.

    >>> disk_words({"weights": 3.0e9, "journal": 0.2e9})
    '3.2 GB of records at the end: weights 3.0, journal 0.2'
    """
    parts = ", ".join(f"{use} {size / 1e9:,.1f}" for use, size in need.items())
    return f"{sum(need.values()) / 1e9:,.1f} GB of records at the end: {parts}"
