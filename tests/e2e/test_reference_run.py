"""A run with a teacher, its own or behind a URL: its steps repeat from the batch files alone."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.core.config import load_config
from antiphon.lineage.run_log import read_steps
from antiphon.services.scorer.server import open_scorer
from tests.support.logprob_server import logprobs_of
from tests.support.main_job import PROJECT, SMALL, Job, make_home, typed
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
STEPS = 2
MODEL = PROJECT / "examples" / "models" / "chain-sum"


@contextmanager
def learned(standing: Standing, folder: Path, *told: str) -> Iterator[Job]:
    """Run two steps with a teacher that has the policy's first weights, and look at what they leave."""
    words = [f"run.steps={STEPS}", "record.mlflow=false", *SMALL, "loop.filter=none", *told]
    words += ["reference.kl=0.05", "reference.distillation=0.1"]
    job = standing.start(make_home(folder), words, PROJECT / "examples" / "quickstart.yaml")
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
        yield job
    finally:
        job.close()


def replayed_exactly(job: Job) -> bool:
    said = typed(job.home, "replay", job.run_dir.name)
    return said.returncode == 0 and "exact here" in said.stdout


def test_a_run_learns_from_a_teacher_and_its_replay_needs_none(standing: Standing, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(MODEL, teacher)
    with learned(standing, tmp_path, f"reference.model={teacher}") as job:
        shutil.rmtree(teacher)
        assert replayed_exactly(job)


def test_a_teacher_behind_a_url_does_the_same_without_a_scorer(standing: Standing, tmp_path: Path) -> None:
    with ExitStack() as running:
        with logprobs_of(MODEL) as server:
            told = f"reference.url={server.url}", "reference.model=teacher"
            job = running.enter_context(learned(standing, tmp_path, *told))
        groups = [one["prompt"] for one in server.asked[2:]]  # after the trial's row and text
        assert len(groups) >= STEPS and {len(rows) for rows in groups} == {4}
        logs = {path.stem for path in (job.run_dir / "logs").iterdir()}
        assert "reward" in logs and "scorer" not in logs
        assert replayed_exactly(job)


def test_under_adapters_the_reference_is_the_base_without_them(standing: Standing, tmp_path: Path) -> None:
    with learned(standing, tmp_path, "learner.lora.rank=4", "learner.learning_rate=2e-3") as job:
        service = open_scorer(load_config(job.run_dir / "config.yaml"))
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        rows = [row for batch in job.batches() for row in batch]
        for row in rows:
            whole = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.token_ids]).astype(np.int64))
            with torch.no_grad():
                every = base(whole[None, :-1]).logits[0, len(row.prompt_token_ids) - 1 :].log_softmax(1)
            expected = every.gather(1, whole[len(row.prompt_token_ids) :, None])[:, 0].numpy()
            np.testing.assert_allclose(row.reference_logprobs, expected, atol=1e-4)
            (again,) = asyncio.run(service.score(row.prompt_token_ids, [row.token_ids]))
            np.testing.assert_allclose(row.reference_logprobs, again, atol=1e-5)
