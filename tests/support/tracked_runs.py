"""Runs told to MLflow in tests: small, with real batch files, and the same every time."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop.events import SnapshotAnnounced
from antiphon.core.records import BatchRef, BatchRow, FinishReason, RowTiming, StepCommit, VersionSpan
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.cursors import FOLDER
from antiphon.lineage.export import Export
from antiphon.lineage.follower import FollowerReport
from antiphon.lineage.records import Records, RecordsReport
from antiphon.lineage.rollout_table import encode_batch, encode_timings
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.tracking.champion import Exporter
from tests.support.made_log import MadeLog

ROWS = 8


def decode(token_ids: Iterable[int]) -> str:
    """Write token ids as words."""
    return " ".join(f"w{int(i)}" for i in token_ids)


def small_export(version: int, folder: Path) -> Export:
    """Write a folder of the form of an export, with a few bytes for weights."""
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float32"}')
    (folder / "model.safetensors").write_bytes(b"w%d" % version)
    return Export("tracked-1", version, "", None, 0)


class TrackedRunFixture:
    """One run of ours in a home folder, told step by step."""

    def __init__(self, home: Path, experiment: str, run_id: str = "tracked-1", steps: int = 4) -> None:
        self.home, self.run_id, self.steps = home, run_id, steps
        self.export: Exporter | None = None
        """What writes the files of a champion."""
        self.run_dir = home / "runs" / f"{experiment}-{run_id}"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.log = MadeLog()
        self.store = ArtifactStore(home / "store")
        self.config: RunConfig = build_config(
            {
                "run": {"name": experiment, "steps": steps},
                "evaluation": {"interval": 2},
                "record": {"dvc": False, "worker_usd_per_hour": 3600.0, "system_metrics_s": 0.0, "traces": 2},
            }
        )

    def records(self, first_pause_s: float = 0.01) -> Records:
        """Follow the run's log, as a new process would."""
        records = Records(
            *(self.run_id, self.config, self.run_dir, self.home, self.store.root, self.log),
            decode=decode,
            first_pause_s=first_pause_s,
        )
        if self.export is not None:  # which a ledger gives otherwise
            records.followers[-1].sink._export = self.export  # type: ignore[attr-defined]
        return records

    def forget(self) -> None:
        """Remove the cursors: everything is handed over again."""
        shutil.rmtree(self.run_dir / FOLDER)

    def batch(self, step: int) -> BatchRef:
        """Store the files of a step's batch, all of it sampled by version `step`."""
        rows, notes = [], []
        for i in range(ROWS):
            tokens = np.full(3, 10 * step + i, np.int32)
            rows.append(
                BatchRow(
                    tokens,
                    tokens.astype(np.float32),
                    (VersionSpan(step, 0, 3),),
                    FinishReason.STOP,
                    group_id=f"g{step}",
                    prompt_key="p0",
                    sample_index=i,
                    prompt_token_ids=np.array([1, 2], np.int32),
                    reward=i / ROWS,
                    advantage=0.0,
                )
            )
            notes.append(RowTiming(f"g{step}", i, f"worker-{i % 2}", "lease", 1, 0.5, 0.0, 0.5, 0.6))
        digest, timings = self.store.put(encode_batch(rows)), self.store.put(encode_timings(notes))
        return BatchRef(step, digest, timings, ROWS, 1, 0, 0, 3 * ROWS, 0.5, {0: ROWS}, 3.0)

    def tell_base(self) -> None:
        """Tell of version 0."""
        self.log.begin(20.0)
        self.log.add(SnapshotAnnounced(0, "0" * 64, ""))

    def tell_step(self, step: int) -> None:
        """Tell of a step's batch, version and figures."""
        batch = self.batch(step)
        metrics = {"loss": 1.0 / (step + 1), "reward_mean": 0.5, "staleness_mean": 0.0, "train_s": 0.25}
        commit = StepCommit(step, step + 1, f"{step + 1:064x}", batch.digest, metrics, True)
        self.log.commit(commit, batch, 20.0 + 1.5 * (step + 1))

    def tell_evaluation(self, version: int, reward: float) -> None:
        """Tell of a version's held-out score over 8 prompts."""
        self.log.evaluate(EvaluationRecord(version, 8, 8, reward, 3.0))

    def tell_all(self, rewards: Sequence[float] = (0.25, 0.75, 0.5)) -> None:
        """Tell a whole run whose versions 0, 2, 4 scored `rewards`."""
        self.tell_base()
        self.tell_evaluation(0, rewards[0])
        for step in range(self.steps):
            self.tell_step(step)
            if step % 2 and (step + 1) // 2 < len(rewards):
                self.tell_evaluation(step + 1, rewards[(step + 1) // 2])

    def mlflow_run_id(self) -> str:
        """Return which MLflow run it is."""
        return str(json.loads((self.run_dir / "mlflow.json").read_text())["run_id"])


def mlflow_of(report: RecordsReport) -> FollowerReport:
    """Return how far MLflow is."""
    return next(sink for sink in report.writers if sink.name == "mlflow")


def census(client: Any, run_id: str) -> dict[str, Any]:
    """Count everything that a run has in MLflow."""
    run = client.get_run(run_id)
    experiment = [run.info.experiment_id]
    children = client.search_runs(experiment, f"tags.`mlflow.parentRunId` = '{run_id}'")
    traces = client.search_traces(locations=experiment, max_results=100, include_spans=True)
    own = {child.info.run_id for child in children}
    return {
        "points": {
            key: [(p.step, p.value) for p in client.get_metric_history(run_id, key)]
            for key in run.data.metrics
            if not key.startswith("summary/")
        },
        "datasets": len(run.inputs.dataset_inputs),
        "outputs": len(run.outputs.model_outputs),
        "models": sorted(
            m.name for m in client.search_logged_models(experiment) if m.source_run_id == run_id
        ),
        "children": sorted(
            (child.info.run_name, child.info.status, child.data.params.get("prompts", ""))
            for child in children
        ),
        "child points": sorted(
            (child.info.run_name, key, len(client.get_metric_history(child.info.run_id, key)))
            for child in children
            for key in child.data.metrics
        ),
        "traces": sorted(
            (t.info.tags["mlflow.traceName"], len(t.data.spans), len(t.info.assessments))
            for t in traces
            if t.info.trace_metadata.get("mlflow.sourceRun") in own
        ),
        "runs": len(client.search_runs(experiment)),
    }
