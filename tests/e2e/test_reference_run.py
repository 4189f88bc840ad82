"""A run with a teacher: real engines and a scorer; its steps repeat from the batch files alone."""

import shutil
from pathlib import Path

import pytest

from antiphon.lineage.run_log import read_steps
from tests.support.main_job import PROJECT, SMALL, make_home, typed
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
STEPS = 2


def test_a_run_learns_from_a_teacher_and_its_replay_needs_none(standing: Standing, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(PROJECT / "examples" / "models" / "chain-sum", teacher)
    words = [f"run.steps={STEPS}", "record.mlflow=false", *SMALL, "loop.filter=none"]
    words += [f"reference.model={teacher}", "reference.kl=0.05", "reference.distillation=0.1"]
    job = standing.start(make_home(tmp_path), words, PROJECT / "examples" / "quickstart.yaml")
    try:
        assert job.wait() == 0, job.everything()
        steps = read_steps(job.run_dir)
        assert len(steps) == STEPS
        for batch in job.batches():
            for row in batch:
                assert (
                    row.reference_logprobs is not None and row.reference_logprobs.size == row.token_ids.size
                )
        # The teacher has the policy's first weights, so that it drifts away from zero.
        first, second = (step["metrics"]["reference_kl_k3"] for step in steps)
        assert 0.0 <= first < 1e-4 < second
        shutil.rmtree(teacher)
        said = typed(job.home, "replay", job.run_dir.name)
        assert said.returncode == 0 and "exact here" in said.stdout, said.stdout + said.stderr
    finally:
        job.close()
