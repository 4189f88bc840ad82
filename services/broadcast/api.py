"""Broadcast: the contract between whoever holds chunks and whoever wants them.

The learner's origin serves it today. A worker that holds a chunk may serve it too: nothing in
the contract says who answers, because a chunk is its digest.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol


class Broadcast(Protocol):
    """Chunks by digest."""

    def get_chunks(self, digests: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (digest, bytes) in the order asked for; the receiver checks each digest.

        Raises:
            UnavailableError: when a chunk is not held (any more).
        """
