"""What cannot be meant is refused by `antiphon run` in one sentence, before anything is made."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.runs.servers.prefect_server import answers
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.main_job import (
    PROJECT,
    QUICKSTART,
    SMALL,
    Job,
    all_gone,
    check_batches,
    command,
    environment,
    flow_run_states,
    make_home,
    typed,
)
from tests.support.prefect_api import post
from tests.support.standing import Standing

pytestmark = pytest.mark.e2e


def said_in_one_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the sentence; there is exactly one, and no traceback around it."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("antiphon: "), done.stderr
    assert "Traceback" not in done.stdout
    return lines[0]


def test_what_the_model_cannot_read_is_refused(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    task = "environment={name: reasoning/spell_backward, heldout_size: 256}"
    done = command(home, "run", str(QUICKSTART), task)
    line = said_in_one_line(done)
    assert done.returncode == 2
    for words in ("no token for", "'S' in train-0-0: 'Spell this word", "environment.max_lost_share=0"):
        assert words in line
    assert [path.name for path in home.iterdir()] == [".dvc"]


@pytest.mark.engine
def test_a_run_without_workers_is_cancelled_or_waits_as_long_as_it_was_told(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    alone = ["rollout.workers=0", "services.empty_fleet_timeout_s=12"]  # a cancellation is heeded every 5 s
    overrides = [*SMALL, *alone, "record.mlflow=false", "record.dvc=false"]
    job = Job(home, overrides)
    try:
        job.reach(0)
        job.when(lambda: job.journal.events("snapshot.announced") and page_answers(job))
        cancel_as_the_page_does(job)
        assert job.wait() == 1, job.everything()
        (complaint,) = job.complaints()
        assert "cancelled" in complaint and "start it again to continue it" in complaint
        assert "Traceback" not in job.said, job.said
        assert all_gone(home)
    finally:
        job.close()
    assert flow_run_states(job) == ["CANCELLED"]

    job = Job(home, overrides)
    try:
        assert job.wait() == 1, job.everything()
    finally:
        job.close()
    said = " ".join(job.said.split())
    assert f"continuing run {job.run_dir.name}" in said
    assert flow_run_states(job) == ["CANCELLED", "FAILED"]
    port = json.loads((job.run_dir / "services" / "coordinator.json").read_text())["port"]
    assert f"\n  ./antiphon worker --coordinator 127.0.0.1:{port} --run {job.run_dir.name}\n" in job.said
    assert "rollout.workers=0: the run waits up to 12 s for a worker to join" in said
    (line,) = job.complaints()
    assert "no worker or host for" in line and "give the same command again" in line
    assert "alarm stall" not in said and "Traceback" not in said
    assert all_gone(home)


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = typed(home, "run", str(QUICKSTART), f"services.coordinator_port={port}")
    assert done.returncode == 2
    line = said_in_one_line(done)
    assert f"port {port} on 127.0.0.1 is taken" in line and "services.coordinator_port" in line
    assert [path.name for path in home.iterdir()] == [".dvc"]


def test_too_little_space_is_refused_and_no_run_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path)
    usage = SimpleNamespace(total=1 << 40, used=(1 << 40) - (3 << 20), free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    done = typed(home, "run", str(QUICKSTART))
    assert done.returncode == 2
    assert "only 3 MiB are free" in said_in_one_line(done)
    assert not (home / "runs").exists() and not (home / "store").exists()
    assert all_gone(home)


def test_a_worker_of_another_run_and_of_no_run_is_refused(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    with subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "antiphon.cli.app", "serve", "coordinator"),
            *("--config", str(QUICKSTART), "--run-id", "mine"),
            *("--ready-file", str(tmp_path / "ready.json")),
        ],
        cwd=PROJECT,
        env=environment(home),
        stderr=subprocess.DEVNULL,
    ) as coordinator:
        try:
            while not (tmp_path / "ready.json").exists():
                with pytest.raises(subprocess.TimeoutExpired):
                    coordinator.wait(0.1)
            address = f"127.0.0.1:{json.loads((tmp_path / 'ready.json').read_text())['port']}"
            joining = ("worker", "--coordinator", address, "--run", "yours", "--name", "w")
            done = command(home, *joining)
            assert done.returncode == 2 and "there is no run yours of yours" in said_in_one_line(done)
            keys = home / "runs" / "mine" / "keys" / "local"
            done = command(home, *joining, "--credentials", str(keys))
            refused = [line for line in done.stderr.splitlines() if line.startswith("antiphon: ")]
            assert done.returncode == 1
            assert len(refused) == 1 and "means to serve run 'yours'" in refused[0], done.stderr
            assert "serves 'mine'" in refused[0] and "Traceback" not in done.stderr
        finally:
            coordinator.terminate()
    assert coordinator.returncode == 0
    assert all_gone(home)


@pytest.mark.engine
def test_a_loss_that_is_no_number_ends_the_run_with_the_reason(standing: Standing, tmp_path: Path) -> None:
    needs_bubblewrap()
    # Fixed mode, and no step beyond the bound: every batch comes from the base model,
    # so it is the learner, and nobody else, who meets the weights that step 0 spoiled.
    # The run is that of examples/math.yaml, which no other test trains.
    home = make_home(tmp_path)
    spoiling = ["learner.learning_rate=1.0e30", "learner.warmup_steps=0"]
    overrides = ["run.steps=3", "loop.mode=fixed", "loop.max_staleness=2", *spoiling, *SMALL]
    words = [*overrides, "record.mlflow=false", "record.dvc=false"]
    job = standing.start(home, words, PROJECT / "examples" / "math.yaml")
    try:
        assert job.wait() == 1, job.everything()
    finally:
        job.close()
    (line,) = job.complaints()
    assert "step 1 on batch" in line and "was not committed" in line
    assert "learner.learning_rate" in line and "start the run again" in line
    assert "Traceback" not in job.said
    (paused,) = job.journal.events("run.paused")
    assert "was not committed" in paused["reason"]
    assert [commit["step"] for commit in job.journal.events("step.committed")] == [0]
    assert max(snapshot["version"] for snapshot in job.journal.events("snapshot.announced")) <= 1
    assert not (job.run_dir / "outcome.json").exists()
    check_batches(job.batches(), 2)
    assert {row.reward for batch in job.batches() for row in batch} == {0.0, 1.0}
    assert all_gone(home)


def page_of(job: Job) -> str:
    return next((line.split()[-1] for line in job.said.splitlines() if line.startswith("  prefect: ")), "")


def page_answers(job: Job) -> bool:
    """Return whether the server is up whose address the run has told."""
    return bool(page_of(job)) and answers(f"{page_of(job)}/api/health")


def cancel_as_the_page_does(job: Job) -> None:
    """Set the state of the run's flow run through the server's API."""
    url = page_of(job)
    running = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    (flow_run,) = job.when(lambda: post(url, job.home, "flow_runs/filter", running))
    job.when(lambda: post(url, job.home, "flow_runs/filter", running)[0]["name"] == job.run_dir.name)
    answer = post(
        url,
        job.home,
        f"flow_runs/{flow_run['id']}/set_state",
        {"state": {"type": "CANCELLING", "name": "Cancelling"}},
    )
    assert answer["status"] == "ACCEPT", answer
