"""Leases: what a worker that asks is given, or why nothing."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial

from antiphon.core.checks import MOST_PLACES, check_number
from antiphon.core.coordinator.fleet import Member
from antiphon.core.coordinator.loop_state import Decision, Forget, LoopState, prefix_name
from antiphon.core.frozen import frozen
from antiphon.core.lengths.order import LeaseOrder
from antiphon.core.loop import acceptance, admission, speculation
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupState
from antiphon.core.loop.partials import KeptGroup
from antiphon.core.loop.places import window_of
from antiphon.core.message_sizes import group_bytes, page
from antiphon.core.records import Lease
from antiphon.core.requests import LeaseReply, LeaseRequest
from antiphon.core.trust.worker_names import name_of_worker


@frozen
class Wait:
    """There is nothing to lease now; the request waits for a change."""

    reply: LeaseReply
    """If nothing changes."""
    should_load: bool
    """Only another version can help this worker, so the wait is short."""


def grant(
    loop: LoopState, request: LeaseRequest, now: float, first: bool, reminded: bool
) -> Decision[LeaseReply | Wait]:
    """Grant up to `request.groups` leases.

    Args:
        loop: the run.
        request: what a worker asks for.
        now: seconds on the clock of the leases.
        first: it is looked at for the first time, so what it says of its worker is news.
        reminded: the worker was just asked to load another version.

    Raises:
        ContractError: when a number cannot be, or the version was never announced.
    """
    run, leases, member = loop.run, loop.leases, loop.fleet.get(request.worker_id)
    if member is None:
        return _nothing(loop, f"worker {request.worker_id!r} is not registered; register again")
    if first:
        check_number("groups of a request for leases", request.groups, MOST_PLACES)
        acceptance.check_held_version(run, request.worker_id, request.held_version)
        if loop.fleet.holds(member, request.held_version):
            yield e.WorkerLoaded(member.worker_id, request.held_version or 0)
    if member.held_version != request.held_version:
        return _nothing(loop, "the worker has loaded another version; ask again with that")
    # What others of its requests were granted meanwhile counts too.
    held_back = loop.held_back(member.name)
    if loop.config.client_driven:
        wanted, goes_back = loop.version_requested(member)
    else:
        wanted = _wanted(loop, member, now)
        goes_back = wanted is not None and wanted < (request.held_version or 0)
    groups = 0 if held_back or goes_back else _most_groups(loop, member, request.groups)
    # Only fixed mode asks who else could do a group.
    elsewhere = loop.fleet.held_elsewhere(member.worker_id) if loop.config.loop.mode == "fixed" else ()
    plan = admission.plan_leases(
        run, loop.config, request.held_version, groups, elsewhere, *_openings(loop, member)
    )
    if plan.group_ids and not (held_back or goes_back):
        return (yield from _grant(loop, plan, request, now))
    # A host answers one holder of a group.
    if groups > 0 and not loop.hosted and (group_id := _duplicate(loop, request, now)) is not None:
        return (yield from _grant_duplicate(loop, group_id, request, now))
    reason = plan.reason
    if not groups and (seconds := leases.engines.stands_still_s(member.worker_id)):
        reason = f"the engine of {member.worker_id} has brought no token for {seconds:.1f} s"
    if goes_back:
        told = "the newest version" if wanted is None else f"version {wanted}"
        reason = f"{told} is to be {'sampled' if loop.config.client_driven else 'evaluated'}"
    # A version that is not announced yet cannot be loaded; its announcement ends the wait.
    if plan.wanted_version in run.snapshots:
        wanted = plan.wanted_version
    versions = (run.newest_version, wanted)
    reply = _nothing(loop, held_back or reason, wanted)
    if run.finished or reminded or (member.sent_newest, member.sent_wanted) != versions:
        member.sent_newest, member.sent_wanted = versions
        return reply
    return Wait(reply, _should_load(loop, wanted, request))


def _nothing(loop: LoopState, reason: str, wanted: int | None = None) -> LeaseReply:
    return LeaseReply((), reason, loop.run.newest_version, wanted, loop.run.finished)


def _openings(loop: LoopState, member: Member) -> tuple[int | None, admission.Ordering | None]:
    """Return how many groups may be opened for a worker without running ahead further than is of use, and
    how those are chosen that it is given; None: as they come."""
    if loop.config.client_driven:
        return None, None
    planner, held = loop.planner, loop.leases.count_of_worker(member.worker_id)
    plan, order, places = planner.plan, planner.order.order, loop.config.loop.prompts_per_step
    room, unused = math.inf, math.inf
    if plan is not None:
        issued = loop.run.batches * places + loop.run.training_groups
        room = plan.room(issued, loop.fleet.newest_held(), places)
        unused = max(0, plan.unused(member.concurrent_groups, held))
    if order is LeaseOrder.ARRIVAL:
        return (None if plan is None else int(min(unused, room))), None
    take = partial(planner.order.take, order, member.worker_id)
    return (None if plan is None else int(room)), admission.Ordering(take, unused)


def _wanted(loop: LoopState, member: Member, now: float) -> int | None:
    """Return the version that a worker should sample with before any newer one, or None.

    When no other can sample held-out prompts any more, since all have gone on, one goes back; and another
    each time that those who could have left them lying for as long as a lease lasts.
    """
    if loop.config.loop.mode == "fixed":
        return None
    evaluated = admission.version_to_evaluate(loop.run, loop.config)
    wanted = loop.version_wanted(member, evaluated)
    if evaluated != loop.evaluation_waits[0]:
        loop.evaluation_waits = evaluated, now
    if wanted == evaluated or not loop.able(member):
        return wanted
    if now - loop.evaluation_waits[1] <= loop.config.coordinator.lease_s and any(
        loop.version_wanted(other, evaluated) == evaluated and loop.able(other)
        for other in loop.fleet.active()
    ):
        return wanted
    loop.evaluation_waits = evaluated, now
    return evaluated


def _most_groups(loop: LoopState, member: Member, groups: int) -> int:
    """Return how many of the groups that a worker asks for it may be given now."""
    if member.draining:
        return 0
    limits = (loop.leases.engines.most_leases(member.worker_id), member.max_leases)
    held = loop.leases.count_of_worker(member.worker_id)
    room = [most - held for most in limits if most is not None]
    return max(0, min([groups, *room]))


def _should_load(loop: LoopState, wanted: int | None, request: LeaseRequest) -> bool:
    """Return whether only another version can help this worker, and it may load that now."""
    if loop.config.loop.mode == "elastic":
        newest = loop.run.newest_version
        return request.held_version != (newest if wanted is None else wanted)
    # In fixed mode what was begun under a version ends under it.
    return wanted is not None and not loop.leases.of_worker(request.worker_id)


def _grant(
    loop: LoopState, plan: admission.LeasePlan, request: LeaseRequest, now: float
) -> Decision[LeaseReply]:
    groups, held_version = loop.run.groups, request.held_version or 0
    prefixes = {group_id: _prefix(loop, group_id, held_version) for group_id in plan.group_ids}
    plan = _page(loop, plan, prefixes)
    yield from plan.openings
    granted = []
    for group_id in plan.group_ids:
        attempt, prefix = groups[group_id].attempt + 1, prefixes[group_id]
        lease_id = admission.lease_id_of(loop.lease_key, group_id, attempt)
        if prefix is None and loop.leases.partial_groups.waiting(group_id) is not None:
            yield Forget((prefix_name(group_id),))
        oldest = min([held_version, *(() if prefix is None else prefix.versions)])
        continued = 0 if prefix is None else prefix.tokens
        yield e.LeaseGranted(group_id, lease_id, request.worker_id, attempt, oldest, now, continued)
        granted.append(_lease(loop, groups[group_id], lease_id, attempt, prefix))
    return LeaseReply(tuple(granted), "", None, None, False)


def _page(
    loop: LoopState, plan: admission.LeasePlan, prefixes: Mapping[str, KeptGroup | None]
) -> admission.LeasePlan:
    """Return as much of a plan as one message carries; the worker asks again for the rest."""
    if len(plan.group_ids) == 1:
        return plan

    def size(group_id: str) -> int:
        group, prefix = loop.run.groups.get(group_id), prefixes[group_id]
        samples = loop.config.loop.group_size if group is None else group.samples
        tokens = 0 if prefix is None else prefix.tokens
        return group_bytes(samples, tokens, loop.config.rollout.max_model_tokens)

    taken = page(plan.group_ids, size)
    # Those behind the last one that it is given may wait, but never one before it: places have no gaps.
    last = max((i for i, opening in enumerate(plan.openings) if opening.group_id in taken), default=-1)
    return dataclasses.replace(plan, group_ids=tuple(taken), openings=plan.openings[: last + 1])


def _prefix(loop: LoopState, group_id: str, held_version: int) -> KeptGroup | None:
    """Return what the next lease of a group continues from; None where it begins from nothing."""
    kept, group = loop.leases.partial_groups.waiting(group_id), loop.run.groups.get(group_id)
    if kept is None or group is None or not _usable(loop, kept, held_version):
        return None
    window = window_of(loop.run, loop.config.loop, group)
    return kept if all(map(window.admits, kept.versions)) else None


def _usable(loop: LoopState, kept: KeptGroup, held_version: int) -> bool:
    """Return whether a worker that holds a version may go on with what others sampled."""
    barred = any(loop.run.barred(name_of_worker(author)) for author in kept.authors())
    return kept.continued_by(held_version) and not barred


def _duplicate(loop: LoopState, request: LeaseRequest, now: float) -> str | None:
    remembered = loop.planner.order.predict

    def sooner(group: GroupState) -> bool:
        return loop.leases.ends_sooner_at(request.worker_id, group, remembered(group.prompt_index), now)

    return speculation.group_to_duplicate(
        loop.run,
        loop.config,
        worker_id=request.worker_id,
        held_version=request.held_version,
        holders={member.worker_id: member.held_version for member in loop.fleet.living()},
        numerics={member.worker_id: member.numerics for member in loop.fleet.living()},
        ages_s=loop.leases.ages_s(now),
        slow_s=loop.leases.times.slow_s,
        sooner=sooner,
    )


def _grant_duplicate(
    loop: LoopState, group_id: str, request: LeaseRequest, now: float
) -> Decision[LeaseReply]:
    """Lease a group a second time, from what its first holder last reported."""
    group = loop.run.groups[group_id]
    prefix, attempt = loop.leases.partial_groups.snapshot(group.lease_id), group.attempt + 1
    if prefix is not None and not _usable(loop, prefix, request.held_version or 0):
        prefix = None
    lease_id = admission.lease_id_of(loop.lease_key, group_id, attempt)
    continued = 0 if prefix is None else prefix.tokens
    yield e.LeaseDuplicated(group_id, lease_id, request.worker_id, attempt, now, continued)
    # Pinned in elastic mode too: the worker must not swap, or the two could part.
    lease = _lease(loop, group, lease_id, attempt, prefix)
    pinned = dataclasses.replace(lease, version=request.held_version)
    return LeaseReply((pinned,), "", None, None, False)


def _lease(
    loop: LoopState, group: GroupState, lease_id: str, attempt: int, prefix: KeptGroup | None
) -> Lease:
    prompt = loop.prompt_of(group)
    return Lease(
        lease_id=lease_id,
        group_id=group.group_id,
        prompt_key=prompt.key,
        prompt_token_ids=prompt.token_ids,
        epoch=group.epoch,
        seeds=loop.seeds(group),
        sampling=admission.sampling_of(loop.config, group),
        version=group.version,
        duration_s=loop.config.coordinator.lease_s,
        attempt=attempt,
        prefix=() if prefix is None else prefix.pieces(),
        limits=loop.limits_of(group),
    )
