"""Step: a recorded batch takes the policy from version t to t + 1, and always to the same bits.

A `Trainer` owns the engine and lives on one thread. What it does depends on the base weights,
the configuration and the batch files alone, so that repeating recorded steps after a crash, or
in a replay, leads to the digests that were committed.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
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
from antiphon.core.seeds import derive_seed
from antiphon.core.trust.audit import SampleStatistics
from antiphon.lineage.rollout_table import LeftOut, read_batch
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, UpdateMetrics
from antiphon.services.learner.objective import LOG_RATIO_LIMIT, NOTHING, TokenMetrics, UpdateTotals
from antiphon.services.learner.packing import (
    MicroBatch,
    count_trajectories,
    deal_groups,
    make_micro_batches,
)
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.training import TrainedStep, Training

Floats = npt.NDArray[np.float64]


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
        self.version = -1
        self.progress = ProgressCounter()
        checkpoints.checked = self.progress.add

    def newest_checkpoint(self, at_most: int) -> int | None:
        return self._checkpoints.newest_sound(at_most)

    def start(self, at_most: int) -> TrainedStep:
        self.stop()
        self._engine = self._make_engine(self._config)
        self.version = 0
        found = self.newest_checkpoint(at_most)
        if found is not None:
            self._load(found)
        return TrainedStep(self.version, self._engine.weights(), {})

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def train(self, step: int, payload: bytes) -> TrainedStep:
        engine, algorithm, progress = self._held(), self._config.algorithm, self.progress
        if step != self.version:
            raise IntegrityError(f"step {step} cannot train on version {self.version}; restore first")
        begun = time.perf_counter()
        rows, left_out = read_batch(payload)
        trained = [row for row in rows if not row.failure]
        if algorithm.truncated_completions != "train":
            cut_off = [row for row in trained if row.finish_reason.cut_off]
            trained = [row for row in trained if not row.finish_reason.cut_off]
            if algorithm.truncated_completions == "mask_loss":
                left_out += [LeftOut(row.group_id, 1, row.sampled_tokens) for row in cut_off]
        # In a file of an earlier version the groups left out have no names, and so no part in the dealing.
        ids = {row.group_id for row in trained}
        if all(group.group_id for group in left_out):
            ids |= {row.group_id for row in rows} | {group.group_id for group in left_out}
        # An update that gets nothing to train on is not made.
        groups = [
            (place, dealt)
            for place, dealt in enumerate(deal_groups(ids, self._updates))
            if any(row.group_id in dealt for row in trained)
        ]
        updates = [
            make_micro_batches(
                [row for row in trained if row.group_id in dealt],
                step,
                self._config.learner.micro_batch_tokens,
            )
            for _, dealt in groups
        ]
        torch.manual_seed(derive_seed("learner", self._config.run.seed, step) % 2**63)
        # Until the update is done the engine stands between two versions.
        self.version = -1
        # The last turn of a trajectory ends it only where its task has one turn.
        limits, of_turn = self._config.turn_limits, self._config.sampling.max_tokens
        turns = any(not row.finish_reason.ends_turn for row in rows)
        longest = min(limits.turns * of_turn, limits.tokens) if turns else None
        # Later updates clip against the weights the step began with; the first one holds them.
        proximal: list[list[torch.Tensor] | None] = [None]
        for own in updates[1:]:
            old = []
            for batch in own:
                old.append(engine.logprobs(batch))
                progress.add()
            proximal.append(old)
        done = []
        for own, before, (place, dealt) in zip(updates, proximal, groups, strict=False):
            share = self._share(step * self._updates + place)
            divisor = NOTHING if algorithm.divisor == "trained" else _totals(left_out, dealt, len(groups))
            done.append(engine.update(own, before, replace(divisor, longest=longest), share, progress.add))
        metrics = _metrics(updates, done) if done else {metric.name: 0.0 for metric in LEARNER_METRICS}
        self.version = step + 1
        metrics["learning_rate"] = engine.learning_rate * self._share(self.version * self._updates - 1)
        metrics["train_s"] = time.perf_counter() - begun
        # Only the first update sees the weights that the step began with.
        apart = drifts(updates[0], done[0].tokens) if done else {}
        return TrainedStep(self.version, engine.weights(), metrics, apart)

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
        self.version = version

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


def _totals(left_out: Sequence[LeftOut], dealt: Collection[str], updates: int) -> UpdateTotals:
    """Return what one of a step's updates divides by besides its own rows; unnamed groups count in each."""
    shared = [(group, 1) for group in left_out if group.group_id in dealt]
    shared += [(group, updates) for group in left_out if not group.group_id]
    return UpdateTotals(
        sum(group.trajectories / by for group, by in shared), sum(group.tokens / by for group, by in shared)
    )


