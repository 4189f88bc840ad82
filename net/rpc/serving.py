"""Serving: how a gRPC server and channel are set up.

Every call has a deadline. Whatever is not loopback is encrypted, both
sides show certificates, and a guard lets each call in or refuses it in a sentence.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError
from antiphon.core.message_sizes import MESSAGE_BYTES
from antiphon.net.rpc.interceptor import GuardInterceptor
from antiphon.net.rpc.statuses import error_of, label_of, status_of
from antiphon.net.security.credentials import Credentials, read_token
from antiphon.net.security.guard import Guard
from antiphon.system.ports import is_free


class BearingChannel:
    """An encrypted channel whose calls carry the token that is in a file now.

    Not as call credentials, which gRPC for Python asks for in a new thread for every call.
    """

    def __init__(self, channel: Any, path: Path) -> None:
        self._channel, self._path = channel, path
        self._read: tuple[int, int, int] | None = None
        self._token = ""
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            setattr(self, kind, functools.partial(self._bearing, getattr(channel, kind)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def _bearing(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        method = make(*args, **kwargs)

        def begin(*args: Any, metadata: Sequence[tuple[str, str]] = (), **kwargs: Any) -> Any:
            return method(*args, metadata=(*metadata, ("authorization", self._bearer())), **kwargs)

        begin._method = method._method  # type: ignore[attr-defined]  # errors name the call by it
        return begin

    def _bearer(self) -> str:
        """Return the token, which is read again when its file was replaced or changed."""
        try:
            found = self._path.stat()
            state = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            state = None
        if state is None or state != self._read:
            self._read, self._token = state, read_token(self._path)
        return f"Bearer {self._token}"


MAX_METADATA_BYTES = 16 << 10
"""Largest headers; a token needs less than one KiB."""
MAX_STREAMS = 1024
"""Calls that one connection may have open at a time; a slow sender holds no more than its own."""
HANDSHAKE_MS = 10_000
"""Longest time to agree on encryption."""

WINDOW_BYTES = 256 << 10
"""What a caller may send before it is read, so what it holds of a server's memory: 2.5 MB/s at 100 ms."""

SERVER_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
]
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True, slots=True)
class Security:
    """What a server shows, and what decides on the calls it gets."""

    credentials: Credentials
    guard: Guard


def is_loopback(host: str) -> bool:
    """Return whether `host` names this machine alone."""
    if host in {"localhost", "127.0.0.1", "::1", "[::1]"}:
        return True
    parts = host.split(".")
    return len(parts) == 4 and parts[0] == "127" and all(part.isdigit() for part in parts)


