"""Coordinator service: the contract's behaviour over the journal; it knows no gRPC.

Each request asks `core` for a decision, hands the events to the run state machine, and answers when
they are on disk. Calls that wait are woken by what happens and never held longer than asked.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

import structlog

from antiphon.api.coordinator import Coordinator, KitPart
from antiphon.core.dissemination.plan import TransferPlan
from antiphon.core.dissemination.transfers import FROM_ORIGIN
from antiphon.core.errors import ContractError, RefusedError
from antiphon.core.loop import acceptance, admission, assembly
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import Tally
from antiphon.core.loop.run_state import RunState
from antiphon.core.loop.staleness import is_published
from antiphon.core.records import (
    GroupRewards,
    GroupSubmission,
    GroupToAudit,
    GroupToReward,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
)
from antiphon.core.requests import (
    CommitsReply,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    StageReply,
    WorkerHeartbeat,
    WorkerHello,
    WorkerWelcome,
)
from antiphon.core.status import Event, RunStatus
from antiphon.core.trust.audit import SampleStatistics
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.core.voided_batch import VoidedBatch
from antiphon.net.worker_kit import KitFile
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.journal.journal import TrainedRow
from antiphon.services.coordinator.lease_granter import LeaseGranter
from antiphon.services.coordinator.overview import Overview
from antiphon.services.coordinator.prompts import token_rules_of
from antiphon.services.coordinator.reward_queue import RewardQueue
from antiphon.services.coordinator.run_state_machine import LONGEST_REASON, RunStateMachine
from antiphon.services.coordinator.sealing import seal_batch
from antiphon.services.coordinator.stage_watch import StageWatch
from antiphon.services.coordinator.worker_registry import NO_REASON, WorkerRegistry, strike
from antiphon.weights.signature import check_signature

MAX_WAIT_S = 30.0
"""Longest a call is held open."""
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
        kit: KitFile | None = None,
    ) -> None:
        """Serve a run.

        `learner_key` is empty where no manifest is signed, `audits` None without audits, `kit` None where
        workers have the model's folder.
        """
        self.state_machine = state_machine
        self._config, self._state = state_machine.config, state_machine.state
        self._learner_key = learner_key
        self._audits = audits
        self._kit = kit
        self._workers = WorkerRegistry(state_machine, learner_key)
        self._lease_granter = LeaseGranter(
            state_machine, (lambda _: "") if audits is None else audits.holds_back
        )
        self._reward_queue = RewardQueue(state_machine)
        self._overview = Overview(state_machine, lambda: self._reward_queue.held)
        self._stages = StageWatch(state_machine, self._overview)

    async def register(self, hello: WorkerHello) -> WorkerWelcome:
        return await self._workers.register(hello)

    async def worker_kit(self, offset: int) -> KitPart | None:
        self.state_machine.check()
        return None if self._kit is None else await asyncio.to_thread(self._kit.part, offset)

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> HeartbeatReply:
        return await self._workers.heartbeat(heartbeat)

    async def drain(self, name: str) -> None:
        self._workers.drain(name)

    async def revoke(self, name: str, reason: str) -> None:
        await self._workers.revoke(name, reason)

    async def pardon(self, name: str, reason: str) -> None:
        await self._workers.pardon(name, reason)

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        return await self._lease_granter.lease(request, _within(request.wait_s))

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        state_machine, state, leases = self.state_machine, self._state, self.state_machine.leases
        state_machine.check_open()
        if state.barred(name_of_worker(submission.worker_id)):
            return SubmitVerdict.LATE
        try:
            verdict = acceptance.early_verdict(state, submission)
        except RefusedError as error:
            if submission.lease_id in state.groups[submission.group_id].holders:
                await self._strike(submission.worker_id, str(error), submission.group_id)
            raise
        if verdict is not None:
            # What was accepted a moment ago may still be on its way to the disk.
            await state_machine.record()
            return verdict
        group, now = state.groups[submission.group_id], state_machine.clock()
        given, rules = leases.known_of(submission.lease_id, group), token_rules_of(state_machine.prompts)
        try:
            verdict, found = acceptance.accept_submission(
                state, self._config, submission, state_machine.seeds(group), now, given, rules
            )
        except ContractError as error:
            false = self._workers.begin_again(group, submission.lease_id, given)
            await self._strike(*(false or (submission.worker_id, str(error))), group.group_id)
            raise RefusedError(str(error)) from error
        if not found:
            await state_machine.record()
            return verdict
        leases.measure(submission.lease_id, [t.token_ids.size for t in submission.trajectories], now)
        found = [*leases.stop_slower(group, submission.lease_id, now), *found]
        accepted = verdict is SubmitVerdict.ACCEPTED
        keep = {submission.group_id: payloads.dump_submission(submission)} if accepted else None
        forget = () if given is None else (payloads.prefix_name(submission.group_id),)
        written = state_machine.record(*found, keep=keep, forget=forget)
        leases.done(submission.lease_id, submission.group_id)
        if accepted:
            state_machine.submissions.remember(submission)
            state_machine.submitted.notify()
            state_machine.fleet.work_done += 1
            if self._audits is not None:
                self._audits.choose(submission)
        # A place at this worker is free, and a stale group gives its reservation back.
        state_machine.work.tell(submission.worker_id)
        state_machine.offer(0 if accepted else 1)
        await written
        return verdict

    def _strike(self, worker_id: str, reason: str, group_id: str) -> "asyncio.Future[None]":
        return strike(self.state_machine, name_of_worker(worker_id), group_id, "refused", reason)

    async def pull_for_reward(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToReward]:
        return await self._reward_queue.pull(client_id, limit, _within(wait_s))

    async def submit_rewards(self, groups: Sequence[GroupRewards]) -> Sequence[str]:
        return await self._reward_queue.submit(groups)

    async def open_step(self, step: int) -> None:
        state_machine = self.state_machine
        state_machine.check_open()
        if not 0 <= step < self._config.run.steps:
            raise ContractError(
                f"step {step} cannot be opened: run.steps={self._config.run.steps} allows "
                f"0..{self._config.run.steps - 1}"
            )
        if self._state.finished and step >= self._state.opened_steps:
            raise ContractError(f"step {step} cannot be opened: run {state_machine.run_id} is finished")
        await state_machine.record(*admission.open_step(self._state, self._config, step))
        state_machine.work.notify()  # for every one of them another reason to wait holds now
        await state_machine.settle()

    async def open_evaluation(self, version: int) -> None:
        state_machine = self.state_machine
        state_machine.check_open()
        if not 0 <= version <= self._config.run.steps:
            raise ContractError(
                f"version {version} cannot be evaluated: versions 0..{self._config.run.steps} exist"
            )
        if version in self._state.evaluations:
            return
        loop, kept = self._config.loop, self._config.broadcast.snapshots_kept
        if not is_published(version, loop.publish_interval, self._config.run.steps):
            raise ContractError(
                f"version {version} cannot be evaluated: it is not published "
                f"(loop.publish_interval={loop.publish_interval})"
            )
        if self._state.opened_steps > admission.kept_until(self._config, version):
            raise ContractError(
                f"version {version} cannot be evaluated any more: {self._state.opened_steps} steps are "
                f"opened, and only the newest {kept} snapshots are kept (broadcast.snapshots_kept)"
            )
        written = state_machine.record(e.EvaluationOpened(version, self._config.evaluation.prompts))
        state_machine.offer(self._config.evaluation.prompts)
        await written

    async def await_stage(self, stage: str, number: int, wait_s: float) -> StageReply:
        return await self._stages.wait(stage, number, _within(wait_s))

    async def commit_step(self, commit: StepCommit) -> None:
        state_machine = self.state_machine
        state_machine.check_open()
        order, now = state_machine.planner.order, state_machine.clock()
        commit = dataclasses.replace(commit, metrics={**commit.metrics, **order.metrics()})
        expected = state_machine.planner.assess()
        plan = None if expected is None else expected.numbers()
        found = acceptance.accept_commit(self._state, commit, now, plan)
        oldest_kept = commit.step - self._state.payload_retention_steps
        kept = self._state.sealed_groups
        forget = [g for step, ids in kept.items() if step < oldest_kept for g in ids] if found else []
        await state_machine.record(
            *found, forget=forget, trained=_trained(self._state, commit) if found else None
        )
        _log.info("step.committed", step=commit.step, weights=commit.weights_digest[:12])

    async def announce_snapshot(self, manifest: SnapshotManifest) -> None:
        state_machine = self.state_machine
        state_machine.check_open()
        found = acceptance.accept_snapshot(self._state, manifest)
        check_signature(manifest, self._learner_key)
        name = payloads.manifest_name(manifest.version)
        written = state_machine.record(*found, keep={name: payloads.dump_manifest(manifest)})
        await written  # callers that ask for it meanwhile wait for the disk too
        state_machine.work.notify()

    async def latest_manifest(self, version: int | None) -> SnapshotManifest | None:
        self.state_machine.check()
        wanted = self._state.newest_version if version is None else version
        if wanted is None or wanted not in self._state.snapshots:
            return None
        self.state_machine.check_open()  # else this would wait for as long as the outage lasts
        await self.state_machine.record()  # the announcement may still be on its way to the disk
        body = await self.state_machine.journal.payload(payloads.manifest_name(wanted))
        return None if body is None else payloads.load_manifest(body)

    async def plan_transfer(self, worker_id: str, version: int, payload: int) -> TransferPlan:
        self.state_machine.check()
        if self._config.broadcast.relay == "off":
            return FROM_ORIGIN
        manifest = await self.latest_manifest(version)
        if manifest is None or not 0 <= payload < len(manifest.payloads):
            raise ContractError(f"version {version} has no payload {payload}; ask for its manifest")
        # Looked up now: it may have left while its manifest was read.
        fleet = self.state_machine.fleet
        if (member := fleet.get(worker_id)) is None:
            return FROM_ORIGIN
        living = fleet.living()
        # Those that hold what it holds will probably want the same payload.
        likely = [one.worker_id for one in living if one.held_version == member.held_version]
        peers = {one.worker_id: one.relay_address for one in living}
        return fleet.transfers.plan(worker_id, manifest.payloads[payload], peers, likely)

    async def skip_step(self, step: int, reason: str, operator: str) -> VoidedBatch:
        state_machine = self.state_machine
        state_machine.check_open()
        plan, config = assembly.SealPlan(step, (), ()), self._config
        empty = await asyncio.to_thread(seal_batch, plan, {}, Tally(), config, state_machine.store)
        reason = reason[:LONGEST_REASON] or NO_REASON
        voided, found = assembly.skip_step(
            self._state, config.run.steps, empty, reason, operator[:LONGEST_REASON]
        )
        written = state_machine.record(*found)
        if found:
            _log.warning("step.skipped", step=step, digest=voided.digest[:12], reason=voided.reason)
            state_machine.fleet.work_done += 1  # the no-progress timeout of this step begins again
            state_machine.wake_all()
        await written
        return voided

    async def pause(self, reason: str) -> None:
        await self.state_machine.record(e.RunPaused(reason or "no reason was given"))
        self.state_machine.wake_all()
        _log.warning("run.paused", reason=reason)

    async def finish(self) -> None:
        state_machine = self.state_machine
        state_machine.check_open()
        if self._state.finished:
            return
        written = state_machine.record(e.RunFinished())
        state_machine.wake_all()
        await written

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
        self.state_machine.check()
        return self._overview.status()

    async def event_pages(self, after_seq: int, follow: bool) -> AsyncIterator[Sequence[Event]]:
        state_machine, at = self.state_machine, after_seq
        while True:
            state_machine.check()
            if finished := self._state.finished:
                await state_machine.record()  # the event that says so may not be on the disk yet
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


def _trained(state: RunState, commit: StepCommit) -> TrainedRow:
    """Return what the store keeps of a step that is about to be committed."""
    used = state.sealed_groups[commit.step][: state.sealed[commit.step].groups]
    return TrainedRow(commit.step, commit.version, commit.weights_digest, commit.batch_digest, used)
