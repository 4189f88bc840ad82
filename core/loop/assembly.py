"""Assembly: which rewarded groups a step uses up, decided from state alone.

Batches are sealed in the order of the steps. A batch may be empty: with filter=drop every group
of a step can lack variance, and with filter=refill the refill limit can be reached without one
that has it. Such a step still happens: the learner makes no update, the weights keep their
digest, the version advances, and the loop continues.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from antiphon.core.config import RunConfig
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import fixed_limit
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.run_state import RunState
from antiphon.core.loop.staleness import StalenessBound

Filter = Literal["none", "drop", "refill"]


@dataclass(frozen=True, slots=True)
class SealPlan:
    """The next batch: groups in the order of the file."""

    step: int
    used: tuple[GroupState, ...]
    filtered: tuple[GroupState, ...]


def reason_to_drop(
    group: GroupState, bound: StalenessBound, filter_: Filter, next_step: int
) -> Literal["stale", "filtered"] | None:
    """Return why a rewarded group of elastic mode never trains; None while it may still train.

    `filter_`: `none` trains on groups without variance, `drop` lets them use up their place in a step but
    leaves them out of the file, `refill` has further prompts take their place. `next_step` is the oldest
    step whose batch is not sealed.
    """
    if not bound.admits(group.oldest_version, next_step):
        return "stale"
    return "filtered" if filter_ == "refill" and not group.varied else None


def select(
    groups: Iterable[GroupState], bound: StalenessBound, filter_: Filter, step: int, places: int
) -> SealPlan | None:
    """Choose the `places` oldest fresh ones of the rewarded groups; None while there are fewer.

    Oldest means oldest version first, then the order in which the groups were opened; within the
    file they stand in the order in which they were opened.
    """
    fresh = [group for group in groups if bound.admits(group.oldest_version, step)]
    if len(fresh) < places:
        return None
    fresh.sort(key=lambda group: (group.oldest_version, group.number))
    return _plan(step, sorted(fresh[:places], key=lambda group: group.number), filter_)


def _plan(step: int, taken: list[GroupState], filter_: Filter) -> SealPlan:
    keeps_all = filter_ == "none"
    return SealPlan(
        step,
        used=tuple(group for group in taken if keeps_all or group.varied),
        filtered=tuple(group for group in taken if not (keeps_all or group.varied)),
    )


def dropped(state: RunState, config: RunConfig) -> list[e.JournalEvent]:
    """Return the groups that will never train: stale ones, and with filter=refill those without variance.

    A group that is still being sampled under a version that is too old by now is taken back
    instead: its prompt is offered again and the reservation stays with it.
    """
    if config.loop.mode == "fixed":
        return []
    bound = StalenessBound(config.loop.max_staleness)
    found: list[e.JournalEvent] = []
    for group in state.training():
        match group.phase:
            case GroupPhase.REWARDED:
                reason = reason_to_drop(group, bound, config.loop.filter, state.next_seal)
                if reason is not None:
                    found.append(e.GroupDropped(group.group_id, reason))
            case GroupPhase.SUBMITTED:
                if not bound.admits(group.oldest_version, state.next_seal):
                    found.append(e.GroupDropped(group.group_id, "stale"))
            case GroupPhase.LEASED:
                if not bound.admits(group.held_version, state.next_seal):
                    for lease_id, worker in (
                        (group.twin_lease_id, group.twin_worker_id),
                        (group.lease_id, group.worker_id),
                    ):
                        if lease_id:
                            found.append(
                                e.LeaseExpired(
                                    group.group_id, lease_id, worker, "beyond the bound", waste="stale"
                                )
                            )
            case GroupPhase.OPEN:
                pass
    return found


def plan_seal(state: RunState, config: RunConfig) -> SealPlan | None:
    """Return the next batch if it is complete, else None."""
    step = state.next_seal
    if step >= state.opened_steps or state.finished:
        return None
    if config.loop.mode == "fixed":
        return _plan_fixed(state, config, step)
    places = config.loop.prompts_per_step
    if config.loop.filter == "refill":
        # What was filtered since the last batch used up a part of what this step may open.
        allowed = int(places * config.loop.refill_limit)
        places = max(0, min(places, allowed - state.since_seal.groups_filtered))
    rewarded = [group for group in state.training() if group.phase is GroupPhase.REWARDED]
    return select(rewarded, StalenessBound(config.loop.max_staleness), config.loop.filter, step, places)


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
    if step < state.next_seal:
        return 1.0
    places = config.loop.prompts_per_step
    if config.loop.mode == "fixed":
        groups = state.of_step(step)
        return sum(group.phase in phases for group in groups) / max(len(groups), places)
    reached = sum(group.phase in phases for group in state.training())
    ahead = (step - state.next_seal) * places
    return min(1.0, max(0, reached - ahead) / places)
