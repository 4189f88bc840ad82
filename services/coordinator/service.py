"""Coordinator service: the contract's behaviour over the journal; it knows no gRPC.

Each request asks `core` for a decision, hands the events to the run state_machine, and answers when
they are on disk. Calls that wait are woken by signals and never held longer than asked.
"""

from collections.abc import AsyncIterator, Sequence

import structlog

from antiphon.core.config import dump_config
from antiphon.core.errors import ContractError
from antiphon.core.loop import acceptance, admission
from antiphon.core.loop import events as e
from antiphon.core.loop.partials import check_piece
from antiphon.core.loop.run_state import RunState
from antiphon.core.loop.token_rules import check_token_rules
from antiphon.core.records import (
    PROTOCOL_VERSION,
    GroupSubmission,
    GroupToAudit,
    GroupToReward,
    KeptProgress,
    RewardedGroup,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
    WorkerState,
)
from antiphon.core.status import Event, RunStatus
from antiphon.core.trust.access_tokens import WORKER_NAME, name_of_worker
from antiphon.core.trust.audit import SampleStatistics
from antiphon.services.broadcast.signature import check_signature
from antiphon.services.coordinator.api import (
    Coordinator,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    StageReply,
    WorkerHeartbeat,
    WorkerHello,
    WorkerWelcome,
)
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.journal.journal import TrainedRow
from antiphon.services.coordinator.lease_granter import LeaseGranter
from antiphon.services.coordinator.overview import run_status
from antiphon.services.coordinator.prompts import token_rules_of
from antiphon.services.coordinator.reward_queue import RewardQueue
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.stage_watch import StageWatch

MAX_WAIT_S = 30.0
"""Longest a call is held open."""
FOLLOW_CHECK_S = 5.0
"""Longest that a follower of events sleeps before it looks whether the run is over."""
EVENTS_PER_READ = 500

LONGEST_REASON = 500
"""Characters of a reason that the journal keeps."""

_log = structlog.get_logger("coordinator")


