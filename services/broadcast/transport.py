"""Transport: how a payload of a version comes into a worker's store.

Whoever decides which payloads are needed does not know the network, and a transport does not know what a
payload is for: it brings the chunks that are missing, each checked against the manifest.
"""

from collections.abc import Callable
from typing import Protocol

from antiphon.core.records import Payload, SnapshotManifest
from antiphon.services.broadcast.client import BroadcastClient
from antiphon.services.broadcast.payload_store import PayloadStore
from antiphon.services.broadcast.service import fetch_payload_from
from antiphon.services.security.credentials import Credentials


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


class OriginTransport(Transport):
    """Chunks from the origin that the manifest names, over gRPC; on its own machine a link to its file."""

    def __init__(self, store: PayloadStore, timeout_s: float, credentials: Credentials | None = None) -> None:
        """Fill `store`; give up when nothing comes for `timeout_s`; show `credentials` to origins."""
        self._store = store
        self._timeout_s = timeout_s
        self._credentials = credentials

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        origin = BroadcastClient(
            manifest.origin, transfer_timeout_s=self._timeout_s, credentials=self._credentials
        )
        try:
            await fetch_payload_from(manifest, payload, origin, self._store, self._timeout_s, arrived)
        finally:
            await origin.close()

    async def close(self) -> None:
        pass
