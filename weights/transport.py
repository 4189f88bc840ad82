"""Transport: how a payload of a version comes into a worker's store.

What decides which payloads are needed does not know the network, and a transport does not know what a
payload is for: it brings the chunks that are missing, each checked against the manifest.
"""

import asyncio
import os
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from antiphon.api.snapshots import Broadcast, Place
from antiphon.core.dissemination.network_log import NetworkLog
from antiphon.core.dissemination.plan import ORIGIN, TransferPlan
from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.dissemination.transfers import FROM_ORIGIN
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.net.rpc.serving import open_channel
from antiphon.net.security.credentials import Credentials
from antiphon.weights.payload_store import TOKEN, PayloadStore
from antiphon.weights.relay import Receiver, TransferLimits
from antiphon.weights.rpc import BroadcastClient
from antiphon.weights.service import Arrivals

ADDRESSES_KEPT = 16
"""Sources whose connections stay open for the next payload."""
REFUSED_S = 2.0
"""A transfer is begun again, with another manifest and plan, after so long without a source that answers."""
_TOKEN_BYTES = 64
"""Longest token that is read."""
Connect = Callable[[str], Sequence[Broadcast]]
"""Returns connections to host:port, beside each other."""
AskPlan = Callable[[SnapshotManifest, Payload], Awaitable[TransferPlan | None]]
"""Returns whom to fetch a payload from; None: from the origin."""

_log = structlog.get_logger(__name__)


class Transport(Protocol):
    """Brings payloads into one store."""

    async def link(self, manifest: SnapshotManifest, payload: Payload) -> bool:
        """Take a payload of a holder on this machine without sending it; False where that cannot be."""
        return False

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        """Bring every chunk of a payload here, verified; continues where an earlier attempt stopped.

        Args:
            manifest: checked, of the version that the payload leads to.
            payload: one of the manifest's.
            arrived: called with the bytes of each part that came.

        Raises:
            UnavailableError: when nothing came in time, or the disk is full; what has arrived stays.
            IntegrityError: when what came is not what the manifest names.
        """

    async def close(self) -> None:
        """Let go of connections."""


