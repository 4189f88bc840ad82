"""In process: what stands in for gRPC below production clients and servicers, without sockets.

An `InProcessServer` stands for a server behind `GuardInterceptor`, which lets calls in as over a network; on
the other side is `connection.InProcessChannel`. Messages are serialized and parsed as on a real wire, and
statuses become errors by the same code.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc


@dataclass(frozen=True, slots=True)
class Identity:
    """What a connection shows of its caller."""

    authorization: str = ""
    """The header, `Bearer TOKEN`."""
    certificate_names: tuple[str, ...] = ()


class CallFailed(grpc.aio.AioRpcError):  # type: ignore[misc]
    """A call ended with a status other than OK."""

    def __init__(self, status: str, details: str) -> None:
        """Name a gRPC status, such as UNAVAILABLE, and say why."""
        empty = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode[status], empty, empty, details)


class CallAborted(CallFailed):
    """A servicer ended a call so; what a client hears of is a `CallFailed` of its own."""


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
        raise CallAborted(code.name, details)


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
            CallAborted: with the status that the servicer ended the call with.
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
            CallAborted: with the status that the servicer ended the call with.
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
                raise CallAborted("UNIMPLEMENTED", f"there is no method {path}")
            self._methods[path] = known
        return known


class _CallDetails(NamedTuple):
    """What a service's handlers are looked up by."""

    method: str
    invocation_metadata: tuple[()]


async def _only(body: bytes) -> AsyncIterator[bytes]:
    yield body
