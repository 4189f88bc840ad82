"""The page of a flow run: what it says, what it costs to say it, and what is said after a bad end."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from antiphon.core.config import RunConfig
from antiphon.core.records import StepCommit
from antiphon.core.reporting.figures import RunFigures
from antiphon.core.status import EvaluationRecord, RunStatus, WorkerRecord, WorkerState
from antiphon.flows.hooks import end_services, find_run_of, how_to_continue, remember_flow_run
from antiphon.flows.run_page import TABLE_VERSIONS, artifact_key, links, page_content, stage_seconds
from antiphon.runs.context import StageSpan


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
    content = page_content(RunConfig(), status(160), commits(160), spans, {"folder": "`a|b`"}, figures)
    assert content.percent == 80.0
    assert len(content.versions) == TABLE_VERSIONS and content.versions[0]["version"] == 160
    assert {row["held-out pass@1"] for row in content.versions} == {"–", "50.0%"}
    assert content.versions[0]["loss"] == 0.1235
    assert "| staleness bound | 2 versions, elastic mode |" in content.plan
    assert "| step | 0.50 s |" in content.plan and "| folder | `a/b` |" in content.plan
    assert "| workers | worker-0 (active) |" in content.plan
    assert "| waiting for | worker-0 |" in content.plan
    assert "| time | 320.0 s |" in content.plan and "| learner idle | 25.0% |" in content.plan
    assert json.loads(json.dumps(content.versions)) == content.versions


def test_a_run_that_has_nothing_yet_has_a_page() -> None:
    content = page_content(RunConfig(), status(0), [], [], {}, RunFigures())
    assert content.percent == 0.0 and content.versions == [] and "demo-s0-ab-1" in content.plan


def test_stage_seconds_are_those_of_the_newest_steps() -> None:
    spans = [StageSpan("collect", n, 0.0, 9.0 if n < 50 else 1.0) for n in range(100)]
    assert stage_seconds(spans) == {"collect": 1.0}


def test_links_name_what_is_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    assert list(links(run_dir, tmp_path)) == ["folder"]
    (run_dir / "report.html").write_text("x")
    (run_dir / "mlflow.json").write_text(
        json.dumps({"tracking_uri": "sqlite:///x.db", "run_id": "0123456789"})
    )
    found = links(run_dir, tmp_path)
    assert found["report"].startswith("[report.html](file://") and "antiphon up" in found["MLflow"]
    (tmp_path / "up.json").write_text(json.dumps({"mlflow": {"url": "http://127.0.0.1:5000"}}))
    assert links(run_dir, tmp_path)["MLflow"] == "[run 01234567](http://127.0.0.1:5000/#/runs/0123456789)"


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
