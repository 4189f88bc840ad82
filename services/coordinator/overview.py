"""Overview: the run at a glance, and a sentence that says whom it waits for."""

import dataclasses
from collections import Counter
from collections.abc import Callable

from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import WorkerState
from antiphon.core.status import EvaluationRecord, RunStatus, WorkerRecord
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.services.coordinator.fleet import Fleet
from antiphon.services.coordinator.run_state_machine import RunStateMachine


def evaluation_records(state: RunState) -> tuple[EvaluationRecord, ...]:
    """Return every evaluation, by version."""
    records = []
    for version, evaluation in sorted(state.evaluations.items()):
        reward, tokens = evaluation.means()
        records.append(EvaluationRecord(version, evaluation.prompts, evaluation.rewarded, reward, tokens))
    return tuple(records)


class Overview:
    """What a run says of itself."""

    def __init__(self, state_machine: RunStateMachine, rewarding: Callable[[], int]) -> None:
        """Look at a run.

        Args:
            state_machine: the run.
            rewarding: returns how many groups a reward service has at the moment.
        """
        self._machine = state_machine
        self._rewarding = rewarding

    def status(self) -> RunStatus:
        machine, state, now = self._machine, self._machine.state, self._machine.clock()
        account = state.work_accounts.account(now)
        phases = Counter(group.phase for group in state.groups.values())
        return RunStatus(
            run_id=state.run_id,
            steps_total=machine.config.run.steps,
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
            workers=tuple(_with_standing(w, state) for w in machine.fleet.records(machine.leases, now)),
            evaluations=evaluation_records(state),
            last_commit=state.commits[-1] if state.commits else None,
            paused_reason=state.paused_reason,
            waiting=self.waiting(),
            finished=state.finished,
            barred=state.revoked | {n: s.quarantined for n, s in state.standings.items() if s.quarantined},
            worker_seconds=account.seconds,
            tokens_by_use=account.tokens,
        )

    def waiting(self) -> str:
        """Say what the data plane waits for at the moment."""
        state = self._machine.state
        if blocked := self._machine.blocked_reason:
            return blocked
        if state.finished:
            return "nothing: the run is finished"
        if state.paused_reason:
            return f"the run to be started again: it is paused because {state.paused_reason}"
        if state.next_seal < state.opened_steps:
            return self.batch_waits_for(state.next_seal)
        open_evaluations = [v for v, found in state.evaluations.items() if found.rewarded < found.prompts]
        if len(state.commits) < state.next_seal:
            return f"the learner to commit step {len(state.commits)}, whose batch is sealed"
        if open_evaluations:
            version = min(open_evaluations)
            found = state.evaluations[version]
            return f"the evaluation of version {version}: {found.rewarded} of {found.prompts} prompts"
        return f"step {state.opened_steps} to be opened"

    def batch_waits_for(self, step: int) -> str:
        """Say what the batch of `step` waits for: which groups, at which worker or reward service."""
        state, config, now = self._machine.state, self._machine.config, self._machine.clock()
        if state.paused_reason:
            return f"the run is paused: {state.paused_reason}"
        if step >= state.opened_steps:
            return f"step {step} is not open yet; {state.opened_steps} steps are"
        if step > state.next_seal:
            return f"the batch of step {step} comes after that of step {state.next_seal}, which is not sealed"
        fixed = config.loop.mode == "fixed"
        groups = state.of_step(step) if fixed else list(state.training())
        count = Counter(group.phase for group in groups)
        places = max(config.loop.prompts_per_step, len(groups) if fixed else 0)
        parts, workers = [], _workers(self._machine.fleet, groups)
        if count[GroupPhase.LEASED]:
            holders = Counter(g.worker_id for g in groups if g.phase is GroupPhase.LEASED)
            oldest = max(now - g.leased_at_s for g in groups if g.phase is GroupPhase.LEASED)
            names = ", ".join(f"{held} at {worker}" for worker, held in sorted(holders.items()))
            parts.append(f"{count[GroupPhase.LEASED]} being sampled ({names}; the oldest for {oldest:.1f} s)")
        if count[GroupPhase.SUBMITTED]:
            parts.append(f"{count[GroupPhase.SUBMITTED]} to reward ({self._rewarding()} at a reward service)")
        if count[GroupPhase.OPEN]:
            parts.append(f"{count[GroupPhase.OPEN]} open ({workers})")
        missing = places - len(groups)
        if missing > 0:
            parts.append(f"{missing} not issued yet ({workers})")
        ready = count[GroupPhase.REWARDED]
        rest = "; ".join(parts) or "being written"
        return f"step {step}: {min(ready, places)} of {places} groups rewarded; {rest}"


def _with_standing(record: WorkerRecord, state: RunState) -> WorkerRecord:
    standing = state.standings.get(name_of_worker(record.worker_id))
    if standing is None:
        return record
    return dataclasses.replace(record, audited=standing.audited, strikes=standing.strikes)


def _workers(fleet: Fleet, groups: list[GroupState]) -> str:
    active = [member for member in fleet.living() if member.state is WorkerState.ACTIVE]
    if not active:
        return "no worker is active"
    held = ", ".join(
        f"{member.worker_id} holds {'nothing' if member.held_version is None else member.held_version}"
        for member in active[:4]
    )
    needed = sorted({g.version for g in groups if g.phase is GroupPhase.OPEN and g.version is not None})
    return f"needs version {needed[0]}; {held}" if needed else held
