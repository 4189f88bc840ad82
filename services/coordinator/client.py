"""Coordinator client: the contract over a channel; every call has a deadline.

Heartbeats, leases and submissions of a worker share one stream, which is opened with the first of
them. A long poll gets its waiting time on top of the deadline. Errors arrive as the classes that the
service raised.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.records import GroupSubmission, SubmitVerdict
from antiphon.core.requests import HeartbeatReply, LeaseReply, LeaseRequest, WorkerHeartbeat
from antiphon.core.status import Event
from antiphon.net import wire
from antiphon.net.rpc.serving import Duplex, error_from_code, stream
from antiphon.net.rpc.unary import Client, asks
from antiphon.net.security.credentials import Credentials
from antiphon.net.wire import CALLS
from antiphon.protos import coordinator_pb2, coordinator_pb2_grpc
from antiphon.services.coordinator.work_stream import StreamClient

FOLLOW_S = 60.0
"""A followed stream of events is opened again after this time."""


class CoordinatorClient(Client, Coordinator):
    """A coordinator somewhere else."""

    def __init__(
        self,
        address: str,
        timeout_s: float = 10.0,
        *,
        channel: Any = None,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(coordinator_pb2_grpc.CoordinatorStub, address, credentials, channel)
        self.address = address
        self._timeout_s = timeout_s
        self._stream = StreamClient(lambda: Duplex(self._stub.Work), _error_from_proto)

    async def close(self) -> None:
        await self._stream.closed()
        await super().close()

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> HeartbeatReply:
        message = wire.worker_heartbeat_to_proto(heartbeat)
        reply = await self._stream.ask("heartbeat", message, self._timeout_s)
        return wire.heartbeat_reply_from_proto(reply)

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        message = wire.lease_request_to_proto(request)
        reply = await self._stream.ask("lease", message, self._timeout_s + request.wait_s)
        return wire.lease_reply_from_proto(reply)

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        message = wire.group_submission_to_proto(submission)
        reply = await self._stream.ask("submission", message, self._timeout_s)
        return wire.submit_verdict_from_proto(reply)

    async def event_pages(self, after_seq: int, follow: bool) -> AsyncIterator[Sequence[Event]]:
        clock, at = asyncio.get_running_loop().time, after_seq
        while True:
            opened = clock()
            request = coordinator_pb2.EventsRequest(after_seq=at, follow=follow)
            try:
                # What is there already comes page upon page, however long the journal is.
                limits = (FOLLOW_S, None) if follow else (None, self._timeout_s)
                async for message in stream(self._stub.WatchEvents, request, *limits):
                    at = message.events[-1].seq
                    yield [wire.event_from_proto(event) for event in message.events]
                return
            except UnavailableError:
                if not follow or clock() - opened < FOLLOW_S:
                    raise

    register = asks(CALLS, Coordinator.register)
    pull_for_reward = asks(CALLS, Coordinator.pull_for_reward)
    submit_rewards = asks(CALLS, Coordinator.submit_rewards)
    open_step = asks(CALLS, Coordinator.open_step)
    open_evaluation = asks(CALLS, Coordinator.open_evaluation)
    await_stage = asks(CALLS, Coordinator.await_stage)
    commit_step = asks(CALLS, Coordinator.commit_step)
    announce_snapshot = asks(CALLS, Coordinator.announce_snapshot)
    worker_kit = asks(CALLS, Coordinator.worker_kit)
    latest_manifest = asks(CALLS, Coordinator.latest_manifest)
    plan_transfer = asks(CALLS, Coordinator.plan_transfer)
    skip_step = asks(CALLS, Coordinator.skip_step)
    pause = asks(CALLS, Coordinator.pause)
    finish = asks(CALLS, Coordinator.finish)
    drain = asks(CALLS, Coordinator.drain)
    revoke = asks(CALLS, Coordinator.revoke)
    pardon = asks(CALLS, Coordinator.pardon)
    pull_for_audit = asks(CALLS, Coordinator.pull_for_audit)
    submit_audit = asks(CALLS, Coordinator.submit_audit)
    commits_after = asks(CALLS, Coordinator.commits_after)
    status = asks(CALLS, Coordinator.status)


def _error_from_proto(message: Any) -> AntiphonError:
    return error_from_code(message.status, message.details)
