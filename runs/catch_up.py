"""Catch-up: a run that continues records first what an earlier process committed and told nobody of."""

from antiphon.core.records import BatchRef, SnapshotManifest
from antiphon.runs.context import RunContext


def catch_up(run: RunContext) -> None:
    """Record what an earlier process left behind: steps, weights and scores it told nobody of.

    A process can be killed between the commit of a step and its record; the coordinator's
    journal has both the commit and the batch, so nothing of them is lost.
    """
    recorder = run.recorder
    commits = run.commits()
    if recorder is None or not commits:
        return
    base = snapshot_manifest(run, 0)
    if base is not None:
        recorder.record_base(base)
    for commit in commits:
        if not recorder.has_step(commit.step):
            batch = sealed_batch(run, commit.step)
            if batch is not None:
                recorder.record_batch(batch)
            recorder.record_version(commit, None)
    # Older snapshots have left the chunk store; what was pinned of them stays pinned.
    for commit in [c for c in commits if c.published][-run.config.broadcast.snapshots_kept :]:
        manifest = snapshot_manifest(run, commit.version)
        if manifest is not None:
            recorder.record_weights(manifest)
    for evaluation in run.call(lambda: run.coordinator.status()).evaluations:
        recorder.record_evaluation(evaluation)


def sealed_batch(run: RunContext, step: int) -> BatchRef | None:
    """Return the sealed batch of a step; None when it is not sealed."""
    return run.call(lambda: run.coordinator.await_stage("reward", step, 0.0)).batch


def snapshot_manifest(run: RunContext, version: int) -> SnapshotManifest | None:
    """Return the manifest of a published version; None when the coordinator has none."""
    return run.call(lambda: run.coordinator.latest_manifest(version))
