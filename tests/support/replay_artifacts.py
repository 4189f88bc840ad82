"""A run of a few steps of a tiny policy, recorded as the main job records one, for replays.

Tokens are drawn one by one from the exact distribution of the version that stands in their span,
computed apart from the code that scores them again; some completions change versions on the way.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.metrics import batch_metrics
from antiphon.core.records import BatchRef, BatchRow, FinishReason, SnapshotManifest, StepCommit, VersionSpan
from antiphon.lineage.records import Records
from antiphon.lineage.rollout_table import encode_batch, encode_timings
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.earlier_policies import stored_policies
from antiphon.services.learner.policy import load_published
from antiphon.services.learner.saved import SavedFolder
from antiphon.services.learner.step import Trainer
from antiphon.services.learner.training import TrainedStep
from antiphon.services.rollout.selfcheck.distribution_check import processed
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from antiphon.weights.snapshot import write_adapter, write_snapshot
from tests.support.made_log import MadeLog

VOCABULARY = 32
RUN_ID = "tiny-s0-1"
STEPS = 4
RECORD_S = 60.0


def save_model(folder: Path, seed: int = 0, experts: int = 0) -> Path:
    """Write a random policy that has everything a replay needs; with `experts`, a token uses two of them."""
    torch.manual_seed(seed)
    more = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if experts else {}
    shape = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        **more,
    )
    (Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM)(shape).save_pretrained(folder)
    return folder


def make_config(model: Path, **changes: Any) -> RunConfig:
    """Return the run's configuration; changes are section__field=value."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "steps": STEPS},
        "model": {"path": str(model)},
        "sampling": {"temperature": 0.8, "max_tokens": 12},
        "learner": {"learning_rate": 1e-3, "warmup_steps": 2, "checkpoint_interval": 2},
        "record": {"mlflow": False, "checkpoint_stride": 1},
    }
    for key, value in changes.items():
        section, field = key.split("__")
        tree.setdefault(section, {})[field] = value
    return build_config(tree)


def run_of_few_weights(root: Path, **changes: Any) -> "TinyRun":
    """Return a run as commands find it, which keeps weights of the base and the two newest versions."""
    config = make_config(save_model(root / "model"), record__weights="last", loop__max_staleness=1, **changes)
    run = TinyRun(root / "home", config)
    (run.run_dir / "config.yaml").write_text(dump_config(config))
    return run


