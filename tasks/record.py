"""Record stage: hand a batch and a version to lineage; never blocks the loop."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from antiphon.core.records import BatchRef, SnapshotManifest
from antiphon.runs.context import RunContext, find


def record_step(run: RunContext, step: int) -> None:
    """Queue the batch of `step` and the version it made for MLflow and the ledger."""
    if run.recorder is None or not run.recorded(step):
        return
    result = run.step_results[step]
    batch = _batch(run, step)
    if batch is not None:
        run.recorder.record_batch(batch)
    manifest = _manifest(run, result.commit.version) if result.commit.published else None
    run.recorder.record_version(result.commit, manifest)


def catch_up(run: RunContext) -> None:
    """Record what an earlier process left behind: steps, weights and scores it told nobody of.

    A process can be killed between the commit of a step and its record; the coordinator's
    journal has both the commit and the batch, so nothing of them is lost.
    """
    recorder = run.recorder
    commits = run.commits()
    if recorder is None or not commits:
        return
    base = _manifest(run, 0)
    if base is not None:
        recorder.record_base(base)
    for commit in commits:
        if not recorder.has_step(commit.step):
            batch = _batch(run, commit.step)
            if batch is not None:
                recorder.record_batch(batch)
            recorder.record_version(commit, None)
    # Older snapshots have left the chunk store; what was pinned of them stays pinned.
    for commit in [c for c in commits if c.published][-run.config.broadcast.snapshots_kept :]:
        manifest = _manifest(run, commit.version)
        if manifest is not None:
            recorder.record_weights(manifest)
    for evaluation in run.call(lambda: run.coordinator.status()).evaluations:
        recorder.record_evaluation(evaluation)


def _batch(run: RunContext, step: int) -> BatchRef | None:
    return run.call(lambda: run.coordinator.pull_batch(step, 0.0)).batch


def _manifest(run: RunContext, version: int) -> SnapshotManifest | None:
    return run.call(lambda: run.coordinator.latest_manifest(version))


@task(task_run_name="record {number}", cache_policy=NO_CACHE, persist_result=False)
def record(run_id: str, number: int) -> dict[str, Any]:
    """Record one step."""
    run = find(run_id)
    run.timed("record", number, lambda: record_step(run, number))
    return {"step": number}
