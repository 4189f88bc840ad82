"""Connection: calls of one simulated process to another, as stubs make them; most of it is of those that
stream both ways.

Messages of one direction arrive in the order in which they were sent, each with its own delay. A
connection breaks as a whole: when an end dies, when a message gets lost in a storm, or when a cut lasts
longer than the keepalive; what was on its way is lost then, and each end hears of it by itself.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from antiphon.simulator.virtual.in_process import CallAborted, CallFailed, Identity
from antiphon.simulator.virtual.loop import Process, current_process
from antiphon.simulator.virtual.network import KEEPALIVE_S, Network

LONGEST_STREAM_S = 86400.0
"""Deadline of a stream whose replies have their own."""


class _Direction:
    """One direction: ordered delivery into an inbox."""

    def __init__(self, connection: "Connection", source: str, target: str) -> None:
        self._connection = connection
        self.ends = (source, target)
        self._inbox: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._free_at_s = 0.0
        self.failure: CallFailed | None = None
        """Why nothing comes any more; None while something may."""
        self.over = False
        """The other end said everything."""

    def send(self, body: bytes) -> None:
        network = self._connection.network
        if network.is_cut(*self.ends):
            self._connection.wait_for_heal(lambda: self.send(body))
        elif network.loses():
            self._connection.break_down("Socket closed")
        else:
            self._at(self._arrive, body)

    def close(self, failure: CallFailed | None) -> None:
        """End, behind everything that was sent."""
        if not self._connection.network.is_cut(*self.ends):
            self._at(self._end, failure)

    def fail(self, failure: CallFailed) -> None:
        self._end(failure)

    def _at(self, on: Callable[..., None], *arguments: object) -> None:
        network = self._connection.network
        self._free_at_s = max(self._free_at_s, network.now() + network.delay_s())
        network.later(self._free_at_s - network.now(), on, *arguments)

    def _arrive(self, body: bytes) -> None:
        self._connection.network.messages += 1
        if self.failure is None and not self.over:
            self._inbox.append(body)
            self._news.set()

    def _end(self, failure: CallFailed | None) -> None:
        if self.failure is None and not self.over:
            self.failure, self.over = failure, failure is None
            self._news.set()

    async def read(self) -> AsyncIterator[bytes]:
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            if self.failure is not None:
                raise self.failure
            if self.over:
                return
            self._news.clear()
            await self._news.wait()


class Connection:
    """Both directions of one call that streams serialized messages; it has no deadline."""

    def __init__(
        self, network: Network, sender: Process, address: str, path: str, identity: Identity
    ) -> None:
        """Call an address; the process that listens there when the call arrives answers it."""
        self._identity = identity
        self.network = network
        self.sender = sender
        self.server: Process | None = None
        self._address = address
        self._path = path
        self._task: asyncio.Task[None] | None = None
        self._broken = False
        target = network.name_at(address)
        self._up = _Direction(self, sender.name, target)
        self._down = _Direction(self, target, sender.name)
        if network.is_cut(sender.name, target):
            self.wait_for_heal(self._open)
        else:
            network.later(network.delay_s(), self._open)
        network.watch(self, self.process_ended)

    async def write(self, body: bytes) -> None:
        """Send one message.

        Raises:
            CallFailed: when the connection is known to be broken.
        """
        if self._down.failure is not None:
            raise self._down.failure
        if self.sender.alive:
            self._up.send(body)

    def read(self) -> AsyncIterator[bytes]:
        """Yield the messages of the other end; raises `CallFailed` when the connection breaks."""
        return self._down.read()

    def cancel(self) -> None:
        """Hang up."""
        self._down.fail(CallFailed("CANCELLED", "Locally cancelled by application!"))
        self._leave()

    def process_ended(self, process: Process) -> None:
        if process is self.sender:
            self._leave()
        elif process is self.server:
            self.break_down("Connection reset by peer")

    def break_down(self, why: str) -> None:
        """Lose the connection; the caller hears of it at once or by its keepalive."""
        if not self._broken:
            self._broken = True
            failure = CallFailed("UNAVAILABLE", why)
            self.network.later(self.network.notice_s(), self._down.fail, failure)
            self._leave()

    def wait_for_heal(self, on: Callable[[], None]) -> None:
        """Do something once the cut is healed, unless the keepalive gives up before."""
        self.network.hold(on)
        self.network.later(KEEPALIVE_S, self._give_up)

    def _give_up(self) -> None:
        if self.network.is_cut(*self._up.ends) or self.network.is_cut(*self._down.ends):
            self.break_down("keepalive watchdog timeout")

    def _open(self) -> None:
        found = self.network.listener(self._address)
        if self._broken or self._down.failure is not None:
            return
        if found is None:
            self._broken = True
            self._down.fail(CallFailed("UNAVAILABLE", "Connection refused"))
            return
        self.server, server = found

        async def serve() -> None:
            async for reply in server.converse(self._path, self._up.read(), self._identity):
                self._down.send(reply)

        self._task = self.server.spawn(serve())
        self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self.network.forget(self)
        if task.cancelled() or self.server is None or not self.server.alive:
            return
        error = task.exception()
        if error is None:
            self._down.close(None)
        elif isinstance(error, CallAborted):
            self._down.close(CallFailed(error.code().name, error.details()))
        else:
            self.network.broken.append(f"{self.server.name} broke in {self._path}: {error!r}")
            self._down.close(CallFailed("UNKNOWN", f"Unexpected {type(error)}"))

    def _leave(self) -> None:
        if self._task is not None and not self._task.done():
            self.network.later(self.network.delay_s(), self._task.cancel)
        self.network.forget(self)


class _Running:
    """What a stub's method that streams returns: an iterator of replies, which may take requests too."""

    def __init__(
        self, replies: AsyncIterator[bytes], forms: Mapping[str, Any], line: Connection | None = None
    ) -> None:
        self._replies, self._forms, self._line = replies, forms, line

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for body in self._replies:
            yield self._forms["response_deserializer"](body)

    async def write(self, request: Any) -> None:
        assert self._line is not None
        await self._line.write(self._forms["request_serializer"](request))

    def cancel(self) -> None:
        """Hang up; of a call with one request nothing is under way between two messages."""
        if self._line is not None:
            self._line.cancel()


