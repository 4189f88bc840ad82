"""Broadcast: the contract between those that hold chunks and those that want them.

The learner's origin serves it today. A worker that holds a chunk may serve it too: nothing in
the contract says who answers, because a chunk is named by its payload's digest and its place.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from antiphon.core.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a holder keeps its payloads, for receivers on its own machine."""

    folder: Path
    token: str
    """What the file `token` in the folder holds; who reads another one, or none, is elsewhere."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A payload as blocks of a Lattica network."""

    peer_id: str
    """Of a peer that holds them."""
    port: int
    """On which that peer is reached, on the answering machine."""
    addresses: tuple[str, ...]
    """Of each chunk's block, in their order."""


class Broadcast(Protocol):
    """Chunks of payloads."""

    def get_chunks(
        self, payload_digest: str, indices: Sequence[int], held_only: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (index, bytes), one chunk after the other in any order; the receiver checks their digests.

        A large chunk may come in consecutive pieces, each with its index; chunks that follow each other may
        come together, with the index of the first.

        A chunk that the holder is itself still receiving is waited for, up to its stall limit, unless only
        what is held is wanted.

        Raises:
            UnavailableError: when a chunk is not held (any more).
            ContractError: when a chunk is asked for twice, or the payload has no such chunk.
        """

    async def where(self) -> Place:
        """Return where the payloads lie on the holder's machine."""

    async def get_blocks(self, payload_digest: str) -> Blocks:
        """Return under which addresses the chunks are blocks of a Lattica network.

        Raises:
            UnavailableError: when the holder is no peer of one, or does not hold the payload.
        """
        raise UnavailableError("the process asked for blocks is no peer of a Lattica network")
