"""Admission: which groups are opened, and to whom they are leased, decided from state alone.

Elastic mode opens groups in the order of the prompts while the gate and the window leave room: what is
in flight plus what was sealed are the reservations, and each group has a place in the line
(`core.loop.places`). Filtered groups give theirs back by ending; a group whose lease was lost keeps its own
and is offered again. Fixed mode opens the groups of a step as a function of (seed, step) and of which of
them turned out to lack variance, never of who was faster.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from antiphon.core.config import RunConfig
from antiphon.core.frozen import frozen
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.places import window_of
from antiphon.core.loop.run_state import RunState
from antiphon.core.loop.staleness import StalenessBound, oldest_allowed_version
from antiphon.core.records import SamplingParameters
from antiphon.core.seeds import derive_seed, prompt_order, refill_order, request_seeds


@frozen
class LeasePlan:
    """What a worker may be given now."""

    openings: tuple[e.GroupOpened, ...]
    """Groups to open first; their ids are in `group_ids` too."""
    group_ids: tuple[str, ...]
    reason: str
    """Why there is nothing, as a sentence; empty when there is something."""
    wanted_version: int | None
    """Fixed mode: the version to load for the lowest open work."""


@frozen
class Waiting:
    """A training group that a worker may be given."""

    group_id: str
    prompt_index: int
    step: int
    """At which it trains."""


@frozen
class Ordering:
    """How the groups are chosen that a worker is given, where not as they come."""

    take: Callable[[Sequence[Waiting], int], Sequence[int]]
    """Returns the places of up to this many groups, those to sample first before the others."""
    most: float
    """Training groups that the worker may be given now."""


@functools.lru_cache(maxsize=8)
def _epoch_order(run_seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    return prompt_order(run_seed, epoch, size)


def prompt_place(config: RunConfig, number: int) -> tuple[int, int]:
    """Return (prompt index, epoch) of the `number`-th training group of the run."""
    size = config.environment.train_size
    epoch, position = divmod(number, size)
    return int(_epoch_order(config.run.seed, epoch, size)[position]), epoch


def group_seeds(config: RunConfig, group: GroupState, prompt_key: str) -> tuple[int, ...]:
    """Return the sampler seeds of a group, one per sample; no lease or attempt takes part."""
    seed = config.run.seed
    if group.request is not None:
        return group.request.seeds
    if group.evaluation is not None:
        place = ("evaluation", seed, prompt_key, group.evaluation)
        return (derive_seed(*place), *(derive_seed(*place, index) for index in range(1, group.samples)))
    if group.refill:
        # A spare prompt may also be a primary one of the same epoch; it must not repeat its tokens. After
        # voided batches a step may come to the same prompt twice.
        repeated = (group.number,) if group.number >= config.environment.train_size else ()
        seed = derive_seed("refill", seed, group.step or 0, *repeated)
    return request_seeds(seed, prompt_key, group.epoch, group.samples)


def sampling_of(config: RunConfig, group: GroupState) -> SamplingParameters:
    """Return how a group is sampled: held-out prompts have keys of their own, and clients say it."""
    if group.request is not None:
        return group.request.sampling
    if group.evaluation is None:
        return config.sampling.parameters()
    return config.evaluation.parameters(config.sampling)


def lease_id_of(lease_key: bytes, group_id: str, attempt: int) -> str:
    """Return the fencing token of one attempt at a group, 32 hex digits.

    Without `lease_key`, the 32 bytes that the run keeps to itself, no one can work out another's.
    """
    return blake3(f"{group_id}/{attempt}".encode(), key=lease_key).hexdigest(length=16)


def fixed_limit(config: RunConfig) -> int:
    """Return the most groups that one batch of fixed mode may open."""
    places = config.loop.prompts_per_step
    if config.loop.filter != "refill":
        return places
    return min(int(places * config.loop.refill_limit), config.environment.train_size)


def fixed_openings(config: RunConfig, step: int, count: int) -> list[e.GroupOpened]:
    """Return the first `count` groups of `step` in index order: a function of (seed, step) alone.

    Those behind the first P are spare prompts: all that the step did not begin with, then, after many voided
    batches, the whole split again and again.
    """
    loop, size = config.loop, config.environment.train_size
    places = loop.prompts_per_step
    version = oldest_allowed_version(step, loop.max_staleness, loop.publish_interval)
    primary = [prompt_place(config, step * places + index) for index in range(places)]
    epoch = step * places // size
    wanted = max(0, count - places)
    spare = [(prompt, epoch) for prompt in itertools.islice(_spare(config, step, primary), wanted)]
    return [
        e.GroupOpened(
            group_id=f"s{step:06d}-g{index:03d}",
            number=index,
            prompt_index=prompt,
            epoch=epoch,
            step=step,
            version=version,
            refill=index >= places,
        )
        for index, (prompt, epoch) in enumerate([*primary, *spare][:count])
    ]


def _spare(config: RunConfig, step: int, primary: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the prompts behind those that a step begins with, for ever."""
    order = functools.partial(refill_order, config.run.seed, step, config.environment.train_size)
    yield from order([prompt for prompt, _ in primary]).tolist()
    yield from itertools.cycle(order([]).tolist())


