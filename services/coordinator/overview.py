"""Overview: the run at a glance, and a sentence that says whom it waits for."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import islice

from antiphon.core.capacity.run_ahead import describe
from antiphon.core.loop.group_state import EvaluationState, GroupPhase, GroupState
from antiphon.core.loop.run_state import RunState
from antiphon.core.status import EvaluationRecord, RunStatus, WorkerRecord
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.services.coordinator.fleet import Fleet
from antiphon.services.coordinator.run_state_machine import RunStateMachine


def evaluation_record(version: int, evaluation: EvaluationState) -> EvaluationRecord:
    """Return an evaluation with its means so far."""
    # It is complete once its kept answers are in the store: a recorder finds them there.
    rewarded = (
        evaluation.rewarded if evaluation.finished else min(evaluation.rewarded, evaluation.prompts - 1)
    )
    return EvaluationRecord(
        version, evaluation.prompts, rewarded, *evaluation.means(), evaluation.samples_digest
    )


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
        self._complete: dict[int, EvaluationRecord] = {}
        """Evaluations that are over, by version: a long run has many, and they change no more."""

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
            trajectories_failed=state.trajectories_failed,
            last_failure=state.last_failure,
            groups_requeued=state.groups_requeued,
            staleness_histogram=dict(state.staleness_histogram),
            workers=tuple(_with_standing(w, state) for w in machine.fleet.records(machine.leases, now)),
            evaluations=self._evaluations(),
            last_commit=state.commits[-1] if state.commits else None,
            paused_reason=state.paused_reason,
            waiting=self.waiting(),
            finished=state.finished,
            barred=state.revoked | {n: s.quarantined for n, s in state.standings.items() if s.quarantined},
            worker_seconds=account.seconds,
            tokens_by_use=account.tokens,
            dollars_by_use=account.dollars | self._other_dollars(),
            seconds_by_class={name: spent.seconds for name, spent in account.classes.items()},
            dollars_by_class={name: spent.dollars for name, spent in account.classes.items()},
            voided=tuple(state.voided),
            unaudited=sum(standing.unaudited for standing in state.standings.values()),
            unaudited_reason=next(
                (s.unaudited_reason for s in state.standings.values() if s.unaudited_reason), ""
            ),
            unaudited_tokens=sum(standing.kept_cache for standing in state.standings.values()),
            capacity=machine.planner.capacity,
            work_done=machine.fleet.work_done,
            run_ahead=self._run_ahead(),
            deliveries=tuple(machine.fleet.transfers.deliveries),
            order=self._machine.planner.order.describe(),
            length_correlation=self._machine.planner.order.correlation or 0.0,
        )

    def _other_dollars(self) -> dict[str, float]:
        """Return what is paid besides workers: bytes that leave the origin, and the learner's machine."""
        config, state = self._machine.config, self._machine.state
        egress = state.work_accounts.origin_bytes / 1e9 * config.provisioning.egress_usd_per_gb
        hours = state.clock.times().wall_s / 3600.0
        return {"transfer": egress, "learner": hours * config.record.learner_usd_per_hour}

    def _evaluations(self) -> tuple[EvaluationRecord, ...]:
        found = []
        for version, evaluation in sorted(self._machine.state.evaluations.items()):
            record = self._complete.get(version) or evaluation_record(version, evaluation)
            if record.complete:
                self._complete[version] = record
            found.append(record)
        return tuple(found)

    def _run_ahead(self) -> str:
        plan, loop = self._machine.planner.plan, self._machine.config.loop
        return "" if plan is None else describe(plan, loop.prompts_per_step, loop.max_staleness)

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
        evaluations = [(v, found) for v, found in state.evaluations.items() if v in state.snapshots]
        open_evaluations = [v for v, found in evaluations if found.rewarded < found.prompts]
        if len(state.commits) < state.next_seal:
            return f"the learner to commit step {len(state.commits)}, whose batch is sealed"
        if open_evaluations:
            version = min(open_evaluations)
            found = state.evaluations[version]
            return f"the evaluation of version {version}: {found.rewarded} of {found.prompts} prompts"
        absence = self._machine.fleet.absence() if state.snapshots else ""
        return absence or f"step {state.opened_steps} to be opened"

    def batch_waits_for(self, step: int) -> str:
        """Say what the batch of `step` waits for: which groups, at which worker or reward service."""
        state, config, now = self._machine.state, self._machine.config, self._machine.clock()
        if state.paused_reason:
            return f"the run is paused: {state.paused_reason}"
        if step >= state.opened_steps:
            return f"step {step} is not open yet; {state.opened_steps} steps are"
        if step > state.next_seal:
            return f"the batch before it, {self.batch_waits_for(state.next_seal)}"
        fixed = config.loop.mode == "fixed"
        places = config.loop.prompts_per_step
        groups = state.of_step(step) if fixed else list(islice(state.training(), places))
        count = Counter(group.phase for group in groups)
        places = max(places, len(groups))
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
        parts += [
            f"the engine of {member.worker_id} stands still for {seconds:.0f} s"
            for member in self._machine.fleet.living()
            if (seconds := self._machine.leases.engines.stands_still_s(member.worker_id))
        ]
        ready = count[GroupPhase.REWARDED]
        rest = "; ".join(parts) or "being written"
        return f"step {step}: {min(ready, places)} of {places} groups rewarded; {rest}"


def _with_standing(record: WorkerRecord, state: RunState) -> WorkerRecord:
    standing = state.standings.get(name_of_worker(record.worker_id))
    if standing is None:
        return record
    return dataclasses.replace(record, audited=standing.audited, strikes=standing.strikes)


def _workers(fleet: Fleet, groups: list[GroupState]) -> str:
    active = fleet.active()
    if not active:
        joining = ", ".join(member.worker_id for member in fleet.living()[:4])
        return f"no worker is active, {joining} is joining" if joining else "no worker is active"
    held = ", ".join(
        f"{member.worker_id} holds {'nothing' if member.held_version is None else member.held_version}"
        for member in active[:4]
    )
    needed = sorted({g.version for g in groups if g.phase is GroupPhase.OPEN and g.version is not None})
    return f"needs version {needed[0]}; {held}" if needed else held
