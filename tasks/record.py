"""Record stage: hand a batch and a version to lineage; never blocks the loop."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from antiphon.runs.catch_up import sealed_batch, snapshot_manifest
from antiphon.runs.context import RunContext, find


def record_step(run: RunContext, step: int) -> None:
    """Queue the batch of `step` and the version it made for MLflow and the ledger."""
    if run.recorder is None or not run.recorded(step):
        return
    result = run.step_results[step]
    batch = sealed_batch(run, step)
    if batch is not None:
        run.recorder.record_batch(batch)
    manifest = snapshot_manifest(run, result.commit.version) if result.commit.published else None
    run.recorder.record_version(result.commit, manifest)


@task(task_run_name="record {number}", cache_policy=NO_CACHE, persist_result=False)
def record(run_id: str, number: int) -> dict[str, Any]:
    """Record one step."""
    run = find(run_id)
    run.timed("record", number, lambda: record_step(run, number))
    return {"step": number}
