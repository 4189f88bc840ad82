"""Records of a run in the real MLflow and the real ledger, from one recorder."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from antiphon.core.config import RunConfig, build_config
from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.records import BatchRef, SnapshotManifest, StepCommit
from antiphon.core.reporting.deliveries import Deliveries
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.records import Records
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import weights_digest
from tests.support.artifacts import light_snapshot, tiny_row
from tests.support.made_log import MadeLog

ROOT = Path(__file__).parents[3]
WEIGHTS = b"\x00\x01\x02\x03" * 8
STORE = PayloadStore(Path())  # that of the test
MODEL_FILES = ("config", "generation_config", "tokenizer", "tokenizer_config")


def config(**record: object) -> RunConfig:
    return build_config({"run": {"name": "demo", "steps": 3}, "record": record})


class Project:
    """A DVC project with one run in its home folder."""

    def __init__(self, folder: Path) -> None:
        (folder / ".dvc").mkdir(parents=True)
        shutil.copy(ROOT / ".dvc/config", folder / ".dvc/config")
        subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=60)
        self.folder, self.home = folder, folder / ".antiphon"
        self.run_dir = self.home / "runs/demo-1"
        self.run_dir.mkdir(parents=True)
        self.store = ArtifactStore(self.home / "store")
        self.log = MadeLog()

    def records(self, weights_file: Callable[[int], Path] | None = None, **record: object) -> Records:
        root = self.home / "store"
        return Records(
            *("demo-1", config(**record), self.run_dir, self.home, root, self.log),
            weights_file=weights_file or (lambda version: STORE.checked(manifest(version))),
            held=True,
            first_pause_s=0.01,
        )

    def client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=f"sqlite:///{self.home}/mlflow/mlflow.db")

    def mlflow_run(self) -> Any:
        return self.client().get_run(json.loads((self.run_dir / "mlflow.json").read_text())["run_id"])

    def batch(self, step: int) -> BatchRef:
        digest = self.store.put(encode_batch([tiny_row(step)]))
        timings = self.store.put(f"timings {step}".encode())
        samples = self.store.put(encode_batch([tiny_row(step, 1)]))
        found = {0: 10, 1: 6}
        return BatchRef(
            step, digest, timings, 16, 2, 0, 0, 320, 0.25 * step, found, 20.0, samples_digest=samples
        )

    def tell(self, step: int, manifest: SnapshotManifest | None = None) -> None:
        batch = self.batch(step)
        metrics = {"loss": 1.0 / (step + 1), "train_s": 0.5, "drafting_acceptance": 0.25 * step}
        digest = f"{step:064x}" if manifest is None else manifest.weights_digest
        self.log.commit(StepCommit(step, step + 1, digest, batch.digest, metrics, True), batch)
        if manifest is not None:
            self.log.announce(manifest)

    def entries(self) -> set[str]:
        folder = self.folder / "ledger/demo-1"
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


@pytest.fixture(autouse=True)
def payloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "STORE", PayloadStore(tmp_path / "payloads"))


def manifest(version: int) -> SnapshotManifest:
    whole = weights_digest({"w": torch.frombuffer(bytearray(WEIGHTS), dtype=torch.float32)})
    return light_snapshot(STORE, "demo-1", version, whole, WEIGHTS)


@pytest.mark.engine
def test_a_run_is_recorded_everywhere_and_goes_on_after_a_break(project: Project, tmp_path: Path) -> None:
    first = project.records()
    project.log.announce(manifest(0))
    project.log.evaluate(EvaluationRecord(0, 8, 8, 0.25, 30.0))
    project.log.evaluate(EvaluationRecord(1, 8, 5, 0.3, 30.0))
    project.tell(0, manifest(1))
    project.tell(1)
    report = first.close(120)
    assert report.complete, report
    assert project.mlflow_run().info.status == "KILLED"

    second = project.records()
    project.tell(2, manifest(3))
    project.log.evaluate(EvaluationRecord(3, 8, 8, 0.75, 25.0))
    page = tmp_path / "report.html"
    page.write_text("<html></html>")
    assert second.flush(120).complete
    deliveries = Deliveries()
    deliveries.add(DeliveryRecord(1, "w0", 2.0, bytes_from={"": 30, "w1": 10}), 1.7e9)
    second.attach(page, versions=deliveries.in_order())
    deliveries.add(DeliveryRecord(3, "w0", 4.0, bytes_from={"": 40}), 1.7e9)
    second.attach(page, versions=deliveries.in_order())
    report = second.close(120)
    assert report.complete, report

    client, run = project.client(), project.mlflow_run()
    assert run.info.status == "FINISHED"
    assert run.data.params["loop.max_staleness"] == "2"
    history = client.get_metric_history(run.info.run_id, "learning/loss")
    assert [(point.step, point.value) for point in history] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    drafted = client.get_metric_history(run.info.run_id, "rollout/drafting_acceptance")
    assert [(point.step, point.value) for point in drafted] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    heldout = client.get_metric_history(run.info.run_id, "heldout/pass_at_1")
    assert [(point.step, point.value) for point in heldout] == [(0, 0.25), (3, 0.75)]
    for name, values in {
        "seconds_to_last": [2.0, 4.0],
        "bytes": [40, 40],
        "relayed_share": [0.25, 0],
    }.items():
        points = client.get_metric_history(run.info.run_id, f"weights/{name}")
        assert [(point.step, point.value) for point in points] == list(zip((1, 3), values, strict=True))
    datasets = {entry.dataset.name: entry.dataset for entry in run.inputs.dataset_inputs}
    assert set(datasets) == {"batch-t000000", "batch-t000001", "batch-t000002"}
    assert json.loads(datasets["batch-t000001"].source)["digest"] == project.batch(1).digest
    models = client.search_logged_models([run.info.experiment_id])
    assert {model.name for model in models} == {f"policy-v{version}" for version in range(4)}
    newest = next(model for model in models if model.name == "policy-v3")
    assert newest.params["weights_digest"] == manifest(3).weights_digest and newest.status == "READY"
    assert {metric.key for metric in newest.metrics} >= {
        "learning/loss",
        "heldout/pass_at_1",
        "learning/reward_mean",
    }
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]

    assert project.entries() == {
        "manifest.json",
        *(f"origins/{name}.json" for name in ("code", "machine", "model", "train", "heldout")),
        *(f"model/{name}.json" for name in MODEL_FILES),
        "evaluations/v000000.json",
        "evaluations/v000003.json",
        "versions/v000000.json",
        "versions/v000000.safetensors",
        "versions/v000001.safetensors",
        "versions/v000003.safetensors",
        *(f"versions/v{step + 1:06d}.json" for step in range(3)),
        *(f"batches/t{step:06d}.json" for step in range(3)),
        *(f"batches/t{step:06d}.parquet" for step in range(3)),
        *(f"batches/t{step:06d}.timings.parquet" for step in range(3)),
        *(f"batches/t{step:06d}.samples.parquet" for step in range(3)),
    }
    out = yaml.safe_load((project.folder / "ledger/demo-1.pointer").read_text())["outs"][0]
    assert out["nfiles"] == len(project.entries())
    assert newest.params["dvc_md5"] and len(newest.params["dvc_md5"]) == 32


@pytest.mark.engine
def test_sinks_that_come_later_begin_at_the_beginning(project: Project) -> None:
    quiet = project.records(mlflow=False, dvc=False)
    for step in range(3):
        project.tell(step)
    assert quiet.close(60).complete
    assert (project.run_dir / "manifest.json").is_file() and not (project.folder / "ledger").exists()
    late = project.records()
    assert late.close(120).complete
    run = project.mlflow_run()
    history = project.client().get_metric_history(run.info.run_id, "learning/loss")
    assert [point.step for point in history] == [0, 1, 2] and len(run.inputs.dataset_inputs) == 3
    assert {f"batches/t{step:06d}.parquet" for step in range(3)} < project.entries()


@pytest.mark.engine
def test_mlflow_being_away_never_stops_anybody(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    records = project.records(dvc=False)
    for step in range(3):
        project.tell(step)
    report = records.close(0.5)
    mlflow = report.writers[-1]
    assert mlflow.pending > 0 and mlflow.done == 0
    assert len((project.run_dir / "metrics.jsonl").read_text().splitlines()) == 3


def test_weights_that_are_gone_are_reported_and_nothing_else_is_lost(project: Project) -> None:
    from antiphon.core.errors import UnavailableError

    def gone(version: int) -> Path:
        raise UnavailableError(f"version {version} is not held here")

    records = project.records(gone, mlflow=False)
    project.tell(0, manifest(1))
    report = records.close(60)
    assert not report.complete
    assert "the weights of version 1 were gone" in report.writers[1].failures[0]
    assert "versions/v000001.json" in project.entries()
