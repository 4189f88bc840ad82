"""Overview: the run at a glance, whether a stage of the flow is over, and a sentence that says whom it waits
for."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import islice

from antiphon.core.capacity.run_ahead import describe
from antiphon.core.coordinator.fleet import Fleet
from antiphon.core.coordinator.loop_state import LoopState
from antiphon.core.errors import ContractError
from antiphon.core.loop.assembly import step_progress
from antiphon.core.loop.group_state import EvaluationState, GroupPhase, GroupState
from antiphon.core.loop.run_state import ENVIRONMENT_FILES, RunState
from antiphon.core.requests import StageReply
from antiphon.core.status import EvaluationRecord, RunStatus, WorkerRecord
from antiphon.core.trust.worker_names import name_of_worker


def evaluation_record(loop: LoopState, version: int, evaluation: EvaluationState) -> EvaluationRecord:
    """Return an evaluation with its means so far."""
    within = loop.reward_range
    # It is complete once its kept answers are in the store: a recorder finds them there.
    rewarded = (
        evaluation.rewarded if evaluation.finished else min(evaluation.rewarded, evaluation.prompts - 1)
    )
    means, digest = evaluation.means(within[0]), evaluation.samples_digest
    return EvaluationRecord(version, evaluation.prompts, rewarded, *means, digest, within)


def status_of(loop: LoopState, now: float, blocked: str) -> RunStatus:
    """Return the run at a glance; `blocked` says why nothing can be recorded now, "" when it can."""
    state = loop.run
    account = state.work_accounts.account(now)
    phases = Counter(group.phase for group in state.groups.values())
    return RunStatus(
        run_id=state.run_id,
        steps_total=loop.config.run.steps,
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
        workers=tuple(_with_standing(w, state) for w in loop.fleet.records(loop.leases, now)),
        evaluations=_evaluations(loop),
        last_commit=state.commits[-1] if state.commits else None,
        paused_reason=state.paused_reason,
        waiting=waiting_for(loop, now, blocked),
        finished=state.finished,
        barred=state.revoked | {n: s.quarantined for n, s in state.standings.items() if s.quarantined},
        worker_seconds=account.seconds,
        tokens_by_use=account.tokens,
        dollars_by_use=account.dollars | _other_dollars(loop),
        seconds_by_class={name: spent.seconds for name, spent in account.classes.items()},
        dollars_by_class={name: spent.dollars for name, spent in account.classes.items()},
        voided=tuple(state.voided),
        unaudited=sum(standing.unaudited for standing in state.standings.values()),
        unaudited_reason=next(
            (s.unaudited_reason for s in state.standings.values() if s.unaudited_reason), ""
        ),
        unaudited_tokens=sum(standing.kept_cache for standing in state.standings.values()),
        capacity=loop.planner.capacity,
        work_done=loop.fleet.work_done,
        run_ahead=_run_ahead(loop),
        deliveries=tuple(loop.fleet.transfers.deliveries),
        order=loop.planner.order.describe(),
        length_correlation=loop.planner.order.correlation or 0.0,
        reward_range=loop.reward_range,
        environment_digest=state.pinned.get(ENVIRONMENT_FILES, ""),
        orders=tuple(state.orders.values()),
    )


def _other_dollars(loop: LoopState) -> dict[str, float]:
    """Return what is paid besides workers: bytes that leave the origin, and the learner's machine."""
    config, state = loop.config, loop.run
    egress = state.work_accounts.origin_bytes / 1e9 * config.provisioning.egress_usd_per_gb
    hours = state.clock.times().wall_s / 3600.0
    return {"transfer": egress, "learner": hours * config.record.learner_usd_per_hour}


def _evaluations(loop: LoopState) -> tuple[EvaluationRecord, ...]:
    found = []
    for version, evaluation in sorted(loop.run.evaluations.items()):
        record = loop.evaluation_records.get(version) or evaluation_record(loop, version, evaluation)
        if record.complete:
            loop.evaluation_records[version] = record
        found.append(record)
    return tuple(found)


