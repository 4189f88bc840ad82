"""Relay, the serving side: a worker that others can reach hands chunks on as they come."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from antiphon.api.snapshots import Place
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.core.records import Payload
from antiphon.net.rpc.serving import Security, is_loopback, start_server, stop_server
from antiphon.net.security.certificates import serves_as
from antiphon.net.security.credentials import Credentials
from antiphon.net.security.guard import Guard
from antiphon.system.clock import wall_clock
from antiphon.system.wakeup import Wakeup
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.server import SERVICE_NAME, register_broadcast
from antiphon.weights.service import BroadcastService, following

STALL_S = 30.0
"""Longest wait for a chunk that is on its way while nothing arrives: longer than receivers have patience."""


class Arrivals:
    """Wakes those who wait for chunks of a payload."""

    def __init__(self) -> None:
        self._waiting: dict[str, Wakeup] = {}
        self._count: Counter[str] = Counter()
        """Who waits, by payload. Peers may name any payload: what nobody waits for takes no memory."""

    def notify(self, payload_digest: str) -> None:
        if (wakeup := self._waiting.get(payload_digest)) is not None:
            wakeup.notify()

    async def wait(self, payload_digest: str, timeout_s: float) -> bool:
        """Wait until something of a payload arrives; False when `timeout_s` seconds passed without."""
        wakeup = self._waiting.setdefault(payload_digest, Wakeup())
        self._count[payload_digest] += 1
        try:
            return await wakeup.wait(timeout_s)
        finally:
            self._count[payload_digest] -= 1
            if not self._count[payload_digest]:
                del self._count[payload_digest]
                self._waiting.pop(payload_digest, None)


class RelayService(BroadcastService):
    """Serves a payload store that receives at the same time."""

    def __init__(
        self,
        store: PayloadStore,
        arrivals: Arrivals,
        stall_s: float = STALL_S,
        uplink_bytes_per_s: float | None = None,
    ) -> None:
        """Serve `store`.

        Args:
            store: of this process.
            arrivals: of the same store's transfers.
            stall_s: longest wait for a chunk that is on its way, while nothing of its payload arrives.
            uplink_bytes_per_s: cap on what all receivers together get, so that sampling keeps its share.
        """
        super().__init__(store, uplink_bytes_per_s)
        self._arrivals = arrivals
        self._stall_s = stall_s

    async def where(self) -> Place:
        """Return no place: files are linked from the origin alone, and no peer learns a worker's paths."""
        return Place(Path(), "")

    async def _find(self, digest: str) -> Payload:
        """Return a payload that is here, or begins to arrive in time: children may hear of it first."""
        try:
            return await super()._find(digest)
        except UnavailableError:
            if not await self._arrivals.wait(digest, self._stall_s):
                raise
        return await super()._find(digest)

    async def _next(self, payload: Payload, left: Sequence[int], most: int) -> range:
        """Return the first of these chunks that are here: one that is late keeps no other back."""
        while True:
            held = self._store.held(payload)
            if here := [index for index in left if held[index]]:
                return following(here, most)
            if not await self._arrivals.wait(payload.digest, self._stall_s):
                raise UnavailableError(
                    f"chunk {left[0]} of payload {payload.digest} did not arrive here for "
                    f"{self._stall_s:g} s; take it from another holder"
                )


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
