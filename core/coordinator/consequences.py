"""Consequences: what follows: groups offered again or dropped, leases that end, workers lost and shut out."""

from collections.abc import Callable, Collection
from functools import partial

from antiphon.core.checks import check_piece
from antiphon.core.coordinator.fleet import Member
from antiphon.core.coordinator.loop_state import (
    LONGEST_REASON,
    Decision,
    Forget,
    Keep,
    LoopState,
    prefix_name,
)
from antiphon.core.loop import acceptance, admission, assembly
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.leases import HeldLease
from antiphon.core.loop.partials import KeptGroup, false_author
from antiphon.core.loop.places import place_to_move_to
from antiphon.core.loop.turns import check_answered
from antiphon.core.records import PartialTrajectory
from antiphon.core.trust.reputation import quarantine_reason


def settle(loop: LoopState) -> Decision[None]:
    """Drop the groups that no batch can use any more, and open those that steps need in their place."""
    keeps = loop.config.record.samples > 0
    for dropped in assembly.dropped(loop.run, loop.config, loop.sealing):
        yield dropped
        # Filtered groups stay readable beside the batch that books them, so until then their payloads stay.
        if not (keeps and dropped.reason == "filtered"):
            yield Forget((dropped.group_id,))
    for step in loop.run.unsealed_steps():
        yield from admission.refills(loop.run, loop.config, step)


def take_back(
    loop: LoopState, held: HeldLease, reason: str, now: float, hung: bool = False, discard: bool = False
) -> Decision[None]:
    """End a lease without a submission; its group is offered again, with what is kept of it.

    `hung`: its worker's engine stood still. `discard`: what is kept cannot be used, and is forgotten.
    """
    leases, group = loop.leases, loop.run.groups.get(held.group_id)
    of_group = group is not None and held.lease_id in (group.lease_id, group.twin_lease_id)
    if group is None or group.phase is not GroupPhase.LEASED or not of_group:
        leases.stop(held.lease_id)
        return
    silent_s = leases.silent_s(held, now)
    if hung:
        silent_s = max(silent_s, leases.engines.stands_still_s(held.worker_id))
    kept = None if discard or group.twin_lease_id else leases.partial_groups.snapshot(held.lease_id)
    yield e.LeaseExpired(
        group_id=held.group_id,
        lease_id=held.lease_id,
        worker_id=held.worker_id,
        reason=reason,
        at_s=now,
        tokens=leases.wasted_tokens(group, held.lease_id),
        kept=0 if kept is None else kept.tokens,
        silent_s=silent_s,
        hung=hung,
    )
    if kept is not None:
        yield Keep(prefix_name(held.group_id), kept)
    if discard:
        yield Forget((prefix_name(held.group_id),))
    if hung and group.group_id in loop.run.open_groups:
        yield from move_back(loop, group, None if kept is None else min(kept.versions, default=None))


def move_back(loop: LoopState, group: GroupState, oldest_version: int | None) -> Decision[None]:
    """Give the place of a group that holds up its step to those behind it.

    `oldest_version` is that of what was sampled for it so far, None if it is begun again.
    """
    section = loop.config.loop
    if group.version is not None or not group.trains:  # it trains at its own step, or not at all
        return
    last = None if oldest_version is None else oldest_version + section.max_staleness
    behind = place_to_move_to(loop.run, group, section.prompts_per_step, last)
    if behind is not None:
        yield e.GroupMovedBack(group.group_id, behind)


def begin_again(
    loop: LoopState, group: GroupState, lease_id: str, known: KeptGroup | None, now: float
) -> Decision[tuple[str, str] | None]:
    """End a lease whose tokens were refused, and forget what is kept of its group.

    `known` is what was kept of the group before. Where that cannot be either, those who also continue
    from it begin again too, and the result is (worker id, reason) of who sampled it; else None.
    """
    partials, check = loop.leases.partial_groups, check_of(loop, group)
    false = false_author(known, check)
    for running in (group.lease_id, group.twin_lease_id):
        held = loop.leases.get(running)
        if held is None:
            continue
        if running == lease_id or false_author(partials.snapshot(running), check) is not None:
            yield from take_back(loop, held, "what was sampled under it was refused", now, discard=True)
    if false_author(partials.waiting(group.group_id), check) is not None:
        partials.forget(group.group_id)
        yield Forget((prefix_name(group.group_id),))
    return false


def check_of(loop: LoopState, group: GroupState) -> Callable[[PartialTrajectory], None]:
    """Return what raises for a piece that no completion of a group can have."""
    limits = loop.limits_of(group)
    check_tokens = partial(
        check_piece,
        group_id=group.group_id,
        samples=group.samples,
        max_tokens=acceptance.max_tokens_of(loop.config, group),
        version=group.version,
        newest_version=acceptance.newest_possible_version(loop.run),
        rules=loop.rules_of(group),
        published=loop.run.snapshots,
        keeps_cache=loop.config.rollout.swap_cache == "keep",
        limits=limits,
    )
    if limits is None:
        return check_tokens

    def check(piece: PartialTrajectory) -> None:
        check_tokens(piece)
        if piece.start == 0:
            where = f"progress of group {group.group_id}, sample {piece.sample_index}"
            check_answered(piece, piece.sample_index, group.answers, where)

    return check


def lose(loop: LoopState, member: Member, reason: str, now: float) -> Decision[None]:
    """Count a worker as lost and offer its groups again."""
    yield e.WorkerLost(member.worker_id, reason, now)
    for held in loop.leases.of_worker(member.worker_id):
        yield from take_back(loop, held, f"worker lost: {reason}", now)


def lose_named(loop: LoopState, name: str, reason: str, now: float) -> Decision[None]:
    """Count the workers of a name as lost."""
    for member in loop.fleet.named(name):
        yield from lose(loop, member, reason, now)


def give_back(loop: LoopState, lease_ids: Collection[str], now: float) -> Decision[None]:
    """End leases that were granted to a worker which hung up before it heard of them."""
    for lease_id in lease_ids:
        if (held := loop.leases.get(lease_id)) is not None:
            yield from take_back(loop, held, "the worker hung up", now)


def overdue(loop: LoopState, now: float) -> Decision[None]:
    """Count those as lost who missed too many heartbeats, and end the leases without a sign of life."""
    for member in loop.fleet.silent(now):
        yield from lose(loop, member, f"no heartbeat for {now - member.seen_s:.1f} s", now)
    for held in loop.leases.expired(now):
        reason = f"no sign of life for {loop.config.coordinator.lease_s:g} s"
        yield from take_back(loop, held, reason, now)


def strike(
    loop: LoopState,
    name: str,
    group_id: str,
    check: str,
    reason: str,
    now: float,
    certain: bool = False,
    gross: int = 0,
) -> Decision[None]:
    """Count something against a worker, which it may lose its place for.

    `certain`: what was seen is proof by itself; `gross`: tokens far beyond rounding among it.
    """
    reason = reason[:LONGEST_REASON]
    yield e.WorkerStruck(name, group_id, check, reason, gross)
    quarantined = quarantine_reason(loop.run.standings[name], certain, reason)
    if quarantined is not None:
        yield e.WorkerQuarantined(name, quarantined)
        yield from lose_named(loop, name, f"in quarantine: {quarantined}", now)
        yield from settle(loop)  # what it sampled and no batch has yet does not train
