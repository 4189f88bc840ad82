"""Assembly: which rewarded groups a step uses up, decided from state alone.

Batches are sealed in the order of the steps. A batch may be empty: with filter=drop every group
of a step can lack variance, and with filter=refill the refill limit can be reached without one
that has it. Such a step still happens: the learner makes no update, the weights keep their
digest, the version advances, and the loop goes on.
"""

from dataclasses import dataclass

from antiphon.core.config import RunConfig
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import fixed_limit
from antiphon.core.loop.group_buffer import BufferedGroup, GroupBuffer, Selection, Verdict
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.run_state import RunState
from antiphon.core.loop.staleness import StalenessBound


@dataclass(frozen=True, slots=True)
class SealPlan:
    """The next batch: groups in the order of the file."""

    step: int
    used: tuple[GroupState, ...]
    filtered: tuple[GroupState, ...]


def elastic_buffer(state: RunState, config: RunConfig) -> GroupBuffer:
    """Return the rewarded training groups as a group buffer."""
    buffer = GroupBuffer(StalenessBound(config.loop.max_staleness), config.loop.filter)
    for group in state.training():
        if group.phase is GroupPhase.REWARDED:
            buffer.offer(buffered(group))
    return buffer


def buffered(group: GroupState) -> BufferedGroup:
    """Return what the group buffer must know about a rewarded group."""
    return BufferedGroup(group.group_id, group.number, group.oldest_version, group.varied)


def dropped(state: RunState, config: RunConfig) -> list[e.JournalEvent]:
    """Return the groups that will never train: stale ones, and with filter=refill those without variance.

    A group that is still being sampled under a version that is too old by now is taken back
    instead: its prompt is offered again and the reservation stays with it.
    """
    if config.loop.mode == "fixed":
        return []
    bound = StalenessBound(config.loop.max_staleness)
    buffer = GroupBuffer(bound, config.loop.filter)
    found: list[e.JournalEvent] = []
    for group in state.training():
        match group.phase:
            case GroupPhase.REWARDED:
                match buffer.verdict(buffered(group), state.next_seal):
                    case Verdict.STALE:
                        found.append(e.GroupDropped(group.group_id, "stale"))
                    case Verdict.FILTERED:
                        found.append(e.GroupDropped(group.group_id, "filtered"))
                    case Verdict.KEPT:
                        pass
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
    selection = _select_elastic(state, config, step)
    if selection is None:
        return None
    return SealPlan(
        step,
        used=tuple(state.groups[group_id] for group_id in selection.used),
        filtered=tuple(state.groups[group_id] for group_id in selection.filtered),
    )


def _select_elastic(state: RunState, config: RunConfig, step: int) -> Selection | None:
    places = config.loop.prompts_per_step
    buffer = elastic_buffer(state, config)
    if config.loop.filter == "refill":
        # What was filtered since the last batch used up a part of what this step may open.
        allowed = int(places * config.loop.refill_limit)
        places = max(0, min(places, allowed - state.since_seal.groups_filtered))
    return buffer.select(step, places)


def _plan_fixed(state: RunState, config: RunConfig, step: int) -> SealPlan | None:
    groups = state.of_step(step)
    if not groups or any(group.phase is not GroupPhase.REWARDED for group in groups):
        return None
    places = config.loop.prompts_per_step
    keeps_all = config.loop.filter == "none"
    used = [group for group in groups if keeps_all or group.varied]
    if config.loop.filter == "refill" and len(used) < places and len(groups) < fixed_limit(config):
        return None  # a spare group is about to be opened
    return SealPlan(
        step,
        used=tuple(used),
        filtered=tuple(group for group in groups if not (keeps_all or group.varied)),
    )


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