def _run_ahead(loop: LoopState) -> str:
    plan, section = loop.planner.plan, loop.config.loop
    return "" if plan is None else describe(plan, section.prompts_per_step, section.max_staleness)


def waiting_for(loop: LoopState, now: float, blocked: str) -> str:
    """Say what the data plane waits for at the moment."""
    state = loop.run
    if blocked:
        return blocked
    if state.finished:
        return "nothing: the run is finished"
    if state.paused_reason:
        return f"the run to be started again: it is paused because {state.paused_reason}"
    if state.next_seal < state.opened_steps:
        return batch_waits_for(loop, state.next_seal, now)
    evaluations = [(v, found) for v, found in state.evaluations.items() if v in state.snapshots]
    open_evaluations = [v for v, found in evaluations if found.rewarded < found.prompts]
    if len(state.commits) < state.next_seal:
        return f"the learner to commit step {len(state.commits)}, whose batch is sealed"
    if open_evaluations:
        version = min(open_evaluations)
        found = state.evaluations[version]
        return f"the evaluation of version {version}: {found.rewarded} of {found.prompts} prompts"
    absence = loop.fleet.absence() if state.snapshots else ""
    return absence or f"step {state.opened_steps} to be opened"


def batch_waits_for(loop: LoopState, step: int, now: float) -> str:
    """Say what the batch of `step` waits for: which groups, at which worker or reward service."""
    state, config = loop.run, loop.config
    if state.paused_reason:
        return f"the run is paused: {state.paused_reason}"
    if step >= state.opened_steps:
        return f"step {step} is not open yet; {state.opened_steps} steps are"
    if step > state.next_seal:
        return f"the batch before it, {batch_waits_for(loop, state.next_seal, now)}"
    fixed = config.loop.mode == "fixed"
    places = config.loop.prompts_per_step
    groups = state.of_step(step) if fixed else list(islice(state.training(), places))
    count = Counter(group.phase for group in groups)
    places = max(places, len(groups))
    parts, workers = [], _workers(loop.fleet, groups)
    if count[GroupPhase.LEASED]:
        holders = Counter(g.worker_id for g in groups if g.phase is GroupPhase.LEASED)
        oldest = max(now - g.leased_at_s for g in groups if g.phase is GroupPhase.LEASED)
        names = ", ".join(f"{held} at {worker}" for worker, held in sorted(holders.items()))
        parts.append(f"{count[GroupPhase.LEASED]} being sampled ({names}; the oldest for {oldest:.1f} s)")
    if count[GroupPhase.SUBMITTED]:
        parts.append(f"{count[GroupPhase.SUBMITTED]} to reward ({len(loop.rewarding)} at a reward service)")
    if count[GroupPhase.OPEN]:
        parts.append(f"{count[GroupPhase.OPEN]} open ({workers})")
    missing = places - len(groups)
    if missing > 0:
        parts.append(f"{missing} not issued yet ({workers})")
    parts += [
        f"the engine of {member.worker_id} stands still for {seconds:.0f} s"
        for member in loop.fleet.living()
        if (seconds := loop.leases.engines.stands_still_s(member.worker_id))
    ]
    parts += _refusals(loop.fleet)
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


def _refusals(fleet: Fleet) -> list[str]:
    """Say which workers cannot load newer weights, and why."""
    return [f"{one.worker_id} says: {one.swap_error}" for one in fleet.living() if one.swap_error][:2]


def stage_reply(loop: LoopState, stage: str, number: int) -> StageReply:
    """Return whether a stage of the flow is over, how far it is, and why nothing moves if nothing does.

    Args:
        loop: the run.
        stage: collect, reward, broadcast or evaluate.
        number: the step or version that is meant.

    Raises:
        ContractError: for another stage.
    """
    if stage not in _STAGES:
        raise ContractError(f"stage {stage[:40]!r} is unknown; known: {', '.join(_STAGES)}")
    state, reply = loop.run, _STAGES[stage](loop, number)
    halted = f"the run is paused: {state.paused_reason}" if state.paused_reason else ""
    halted = f"run {state.run_id} is finished" if state.finished else halted
    return reply if reply.done or not halted else dataclasses.replace(reply, halted=halted)


