"""GuardInterceptor: every call to a server is read, then admitted by its guard, then answered."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from antiphon.core.trust.access_tokens import Denial
from antiphon.services.security.guard import Guard

_STATUS_OF_DENIAL = {
    Denial.UNKNOWN: grpc.StatusCode.UNAUTHENTICATED,
    Denial.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Denial.BUSY: grpc.StatusCode.UNAVAILABLE,  # what a caller tries again by itself
}


class GuardInterceptor:
    """Stands before a server while services are added: every call is read, admitted, answered.

    Handlers are wrapped once, so that nothing is looked up for a call.
    """

    def __init__(self, server: grpc.aio.Server, guard: Guard | None) -> None:
        self._server = server
        self._guard = guard

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Generated code calls this with the bare handlers; the wrapped ones take their place."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        wrapped = {name: self._wrap(f"/{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))

    def _wrap(self, method: str, handler: Any) -> Any:
        async def admit(request: Any, context: Any) -> None:
            if isinstance(request, _Unreadable):
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{method} got {request.size} bytes that are not its message; use the same version of "
                    "Antiphon on both sides",
                )
            if self._guard is None:
                return
            metadata = {key.lower(): value for key, value in context.invocation_metadata() or ()}
            authorization = str(metadata.get("authorization", ""))
            names = _names_of(context.auth_context())
            refusal = self._guard.admit(method, authorization, names, request)
            if refusal is not None:
                await context.abort(_STATUS_OF_DENIAL[refusal.denial], refusal.sentence)

        return _wrapped(handler, admit)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Bytes that are no message."""

    size: int


def _names_of(auth_context: Any) -> frozenset[str]:
    found = auth_context.get("x509_subject_alternative_name", ())
    return frozenset(name.decode(errors="replace") for name in found)


def _wrapped(handler: Any, admit: Callable[[Any, Any], Awaitable[None]]) -> Any:
    """Return a handler that admits every message before its service sees it."""
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    (kind,) = (kind for kind in kinds if getattr(handler, kind) is not None)
    inner = getattr(handler, kind)

    def read(payload: bytes) -> Any:
        try:
            return handler.request_deserializer(payload)
        except DecodeError:
            return _Unreadable(len(payload))

    async def admitted(requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            await admit(request, context)
            yield request

    async def enter(request: Any, context: Any) -> Any:
        if handler.request_streaming:
            await admit(None, context)
            return admitted(request, context)
        await admit(request, context)
        return request

    async def answer(request: Any, context: Any) -> Any:
        return await inner(await enter(request, context), context)

    async def answer_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async for reply in inner(await enter(request, context), context):
            yield reply

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    chosen = answer_stream if handler.response_streaming else answer
    return make(chosen, request_deserializer=read, response_serializer=handler.response_serializer)
