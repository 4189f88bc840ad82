"""Fixed mode with turns: whenever a worker is killed, the batches and weights are the same, and replay."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.main_job import PROJECT, Job, make_home, typed
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.long(in_ci=True), pytest.mark.timeout(600)]

STEPS = 5
OVERRIDES = (
    f"run.steps={STEPS}",
    "loop.mode=fixed",
    "loop.prompts_per_step=16",
    "coordinator.heartbeat_s=0.5",
    "environment.train_size=32",
    "evaluation.interval=0",
    "evaluation.prompts=4",
    "record.mlflow=false",
)


def in_flight(job: Job) -> bool:
    """Return whether a worker has a group of which turns were answered."""
    answered = {event["group_id"] for event in job.journal.events("turn.answered")}
    return bool(answered - {event["group_id"] for event in job.journal.events("group.submitted")})


def finished(job: Job, killed_at: Sequence[int] = ()) -> list[tuple[str, str]]:
    """Kill the worker in the middle of a group after so many steps; return the digests of every step."""
    try:
        for committed in killed_at:
            job.reach(committed)
            job.when(lambda: in_flight(job))
            job.kill_service("worker-0")
        assert job.wait() == 0, job.everything()
    finally:
        job.close()
    commits = job.journal.events("step.committed")
    assert [commit["step"] for commit in commits] == list(range(STEPS))
    return [(commit["batch_digest"], commit["weights_digest"]) for commit in commits]


def test_a_worker_killed_twice_changes_no_bit(standing: Standing, tmp_path: Path) -> None:
    config, homes = PROJECT / "examples" / "game.yaml", [tmp_path / name for name in ("calm", "killed")]
    for folder in homes:
        folder.mkdir()
    calm = finished(standing.start(make_home(homes[0]), OVERRIDES, config))
    job = Job(make_home(homes[1]), OVERRIDES, config, standing.prefect)
    assert finished(job, killed_at=(0, 2)) == calm  # so one replay shows both
    kept = {event["worker_id"] for event in job.journal.events("lease.expired") if event["kept"]}
    assert len(kept) == 2, "no group was handed over"
    turns = [len(row.observed) for batch in job.batches() for row in batch]
    assert sum(turns) > len(turns) / 2, "hardly any row has a second turn"
    replayed = typed(job.home, "replay", "--rollouts")
    assert replayed.returncode == 0, replayed.stderr
    assert f"{STEPS} of {STEPS} steps" in replayed.stdout and "100.0000% of " in replayed.stdout
    assert len({weights for _, weights in calm}) == STEPS, "some step changed nothing"