def open_step(state: RunState, config: RunConfig, step: int) -> list[e.JournalEvent]:
    """Return what opening `step` and every step before it does; nothing when it is open."""
    found: list[e.JournalEvent] = []
    for number in range(state.opened_steps, step + 1):
        found.append(e.StepOpened(number))
        if config.loop.mode == "fixed":
            found.extend(fixed_openings(config, number, config.loop.prompts_per_step))
    return found


def refills(state: RunState, config: RunConfig, step: int) -> list[e.GroupOpened]:
    """Return the spare groups that `step` of fixed mode needs now (minimal prefix rule).

    The step takes the first P groups with variance in index order. As soon as a group of the
    prefix is known to lack variance the prefix grows by one, and never for another reason, so
    which groups it ends with does not depend on the order in which they finish.
    """
    if config.loop.mode != "fixed" or config.loop.filter != "refill":
        return []
    opened, spent = state.of_step(step), len(state.sealed_groups.get(step, ()))
    lacking = sum(1 for group in opened if group.phase is GroupPhase.REWARDED and not group.varied)
    wanted = min(config.loop.prompts_per_step + lacking, fixed_limit(config))
    if wanted <= len(opened):
        return []
    return fixed_openings(config, step, spent + wanted)[spent + len(opened) :]


def plan_leases(
    state: RunState,
    config: RunConfig,
    held_version: int | None,
    groups: int,
    held_elsewhere: Collection[int] = (),
    openings: int | None = None,
    ordering: Ordering | None = None,
) -> LeasePlan:
    """Decide what a worker may be given: one that samples with `held_version`, None before its first.

    Conversations that have begun come first, then evaluations. `groups`, the most that it can take, counts
    whole groups of `loop.group_size` samples; an evaluation lease has `evaluation.samples` and counts as
    that share of a group, also where it is more than one: then the worker takes it alone and samples some
    later. `held_elsewhere` are the versions that other living workers hold. Elastic mode opens at most
    `openings` new groups (`core.capacity.run_ahead`); None: as many as the gate allows. With an `ordering`
    it opens them all at once, in the order of the prompts, so that their places are what they are in the
    order of arrival, and leases some of them.
    """
    if state.finished:
        return LeasePlan((), (), "the run is finished", None)
    if state.paused_reason:
        return LeasePlan((), (), f"the run is paused: {state.paused_reason}", None)
    if config.client_driven:
        return _plan_requests(state, config, held_version, groups)
    if config.loop.mode == "fixed":
        return _plan_fixed(state, config, held_version, groups, held_elsewhere, ordering)
    return _plan_elastic(state, config, held_version, groups, openings, ordering)


def kept_until(config: RunConfig, version: int) -> int:
    """Return the newest version beside which the snapshot of `version` is still kept everywhere."""
    return version + (config.broadcast.snapshots_kept - 1) * config.loop.publish_interval


def version_to_evaluate(state: RunState, config: RunConfig) -> int | None:
    """Return the oldest version with held-out prompts that wait for a worker which holds exactly that one."""
    if not state.evaluating or state.newest_version is None:
        return None
    waiting = {group.evaluation for group in state.open_groups.values() if group.evaluation is not None}
    newest = state.newest_version
    return min((v for v in waiting if v in state.snapshots and newest <= kept_until(config, v)), default=None)


def _steps_beside_evaluations(state: RunState, config: RunConfig) -> float:
    """Return how many steps may train before the evaluations at hand are handed in.

    More would push the snapshot out that is evaluated, and a worker that lost it could not fetch it again.
    """
    if not state.evaluating:
        return math.inf
    sampled = (GroupPhase.OPEN, GroupPhase.LEASED)
    versions = {group.evaluation for group in state.groups.values() if group.phase in sampled} - {None}
    limits = (kept_until(config, version) for version in versions if version is not None)
    return min((limit for limit in limits if (state.newest_version or 0) <= limit), default=math.inf)


def _pack(candidates: list[GroupState], groups: int, group_size: int) -> tuple[list[str], int]:
    """Take groups until `groups` * `group_size` samples are used; return ids and samples left.

    A group of more samples than that is taken alone.
    """
    left = groups * group_size
    taken: list[str] = []
    for group in candidates:
        if group.samples > left and (taken or not groups):
            break
        left -= group.samples
        taken.append(group.group_id)
    return taken, max(0, left)


def _plan_requests(state: RunState, config: RunConfig, held: int | None, groups: int) -> LeasePlan:
    """Lease requests of clients, the oldest first."""
    waiting = state.open_groups.values()
    mine = [g for g in waiting if held is not None and window_of(state, config.loop, g).admits(held)]
    taken, _ = _pack(sorted(mine, key=lambda group: group.number), groups, config.loop.group_size)
    reason = "" if taken else f"{len(waiting)} requests of clients wait, and {len(mine)} of them for {held}"
    return LeasePlan((), tuple(taken), reason, None)


