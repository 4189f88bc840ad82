"""A run of examples/code.yaml: what the model writes is run on tests, by real engines and in the sandbox."""

from pathlib import Path

import pytest

from antiphon.lineage.run_log import read_steps
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.main_job import PROJECT, SMALL, make_home
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
STEPS = 2


def test_a_run_trains_on_programs(standing: Standing, tmp_path: Path) -> None:
    needs_bubblewrap()
    words = [f"run.steps={STEPS}", "record.mlflow=false", *SMALL]
    job = standing.start(make_home(tmp_path), words, PROJECT / "examples" / "code.yaml")
    try:
        assert job.wait() == 0, job.everything()
        steps = read_steps(job.run_dir)
        assert len(steps) == STEPS and all(step["batch"]["trajectories_failed"] == 0 for step in steps)
        assert {row.reward for batch in job.batches() for row in batch} == {0.0, 1.0}
    finally:
        job.close()
