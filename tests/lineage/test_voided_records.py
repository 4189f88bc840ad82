"""Voided batches in the records: the batch that replaced one names it, wherever the run is recorded."""

import dataclasses
import json
from pathlib import Path

import pytest

from antiphon.api.sink import RunEnd, SinkRun
from antiphon.core.records import StepCommit
from antiphon.core.voided_batch import VoidedBatch
from antiphon.lineage.documents.graph import line_facts
from antiphon.lineage.ledger.sink import LedgerSink
from antiphon.lineage.run_log import read_steps
from tests.support.run_logs import write_run_log
from tests.support.tracked_runs import TrackedRunFixture

VOIDED = VoidedBatch(1, "ab" * 32, 4, 1, 8, "no finite loss", "ada")


def test_the_run_log_and_the_batch_document_name_what_was_voided(tmp_path: Path) -> None:
    run = TrackedRunFixture(tmp_path, "voided")
    plain, replacing = run.batch(0), dataclasses.replace(run.batch(1), replaced=(VOIDED,))
    for batch in (plain, replacing):
        run.log.commit(StepCommit(batch.step, batch.step + 1, "0" * 64, batch.digest), batch)
    records = write_run_log(run.run_dir, run.log.read())
    lines = read_steps(run.run_dir)
    first, second = (line["batch"] for line in lines)
    assert "replaced" not in first and second["replaced"] == [dataclasses.asdict(VOIDED)]

    folder = tmp_path / "project"
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc" / "config").write_text("")
    sink = LedgerSink(SinkRun(run.run_id, run.run_dir, run.config), folder, run.store, None)
    sink.open()
    sink.write([record for record in records if record.number == 1])
    sink.close(RunEnd())
    document = json.loads((folder / "ledger" / run.run_id / "batches/t000001.json").read_text())
    assert VOIDED.digest in json.dumps(document) and "no finite loss" in json.dumps(document)
    assert line_facts(run.run_id, lines[1])["batches/t000001.json"]["replaced"] == second["replaced"]


@pytest.mark.engine
def test_mlflow_shows_what_was_voided_with_the_batch_that_replaced_it(tmp_path: Path) -> None:
    run = TrackedRunFixture(tmp_path, "voided", steps=2)
    records = run.records()
    run.tell_base()
    real = run.batch

    def batch(step: int):  # type: ignore[no-untyped-def]
        return dataclasses.replace(real(step), replaced=(VOIDED,) if step == 1 else ())

    run.batch = batch  # type: ignore[method-assign]
    for step in range(2):
        run.tell_step(step)
    assert records.close(60.0).complete

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    found = client.get_run(run.mlflow_run_id())
    points = client.get_metric_history(found.info.run_id, "rollout/voided")
    assert [(point.step, point.value) for point in points] == [(1, 1.0)]
    profiles = {d.dataset.name: json.loads(d.dataset.profile) for d in found.inputs.dataset_inputs}
    assert "replaced" not in profiles["batch-t000000"]
    assert profiles["batch-t000001"]["replaced"][0]["operator"] == "ada"
