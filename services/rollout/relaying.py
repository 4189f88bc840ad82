"""Relaying: a worker that others can reach serves them the payloads that it holds or receives."""

import asyncio
from typing import Any

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.net.rpc.serving import Security, is_loopback, start_server, stop_server
from antiphon.net.security.certificates import serves_as
from antiphon.net.security.credentials import Credentials
from antiphon.net.security.guard import Guard
from antiphon.system.clock import wall_clock
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.relay_service import Arrivals, RelayService
from antiphon.weights.server import SERVICE_NAME, register_broadcast

_log = structlog.get_logger(__name__)


class WorkerRelay:
    """The serving side of one worker; without an address it serves nothing."""

    def __init__(self, store: PayloadStore, address: str, credentials: Credentials | None) -> None:
        """Prepare to serve `store` at `address`, HOST:PORT as other workers dial it, or "".

        Raises:
            ConfigError: when the credentials do not allow that.
        """
        self.arrivals = Arrivals()
        self._store, self._address, self._credentials = store, address, credentials
        self._server: Any = None
        self._host, _, self._port = address.rpartition(":")
        if address:
            _check(self._host.strip("[]"), address, credentials)

    async def start(self, config: RunConfig, run_id: str) -> None:
        """Serve from now on, unless the run wants no relays.

        Raises:
            ConfigError: when the port is taken.
        """
        if not self._address or config.broadcast.relay == "off":
            return
        security = None
        if self._credentials is not None and self._credentials.token_key is not None:
            clock = asyncio.get_running_loop().time
            guard = Guard(self._credentials.token_key, run_id, wall_clock, clock)
            security = Security(self._credentials, guard)
        service = RelayService(
            self._store, self.arrivals, uplink_bytes_per_s=config.broadcast.relay_bytes_per_s
        )
        # Behind a forwarded port or a second network card, the host that others dial is none of this machine.
        host = self._host if is_loopback(self._host) else "[::]" if self._host.startswith("[") else "0.0.0.0"
        self._server, _ = await start_server(
            host, int(self._port), lambda s: register_broadcast(s, service), [SERVICE_NAME], security
        )
        _log.info("relay.serving", address=self._address)

    async def stop(self) -> None:
        if self._server is not None:
            await stop_server(self._server, 0.0)


def _check(host: str, address: str, credentials: Credentials | None) -> None:
    if credentials is None:
        if not is_loopback(host):
            raise ConfigError(
                f"--relay-address {address} would serve without encryption; give --credentials FOLDER with a "
                f"bundle of `antiphon invite NAME --relay-host {host}`"
            )
    elif credentials.token_key is None or not serves_as(credentials.certificate, host):
        raise ConfigError(
            f"these credentials do not allow to serve other workers as {host}; make them again with "
            f"`antiphon invite NAME --relay-host {host}`, or leave --relay-address out"
        )
