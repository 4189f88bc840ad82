"""Killed or interrupted: a run goes on or ends in order; nothing is left or trained twice."""

import json
import os
import re
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.core.reporting.figures import RunFigures
from antiphon.lineage.run_overview import read_figures
from tests.support.figure_views import check_views
from tests.support.main_job import (
    SMALL,
    Job,
    all_gone,
    check_batches,
    command,
    flow_run_states,
    make_home,
    typed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(600)]

STALENESS = 2
STEPS = 22
"""Enough that nothing below comes after the end: what takes long has the learner stopped."""


def test_interrupted_killed_and_finished_by_the_same_command_though_every_service_dies(
    tmp_path: Path,
) -> None:
    home = make_home(tmp_path)
    overrides = [
        f"run.steps={STEPS}",
        f"loop.max_staleness={STALENESS}",
        "learner.checkpoint_interval=3",
        "coordinator.heartbeat_s=0.5",
        "record.dvc=false",
        *SMALL,
    ]

    job = Job(home, overrides)
    try:  # while engines start, which do not listen
        job.when(lambda: "services are starting: coordinator, learner, reward and workers" in job.said)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.everything()
        words = " ".join(job.said.split())
        assert "stopping coordinator, worker-0, learner, reward (" in words
        assert "worker-0 is starting its engine" in words and "); Ctrl-C again ends it at once" in words
        assert job.complaints() == ["antiphon: interrupted; the same command continues where it stopped"]
        assert "Traceback" not in job.said and "service.killed" not in job.said, job.said
        assert all_gone(home)
    finally:
        job.close()
    assert job.journal.committed == 0

    job = Job(home, overrides)
    try:
        job.reach(2)
        with job.stopped("learner"):
            living = command(home, "status")
        assert living.returncode == 0 and re.search(r"^\d+ steps in [\d.,]+ s, ", living.stdout, re.MULTILINE)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.everything()
        assert job.complaints() == ["antiphon: interrupted; the same command continues where it stopped"]
        assert "Traceback" not in job.said, job.said
        assert all_gone(home)
    finally:
        job.close()
    kept = job.journal.events("step.committed")
    assert 2 <= len(kept) < STEPS
    resting = typed(home, "status")
    assert resting.returncode == 1 and "not running and not finished" in resting.stderr
    for line in read_figures(job.run_dir).lines():
        assert line in resting.stdout

    job = Job(home, overrides)
    try:
        job.reach(len(kept) + 2)
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert all_gone(home)
    finally:
        job.close()
    assert "continuing run" in job.said
    assert job.journal.events("step.committed")[: len(kept)] == kept
    kept = job.journal.events("step.committed")
    assert len(kept) < STEPS

    job = Job(home, overrides)
    try:  # each service is killed once, at different moments
        for place, name in enumerate(("reward", "worker-0", "coordinator", "learner")):
            job.reach(len(kept) + 1 + 2 * place)
            job.kill_service(name)
        assert job.wait() == 0, job.everything()
        assert all_gone(home)
    finally:
        job.close()
    outcome = json.loads((job.run_dir / "outcome.json").read_text())
    assert outcome["restarts"] == {"coordinator": 1, "learner": 1, "reward": 1, "worker-0": 1}
    assert flow_run_states(job)[-1] == "COMPLETED"
    figures = check_views(job, tmp_path)
    assert figures.steps == STEPS and figures.breaks == 3
    assert_the_seconds_add_up(job, figures)
    commits = job.journal.events("step.committed")
    assert commits[: len(kept)] == kept and outcome["weights_digest"] == commits[-1]["weights_digest"]
    for kind in ("batch.sealed", "step.committed"):
        assert [event["step"] for event in job.journal.events(kind)] == list(range(STEPS))
    check_batches(job.batches(), STALENESS)
    # The groups of a lost worker were offered again: its successor has another id.
    workers = [event["worker_id"] for event in job.journal.events("worker.registered")]
    assert workers[0] == "worker-0-1" and len(set(workers)) == len(workers) >= 4, workers


def assert_the_seconds_add_up(job: Job, figures: RunFigures) -> None:
    """Work, start-ups and breaks are all of the time from the run's opening to its last commit."""
    with closing(sqlite3.connect(f"file:{job.run_dir / 'journal.db'}?mode=ro", uri=True)) as connection:
        query = "SELECT at FROM events WHERE kind IN ('run.opened', 'step.committed') ORDER BY seq"
        first, *_, last = (at for (at,) in connection.execute(query))
    told = figures.wall_s + figures.startup_s + figures.break_s
    assert told == pytest.approx(last - first, abs=2.0), (told, last - first)
