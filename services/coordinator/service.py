"""Coordinator service: the contract's behaviour over the journal; it knows no gRPC.

Each call runs a decision of `core.coordinator` and answers when what it did is on the disk. Calls that wait
are woken by what happens and never held longer than asked.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog

from antiphon.api.coordinator import Coordinator, KitPart
from antiphon.core.client_records import SampledReply, SampleRequest
from antiphon.core.coordinator import client_groups, consequences, groups, leases, steps, turns, workers
from antiphon.core.coordinator.loop_state import Decision, manifest_name
from antiphon.core.coordinator.overview import explained, stage_reply, status_of
from antiphon.core.dissemination.plan import TransferPlan
from antiphon.core.dissemination.transfers import FROM_ORIGIN
from antiphon.core.errors import ContractError
from antiphon.core.loop import assembly
from antiphon.core.loop.group_state import CLIENT_GROUP, Tally
from antiphon.core.records import (
    BatchRef,
    GroupRewards,
    GroupSubmission,
    GroupToAudit,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
    TurnAnswer,
    TurnToAnswer,
)
from antiphon.core.requests import (
    CommitsReply,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    PullReply,
    StageReply,
    TurnReply,
    TurnRequest,
    WorkerHeartbeat,
    WorkerHello,
    WorkerWelcome,
)
from antiphon.core.status import Event, RunStatus, WorkerOrder
from antiphon.core.trust.audit import SampleStatistics
from antiphon.core.voided_batch import VoidedBatch
from antiphon.net.worker_kit import kit_part
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.sealing import seal_batch
from antiphon.system.wakeup import wait_any
from antiphon.weights.signature import check_signature

MAX_WAIT_S = 30.0
"""Longest a call is held open."""
REMIND_S = 0.2
"""How long a worker that was already asked to load another version is held before it is asked again."""
GATHER_S = 0.15
"""How long a reward service's call waits for more groups after the first, unless the next batch needs nothing
but rewards: groups come in one by one, and a call for each cost both sides more than the scoring."""
GATHER_LOOK_S = 0.05
"""How often it is looked meanwhile."""
FINISHED_WAIT_S = 1.0
"""How long a reward service that asks after the end is held, so that it cannot ask in a tight loop."""
FOLLOW_CHECK_S = 5.0
"""Longest that a follower of events sleeps before it looks whether the run is over."""
EVENTS_PER_READ = 500
PAGE_BYTES = 1 << 20
"""A page of commits or events is sent once it is about so large."""
_COMMIT_BYTES, _METRIC_BYTES, _EVENT_BYTES = 200, 16, 60

_log = structlog.get_logger("coordinator")


class CoordinatorService(Coordinator):
    """The data plane of one run."""

    def __init__(
        self,
        state_machine: RunStateMachine,
        learner_key: bytes = b"",
        audits: AuditQueue | None = None,
        kit: Path | None = None,
    ) -> None:
        """Serve a run.

        `learner_key` is empty where no manifest is signed, `audits` None without audits, `kit` the file of
        the worker kit, None where workers have the model's folder.
        """
        self.state_machine, self._loop = state_machine, state_machine.loop
        self._config, self._state = state_machine.config, state_machine.state
        self._learner_key = learner_key
        self._audits = audits
        self._kit = kit
        if audits is not None:
            self._loop.held_back = audits.holds_back

    async def register(self, hello: WorkerHello) -> WorkerWelcome:
        machine = self.state_machine
        machine.check_open()
        now, wall_s = machine.clock(), machine.journal.wall_clock()
        try:
            return await machine.do(workers.register(self._loop, hello, now, wall_s, self._learner_key))
        except ContractError:
            await machine.written()  # the end of an order, where it was turned away for its device
            raise

    def speaks(self, worker_id: str, streams: int) -> None:
        """Hear that a worker speaks on one more stream (1), or that one of them has ended (-1)."""
        if (member := self._loop.fleet.get(worker_id)) is not None:
            member.streams += streams

    async def worker_kit(self, offset: int) -> KitPart | None:
        self.state_machine.check()
        return None if self._kit is None else await asyncio.to_thread(kit_part, self._kit, offset)

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> HeartbeatReply:
        machine, now = self.state_machine, self.state_machine.clock()
        wall_s, blocked = machine.journal.wall_clock(), bool(machine.blocked_reason)
        before, transfers = machine.journal.last_seq, self._loop.fleet.transfers
        excluded = transfers.excluded()
        try:
            reply, must_last = machine.run(workers.heartbeat(self._loop, heartbeat, now, wall_s, blocked))
            for name, reason in transfers.excluded().items():
                if name not in excluded:
                    _log.warning("relay.excluded", worker=name, reason=reason)
        except ContractError:
            if machine.journal.last_seq > before:  # it is a strike
                await machine.written()
            raise
        if must_last:
            await machine.written()
        return reply

    async def drain(self, name: str) -> None:
        for member in self._loop.fleet.named(name):
            if not member.draining:
                member.draining = True
                _log.info("worker.draining", worker=member.worker_id)

    async def note_orders(self, orders: Sequence[WorkerOrder]) -> None:
        machine = self.state_machine
        machine.check_open()
        now, wall_s = machine.clock(), machine.journal.wall_clock()
        await machine.do(workers.note_orders(self._loop, orders, now, wall_s))

    async def revoke(self, name: str, reason: str) -> None:
        machine = self.state_machine
        await machine.do(workers.revoke(self._loop, name, reason, machine.clock()))

    async def pardon(self, name: str, reason: str) -> None:
        await self.state_machine.do(workers.pardon(self._loop, name, reason))

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        machine, loop = self.state_machine, self._loop
        deadline, first, reminded = machine.clock() + _within(request.wait_s), True, False
        if (asking := loop.fleet.get(request.worker_id)) is not None:
            asking.seen_s = machine.clock()  # also while nothing can be recorded
        with machine.work.call(request.worker_id) as call:
            while True:
                machine.check_open()
                now = machine.clock()
                found = machine.run(leases.grant(loop, request, now, first, reminded))
                if isinstance(found, LeaseReply):
                    call.took(len(found.leases))
                    break
                first, reminded = False, found.should_load
                pause_s = min(REMIND_S, deadline - now) if reminded else deadline - now
                if not await call.wait(pause_s) and not reminded:
                    return found.reply
        granted, written = found.leases, machine.written()
        if not granted:
            return found
        try:
            if request.wants_history:
                granted = tuple(await machine.archive.attach(granted))
            await written
        except asyncio.CancelledError:
            # The worker hung up and will never get these.
            machine.run(consequences.give_back(loop, [lease.lease_id for lease in granted], machine.clock()))
            raise
        member = loop.fleet.get(request.worker_id)
        wanted = None if member is None else loop.news_for(member)
        return LeaseReply(granted, "", self._state.newest_version, wanted, self._state.finished)

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        machine = self.state_machine
        machine.check_open()
        return await machine.do(self._submit(submission, machine.clock()))

    def _submit(self, submission: GroupSubmission, now: float) -> Decision[SubmitVerdict]:
        verdict = yield from groups.submit(self._loop, submission, now)
        if verdict is SubmitVerdict.ACCEPTED:
            if self._audits is not None:
                yield from self._audits.choose(submission)
            yield from groups.reward_at_once(self._loop, submission, now)
            yield from client_groups.finish(self._loop, submission)
        return verdict

    async def pull_for_reward(self, client_id: str, limit: int, wait_s: float) -> PullReply:
        machine, loop = self.state_machine, self._loop
        deadline = machine.clock() + _within(wait_s)
        gathered_s = 0.0 if limit > 1 and wait_s > 0 else GATHER_S
        while True:
            now = machine.clock()
            waiting = machine.run(groups.to_reward(loop, limit, now))
            if (
                waiting
                and gathered_s < GATHER_S
                and len(waiting) < limit
                and not groups.hold_up_a_batch(loop)
            ):
                gathered_s += GATHER_LOOK_S
                await asyncio.sleep(GATHER_LOOK_S)
                continue
            if waiting:
                break
            if self._state.finished:
                await machine.submitted.wait(min(FINISHED_WAIT_S, deadline - now))
                return PullReply((), ())
            if now >= deadline:
                return PullReply((), (), turns.unfinished(loop))
            free_again = min((held.deadline_s for held in loop.rewarding.values()), default=deadline)
            await machine.submitted.wait(min(deadline, free_again) - now)
        groups.hand_out(loop, client_id, waiting, now)
        handed, keys, prompts = [], [], []
        for group_id in waiting:
            submission = await machine.submissions.find(group_id)
            if not groups.unanswered(loop, group_id):  # rewarded or found stale while a payload was read
                continue
            if submission is None:
                raise machine.submissions.lost(group_id)
            handed.append(submission)
            prompt = loop.prompt_of(self._state.groups[group_id])
            keys.append(prompt.key)
            prompts.append(np.asarray(prompt.token_ids, np.int32))
        told = tuple(prompts) if self._config.reference.used else ()
        return PullReply(tuple(handed), tuple(keys), prompts=told)

    async def submit_rewards(self, rewarded: Sequence[GroupRewards]) -> Sequence[str]:
        machine, loop = self.state_machine, self._loop
        taken: list[str] = []
        refused: ContractError | None = None
        try:
            for rewards in rewarded:
                machine.check_open()
                kept = machine.archive.keeps and groups.unanswered(loop, rewards.group_id)
                submission = await machine.submissions.find(rewards.group_id) if kept else None
                try:
                    if machine.run(groups.take_rewards(loop, rewards, submission, machine.clock())):
                        taken.append(rewards.group_id)
                except ContractError as error:
                    refused = refused or error
        finally:  # also when the caller hangs up meanwhile
            if taken:
                machine.run(consequences.settle(loop))
        await machine.written()
        if refused is not None:
            raise refused
        return taken

    async def answer_turn(self, request: TurnRequest) -> TurnReply:
        machine, loop = self.state_machine, self._loop
        deadline, name = machine.clock() + _within(request.wait_s), ""
        while True:
            machine.check_open()
            before = machine.journal.last_seq
            try:
                found = (turns.reply_to(loop, request, name) if name else None) or machine.run(
                    turns.ask(loop, request, machine.clock())
                )
            except ContractError:
                if machine.journal.last_seq > before:  # it is a strike
                    await machine.written()
                raise
            if isinstance(found, TurnReply):
                if found.answered:
                    await machine.written()
                return found
            name = found
            machine.turns.notify()
            if not await machine.answered(name).wait(deadline - machine.clock()):
                return TurnReply(answered=False, kept=request.piece.start)

    async def pull_turns(self, client_id: str, limit: int, wait_s: float) -> Sequence[TurnToAnswer]:
        machine, loop = self.state_machine, self._loop
        deadline = machine.clock() + _within(wait_s)
        while True:
            machine.check()
            now = machine.clock()
            found = turns.to_answer(loop, client_id, limit, now)
            if found or now >= deadline:
                if found and loop.hosted:
                    await machine.written()  # a turn that a host has heard of is heard alike for good
                return found
            handed_out = (turn.deadline_s for turn in loop.turns.values() if turn.deadline_s > now)
            free_again = min(handed_out, default=deadline)
            await machine.turns.wait(min(deadline, free_again) - now)

    async def submit_turns(self, answers: Sequence[TurnAnswer]) -> None:
        self.state_machine.check_open()
        await self.state_machine.do(turns.take_answers(self._loop, answers, self.state_machine.clock()))

    async def request_samples(self, request: SampleRequest) -> None:
        self.state_machine.check_open()
        await self.state_machine.do(client_groups.request(self._loop, request, self.state_machine.clock()))

    async def await_samples(self, request_id: str, wait_s: float) -> SampledReply:
        machine = self.state_machine
        deadline = machine.clock() + _within(wait_s)
        while not (group_id := client_groups.ended(self._loop, request_id)):
            machine.check()
            left_s = deadline - machine.clock()
            if left_s <= 0:
                blocked = machine.blocked_reason
                return SampledReply(waiting_for=blocked or client_groups.waits_for(self._loop, request_id))
            await machine.sampled(CLIENT_GROUP + request_id).wait(left_s)
        await machine.written()
        submission = await machine.submissions.get(group_id)
        machine.submissions.forget((group_id,))  # the journal has it, and it is seldom asked for twice
        return SampledReply(submission.trajectories, cached_tokens=submission.cached_tokens)

    async def seal_client_step(self, step: int, digest: str, trajectories: int, tokens: int) -> BatchRef:
        machine = self.state_machine
        machine.check_open()
        if (known := client_groups.check_step(self._loop, step, digest)) is not None:
            await machine.written()
            return known
        if not machine.store.has(digest):
            raise ContractError(f"the artifact store has no file {digest[:12]}; put it there before its step")
        plan = assembly.SealPlan(step, (), ())
        empty = await asyncio.to_thread(seal_batch, plan, {}, Tally(), self._config, machine.store)
        batch = replace(empty, digest=digest, trajectories=trajectories, tokens=tokens)
        return await machine.do(client_groups.seal(self._loop, batch))

    async def open_step(self, step: int) -> None:
        self.state_machine.check_open()
        await self.state_machine.do(steps.open_step(self._loop, step))

    async def open_evaluation(self, version: int) -> None:
        self.state_machine.check_open()
        await self.state_machine.do(steps.open_evaluation(self._loop, version))

    async def await_stage(self, stage: str, number: int, wait_s: float) -> StageReply:
        machine = self.state_machine
        wakeups = {"collect": machine.submitted, "broadcast": machine.work, "evaluate": machine.rewarded}
        deadline, woken = machine.clock() + _within(wait_s), True
        while True:
            machine.check()
            now = machine.clock()
            reply = stage_reply(self._loop, stage, number)
            if reply.done or not (woken or reply.halted):
                machine.check_open()
            if reply.done:
                await machine.written()  # what it stands for must be on the disk
                return reply
            if reply.halted or not woken:
                return explained(self._loop, reply, stage, number, now, machine.blocked_reason)
            # A seal may end any stage early, and a pause wakes who waits for one.
            wakeup = wakeups.get(stage, machine.sealed)
            woken = await wait_any(deadline - now, wakeup, machine.sealed)

    async def commit_step(self, commit: StepCommit) -> None:
        machine = self.state_machine
        machine.check_open()
        await machine.do(steps.commit(self._loop, commit, machine.clock()))
        _log.info("step.committed", step=commit.step, weights=commit.weights_digest[:12])

    async def announce_snapshot(self, manifest: SnapshotManifest) -> None:
        self.state_machine.check_open()
        check_signature(manifest, self._learner_key)
        await self.state_machine.do(steps.announce(self._loop, manifest))

    async def latest_manifest(self, version: int | None) -> SnapshotManifest | None:
        self.state_machine.check()
        wanted = self._state.newest_version if version is None else version
        if wanted is None or wanted not in self._state.snapshots:
            return None
        self.state_machine.check_open()  # else this would wait for as long as the outage lasts
        await self.state_machine.written()  # the announcement may still be on its way to the disk
        body = await self.state_machine.journal.payload(manifest_name(wanted))
        return None if body is None else payloads.load_manifest(body)

    async def plan_transfer(self, worker_id: str, version: int, payload_digest: str) -> TransferPlan:
        self.state_machine.check()
        if self._config.broadcast.relay == "off":
            return FROM_ORIGIN
        manifest = await self.latest_manifest(version)
        payloads_there = () if manifest is None else manifest.payloads
        payload = next((one for one in payloads_there if one.digest == payload_digest), None)
        if payload is None:
            raise ContractError(
                f"version {version} has no payload {payload_digest[:12]}; ask for its manifest"
            )
        # Looked up now: it may have left while its manifest was read.
        fleet = self._loop.fleet
        if (member := fleet.get(worker_id)) is None:
            return FROM_ORIGIN
        living = fleet.living()
        # Those that hold what it holds will probably want the same payload.
        likely = [one.worker_id for one in living if one.held_version == member.held_version]
        peers = {one.worker_id: one.relay_address for one in living}
        return fleet.transfers.plan(worker_id, payload, peers, likely)

    async def skip_step(self, step: int, reason: str, operator: str) -> VoidedBatch:
        machine, plan = self.state_machine, assembly.SealPlan(step, (), ())
        machine.check_open()
        empty = await asyncio.to_thread(seal_batch, plan, {}, Tally(), self._config, machine.store)
        return await machine.do(steps.skip(self._loop, empty, reason, operator))

    async def pause(self, reason: str) -> None:
        await self.state_machine.do(steps.pause(reason))

    async def finish(self) -> None:
        self.state_machine.check_open()
        await self.state_machine.do(steps.finish(self._loop))

    async def pull_for_audit(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToAudit]:
        wait_s = _within(wait_s)
        if self._audits is None:
            await self.state_machine.sealed.wait(wait_s)  # nothing will come; no tight loop meanwhile
            return ()
        return await self._audits.pull(limit, wait_s)

    async def submit_audit(
        self, group_id: str, samples: Sequence[SampleStatistics], worker_id: str = "", reason: str = ""
    ) -> None:
        if self._audits is not None:
            await self._audits.submit(group_id, samples, worker_id, reason)

    async def commits_after(self, after_step: int) -> CommitsReply:
        self.state_machine.check()
        found = self._state.commits
        start = stop = max(0, after_step + 1)
        room = PAGE_BYTES
        while stop < len(found) and room > 0:
            room -= _COMMIT_BYTES + sum(len(name) + _METRIC_BYTES for name in found[stop].metrics)
            stop += 1
        return CommitsReply(tuple(found[start:stop]), stop < len(found))

    async def status(self) -> RunStatus:
        machine = self.state_machine
        machine.check()
        return status_of(self._loop, machine.clock(), machine.blocked_reason)

    async def event_pages(self, after_seq: int, follow: bool) -> AsyncIterator[Sequence[Event]]:
        state_machine, at = self.state_machine, after_seq
        while True:
            state_machine.check()
            if finished := self._state.finished:
                await state_machine.written()  # the event that says so may not be on the disk yet
            rows = await state_machine.journal.read(at, EVENTS_PER_READ)
            page, room = [], PAGE_BYTES
            for row in rows:
                page.append(Event(row.seq, row.at, row.kind, row.body))
                room -= _EVENT_BYTES + len(row.body)
                if room <= 0:
                    yield page
                    page, room = [], PAGE_BYTES
            if page:
                yield page
            if rows:
                at = rows[-1].seq
            elif not follow or finished:
                return
            else:
                await state_machine.journal.grown.wait(FOLLOW_CHECK_S)


def _within(wait_s: float) -> float:
    return min(max(0.0, wait_s), MAX_WAIT_S)
