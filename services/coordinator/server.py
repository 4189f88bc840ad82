"""Coordinator server: proto in, service call, proto out; and the process that serves a run."""

import asyncio
import gc
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError
from antiphon.lineage.store.artifact_store import open_store
from antiphon.protos import coordinator_pb2, coordinator_pb2_grpc, records_pb2, reward_pb2, rollout_pb2
from antiphon.services.coordinator.api import Coordinator
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal, journal_place
from antiphon.services.coordinator.metrics_page import metrics_page
from antiphon.services.coordinator.prompts import PromptSource, load_prompts
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.coordinator.work_stream import Handler, StreamServer
from antiphon.services.rpc.serving import (
    MAX_MESSAGE_BYTES,
    Security,
    answers_errors,
    error_to_code,
    start_server,
    stop_server,
)
from antiphon.services.security.credentials import Credentials, learner_public, needed_token_key
from antiphon.services.security.guard import Guard
from antiphon.services.wire import rewards as wire_rewards
from antiphon.services.wire import status as wire_status
from antiphon.services.wire import steps as wire_steps
from antiphon.services.wire import work as wire_work
from antiphon.system import failpoints
from antiphon.system.clock import wall_clock

__all__ = ["JOURNAL_NAME", "CoordinatorServicer", "serve_coordinator", "start_coordinator"]

LINGER_S = 30.0
"""After the end of a run, how long status and late callers still find it served."""

COLLECT_AFTER = 20_000
"""New objects between two looks of the garbage collector; a request makes hundreds that die at once."""
_TOKEN_BYTES = 32
_TRAJECTORY_BYTES = 4096
_SMALLEST_LIMIT = 8 << 20

