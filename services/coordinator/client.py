"""Coordinator client: the contract over a channel; every call has a deadline.

A long poll gets its waiting time on top of the deadline. Errors arrive as the classes that the
service raised.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from antiphon.core.errors import AntiphonError, ContractError, UnavailableError
from antiphon.core.records import (
    GroupSubmission,
    GroupToAudit,
    GroupToReward,
    RewardedGroup,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
)
from antiphon.core.status import Event, RunStatus
from antiphon.core.trust.audit import SampleStatistics
from antiphon.protos import coordinator_pb2, coordinator_pb2_grpc, records_pb2, reward_pb2
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
from antiphon.services.coordinator.work_stream import StreamClient
from antiphon.services.rpc.serving import Duplex, call, error_from_code, open_channel, stream
from antiphon.services.security.credentials import Credentials
from antiphon.services.wire import rewards as wire_rewards
from antiphon.services.wire import status as wire_status
from antiphon.services.wire import steps as wire_steps
from antiphon.services.wire import work as wire_work

FOLLOW_S = 60.0
"""A followed stream of events is opened anew after this time."""


class CoordinatorClient(Coordinator):
    """A coordinator somewhere else."""

    def __init__(
        self,
        address: str,
        timeout_s: float = 10.0,
        *,
        channel: Any = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Open a channel to host:port, unless one is given; nothing is sent yet."""
        self.address = address
        self._timeout_s = timeout_s
        self._channel = open_channel(address, credentials) if channel is None else channel
        self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def register(self, hello: WorkerHello) -> WorkerWelcome:
        """Admit a worker."""
        reply = await call(self._stub.Register, wire_work.worker_hello_to_proto(hello), self._timeout_s)
        return wire_work.worker_welcome_from_proto(reply)

    async def heartbeat(self, beat: WorkerHeartbeat) -> HeartbeatReply:
        """Extend the worker's leases and learn what it should give up."""
        reply = await call(self._stub.Heartbeat, wire_work.worker_heartbeat_to_proto(beat), self._timeout_s)
        return wire_work.heartbeat_reply_from_proto(reply)

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        """Ask for leases, waiting up to `request.wait_s` for the first."""
        message = wire_work.lease_request_to_proto(request)
        reply = await call(self._stub.LeaseGroup, message, self._timeout_s + request.wait_s)
        return wire_work.lease_reply_from_proto(reply)

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        """Hand in a finished group; repeating it is safe."""
        message = wire_work.group_submission_to_proto(submission)
        return wire_work.submit_verdict_from_proto(
            await call(self._stub.SubmitGroup, message, self._timeout_s)
        )

    async def pull_for_reward(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToReward]:
        """Fetch groups to judge."""
        message = reward_pb2.PullRequest(client_id=client_id, limit=limit, wait_s=wait_s)
        reply = await call(self._stub.PullForReward, message, self._timeout_s + wait_s)
        return [wire_rewards.group_to_reward_from_proto(group) for group in reply.groups]

    async def submit_rewards(self, group_id: str, rewarded_groups: Sequence[RewardedGroup]) -> bool:
        """Hand in the rewards of a group; repeating it is safe."""
        message = reward_pb2.RewardsRequest(
            group_id=group_id,
            rewarded_groups=[
                wire_rewards.rewarded_group_to_proto(rewarded_group) for rewarded_group in rewarded_groups
            ],
        )
        return bool((await call(self._stub.SubmitRewards, message, self._timeout_s)).accepted)

    async def open_step(self, step: int) -> None:
        """Allow groups of `step` to be issued."""
        await call(self._stub.OpenStep, coordinator_pb2.StepRequest(step=step), self._timeout_s)

    async def open_evaluation(self, version: int) -> None:
        """Queue the held-out prompts for `version`."""
        message = coordinator_pb2.VersionRequest(version=version)
        await call(self._stub.OpenEvaluation, message, self._timeout_s)

    async def await_stage(self, stage: str, number: int, wait_s: float) -> StageReply:
        """Wait up to `wait_s` seconds for the end of a stage and say how far it is."""
        message = coordinator_pb2.StageRequest(stage=stage, number=number, wait_s=wait_s)
        reply = await call(self._stub.AwaitStage, message, self._timeout_s + wait_s)
        return wire_status.stage_reply_from_proto(reply)

    async def commit_step(self, commit: StepCommit) -> None:
        """Record a trained step; repeating it is safe."""
        await call(self._stub.CommitStep, wire_steps.step_commit_to_proto(commit), self._timeout_s)

    async def announce_snapshot(self, manifest: SnapshotManifest) -> None:
        """Make a published version known."""
        message = wire_steps.snapshot_manifest_to_proto(manifest)
        await call(self._stub.AnnounceSnapshot, message, self._timeout_s)

    async def latest_manifest(self, version: int | None) -> SnapshotManifest | None:
        """Fetch the manifest of `version`, or of the newest one, or None."""
        message = coordinator_pb2.OptionalVersionRequest(version=version)
        reply = await call(self._stub.LatestManifest, message, self._timeout_s)
        if not reply.HasField("manifest"):
            return None
        return wire_steps.snapshot_manifest_from_proto(reply.manifest)

    async def drain(self, worker_id: str) -> None:
        """Ask a worker to finish its leases and leave."""
        await call(self._stub.Drain, coordinator_pb2.WorkerRequest(worker_id=worker_id), self._timeout_s)

    async def pause(self, reason: str) -> None:
        """Stop granting leases until the run is started again."""
        await call(self._stub.Pause, coordinator_pb2.PauseRequest(reason=reason), self._timeout_s)

    async def finish(self) -> None:
        """Declare the run complete."""
        await call(self._stub.Finish, records_pb2.Empty(), self._timeout_s)

    async def revoke(self, name: str, reason: str) -> None:
        """Let a token or a worker count no more."""
        message = coordinator_pb2.RevokeRequest(name=name, reason=reason)
        await call(self._stub.Revoke, message, self._timeout_s)

    async def pardon(self, name: str, reason: str) -> None:
        """Let a worker that was shut out try again."""
        message = coordinator_pb2.RevokeRequest(name=name, reason=reason)
        await call(self._stub.Pardon, message, self._timeout_s)

    async def pull_for_audit(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToAudit]:
        """Fetch groups to score again."""
        message = reward_pb2.PullRequest(client_id=client_id, limit=limit, wait_s=wait_s)
        reply = await call(self._stub.PullForAudit, message, self._timeout_s + wait_s)
        return [wire_rewards.group_to_audit_from_proto(group) for group in reply.groups]

    async def submit_audit(
        self, group_id: str, samples: Sequence[SampleStatistics], worker_id: str = ""
    ) -> None:
        """Hand in what an audit found; repeating it is safe."""
        message = coordinator_pb2.AuditRequest(
            group_id=group_id,
            samples=[wire_rewards.sample_statistics_to_proto(sample) for sample in samples],
            worker_id=worker_id,
        )
        await call(self._stub.SubmitAudit, message, self._timeout_s)

    async def commits(self, after_step: int) -> Sequence[StepCommit]:
        """Fetch the committed steps greater than `after_step`."""
        message = coordinator_pb2.StepRequest(step=after_step)
        reply = await call(self._stub.Commits, message, self._timeout_s)
        return [wire_steps.step_commit_from_proto(commit) for commit in reply.commits]

    async def status(self) -> RunStatus:
        """Fetch the run at a glance."""
        return wire_status.run_status_from_proto(
            await call(self._stub.Status, records_pb2.Empty(), self._timeout_s)
        )

    async def watch_events(self, after_seq: int, follow: bool) -> AsyncIterator[Event]:
        """Yield journal events after `after_seq`; with `follow`, until the run is finished."""
        clock, at = asyncio.get_running_loop().time, after_seq
        while True:
            opened = clock()
            request = coordinator_pb2.EventsRequest(after_seq=at, follow=follow)
            try:
                async for message in stream(self._stub.WatchEvents, request, FOLLOW_S):
                    at = message.seq
                    yield wire_status.event_from_proto(message)
                return
            except UnavailableError:
                if not follow or clock() - opened < FOLLOW_S:
                    raise