def _plan_elastic(
    state: RunState,
    config: RunConfig,
    held: int | None,
    groups: int,
    most: int | None,
    ordering: Ordering | None,
) -> LeasePlan:
    if held is None:
        return LeasePlan((), (), "the worker holds no weights yet", None)
    loop = config.loop
    places, bound = loop.prompts_per_step, StalenessBound(loop.max_staleness)
    first = state.batches * places
    ranks = state.places() if state.open_groups else {}
    candidates = [group for group in state.open_groups.values() if window_of(state, loop, group).admits(held)]
    candidates.sort(key=lambda group: (*_first(group), ranks.get(group.group_id, 0)))
    kept = [] if ordering is None else [group for group in candidates if _first(group) == _LAST]
    taken, left = _pack(candidates[: len(candidates) - len(kept)], groups, loop.group_size)
    issued = first + state.training_groups
    room = min(bound.room(held, issued, places), max(0, state.opened_steps * places - issued))
    if most is not None:
        # The learner waits for a batch that was voided, whatever is in flight behind it.
        room = min(room, max(most, len(state.reopened) * places - state.training_groups))
    beside = _steps_beside_evaluations(state, config)
    room = int(min(room, max(0, beside * places - issued)))
    if ordering is None:
        room = min(room, left // loop.group_size)
    openings = []
    for number in range(state.next_number, state.next_number + room):
        prompt, epoch = prompt_place(config, number)
        openings.append(
            e.GroupOpened(f"g{number:07d}", number, prompt, epoch, step=None, version=None, refill=False)
        )
    if ordering is None:
        ids = (*taken, *(opening.group_id for opening in openings))
    else:
        waiting = [Waiting(g.group_id, g.prompt_index, (first + ranks[g.group_id]) // places) for g in kept]
        waiting += [
            Waiting(opening.group_id, opening.prompt_index, (issued + index) // places)
            for index, opening in enumerate(openings)
        ]
        ids = (*taken, *_ordered(waiting, ordering, left // loop.group_size))
    reason = "" if ids else _why_elastic(state, bound, held, issued, places, beside)
    return LeasePlan(tuple(openings), ids, reason, None)


_LAST = (True, True, 0)
"""Of a training group whose conversations have not begun."""


def _first(group: GroupState) -> tuple[bool, bool, int]:
    """Return what decides before all else which groups are leased first.

    Those whose conversations have begun: a host may be busy with them, and answer no others before their end.
    Then evaluations, those of the oldest version first.
    """
    return (not group.answers, group.evaluation is None, group.evaluation or 0)


def _ordered(waiting: Sequence[Waiting], ordering: Ordering, most: int) -> list[str]:
    """Return the ids of the groups that a worker is given, which has room for `most`."""
    taken = ordering.take(waiting, int(min(most, ordering.most)))
    return [waiting[place].group_id for place in taken]


def _why_elastic(
    state: RunState, bound: StalenessBound, held: int, issued: int, places: int, beside: float
) -> str:
    if issued >= beside * places:
        return f"step {issued // places} waits for an evaluation, whose snapshot would not be kept after it"
    if issued >= state.opened_steps * places:
        return f"all groups of the {state.opened_steps} opened steps are issued; the next is not open yet"
    if bound.room(held, issued, places):
        return "what is in flight keeps the learner busy; more groups would only become staler"
    return (
        f"the next group would train at step {issued // places}, beyond the bound of "
        f"{bound.max_staleness} for version {held}; load a newer snapshot"
    )


def _plan_fixed(
    state: RunState,
    config: RunConfig,
    held: int | None,
    groups: int,
    held_elsewhere: Collection[int],
    ordering: Ordering | None,
) -> LeasePlan:
    waiting = list(state.open_groups.values())
    if not waiting:
        return LeasePlan((), (), "all groups of the opened steps are issued", None)
    lowest = min(group.version or 0 for group in waiting)
    if held != lowest and lowest not in held_elsewhere:
        # No one else can do the oldest work, and the learner waits for that first.
        return LeasePlan((), (), f"the next open group needs version {lowest}", lowest)
    beside = _steps_beside_evaluations(state, config)
    mine = [group for group in waiting if group.version == held and (group.step or 0) < beside]
    mine.sort(key=lambda group: (*_first(group), group.step or 0, group.number))
    if ordering is None:
        taken, _ = _pack(mine, groups, config.loop.group_size)
    else:
        before = [group for group in mine if _first(group) != _LAST]
        taken, left = _pack(before, groups, config.loop.group_size)
        rest = [Waiting(g.group_id, g.prompt_index, g.step or 0) for g in mine[len(before) :]]
        taken += _ordered(rest, ordering, left // config.loop.group_size)
    if not taken:
        return LeasePlan((), (), f"no open group needs version {held}", lowest if not mine else None)
    return LeasePlan((), tuple(taken), "", None)
