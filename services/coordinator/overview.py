"""Overview: the run at a glance, and whom it waits for, in words."""

import dataclasses
from collections import Counter

from antiphon.core.config import RunConfig
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.leases import LeaseTable
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import WorkerState
from antiphon.core.status import EvaluationRecord, RunStatus, WorkerRecord
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.services.coordinator.fleet import Fleet


def evaluation_records(state: RunState) -> tuple[EvaluationRecord, ...]:
    """Return every evaluation, by version."""
    records = []
    for version, evaluation in sorted(state.evaluations.items()):
        reward, tokens = evaluation.means()
        records.append(EvaluationRecord(version, evaluation.prompts, evaluation.rewarded, reward, tokens))
    return tuple(records)


def run_status(
    state: RunState,
    config: RunConfig,
    fleet: Fleet,
    leases: LeaseTable,
    rewarding: int,
    now: float,
    blocked: str = "",
) -> RunStatus:
    """Return the run at a glance.

    Args:
        state: the run.
        config: its configuration.
        fleet: the workers.
        leases: running leases.
        rewarding: groups that a judge has at the moment.
        now: the coordinator's clock.
        blocked: why nothing can be recorded at the moment; the run waits for that.
    """
    account = state.ledger.account(now)
    phases = Counter(group.phase for group in state.groups.values())
    return RunStatus(
        run_id=state.run_id,
        steps_total=config.run.steps,
        committed_steps=len(state.commits),
        opened_steps=state.opened_steps,
        sealed_steps=state.next_seal,
        newest_version=state.newest_version,
        groups_open=phases[GroupPhase.OPEN],
        groups_leased=phases[GroupPhase.LEASED],
        groups_to_reward=phases[GroupPhase.SUBMITTED],
        groups_ready=phases[GroupPhase.REWARDED],
        groups_dropped_stale=state.groups_dropped_stale,
        groups_filtered=state.groups_filtered,
        groups_requeued=state.groups_requeued,
        staleness_histogram=dict(state.staleness_histogram),
        workers=tuple(_with_standing(record, state) for record in fleet.records(leases, now)),
        evaluations=evaluation_records(state),
        last_commit=state.commits[-1] if state.commits else None,
        paused_reason=state.paused_reason,
        waiting=blocked or waiting_words(state, config, fleet, rewarding, now),
        finished=state.finished,
        barred={**state.revoked, **{n: s.quarantined for n, s in state.standings.items() if s.quarantined}},
        worker_seconds=account.seconds,
        tokens_by_use=account.tokens,
    )


def _with_standing(record: WorkerRecord, state: RunState) -> WorkerRecord:
    standing = state.standings.get(name_of_worker(record.worker_id))
    if standing is None:
        return record
    return dataclasses.replace(record, audited=standing.audited, strikes=standing.strikes)


def waiting_words(state: RunState, config: RunConfig, fleet: Fleet, rewarding: int, now: float) -> str:
    """Say what the data plane waits for at the moment."""
    if state.finished:
        return "nothing: the run is finished"
    if state.paused_reason:
        return f"the run to be started again: it is paused because {state.paused_reason}"
    if state.next_seal < state.opened_steps:
        return batch_words(state, config, state.next_seal, fleet, rewarding, now)
    open_evaluations = [v for v, found in state.evaluations.items() if found.rewarded < found.prompts]
    if len(state.commits) < state.next_seal:
        return f"the learner to commit step {len(state.commits)}, whose batch is sealed"
    if open_evaluations:
        version = min(open_evaluations)
        evaluation = state.evaluations[version]
        return f"the evaluation of version {version}: {evaluation.rewarded} of {evaluation.prompts} prompts"
    return f"step {state.opened_steps} to be opened"


def batch_words(
    state: RunState, config: RunConfig, step: int, fleet: Fleet, rewarding: int, now: float
) -> str:
    """Say what the batch of `step` waits for: which groups, at which worker or judge."""
    if state.paused_reason:
        return f"the run is paused: {state.paused_reason}"
    if step >= state.opened_steps:
        return f"step {step} is not open yet; {state.opened_steps} steps are"
    if step > state.next_seal:
        return f"the batch of step {step} comes after that of step {state.next_seal}, which is not sealed"
    groups = _groups_of(state, config, step)
    by_phase = Counter(group.phase for group in groups)
    places = max(config.loop.prompts_per_step, len(groups) if config.loop.mode == "fixed" else 0)
    parts = []
    if by_phase[GroupPhase.LEASED]:
        holders = Counter(g.worker_id for g in groups if g.phase is GroupPhase.LEASED)
        oldest = max(now - g.leased_at_s for g in groups if g.phase is GroupPhase.LEASED)
        names = ", ".join(f"{count} at {worker}" for worker, count in sorted(holders.items()))
        parts.append(f"{by_phase[GroupPhase.LEASED]} being sampled ({names}; the oldest for {oldest:.1f} s)")
    if by_phase[GroupPhase.SUBMITTED]:
        parts.append(f"{by_phase[GroupPhase.SUBMITTED]} to judge ({rewarding} at a judge)")
    if by_phase[GroupPhase.OPEN]:
        parts.append(f"{by_phase[GroupPhase.OPEN]} open ({_fleet_words(fleet, groups)})")
    missing = places - len(groups)
    if missing > 0:
        parts.append(f"{missing} not issued yet ({_fleet_words(fleet, groups)})")
    ready = by_phase[GroupPhase.REWARDED]
    rest = "; ".join(parts) or "being written"
    return f"step {step}: {min(ready, places)} of {places} groups rewarded; {rest}"


def _groups_of(state: RunState, config: RunConfig, step: int) -> list[GroupState]:
    return state.of_step(step) if config.loop.mode == "fixed" else list(state.training())


def _fleet_words(fleet: Fleet, groups: list[GroupState]) -> str:
    active = [member for member in fleet.living() if member.state is WorkerState.ACTIVE]
    if not active:
        return "no worker is active"
    held = ", ".join(
        f"{member.worker_id} holds {'nothing' if member.held_version is None else member.held_version}"
        for member in active[:4]
    )
    needed = sorted({g.version for g in groups if g.phase is GroupPhase.OPEN and g.version is not None})
    return f"needs version {needed[0]}; {held}" if needed else held