def check_host(host: str, key: str = "services.host") -> None:
    """Check that an address may be listened on without encryption; `key` of the configuration names it.

    Raises:
        ConfigError: when it is not loopback.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"{key}={host} would serve without encryption; make certificates with `antiphon invite "
            "--host NAME` and set services.credentials to the folder of the services, or use 127.0.0.1 "
            "and forward the port"
        )


async def start_server(
    host: str,
    port: int,
    register: Callable[[Any], None],
    service_names: Sequence[str],
    security: Security | None = None,
    receive_bytes: int = MESSAGE_BYTES,
) -> tuple[grpc.aio.Server, int]:
    """Start a server with the health service and return it with the port it is bound to.

    Args:
        host: address to listen on; only loopback without `security`.
        port: 0 picks a free one.
        register: adds the servicers to what it is given, which stands before the server.
        service_names: full names that the health service reports as serving.
        security: certificates and guard; None serves without encryption.
        receive_bytes: largest message taken in; a larger one is refused before it is held.

    Raises:
        ConfigError: when the address is not loopback and there is no `security`, or the port is taken.
    """
    if port and not is_free(port, host):
        raise ConfigError(f"port {port} on {host} is taken; choose another one, or 0 for any free one")
    options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", min(receive_bytes, MESSAGE_BYTES))]
    server = grpc.aio.server(options=options)
    interceptor = GuardInterceptor(server, None if security is None else security.guard)
    register(interceptor)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, interceptor)
    bound = _listen(server, host, port, None if security is None else security.credentials)
    await server.start()
    for name in ["", *service_names]:
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, bound


@asynccontextmanager
async def refusing_server(
    host: str, port: int, credentials: Credentials | None, problem: Callable[[], AntiphonError]
) -> AsyncIterator[None]:
    """Answer every call to an address with an error, inside the block.

    Args:
        host: address to listen on.
        port: 0 picks a free one, which no one knows.
        credentials: shown to callers; None serves without encryption.
        problem: returns the error of the moment.

    Raises:
        ConfigError: when the address is not loopback and there are no credentials, or the port is taken.
    """

    async def refuse(request: Any, context: Any) -> None:
        error = problem()
        await context.abort(status_of(error), str(error))

    class Refusing(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((Refusing(),))
    _listen(server, host, port, credentials)
    await server.start()
    try:
        yield
    finally:
        await stop_server(server, 0.0)


def _listen(server: grpc.aio.Server, host: str, port: int, credentials: Credentials | None) -> int:
    """Bind a server and return its port."""
    if credentials is None:
        check_host(host)
    try:
        if credentials is None:
            return int(server.add_insecure_port(f"{host}:{port}"))
        return int(server.add_secure_port(f"{host}:{port}", _server_credentials(credentials)))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}; choose another port, or 0 for any") from error


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    pair = (credentials.private_key, credentials.certificate)
    return grpc.ssl_server_credentials(
        [pair], root_certificates=credentials.authority, require_client_auth=True
    )


def open_channel(
    address: str, credentials: Credentials | None = None, own_connection: bool = False
) -> grpc.aio.Channel:
    """Open a channel to host:port; it connects on first use and reconnects by itself.

    Args:
        address: host:port.
        credentials: shown to the other side; None speaks without encryption.
        own_connection: share no connection with other channels to the same address.

    Raises:
        ConfigError: when the address is not loopback and there are no credentials.
    """
    host = address.rpartition(":")[0]
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    if is_loopback(host):
        options.append(("grpc.enable_http_proxy", 0))
    if credentials is None:
        if not is_loopback(host):
            raise ConfigError(
                f"{address} would be spoken to without encryption; give credentials (--credentials FOLDER or "
                "ANTIPHON_CREDENTIALS), or forward its port to 127.0.0.1"
            )
        return grpc.aio.insecure_channel(address, options=options)
    channel = grpc.ssl_channel_credentials(
        credentials.authority, credentials.private_key, credentials.certificate
    )
    secure = grpc.aio.secure_channel(address, channel, options=options)
    if credentials.token_file is None:
        return secure
    return cast("grpc.aio.Channel", BearingChannel(secure, credentials.token_file))


async def call(method: Any, request: Any, timeout_s: float) -> Any:
    """Await a unary call with a deadline.

    Raises:
        AntiphonError: the class and sentence the server raised; UnavailableError when it did
            not answer in time.
    """
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, method, timeout_s) from None


async def stream(
    method: Any, request: Any, timeout_s: float | None, patience_s: float | None = None
) -> AsyncIterator[Any]:
    """Yield the replies of a server-streaming call.

    Args:
        method: of a stub.
        request: its request.
        timeout_s: deadline of the whole stream, or None.
        patience_s: longest wait for the next reply, or None; one of the two must be given.

    Raises:
        AntiphonError: as `call`.
    """
    running = method(request, timeout=timeout_s)
    replies = aiter(running)
    try:
        while True:
            async with asyncio.timeout(patience_s):
                reply = await anext(replies, None)
            if reply is None:
                return
            yield reply
    except TimeoutError:
        raise UnavailableError(f"{label_of(method)} sent nothing for {patience_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise error_of(error, method, timeout_s or 0.0) from None
    finally:
        running.cancel()


async def stop_server(server: grpc.aio.Server, grace_s: float = 1.0) -> None:
    """Stop a server: no new calls, running ones get `grace_s` seconds."""
    await asyncio.wait_for(server.stop(grace_s), grace_s + 5.0)
