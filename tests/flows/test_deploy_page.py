"""The page of a flow run: what it says, what it costs to say it, and what is said after a bad end."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from uuid import UUID

import pytest
import structlog
from prefect.states import Cancelled, Crashed

from antiphon.core.config import RunConfig, build_config
from antiphon.core.records import StepCommit
from antiphon.core.reporting.figures import RunFigures
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.core.reporting.run_view import EvaluationFacts, RunView, StepFacts
from antiphon.core.status import EvaluationRecord, RunStatus, WorkerRecord, WorkerState
from antiphon.flows import post_train
from antiphon.flows.post_train import find_run_of, note_how_to_continue, remember_flow_run
from antiphon.flows.run_page import TABLE_VERSIONS, artifact_key, links, plan_of, stage_seconds, versions_of
from antiphon.flows.told import ToldView, hear_logs
from antiphon.runs.live_run import LiveRun
from antiphon.runs.outcome import StageSpan


def status(committed: int) -> RunStatus:
    return RunStatus(
        run_id="demo-s0-ab-1",
        steps_total=200,
        committed_steps=committed,
        opened_steps=committed,
        sealed_steps=committed,
        newest_version=committed,
        groups_open=0,
        groups_leased=0,
        groups_to_reward=0,
        groups_ready=0,
        groups_dropped_stale=3,
        groups_filtered=0,
        groups_requeued=0,
        workers=(WorkerRecord("worker-0", WorkerState.ACTIVE, committed, 2, 900, 0.5, 0.1),),
        evaluations=(evaluation(150),),
        waiting="worker-0",
    )


def evaluation(version: int) -> EvaluationRecord:
    return EvaluationRecord(
        version=version, prompts=8, rewarded=8, reward_mean=0.5, completion_tokens_mean=9.0
    )


def commits(count: int) -> list[StepCommit]:
    metrics = {"reward_mean": 0.25, "loss": 0.123456, "staleness_max": 2.0, "completion_tokens": 900.0}
    return [
        StepCommit(step, step + 1, f"{step:064x}"[::-1], f"{step:064d}", dict(metrics))
        for step in range(count)
    ]


def run_of(config: RunConfig, folder: Path, view: RunView | None = None, **facts: Any) -> LiveRun:
    run_dir = folder / "runs" / "demo-s0-ab-1"
    known = {"status": None, "spans": [], "view": view or RunView(), **facts}
    return cast(
        "LiveRun", SimpleNamespace(run_id=run_dir.name, run_dir=run_dir, home=folder, config=config, **known)
    )


def test_the_page_shows_the_newest_versions_and_the_plan(tmp_path: Path) -> None:
    spans = [StageSpan("step", n, float(n), n + 0.5) for n in range(100)]
    figures = RunFigures(steps=160, wall_s=320.0, learner_idle_share=0.25)
    config = build_config({"run": {"steps": 200}, "loop": {"max_staleness": 4}})
    view = RunView()
    view.steps = [StepFacts(commit) for commit in commits(160)]
    view.evaluations = [EvaluationFacts(150, 9.0, 0.5, 9.0, 8)]
    run, told = (
        run_of(config, tmp_path / "a|b", view, status=status(160), spans=spans),
        ToldView(RunDisplay()),
    )
    told.alarms.append("alarm stall: slow")
    rows, plan = versions_of(view), plan_of(run, figures, told)
    assert len(rows) == TABLE_VERSIONS and rows[0]["version"] == 160
    assert {row["held-out pass@1"] for row in rows} == {"–", "50.0%"}
    assert rows[0]["loss"] == 0.1235
    assert "| staleness bound | 4 versions, elastic mode |" in plan
    assert "| loop.max_staleness | 4 |" in plan and "| differs from " in plan
    assert "- **alarm stall: slow**" in plan
    assert "| step | 0.50 s |" in plan and "| folder | `" in plan and "/a/b/runs/" in plan
    assert "| workers | worker-0 (active) |" in plan
    assert "| waiting for | worker-0 |" in plan
    assert "| time | 320.0 s |" in plan and "| learner idle | 25.0% |" in plan
    assert json.loads(json.dumps(rows)) == rows
    run.status = replace(status(160), order="alternating; measured: 2.00 s a step")
    assert "| lease order | alternating; measured: 2.00 s a step |" in plan_of(run, figures, told)


def test_a_run_has_a_page_before_its_services_are_up_and_after_its_end(tmp_path: Path) -> None:
    run, told = run_of(RunConfig(), tmp_path), ToldView(RunDisplay())
    assert versions_of(run.view) == []
    before = plan_of(run, RunFigures(), told)
    assert "# demo-s0-ab-1" in before and "the services are starting" in before
    assert "| policy | examples/models/chain-sum |" in before
    run.status = status(60)
    told.finished(["60 steps in 9 s", "weights 12ab", "report: r.html"])
    after = plan_of(run, RunFigures(), told)
    assert "- 60 steps in 9 s\n- weights 12ab\n\n" in after
    assert "waiting for" not in after


def test_what_a_run_says_is_kept_for_its_page_and_shown_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Shown(RunDisplay):
        said: ClassVar[list[str]] = []

        def message(self, text: str) -> None:
            self.said.append(text)

    told = ToldView(Shown())
    try:
        with hear_logs(told):
            told.message("learner: restoring")
            told.message("alarm stall: nothing moves; look")
            structlog.get_logger().warning("record.delayed", why="full")
            structlog.get_logger().info("nothing.special")
        structlog.get_logger().warning("facts.the.run")
    finally:
        structlog.reset_defaults()
    assert "record.delayed" in capsys.readouterr().err
    told.finished(["3 steps in 1 s"])
    assert Shown.said == ["learner: restoring", "alarm stall: nothing moves; look"]
    assert list(told.alarms) == ["alarm stall: nothing moves; look"] and told.outcome == ["3 steps in 1 s"]
    assert [(logging.getLevelName(line["level"]), line["message"]) for line in told.lines] == [
        ("INFO", "learner: restoring"),
        ("WARNING", "alarm stall: nothing moves; look"),
        ("WARNING", "record.delayed why=full"),
        ("INFO", "3 steps in 1 s"),
    ]


def test_stage_seconds_are_those_of_the_newest_steps() -> None:
    spans = [StageSpan("collect", n, 0.0, 9.0 if n < 50 else 1.0) for n in range(100)]
    assert stage_seconds(spans) == {"collect": 1.0}


def test_links_name_what_is_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    assert list(links(run_dir, tmp_path)) == ["folder"]
    (run_dir / "report.html").write_text("x")
    known = {"tracking_uri": "sqlite:///x.db", "experiment_id": "3", "run_id": "0123456789"}
    (run_dir / "mlflow.json").write_text(json.dumps(known))
    found = links(run_dir, tmp_path)
    assert found["report"] == f"`{run_dir / 'report.html'}`" and "antiphon up" in found["MLflow"]
    (tmp_path / "up.json").write_text(json.dumps({"mlflow": {"url": "http://127.0.0.1:5000"}}))
    assert "/runs/0123456789/artifacts/report.html?" in links(run_dir, tmp_path)["report"]
    shown = links(run_dir, tmp_path)["MLflow"]
    assert "http://127.0.0.1:5000/#/experiments/3/runs/0123456789?workflowType=machine_learning" in shown
    assert "http://127.0.0.1:5000/#/experiments/3/runs?workflowType=machine_learning&viewState" in shown


@pytest.mark.parametrize("run_id", ["demo-s0-ab-1", "a.b_c-s1-ff-2"])
def test_keys_are_such_as_prefect_takes(run_id: str) -> None:
    key = artifact_key("versions", run_id)
    assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and key.startswith("versions-")


def test_a_flow_run_finds_the_run_it_lived(tmp_path: Path) -> None:
    for name, flow_run in (("a", "one"), ("b", "two")):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text("{}")
        remember_flow_run(directory, flow_run)
    assert find_run_of(tmp_path, "one") == tmp_path / "runs" / "a"
    assert find_run_of(tmp_path, "three") is None
    remember_flow_run(tmp_path / "runs" / "a", "three")  # gone on with by another flow run
    assert find_run_of(tmp_path, "one") is None


@pytest.mark.parametrize("how", ["cancelled", "crashed"])
def test_the_note_says_how_to_continue(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        notes: ClassVar[list[str]] = []

        def __enter__(self) -> "Server":
            return self

        def __exit__(self, *_: object) -> None:
            """Close nothing."""

        def create_artifact(self, note: Any) -> None:
            self.notes.append(note.data)

    monkeypatch.setattr(post_train, "get_client", lambda sync_client: Server())
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    run_dir = tmp_path / "runs" / "r-1"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("{}")
    flow_run = SimpleNamespace(id=UUID(int=1))
    remember_flow_run(run_dir, str(flow_run.id))
    note_how_to_continue(flow=None, flow_run=flow_run, state=Crashed() if how == "crashed" else Cancelled())
    (note,) = Server.notes
    assert f"# r-1: {how}" in note and "--resume r-1" in note
    (run_dir / "outcome.json").write_text("{}")
    note_how_to_continue(flow=None, flow_run=flow_run, state=Crashed())
    assert Server.notes == [note]
