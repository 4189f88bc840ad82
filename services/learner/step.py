"""Step: a recorded batch takes the policy from version t to t + 1, and always to the same bits.

A `Trainer` owns the engine and lives on one thread. What it does depends on the base weights,
the configuration and the batch files alone, so that repeating recorded steps after a crash, or
in a replay, leads to the digests that were committed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.learning_rate import rate_share
from antiphon.core.metrics import LEARNER_METRICS, staleness_metric
from antiphon.core.records import FinishReason
from antiphon.core.seeds import derive_seed
from antiphon.core.trust.audit import SampleStatistics
from antiphon.lineage.rollout_table import LeftOut, read_batch
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, UpdateMetrics
from antiphon.services.learner.objective import LOG_RATIO_LIMIT, NOTHING, TokenMetrics, UpdateTotals
from antiphon.services.learner.packing import MicroBatch, deal_groups, make_micro_batches
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.training import TrainedStep, Training


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """What one optimizer update of a step works on."""

    batches: list[MicroBatch]
    left_out: UpdateTotals
    """What it divides by besides its own rows."""
    share: float
    """Of the learning rate."""


class Trainer(Training):
    """The engine and the version it holds; every method runs on the training thread."""

    def __init__(
        self,
        config: RunConfig,
        checkpoints: CheckpointStore,
        make_engine: Callable[[RunConfig], DeepSpeedEngine] = DeepSpeedEngine,
    ) -> None:
        """Prepare; the engine is made by `start`. Checkpoints of another configuration are refused."""
        self._config = config
        self._checkpoints = checkpoints
        self._make_engine = make_engine
        self._engine: DeepSpeedEngine | None = None
        self._updates = config.algorithm.updates_per_step
        self._share = rate_share(config.learner, config.run.steps, self._updates)
        self._version = -1
        self.progress = ProgressCounter()
        checkpoints.checked = self.progress.add

    @property
    def version(self) -> int:
        return self._version

    def newest_checkpoint(self, at_most: int) -> int | None:
        return self._checkpoints.newest_sound(at_most)

    def start(self, at_most: int) -> TrainedStep:
        self.stop()
        self._engine = self._make_engine(self._config)
        self._version = 0
        found = self.newest_checkpoint(at_most)
        if found is not None:
            self._load(found)
        return TrainedStep(self.version, self._engine.weights(), {})

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def train(self, step: int, payload: bytes) -> TrainedStep:
        engine = self._held()
        if step != self.version:
            raise IntegrityError(f"step {step} cannot train on version {self.version}; restore first")
        begun = time.perf_counter()
        updates = self._parts(payload, step)
        torch.manual_seed(derive_seed("learner", self._config.run.seed, step) % 2**63)
        # Until the update is done the engine stands between two versions.
        self._version = -1
        if updates:
            metrics, apart = _train_updates(engine, updates, self.progress.add)
        else:
            metrics, apart = empty_statistics(), {}
        self._version = step + 1
        metrics["learning_rate"] = engine.learning_rate * self._share(self._version * self._updates - 1)
        metrics["train_s"] = time.perf_counter() - begun
        return TrainedStep(self.version, engine.weights(), metrics, apart)

    def _parts(self, payload: bytes, step: int) -> list[UpdatePart]:
        """Deal a batch to the step's updates; one that gets nothing to train on makes none."""
        algorithm = self._config.algorithm
        rows, left_out = read_batch(payload)
        trained = [row for row in rows if not row.failure]
        if algorithm.truncated_completions != "train":
            cut_off = [row for row in trained if row.finish_reason is FinishReason.LENGTH]
            trained = [row for row in trained if row.finish_reason is not FinishReason.LENGTH]
            if algorithm.truncated_completions == "mask_loss":
                left_out += [LeftOut(row.group_id, 1, len(row.token_ids)) for row in cut_off]
        # In a file of an earlier version the groups left out have no names, and so no part in the dealing.
        ids = {row.group_id for row in trained}
        if all(group.group_id for group in left_out):
            ids |= {row.group_id for row in rows} | {group.group_id for group in left_out}
        dealt = [
            (place, group_ids, own)
            for place, group_ids in enumerate(deal_groups(ids, self._updates))
            if (own := [row for row in trained if row.group_id in group_ids])
        ]
        parts = []
        for place, group_ids, own in dealt:
            shared = [(x, 1) for x in left_out if x.group_id in group_ids]
            shared += [(x, len(dealt)) for x in left_out if not x.group_id]
            totals = UpdateTotals(
                sum(group.trajectories / by for group, by in shared),
                sum(group.tokens / by for group, by in shared),
            )
            parts.append(
                UpdatePart(
                    make_micro_batches(own, step, self._config.learner.micro_batch_tokens),
                    NOTHING if algorithm.divisor == "trained" else totals,
                    self._share(step * self._updates + place),
                )
            )
        return parts

    def save(self) -> int:
        engine = self._held()
        state = {
            "version": self.version,
            "config_digest": config_digest(self._config),
            "torch_rng": torch.get_rng_state(),
        }

        def save(folder: Path) -> None:
            self.progress.counting("byte", lambda: _bytes_in(folder))
            engine.save(folder, state)

        self._checkpoints.write(self.version, save)
        return self.version

    def _load(self, version: int) -> None:
        state = self._held().load(self._checkpoints.folder(version))
        wanted = config_digest(self._config)
        if state["config_digest"] != wanted:
            raise ConfigError(
                f"the checkpoint of version {version} was made with other model, algorithm or learner "
                "settings; continue with the configuration of that run, or start a new run"
            )
        if state["version"] != version:
            raise IntegrityError(f"the checkpoint of version {version} holds version {state['version']}")
        torch.set_rng_state(state["torch_rng"])
        self._version = version

    def _held(self) -> DeepSpeedEngine:
        if self._engine is None or self.version < 0:
            raise IntegrityError("the learner holds no version; call restore first")
        return self._engine


