"""HTTP serving: how a server for programs of others listens, on loopback or encrypted, and reads bodies."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from antiphon.core.errors import ConfigError, ContractError
from antiphon.net.rpc.serving import check_host, is_loopback

IDLE_S = 75.0
"""Time after which a connection without a request is closed."""
_B = TypeVar("_B", bound=BaseModel)


def read_json(kind: type[_B], payload: bytes) -> _B:
    """Return a body.

    Raises:
        ContractError: naming the first field that is wrong.
    """
    try:
        return kind.model_validate_json(payload, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, fault["loc"])) or "the body"
        given = "" if isinstance(fault["input"], dict | bytes) else f", but it is {fault['input']!r:.60}"
        raise ContractError(f"{where[:200]}: {fault['msg'][:300]}{given}") from None


def certificate(address: str, bundle: str | None, key: str) -> ssl.SSLContext | None:
    """Return what encrypts; None on loopback, where others have no authority to check it by.

    Args:
        address: to listen on.
        bundle: folder of the services' credentials.
        key: of the configuration, which names the address.

    Raises:
        ConfigError: when the address is not loopback, and there is no bundle.
    """
    if bundle is None:
        check_host(address, key)
    if bundle is None or is_loopback(address):
        return None
    folder, context = Path(bundle).expanduser(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@asynccontextmanager
async def listening(
    app: web.Application, address: str, port: int, context: ssl.SSLContext | None, key: str
) -> AsyncIterator[None]:
    """Serve while the block lasts; `key` of the configuration names the port.

    Raises:
        ConfigError: when the port is taken.
    """
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=IDLE_S
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address, port, ssl_context=context, reuse_address=True).start()
        except OSError as error:
            raise ConfigError(
                f"{key}={port} on {address} cannot be listened on ({error.strerror}); give "
                "another one, or 0 for a free one"
            ) from error
        yield
    finally:
        await runner.cleanup()
