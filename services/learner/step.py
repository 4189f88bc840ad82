"""Step: a recorded batch takes the policy from version t to t + 1, and always to the same bits.

A `Trainer` owns the engine and lives on one thread. What it does depends on the base weights,
the configuration and the batch files alone, so that repeating recorded steps after a crash, or
in a replay, leads to the digests that were committed.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.records import BatchRow, FinishReason
from antiphon.core.seeds import derive_seed
from antiphon.core.trust.audit import SampleStatistics
from antiphon.lineage.rollout_table import decode_batch, decode_left_out
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, UpdateMetrics
from antiphon.services.learner.objective import NOTHING, UpdateTotals
from antiphon.services.learner.packing import MicroBatch, make_micro_batches, split_updates
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.step_metrics import describe_tokens, drifts, empty_statistics, gather
from antiphon.services.learner.training import TrainedStep, Training


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
        rows = [row for row in decode_batch(payload) if not row.failure]
        if self._config.algorithm.truncated_completions == "mask":
            rows = [row for row in rows if row.finish_reason is not FinishReason.LENGTH]
        updates = self._micro_batches(rows, step)
        left_out = self._left_out(payload, len(updates))
        torch.manual_seed(derive_seed("learner", self._config.run.seed, step) % 2**63)
        # Until the update is done the engine stands between two versions.
        self._version = -1
        if updates:
            metrics, apart = _train_updates(engine, updates, left_out, self.progress.add)
        else:
            metrics, apart = empty_statistics(), {}
        self._version = step + 1
        metrics["train_s"] = time.perf_counter() - begun
        return TrainedStep(self.version, engine.weights(), metrics, apart)

    def _micro_batches(self, rows: list[BatchRow], step: int) -> list[list[MicroBatch]]:
        section = self._config.learner
        return [
            make_micro_batches(part, step, section.micro_batch_tokens)
            for part in split_updates(rows, self._config.algorithm.updates_per_step)
        ]

    def _left_out(self, payload: bytes, updates: int) -> UpdateTotals:
        """Return what each of a step's updates divides by besides its own rows."""
        if self._config.algorithm.divisor == "trained" or not updates:
            return NOTHING
        found = decode_left_out(payload)
        return UpdateTotals(found.trajectories / updates, found.tokens / updates)

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
    updates: list[list[MicroBatch]],
    left_out: UpdateTotals,
    count: Callable[[], None],
) -> tuple[dict[str, float], dict[str, tuple[SampleStatistics, ...]]]:
    # Later updates clip against the weights the step began with; the first one holds them.
    proximal: list[list[torch.Tensor] | None] = [None]
    for batches in updates[1:]:
        held = []
        for batch in batches:
            held.append(engine.logprobs(batch))
            count()
        proximal.append(held)
    pairs = zip(updates, proximal, strict=True)
    done = [engine.update(batches, old, left_out, count) for batches, old in pairs]
    # Only the first update sees the weights that the step began with.
    return _metrics(updates, done), drifts(updates[0], done[0].tokens)


def _metrics(updates: list[list[MicroBatch]], done: list[UpdateMetrics]) -> dict[str, float]:
    batches = [batch for part in updates for batch in part]
    tokens = [found for update in done for found in update.tokens]
    total = sum(batch.completion_tokens for batch in batches)
    slots = sum(len(batch.shared.slots.index) for batch in batches)
    return {
        "loss": sum(update.loss for update in done) / len(done),
        "gradient_norm": sum(update.gradient_norm for update in done) / len(done),
        "learning_rate": done[-1].learning_rate,
        "completion_tokens": float(total),
        "trajectories": float(sum(len(batch.advantages) for batch in batches)),
        "padding_share": 1.0 - sum(batch.shared.real_slots for batch in batches) / slots,
        "micro_batches": float(len(batches)),
        **describe_tokens(gather(batches, tokens)),
    }
