"""Lease counter: what the gate allows is granted, and who cannot be served is told why.

A call without work to give is held open until something changes, and returns early when the
worker should load another version first.
"""

import asyncio
import dataclasses

from antiphon.core.loop import admission, speculation
from antiphon.core.loop import events as e
from antiphon.core.loop.partials import KeptGroup
from antiphon.core.records import Lease
from antiphon.services.coordinator.api import LeaseReply, LeaseRequest
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.run_state_machine import RunStateMachine

REMIND_S = 0.2
"""How long a worker that was already told to load another version is held before it is told again."""


class LeaseGranter:
    """Grants leases to workers."""

    def __init__(self, state_machine: RunStateMachine) -> None:
        self._state_machine = state_machine

    async def lease(self, request: LeaseRequest, wait_s: float) -> LeaseReply:
        """Grant up to `request.groups` leases, waiting up to `wait_s` for the first.

        The call also returns, with nothing, when the worker should load another version first.
        """
        state_machine = self._state_machine
        deadline = state_machine.clock() + wait_s
        reminded = False
        asking = state_machine.fleet.get(request.worker_id)
        if asking is not None:
            asking.seen_s = state_machine.clock()
            if state_machine.fleet.holds(asking, request.held_version):
                state_machine.loaded(asking)
        while True:
            state_machine.check_open()
            member, now = state_machine.fleet.get(request.worker_id), state_machine.clock()
            if member is None:
                return self._no_lease(f"worker {request.worker_id!r} is not registered; register again")
            if member.held_version != request.held_version:
                return self._no_lease("the worker has loaded another version; ask again with that")
            plan = admission.plan_leases(
                state_machine.state,
                state_machine.config,
                request.held_version,
                max(0, request.groups),
                # Only fixed mode asks who else could do a group.
                state_machine.fleet.held_elsewhere(request.worker_id)
                if state_machine.config.loop.mode == "fixed"
                else (),
            )
            if plan.group_ids:
                return await self._grant(plan, request, now)
            if request.groups > 0 and (group_id := self._duplicate(request, now)) is not None:
                return await self._grant_duplicate(group_id, request, now)
            # A version that is not announced yet cannot be loaded; its announcement ends the wait.
            wanted = plan.wanted_version if plan.wanted_version in state_machine.state.snapshots else None
            told = (state_machine.state.newest_version, wanted)
            if state_machine.state.finished or reminded or (member.told_newest, member.told_wanted) != told:
                member.told_newest, member.told_wanted = told
                return self._no_lease(plan.reason, wanted)
            reminded = self._should_load(wanted, request)
            patience_s = min(REMIND_S, deadline - now) if reminded else deadline - now
            if not await state_machine.work.wait(patience_s) and not reminded:
                return self._no_lease(plan.reason, wanted)

    def _should_load(self, wanted: int | None, request: LeaseRequest) -> bool:
        """Tell whether only another version can help this worker, and it may load that now."""
        if self._state_machine.config.loop.mode == "elastic":
            return self._state_machine.state.newest_version != request.held_version
        # In fixed mode what was begun under a version ends under it.
        return wanted is not None and not self._state_machine.leases.of_worker(request.worker_id)

    def _no_lease(self, reason: str, wanted: int | None = None) -> LeaseReply:
        state = self._state_machine.state
        return LeaseReply((), reason, state.newest_version, wanted, state.finished)

    async def _grant(self, plan: admission.LeasePlan, request: LeaseRequest, now: float) -> LeaseReply:
        state_machine = self._state_machine
        worker_id, held_version = request.worker_id, request.held_version or 0
        granted, gone = [], []
        prefixes = {group_id: state_machine.prefix(group_id) for group_id in plan.group_ids}
        attempts = {
            g: state_machine.state.groups[g].attempt
            for g in plan.group_ids
            if g in state_machine.state.groups
        }
        for group_id in plan.group_ids:
            attempt = attempts.get(group_id, 0) + 1
            lease_id = admission.lease_id_of(state_machine.run_id, group_id, attempt)
            prefix = prefixes[group_id]
            oldest = held_version if prefix is None else min(held_version, prefix.oldest_version)
            continued = 0 if prefix is None else prefix.tokens
            granted.append(e.LeaseGranted(group_id, lease_id, worker_id, attempt, oldest, now, continued))
            if prefix is None and state_machine.partial_groups.waiting(group_id) is not None:
                gone.append(payloads.prefix_name(group_id))
        written = state_machine.record(*plan.openings, *granted, forget=gone)
        leases = []
        for grant in granted:
            state_machine.leases.grant(grant.lease_id, grant.group_id, worker_id, now)
            prefix = prefixes[grant.group_id]
            samples = state_machine.state.groups[grant.group_id].samples
            state_machine.partial_groups.begin(grant.lease_id, grant.group_id, samples, prefix)
            leases.append(self._lease(grant.group_id, grant.lease_id, grant.attempt, prefix))
        return await self._answer(leases, request, written)

    def _duplicate(self, request: LeaseRequest, now: float) -> str | None:
        state_machine = self._state_machine
        if state_machine.lease_times.slow_s is None:
            return None
        return speculation.group_to_duplicate(
            state_machine.state,
            state_machine.config,
            worker_id=request.worker_id,
            held_version=request.held_version,
            holders={member.worker_id: member.held_version for member in state_machine.fleet.living()},
            ages_s=state_machine.leases.ages_s(now),
            slow_s=state_machine.lease_times.slow_s,
        )

    async def _grant_duplicate(self, group_id: str, request: LeaseRequest, now: float) -> LeaseReply:
        """Lease a group a second time, from where its first holder was last heard of."""
        state_machine = self._state_machine
        group = state_machine.state.groups[group_id]
        prefix, attempt = state_machine.partial_groups.snapshot(group.lease_id), group.attempt + 1
        lease_id = admission.lease_id_of(state_machine.run_id, group_id, attempt)
        continued = 0 if prefix is None else prefix.tokens
        event = e.LeaseDuplicated(group_id, lease_id, request.worker_id, attempt, now, continued)
        written = state_machine.record(event)
        state_machine.leases.grant(lease_id, group_id, request.worker_id, now)
        state_machine.partial_groups.begin(lease_id, group_id, group.samples, prefix)
        # Pinned in elastic mode too: the worker must not swap, or the two could part.
        lease = self._lease(group_id, lease_id, attempt, prefix)
        return await self._answer(
            [dataclasses.replace(lease, version=request.held_version)], request, written
        )

    def _lease(self, group_id: str, lease_id: str, attempt: int, prefix: KeptGroup | None) -> Lease:
        state_machine, config = self._state_machine, self._state_machine.config
        group = state_machine.state.groups[group_id]
        return Lease(
            lease_id=lease_id,
            group_id=group_id,
            prompt=state_machine.prompts.prompt(group.split, group.prompt_index),
            epoch=group.epoch,
            seeds=state_machine.seeds(group),
            sampling=config.sampling.parameters(),
            version=group.version if config.loop.mode == "fixed" else None,
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
            # The worker hung up and will never hear of these.
            for lease in leases:
                held = state_machine.leases.get(lease.lease_id)
                if held is not None:
                    state_machine.take_back(held, "the worker hung up")
            raise
        return LeaseReply(
            tuple(leases), "", state_machine.state.newest_version, None, state_machine.state.finished
        )