def explained(
    loop: LoopState, reply: StageReply, stage: str, number: int, now: float, blocked: str
) -> StageReply:
    """Return a stage's reply with what the stage waits for; `blocked` says why nothing can be recorded."""
    absence = ""
    if not reply.halted and _needs_workers(loop, stage, number):
        absence = loop.fleet.absence() or _host_absence(loop, stage)
    if stage == "broadcast":
        waits_for = _broadcast_waits_for(loop, number)
    elif stage == "evaluate":
        waits_for = waiting_for(loop, now, blocked)
    else:
        waits_for = batch_waits_for(loop, number, now)
    counter = loop.fleet.work_done
    return dataclasses.replace(
        reply, waiting_for=absence or waits_for, counter=counter, no_workers=bool(absence)
    )


def _host_absence(loop: LoopState, stage: str) -> str:
    """Return how many turns wait for hosts, whose episodes take what they take, where nothing else moves."""
    if stage == "broadcast" or not loop.hosted or not loop.turns:
        return ""
    return f"{len(loop.turns)} turns to be answered by hosts of the environment"


_HANDED_IN = (GroupPhase.SUBMITTED, GroupPhase.REWARDED)


def _collected(loop: LoopState, step: int) -> StageReply:
    share = step_progress(loop.run, loop.config, step, *_HANDED_IN)
    return StageReply(share == 1.0, progress=share)


def _rewarded(loop: LoopState, step: int) -> StageReply:
    if loop.run.is_sealed(step):
        return StageReply(True, batch=loop.run.sealed[step])
    return StageReply(False, progress=step_progress(loop.run, loop.config, step, GroupPhase.REWARDED))


def _broadcast(loop: LoopState, version: int) -> StageReply:
    # Joiners and stragglers gate nothing: what they do not hold, they fetch while others sample.
    share = loop.fleet.share_holding(version)
    enough = loop.fleet.holders(version) > 0 and share >= loop.config.broadcast.quorum
    return StageReply(version in loop.run.snapshots and enough, progress=share)


def _evaluated(loop: LoopState, version: int) -> StageReply:
    evaluation = loop.run.evaluations.get(version)
    if evaluation is None or not evaluation.finished:
        return StageReply(False, progress=evaluation.rewarded / evaluation.prompts if evaluation else 0.0)
    return StageReply(True, evaluation=evaluation_record(loop, version, evaluation))


_STAGES: dict[str, Callable[[LoopState, int], StageReply]] = {
    "collect": _collected,
    "reward": _rewarded,
    "broadcast": _broadcast,
    "evaluate": _evaluated,
}


def _broadcast_waits_for(loop: LoopState, version: int) -> str:
    if version not in loop.run.snapshots:
        return f"version {version} to be announced"
    behind = [m for m in loop.fleet.active() if m.held_version is None or m.held_version < version]
    sentence = f"any of {', '.join(m.worker_id for m in behind[:4])} to load version {version}"
    if quorum := loop.config.broadcast.quorum:
        share = loop.fleet.share_holding(version)
        sentence += f": {share:.0%} of the tokens/s have it, {quorum:.0%} must"
    return "; ".join([sentence, *_refusals(loop.fleet)])


def _needs_workers(loop: LoopState, stage: str, number: int) -> bool:
    """Return whether something is left to do for workers: sampling, or loading what was announced."""
    if stage == "broadcast":
        return number in loop.run.snapshots
    if stage == "evaluate":
        groups = (group for group in loop.run.groups.values() if group.evaluation == number)
        return any(group.phase not in _HANDED_IN for group in groups)
    # A batch waits for those before it, whose groups may have been lost.
    steps = [step for step in loop.run.unsealed_steps() if step <= number]
    return any(step_progress(loop.run, loop.config, step, *_HANDED_IN) < 1.0 for step in steps)
