"""Broadcast service: hand out what is held, take in only what was checked.

Sending is paced by one token bucket that all receivers share, so that an uplink cap holds
whatever their number. Receiving fetches missing chunks only; what has arrived stays, so a
transfer that breaks continues where it stopped.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.core.records import ChunkEntry, SnapshotManifest
from antiphon.services.broadcast.api import Broadcast
from antiphon.services.broadcast.chunk_store import ChunkStore
from antiphon.services.broadcast.manifest import check_manifest

ATTEMPTS = 2
"""A chunk that does not match its digest is asked for once more, then the transfer fails."""


class Uplink:
    """A cap on bytes per second, in the running loop's time, shared by all receivers.

    A caller waits until what was sent before has drained at the given rate; nothing is saved
    up while the uplink rests.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def take(self, length: int) -> None:
        if self._bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now) + length / self._bytes_per_s
        await asyncio.sleep(self._free_at_s - now)


class BroadcastService(Broadcast):
    """Serves one chunk store: the learner's origin today, a worker's copy tomorrow."""

    def __init__(self, store: ChunkStore, uplink_bytes_per_s: float | None = None) -> None:
        self._store = store
        self._uplink = Uplink(uplink_bytes_per_s)

    async def get_chunks(self, digests: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (digest, bytes) in the order asked for, no faster than the uplink cap.

        A chunk is read once it may be sent, so that whoever waits for the uplink holds no memory.

        Raises:
            ContractError: when a chunk is asked for twice.
            UnavailableError: for a chunk that is not held.
            IntegrityError: for one whose bytes were altered.
        """
        if len(set(digests)) != len(digests):
            raise ContractError(
                f"a request for {len(digests)} chunks names {len(set(digests))}; ask for each chunk once"
            )
        for digest in digests:
            await self._uplink.take(await asyncio.to_thread(self._store.length, digest))
            yield digest, await asyncio.to_thread(self._store.get, digest)  # reads and hashes


async def fetch_snapshot(
    manifest: SnapshotManifest,
    source: Broadcast,
    store: ChunkStore,
    timeout_s: float,
    arrived: Callable[[int], None] = lambda length: None,
) -> None:
    """Bring every chunk of a snapshot into `store`, then list its manifest there.

    Chunks already held are not fetched. On any error what has arrived stays, so the next call
    continues from there.

    The transfer may take any time; it is given up when nothing arrives for `timeout_s` seconds. `arrived` is
    called with the bytes of each chunk.

    Raises:
        IntegrityError: when the manifest is not sound, or a chunk came altered, truncated,
            oversized or out of turn twice; it names the chunk.
        UnavailableError: when the source went away or nothing arrived in time.
    """
    check_manifest(manifest)
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(timeout_s) as deadline:

            def note(length: int) -> None:
                deadline.reschedule(clock() + timeout_s)
                arrived(length)

            await _fetch_missing(manifest, source, store, note)
    except TimeoutError:
        missing = sum(chunk.length for chunk in _missing(manifest, store))
        raise UnavailableError(
            f"{missing} of {manifest.payload_bytes} bytes of version {manifest.version} did not arrive from "
            f"{manifest.origin}, and nothing came for {timeout_s:g} s; try again, what has arrived is kept"
        ) from None
    await asyncio.to_thread(store.put_manifest, manifest)


async def _fetch_missing(
    manifest: SnapshotManifest, source: Broadcast, store: ChunkStore, arrived: Callable[[int], None]
) -> None:
    refused: IntegrityError | None = None
    for _ in range(ATTEMPTS):
        if not (wanted := _missing(manifest, store)):
            return
        refused = await _receive(manifest, wanted, source, store, arrived)
    if refused is not None:
        raise refused


async def _receive(
    manifest: SnapshotManifest,
    wanted: list[ChunkEntry],
    source: Broadcast,
    store: ChunkStore,
    arrived: Callable[[int], None],
) -> IntegrityError | None:
    """Take one stream; return why its first refused chunk was refused, if one was."""
    refused: IntegrityError | None = None
    place = {chunk.digest: index for index, chunk in reversed(list(enumerate(manifest.chunks)))}
    expected = iter(wanted)
    async for digest, payload in source.get_chunks([chunk.digest for chunk in wanted]):
        chunk = next(expected, None)
        if chunk is None or digest != chunk.digest:
            # A sender that is out of step cannot be trusted for the rest of the stream either.
            return refused or IntegrityError(
                f"{manifest.origin} sent chunk {digest[:64]!r} of version {manifest.version} out of turn; "
                f"expected {chunk.digest if chunk else 'the end'}"
            )
        # Hashing and flushing a chunk takes milliseconds, for which a worker must not stop sampling.
        problem = await asyncio.to_thread(_problem, chunk, payload, store)
        if problem is None:
            arrived(len(payload))
        if problem is not None and refused is None:
            refused = IntegrityError(
                f"chunk {place[digest]} ({digest}) of version {manifest.version} from {manifest.origin} "
                f"{problem}; it was not kept"
            )
    left = next(expected, None)
    if left is not None and refused is None:
        refused = IntegrityError(
            f"{manifest.origin} ended the stream before chunk {place[left.digest]} ({left.digest}) of "
            f"version {manifest.version}"
        )
    return refused


def _problem(chunk: ChunkEntry, payload: bytes, store: ChunkStore) -> str | None:
    if len(payload) < chunk.length:
        return f"is truncated to {len(payload)} of {chunk.length} bytes"
    if len(payload) > chunk.length:
        return f"is oversized: {len(payload)} bytes instead of {chunk.length}"
    try:
        store.put(chunk.digest, payload)
    except IntegrityError:
        return "was altered: its bytes do not match its digest"
    return None


def _missing(manifest: SnapshotManifest, store: ChunkStore) -> list[ChunkEntry]:
    unique = {chunk.digest: chunk for chunk in manifest.chunks}
    return [chunk for chunk in unique.values() if not store.has(chunk.digest)]
