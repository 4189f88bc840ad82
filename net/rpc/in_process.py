"""In process: production clients and servicers joined by a transport that is handed in, without sockets.

An `InProcessChannel` stands in for a gRPC channel below the generated stubs, an `InProcessServer` for a
server behind `GuardInterceptor`, which lets calls in as over a network. Messages are serialized and parsed
as on a real wire, statuses become errors by the same code, and what lies between is the caller's: the
simulation delays, loses, repeats and cuts there.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc


@dataclass(frozen=True, slots=True)
class Identity:
    """What a connection shows of its caller."""

    authorization: str = ""
    """The header, `Bearer TOKEN`."""
    certificate_names: tuple[str, ...] = ()


class CallFailed(Exception):
    """A call ended with a status other than OK."""

    def __init__(self, status: str, details: str) -> None:
        """Name a gRPC status, such as UNAVAILABLE, and say why."""
        super().__init__(status, details)
        self.status = status
        self.details = details


LONGEST_STREAM_S = 86400.0
"""Deadline of a stream whose replies have their own."""


class Transport(Protocol):
    """Carries serialized messages to a server and back."""

    async def unary(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """Return the serialized reply to one request.

        Args:
            path: `/package.Service/Method`.
            body: the serialized request.
            timeout_s: the caller's deadline, seconds from now.

        Raises:
            CallFailed: with the status that the caller is to see.
        """

    def stream(self, path: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        """Yield the serialized replies to one request; raises as `unary` does."""

    def converse(self, path: str) -> "Conversation":
        """Begin a call that streams both ways; it has no deadline."""


class Conversation(Protocol):
    """A call under way that streams serialized messages both ways."""

    async def write(self, body: bytes) -> None:
        """Send one message.

        Raises:
            CallFailed: when the line is known to be broken.
        """

    def read(self) -> AsyncIterator[bytes]:
        """Yield what the other end sends; raises as `write` does."""

    def cancel(self) -> None:
        """Hang up."""


def _as_grpc(failed: CallFailed) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode[failed.status], empty, empty, failed.details)


class _Running:
    """What a stub's method that streams returns: an iterator of replies, which may take requests too."""

    def __init__(
        self, replies: AsyncIterator[bytes], forms: Mapping[str, Any], line: Conversation | None = None
    ) -> None:
        self._replies, self._forms, self._line = replies, forms, line

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for body in self._replies:
                yield self._forms["response_deserializer"](body)
        except CallFailed as failed:
            raise _as_grpc(failed) from None

    async def write(self, request: Any) -> None:
        assert self._line is not None
        try:
            await self._line.write(self._forms["request_serializer"](request))
        except CallFailed as failed:
            raise _as_grpc(failed) from None

    def cancel(self) -> None:
        """Hang up; of a call with one request nothing is under way between two messages."""
        if self._line is not None:
            self._line.cancel()


class InProcessChannel:
    """A channel as the generated stubs use it, over a transport; `forms` make messages bytes and back."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def unary_unary(self, path: str, **forms: Any) -> Callable[..., Any]:

        async def method(request: Any, timeout: float, **_: Any) -> Any:
            try:
                reply = await self._transport.unary(path, forms["request_serializer"](request), timeout)
            except CallFailed as failed:
                raise _as_grpc(failed) from None
            return forms["response_deserializer"](reply)

        method._method = path  # type: ignore[attr-defined]  # errors name the call by it
        return method

    def unary_stream(self, path: str, **forms: Any) -> Callable[..., Any]:

        def method(request: Any, timeout: float | None, **_: Any) -> _Running:
            limit_s = LONGEST_STREAM_S if timeout is None else timeout
            return _Running(
                self._transport.stream(path, forms["request_serializer"](request), limit_s), forms
            )

        return method

    def stream_stream(self, path: str, **forms: Any) -> Callable[..., Any]:

        def method(**_: Any) -> _Running:
            line = self._transport.converse(path)
            return _Running(line.read(), forms, line)

        method._method = path  # type: ignore[attr-defined]
        return method

    async def close(self) -> None:
        """There is nothing to close."""


class _Context:
    """What servicers and a server's entrance need of a call's context."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", self._identity.authorization),)

    def auth_context(self) -> Mapping[str, tuple[bytes, ...]]:
        names = tuple(name.encode() for name in self._identity.certificate_names)
        return {"x509_subject_alternative_name": names}

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise CallFailed(code.name, details)


class InProcessServer:
    """A server as `GuardInterceptor` uses it; its owner passes the messages in."""

    def __init__(self) -> None:
        self._handlers: list[Any] = []
        self._methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Take the handlers of a service, each of which takes a stream of unparsed messages."""
        self._handlers += handlers

    async def answer(self, path: str, body: bytes, identity: Identity) -> list[bytes]:
        """Answer one request with its serialized replies: one, or all of a stream that ends.

        Raises:
            CallFailed: with the status that the servicer ended the call with.
        """
        handler, context = self._handler(path), _Context(identity)
        if handler.response_streaming:
            replies = handler.stream_stream(_only(body), context)
            return [handler.response_serializer(reply) async for reply in replies]
        return [handler.response_serializer(await handler.stream_unary(_only(body), context))]

    async def converse(
        self, path: str, requests: AsyncIterator[bytes], identity: Identity
    ) -> AsyncIterator[bytes]:
        """Answer a call that streams both ways, message by message.

        Raises:
            CallFailed: with the status that the servicer ended the call with.
        """
        handler = self._handler(path)
        async for reply in handler.stream_stream(requests, _Context(identity)):
            yield handler.response_serializer(reply)

    def _handler(self, path: str) -> Any:
        known = self._methods.get(path)
        if known is None:
            found = (handlers.service(_CallDetails(path, ())) for handlers in self._handlers)
            known = next((handler for handler in found if handler is not None), None)
            if known is None:
                raise CallFailed("UNIMPLEMENTED", f"there is no method {path}")
            self._methods[path] = known
        return known


class _CallDetails(NamedTuple):
    """What a service's handlers are looked up by."""

    method: str
    invocation_metadata: tuple[()]


async def _only(body: bytes) -> AsyncIterator[bytes]:
    yield body
