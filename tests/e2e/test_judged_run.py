"""A run whose rewards a model gives: real engines, a stand-in for the judge's server, the record."""

import json
from pathlib import Path

import pytest

from antiphon.core.judge_config import JudgeSection
from antiphon.lineage.judgements import judgement_lines
from antiphon.lineage.run_log import read_steps
from tests.support.judge_server import judging_apart
from tests.support.main_job import PROJECT, SMALL, make_home, typed
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
STEPS = 2


def test_the_example_trains_on_what_a_model_says(
    standing: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-12345")
    with judging_apart() as server:
        words = [
            f"judge.url={server.url}",
            "judge.key=JUDGE_KEY",
            f"run.steps={STEPS}",
            "record.mlflow=false",
        ]
        words += [*SMALL, "loop.filter=none", "judge.price_per_million=[1.0, 1.0]"]
        job = standing.start(make_home(tmp_path), words, PROJECT / "examples" / "judge.yaml")
        try:
            assert job.wait() == 0, job.everything()
            steps, run_dir = read_steps(job.run_dir), job.run_dir
            assert len(steps) == STEPS and all(step["batch"]["trajectories_failed"] == 0 for step in steps)
            rewards = {row.reward for batch in job.batches() for row in batch}
            assert rewards == {0.0, 1.0}, "what is right is worth the whole scale"
            manifest = json.loads((run_dir / "manifest.json").read_text())
            section = JudgeSection(url=server.url, model="Qwen/Qwen3-8B")
            assert manifest["judge"] == section.facts()
            first, *_ = judgement_lines(run_dir)
            assert f"in {len(server.asked) - 2:,} requests" in first, "all but the trials before the start"
            prompts = [body["messages"][0]["content"] for body in server.asked]
            assert len(set(prompts[2:])) == len(prompts) - 2, "nothing is asked for twice"
            page = (run_dir / "report.html").read_text()
            assert "A model gave " in page and "completions longer than its mean earned " in page
            shown = typed(job.home, "status", run_dir.name)
            assert first in shown.stdout
            kept = [path for path in run_dir.rglob("*") if path.is_file()]
            assert not any(b"sk-12345" in path.read_bytes() for path in kept)
        finally:
            job.close()


def test_a_judge_that_does_not_answer_is_said_before_the_start(tmp_path: Path) -> None:
    with judging_apart("404") as server:
        words = [f"judge.url={server.url}", "run.steps=1", *SMALL]
        done = typed(make_home(tmp_path), "run", str(PROJECT / "examples" / "judge.yaml"), *words)
    assert done.returncode == 2 and "was not judged by judge.model=Qwen/Qwen3-8B" in done.stderr
    assert "it answered with status 404" in done.stderr
