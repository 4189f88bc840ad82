"""MLflow as a server of a team: it may go away and come back, and it may ask who is there."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from antiphon.lineage.records import Records
from antiphon.lineage.run_log import read_steps
from antiphon.runs.servers.s3_server import S3Server
from tests.support.mlflow_server import MlflowServer
from tests.support.s3 import remote_objects, s3_server, variables
from tests.support.tracked_runs import TrackedRunFixture, census, mlflow_of, small_export

pytestmark = pytest.mark.engine
CLOSE_S = 180.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlflowServer]:
    found = MlflowServer(tmp_path / "server")
    try:
        found.start()
        yield found
    finally:
        found.stop()


def client_of(server: MlflowServer) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=server.url)


def champion_files(name: str) -> str:
    """Download what the alias names, as anyone would."""
    import mlflow

    return str(mlflow.artifacts.download_artifacts(f"models:/{name}@champion"))


def await_retry(records: Records, more_than: int) -> None:
    """Wait until the writer has met the outage."""
    for attempt in Retrying(
        retry=retry_if_exception_type(ConnectionError), stop=stop_after_delay(60.0), wait=wait_fixed(0.05)
    ):
        with attempt:
            if mlflow_of(records.report()).retries <= more_than:
                raise ConnectionError("not yet")


def test_records_of_an_outage_arrive_later_in_order_and_once(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = TrackedRunFixture(tmp_path / "home", "outage", steps=6)
    run.export = small_export
    records = run.records(first_pause_s=0.05)
    run.tell_base()
    run.tell_evaluation(0, 0.25)
    for step in (0, 1):
        run.tell_step(step)
    assert records.flush(CLOSE_S).complete
    run.tell_step(2)  # the server goes away while this is on its way, or just after it
    server.stop()
    for step in (3, 4):
        run.tell_step(step)
    run.tell_evaluation(4, 0.5)
    page = tmp_path / "report.html"
    page.write_text("<html></html>")
    records.attach(page)
    await_retry(records, 2)
    assert mlflow_of(records.report()).pending > 0
    server.start()
    run.tell_step(5)
    report = mlflow_of(records.close(CLOSE_S))
    assert (report.failed, report.pending) == (0, 0), report

    client, run_id = client_of(server), run.mlflow_run_id()
    found = census(client, run_id)
    assert found["points"]["learning/loss"] == [(step, 1.0 / (step + 1)) for step in range(6)]
    assert [step for step, _ in found["points"]["wall_s"]] == list(range(7))
    assert found["points"]["heldout/pass_at_1"] == [(0, 0.25), (4, 0.5)]
    assert found["datasets"] == 6 and found["outputs"] == 7 and found["runs"] == 1 + 3
    assert [name for name, *_ in found["children"]] == ["evaluate v0", "evaluate v2", "evaluate v4"]
    assert [spans for _, spans, _ in found["traces"]] == [1] * 6
    clocks = [point.timestamp for point in client.get_metric_history(run_id, "learning/loss")]
    lines = [line["timings"]["at"] for line in read_steps(run.run_dir)]
    assert clocks == [int(at * 1000) for at in lines]  # when it happened, not when it was written
    assert [file.path for file in client.list_artifacts(run_id)] == ["report.html"]
    champion = client.get_model_version_by_alias("outage", "champion")
    assert champion.tags["antiphon.version"] == "4"
    folder = Path(champion_files("outage"))
    assert (folder / "model.safetensors").read_bytes() == b"w4" and (folder / "MLmodel").is_file()
    assert not list((run.run_dir / "exports").iterdir())


@pytest.mark.skipif(importlib.util.find_spec("flask_wtf") is None, reason="needs mlflow[auth]")
def test_a_server_with_passwords_takes_them_from_the_environment_and_keeps_artifacts_in_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path / "s3") as bucket:
        _check_team_server(tmp_path, monkeypatch, bucket)


def _check_team_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: S3Server) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "auth.ini").write_text(
        "[mlflow]\ndefault_permission = READ\n"
        f"database_uri = sqlite:///{folder / 'auth.db'}\n"
        "admin_username = admin\nadmin_password = a long password\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    environment = {"MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"), "MLFLOW_FLASK_SERVER_SECRET_KEY": "k"}
    words = ("--app-name", "basic-auth", "--artifacts-destination", f"s3://{bucket.bucket}/mlflow")
    server = MlflowServer(folder, words, environment | variables(bucket))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another password")
    try:
        server.start()
        run = TrackedRunFixture(tmp_path / "home", "guarded", steps=1)
        records = run.records()
        run.tell_all()
        refused = mlflow_of(records.close(CLOSE_S))
        assert refused.failed == 1 and refused.pending == 0
        assert "MLFLOW_TRACKING_PASSWORD" in refused.failures[0]

        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a long password")
        records = run.records()
        page = tmp_path / "report.html"
        page.write_text("<html></html>")
        records.attach(page)
        report = mlflow_of(records.close(CLOSE_S))
        assert (report.failed, report.pending) == (0, 0), report
        assert census(client_of(server), run.mlflow_run_id())["points"]["learning/loss"] == [(0, 1.0)]
        kept = remote_objects(bucket, "mlflow/")
        assert any(key.endswith(f"{run.mlflow_run_id()}/artifacts/report.html") for key in kept), kept
    finally:
        server.stop()