class CoordinatorService(Coordinator):
    """The data plane of one run."""

    def __init__(
        self, state_machine: RunStateMachine, learner_key: bytes = b"", trust: AuditQueue | None = None
    ) -> None:
        """Serve a run.

        Args:
            state_machine: its state and journal.
            learner_key: public key that manifests must be signed with; empty where none are.
            trust: has groups audited and counts strikes; None where every worker is trusted.
        """
        self.state_machine = state_machine
        self._learner_key = learner_key
        self._trust = trust
        self._config_yaml = dump_config(state_machine.config)
        self._counter = LeaseGranter(state_machine)
        self._reward_queue = RewardQueue(state_machine)
        self._stages = StageWatch(state_machine, lambda: self._reward_queue.held)

    async def register(self, hello: WorkerHello) -> WorkerWelcome:
        """Admit a worker; one of the same name that still counts as alive is replaced.

        Raises:
            ContractError: another protocol version, another run, or a name that cannot be.
        """
        state_machine = self.state_machine
        state_machine.check_open()
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ContractError(
                f"worker {hello.worker_name!r} speaks protocol version {hello.protocol_version}, but this "
                f"coordinator speaks {PROTOCOL_VERSION}; install the same version of Antiphon on both"
            )
        if hello.run_id and hello.run_id != state_machine.run_id:
            raise ContractError(
                f"worker {hello.worker_name!r} means to serve run {hello.run_id!r}, but this coordinator "
                f"serves {state_machine.run_id!r}; give the address of the right coordinator"
            )
        if not WORKER_NAME.fullmatch(hello.worker_name):
            raise ContractError(
                f"worker name {hello.worker_name[:80]!r} cannot be used; take up to 64 letters, digits, "
                "dots, dashes and underscores"
            )
        if barred := state_machine.state.barred(hello.worker_name):
            raise ContractError(f"worker {hello.worker_name} was excluded from this run: {barred}")
        for member in state_machine.fleet.named(hello.worker_name):
            state_machine.lose(member, "another worker of this name registered")
        count = state_machine.state.registrations.get(hello.worker_name, 0) + 1
        worker_id = f"{hello.worker_name}-{count}"
        state_machine.fleet.add(worker_id, hello.worker_name, hello.concurrent_groups, state_machine.clock())
        await state_machine.record(
            e.WorkerRegistered(worker_id, hello.worker_name, hello.concurrent_groups, state_machine.clock())
        )
        _log.info("worker.registered", worker=worker_id)
        return WorkerWelcome(
            worker_id=worker_id,
            run_id=state_machine.run_id,
            config_yaml=self._config_yaml,
            heartbeat_s=state_machine.config.coordinator.heartbeat_s,
            learner_key=self._learner_key,
        )

    async def heartbeat(self, beat: WorkerHeartbeat) -> HeartbeatReply:
        """Extend the worker's leases, keep what they made so far, and say what to give up.

        Raises:
            ContractError: when the worker samples with weights that were never announced, or tells of
                progress that no completion of its lease can have.
        """
        state_machine = self.state_machine
        state_machine.check()
        member, now = state_machine.fleet.get(beat.worker_id), state_machine.clock()
        if member is None:
            return HeartbeatReply(
                False, (), state_machine.state.newest_version, False, state_machine.state.finished
            )
        if beat.held_version is not None and beat.weights_digest is not None:
            announced = state_machine.state.snapshots.get(beat.held_version)
            if announced != beat.weights_digest:
                raise ContractError(
                    f"worker {beat.worker_id} holds version {beat.held_version} with weights "
                    f"{beat.weights_digest[:12]}, but {(announced or 'nothing')[:12]} was announced for it; "
                    "load the announced snapshot again"
                )
        gone = state_machine.leases.extend(beat.lease_ids, beat.worker_id, now)
        kept = self._take_progress(beat)
        if state_machine.fleet.beat(member, beat, now):
            state_machine.loaded(member)
        member.told_newest = state_machine.state.newest_version
        for lease_id in beat.released_leases:
            held = state_machine.leases.get(lease_id)
            if held is not None:
                state_machine.take_back(held, "handed over by its worker")
        if beat.leaving:
            state_machine.lose(member, "it left in order")
        if beat.released_leases or beat.leaving:
            await state_machine.record()  # the worker ends with the answer: it must be true after a crash
        return HeartbeatReply(
            known=True,
            cancelled_leases=gone,
            newest_version=state_machine.state.newest_version,
            drain=member.state is WorkerState.DRAINING,
            run_finished=state_machine.state.finished,
            kept=kept,
            next_s=member.pause_s,
        )

    def _take_progress(self, beat: WorkerHeartbeat) -> tuple[KeptProgress, ...]:
        """Keep the pieces of running leases; those of others are of no use, and not an error."""
        state_machine, kept = self.state_machine, []
        for progress in beat.progress:
            held = state_machine.leases.get(progress.lease_id)
            group = None if held is None else state_machine.state.groups.get(held.group_id)
            if group is None:
                continue
            for piece in progress.pieces:
                check_piece(
                    piece,
                    group.group_id,
                    samples=group.samples,
                    max_tokens=state_machine.config.sampling.max_tokens,
                    version=group.version if state_machine.config.loop.mode == "fixed" else None,
                    newest_version=acceptance.newest_possible_version(state_machine.state),
                )
                state_machine.partial_groups.take(progress.lease_id, beat.worker_id, piece)
            kept.append(KeptProgress(progress.lease_id, state_machine.partial_groups.kept(progress.lease_id)))
        return tuple(kept)

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        """Grant up to `request.groups` leases, waiting up to `request.wait_s` for the first.

        The call also returns, with nothing, when the worker should load another version first.
        """
        return await self._counter.lease(request, min(max(0.0, request.wait_s), MAX_WAIT_S))

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        """Accept a finished group once; the answer to a repetition is the same.

        Raises:
            ContractError: when the trajectories do not fit the lease.
        """
        state_machine = self.state_machine
        state_machine.check_open()
        if state_machine.state.barred(name_of_worker(submission.worker_id)):
            return SubmitVerdict.LATE
        verdict = acceptance.early_verdict(state_machine.state, submission)
        if verdict is not None:
            # What was accepted a moment ago may still be on its way to the disk.
            await state_machine.record()
            return verdict
        group = state_machine.state.groups[submission.group_id]
        given = state_machine.partial_groups.snapshot(
            submission.lease_id
        ) or state_machine.partial_groups.waiting(group.group_id)
        try:
            verdict, found = acceptance.accept_submission(
                state_machine.state,
                state_machine.config,
                submission,
                state_machine.seeds(group),
                state_machine.clock(),
                given,
            )
            if (rules := token_rules_of(state_machine.prompts)) is not None:
                check_token_rules(submission, rules)
        except ContractError as error:
            if self._trust is not None:
                await self._trust.refused(submission, error)
            raise
        held = state_machine.leases.get(submission.lease_id)
        if held is not None and not state_machine.partial_groups.given(held.lease_id):
            state_machine.lease_times.add(state_machine.clock() - held.granted_s)
        found = [*state_machine.lost_race(group, submission.lease_id), *found]
        accepted = verdict is SubmitVerdict.ACCEPTED
        keep = {submission.group_id: payloads.dump_submission(submission)} if accepted else None
        forget = () if given is None else (payloads.prefix_name(submission.group_id),)
        written = state_machine.record(*found, keep=keep, forget=forget)
        state_machine.leases.end(submission.lease_id)
        state_machine.partial_groups.end(submission.lease_id)
        state_machine.partial_groups.forget(submission.group_id)
        if accepted:
            state_machine.remember(submission)
            state_machine.submitted.notify()
            if self._trust is not None:
                self._trust.choose(submission)
        # A place at this worker is free, and a stale group gives its reservation back.
        state_machine.work.notify()
        await written
        return verdict

    async def pull_for_reward(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToReward]:
        """Hand out groups to judge; a judge that never answers loses them after a deadline."""
        return await self._reward_queue.pull(client_id, limit, min(max(0.0, wait_s), MAX_WAIT_S))

    async def submit_rewards(self, group_id: str, rewarded_groups: Sequence[RewardedGroup]) -> bool:
        """Take the rewards of a group; False when they were already there or the group is gone.

        Raises:
            ContractError: when a reward is missing or not finite.
        """
        return await self._reward_queue.submit(group_id, rewarded_groups)

    async def open_step(self, step: int) -> None:
        """Allow groups of `step` to be issued; repeating it changes nothing.

        Raises:
            ContractError: for a step outside the run, or when the run is finished.
        """
        state_machine = self.state_machine
        state_machine.check_open()
        if not 0 <= step < state_machine.config.run.steps:
            raise ContractError(
                f"step {step} cannot be opened: run.steps={state_machine.config.run.steps} allows "
                f"0..{state_machine.config.run.steps - 1}"
            )
        if state_machine.state.finished and step >= state_machine.state.opened_steps:
            raise ContractError(f"step {step} cannot be opened: run {state_machine.run_id} is finished")
        await state_machine.record(*admission.open_step(state_machine.state, state_machine.config, step))
        state_machine.work.notify()
        await state_machine.settle()

    async def open_evaluation(self, version: int) -> None:
        """Queue the held-out prompts for `version`; repeating it changes nothing.

        Raises:
            ContractError: for a version that cannot exist in this run.
        """
        state_machine = self.state_machine
        state_machine.check_open()
        if not 0 <= version <= state_machine.config.run.steps:
            raise ContractError(
                f"version {version} cannot be evaluated: versions 0..{state_machine.config.run.steps} exist"
            )
        if version in state_machine.state.evaluations:
            return
        written = state_machine.record(e.EvaluationOpened(version, state_machine.config.evaluation.prompts))
        state_machine.work.notify()
        await written

    async def await_stage(self, stage: str, number: int, wait_s: float) -> StageReply:
        """Wait up to `wait_s` seconds for the end of a stage and say how far it is.

        Raises:
            ContractError: for a stage that is not the coordinator's.
        """
        return await self._stages.wait(stage, number, min(max(0.0, wait_s), MAX_WAIT_S))

    async def commit_step(self, commit: StepCommit) -> None:
        """Record that `commit.step` was trained; the only way the version advances.

        Raises:
            IntegrityError: for a step out of order, another batch, or another digest.
        """
        state_machine = self.state_machine
        state_machine.check_open()
        found = acceptance.accept_commit(state_machine.state, commit)
        oldest_kept = commit.step - state_machine.state.payload_retention_steps
        kept = state_machine.state.sealed_groups
        forget = [g for step, ids in kept.items() if step < oldest_kept for g in ids] if found else []
        await state_machine.record(
            *found, forget=forget, trained=_trained(state_machine.state, commit) if found else None
        )
        _log.info("step.committed", step=commit.step, weights=commit.weights_digest[:12])

    async def announce_snapshot(self, manifest: SnapshotManifest) -> None:
        """Make a published version known to the workers; repeating it changes nothing.

        Raises:
            ContractError: for the snapshot of another run.
            IntegrityError: for a version that no step made, other weights under a known version, or
                a signature that is not the learner's.
        """
        state_machine = self.state_machine
        state_machine.check_open()
        found = acceptance.accept_snapshot(state_machine.state, manifest)
        check_signature(manifest, self._learner_key)
        name = payloads.manifest_name(manifest.version)
        written = state_machine.record(*found, keep={name: payloads.dump_manifest(manifest)})
        await written  # whoever asks for it meanwhile waits for the disk too
        state_machine.work.notify()

    async def latest_manifest(self, version: int | None) -> SnapshotManifest | None:
        """Return the manifest of `version`, or of the newest one, or None."""
        self.state_machine.check()
        wanted = self.state_machine.state.newest_version if version is None else version
        if wanted is None or wanted not in self.state_machine.state.snapshots:
            return None
        await self.state_machine.record()  # the announcement may still be on its way to the disk
        body = await self.state_machine.journal.payload(payloads.manifest_name(wanted))
        return None if body is None else payloads.load_manifest(body)

    async def drain(self, worker_id: str) -> None:
        """Ask a worker to finish its leases and leave.

        Raises:
            ContractError: when there is no such worker.
        """
        self.state_machine.check()
        member = self.state_machine.fleet.get(worker_id)
        if member is None:
            known = ", ".join(m.worker_id for m in self.state_machine.fleet.living()) or "none"
            raise ContractError(f"there is no worker {worker_id!r} to drain; living workers: {known}")
        self.state_machine.draining(member)

    async def pause(self, reason: str) -> None:
        """Stop granting leases until the run is started again, and say why."""
        await self.state_machine.record(e.RunPaused(reason or "no reason was given"))
        self.state_machine.sealed.notify()
        _log.warning("run.paused", reason=reason)

    async def finish(self) -> None:
        """Declare the run complete: workers and judges leave."""
        state_machine = self.state_machine
        state_machine.check_open()
        if state_machine.state.finished:
            return
        written = state_machine.record(e.RunFinished())
        for signal in (
            state_machine.work,
            state_machine.submitted,
            state_machine.rewarded,
            state_machine.sealed,
        ):
            signal.notify()
        await written

    async def revoke(self, name: str, reason: str) -> None:
        """Let a token (by its id) or a worker (by its name) count no more; repeating it changes nothing.

        A worker that is excluded loses its leases at once.

        Raises:
            ContractError: when it is neither a token's id nor a possible name.
        """
        state_machine = self.state_machine
        state_machine.check()
        if not WORKER_NAME.fullmatch(name):
            raise ContractError(
                f"{name[:80]!r} is neither a token's id nor a worker's name; see `antiphon status`"
            )
        if name in state_machine.state.revoked:
            return
        reason = reason[:LONGEST_REASON] or "no reason was given"
        written = state_machine.record(e.AccessRevoked(name, reason))
        for member in state_machine.fleet.named(name):
            state_machine.lose(member, f"excluded: {reason}")
        _log.warning("access.revoked", name=name, reason=reason)
        await written

    async def pardon(self, name: str, reason: str) -> None:
        """Let a worker that was shut out try again, as a stranger; repeating it changes nothing."""
        state_machine = self.state_machine
        state_machine.check()
        if state_machine.state.barred(name):
            await state_machine.record(
                e.WorkerPardoned(name, reason[:LONGEST_REASON] or "no reason was given")
            )

    async def pull_for_audit(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToAudit]:
        """Hand out groups to score again, waiting up to `wait_s` for the first."""
        wait_s = min(max(0.0, wait_s), MAX_WAIT_S)
        if self._trust is None:
            await self.state_machine.sealed.wait(wait_s)  # nothing will come; no tight loop meanwhile
            return ()
        return await self._trust.pull(limit, wait_s)

    async def submit_audit(
        self, group_id: str, samples: Sequence[SampleStatistics], worker_id: str = ""
    ) -> None:
        """Take what an audit found; a group that was not asked for changes nothing."""
        if self._trust is not None:
            await self._trust.submit(group_id, samples, worker_id)

    async def commits(self, after_step: int) -> Sequence[StepCommit]:
        """Return the committed steps greater than `after_step`, in order (-1 for all)."""
        self.state_machine.check()
        return tuple(self.state_machine.state.commits[max(0, after_step + 1) :])

    async def status(self) -> RunStatus:
        """Return the run at a glance."""
        state_machine = self.state_machine
        state_machine.check()
        return run_status(
            state_machine.state,
            state_machine.config,
            state_machine.fleet,
            state_machine.leases,
            self._reward_queue.held,
            state_machine.clock(),
            state_machine.blocked_reason,
        )

    async def watch_events(self, after_seq: int, follow: bool) -> AsyncIterator[Event]:
        """Yield journal events after `after_seq`; with `follow`, go on until the run is finished."""
        state_machine, at = self.state_machine, after_seq
        while True:
            state_machine.check()
            finished = state_machine.state.finished
            rows = await state_machine.journal.read(at, EVENTS_PER_READ)
            for row in rows:
                yield Event(row.seq, row.at, row.kind, row.body)
            if rows:
                at = rows[-1].seq
            elif not follow or finished:
                return
            else:
                await state_machine.journal.grown.wait(FOLLOW_CHECK_S)


def _trained(state: RunState, commit: StepCommit) -> TrainedRow:
    """Return what the store keeps of a step that is about to be committed."""
    used = state.sealed_groups[commit.step][: state.sealed[commit.step].groups]
    return TrainedRow(commit.step, commit.version, commit.weights_digest, commit.batch_digest, used)
