"""Work stream: a worker's heartbeats, leases and submissions over one call instead of thousands.

A call of its own costs more than most answers do. Here each request carries an id and is
answered by itself, in whatever order answers come; an error travels beside the id. Even a message
costs more than most answers do, so what is ready at the same time travels in one: a worker hands in
a group and asks for the next, and both answers wait for the same transaction. When a stream breaks,
each request that was not answered may be repeated, as with calls.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from antiphon.core.errors import AntiphonError, ContractError
from antiphon.net.rpc.statuses import error_to_code
from antiphon.protos import rollout_pb2

MOST_OPEN = 256
"""Requests of one stream, or of one of its messages, that may wait for answers; a worker has a handful."""

TOGETHER_BYTES = 256 << 10
"""Nothing more is put into a message of this size."""

Message = Any


class Outbox:
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

    def __init__(self, handlers: Mapping[str, Callable[[Message], Awaitable[Message]]]) -> None:
        """`handlers` make the body of a reply from that of a request, by the name of the body."""
        self._handlers = handlers
        self._replies = Outbox()
        self._open: dict[int, asyncio.Task[None]] = {}
        self._broken: BaseException | None = None

    async def serve(self, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
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
        number = request.id
        if request.cancel:
            if (given_up := self._open.get(number)) is not None:
                given_up.cancel()
        elif number in self._open:
            self._refuse(number, ContractError(f"request {number} is not answered yet; take another id"))
        elif len(self._open) >= MOST_OPEN:
            self._refuse(
                number, ContractError(f"more than {MOST_OPEN} requests of one stream wait for answers")
            )
        else:
            task = self._open[number] = asyncio.ensure_future(self._answer(request))
            task.add_done_callback(partial(self._closed, number))

    async def _answer(self, request: Message) -> None:
        kind = request.WhichOneof("body")
        try:
            if kind not in self._handlers:
                raise ContractError(f"request {request.id} of a stream asks for nothing that is known here")
            body = await self._handlers[kind](getattr(request, kind))
            self._replies.put(rollout_pb2.WorkReply(id=request.id, **{kind: body}))
        except AntiphonError as error:
            self._refuse(request.id, error)

    def _closed(self, number: int, task: "asyncio.Task[None]") -> None:
        del self._open[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            # No error of ours: a mistake in the code, which ends the stream as it would end a call.
            self._broken = error
            self._replies.end()

    def _refuse(self, number: int, error: AntiphonError) -> None:
        said = rollout_pb2.WorkError(status=error_to_code(error), details=str(error))
        self._replies.put(rollout_pb2.WorkReply(id=number, error=said))
