"""Work stream: a worker's heartbeats, leases and submissions over one call instead of thousands.

A call of its own costs more than most answers do. Here each request carries an id and is
answered by itself, in whatever order answers come; an error travels beside the id. Even a message
costs more than most answers do, so what is ready at the same time travels in one: a worker hands in
a group and asks for the next, and both answers wait for the same transaction. When a stream breaks,
each request that was not answered may be repeated, as with calls.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from antiphon.core.errors import AntiphonError, ContractError, UnavailableError
from antiphon.protos import rollout_pb2

MOST_OPEN = 256
"""Requests of one stream, or of one of its messages, that may wait for answers; a worker has a handful."""

TOGETHER_BYTES = 256 << 10
"""Nothing more is put into a message of this size."""

CLOSE_S = 2.0
"""Longest wait for a stream to end; nothing depends on it."""

Message = Any
Handler = Callable[[Message], Awaitable[Message]]


class _Outbox:
    """What is to be sent, in order: what is there at the same time is taken together."""

    def __init__(self) -> None:
        self._waiting: deque[Message] = deque()
        self._changed = asyncio.Event()
        self._ended = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        self._changed.set()

    def end(self) -> None:
        """Say that nothing follows."""
        self._ended = True
        self._changed.set()

    async def take(self) -> list[Message]:
        """Return the next message and those that fit beside it; nothing once it has ended.

        One that is larger than all of them may be goes by itself.
        """
        while not self._waiting:
            if self._ended:
                return []
            self._changed.clear()
            await self._changed.wait()
        found = [self._waiting.popleft()]
        left = TOGETHER_BYTES - (found[0].ByteSize() if self._waiting else 0)
        while self._waiting and (left := left - self._waiting[0].ByteSize()) >= 0:
            found.append(self._waiting.popleft())
        return found


class StreamServer:
    """Answers the requests of one stream."""

    def __init__(
        self, handlers: dict[str, Handler], error_to_proto: Callable[[AntiphonError], Message]
    ) -> None:
        """`handlers` make the body of a reply from that of a request, by the name of the body."""
        self._handlers = handlers
        self._error_to_proto = error_to_proto
        self._replies = _Outbox()
        self._open: dict[int, asyncio.Task[None]] = {}
        self._broken: BaseException | None = None

    async def serve(self, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """Yield `WorkReplies` until all `WorkRequests` are answered; closing early cancels the rest."""
        reading = asyncio.ensure_future(self._read(requests))
        try:
            while replies := await self._replies.take():
                yield rollout_pb2.WorkReplies(replies=replies)
            if self._broken is not None:
                raise self._broken
            await reading
        finally:
            for task in (reading, *self._open.values()):
                task.cancel()

    async def _read(self, requests: AsyncIterator[Message]) -> None:
        try:
            async for message in requests:
                more, unread = len(message.requests), len(self._replies)
                if more > MOST_OPEN or unread > 2 * MOST_OPEN:
                    raise ContractError(
                        f"a stream sent {more} requests at once while {unread} answers are not read; "
                        f"{MOST_OPEN} and {2 * MOST_OPEN} are allowed"
                    )
                for request in message.requests:
                    self._begin(request)
            if self._open:
                await asyncio.wait(self._open.values())
        finally:
            self._replies.end()

    def _begin(self, request: Message) -> None:
        if request.cancel:
            if (given_up := self._open.get(request.id)) is not None:
                given_up.cancel()
            return
        if len(self._open) >= MOST_OPEN or request.id in self._open:
            what = f"request {request.id} is not answered yet; take another id"
            if request.id not in self._open:
                what = f"more than {MOST_OPEN} requests of one stream wait for answers"
            self._replies.put(self._refusal(request.id, ContractError(what)))
            return
        task = asyncio.ensure_future(self._answer(request))
        self._open[request.id] = task
        task.add_done_callback(partial(self._closed, request.id))

    async def _answer(self, request: Message) -> None:
        kind = request.WhichOneof("body")
        handler = self._handlers.get(kind)
        try:
            if handler is None:
                raise ContractError(f"request {request.id} of a stream asks for nothing that is known here")
            body = await handler(getattr(request, kind))
            reply = rollout_pb2.WorkReply(id=request.id, **{kind: body})
        except AntiphonError as error:
            reply = self._refusal(request.id, error)
        self._replies.put(reply)

    def _closed(self, number: int, task: asyncio.Task[None]) -> None:
        self._open.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # No error of ours: a mistake in the code, which ends the stream as it would end a call.
            self._broken = error
            self._replies.end()

    def _refusal(self, number: int, error: AntiphonError) -> Message:
        return rollout_pb2.WorkReply(id=number, error=self._error_to_proto(error))


class StreamClient:
    """The asking side: opens the stream when it is first needed, and again after it broke."""

    def __init__(
        self,
        open_stream: Callable[[], Any],
        error_from_proto: Callable[[Message], AntiphonError],
    ) -> None:
        """`open_stream` begins the call; `error_from_proto` makes a `WorkError` what the server raised."""
        self._open_stream = open_stream
        self._error_from_proto = error_from_proto
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._outgoing = _Outbox()
        self._running: asyncio.Task[None] | None = None
        self._next = 0

    async def ask(self, kind: str, body: Message, timeout_s: float) -> Message:
        """Send one request, its body named as in `WorkRequest`, and return the body of its reply.

        Raises:
            AntiphonError: what the server raised; UnavailableError when the stream broke or no
                answer came in time.
        """
        if self._running is None or self._running.done():
            self._outgoing = _Outbox()
            self._running = asyncio.ensure_future(self._run(self._outgoing))
        self._next += 1
        number = self._next
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._outgoing.put(rollout_pb2.WorkRequest(id=number, **{kind: body}))
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answer
        except TimeoutError:
            # A stream that carries nothing any more looks like one whose answers take long.
            self.close()
            raise UnavailableError(
                f"the coordinator did not answer a {kind} within {timeout_s:g} s"
            ) from None
        except asyncio.CancelledError:
            self._outgoing.put(rollout_pb2.WorkRequest(id=number, cancel=True))
            raise
        finally:
            self._waiting.pop(number, None)
        found = reply.WhichOneof("body")
        if found == "error":
            raise self._error_from_proto(reply.error)
        return getattr(reply, kind)

    def close(self) -> None:
        """End the stream; a call that waits for an answer gets an UnavailableError."""
        if self._running is not None:
            self._running.cancel()

    async def closed(self) -> None:
        """End the stream and wait until it is gone."""
        running = self._running
        if running is not None:
            running.cancel()
            await asyncio.wait([running], timeout=CLOSE_S)

    async def _run(self, outgoing: _Outbox) -> None:
        stream = self._open_stream()
        sending = asyncio.ensure_future(_send(stream, outgoing))
        sending.add_done_callback(_seen)
        problem: AntiphonError = UnavailableError("the stream to the coordinator ended")
        try:
            async for message in stream:
                for reply in message.replies:
                    waiting = self._waiting.get(reply.id)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)
        except AntiphonError as error:
            problem = error
        finally:
            sending.cancel()
            stream.cancel()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(problem)


async def _send(stream: Any, outgoing: _Outbox) -> None:
    while requests := await outgoing.take():
        await stream.write(rollout_pb2.WorkRequests(requests=requests))


def _seen(task: "asyncio.Task[None]") -> None:
    """Mark a failure to write as seen: the reading side of the same stream fails with the reason."""
    if not task.cancelled():
        task.exception()
