"""Fixed mode with turns: whenever a worker is killed, the batches and weights are the same, and replay."""

from pathlib import Path

import pytest

from tests.support.main_job import PROJECT, Job, make_home, typed

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


def test_a_worker_killed_in_each_of_two_runs_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for name, committed in (("early", 0), ("late", 2)):
        (tmp_path / name).mkdir()
        job = Job(make_home(tmp_path / name), OVERRIDES, PROJECT / "examples" / "game.yaml")
        try:
            job.reach(committed)
            job.when(lambda job=job: in_flight(job))
            job.kill_service("worker-0")
            assert job.wait() == 0, job.everything()
        finally:
            job.close()
        expired = job.journal.events("lease.expired")
        assert expired and any(event["kept"] for event in expired), "no group was handed over"
        commits = job.journal.events("step.committed")
        assert [commit["step"] for commit in commits] == list(range(STEPS))
        turns = [len(row.observed) for batch in job.batches() for row in batch]
        assert sum(turns) > len(turns) / 2, "hardly any row has a second turn"
        found.append([(commit["batch_digest"], commit["weights_digest"]) for commit in commits])
    assert found[0] == found[1]  # so one replay shows both
    replayed = typed(job.home, "replay", "--rollouts")
    assert replayed.returncode == 0, replayed.stderr
    assert f"{STEPS} of {STEPS} steps" in replayed.stdout and "100.0000% of " in replayed.stdout
    assert len({weights for _, weights in found[0]}) == STEPS, "some step changed nothing"
