"""Broadcast: the contract between whoever holds chunks and whoever wants them.

The learner's origin serves it today. A worker that holds a chunk may serve it too: nothing in
the contract says who answers, because a chunk is its digest.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from antiphon.core.records import SnapshotManifest


class Broadcast(Protocol):
    """Manifests and chunks by digest."""

    async def get_manifest(self, version: int | None) -> SnapshotManifest:
        """Return the manifest of `version`, or of the newest snapshot held.

        Raises:
            UnavailableError: when this holder does not have it.
        """
        ...

    def get_chunks(self, digests: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (digest, bytes) in the order asked for; the receiver checks each digest.

        Raises:
            UnavailableError: when a chunk is not held (any more).
        """
        ...