class MeasuredTransport(Transport):
    """Payloads from one other source than workers and origin; notes what came, for others to take it here."""

    def __init__(self, store: PayloadStore, source: str, network: NetworkLog | None = None) -> None:
        """Fill `store`; `network` gets what is measured, under the name `source`."""
        self._store, self._source, self._network = store, source, network or NetworkLog()

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        begun_s, came, first_s = clock(), 0, 0.0

        def note(length: int) -> None:
            nonlocal came, first_s
            first_s = first_s or clock() - begun_s
            came += length
            arrived(length)

        if not self._store.has(payload.digest):
            await self.bring(manifest, payload, note)
            sent = {self._source: came} if came else {}
            record = DeliveryRecord(manifest.version, "", clock() - begun_s, first_s, sent)
            self._network.delivered(record)
        self._store.note(payload)
        self._network.holds(payload.digest, self._store.has)

    @abstractmethod
    async def bring(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        """Do what `fetch` says, for a payload that is not here."""


class Connections:
    """Connections over gRPC, which stay open from one payload to the next."""

    def __init__(self, streams: int, timeout_s: float, credentials: Credentials | None = None) -> None:
        """Open `streams` to each address, wait `timeout_s` for a chunk, show `credentials`."""
        self._streams, self._timeout_s, self._credentials = streams, timeout_s, credentials
        self._open: dict[str, list[BroadcastClient]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __call__(self, address: str) -> Sequence[BroadcastClient]:
        lanes = self._open.pop(address, None)
        if lanes is None:
            lanes = [
                BroadcastClient(
                    address,
                    self._timeout_s,
                    channel=open_channel(address, self._credentials, own_connection=True),
                )
                for _ in range(self._streams)
            ]
        self._open[address] = lanes  # the newest use last
        for old in list(self._open)[:-ADDRESSES_KEPT]:
            task = asyncio.create_task(_close(self._open.pop(old)))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return lanes

    async def close(self) -> None:
        while self._open:
            await _close(self._open.popitem()[1])


async def _close(lanes: Sequence[BroadcastClient]) -> None:
    for lane in lanes:
        await lane.close()


class RelayTransport(Transport):
    """Chunks from those that hold them: workers that hand them on, and the origin; on its machine a link."""

    def __init__(
        self,
        store: PayloadStore,
        connect: Connect,
        timeout_s: float,
        *,
        arrivals: Arrivals | None = None,
        network: NetworkLog | None = None,
        ask_plan: AskPlan | None = None,
        links: bool = True,
    ) -> None:
        """Fill `store`.

        Args:
            store: gets the payloads.
            connect: gives connections to an address.
            timeout_s: a transfer is given up when nothing comes from anyone for so long.
            arrivals: of the service that serves the same store, which hands on what arrives.
            network: gets what is measured.
            ask_plan: says whom to fetch from; None: the origin alone.
            links: on the origin's machine its file is linked.
        """
        self._store, self._connect, self._ask_plan = store, connect, ask_plan
        self._limits = TransferLimits(give_up_s=timeout_s, refused_s=REFUSED_S)
        self._arrivals = arrivals or Arrivals()
        self._network = network or NetworkLog()
        self._links = links
        self._timed = ""
        """Origin to which a connection was open when its round trip was last taken."""

    async def link(self, manifest: SnapshotManifest, payload: Payload) -> bool:
        clock = asyncio.get_running_loop().time
        begun_s = asked_s = clock()
        try:
            origin = self._connect(manifest.origin)[0]
            place = await origin.where()
            if manifest.origin != self._timed:  # that included opening the connection
                asked_s = clock()
                place = await origin.where()
        except UnavailableError as error:  # other holders may do without it
            _log.warning("origin.away", origin=manifest.origin, reason=str(error))
            return False
        self._timed = manifest.origin
        self._network.round_trip(clock() - asked_s)
        if not self._links or not await _adopted(payload, place, self._store):
            return False
        self._network.delivered(DeliveryRecord(manifest.version, "", clock() - begun_s))
        self._network.holds(payload.digest, self._store.has)  # what was linked is handed on
        return True

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        if not self._store.has(payload.digest):
            if await self.link(manifest, payload):
                return arrived(payload.payload_bytes)
            plan = FROM_ORIGIN
            try:
                if self._ask_plan is not None:
                    plan = await self._ask_plan(manifest, payload) or FROM_ORIGIN
            except AntiphonError as error:  # the origin is enough
                _log.warning("transfer.unplanned", version=manifest.version, reason=str(error))
            sources = {ORIGIN: self._connect(manifest.origin)}
            for name, address in plan.addresses.items():
                try:
                    sources[name] = self._connect(address)
                except AntiphonError as error:
                    _log.warning("relay.unusable", worker=name, reason=str(error))
            incoming = await asyncio.to_thread(self._store.receive, payload)
            self._arrivals.notify(payload.digest)
            delivery = await Receiver(
                incoming,
                sources,
                plan.assignment,
                self._arrivals,
                self._network.culprits,
                self._limits,
                arrived=arrived,
            ).run()
            await asyncio.to_thread(incoming.finish)
            self._network.delivered(replace(delivery, version=manifest.version))
        # So that it is handed on, also after a restart.
        self._store.note(payload)
        self._network.holds(payload.digest, self._store.has)

    async def close(self) -> None:
        if isinstance(self._connect, Connections):
            await self._connect.close()


async def _adopted(payload: Payload, place: Place, store: PayloadStore) -> bool:
    """Link a payload of an origin that shares this machine and may be read; False where there is none."""

    def adopt() -> bool:
        try:
            # A link that stands there is followed by no one, and a pipe is not waited for.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(place.folder / TOKEN, flags)
            try:
                shown = os.read(descriptor, _TOKEN_BYTES)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return False
        found = PayloadStore(place.folder).path(payload.digest)
        return shown == place.token.encode() and store.adopt(payload, found)

    return bool(place.token) and await asyncio.to_thread(adopt)
