"""Broadcast service: hand out what is held.

Sending is paced by one token bucket that all receivers share, so that an uplink cap holds
whatever their number. On the holder's own machine nothing is sent: the receiver links the holder's file.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from antiphon.api.snapshots import Broadcast, Place
from antiphon.core.dissemination.requests import LEAST_PIECE_BYTES, PIECE_BYTES, PiecePace
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.weights.payload_store import PayloadStore

STALL_S = 30.0
"""Longest wait for a chunk that is on its way while nothing arrives: longer than receivers have patience."""


class Uplink:
    """A cap on bytes per second, in the running loop's time, shared by all receivers.

    A caller waits until what was sent before has drained at the given rate; nothing is saved
    up while the uplink rests. Callers have turns of `PIECE_BYTES`, in the order in which they came; who
    leaves before its turn has taken nothing.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._turn = asyncio.Lock()

    async def take(self, length: int) -> float:
        """Wait for a turn to send this many bytes, and return the seconds in which they drain."""
        if self._bytes_per_s is None:
            return 0.0
        clock = asyncio.get_running_loop().time
        for start in range(0, length, PIECE_BYTES):
            async with self._turn:
                await asyncio.sleep(self._free_at_s - clock())
                drains_s = min(PIECE_BYTES, length - start) / self._bytes_per_s
                self._free_at_s = max(self._free_at_s, clock()) + drains_s
        return length / self._bytes_per_s


def following(indices: Sequence[int], most: int) -> range:
    """Return the longest run of consecutive numbers, at most this many, with which `indices` begin.

    >>> following((4, 5, 6, 9), 8), following((4, 5, 6, 9), 2)
    (range(4, 7), range(4, 6))
    """
    count = 1
    while count < min(most, len(indices)) and indices[count] == indices[0] + count:
        count += 1
    return range(indices[0], indices[0] + count)


class BroadcastService(Broadcast):
    """Serves one payload store; chunks of a payload that is still arriving are handed on as they come."""

    def __init__(
        self,
        store: PayloadStore,
        uplink_bytes_per_s: float | None = None,
        *,
        relays: bool = False,
        stall_s: float = STALL_S,
    ) -> None:
        """Serve `store`.

        Args:
            store: of this process.
            uplink_bytes_per_s: cap on what all receivers together get; None: no cap.
            relays: payloads arrive here, too; at the origin none does.
            stall_s: longest wait for a chunk that is on its way, while nothing of its payload arrives.
        """
        self._store, self._relays, self._stall_s = store, relays, stall_s
        self.uplink = Uplink(uplink_bytes_per_s)
        """Of everything that is sent from here."""

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int], held_only: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (index, piece), a chunk after the other, no faster than the uplink cap.

        A piece is part of a chunk, or some that follow each other, as much as the link takes (`PiecePace`).
        Chunks come in the order asked for, but those that are on their way here come after what is held.

        A chunk is read once some of it may be sent, so that few who wait for the uplink hold memory. It is
        not digested here: the receiver does that.

        Raises:
            ContractError: when a chunk is asked for twice, or the payload has no such chunk.
            UnavailableError: for a chunk that is not held, and does not arrive in time.
        """
        if len(set(indices)) != len(indices):
            raise ContractError(
                f"a request for {len(indices)} chunks names {len(set(indices))}; ask for each chunk once"
            )
        store = self._store
        try:
            payload = await asyncio.to_thread(store.find, payload_digest)
        except UnavailableError:  # it may be about to arrive: children may hear of it first
            if held_only or not await self._arrives(payload_digest):
                raise
            payload = await asyncio.to_thread(store.find, payload_digest)
        if wrong := [index for index in indices if not 0 <= index < len(payload.chunk_digests)]:
            raise ContractError(f"payload {payload.digest} has no chunk {wrong[0]}; fetch its manifest again")
        clock = asyncio.get_running_loop().time
        pace = PiecePace(min(payload.chunk_bytes, LEAST_PIECE_BYTES))
        left = list(indices)
        while left:
            here = left
            if self._relays:  # one that is late keeps no other back
                held = store.held(payload)
                if not (here := [index for index in left if held[index]]):
                    if held_only or not await self._arrives(payload.digest):
                        waited = "" if held_only else f", nor did it arrive for {self._stall_s:g} s"
                        raise UnavailableError(
                            f"chunk {left[0]} of payload {payload.digest} is not held here{waited}; take it "
                            "from another holder"
                        )
                    continue
            # Chunks that come together are handed on together: no more of them than hide a message's cost.
            together = min(pace.piece_bytes, PIECE_BYTES)
            run = following(here, max(1, together // payload.chunk_bytes))
            left = [index for index in left if index not in run]  # they may stand apart in the request
            length, sent, data = sum(payload.span(index)[1] for index in run), 0, b""
            while sent < length:
                begun_s = clock()
                size = length if len(run) > 1 else min(pace.piece_bytes, length - sent)
                drains_s = await self.uplink.take(size)
                data = data or await asyncio.to_thread(store.read_chunks, payload, run)
                piece = data[sent : sent + size]
                yield run[0], piece
                sent += len(piece)
                pace.sent(size, max(drains_s, clock() - begun_s))

    async def _arrives(self, payload_digest: str) -> bool:
        """Wait for something of a payload; False when nothing came in time, or none arrives here."""
        return self._relays and await self._store.arrivals.wait(payload_digest, self._stall_s)

    async def where(self) -> Place:
        """Return where the origin's payloads lie on this machine; no peer learns a worker's paths."""
        if self._relays:
            return Place(Path(), "")
        return Place(self._store.root.absolute(), await asyncio.to_thread(self._store.token))