class InProcessChannel:
    """A channel as the generated stubs use it, from the process that uses it to an address.

    `forms` make messages bytes and back.
    """

    def __init__(self, network: Network, address: str, identity: Identity) -> None:
        """Send to `address`, to the process that listens there at the time, as the bearer of `identity`."""
        self._network = network
        self._address = address
        self._identity = identity

    def unary_unary(self, path: str, **forms: Any) -> Callable[..., Any]:

        async def method(request: Any, timeout: float, **_: Any) -> Any:
            (reply,) = await self._replies(path, forms["request_serializer"](request), timeout)
            return forms["response_deserializer"](reply)

        method._method = path  # type: ignore[attr-defined]  # errors name the call by it
        return method

    def unary_stream(self, path: str, **forms: Any) -> Callable[..., Any]:

        async def replies(body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
            for reply in await self._replies(path, body, timeout_s):
                yield reply

        def method(request: Any, timeout: float | None, **_: Any) -> _Running:
            limit_s = LONGEST_STREAM_S if timeout is None else timeout
            return _Running(replies(forms["request_serializer"](request), limit_s), forms)

        return method

    def stream_stream(self, path: str, **forms: Any) -> Callable[..., Any]:

        def method(**_: Any) -> _Running:
            line = Connection(self._network, _sender(), self._address, path, self._identity)
            return _Running(line.read(), forms, line)

        method._method = path  # type: ignore[attr-defined]
        return method

    async def close(self) -> None:
        """There is nothing to close."""

    async def _replies(self, path: str, body: bytes, timeout_s: float) -> list[bytes]:
        return await self._network.call(_sender(), self._address, path, body, timeout_s, self._identity)


def _sender() -> Process:
    process = current_process()
    if process is None:
        raise asyncio.CancelledError  # a call from outside every process is a call of a dead one
    return process
