"""Steps: what the flow, the learner and an operator change about steps, versions and the run."""

import dataclasses

from antiphon.core.coordinator.consequences import settle
from antiphon.core.coordinator.loop_state import (
    LONGEST_REASON,
    NO_REASON,
    Decision,
    Forget,
    Keep,
    LoopState,
    manifest_name,
)
from antiphon.core.errors import ContractError
from antiphon.core.loop import acceptance, admission, assembly
from antiphon.core.loop import events as e
from antiphon.core.loop.staleness import is_published
from antiphon.core.records import SnapshotManifest, StepCommit
from antiphon.core.voided_batch import VoidedBatch


def open_step(loop: LoopState, step: int) -> Decision[None]:
    """Allow groups of `step` to be issued; nothing changes when it is open.

    Raises:
        ContractError: for a step outside the run, or when the run is finished.
    """
    steps = loop.config.run.steps
    if not 0 <= step < steps:
        raise ContractError(f"step {step} cannot be opened: run.steps={steps} allows 0..{steps - 1}")
    if loop.run.finished and step >= loop.run.opened_steps:
        raise ContractError(f"step {step} cannot be opened: run {loop.run_id} is finished")
    yield from admission.open_step(loop.run, loop.config, step)
    yield from settle(loop)


def open_evaluation(loop: LoopState, version: int) -> Decision[None]:
    """Let held-out prompts be sampled with a version; nothing changes when they are.

    Raises:
        ContractError: for a version that is not published, or not kept any more.
    """
    config, steps = loop.config, loop.config.run.steps
    if config.client_driven:
        raise ContractError(f"version {version} cannot be evaluated: a client drives run {loop.run_id}")
    if not 0 <= version <= steps:
        raise ContractError(f"version {version} cannot be evaluated: versions 0..{steps} exist")
    if version in loop.run.evaluations:
        return
    if not is_published(version, config.loop.publish_interval, steps):
        raise ContractError(
            f"version {version} cannot be evaluated: it is not published "
            f"(loop.publish_interval={config.loop.publish_interval})"
        )
    if loop.run.opened_steps > admission.kept_until(config, version):
        raise ContractError(
            f"version {version} cannot be evaluated any more: {loop.run.opened_steps} steps are opened, and "
            f"only the newest {config.broadcast.snapshots_kept} snapshots are kept (broadcast.snapshots_kept)"
        )
    yield e.EvaluationOpened(version, config.evaluation.prompts, config.evaluation.samples)


def commit(loop: LoopState, commit: StepCommit, now: float) -> Decision[None]:
    """Take a trained step, once and in order.

    Raises:
        IntegrityError: for a step out of order, another batch, or another digest.
    """
    commit = dataclasses.replace(commit, metrics={**commit.metrics, **loop.planner.order.metrics()})
    expected = loop.planner.assess()
    plan = None if expected is None else expected.numbers()
    events = acceptance.accept_commit(loop.run, commit, now, plan)
    if events:
        oldest_kept = commit.step - loop.run.payload_retention_steps
        old = (ids for step, ids in loop.run.sealed_groups.items() if step < oldest_kept)
        yield Forget(tuple(group_id for ids in old for group_id in ids))
    yield from events


def announce(loop: LoopState, manifest: SnapshotManifest) -> Decision[None]:
    """Take the announcement of a version whose signature was checked.

    Raises:
        ContractError: for the snapshot of another run.
        IntegrityError: for a version that no step made, or other weights under a known version.
    """
    yield from acceptance.accept_snapshot(loop.run, manifest)
    yield Keep(manifest_name(manifest.version), manifest)


def skip(loop: LoopState, empty: e.BatchSealed, reason: str, operator: str) -> Decision[VoidedBatch]:
    """Put the batch without groups `empty` in the place of one that cannot be trained on.

    Raises:
        ContractError: when the step has no batch yet, or it was committed.
    """
    reason = reason[:LONGEST_REASON] or NO_REASON
    voided, events = assembly.skip_step(
        loop.run, loop.config.run.steps, empty, reason, operator[:LONGEST_REASON]
    )
    yield from events
    loop.fleet.work_done += bool(events)  # the no-progress timeout of this step begins again
    return voided


def pause(reason: str) -> Decision[None]:
    """Halt the run until it is started again."""
    yield e.RunPaused(reason or NO_REASON)


def finish(loop: LoopState) -> Decision[None]:
    """End the run."""
    if not loop.run.finished:
        yield e.RunFinished()
        # No batch will book these.
        yield Forget(tuple(group.group_id for group in loop.run.since_seal.filtered))
