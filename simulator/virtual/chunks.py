"""Payloads in memory: what a simulated learner or worker has of the snapshots."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from antiphon.api.manifest import payload_digest
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.weights.payload_store import Arrivals, Buffer, IncomingPayload, PayloadStore


class MemoryIncoming(IncomingPayload):
    """A payload that arrives, and what of it outlives its receiver."""

    def __init__(self, payload: Payload, arrivals: Arrivals) -> None:
        self.payload, self.arrivals = payload, arrivals
        self.data = bytearray(payload.payload_bytes)
        self.held = np.zeros(len(payload.chunk_digests), np.bool_)
        self.whole = False

    def write(self, index: int, data: Buffer) -> None:
        start, length = self.payload.span(index)
        if len(data) != length or digest_bytes(data) != self.payload.chunk_digests[index]:
            raise IntegrityError("was altered: its bytes do not match its digest")
        self.data[start : start + length] = data
        self.held[index] = True

    def finish(self) -> None:
        if self.missing():
            raise UnavailableError("chunks are missing")
        self.whole = True


class MemoryPayloads(PayloadStore):
    """A payload store without files; the origin's outlives the learner, a worker's its restarts."""

    def __init__(self) -> None:
        super().__init__(Path())
        self._held: dict[str, MemoryIncoming] = {}
        self._listed: dict[int, SnapshotManifest] = {}

    def keep(self, data: bytes, chunk_bytes: int) -> Payload:
        """Hold a payload that is made here."""
        parts = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
        digests = tuple(map(digest_bytes, parts))
        address = payload_digest(len(data), chunk_bytes, digests)
        payload = Payload("full", None, "raw", address, len(data), chunk_bytes, digests)
        incoming = self._held[address] = MemoryIncoming(payload, self.arrivals)
        for index, part in enumerate(parts):
            incoming.write(index, part)
        incoming.finish()
        return payload

    def token(self) -> str:
        return ""  # so that nobody looks for files

    def has(self, digest: str) -> bool:
        return digest in self._held and self._held[digest].whole

    def note(self, payload: Payload) -> None:
        pass  # what is held here says what it is

    def held(self, payload: Payload) -> npt.NDArray[np.bool_]:
        return self._find(payload.digest).held

    def find(self, digest: str) -> Payload:
        return self._find(digest).payload

    def receive(self, payload: Payload) -> IncomingPayload:
        return self._held.setdefault(payload.digest, MemoryIncoming(payload, self.arrivals))

    def map(self, digest: str) -> memoryview:
        if not self.has(digest):
            raise UnavailableError(f"payload {digest} is not held here (any more); fetch the newest manifest")
        return memoryview(self._held[digest].data).toreadonly()

    def read_chunks(self, payload: Payload, run: range) -> bytes:
        incoming = self._find(payload.digest)
        if not incoming.held[run.start : run.stop].all():
            raise UnavailableError(f"chunk {run[0]} of payload {payload.digest} is not held here")
        last, length = payload.span(run[-1])
        return bytes(incoming.data[payload.span(run[0])[0] : last + length])

    def put_manifest(self, manifest: SnapshotManifest) -> None:
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
        wanted = {payload.digest for manifest in keep for payload in manifest.payloads}
        self._listed = {v: manifest for v, manifest in self._listed.items() if v in versions}
        self._held = {digest: held for digest, held in self._held.items() if digest in wanted}

    def _find(self, digest: str) -> MemoryIncoming:
        if digest not in self._held:
            raise UnavailableError(f"payload {digest} is not held here (any more); fetch the newest manifest")
        return self._held[digest]
