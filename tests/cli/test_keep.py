"""keep --records: a run that ended while MLflow was away is complete after one command."""

import threading
from pathlib import Path

import pytest

from antiphon.cli.app import execute
from antiphon.core.config import build_config, dump_config
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME
from tests.support.tracked_runs import TrackedRunFixture, census

pytestmark = pytest.mark.engine


def test_records_of_a_finished_run_are_brought_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = TrackedRunFixture(tmp_path, "late", steps=2)
    (run.run_dir / "config.yaml").write_text(dump_config(run.config))
    (run.run_dir / "report.html").write_text("<html></html>")
    (run.run_dir / "plots").mkdir()
    (run.run_dir / "plots" / "learning.svg").write_text("<svg></svg>")
    records = run.records()
    run.tell_all((0.25, 0.5))
    run.log.write_journal(run.run_dir / JOURNAL_NAME, run.run_dir.name)
    assert records.close(0.0).writers[-1].pending > 0
    for thread in threading.enumerate():  # each gives up by itself, and must not write beside the command
        if thread.name == "antiphon-mlflow":
            thread.join(60.0)

    assert execute(["keep", run.run_dir.name, "--records", "--timeout-s", "0.1"]) == 1
    assert "still incomplete" in capsys.readouterr().err
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    counted = []
    for _ in range(2):
        assert execute(["keep", run.run_dir.name, "--records"]) == 0
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
        counted.append(census(client, run.mlflow_run_id()))
        assert client.get_run(run.mlflow_run_id()).info.status == "FINISHED"
        files = [file.path for file in client.list_artifacts(run.mlflow_run_id())]
        assert files == ["plots", "report.html"]
    assert counted[0] == counted[1]
    assert counted[0]["points"]["learning/loss"] == [(0, 1.0), (1, 0.5)]
    assert [name for name, *_ in counted[0]["children"]] == ["evaluate v0", "evaluate v2"]
    assert counted[0]["datasets"] == 2 and len(counted[0]["traces"]) == 2


def test_a_run_without_records_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "bare-1"
    folder.mkdir(parents=True)
    config = build_config({"record": {"mlflow": False, "dvc": False}})
    (folder / "config.yaml").write_text(dump_config(config))
    assert execute(["keep", "bare-1", "--records"]) == 2
    assert "record.mlflow=false" in capsys.readouterr().err