Message = Any
Context = Any


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServicer):
    """Translates between messages and the contract."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @answers_errors
    async def Register(self, request: Message, context: Context) -> Message:
        """Answer."""
        welcome = await self._coordinator.register(wire_work.worker_hello_from_proto(request))
        return wire_work.worker_welcome_to_proto(welcome)

    @answers_errors
    async def Heartbeat(self, request: Message, context: Context) -> Message:
        """Answer."""
        return await self._heartbeat(request)

    @answers_errors
    async def LeaseGroup(self, request: Message, context: Context) -> Message:
        """Answer."""
        return await self._lease(request)

    @answers_errors
    async def SubmitGroup(self, request: Message, context: Context) -> Message:
        """Answer."""
        return await self._submit(request)

    @answers_errors
    async def Work(self, request: AsyncIterator[Message], context: Context) -> AsyncIterator[Message]:
        """Answer a worker's stream: each message as the call of its own would be."""
        handlers: dict[str, Handler] = {
            "heartbeat": self._heartbeat,
            "lease": self._lease,
            "submission": self._submit,
        }
        async for reply in StreamServer(handlers, _error_to_proto).serve(request):
            yield reply

    async def _heartbeat(self, request: Message) -> Message:
        reply = await self._coordinator.heartbeat(wire_work.worker_heartbeat_from_proto(request))
        return wire_work.heartbeat_reply_to_proto(reply)

    async def _lease(self, request: Message) -> Message:
        reply = await self._coordinator.lease_group(wire_work.lease_request_from_proto(request))
        failpoints.reach("coordinator.reply.before")
        return wire_work.lease_reply_to_proto(reply)

    async def _submit(self, request: Message) -> Message:
        submission = wire_work.group_submission_from_proto(request, keep_encoded=True)
        verdict = await self._coordinator.submit_group(submission)
        failpoints.reach("coordinator.reply.before")
        return wire_work.submit_verdict_to_proto(verdict)

    @answers_errors
    async def PullForReward(self, request: Message, context: Context) -> Message:
        """Answer."""
        groups = await self._coordinator.pull_for_reward(request.client_id, request.limit, request.wait_s)
        return reward_pb2.PullReply(groups=[wire_rewards.group_to_reward_to_proto(group) for group in groups])

    @answers_errors
    async def SubmitRewards(self, request: Message, context: Context) -> Message:
        """Answer."""
        rewarded_groups = [
            wire_rewards.rewarded_group_from_proto(rewarded_group)
            for rewarded_group in request.rewarded_groups
        ]
        accepted = await self._coordinator.submit_rewards(request.group_id, rewarded_groups)
        return reward_pb2.RewardsReply(accepted=accepted)

    @answers_errors
    async def OpenStep(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.open_step(request.step)
        return records_pb2.Empty()

    @answers_errors
    async def OpenEvaluation(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.open_evaluation(request.version)
        return records_pb2.Empty()

    @answers_errors
    async def AwaitStage(self, request: Message, context: Context) -> Message:
        """Answer."""
        reply = await self._coordinator.await_stage(request.stage, request.number, request.wait_s)
        return wire_status.stage_reply_to_proto(reply)

    @answers_errors
    async def CommitStep(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.commit_step(wire_steps.step_commit_from_proto(request))
        failpoints.reach("coordinator.reply.before")
        return records_pb2.Empty()

    @answers_errors
    async def AnnounceSnapshot(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.announce_snapshot(wire_steps.snapshot_manifest_from_proto(request))
        return records_pb2.Empty()

    @answers_errors
    async def LatestManifest(self, request: Message, context: Context) -> Message:
        """Answer."""
        version = request.version if request.HasField("version") else None
        manifest = await self._coordinator.latest_manifest(version)
        found = None if manifest is None else wire_steps.snapshot_manifest_to_proto(manifest)
        return coordinator_pb2.OptionalManifest(manifest=found)

    @answers_errors
    async def Drain(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.drain(request.worker_id)
        return records_pb2.Empty()

    @answers_errors
    async def Pause(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.pause(request.reason)
        return records_pb2.Empty()

    @answers_errors
    async def Finish(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.finish()
        return records_pb2.Empty()

    @answers_errors
    async def Revoke(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.revoke(request.name, request.reason)
        return records_pb2.Empty()

    @answers_errors
    async def Pardon(self, request: Message, context: Context) -> Message:
        """Answer."""
        await self._coordinator.pardon(request.name, request.reason)
        return records_pb2.Empty()

    @answers_errors
    async def PullForAudit(self, request: Message, context: Context) -> Message:
        """Answer."""
        groups = await self._coordinator.pull_for_audit(request.client_id, request.limit, request.wait_s)
        return coordinator_pb2.AuditsReply(
            groups=[wire_rewards.group_to_audit_to_proto(group) for group in groups]
        )

    @answers_errors
    async def SubmitAudit(self, request: Message, context: Context) -> Message:
        """Answer."""
        samples = [wire_rewards.sample_statistics_from_proto(sample) for sample in request.samples]
        await self._coordinator.submit_audit(request.group_id, samples, request.worker_id)
        return records_pb2.Empty()

    @answers_errors
    async def Commits(self, request: Message, context: Context) -> Message:
        """Answer."""
        commits = await self._coordinator.commits(request.step)
        return coordinator_pb2.CommitsReply(commits=[wire_steps.step_commit_to_proto(c) for c in commits])

    @answers_errors
    async def Status(self, request: Message, context: Context) -> Message:
        """Answer."""
        return wire_status.run_status_to_proto(await self._coordinator.status())

    @answers_errors
    async def WatchEvents(self, request: Message, context: Context) -> AsyncIterator[Message]:
        """Answer."""
        async for event in self._coordinator.watch_events(request.after_seq, request.follow):
            yield wire_status.event_to_proto(event)


def _error_to_proto(error: AntiphonError) -> Message:
    return rollout_pb2.WorkError(status=error_to_code(error), details=str(error))


async def start_coordinator(
    service: CoordinatorService, host: str, port: int, security: Security | None = None
) -> tuple[grpc.aio.Server, int]:
    """Serve `service` and return the server with its port; without `security` on loopback alone.

    Raises:
        ConfigError: when the address cannot be listened on.
    """
    return await start_server(
        host,
        port,
        lambda server: register_coordinator(server, service),
        ["antiphon.Coordinator"],
        security,
        largest_message(service.state_machine.config),
    )


def register_coordinator(server: Any, service: Coordinator) -> None:
    """Add the service to a server that was not started yet."""
    servicer = CoordinatorServicer(service)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def largest_message(config: RunConfig) -> int:
    """Return the bytes of the largest message that a coordinator takes in.

    That is a group of the longest completions, at 8 bytes a token and a version span for each, or a
    manifest.
    """
    group = config.loop.group_size * (config.sampling.max_tokens * _TOKEN_BYTES + _TRAJECTORY_BYTES)
    return min(MAX_MESSAGE_BYTES, max(_SMALLEST_LIMIT, group))


def coordinator_guard(
    state_machine: RunStateMachine, credentials: Credentials, wall_clock: Callable[[], float]
) -> Guard:
    """Return who lets calls in to the coordinator of a run.

    Raises:
        ConfigError: when the bundle cannot check tokens.
    """
    return Guard(
        needed_token_key(credentials),
        state_machine.run_id,
        wall_clock,
        state_machine.clock,
        revoked=lambda: state_machine.state.revoked,
        open_leases=lambda worker_id: len(state_machine.leases.of_worker(worker_id)),
    )


async def serve_coordinator(
    config: RunConfig,
    run_id: str,
    run_dir: Path,
    store_root: Path,
    host: str,
    port: int,
    ready: Callable[[int], None],
    prompts: PromptSource | None = None,
    credentials: Credentials | None = None,
    learner_key: bytes | None = None,
) -> None:
    """Serve one run until it is finished or the process is asked to stop.

    Args:
        config: configuration of the run; what a run keeps for good must not have changed.
        run_id: the run.
        run_dir: its folder; the journal lies in it.
        store_root: where batches go.
        host: address to listen on.
        port: 0 picks a free one.
        ready: called with the port once the coordinator can work.
        prompts: where prompts come from; by default the environment that `config` names.
        credentials: the services' bundle; None serves without encryption, on loopback alone.
        learner_key: public key of the learner; by default the one in the bundle or the run's folder.

    Raises:
        ConfigError: when the configuration, the environment, the journal or the port cannot be used.
        UnavailableError: when the journal or the store can no longer be written.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    journal = await asyncio.to_thread(Journal, journal_place(config, run_dir), run_id)
    if prompts is None:
        prompts = await asyncio.to_thread(load_prompts, config)
    state_machine = RunStateMachine(
        config, run_id, journal, open_store(store_root, config.record), prompts, loop.time
    )
    await state_machine.start()
    # What was loaded and folded stays for good, so the garbage collector need not walk it again and again.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    try:
        if learner_key is None:
            learner_key = learner_public(run_dir, credentials) or b""
        security = None
        if credentials is not None:
            security = Security(credentials, coordinator_guard(state_machine, credentials, wall_clock))
        audits = config.trust.audits == "all" or (config.trust.audits == "remote" and security is not None)
        trust = AuditQueue(state_machine, secrets.token_bytes(32)) if audits else None
        service = CoordinatorService(state_machine, learner_key, trust)
        server, bound = await start_coordinator(service, host, port, security)
        try:
            async with metrics_page(service, config):
                ready(bound)
                await _until_over(state_machine, stop)
        finally:
            await stop_server(server)
    finally:
        await state_machine.close()
    state_machine.check()


async def _until_over(state_machine: RunStateMachine, stop: asyncio.Event) -> None:
    """Wait for a request to stop, a failure, or the end of the run and a while more."""
    waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(state_machine.failed.wait())]
    ended_s: float | None = None
    try:
        while not any(wait.done() for wait in waits):
            await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if state_machine.state.finished:
                ended_s = ended_s if ended_s is not None else state_machine.clock()
                if state_machine.clock() - ended_s > LINGER_S:
                    return
    finally:
        for wait in waits:
            wait.cancel()
