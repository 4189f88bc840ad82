"""Artifacts of a small run made by hand: real files of every kind, without a loop or an engine."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from antiphon.api.policy_file import policy_header
from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.digests import digest_bytes
from antiphon.core.records import (
    BatchRef,
    BatchRow,
    FinishReason,
    RowTiming,
    SnapshotManifest,
    StepCommit,
    TensorEntry,
    VersionSpan,
)
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.records import Records
from antiphon.lineage.rollout_table import encode_batch, encode_timings
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from tests.support.made_log import MadeLog

TOKENS = 6


def tiny_row(step: int, sample_index: int = 0, tokens: int = TOKENS) -> BatchRow:
    """Return a trajectory whose first half version `step - 1` sampled and whose second `step`."""
    half = tokens // 2
    spans = (VersionSpan(max(0, step - 1), 0, half), VersionSpan(step, half, tokens))
    return BatchRow(
        group_id=f"g{step}",
        prompt_key=f"train/{step}",
        sample_index=sample_index,
        prompt_token_ids=np.arange(4, dtype=np.int32),
        token_ids=np.arange(tokens, dtype=np.int32) + step,
        logprobs=np.full(tokens, -0.25, dtype=np.float32),
        spans=spans,
        finish_reason=FinishReason.STOP,
        reward=1.0,
        advantage=0.5,
    )


def tiny_timing(step: int, sample_index: int = 0) -> RowTiming:
    """Return the timing of a row."""
    return RowTiming(f"g{step}", sample_index, "w0", f"{step:032x}", 1, 0.5, 1.0, 2.0, 3.0)


def kept_row(split: str, number: int, index: int) -> BatchRow:
    """Return a completion that trained nothing; of a held-out split, `index` is its reward's half."""
    heldout = split == "heldout"
    row = tiny_row(number, 0 if heldout else index)
    return replace(
        row,
        group_id=f"v{number:06d}-e{index:04d}" if heldout else f"f{number}",
        prompt_key=f"{split}-0-{index if heldout else number}",
        spans=(VersionSpan(number, 0, TOKENS),),
        token_ids=np.full(TOKENS, 4 + index, dtype=np.int32),
        reward=index / 2 if heldout else 0.0,
        advantage=0.0,
        finish_reason=FinishReason.LENGTH if index == 2 else FinishReason.STOP,
    )


def light_snapshot(
    store: PayloadStore, run_id: str, version: int, weights_digest: str, body: bytes
) -> SnapshotManifest:
    """Write a policy file with one tensor of `body`, float32, under a digest that is taken as it is."""
    tensor = TensorEntry("w", "float32", (len(body) // 4,), 0, len(body))
    head = policy_header(run_id, version, weights_digest, (tensor,))
    making = store.make(1 << 20, len(head))
    making.write(body)
    payload = making.finish(head)
    return SnapshotManifest(run_id, version, weights_digest, (tensor,), len(body), (payload,), "127.0.0.1:1")


class RecordedRun:
    """A home that is a DVC project of its own, with one recorded run in it."""

    run_id = "demo-1"

    def __init__(self, folder: Path, **config: object) -> None:
        (folder / ".dvc").mkdir(parents=True)
        (folder / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
        self.home = folder
        self.run_dir = folder / "runs" / self.run_id
        self.run_dir.mkdir(parents=True)
        self.store = ArtifactStore(folder / "store")
        self.config: RunConfig = build_config(
            {
                "run": {"name": "demo", "steps": 4},
                "record": {"mlflow": False, "keep_ledger": True, "samples": 0},
                **config,
            }
        )
        (self.run_dir / "config.yaml").write_text(dump_config(self.config))
        self._payloads = PayloadStore(self.run_dir / PAYLOADS)
        self._made: dict[int, SnapshotManifest] = {}
        self.log = MadeLog()

    @property
    def ledger(self) -> Path:
        """The folder of ledgers."""
        return self.home / "ledger"

    def records(self) -> Records:
        """Follow the run's log."""
        return Records(
            self.run_id,
            self.config,
            self.run_dir,
            self.home,
            self.store.root,
            self.log,
            weights_file=lambda version: self._payloads.checked(self._made[version]),
            first_pause_s=0.01,
        )

    def snapshot(self, version: int) -> SnapshotManifest:
        """Return a published version whose payload can be read."""
        body = bytes((version + i) % 256 for i in range(64))
        digest = digest_bytes(b"v%d" % version)
        made = self._made[version] = light_snapshot(self._payloads, self.run_id, version, digest, body)
        return made

    def batch(self, step: int) -> BatchRef:
        """Store a batch and return its reference."""
        digest = self.store.put(encode_batch([tiny_row(step)]))
        timings = self.store.put(encode_timings([tiny_timing(step)]))
        return BatchRef(
            step, digest, timings, 1, 1, 0, 0, TOKENS, 1.0, {min(1, step): 1}, float(TOKENS),
            samples_digest=self.samples("train", step),
        )  # fmt: skip

    def samples(self, split: str, number: int) -> str:
        """Store kept completions of a step or of the evaluation of a version; "" where none are kept."""
        if not self.config.record.samples:
            return ""
        rows = [kept_row(split, number, index) for index in range(3)]
        return self.store.put(encode_batch(rows))

    def commit(self, step: int, batch: BatchRef) -> StepCommit:
        """Return the commit of a step on `batch`."""
        weights = self.snapshot(step + 1).weights_digest
        return StepCommit(step, step + 1, weights, batch.digest, {"loss": 0.5, "train_s": 1.0}, True)

    def tell(self, steps: range) -> None:
        """Write some steps into the run's log; the base model with step 0."""
        if steps.start == 0:
            self.log.announce(self.snapshot(0))
            self.log.evaluate(EvaluationRecord(0, 8, 8, 0.25, 6.0, self.samples("heldout", 0)))
        for step in steps:
            batch = self.batch(step)
            self.log.commit(self.commit(step, batch), batch)
            self.log.announce(self.snapshot(step + 1))

    def complete(self, steps: int = 4) -> None:
        """Record a whole run and close its records."""
        self.tell(range(steps))
        self.log.evaluate(EvaluationRecord(steps, 8, 8, 0.75, 6.0, self.samples("heldout", steps)))
        report = self.records().close(120.0)
        assert report.complete, report