class WorkerClient(CoordinatorClient):
    """What a worker uses: heartbeats, leases and submissions share one stream.

    A coordinator that serves no stream gets calls, as from everybody else.
    """

    def __init__(self, address: str, timeout_s: float = 10.0, **options: Any) -> None:
        """Prepare, with the options of every client; nothing is sent yet."""
        super().__init__(address, timeout_s, **options)
        self._line = StreamClient(lambda: Duplex(self._stub.Work), _error_from_proto)

    async def close(self) -> None:
        """End the stream and close the channel."""
        await self._line.closed()
        await super().close()

    async def heartbeat(self, beat: WorkerHeartbeat) -> HeartbeatReply:
        """Extend the worker's leases and learn what it should give up."""
        message = wire_work.worker_heartbeat_to_proto(beat)
        reply = await self._ask("heartbeat", self._stub.Heartbeat, message, self._timeout_s)
        return wire_work.heartbeat_reply_from_proto(reply)

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        """Ask for leases, waiting up to `request.wait_s` for the first."""
        message = wire_work.lease_request_to_proto(request)
        timeout_s = self._timeout_s + request.wait_s
        return wire_work.lease_reply_from_proto(
            await self._ask("lease", self._stub.LeaseGroup, message, timeout_s)
        )

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        """Hand in a finished group; repeating it is safe."""
        message = wire_work.group_submission_to_proto(submission)
        reply = await self._ask("submission", self._stub.SubmitGroup, message, self._timeout_s)
        return wire_work.submit_verdict_from_proto(reply)

    async def _ask(self, kind: str, method: Any, message: Any, timeout_s: float) -> Any:
        if not self._line.refused:
            try:
                return await self._line.ask(kind, message, timeout_s)
            except ContractError:
                if not self._line.refused:
                    raise
        return await call(method, message, timeout_s)


def _error_from_proto(message: Any) -> AntiphonError:
    return error_from_code(message.status, message.details)
