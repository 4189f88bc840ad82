"""Choice: by which transport a worker's payloads come, from the configuration and from what it reaches."""

import asyncio
from collections.abc import Callable

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.dissemination.network_log import NetworkLog
from antiphon.core.errors import AntiphonError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.net.security.credentials import Credentials
from antiphon.weights.client import BroadcastClient
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.transport import Transport
from antiphon.weights.transports.lattica import FOLDER, LatticaTransport
from antiphon.weights.transports.object_store import ObjectStoreTransport, object_place

WAIT_SHARE = 0.1
"""Of services.stall_timeout_s: longest wait for one object, so that a worker looks anew many times before it
gives up."""

_log = structlog.get_logger(__name__)


class OriginOrObjectStore(Transport):
    """Payloads by one transport while the origin answers, else from the object store.

    Where the origin did not answer, it is asked again beside each transfer, and the answer counts for the
    next one.
    """

    def __init__(
        self, direct: Transport, object_store: Transport, credentials: Credentials | None = None
    ) -> None:
        """Prefer `direct`, which needs the origin; `credentials` are shown to it."""
        self._direct, self._object_store, self._credentials = direct, object_store, credentials
        self._asking: asyncio.Task[bool] | None = None

    async def link(self, manifest: SnapshotManifest, payload: Payload) -> bool:
        return await self._is_reached(manifest.origin) and await self._direct.link(manifest, payload)

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        transport = self._direct if await self._is_reached(manifest.origin) else self._object_store
        await transport.fetch(manifest, payload, arrived)

    async def _is_reached(self, origin: str) -> bool:
        before, self._asking = self._asking, asyncio.create_task(self._ask(origin))
        if before is not None:
            before.cancel()
            if before.cancelled() or not before.done() or not before.result():
                return False
        return await self._asking

    async def _ask(self, origin: str) -> bool:
        client = BroadcastClient(origin, credentials=self._credentials)
        try:
            await client.where()
        except AntiphonError as error:
            _log.info("origin.unreached", origin=origin, error=str(error))
            return False
        finally:
            await client.close()
        return True

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self._direct.close()
        await self._object_store.close()


class MeasuredTransport(Transport):
    """Notes what another transport brings, and that the worker can hand it on."""

    def __init__(self, transport: Transport, source: str, store: PayloadStore, network: NetworkLog) -> None:
        """Note in `network` what `transport` brings into `store`; all of it comes from `source`."""
        self._transport, self._source, self._store, self._network = transport, source, store, network

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        begun_s, came, first_s = clock(), 0, 0.0
        was_here = self._store.has(payload.digest)

        def note(length: int) -> None:
            nonlocal came, first_s
            first_s = first_s or clock() - begun_s
            came += length
            arrived(length)

        await self._transport.fetch(manifest, payload, note)
        if not was_here:
            sent = {self._source: came} if came else {}
            self._network.delivered(manifest.version, clock() - begun_s, first_s, sent)
        self._store.note(payload)
        self._network.holds(payload.digest, self._store.has)

    async def close(self) -> None:
        await self._transport.close()


def configured_transport(
    direct: Transport,
    store: PayloadStore,
    config: RunConfig,
    credentials: Credentials | None = None,
    network: NetworkLog | None = None,
) -> Transport:
    """Return `direct`, which needs the origin, or what the run's configuration says instead or beside it.

    `network` gets what the others measure.
    """
    section, network = config.broadcast, network or NetworkLog()
    if section.lattica_port is not None:
        blocks = LatticaTransport(store, store.root / FOLDER, section.transfer_timeout_s, credentials)
        direct = MeasuredTransport(blocks, "Lattica", store, network)
    if section.object_store is None:
        return direct
    place = object_place(section.object_store, section.object_endpoint)
    wait_s = WAIT_SHARE * config.services.stall_timeout_s
    objects = ObjectStoreTransport(store, place, section.transfer_timeout_s, wait_s)
    from_store = MeasuredTransport(objects, "object store", store, network)
    return from_store if section.object_store_first else OriginOrObjectStore(direct, from_store, credentials)
