"""Lease granter: what the gate allows is granted, and the others get the reason.

A call without work to give is held open until something changes, and returns early when the
worker should load another version first.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable
from functools import partial

from antiphon.core.checks import MOST_PLACES, check_number
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
from antiphon.services.coordinator.fleet import Member
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.run_state_machine import RunStateMachine

REMIND_S = 0.2
"""How long a worker that was already asked to load another version is held before it is asked again."""


class LeaseGranter:
    """Grants leases to workers."""

    def __init__(self, state_machine: RunStateMachine, held_back: Callable[[str], str]) -> None:
        """`held_back` returns why a worker, by its name, gets no lease at the moment; "" when it may."""
        self._state_machine = state_machine
        self._held_back = held_back
        self._config, self._state = state_machine.config, state_machine.state
        self._fleet, self._leases = state_machine.fleet, state_machine.leases
        self._waiting: tuple[int | None, float] = None, 0.0
        """Version whose held-out prompts wait, and since when, or since a worker went back for them."""

    async def lease(self, request: LeaseRequest, wait_s: float) -> LeaseReply:
        """Grant up to `request.groups` leases, waiting up to `wait_s` for the first.

        The call also returns, with nothing, when the worker should load another version first.
        """
        state_machine = self._state_machine
        deadline = state_machine.clock() + wait_s
        reminded = False
        asking = self._fleet.get(request.worker_id)
        if asking is not None:
            check_number("groups of a request for leases", request.groups, MOST_PLACES)
            acceptance.check_held_version(self._state, request.worker_id, request.held_version)
            asking.seen_s = state_machine.clock()
            if self._fleet.holds(asking, request.held_version):
                state_machine.loaded(asking)
        with state_machine.work.call(request.worker_id) as call:
            while True:
                state_machine.check_open()
                member, now = self._fleet.get(request.worker_id), state_machine.clock()
                if member is None:
                    return self._no_lease(f"worker {request.worker_id!r} is not registered; register again")
                if member.held_version != request.held_version:
                    return self._no_lease("the worker has loaded another version; ask again with that")
                # What others of its requests were granted meanwhile counts too.
                held_back = self._held_back(member.name)
                wanted = self._wanted(member)
                goes_back = wanted is not None and wanted < (request.held_version or 0)
                groups = 0 if held_back or goes_back else self._most_groups(member, request.groups)
                plan = admission.plan_leases(
                    self._state,
                    self._config,
                    request.held_version,
                    groups,
                    # Only fixed mode asks who else could do a group.
                    self._fleet.held_elsewhere(request.worker_id)
                    if self._config.loop.mode == "fixed"
                    else (),
                    *self._openings(member),
                )
                if not groups and (seconds := self._leases.engines.stands_still_s(member.worker_id)):
                    reason = f"the engine of {member.worker_id} has brought no token for {seconds:.1f} s"
                    plan = dataclasses.replace(plan, reason=reason)
                if goes_back:
                    plan = dataclasses.replace(plan, reason=f"version {wanted} is to be evaluated")
                if held_back:
                    plan = dataclasses.replace(plan, reason=held_back)
                if plan.group_ids:
                    call.took(len(plan.group_ids))
                    return await self._grant(plan, request, now)
                if groups > 0 and (group_id := self._duplicate(request, now)) is not None:
                    call.took(1)
                    return await self._grant_duplicate(group_id, request, now)
                # A version that is not announced yet cannot be loaded; its announcement ends the wait.
                if plan.wanted_version in self._state.snapshots:
                    wanted = plan.wanted_version
                versions = (self._state.newest_version, wanted)
                if self._state.finished or reminded or (member.sent_newest, member.sent_wanted) != versions:
                    member.sent_newest, member.sent_wanted = versions
                    return self._no_lease(plan.reason, wanted)
                reminded = self._should_load(wanted, request)
                pause_s = min(REMIND_S, deadline - now) if reminded else deadline - now
                if not await call.wait(pause_s) and not reminded:
                    return self._no_lease(plan.reason, wanted)

    def _openings(self, member: Member) -> tuple[int | None, admission.Ordering | None]:
        """Return how many groups may be opened for a worker without running ahead further than is of use, and
        how those are chosen that it is given; None: as they come."""
        planner, held = self._state_machine.planner, self._leases.count_of_worker(member.worker_id)
        plan, order, places = planner.plan, planner.order.order, self._config.loop.prompts_per_step
        room, unused = math.inf, math.inf
        if plan is not None:
            issued = self._state.batches * places + self._state.training_groups
            room = plan.room(issued, self._fleet.newest_held(), places)
            unused = max(0, plan.unused(member.concurrent_groups, held))
        if order is LeaseOrder.ARRIVAL:
            return (None if plan is None else int(min(unused, room))), None
        take = partial(planner.order.take, order, member.worker_id)
        return (None if plan is None else int(room)), admission.Ordering(take, unused)

    def _wanted(self, member: Member) -> int | None:
        """Return the version that a worker should sample with before any newer one, or None.

        When no other can sample held-out prompts any more, since all have gone on, one goes back; and another
        each time that those who could have left them lying for as long as a lease lasts.
        """
        if self._config.loop.mode == "fixed":
            return None
        evaluated = admission.version_to_evaluate(self._state, self._config)
        wanted, now = self._state_machine.version_wanted(member, evaluated), self._state_machine.clock()
        if evaluated != self._waiting[0]:
            self._waiting = evaluated, now
        if wanted == evaluated or not self._able(member):
            return wanted
        if now - self._waiting[1] <= self._config.coordinator.lease_s and any(
            self._state_machine.version_wanted(other, evaluated) == evaluated and self._able(other)
            for other in self._fleet.active()
        ):
            return wanted
        self._waiting = evaluated, now
        return evaluated

    def _able(self, member: Member) -> bool:
        stands_still = self._leases.engines.most_leases(member.worker_id) == 0
        return not (member.draining or member.swap_error or stands_still or self._held_back(member.name))

    def _most_groups(self, member: Member, groups: int) -> int:
        """Return how many of the groups that a worker asks for it may be given now."""
        if member.draining:
            return 0
        limits = (self._leases.engines.most_leases(member.worker_id), member.max_leases)
        held = self._leases.count_of_worker(member.worker_id)
        room = [most - held for most in limits if most is not None]
        return max(0, min([groups, *room]))

    def _should_load(self, wanted: int | None, request: LeaseRequest) -> bool:
        """Return whether only another version can help this worker, and it may load that now."""
        if self._config.loop.mode == "elastic":
            newest = self._state.newest_version
            return request.held_version != (newest if wanted is None else wanted)
        # In fixed mode what was begun under a version ends under it.
        return wanted is not None and not self._leases.of_worker(request.worker_id)

    def _no_lease(self, reason: str, wanted: int | None = None) -> LeaseReply:
        return LeaseReply((), reason, self._state.newest_version, wanted, self._state.finished)

    async def _grant(self, plan: admission.LeasePlan, request: LeaseRequest, now: float) -> LeaseReply:
        state_machine = self._state_machine
        worker_id, held_version = request.worker_id, request.held_version or 0
        granted, gone = [], []
        groups = self._state.groups
        prefixes = {group_id: self._prefix(group_id, held_version) for group_id in plan.group_ids}
        plan = self._page(plan, prefixes)
        attempts = {g: groups[g].attempt for g in plan.group_ids if g in groups}
        for group_id in plan.group_ids:
            attempt = attempts.get(group_id, 0) + 1
            lease_id = admission.lease_id_of(state_machine.lease_key, group_id, attempt)
            prefix = prefixes[group_id]
            oldest = held_version if prefix is None else min(held_version, prefix.oldest_version)
            continued = 0 if prefix is None else prefix.tokens
            granted.append(e.LeaseGranted(group_id, lease_id, worker_id, attempt, oldest, now, continued))
            if prefix is None and self._leases.partial_groups.waiting(group_id) is not None:
                gone.append(payloads.prefix_name(group_id))
        written = state_machine.record(*plan.openings, *granted, forget=gone)
        leases = []
        for grant in granted:
            prefix = prefixes[grant.group_id]
            self._leases.begin(grant.lease_id, groups[grant.group_id], worker_id, now, prefix)
            leases.append(self._lease(grant.group_id, grant.lease_id, grant.attempt, prefix))
        if (waiting := len({opening.group_id for opening in plan.openings} - set(plan.group_ids))) > 0:
            state_machine.offer(waiting)
        return await self._answer(leases, request, written)

    def _page(self, plan: admission.LeasePlan, prefixes: dict[str, KeptGroup | None]) -> admission.LeasePlan:
        """Return as much of a plan as one message carries; the worker asks again for the rest."""
        if len(plan.group_ids) == 1:
            return plan

        def size(group_id: str) -> int:
            group, prefix = self._state.groups.get(group_id), prefixes[group_id]
            samples = self._config.loop.group_size if group is None else group.samples
            tokens = 0 if prefix is None else prefix.tokens
            return group_bytes(samples, tokens, self._config.rollout.max_model_tokens)

        taken = page(plan.group_ids, size)
        # Those behind the last one that it is given may wait, but never one before it: places have no gaps.
        last = max((i for i, opening in enumerate(plan.openings) if opening.group_id in taken), default=-1)
        openings = plan.openings[: last + 1]
        return dataclasses.replace(plan, group_ids=tuple(taken), openings=openings)

    def _prefix(self, group_id: str, held_version: int) -> KeptGroup | None:
        """Return what the next lease of a group continues from; None where it begins from nothing."""
        kept, group = self._leases.partial_groups.waiting(group_id), self._state.groups.get(group_id)
        if kept is None or group is None or not self._usable(kept, held_version):
            return None
        window = window_of(self._state, self._config.loop, group)
        return kept if window.admits(kept.oldest_version) else None

    def _usable(self, kept: KeptGroup, held_version: int) -> bool:
        """Return whether a worker that holds a version may go on with what others sampled."""
        barred = any(self._state.barred(name_of_worker(author)) for author in kept.authors())
        return kept.continued_by(held_version) and not barred

    def _duplicate(self, request: LeaseRequest, now: float) -> str | None:
        remembered = self._state_machine.planner.order.predict

        def sooner(group: GroupState) -> bool:
            return self._leases.ends_sooner_at(request.worker_id, group, remembered(group.prompt_index), now)

        return speculation.group_to_duplicate(
            self._state,
            self._config,
            worker_id=request.worker_id,
            held_version=request.held_version,
            holders={member.worker_id: member.held_version for member in self._fleet.living()},
            numerics={member.worker_id: member.numerics for member in self._fleet.living()},
            ages_s=self._leases.ages_s(now),
            slow_s=self._leases.times.slow_s,
            sooner=sooner,
        )

    async def _grant_duplicate(self, group_id: str, request: LeaseRequest, now: float) -> LeaseReply:
        """Lease a group a second time, from what its first holder last reported."""
        state_machine = self._state_machine
        group = self._state.groups[group_id]
        prefix, attempt = self._leases.partial_groups.snapshot(group.lease_id), group.attempt + 1
        if prefix is not None and not self._usable(prefix, request.held_version or 0):
            prefix = None
        lease_id = admission.lease_id_of(state_machine.lease_key, group_id, attempt)
        continued = 0 if prefix is None else prefix.tokens
        event = e.LeaseDuplicated(group_id, lease_id, request.worker_id, attempt, now, continued)
        written = state_machine.record(event)
        self._leases.begin(lease_id, group, request.worker_id, now, prefix)
        # Pinned in elastic mode too: the worker must not swap, or the two could part.
        lease = self._lease(group_id, lease_id, attempt, prefix)
        return await self._answer(
            [dataclasses.replace(lease, version=request.held_version)], request, written
        )

    def _lease(self, group_id: str, lease_id: str, attempt: int, prefix: KeptGroup | None) -> Lease:
        config, group = self._config, self._state.groups[group_id]
        return Lease(
            lease_id=lease_id,
            group_id=group_id,
            prompt=self._state_machine.prompts.prompt(group.split, group.prompt_index),
            epoch=group.epoch,
            seeds=self._state_machine.seeds(group),
            sampling=admission.sampling_of(config, group),
            version=group.version,
            duration_s=config.coordinator.lease_s,
            attempt=attempt,
            prefix=() if prefix is None else prefix.pieces(),
        )

    async def _answer(
        self, leases: list[Lease], request: LeaseRequest, written: "asyncio.Future[None]"
    ) -> LeaseReply:
        state_machine = self._state_machine
        try:
            if request.wants_history:
                leases = await state_machine.archive.attach(leases)
            await written
        except asyncio.CancelledError:
            # The worker hung up and will never get these.
            for lease in leases:
                held = self._leases.get(lease.lease_id)
                if held is not None:
                    state_machine.take_back(held, "the worker hung up")
            raise
        member = self._fleet.get(request.worker_id)
        wanted = None if member is None else state_machine.tell(member)
        return LeaseReply(tuple(leases), "", self._state.newest_version, wanted, self._state.finished)
