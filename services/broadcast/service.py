"""Broadcast service: hand out what is held, take in only what was checked.

Sending is paced by one token bucket that all receivers share, so that an uplink cap holds
whatever their number. Receiving fetches missing chunks only; what has arrived stays, so a
transfer that breaks continues where it stopped. On the holder's own machine nothing is sent: the
receiver links the holder's file.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.services.broadcast.api import Broadcast, Place
from antiphon.services.broadcast.manifest import check_manifest, full_payload
from antiphon.services.broadcast.payload_files import IncomingPayload
from antiphon.services.broadcast.payload_store import TOKEN, PayloadStore

ATTEMPTS = 2
"""A chunk that does not match its digest is asked for once more, then the transfer fails."""
_TOKEN_BYTES = 64
"""Longest token that is read."""


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
    """Serves one payload store."""

    def __init__(self, store: PayloadStore, uplink_bytes_per_s: float | None = None) -> None:
        self._store = store
        self.uplink = Uplink(uplink_bytes_per_s)
        """Of everything that is sent from here."""

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (index, bytes) in the order asked for, no faster than the uplink cap.

        A chunk is read once it may be sent, so that whoever waits for the uplink holds no memory. It is
        not digested here: whoever receives it does that.

        Raises:
            ContractError: when a chunk is asked for twice, or the payload has no such chunk.
            UnavailableError: for a chunk that is not held.
        """
        if len(set(indices)) != len(indices):
            raise ContractError(
                f"a request for {len(indices)} chunks names {len(set(indices))}; ask for each chunk once"
            )
        payload = await self._find(payload_digest)
        for index in indices:
            if not 0 <= index < len(payload.chunk_digests):
                raise ContractError(
                    f"payload {payload.digest} has no chunk {index}; fetch its manifest again"
                )
            await self._until_held(payload, index)
            await self.uplink.take(payload.span(index)[1])
            yield index, await asyncio.to_thread(self._store.read_chunk, payload, index)

    async def _find(self, digest: str) -> Payload:
        return await asyncio.to_thread(self._store.find, digest)

    async def _until_held(self, payload: Payload, index: int) -> None:
        """Wait for a chunk that is on its way; what lies here whole has none."""

    async def held(self, payload_digest: str) -> npt.NDArray[np.bool_]:
        """Return, per chunk, whether it is held; empty when the payload is not known here."""
        try:
            return self._store.held(await asyncio.to_thread(self._store.find, payload_digest))
        except UnavailableError:
            return np.zeros(0, np.bool_)

    async def where(self) -> Place:
        """Return where the payloads lie on this machine."""
        return Place(self._store.root.absolute(), await asyncio.to_thread(self._store.token))


async def fetch_snapshot(
    manifest: SnapshotManifest,
    source: Broadcast,
    store: PayloadStore,
    timeout_s: float,
    arrived: Callable[[int], None] = lambda length: None,
) -> None:
    """Bring the policy file of a snapshot into `store`, as `fetch_payload_from` does.

    Raises:
        IntegrityError: when the manifest is not sound, besides.
    """
    check_manifest(manifest)
    await fetch_payload_from(manifest, full_payload(manifest), source, store, timeout_s, arrived)


async def fetch_payload_from(
    manifest: SnapshotManifest,
    payload: Payload,
    source: Broadcast,
    store: PayloadStore,
    timeout_s: float,
    arrived: Callable[[int], None] = lambda length: None,
) -> None:
    """Bring a payload of a snapshot into `store`: by a link where the source is on this machine.

    Chunks already held are not fetched. On any error what has arrived stays, so the next call
    continues from there.

    The transfer may take any time; it is given up when nothing arrives for `timeout_s` seconds. `arrived` is
    called with the bytes of each chunk.

    Raises:
        IntegrityError: when a chunk came altered, truncated, oversized or out of turn twice; it names
            the chunk.
        UnavailableError: when the source went away or nothing arrived in time, or the disk is full.
    """
    if store.has(payload.digest):
        return
    if await _adopted(payload, await source.where(), store):
        arrived(payload.payload_bytes)
        return
    incoming = await asyncio.to_thread(store.receive, payload)
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(timeout_s) as deadline:

            def note(length: int) -> None:
                deadline.reschedule(clock() + timeout_s)
                arrived(length)

            await _fetch_missing(manifest, incoming, source, note)
    except TimeoutError:
        missing = sum(payload.span(index)[1] for index in incoming.missing())
        raise UnavailableError(
            f"{missing} of {payload.payload_bytes} bytes of version {manifest.version} did not arrive from "
            f"{manifest.origin}, and nothing came for {timeout_s:g} s; try again, what has arrived is kept"
        ) from None
    await asyncio.to_thread(incoming.finish)


async def _adopted(payload: Payload, place: Place, store: PayloadStore) -> bool:
    """Link a payload of a holder that shares this machine and may be read; False where there is none."""

    def adopt() -> bool:
        try:
            with (place.folder / TOKEN).open("rb") as file:
                shown = file.read(_TOKEN_BYTES)
        except (OSError, ValueError):
            return False
        found = PayloadStore(place.folder).path(payload.digest)
        return shown == place.token.encode() and store.adopt(payload, found)

    return bool(place.token) and await asyncio.to_thread(adopt)


async def _fetch_missing(
    manifest: SnapshotManifest, incoming: IncomingPayload, source: Broadcast, arrived: Callable[[int], None]
) -> None:
    refused: IntegrityError | None = None
    for _ in range(ATTEMPTS):
        if not (wanted := incoming.missing()):
            return
        refused = await _receive(manifest, wanted, incoming, source, arrived)
    if refused is not None:
        raise refused


async def _receive(
    manifest: SnapshotManifest,
    wanted: list[int],
    incoming: IncomingPayload,
    source: Broadcast,
    arrived: Callable[[int], None],
) -> IntegrityError | None:
    """Take one stream; return why its first refused chunk was refused, if one was."""
    refused: IntegrityError | None = None
    expected = iter(wanted)
    async for index, data in source.get_chunks(incoming.payload.digest, wanted):
        due = next(expected, None)
        if index != due:
            # A sender that is out of step cannot be trusted for the rest of the stream either.
            return refused or IntegrityError(
                f"{manifest.origin} sent chunk {index} of version {manifest.version} out of turn; "
                f"expected {'the end' if due is None else due}"
            )
        try:
            # Digesting and writing a chunk takes milliseconds, for which a worker must not stop sampling.
            await asyncio.to_thread(incoming.write, index, data)
        except IntegrityError as error:
            refused = refused or IntegrityError(
                f"chunk {index} of version {manifest.version} from {manifest.origin} {error}; it was not kept"
            )
        else:
            arrived(len(data))
    left = next(expected, None)
    if left is not None and refused is None:
        refused = IntegrityError(
            f"{manifest.origin} ended the stream before chunk {left} of version {manifest.version}"
        )
    return refused