def _metrics(updates: Sequence[Sequence[MicroBatch]], done: Sequence[UpdateMetrics]) -> dict[str, float]:
    batches = [batch for own in updates for batch in own]
    tokens = [seen for update in done for seen in update.tokens]
    real = [batch.mask.numpy() > 0 for batch in batches]

    def column(values: Iterable[torch.Tensor]) -> npt.NDArray[Any]:
        return np.concatenate([one.numpy()[at] for one, at in zip(values, real, strict=True)])

    learner = column(seen.learner_logprobs for seen in tokens).astype(np.float64)
    behaviour = column(batch.behaviour_logprobs for batch in batches).astype(np.float64)
    slots = sum(len(batch.shared.slots.index) for batch in batches)
    return {
        "loss": sum(update.loss for update in done) / len(done),
        "gradient_norm": sum(update.gradient_norm for update in done) / len(done),
        "completion_tokens": float(len(learner)),
        "trajectories": float(count_trajectories(batches)),
        "padding_share": 1.0 - sum(batch.shared.real_slots for batch in batches) / slots,
        "micro_batches": float(len(batches)),
        **describe_tokens(
            learner - behaviour,
            learner,
            column(seen.altered for seen in tokens),
            column(seen.clipped for seen in tokens),
            column(seen.applied for seen in tokens).astype(np.float64),
            column(batch.staleness for batch in batches),
        ),
    }


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


def describe_tokens(
    log_ratio: Floats,
    learner_logprobs: Floats,
    altered: npt.NDArray[np.bool_],
    clipped: npt.NDArray[np.bool_],
    applied: Floats,
    staleness: npt.NDArray[np.int64],
) -> dict[str, float]:
    """Return the token metrics of `core.metrics` from one entry per completion token of a step, [K] each.

    Args:
        log_ratio: learner minus behaviour logprob, nats.
        learner_logprobs: nats.
        altered: as in `TokenMetrics`, like the next two.
        clipped: at least one token is needed.
        applied: the weight of each token.
        staleness: versions.
    """
    bounded = np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, squares = np.exp(bounded), float((applied**2).sum())
    metrics = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_share": clipped.mean(),
        "truncated_share": altered.mean(),
        "kl_k1": _k1(bounded),
        "kl_k3": _k3(bounded),
        # (sum w)^2 / sum w^2 / K (Kish 1965); 0 where no weight is left.
        "effective_sample_share": float(applied.sum()) ** 2 / squares / applied.size if squares else 0.0,
        "entropy_estimate": -learner_logprobs.mean(),
    }
    for age in np.unique(staleness):
        chosen = bounded[staleness == age]
        metrics[staleness_metric("kl_k1", int(age))] = _k1(chosen)
        metrics[staleness_metric("kl_k3", int(age))] = _k3(chosen)
        metrics[staleness_metric("tokens", int(age))] = float(chosen.size)
    return {name: float(value) for name, value in metrics.items()}


def _k1(log_ratio: Floats) -> float:
    return float(-log_ratio.mean())


def _k3(log_ratio: Floats) -> float:
    # expm1 keeps the tiny values of an almost on-policy batch, where exp(x) - 1 is all rounding.
    return float((np.expm1(log_ratio) - log_ratio).mean())
