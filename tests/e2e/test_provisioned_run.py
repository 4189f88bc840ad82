"""A run without workers of its own starts one of its pool, trains with it, and says what that cost.

It is that of examples/reasoning.yaml.
"""

import json
from pathlib import Path

import pytest

from tests.support.main_job import PROJECT, SMALL, Job, all_gone, make_home

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.long]
STEPS = 4


def test_a_pool_brings_the_workers_and_the_account_has_their_price(tmp_path: Path) -> None:
    pool = "[{name: dear, usd_per_hour: 72, zone: west}, {name: cheap, usd_per_hour: 36, zone: east}]"
    own = ["rollout.workers=0", f"provisioning.pool={pool}", f"run.steps={STEPS}", "loop.max_staleness=2"]
    job = Job(make_home(tmp_path), [*own, *SMALL], PROJECT / "examples" / "reasoning.yaml")
    try:
        assert job.wait() == 0, job.everything()
        assert {row.reward for batch in job.batches() for row in batch} == {0.0, 1.0}
        first = job.journal.events("worker.registered")[0]
        assert (first["worker_name"], first["worker_class"], first["usd_per_hour"]) == (
            "cheap-0",
            "cheap",
            36.0,
        )
        lines = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
        told = [line["timings"] for line in lines if "plan_step_s" in line["timings"]]
        assert told and all(timings["plan_need_tokens_per_s"] > 0.0 for timings in told)
        figures = json.loads((job.run_dir / "outcome.json").read_text())["figures"]
        assert figures["dollars"] > 0.0 and figures["dollars_per_step"] * STEPS == pytest.approx(
            figures["dollars"]
        )
        report = (job.run_dir / "report.html").read_text()
        assert "cheap 0." in report and "By what was measured" in report
    finally:
        job.close()
    assert all_gone(job.home)