def config_digest(config: RunConfig) -> str:
    """Return the digest of the settings that decide what the weights become."""
    text = "\n".join(
        [
            config.model.model_dump_json(),
            config.algorithm.model_dump_json(),
            config.learner.model_dump_json(exclude={"checkpoint_interval", "checkpoints_kept"}),
            f"{config.run.seed} {config.run.steps}",
            f"{config.sampling.temperature} {config.sampling.max_tokens}",
        ]
    )
    return digest_bytes(text.encode())


def _bytes_in(folder: Path) -> int:
    """Return how much of a checkpoint is written; it gets another name when it is whole."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*"))
    except OSError:
        return 0


def _train_updates(
    engine: DeepSpeedEngine,
    updates: list[UpdatePart],
    count: Callable[[], None],
) -> tuple[dict[str, float], dict[str, tuple[SampleStatistics, ...]]]:
    # Later updates clip against the weights the step began with; the first one holds them.
    proximal: list[list[torch.Tensor] | None] = [None]
    for part in updates[1:]:
        held = []
        for batch in part.batches:
            held.append(engine.logprobs(batch))
            count()
        proximal.append(held)
    pairs = zip(updates, proximal, strict=True)
    done = [engine.update(part.batches, old, part.left_out, part.share, count) for part, old in pairs]
    # Only the first update sees the weights that the step began with.
    return _metrics(updates, done), drifts(updates[0].batches, done[0].tokens)


def _metrics(updates: list[UpdatePart], done: list[UpdateMetrics]) -> dict[str, float]:
    batches = [batch for part in updates for batch in part.batches]
    tokens = [found for update in done for found in update.tokens]
    total = sum(batch.completion_tokens for batch in batches)
    slots = sum(len(batch.shared.slots.index) for batch in batches)
    return {
        "loss": sum(update.loss for update in done) / len(done),
        "gradient_norm": sum(update.gradient_norm for update in done) / len(done),
        "completion_tokens": float(total),
        "trajectories": float(sum(len(batch.advantages) for batch in batches)),
        "padding_share": 1.0 - sum(batch.shared.real_slots for batch in batches) / slots,
        "micro_batches": float(len(batches)),
        **describe_tokens(gather(batches, tokens)),
    }


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
