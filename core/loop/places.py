"""Places: the order in which the groups of elastic mode train; a group keeps its place whatever its length.

The living training groups stand in a line, in the order of `RunState.training`. The group of rank r, counted
from 0, trains at step ``batches + r // P`` (P = loop.prompts_per_step; `RunState.batches` steps have a
batch): batches are cut off the front of the line, P by P, and a batch waits until all of its groups are
rewarded. A group joins the line at its end when it is opened, and is leased only to a worker whose version v
meets ``v + S >= step of its place`` (S = loop.max_staleness).

A batch that an operator voided in older journals leaves its step without one, and the front of the line goes
there first: these groups train earlier than their places say, and all others when their places say, since one
batch fewer is sealed and one step more comes before theirs.

Nothing ever moves a group to a later step than that: what leaves the line (sealed, dropped) and what is moved
behind others only lowers the ranks of the rest. So the bound that was checked at the lease holds when the
group trains, nothing that was sampled has to be thrown away for its age, and which groups a batch has does
not depend on how long their completions are.
"""

from collections.abc import Sequence
from itertools import islice

from antiphon.core.config_sections import LoopSection
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.run_state import RunState
from antiphon.core.loop.staleness import VersionWindow


def training_step(state: RunState, group: GroupState, prompts_per_step: int) -> int:
    """Return the latest step at which a living training group of elastic mode can train."""
    return state.batches + state.places()[group.group_id] // prompts_per_step


def window_of(state: RunState, loop: LoopSection, group: GroupState) -> VersionWindow:
    """Return the versions that may sample a living group: exactly one for all of fixed mode, for held-out
    prompts and for requests that name one, else every one that is new enough for the request, or for the step
    of the group's place."""
    if group.version is not None:
        return VersionWindow(group.version, group.version)
    if group.request is not None:
        return VersionWindow(group.oldest_wanted)
    return VersionWindow(training_step(state, group, loop.prompts_per_step) - loop.max_staleness)


def groups_of_step(state: RunState, loop: LoopSection, step: int) -> list[GroupState]:
    """Return the living groups that a step without a batch would train on, in order; fewer than P while more
    may be opened."""
    if loop.mode == "fixed":
        return state.of_step(step)
    # Steps that have no batch get one in their order.
    first = loop.prompts_per_step * sum(1 for other in state.unsealed_steps() if other < step)
    return list(islice(state.training(), first, first + loop.prompts_per_step))


def last_step(group: GroupState, max_staleness: int) -> int | None:
    """Return the last step at which a group may train; None before anything was sampled for it."""
    match group.phase:
        case GroupPhase.OPEN:
            return None
        case GroupPhase.LEASED:
            return group.held_version + max_staleness
        case _:
            return group.oldest_version + max_staleness


def batch_size(
    line: Sequence[GroupState], step: int, prompts_per_step: int, wanted: int, max_staleness: int
) -> int:
    """Return how many groups of the front of the line the next batch must take, at least `wanted`.

    A batch of fewer than P groups (filter=refill at its limit) would move everyone behind it to a later
    step; it takes as many more as keep each within its bound.

    Args:
        line: the living training groups, in order.
        step: of the first place in the line.
        prompts_per_step: P, groups of a full batch.
        wanted: groups that the batch should have, 0..P.
        max_staleness: S, in policy versions.
    """
    size = wanted
    for rank, group in enumerate(line):
        last = last_step(group, max_staleness)
        # A group of rank r that is not taken trains at step + 1 + (r - size) // P.
        if last is not None:
            size = max(size, min(prompts_per_step, rank + 1 - prompts_per_step * max(0, last - step)))
    return size


def place_to_move_to(
    state: RunState, group: GroupState, prompts_per_step: int, last: int | None
) -> str | None:
    """Return the id of the group behind which one that held up its step is moved; None: it stays.

    It goes to the end of the line, or as far back as it may still train: `last` is the last step at which
    what is kept of it may train, None when it is begun again.
    """
    line = list(state.training())
    rank = state.places()[group.group_id]
    furthest = len(line) - 1
    if last is not None:
        furthest = min(furthest, (last - state.batches + 1) * prompts_per_step - 1)
    return line[furthest].group_id if furthest > rank else None
