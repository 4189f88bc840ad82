"""Publish: weights kept aside by a step become a snapshot while the next step trains.

A publisher keeps the published weights of versions that wait for publication, as copies, so the
engine may continue. Writing hashes and stores chunks; it touches neither the engine nor its thread.
"""

import dataclasses
from collections.abc import Mapping

import torch

from antiphon.core.errors import ContractError
from antiphon.core.records import SnapshotManifest
from antiphon.services.broadcast.chunk_store import ChunkStore
from antiphon.services.broadcast.signature import sign_manifest
from antiphon.services.broadcast.snapshot import build_snapshot
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.training import Publishing
from antiphon.services.security.keys import SigningKey


class SnapshotPublisher(Publishing):
    """Versions waiting for publication, and the chunk store they go to."""

    def __init__(
        self,
        run_id: str,
        chunks: ChunkStore,
        chunk_bytes: int,
        snapshots_kept: int,
        waiting_limit: int,
        signer: SigningKey | None = None,
    ) -> None:
        """Publish into the origin's store, where the newest `snapshots_kept` stay.

        At most `waiting_limit` versions are kept in memory; the oldest are dropped. Without a
        `signer` manifests are not signed.
        """
        self._run_id = run_id
        self._chunks = chunks
        self._chunk_bytes = chunk_bytes
        self._snapshots_kept = snapshots_kept
        self._waiting_limit = waiting_limit
        self._signer = signer
        self.progress = ProgressCounter()
        self._waiting: dict[int, Mapping[str, torch.Tensor]] = {}

    def keep(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self._waiting[version] = weights
        while len(self._waiting) > self._waiting_limit:
            del self._waiting[min(self._waiting)]

    def write(self, version: int, origin: str) -> SnapshotManifest:
        if version in self._waiting:
            manifest = build_snapshot(
                self._run_id, version, self._waiting[version], self._chunk_bytes, origin, self._put
            )
        elif version in self._chunks.versions():
            manifest = dataclasses.replace(self._chunks.manifest(version), origin=origin)
        else:
            held = ", ".join(map(str, sorted({*self._waiting, *self._chunks.versions()}))) or "none"
            raise ContractError(
                f"the weights of version {version} are not kept for publication; there are: {held}"
            )
        if self._signer is not None:
            manifest = sign_manifest(manifest, self._signer)
        self._chunks.put_manifest(manifest)
        self._waiting.pop(version, None)
        newest = self._chunks.versions()[-self._snapshots_kept :]
        self._chunks.prune([self._chunks.manifest(held) for held in newest])
        return manifest

    def _put(self, digest: str, payload: bytes) -> None:
        self._chunks.put(digest, payload)
        self.progress.add(len(payload))

    def waiting(self) -> list[int]:
        return sorted(self._waiting)

    def stored(self) -> list[int]:
        return self._chunks.versions()