class TinyRun:
    """Trains and records the run; afterwards only `ledger` matters."""

    def __init__(self, home: Path, config: RunConfig) -> None:
        """Make a home that is a DVC project, and live the run in it."""
        (home / ".dvc").mkdir(parents=True)
        (home / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
        self.home, self.config = home, config
        self.run_dir = home / "runs" / RUN_ID
        self.run_dir.mkdir(parents=True)
        self.store = ArtifactStore(home / "store")
        self.ledger = home / "ledger" / RUN_ID
        self._payloads = PayloadStore(self.run_dir / PAYLOADS)
        self._policies: dict[int, Any] = {}
        self.sampled: dict[int, list[BatchRow]] = {}
        """Step -> its rows, with the log-probabilities that they were drawn with."""
        self._live()

    def _live(self) -> None:
        self.log, made = MadeLog(), dict[int, SnapshotManifest]()
        records = Records(
            *(RUN_ID, self.config, self.run_dir, self.home, self.store.root, self.log, self.home),
            weights_file=lambda version: self._payloads.checked(made[version]),
            adapter_file=self._payloads.adapter,
        )
        checkpoints = CheckpointStore(self.run_dir / "checkpoints", STEPS)
        self.trainer = trainer = Trainer(
            self.config,
            checkpoints,
            saved=SavedFolder(self.run_dir),
            earlier=stored_policies(self.config, self._payloads),
        )
        made[0] = self._published(trainer.start(0))
        self.log.announce(made[0])
        for step in range(STEPS):
            batch = self._batch(step)
            trained = trainer.train(step, self.store.get(batch.digest))
            if trained.loaded or trained.version % self.config.learner.checkpoint_interval == 0:
                trainer.save()
            metrics = {**trained.metrics, **batch_metrics(batch)}
            manifest = made[trained.version] = self._published(trained)
            digest = manifest.weights_digest
            said = trained.exactness
            commit = StepCommit(step, trained.version, digest, batch.digest, metrics, True, exactness=said)
            self.log.commit(commit, batch)
            self.log.announce(manifest)
        trainer.stop()
        report = records.close(RECORD_S)
        assert report.complete, report

    def policy(self, version: int) -> Any:
        """Return the policy of a version, as it sampled."""
        return self._policies[version]

    def _published(self, trained: TrainedStep) -> SnapshotManifest:
        policy = AutoModelForCausalLM.from_pretrained(self.config.model.path)
        load_published(policy, trained.weights.copies())
        self._policies[trained.version] = policy.eval()
        manifest = write_snapshot(self._payloads, RUN_ID, trained.version, trained.weights)
        if trained.version and (adapter := trained.weights.adapter()) is not None:
            base = self._payloads.manifest(0).weights_digest
            payload = write_adapter(self._payloads, manifest, base, adapter)
            manifest = replace(manifest, payloads=(*manifest.payloads, payload))
        self._payloads.put_manifest(manifest)
        return manifest

    def _batch(self, step: int) -> BatchRef:
        rows = self.sampled[step] = [self._row(step, place) for place in range(8)]
        silent = self.config.rollout.logprobs == "learner"
        if silent:
            rows = [replace(row, logprobs=np.zeros_like(row.logprobs)) for row in rows]
        timings = self.store.put(encode_timings([]))
        digest = self.store.put(encode_batch(rows, recomputed=silent))
        tokens = sum(len(row.token_ids) for row in rows)
        return BatchRef(step, digest, timings, 8, 2, 0, 0, tokens, 0.5, {0: 4, min(step, 1): 4}, 8.0)

    def _row(self, step: int, place: int) -> BatchRow:
        if place == 3:
            return self._branched(step)
        rng = np.random.default_rng([step, place])
        prompt = rng.integers(0, VOCABULARY, 4).astype(np.int32)
        length = int(rng.integers(3, 12))
        old, new = self._oldest(step), step
        turn = length // 2 if place % 2 and old != new else length
        spans = [VersionSpan(old, 0, turn)] + ([VersionSpan(new, turn, length)] if turn < length else [])
        tokens, logprobs = [], []
        for span in spans:
            for _ in range(span.start, span.stop):
                p = self._distribution(span.version, [*prompt.tolist(), *tokens])
                tokens.append(int(rng.choice(VOCABULARY, p=p)))
                logprobs.append(float(np.log(p[tokens[-1]])))
        return BatchRow(
            group_id=f"s{step}-g{place // 4}",
            prompt_key="p",
            sample_index=place % 4,
            prompt_token_ids=prompt,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            spans=tuple(spans),
            finish_reason=FinishReason.STOP,
            reward=float(place % 2),
            advantage=1.0 if place % 2 else -1.0,
        )

    def _oldest(self, step: int) -> int:
        return max(0, step - (self.config.loop.max_staleness if self.config.scores_earlier else 1))

    def _branched(self, step: int) -> BatchRow:
        """Return a row of a host, whose context begins afresh before the last turn."""
        version = self._oldest(step) if self.config.scores_earlier else step
        rng, row, context = np.random.default_rng([step, 99]), list[int](), list[int]()
        logprobs, spans, observed, breaks = list[float](), [], [], []
        for turn in range(3):
            said = rng.integers(0, VOCABULARY, 3).tolist()
            if turn == 2:
                context = []
                breaks.append(len(row))
            observed.append((len(row), len(row) + 3))
            row, context, logprobs = row + said, context + said, logprobs + [0.0] * 3
            spans.append(VersionSpan(version, len(row), len(row) + 4))
            for _ in range(4):
                p = self._distribution(version, context)
                token = int(rng.choice(VOCABULARY, p=p))
                row, context, logprobs = (
                    [*row, token],
                    [*context, token],
                    [*logprobs, float(np.log(p[token]))],
                )
        return BatchRow(
            np.array(row, dtype=np.int32),
            np.array(logprobs, dtype=np.float32),
            tuple(spans),
            FinishReason.ENVIRONMENT,
            observed=tuple(observed),
            breaks=tuple(breaks),
            group_id=f"s{step}-g0",
            prompt_key="p",
            sample_index=3,
            prompt_token_ids=np.empty(0, dtype=np.int32),
            reward=1.0,
            advantage=1.0,
        )

    @torch.no_grad()
    def _distribution(self, version: int, tokens: list[int]) -> Any:
        logits = self._policies[version](input_ids=torch.tensor([tokens])).logits[0, -1]
        return processed(torch.log_softmax(logits.double(), -1).numpy(), self.config.sampling.parameters())
