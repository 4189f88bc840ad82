"""Snapshot source: where a worker's weights come from, and where it keeps them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError
from antiphon.core.records import SnapshotManifest
from antiphon.services.broadcast.manifest import check_manifest, full_payload
from antiphon.services.broadcast.payload_store import PayloadStore
from antiphon.services.broadcast.transport import OriginTransport, Transport
from antiphon.services.broadcast.transports.choice import configured_transport
from antiphon.services.rollout.weights import WeightSource
from antiphon.services.security.credentials import Credentials


class SnapshotSource(WeightSource):
    """Snapshots that a transport brings into one payload store."""

    def __init__(
        self,
        root: Path,
        config: RunConfig,
        credentials: Credentials | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Keep payloads in `root`; without a `transport` they come from the origin of each manifest.

        The configuration may name other ways, besides or instead.
        """
        self._store = PayloadStore(root)
        self._store.remove_leftovers()
        direct = transport or OriginTransport(self._store, config.broadcast.transfer_timeout_s, credentials)
        self._transport = configured_transport(direct, self._store, config, credentials)
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
