"""One run of ours in the real MLflow: all of it there, once, readable, and comparable."""

import base64
import http.server
import json
import logging
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.config import load_config
from antiphon.core.metrics import BATCH_METRICS, LEARNER_METRICS
from antiphon.lineage.documents.manifest import code_revision, source_tree
from antiphon.lineage.records import Records
from antiphon.lineage.tracking import tracked_run
from antiphon.lineage.tracking.charts import chart_name
from antiphon.lineage.tracking.description import nearest_example, note
from tests.support.tracked_runs import TrackedRunFixture, census, mlflow_of

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[3]
CLOSE_S = 120.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all tests: its first migration takes seconds; each has its own experiment."""
    return tmp_path_factory.mktemp("tracked") / ".antiphon"


@pytest.fixture(scope="module")
def client(home: Path) -> Any:
    from mlflow.tracking import MlflowClient

    (home / "mlflow").mkdir(parents=True)
    return MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow/mlflow.db")


def end(records: Records) -> None:
    report = mlflow_of(records.close(CLOSE_S))
    assert (report.failed, report.pending) == (0, 0), report


@pytest.fixture(scope="module")
def whole(home: Path, client: Any, tmp_path_factory: pytest.TempPathFactory) -> TrackedRunFixture:
    """A whole run, told once, with its report."""
    run = TrackedRunFixture(home, "whole")
    records = run.records()
    run.tell_all()
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text("<html></html>")
    records.attach(page, {"learning.svg": '<svg viewBox="0 0 1 1"></svg>'})
    end(records)
    return run


def test_a_run_says_all_that_a_comparison_asks(whole: TrackedRunFixture, client: Any) -> None:
    run = whole
    found = client.get_run(run.mlflow_run_id())
    assert found.info.status == "FINISHED" and found.data.params["rollout.workers"] == "1"
    counted = census(client, found.info.run_id)
    points = counted["points"]
    # Whatever stands on the y axis has these at the same step, so each can be the x axis.
    for name in ("tokens_total", "wall_s", "cost_dollars"):
        steps = [step for step, _ in points[name]]
        assert steps == [0, 1, 2, 3, 4]
        assert {step for step, _ in points["heldout/pass_at_1"]} <= set(steps)
        assert {step for step, _ in points["learning/loss"]} <= set(steps)
    for name in ("tokens_total", "tokens_trained_total"):
        assert points[name] == [(version, 24.0 * version) for version in range(5)]
    assert points["wall_s"] == [(version, 1.5 * version) for version in range(5)]
    # Two workers at a dollar a second each.
    assert points["cost_dollars"][-1][1] == pytest.approx(2 * points["wall_s"][-1][1])
    assert points["heldout/pass_at_1"] == [(0, 0.25), (2, 0.75), (4, 0.5)]
    summary = found.data.metrics
    assert summary["summary/steps_to_reward_0.75"] == 2 and "summary/steps_to_reward_0.9" not in summary
    assert summary["summary/workers_seen"] == 2 and summary["summary/worker_share.worker-0"] == 0.5

    assert [name for name, *_ in counted["children"]] == ["evaluate v0", "evaluate v2", "evaluate v4"]
    assert {status for _, status, _ in counted["children"]} == {"FINISHED"}
    assert counted["models"] == [f"policy-v{version}" for version in range(5)]
    models = {m.name: m for m in client.search_logged_models([found.info.experiment_id])}
    assert models["policy-v3"].params["parent_digest"] == models["policy-v2"].params["weights_digest"]
    assert {metric.key for metric in models["policy-v3"].metrics} >= {
        "learning/loss",
        "learning/reward_mean",
        "rollout/staleness_mean",
        "cost_dollars",
    }
    assert "heldout/pass_at_1" in {metric.key for metric in models["policy-v4"].metrics}
    files = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert files == {"report.html", "plots"}
    assert [file.path for file in client.list_artifacts(found.info.run_id, "plots")] == ["plots/learning.svg"]


def test_a_run_says_what_it_is(whole: TrackedRunFixture, client: Any) -> None:
    found = client.get_run(whole.mlflow_run_id())
    experiment, tags = found.info.experiment_id, found.data.tags
    assert tags["antiphon.run_id"] == "tracked-1"
    assert found.info.run_name == "steps=4, interval=2 · tracked-1"
    assert (tags["antiphon.base"], tags["mlflow.source.name"]) == ("defaults", "antiphon run")
    assert nearest_example(load_config(ROOT / "examples" / "quickstart.yaml")) == (
        "examples/quickstart.yaml",
        {},
    )
    assert "run.steps=4" in tags["antiphon.differs"] and "run.name" not in tags["antiphon.differs"]
    revision = code_revision(source_tree())
    assert tags.get("mlflow.source.git.commit") == revision.get("revision")
    text = tags["mlflow.note.content"]
    assert f"(#/experiments/{experiment}/runs/{found.info.run_id}/artifacts/report.html?workflow" in text
    assert "`run.steps=4`" in text and "./antiphon lineage whole-tracked-1 v4 " in text
    assert "Prefect" not in text  # no flow run lived it
    (whole.run_dir / "prefect.json").write_text('{"flow_run_id": "f-1"}')
    text = note(whole.config, whole.run_dir, whole.home, experiment, found.info.run_id)
    assert "[its stages in Prefect](http://127.0.0.1:4200/runs/flow-run/f-1)" in text


def test_the_experiment_opens_on_charts_of_metrics_that_are_there(
    whole: TrackedRunFixture, client: Any
) -> None:
    run = client.get_run(whole.mlflow_run_id())
    view = json.loads(client.get_experiment(run.info.experiment_id).tags["mlflow.sharedViewState.antiphon"])
    packed = view["state"].removeprefix("deflate;")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    sections = [section["uuid"] for section in state["compareRunSections"]]
    cards = state["compareRunCharts"]
    assert {card["metricSectionId"] for card in cards} <= set(sections)
    assert sections[:2] == ["Held-out reward", "Learning"]
    drawn = {card["metricKey"] for card in cards if card["type"] == "LINE"}
    axes = {card["selectedXAxisMetricKey"] for card in cards if card["type"] == "LINE"} - {""}
    assert axes == {"wall_s", "tokens_total", "cost_dollars"} <= set(run.data.metrics)
    every = {chart_name(metric.name) for metric in (*LEARNER_METRICS, *BATCH_METRICS)}
    assert drawn <= every | {"heldout/pass_at_1"}


def test_no_metric_is_drawn_twice(whole: TrackedRunFixture, client: Any) -> None:
    names = [name for name in client.get_run(whole.mlflow_run_id()).data.metrics if "summary/" not in name]
    assert not [name for name in names if name.startswith("batch/")]
    leaves = [name.rpartition("/")[2] for name in names]
    assert len(set(leaves)) == len(leaves)


def test_trajectories_are_shown_under_the_evaluation_of_their_version(
    whole: TrackedRunFixture, client: Any
) -> None:
    run_id = whole.mlflow_run_id()
    experiment = client.get_run(run_id).info.experiment_id
    (child,) = client.search_runs([experiment], "tags.`antiphon.version` = '2'")
    traces = client.search_traces(locations=[experiment], run_id=child.info.run_id)
    shown = {trace.info.tags["antiphon.reward"]: trace for trace in traces}
    assert set(shown) == {"0", "0.875"}  # the worst and the best of the batch
    best = shown["0.875"]
    assert best.info.request_preview == "w1 w2" and best.info.response_preview == "w27 w27 w27"
    (span,) = best.data.spans
    assert span.inputs == {"prompt": "w1 w2"} and span.outputs == {"completion": "w27 w27 w27"}
    assert span.get_attribute("version") == 2 and span.get_attribute("worker") == "worker-1"
    assert [(a.name, a.value) for a in best.info.assessments] == [("reward", 0.875)]


def test_a_run_that_is_told_again_is_there_once(whole: TrackedRunFixture, client: Any) -> None:
    run = whole
    run_id = run.mlflow_run_id()
    before = census(client, run_id)
    assert before["runs"] == 4 and before["outputs"] == 5 and len(before["traces"]) == 4
    run.forget()
    records = run.records()
    end(records)
    assert run.mlflow_run_id() == run_id
    assert census(client, run_id) == before
    assert len(client.search_model_versions("name = 'whole'")) == 2


def test_a_lost_mapping_between_creation_and_answer_finds_the_same_run(home: Path, client: Any) -> None:
    """The process may die after MLflow made the run and before it could write down which one."""
    run = TrackedRunFixture(home, "mapping")
    records = run.records()
    run.tell_base()
    end(records)
    run_id = run.mlflow_run_id()
    (run.run_dir / "mlflow.json").unlink()
    records = run.records()
    run.tell_step(0)
    end(records)
    assert run.mlflow_run_id() == run_id
    assert census(client, run_id)["points"]["learning/loss"] == [(0, 1.0)]


class LostReplies:
    """MLflow's client, whose calls arrive but whose first answers of each kind get lost."""

    def __init__(self, client: Any, lost: set[str]) -> None:
        self._client, self.lost = client, lost

    def __getattr__(self, name: str) -> Any:
        from mlflow.exceptions import MlflowException

        call = getattr(self._client, name)

        def answer(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if name not in self.lost:
                self.lost.add(name)
                raise MlflowException("API request failed: connection aborted")
            return result

        return answer


def test_nothing_is_doubled_where_an_answer_got_lost(
    home: Path, whole: TrackedRunFixture, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: set[str] = set()
    real = tracked_run.client_at
    monkeypatch.setattr(tracked_run, "client_at", lambda uri: LostReplies(real(uri), lost))
    run = TrackedRunFixture(home, "lost")
    records = run.records(first_pause_s=0.001)
    run.tell_all()
    end(records)
    assert mlflow_of(records.report()).retries >= 8
    assert lost >= {"create_run", "log_batch", "log_outputs", "create_logged_model", "create_model_version"}
    expected, found = census(client, whole.mlflow_run_id()), census(client, run.mlflow_run_id())
    for name in ("wall_s", "cost_dollars"):  # clocks differ between two runs, their number does not
        assert len(expected["points"].pop(name)) == len(found["points"].pop(name))
    assert found == expected
    assert len(client.search_model_versions("name = 'lost'")) == 2


def test_the_champion_moves_only_to_what_scored_higher(home: Path, client: Any) -> None:
    first = TrackedRunFixture(home, "crown", "first")
    records = first.records()
    first.tell_base()
    for step, reward in enumerate((0.75, 0.5)):
        first.tell_step(step)
        first.tell_evaluation(step + 1, reward)
    end(records)
    crowned = client.get_model_version_by_alias("crown", "champion")
    assert crowned.tags["antiphon.version"] == "1" and crowned.run_id == first.mlflow_run_id()
    assert crowned.tags["antiphon.weights_digest"] == f"{1:064x}"

    second = TrackedRunFixture(home, "crown", "second")
    records = second.records()
    second.tell_base()
    second.tell_evaluation(0, 0.74)
    assert records.flush(CLOSE_S).complete
    assert client.get_model_version_by_alias("crown", "champion").version == crowned.version
    second.tell_step(0)
    second.tell_evaluation(1, 0.875)
    end(records)
    best = client.get_model_version_by_alias("crown", "champion")
    assert (best.tags["antiphon.version"], best.run_id) == ("1", second.mlflow_run_id())
    assert len(client.search_model_versions("name = 'crown'")) == 2


def only_failure(records: Records) -> str:
    """Close records whose MLflow refuses and return the one sentence that was said about it."""
    report = mlflow_of(records.close(CLOSE_S))
    assert (report.failed, report.pending) == (1, 0), report
    (failure,) = report.failures
    assert failure.count("\n") == 0 and failure.endswith("the run continues without MLflow")
    return failure


def test_an_experiment_that_was_deleted_is_named_once(home: Path, client: Any) -> None:
    run = TrackedRunFixture(home, "deleted")
    records = run.records()
    run.tell_base()
    run.tell_step(0)
    assert records.flush(CLOSE_S).complete
    experiment = client.get_run(run.mlflow_run_id()).info.experiment_id
    client.delete_experiment(experiment)
    for step in (1, 2):
        run.tell_step(step)
    said = only_failure(records)
    assert f"mlflow experiments restore -x {experiment}" in said and "'deleted'" in said

    other = TrackedRunFixture(home, "deleted", "other")  # a new run of the same name
    records = other.records()
    other.tell_all()
    assert "'deleted'" in only_failure(records)

    client.restore_experiment(experiment)
    records = run.records()
    end(records)
    assert [step for step, _ in census(client, run.mlflow_run_id())["points"]["learning/loss"]] == [0, 1, 2]


def test_a_run_that_was_deleted_is_named_once(home: Path, client: Any) -> None:
    run = TrackedRunFixture(home, "gone")
    records = run.records()
    run.tell_base()
    assert records.flush(CLOSE_S).complete
    client.delete_run(run.mlflow_run_id())
    run.tell_step(0)
    said = only_failure(records)
    assert f"mlflow runs restore --run-id {run.mlflow_run_id()}" in said


def test_an_address_without_a_meaning_is_refused_in_one_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "htp://somewhere")
    run = TrackedRunFixture(home, "nowhere")
    records = run.records()
    run.tell_all()
    assert "htp://somewhere" in only_failure(records)


class Stranger(http.server.BaseHTTPRequestHandler):
    """A server that is no MLflow, or one that knows no such user."""

    status = 404

    def do_GET(self) -> None:
        body = b"not here"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        logging.getLogger("stranger").debug(format, *args)


@pytest.fixture
def stranger() -> Iterator[type[Stranger]]:
    handler = type("Handler", (Stranger,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        handler.address = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        yield handler
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    ("status", "words"),
    [(404, "refused"), (401, "MLFLOW_TRACKING_PASSWORD"), (403, "MLFLOW_TRACKING_PASSWORD")],
)
def test_a_server_that_will_never_answer_is_left_alone(
    home: Path, stranger: Any, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger.status = status
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stranger.address)
    run = TrackedRunFixture(home, f"stranger-{status}")
    records = run.records()
    run.tell_all()
    said = only_failure(records)
    assert words in said and stranger.address in said
