"""Snapshot source: where a worker's weights come from, and where it keeps them."""

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.dissemination.network_log import NetworkLog
from antiphon.core.errors import IntegrityError
from antiphon.core.records import SnapshotManifest
from antiphon.services.broadcast.manifest import check_manifest, full_payload
from antiphon.services.broadcast.payload_store import PayloadStore
from antiphon.services.broadcast.transport import Connections, RelayTransport, Transport
from antiphon.services.broadcast.transports.choice import configured_transport
from antiphon.services.rollout.weights import WeightSource
from antiphon.services.security.credentials import Credentials


class SnapshotSource(WeightSource):
    """Snapshots that a transport brings into one payload store."""

    def __init__(
        self,
        store: PayloadStore,
        config: RunConfig,
        credentials: Credentials | None = None,
        transport: Transport | None = None,
        network: NetworkLog | None = None,
    ) -> None:
        """Keep payloads in `store`; without a `transport` they come from the origin of each manifest.

        The configuration may name other ways, besides or instead. `network` gets what is measured; the
        transport writes it too.
        """
        self._store = store
        self._store.remove_leftovers()
        self.network = network or NetworkLog()
        timeout_s = config.broadcast.transfer_timeout_s
        connect = Connections(config.broadcast.streams, timeout_s, credentials)
        direct = transport or RelayTransport(store, connect, timeout_s, network=self.network)
        self._transport = configured_transport(direct, store, config, credentials, self.network)
        self.bytes_fetched = 0

    async def fetch(self, manifest: SnapshotManifest) -> None:
        check_manifest(manifest)
        await self._transport.fetch(manifest, full_payload(manifest), self._arrived)

    def _arrived(self, length: int) -> None:
        self.bytes_fetched += length

    def open(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        # torch, after the engine set it up
        from antiphon.services.broadcast.verified_weights import open_snapshot

        try:
            return open_snapshot(manifest, self._store)
        except IntegrityError:
            self._store.drop(full_payload(manifest).digest)  # so that it is fetched again
            raise

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        self._store.prune(kept)
