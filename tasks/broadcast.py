"""Broadcast stage: publish a version and wait until the active workers hold it."""

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from antiphon.core.errors import UnavailableError
from antiphon.core.records import SnapshotManifest, WorkerState
from antiphon.runs.context import RunContext, find

HOLD_POLL_S = 0.1
"""Pause between two looks at who holds a version; far below a learner step."""


def broadcast_version(run: RunContext, version: int) -> SnapshotManifest:
    """Publish `version` and wait until every active worker holds it or a newer one.

    In fixed mode a worker swaps only when the next step's groups need it, so there the stage
    ends when the snapshot is announced and the lease rule does the rest.

    Raises:
        UnavailableError: when no worker took it within broadcast.transfer_timeout_s.
    """
    timeout_s = run.config.services.stall_timeout_s
    manifest = run.call(lambda: run.learner.publish(version), timeout_s=timeout_s)
    if run.config.loop.mode == "fixed":
        return manifest
    patience_s = run.config.broadcast.transfer_timeout_s
    started = time.perf_counter()
    while True:
        status = run.call(lambda: run.coordinator.status())
        active = [w for w in status.workers if w.state is WorkerState.ACTIVE]
        behind = [w for w in active if w.held_version is None or w.held_version < version]
        if active and not behind:
            return manifest
        if time.perf_counter() - started > patience_s:
            names = ", ".join(w.worker_id for w in behind) or "any worker at all"
            raise UnavailableError(f"version {version} did not reach {names} within {patience_s:g} s")
        run.check()
        run.wait_stopped(HOLD_POLL_S)


@task(task_run_name="broadcast v{version}", cache_policy=NO_CACHE, persist_result=False)
def broadcast(run_id: str, version: int) -> dict[str, Any]:
    """Publish one policy version; returns its digest."""
    run = find(run_id)
    manifest = run.timed("broadcast", version, lambda: broadcast_version(run, version))
    if version == 0 and run.recorder is not None:
        run.recorder.record_base(manifest)
    return {"version": version, "weights": manifest.weights_digest, "bytes": manifest.payload_bytes}
