"""Chunk store: chunks under their digests and manifests beside them; nothing unchecked comes out.

The origin and every receiver keep one. A chunk that no longer matches its name is thrown away
when it is read, so that the next transfer fetches it anew. A manifest is written only after
its chunks: a version that is listed here is whole.
"""

from collections.abc import Sequence
from pathlib import Path

from antiphon.core.digests import check_digest, digest_bytes
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import SnapshotManifest
from antiphon.services.broadcast.manifest import manifest_from_json, manifest_to_json
from antiphon.system.files import PREFIX, write_atomically


class ChunkStore:
    """Chunks and manifests in one folder, for one process at a time."""

    def __init__(self, root: Path) -> None:
        self._chunks = root / "chunks"
        self._manifests = root / "manifests"

    def remove_leftovers(self) -> None:
        """Remove what a killed process was writing; call it before anything is put."""
        for path in (*self._chunks.glob(f"*/{PREFIX}*"), *self._manifests.glob(f"{PREFIX}*")):
            path.unlink(missing_ok=True)

    def put(self, digest: str, payload: bytes) -> None:
        """Keep a chunk; keeping it again changes nothing.

        Raises:
            IntegrityError: when the bytes do not match the digest; nothing is kept then.
            UnavailableError: when the disk is full or cannot be written.
        """
        path = self._path(digest)
        if digest_bytes(payload) != digest:
            raise IntegrityError(
                f"chunk {digest} came with {len(payload)} bytes that do not match its digest; fetch it again"
            )
        if not self.has(digest) or path.stat().st_size != len(payload):
            write_atomically(path, payload)

    def get(self, digest: str) -> bytes:
        """Return a chunk's bytes, checked.

        Raises:
            UnavailableError: when it is not held.
            IntegrityError: when its bytes were altered; it is dropped then, to be fetched again.
        """
        path = self._path(digest)
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            raise _not_held(digest) from None
        if digest_bytes(payload) != digest:
            path.unlink(missing_ok=True)
            raise IntegrityError(
                f"the stored chunk {digest} was altered ({len(payload)} bytes do not match its digest); "
                "it was dropped and must be fetched again"
            )
        return payload

    def length(self, digest: str) -> int:
        """Return the bytes of a chunk.

        Raises:
            UnavailableError: when it is not held.
        """
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            raise _not_held(digest) from None

    def has(self, digest: str) -> bool:
        """Tell whether a chunk of that name is held; its bytes are checked when read."""
        return self._path(digest).is_file()

    def put_manifest(self, manifest: SnapshotManifest) -> None:
        """List a version as whole.

        Raises:
            UnavailableError: when one of its chunks is not held.
        """
        for chunk in manifest.chunks:
            if not self.has(chunk.digest):
                raise UnavailableError(
                    f"version {manifest.version} lacks chunk {chunk.digest}; fetch it before listing it"
                )
        write_atomically(self._manifest_path(manifest.version), manifest_to_json(manifest))

    def manifest(self, version: int | None) -> SnapshotManifest:
        """Return the manifest of `version`, or of the newest version held.

        Raises:
            UnavailableError: when it is not held.
        """
        held = self.versions()
        if not held:
            raise UnavailableError("no snapshot is held here yet; wait for the learner to publish")
        if version is None:
            version = held[-1]
        if version not in held:
            listed = ", ".join(map(str, held))
            raise UnavailableError(
                f"version {version} is not held here; there is {listed}; ask for the newest one"
            )
        try:
            return manifest_from_json(self._manifest_path(version).read_bytes())
        except FileNotFoundError:  # it was listed a moment ago
            raise UnavailableError(f"version {version} was pruned; ask for the newest one") from None

    def versions(self) -> list[int]:
        """Return the versions held whole, oldest first."""
        if not self._manifests.is_dir():
            return []
        return sorted(int(path.stem) for path in self._manifests.glob("*.json") if path.stem.isdigit())

    def prune(self, keep: Sequence[SnapshotManifest]) -> None:
        """Drop every version not in `keep` and every chunk that none of them needs."""
        versions = {manifest.version for manifest in keep}
        wanted = {chunk.digest for manifest in keep for chunk in manifest.chunks}
        for version in self.versions():
            if version not in versions:
                self._manifest_path(version).unlink(missing_ok=True)
        for path in self._chunks.glob("*/*"):
            if path.name not in wanted and not path.name.startswith("."):
                path.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._chunks / check_digest(digest)[:2] / digest

    def _manifest_path(self, version: int) -> Path:
        return self._manifests / f"{version}.json"


def _not_held(digest: str) -> UnavailableError:
    return UnavailableError(f"chunk {digest[:64]} is not held here (any more); fetch the newest manifest")
