"""Coordinator client: the contract over a channel; every call has a deadline.

Heartbeats, leases and submissions of a worker share one stream, which is opened with the first of
them, and again after it broke. A long poll gets its waiting time on top of the deadline. Errors arrive
as the classes that the service raised.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partialmethod
from typing import Any, TypeVar, cast

import grpc

from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.status import Event
from antiphon.net.rpc.calls import Call, Client, asks
from antiphon.net.rpc.serving import stream
from antiphon.net.rpc.statuses import error_from_code, error_of
from antiphon.net.security.credentials import Credentials
from antiphon.net.wire import CALLS, WORK_CALLS, event_from_proto
from antiphon.protos import coordinator_pb2, coordinator_pb2_grpc, rollout_pb2
from antiphon.services.coordinator.work_stream import Outbox

FOLLOW_S = 60.0
"""A followed stream of events is opened again after this time."""
CLOSE_S = 2.0
"""Longest wait for a worker's stream to end; nothing depends on it."""
_Method = TypeVar("_Method")


def _streams(ask: Any, name: str, like: _Method) -> _Method:
    """Return the method `like` of the coordinator as a request of this name that `ask` sends in a stream."""
    return cast("_Method", partialmethod(ask, WORK_CALLS[name]))


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
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outgoing = Outbox()
        self._running: asyncio.Task[None] | None = None
        self._next = 0

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running], timeout=CLOSE_S)
        await super().close()

    async def ask(self, call: Call, request: Any) -> Any:
        """Send one request in the worker's stream and return what its reply says.

        Raises:
            AntiphonError: what the server raised; UnavailableError when the stream broke or no
                answer came in time.
        """
        if self._running is None or self._running.done():
            self._outgoing = Outbox()
            self._running = asyncio.ensure_future(self._run(self._outgoing))
        self._next += 1
        number, timeout_s = self._next, self._timeout_s + getattr(request, "wait_s", 0.0)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        body = call.write_request(request)
        self._outgoing.put(rollout_pb2.WorkRequest(id=number, **{call.name: body}))
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answer
        except TimeoutError:
            # A stream that carries nothing any more looks like one whose answers take long.
            self._running.cancel()
            raise UnavailableError(
                f"the coordinator did not answer a {call.name} within {timeout_s:g} s"
            ) from None
        except asyncio.CancelledError:
            self._outgoing.put(rollout_pb2.WorkRequest(id=number, cancel=True))
            raise
        finally:
            del self._waiting[number]
        if reply.HasField("error"):
            raise error_from_code(reply.error.status, reply.error.details)
        return call.read_reply(getattr(reply, call.name))[0]

    async def _run(self, outgoing: Outbox) -> None:
        running = self._stub.Work()

        async def send() -> None:
            while requests := await outgoing.take():
                await running.write(rollout_pb2.WorkRequests(requests=requests))

        sending = asyncio.ensure_future(send())
        # A failure to write is seen here: the reading side of the same stream fails with the reason.
        sending.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        problem: AntiphonError = UnavailableError("the stream to the coordinator ended")
        try:
            async for message in running:
                for reply in message.replies:
                    waiting = self._waiting.get(reply.id)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)
        except grpc.aio.AioRpcError as error:
            problem = error_of(error, self._stub.Work, 0.0)
        finally:
            sending.cancel()
            running.cancel()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(problem)

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
                    yield [event_from_proto(event) for event in message.events]
                return
            except UnavailableError:
                if not follow or clock() - opened < FOLLOW_S:
                    raise

    heartbeat = _streams(ask, "heartbeat", Coordinator.heartbeat)
    lease_group = _streams(ask, "lease", Coordinator.lease_group)
    submit_group = _streams(ask, "submission", Coordinator.submit_group)
    answer_turn = _streams(ask, "turn", Coordinator.answer_turn)
    register = asks(CALLS, Coordinator.register)
    pull_for_reward = asks(CALLS, Coordinator.pull_for_reward)
    submit_rewards = asks(CALLS, Coordinator.submit_rewards)
    pull_turns = asks(CALLS, Coordinator.pull_turns)
    submit_turns = asks(CALLS, Coordinator.submit_turns)
    request_samples = asks(CALLS, Coordinator.request_samples)
    await_samples = asks(CALLS, Coordinator.await_samples)
    seal_client_step = asks(CALLS, Coordinator.seal_client_step)
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
    note_orders = asks(CALLS, Coordinator.note_orders)
    revoke = asks(CALLS, Coordinator.revoke)
    pardon = asks(CALLS, Coordinator.pardon)
    pull_for_audit = asks(CALLS, Coordinator.pull_for_audit)
    submit_audit = asks(CALLS, Coordinator.submit_audit)
    commits_after = asks(CALLS, Coordinator.commits_after)
    status = asks(CALLS, Coordinator.status)
