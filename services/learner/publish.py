"""Publish: the weights of a step become a snapshot before the step is committed.

They go from the engine to the disk in one pass, so no copy of them waits in memory, and a learner
that dies after a commit finds the committed version on its disk.
"""

import dataclasses
import math
from collections.abc import Callable

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.records import SnapshotManifest
from antiphon.services.broadcast.payload_store import PayloadStore
from antiphon.services.broadcast.signature import sign_manifest
from antiphon.services.broadcast.snapshot import Weights, write_snapshot
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.training import Publishing
from antiphon.services.security.keys import SigningKey
from antiphon.system.free_space import SpaceFloor


class SnapshotPublisher(Publishing):
    """The origin's payload store, and the key that its manifests are signed with."""

    def __init__(
        self,
        run_id: str,
        payloads: PayloadStore,
        chunk_bytes: int | None,
        snapshots_kept: int,
        signer: SigningKey | None = None,
        space: SpaceFloor | None = None,
    ) -> None:
        """Write into the origin's store, where the newest `snapshots_kept` announced versions stay.

        Chunks have `chunk_bytes`, or what suits the payload. Without a `signer` manifests are not signed.
        No snapshot is begun below the floor of `space`.
        """
        self._run_id = run_id
        self._payloads = payloads
        self._chunk_bytes = chunk_bytes
        self._snapshots_kept = snapshots_kept
        self._signer = signer
        self._space = space
        self.progress = ProgressCounter()

    def digest(self, weights: Weights, done: Callable[[int], None]) -> str:
        return weights.digest(done)

    def write(self, version: int, weights: Weights, done: Callable[[int], None]) -> str:
        if self._space is not None:
            parameters = sum(math.prod(entry.shape) for entry in weights.entries)
            self._space.check(version, sum(entry.length for entry in weights.entries), parameters)
        manifest = write_snapshot(self._payloads, self._run_id, version, weights, self._chunk_bytes, done)
        if self._signer is not None:
            manifest = sign_manifest(manifest, self._signer)
        self._payloads.put_manifest(manifest)
        return manifest.weights_digest

    def manifest(self, version: int, origin: str) -> SnapshotManifest:
        self._payloads.prune_announced(version, self._snapshots_kept)
        try:
            return dataclasses.replace(self._payloads.manifest(version), origin=origin)
        except UnavailableError as error:
            raise ContractError(f"version {version} cannot be published: {error}") from None

    def stored(self) -> dict[int, str]:
        return self._payloads.weights()
