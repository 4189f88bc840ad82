"""Chunks in memory: what a simulated learner or worker has of the snapshots."""

from collections.abc import Sequence

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import SnapshotManifest
from antiphon.services.broadcast.chunk_store import ChunkStore


class MemoryChunks(ChunkStore):
    """A chunk store without files; the origin's outlives the learner, a worker's its restarts."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._listed: dict[int, SnapshotManifest] = {}

    def put(self, digest: str, payload: bytes) -> None:
        if digest_bytes(payload) != digest:
            raise IntegrityError(f"chunk {digest} came with other bytes")
        self._held[digest] = payload

    def get(self, digest: str) -> bytes:
        payload = self._held.get(digest)
        if payload is None:
            raise UnavailableError(f"chunk {digest} is not held here (any more); fetch the newest manifest")
        return payload

    def length(self, digest: str) -> int:
        return len(self.get(digest))

    def has(self, digest: str) -> bool:
        return digest in self._held

    def put_manifest(self, manifest: SnapshotManifest) -> None:
        for chunk in manifest.chunks:
            if chunk.digest not in self._held:
                raise UnavailableError(f"version {manifest.version} lacks chunk {chunk.digest}")
        self._listed[manifest.version] = manifest

    def manifest(self, version: int | None) -> SnapshotManifest:
        wanted = max(self._listed, default=None) if version is None else version
        if wanted is None or wanted not in self._listed:
            raise UnavailableError(f"version {version} is not held here")
        return self._listed[wanted]

    def versions(self) -> list[int]:
        return sorted(self._listed)

    def prune(self, keep: Sequence[SnapshotManifest]) -> None:
        versions = {manifest.version for manifest in keep}
        wanted = {chunk.digest for manifest in keep for chunk in manifest.chunks}
        self._listed = {v: manifest for v, manifest in self._listed.items() if v in versions}
        self._held = {digest: body for digest, body in self._held.items() if digest in wanted}
