"""Catch-up: a run that continues records first what an earlier process committed but did not record."""

from functools import partial

from antiphon.core.records import SnapshotManifest
from antiphon.runs.context import RunContext


def catch_up(run: RunContext) -> None:
    """Record the steps, weights and scores that an earlier process committed but did not record.

    A process can be killed between the commit of a step and its record; the coordinator's
    journal has both the commit and the batch, so nothing of them is lost.
    """
    recorder = run.recorder
    commits = run.call(lambda: run.coordinator.commits(-1), None)
    if recorder is None or not commits:
        return
    if base := _manifest(run, 0):
        recorder.record_base(base)
    for commit in commits:
        if not recorder.has_step(commit.step):
            sealed = partial(run.coordinator.await_stage, "reward", commit.step, 0.0)
            if batch := run.call(sealed).batch:
                recorder.record_batch(batch)
            recorder.record_version(commit, None)
    # Older snapshots have left the chunk store; what was pinned of them stays pinned.
    for commit in [c for c in commits if c.published][-run.config.broadcast.snapshots_kept :]:
        if manifest := _manifest(run, commit.version):
            recorder.record_weights(manifest)
    for evaluation in run.call(lambda: run.coordinator.status()).evaluations:
        recorder.record_evaluation(evaluation)


def _manifest(run: RunContext, version: int) -> SnapshotManifest | None:
    return run.call(lambda: run.coordinator.latest_manifest(version))
