"""Assembly: which rewarded groups a step uses up, decided from state alone.

Batches are sealed in the order of the steps. A batch may be empty: with filter=drop every group
of a step can lack variance, and with filter=refill the refill limit can be reached without one
that has it. Such a step still happens: the learner makes no update, the weights keep their
digest, the version advances, and the loop continues.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from antiphon.core.config import RunConfig
from antiphon.core.errors import ContractError
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import fixed_limit
from antiphon.core.loop.group_state import GroupPhase, GroupState, voided_batch
from antiphon.core.loop.places import batch_size, groups_of_step
from antiphon.core.loop.run_state import RunState
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.core.voided_batch import VoidedBatch

Filter = Literal["none", "drop", "refill"]


@dataclass(frozen=True, slots=True)
class SealPlan:
    """The next batch: groups in the order of the file."""

    step: int
    used: tuple[GroupState, ...]
    filtered: tuple[GroupState, ...]


def _plan(step: int, taken: Sequence[GroupState], filter_: Filter) -> SealPlan:
    keeps_all = filter_ == "none"
    return SealPlan(
        step,
        used=tuple(group for group in taken if keeps_all or group.varied),
        filtered=tuple(group for group in taken if not (keeps_all or group.varied)),
    )


def dropped(state: RunState, config: RunConfig, sealing: Collection[str] = ()) -> list[e.GroupDropped]:
    """Return the rewarded groups whose place another must take.

    With filter=refill, those of elastic mode without variance; and those that would train and that a worker
    in quarantine sampled some of. `sealing` are the groups of the batch that is being written: it is too
    late for them. None is ever dropped for its age: a group keeps the place that its lease was checked for.
    """
    refilled = config.loop.mode == "elastic" and config.loop.filter == "refill"
    liars = {name for name, standing in state.standings.items() if standing.quarantined}
    if not (refilled or liars):
        return []
    found = []
    for group in state.training():
        if group.phase is not GroupPhase.REWARDED or group.group_id in sealing:
            continue
        if not group.varied and config.loop.filter != "none":
            if refilled:
                found.append(e.GroupDropped(group.group_id, "filtered"))
        elif liars and not liars.isdisjoint(_sampled_by(state, group)):
            found.append(e.GroupDropped(group.group_id, "untrusted"))
    return found


def _sampled_by(state: RunState, group: GroupState) -> set[str]:
    """Return the names of the workers that sampled tokens of a group that was handed in."""
    receipt = state.receipts.get(group.group_id)
    authors = () if receipt is None else receipt.authors
    return {name_of_worker(worker_id) for worker_id in (group.worker_id, *(x[1] for x in authors))}


def plan_seal(state: RunState, config: RunConfig) -> SealPlan | None:
    """Return the next batch if it is complete, else None: in elastic mode, the front of the line.

    `core.loop.places` says why it waits for the groups of these places and takes no others instead.
    """
    step = state.next_seal
    if step >= state.opened_steps or state.finished:
        return None
    if config.loop.mode == "fixed":
        return _plan_fixed(state, config, step)
    places = wanted = config.loop.prompts_per_step
    line = list(state.training())
    if config.loop.filter == "refill":
        # What was filtered since the last batch used up a part of what this step may open.
        allowed = int(places * config.loop.refill_limit)
        wanted = max(0, min(places, allowed - len(state.since_seal.filtered)))
    size = batch_size(line, state.batches, places, wanted, config.loop.max_staleness)
    front = line[:size]
    if len(front) < size or any(group.phase is not GroupPhase.REWARDED for group in front):
        return None
    return _plan(step, front, config.loop.filter)


def _plan_fixed(state: RunState, config: RunConfig, step: int) -> SealPlan | None:
    groups = state.of_step(step)
    if not groups or any(group.phase is not GroupPhase.REWARDED for group in groups):
        return None
    places = config.loop.prompts_per_step
    plan = _plan(step, groups, config.loop.filter)
    if config.loop.filter == "refill" and len(plan.used) < places and len(groups) < fixed_limit(config):
        return None  # a spare group is about to be opened
    return plan


def step_progress(state: RunState, config: RunConfig, step: int, *phases: GroupPhase) -> float:
    """Return the share of a step's groups that are in one of `phases`, 0..1; 1 for a sealed step."""
    if state.is_sealed(step):
        return 1.0
    groups = groups_of_step(state, config.loop, step)
    return sum(group.phase in phases for group in groups) / max(len(groups), config.loop.prompts_per_step)


def skip_step(
    state: RunState, steps: int, empty: e.BatchSealed, reason: str, operator: str
) -> tuple[VoidedBatch, list[e.JournalEvent]]:
    """Return the batch that a step gives up to train nothing, and the events of that; none for a repetition.

    A batch that no learner can train on would stop its run for ever, because a sealed batch never changes. So
    until its step is committed an operator may put an empty one in its place. Its groups are spent: they were
    counted when it was sealed, and they never train.

    Args:
        state: the run.
        steps: how many it has.
        empty: the batch without groups of the step that is meant.
        reason: why, for people.
        operator: who says so.

    Raises:
        ContractError: when the step has no batch yet, or it was committed.
    """
    run, step = f"run {state.run_id}", empty.step
    if not 0 <= step < steps:
        raise ContractError(f"{run} has no step {step}: its steps are 0..{steps - 1}")
    if state.is_sealed(step) and state.sealed[step].replaced and state.sealed[step].digest == empty.digest:
        return state.sealed[step].replaced[-1], []
    if step < len(state.commits):
        raise ContractError(
            f"step {step} of {run} is committed, version {step + 1} was trained on its batch; only a step "
            "whose batch waits for the learner can be skipped"
        )
    if not state.is_sealed(step):
        raise ContractError(f"step {step} of {run} has no sealed batch yet; see `antiphon status`")
    sealed = state.sealed[step]
    # What was sampled says how good the policy is, whether or not it trains.
    empty = dataclasses.replace(
        empty, reward_mean=sealed.reward_mean, completion_tokens_mean=sealed.completion_tokens_mean
    )
    return voided_batch(sealed, reason, operator), [
        e.BatchVoided(step, sealed.digest, reason, operator),
        empty,
    ]
