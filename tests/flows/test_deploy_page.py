"""The page of a flow run: what it says, what it costs to say it, and what is said after a bad end."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import structlog

from antiphon.core.config import RunConfig, build_config
from antiphon.core.records import StepCommit
from antiphon.core.reporting.figures import RunFigures
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.core.reporting.run_view import EvaluationFacts, RunView, StepFacts
from antiphon.core.status import EvaluationRecord, RunStatus, WorkerRecord, WorkerState
from antiphon.flows.prefect_resilience import end_services, find_run_of, how_to_continue, remember_flow_run
from antiphon.flows.run_page import (
    TABLE_VERSIONS,
    PageFacts,
    artifact_key,
    links,
    stage_seconds,
)
from antiphon.flows.told import ToldView, hear_logs
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


def test_the_page_shows_progress_the_newest_versions_and_the_plan() -> None:
    spans = [StageSpan("step", n, float(n), n + 0.5) for n in range(100)]
    figures = RunFigures(steps=160, wall_s=320.0, learner_idle_share=0.25)
    config = build_config({"run": {"steps": 200}, "loop": {"max_staleness": 4}})
    where = {"folder": "`a|b`"}
    alarms = ["alarm stall: slow"]
    view = RunView()
    view.steps = [StepFacts(commit) for commit in commits(160)]
    view.evaluations = [EvaluationFacts(150, 9.0, 0.5, 9.0, 8)]
    facts = PageFacts("demo-s0-ab-1", config, status(160), view, spans, where, alarms, figures)
    assert facts.percent == 80.0
    assert len(facts.versions()) == TABLE_VERSIONS and facts.versions()[0]["version"] == 160
    assert {row["held-out pass@1"] for row in facts.versions()} == {"–", "50.0%"}
    assert facts.versions()[0]["loss"] == 0.1235
    assert "| staleness bound | 4 versions, elastic mode |" in facts.plan()
    assert "| loop.max_staleness | 4 |" in facts.plan() and "| differs from " in facts.plan()
    assert "- **alarm stall: slow**" in facts.plan()
    assert "| step | 0.50 s |" in facts.plan() and "| folder | `a/b` |" in facts.plan()
    assert "| workers | worker-0 (active) |" in facts.plan()
    assert "| waiting for | worker-0 |" in facts.plan()
    assert "| time | 320.0 s |" in facts.plan() and "| learner idle | 25.0% |" in facts.plan()
    assert json.loads(json.dumps(facts.versions())) == facts.versions()
    ordered = replace(facts, status=replace(status(160), order="alternating; measured: 2.00 s a step"))
    assert "| lease order | alternating; measured: 2.00 s a step |" in ordered.plan()


def test_a_run_has_a_page_before_its_services_are_up_and_after_its_end() -> None:
    before = PageFacts("demo-s0-ab-1", RunConfig())
    assert before.percent == 0.0 and before.versions() == [] and "# demo-s0-ab-1" in before.plan()
    assert (
        "the services are starting" in before.plan()
        and "| policy | examples/models/chain-sum |" in before.plan()
    )
    view = RunView()
    view.steps = [StepFacts(commit) for commit in commits(60)]
    facts = PageFacts("r", RunConfig(), status(60), view, outcome=["60 steps in 9 s", "report: r.html"])
    assert facts.percent == 100.0 and "- 60 steps in 9 s\n- report: r.html" in facts.plan()
    assert "waiting for" not in facts.plan()


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
    lines = told.take(10)
    assert [(logging.getLevelName(line.level), line.text) for line in lines] == [
        ("INFO", "learner: restoring"),
        ("WARNING", "alarm stall: nothing moves; look"),
        ("WARNING", "record.delayed why=full"),
        ("INFO", "3 steps in 1 s"),
    ]
    told.drop(lines[:3])
    told.say("later")
    assert [line.text for line in told.take(10)] == ["3 steps in 1 s", "later"]


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


def test_services_left_behind_are_ended_and_strangers_are_not(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "left-s0-ab-1"
    (run_dir / "services").mkdir(parents=True)
    program = [sys.executable, "-c", "import time; time.sleep(300)"]
    with subprocess.Popen([*program, run_dir.name]) as ours, subprocess.Popen(program) as stranger:
        for name, pid in (("learner", ours.pid), ("reward", stranger.pid), ("gone", 2**22 - 3)):
            (run_dir / "services" / f"{name}.json").write_text(json.dumps({"pid": pid, "port": 0}))
        try:
            assert end_services(run_dir) == [ours.pid]
            assert not psutil.pid_exists(ours.pid) and stranger.poll() is None
        finally:
            stranger.kill()


def test_the_note_says_how_to_continue(tmp_path: Path) -> None:
    note = how_to_continue(tmp_path / "runs" / "r-1", "cancelled", 0)
    assert "# r-1: cancelled" in note and "--resume r-1" in note and "No service was left" in note
    assert "2 of its services" in how_to_continue(tmp_path / "r-1", "crashed", 2)
