"""Disks: what survives a kill, kept in memory, and the production classes on top of it.

A `JournalDisk` outlives the coordinators that write to it. The journal above it is the production
one with its numbering and its group commit; only the statements of a transaction are replaced. A
transaction is there whole or not at all; what a killed coordinator had not begun to write is lost,
and what it had written without hearing of it is kept, as on a real disk.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.events import JournalEvent, load_event
from antiphon.core.records import SnapshotManifest
from antiphon.lineage.store import ArtifactStore
from antiphon.services.broadcast.chunk_store import ChunkStore
from antiphon.services.coordinator import journal as production
from antiphon.services.coordinator.journal import HistoryRow, Journal, StoredEvent
from antiphon.services.coordinator.signals import Signal
from antiphon.simulator.loop import current_process


class JournalDisk:
    """The tables of one run's journal."""

    def __init__(self) -> None:
        """Begin empty."""
        self.events: list[StoredEvent] = []
        self.payloads: dict[str, bytes] = {}
        self.history: dict[tuple[str, int], HistoryRow] = {}
        self.on_commit: Callable[[Sequence[StoredEvent]], None] = lambda rows: None
        """Told of each transaction once it is on the disk."""
        self.transactions = 0


class MemoryJournal(Journal):
    """The production journal over a `JournalDisk`."""

    def __init__(self, disk: JournalDisk, wall_clock: Callable[[], float]) -> None:
        """Open the journal that the disk holds."""
        self._disk = disk
        self._wall_clock = wall_clock
        self._path = Path("simulated")
        self._thread = ThreadPoolExecutor(1)
        self._pending = production._Batch()
        self._flushing: asyncio.Task[None] | None = None
        self.failure = None
        self.on_failure = None
        self.grown = Signal()
        self._writing: asyncio.Future[None] | None = None
        self._next_seq = len(disk.events) + 1

    def replay(self) -> Iterator[JournalEvent]:
        """Yield every event in order."""
        for row in self._disk.events:
            yield load_event(row.kind, row.body)

    def history(self) -> Iterator[HistoryRow]:
        """Yield the history in the order in which it was kept."""
        yield from list(self._disk.history.values())

    async def close(self) -> None:
        """Write what waits."""
        if self._flushing is not None:
            await self._flushing

    def _write(self, batch: Any) -> None:
        process = current_process()
        if process is not None and not process.alive:
            return
        disk = self._disk
        rows = [StoredEvent(**row) for row in batch.events]
        if rows and rows[0].seq != len(disk.events) + 1:
            raise IntegrityError(
                f"event {rows[0].seq} was written after event {len(disk.events)}; the journal has one writer"
            )
        disk.payloads.update(batch.payloads)
        disk.events.extend(rows)
        for name in batch.forgotten:
            disk.payloads.pop(name, None)
        for key, row in batch.history.items():
            disk.history.pop(key, None)
            if row is not None:
                disk.history[key] = row
        disk.transactions += 1
        disk.on_commit(rows)

    def _rows(self, after: int, limit: int) -> list[StoredEvent]:
        return self._disk.events[after : after + limit]

    def _read_payload(self, name: str) -> bytes | None:
        return self._disk.payloads.get(name)


class MemoryStore(ArtifactStore):
    """An artifact store without files."""

    def __init__(self) -> None:
        """Begin empty."""
        self.objects: dict[str, bytes] = {}

    def put(self, payload: bytes) -> str:
        """Store `payload` and return its digest."""
        digest = digest_bytes(payload)
        self.objects[digest] = payload
        return digest

    def get(self, digest: str) -> bytes:
        """Return the object's bytes.

        Raises:
            UnavailableError: when there is no such object.
        """
        payload = self.objects.get(digest)
        if payload is None:
            raise UnavailableError(f"object {digest} is not in the simulated store")
        return payload


class MemoryChunks(ChunkStore):
    """A chunk store without files; the origin's outlives the learner, a worker's its restarts."""

    def __init__(self) -> None:
        """Begin empty."""
        self._held: dict[str, bytes] = {}
        self._listed: dict[int, SnapshotManifest] = {}

    def put(self, digest: str, payload: bytes) -> None:
        """Keep a chunk.

        Raises:
            IntegrityError: when the bytes do not match the digest.
        """
        if digest_bytes(payload) != digest:
            raise IntegrityError(f"chunk {digest} came with other bytes")
        self._held[digest] = payload

    def get(self, digest: str) -> bytes:
        """Return a chunk's bytes.

        Raises:
            UnavailableError: when it is not held.
        """
        payload = self._held.get(digest)
        if payload is None:
            raise UnavailableError(f"chunk {digest} is not held here (any more); fetch the newest manifest")
        return payload

    def has(self, digest: str) -> bool:
        """Tell whether a chunk is held."""
        return digest in self._held

    def put_manifest(self, manifest: SnapshotManifest) -> None:
        """List a version as whole.

        Raises:
            UnavailableError: when one of its chunks is not held.
        """
        for chunk in manifest.chunks:
            if chunk.digest not in self._held:
                raise UnavailableError(f"version {manifest.version} lacks chunk {chunk.digest}")
        self._listed[manifest.version] = manifest

    def manifest(self, version: int | None) -> SnapshotManifest:
        """Return the manifest of `version`, or of the newest version held.

        Raises:
            UnavailableError: when it is not held.
        """
        wanted = max(self._listed, default=None) if version is None else version
        if wanted is None or wanted not in self._listed:
            raise UnavailableError(f"version {version} is not held here")
        return self._listed[wanted]

    def versions(self) -> list[int]:
        """Return the versions held whole, oldest first."""
        return sorted(self._listed)

    def prune(self, keep: Sequence[SnapshotManifest]) -> None:
        """Drop every version not in `keep` and every chunk that none of them needs."""
        versions = {manifest.version for manifest in keep}
        wanted = {chunk.digest for manifest in keep for chunk in manifest.chunks}
        self._listed = {v: manifest for v, manifest in self._listed.items() if v in versions}
        self._held = {digest: body for digest, body in self._held.items() if digest in wanted}
