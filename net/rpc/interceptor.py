"""GuardInterceptor: a call is let in by its headers, then read, weighed, parsed and answered.

Every handler is registered as one that takes a stream, also where the caller sends a single message: only
such a handler is called before the message was read. So a caller that is not let in costs only its headers.
An error of our tree that the answer ends with becomes the status that stands for it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from antiphon.core.errors import AntiphonError
from antiphon.net.rpc.statuses import status_of
from antiphon.net.security.guard import Caller, Guard

READ_S = 120.0
"""Longest time from the beginning of a call to its only message; what was let in holds one of few places."""


class GuardInterceptor:
    """Stands before a server while services are added; without a guard every call is let in.

    Handlers are wrapped once, so that nothing is looked up for a call.
    """

    def __init__(self, server: grpc.aio.Server, guard: Guard | None) -> None:
        self._server = server
        self._guard = guard

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Generated code calls this with the bare handlers; the wrapped ones take their place."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        wrapped = {
            name: _Entrance(f"/{service}/{name}", handler, self._guard).handler()
            for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))


class _Entrance:
    """One RPC of a server: what its handler sees was let in before."""

    def __init__(self, method: str, handler: Any, guard: Guard | None) -> None:
        self._method = method
        self._guard = guard
        self._wrapped = handler
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        self._inner = next(inner for kind in kinds if (inner := getattr(handler, kind)) is not None)

    def handler(self) -> Any:
        """Return the handler that a server is given; it gets messages as bytes."""
        forms = {"request_deserializer": None, "response_serializer": self._wrapped.response_serializer}
        if self._wrapped.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._answer_stream, **forms)
        return grpc.stream_unary_rpc_method_handler(self._answer, **forms)

    async def _answer(self, payloads: AsyncIterator[bytes], context: Any) -> Any:
        caller = None
        try:
            caller = self._enter(context)
            return await self._inner(await self._read(payloads, caller, context), context)
        except AntiphonError as error:
            ended = status_of(error), str(error)
        except grpc.aio.AbortError as error:
            raise _alone(error) from None
        finally:
            self._leave(caller)
        await context.abort(*ended)

    async def _answer_stream(self, payloads: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        caller = None
        try:
            caller = self._enter(context)
            async for reply in self._inner(await self._read(payloads, caller, context), context):
                yield reply
            return
        except AntiphonError as error:
            ended = status_of(error), str(error)
        except grpc.aio.AbortError as error:
            raise _alone(error) from None
        finally:
            self._leave(caller)
        await context.abort(*ended)

    def _enter(self, context: Any) -> Caller | None:
        """Let the call in; None where no guard needs to know the caller.

        Raises:
            Refusal: when it is not let in.
        """
        if self._guard is None:
            return None
        metadata = {key.lower(): value for key, value in context.invocation_metadata() or ()}
        shown = context.auth_context().get("x509_subject_alternative_name", ())
        names = frozenset(name.decode(errors="replace") for name in shown)
        return self._guard.enter(self._method, str(metadata.get("authorization", "")), names)

    def _leave(self, caller: Caller | None) -> None:
        if self._guard is not None and caller is not None:
            self._guard.leave(caller)

    async def _read(self, payloads: AsyncIterator[bytes], caller: Caller | None, context: Any) -> Any:
        """Return what the service's handler is given: a stream of messages, or the only one."""
        messages = self._messages(payloads, caller, context)
        if self._wrapped.request_streaming:
            return messages
        try:
            async with asyncio.timeout(READ_S):
                async for message in messages:
                    return message
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"{self._method}: no message came within {READ_S:g} s"
            )
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{self._method} came without its message")

    async def _messages(
        self, payloads: AsyncIterator[bytes], caller: Caller | None, context: Any
    ) -> AsyncIterator[Any]:
        guard = self._guard
        async for payload in payloads:
            if guard is not None and caller is not None:
                guard.weigh(caller, len(payload))
            try:
                message = self._wrapped.request_deserializer(payload)
            except DecodeError:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{self._method} got {len(payload)} bytes that are not its message; use the same version "
                    "of Antiphon on both sides",
                )
            if guard is not None and caller is not None and (pause_s := guard.admit(caller, message)):
                await asyncio.sleep(pause_s)  # nothing more is read of this caller meanwhile
            yield message


def _alone(error: BaseException) -> BaseException:
    """Return an error without the frames that it passed and the errors before it.

    A call and the error that ended it hold each other, so until garbage is looked for the message would stay.
    """
    error.__context__ = None
    return error.with_traceback(None)
