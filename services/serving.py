"""Serving: how a gRPC server and channel are set up, and errors cross the wire as themselves.

Every call has a deadline. An error of our own tree leaves the server as a status and enters
the client as the same class, with the same sentence.
"""

import asyncio
import functools
import inspect
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from antiphon.core.errors import (
    AntiphonError,
    ConfigError,
    ContractError,
    InfeasibleError,
    IntegrityError,
    UnavailableError,
)

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message either side accepts; batches and weights travel as files and chunks instead."""

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_STATUS_OF: dict[type[AntiphonError], grpc.StatusCode] = {
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    InfeasibleError: grpc.StatusCode.OUT_OF_RANGE,
    ContractError: grpc.StatusCode.FAILED_PRECONDITION,
    IntegrityError: grpc.StatusCode.DATA_LOSS,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    AntiphonError: grpc.StatusCode.UNKNOWN,
}
_ERROR_OF: dict[grpc.StatusCode, type[AntiphonError]] = {
    **{status: error for error, status in _STATUS_OF.items()},
    grpc.StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ContractError,
    grpc.StatusCode.UNIMPLEMENTED: ContractError,
}

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def is_loopback(host: str) -> bool:
    """Tell whether `host` names this machine alone."""
    return host in {"localhost", "127.0.0.1", "::1"} or host.startswith("127.")


async def start_server(
    host: str,
    port: int,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
) -> tuple[grpc.aio.Server, int]:
    """Start a server with the health service and return it with the port it is bound to.

    Args:
        host: address to listen on; only loopback, since the port is not encrypted.
        port: 0 picks a free one.
        register: adds the servicers to the server.
        service_names: full names that the health service reports as serving.

    Raises:
        ConfigError: when the address is not loopback or the port is taken.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"services.host={host} would serve without encryption; use 127.0.0.1 and forward the port"
        )
    if port and _taken(host, port):
        raise ConfigError(f"port {port} on {host} is taken; choose another one, or 0 for any free one")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    register(server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}; choose another port, or 0 for any") from error
    await server.start()
    for name in ["", *service_names]:
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, bound


def _taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to host:port; it connects on first use and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def healthy(address: str, timeout_s: float) -> bool:
    """Tell whether the server at `address` says it serves, within `timeout_s` seconds."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def answers_errors(handler: _Handler) -> _Handler:
    """Wrap a servicer method so that errors of our tree become gRPC statuses."""
    if inspect.isasyncgenfunction(handler):

        @functools.wraps(handler)
        async def stream_wrapper(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for reply in handler(self, request, context):
                    yield reply
            except AntiphonError as error:
                await context.abort(_status_of(error), str(error))

        return stream_wrapper  # type: ignore[return-value]

    @functools.wraps(handler)
    async def unary_wrapper(self: Any, request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except AntiphonError as error:
            await context.abort(_status_of(error), str(error))

    return unary_wrapper  # type: ignore[return-value]


async def call(method: Any, request: Any, timeout_s: float) -> Any:
    """Await a unary call with a deadline.

    Raises:
        AntiphonError: the class and sentence the server raised; UnavailableError when it did
            not answer in time.
    """
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise _error_of(error, method, timeout_s) from None


async def stream(method: Any, request: Any, timeout_s: float) -> AsyncIterator[Any]:
    """Yield the replies of a server-streaming call, with one deadline for the whole stream.

    Raises:
        AntiphonError: as `call`.
    """
    running = method(request, timeout=timeout_s)
    try:
        async for reply in running:
            yield reply
    except grpc.aio.AioRpcError as error:
        raise _error_of(error, method, timeout_s) from None
    finally:
        running.cancel()


class Duplex:
    """The asking side of a call that streams both ways; errors come as ours."""

    def __init__(self, method: Any) -> None:
        """Begin the call. It has no deadline of its own: each request in it has one."""
        self._method = method
        self._running = method()

    async def write(self, request: Any) -> None:
        """Send one message."""
        await self._running.write(request)

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for reply in self._running:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, self._method, 0.0) from None

    def cancel(self) -> None:
        """End the call."""
        self._running.cancel()


def error_to_code(error: AntiphonError) -> int:
    """Return the number of the status that an error leaves a server as."""
    return int(_status_of(error).value[0])


def error_from_code(number: int, details: str) -> AntiphonError:
    """Return the error that a status number and its sentence came from."""
    kinds = {status.value[0]: kind for status, kind in _ERROR_OF.items()}
    return kinds.get(number, AntiphonError)(details)


def _status_of(error: AntiphonError) -> grpc.StatusCode:
    for kind, status in _STATUS_OF.items():
        if type(error) is kind:
            return status
    return grpc.StatusCode.UNKNOWN


def _error_of(error: grpc.aio.AioRpcError, method: Any, timeout_s: float) -> AntiphonError:
    code = error.code()
    name = getattr(method, "_method", b"")
    label = name.decode() if isinstance(name, bytes) else str(name)
    details = " ".join((error.details() or "").split())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(f"{label} did not answer within {timeout_s:g} s")
    kind = _ERROR_OF.get(code, AntiphonError)
    return kind(details or f"{label} failed with {code.name}")


async def stop_server(server: grpc.aio.Server, grace_s: float = 1.0) -> None:
    """Stop a server: no new calls, running ones get `grace_s` seconds."""
    await asyncio.wait_for(server.stop(grace_s), grace_s + 5.0)
