"""A run of examples/poker.yaml: hands are played with real engines, and rewards are big blinds."""

from pathlib import Path

import pytest

from antiphon.lineage.run_log import read_steps
from tests.support.main_job import PROJECT, SMALL, make_home
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
STEPS = 2


def test_a_run_trains_on_hands(standing: Standing, tmp_path: Path) -> None:
    words = [f"run.steps={STEPS}", "record.mlflow=false", *SMALL]
    job = standing.start(make_home(tmp_path), words, PROJECT / "examples" / "poker.yaml")
    try:
        assert job.wait() == 0, job.everything()
        steps = read_steps(job.run_dir)
        assert len(steps) == STEPS and all(step["batch"]["trajectories_failed"] == 0 for step in steps)
        rows = [row for batch in job.batches() for row in batch]
        assert all(-20.0 <= row.reward <= 20.0 for row in rows)
        assert len({row.reward for row in rows}) > 2, "hands are worth more than won or lost"
        assert any(len(row.observed) > 1 for row in rows), "no hand has a second decision"
    finally:
        job.close()
