"""Publish: the weights of a step become a snapshot before the step is committed.

They go from the engine to the disk in one pass, so no copy of them waits in memory, and a learner
that dies after a commit finds the committed version on its disk. Patches are made of that file before the
version is announced, while the next step may train.
"""

import dataclasses
from collections.abc import Callable, Collection
from contextlib import closing

import structlog

from antiphon.api.manifest import auto_chunk_bytes, full_payload
from antiphon.core.broadcast.config import BroadcastSection
from antiphon.core.broadcast.patches import MOST_SHARE
from antiphon.core.capacity.model_shape import Tensors, count
from antiphon.core.errors import AntiphonError, BlockedError, ContractError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest, TensorEntry
from antiphon.net.security.keys import SigningKey
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.training import Publishing
from antiphon.system.free_space import SpaceFloor
from antiphon.weights.patch_payloads import (
    FullWeights,
    PayloadChoice,
    spare_threads,
    stored_weights,
    write_payloads,
)
from antiphon.weights.payload_store import OutgoingPayload, PayloadStore
from antiphon.weights.signature import sign_manifest
from antiphon.weights.snapshot import Weights, write_adapter, write_snapshot

_log = structlog.get_logger(__name__)


def payload_choice(broadcast: BroadcastSection, remote: bool, busy_threads: int) -> PayloadChoice | None:
    """Return which payloads a run makes beside the raw full one, or None.

    Args:
        broadcast: its configuration.
        remote: whether workers may sit on other machines; those on this one link the full payload.
        busy_threads: of this machine's, those that train meanwhile.
    """
    mode = broadcast.patches
    if mode == "off" or (mode == "auto" and not remote):
        return None
    most_share = 1.0 if mode == "on" else MOST_SHARE
    return PayloadChoice(
        broadcast.patch_ladder, most_share, broadcast.compress_full, spare_threads(busy_threads)
    )


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
        choice: PayloadChoice | None = None,
        recorded: Callable[[], int | None] = lambda: None,
        trained: Callable[[Tensors], int] = count,
        pinned: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Write into the origin's store, where the newest `snapshots_kept` announced versions stay.

        Chunks have `chunk_bytes`, or what suits the payload. Without a `signer` manifests are not signed.
        No snapshot is begun below the floor of `space`. `choice` says what is made of a snapshot for
        workers elsewhere. `recorded` returns the newest version that the run's records need no more, and
        `trained` how many parameters of a model are trained. Versions that `pinned` returns stay stored.
        """
        self._run_id = run_id
        self._payloads = payloads
        self._chunk_bytes = chunk_bytes
        self._snapshots_kept = snapshots_kept
        self._signer = signer
        self._space = space
        self._choice, self._recorded, self._trained = choice, recorded, trained
        self._pinned = pinned
        self._said_left_out = False
        self.progress = ProgressCounter()

    def digest(self, weights: Weights, done: Callable[[int], None]) -> str:
        return weights.digest(done)

    def write(self, version: int, weights: Weights, done: Callable[[int], None]) -> str:
        self._make_space(version, weights.entries)
        manifest = write_snapshot(self._payloads, self._run_id, version, weights, self._chunk_bytes, done)
        adapter, base = weights.adapter(), self._payloads.weights().get(0)
        if version and adapter is not None and base is not None:
            payload = write_adapter(self._payloads, manifest, base, adapter)
            manifest = dataclasses.replace(manifest, payloads=(*manifest.payloads, payload))
        self._list(manifest)
        return manifest.weights_digest

    def manifest(self, version: int, origin: str) -> SnapshotManifest:
        try:
            manifest = self._payloads.manifest(version)
            # An adapter is smaller than any patch.
            if self._choice is not None and len(manifest.payloads) == 1:
                # Before old versions go: the oldest of them is the longest rung's parent.
                self._add_payloads(manifest, self._choice)
            self._payloads.prune_announced(version, self._snapshots_kept, self._recorded(), self._pinned())
            return dataclasses.replace(self._payloads.manifest(version), origin=origin)
        except UnavailableError as error:
            raise ContractError(f"version {version} cannot be published: {error}") from None

    def stored(self) -> dict[int, str]:
        return self._payloads.weights()

    def _list(self, manifest: SnapshotManifest) -> None:
        if self._signer is not None:
            manifest = sign_manifest(manifest, self._signer)
        self._payloads.put_manifest(manifest)

    def _make_space(self, version: int, entries: tuple[TensorEntry, ...]) -> None:
        """Check the space for a version; before it waits, patches go: a worker can do without."""
        for stored in self._payloads.versions():
            try:
                return self._check_space(version, entries)
            except BlockedError:
                self._drop_patches(self._payloads.manifest(stored))
        self._check_space(version, entries)

    def _drop_patches(self, manifest: SnapshotManifest) -> None:
        full = full_payload(manifest)
        dropped = [payload for payload in manifest.payloads if payload != full and payload.encoding != "lora"]
        if dropped:
            for payload in dropped:
                self._payloads.drop(payload.digest)  # first: a full disk may not take the manifest
            kept = tuple(payload for payload in manifest.payloads if payload not in dropped)
            self._list(dataclasses.replace(manifest, payloads=kept))
            _log.warning("patches.dropped", version=manifest.version, dropped=len(dropped))

    def _check_space(self, version: int, entries: tuple[TensorEntry, ...], patch_bytes: int = 0) -> None:
        if self._space is not None:
            trained = self._trained({entry.name: entry.shape for entry in entries})
            self._space.check(version, sum(entry.length for entry in entries), trained, patch_bytes)

    def _add_payloads(self, manifest: SnapshotManifest, choice: PayloadChoice) -> None:
        """Make what the choice says of a version that was written, and list it with that.

        Nothing is lost where that fails: the version has its full payload.
        """
        made: list[Payload] = []

        def left_out(parent: int, length: int) -> None:
            if not self._said_left_out:  # once: the next versions are hardly other ones
                self._said_left_out = True
                share = round(length / manifest.full_bytes, 3)
                _log.info("patches.left_out", version=manifest.version, parent=parent, share_of_full=share)

        def make(length: int) -> OutgoingPayload:
            # The next version's space, which pruning may not come before, is not for patches.
            self._check_space(manifest.version, manifest.tensors, length)
            return self._payloads.make(self._chunk_bytes or auto_chunk_bytes(length))

        try:
            payloads = write_payloads(
                make,
                stored_weights(self._payloads, manifest),
                self._earlier(manifest),
                manifest.tensors,
                choice,
                left_out=left_out,
                written=self.progress.add,
            )
            with closing(payloads):
                made.extend(payloads)
        except AntiphonError as error:
            _log.warning("patches.unmade", version=manifest.version, made=len(made), reason=str(error))
        if not made:
            return
        try:
            self._list(dataclasses.replace(manifest, payloads=(*manifest.payloads, *made)))
        except UnavailableError as error:
            _log.warning("patches.unlisted", version=manifest.version, reason=str(error))
            for payload in made:
                self._payloads.drop(payload.digest)
            return
        sizes = {payload.parent: payload.payload_bytes for payload in made}
        _log.info("patches.made", version=manifest.version, bytes_by_parent=sizes)

    def _earlier(self, manifest: SnapshotManifest) -> list[FullWeights]:
        """Return earlier versions of the same tensors that are stored, each in its length."""
        found = []
        for version in self._payloads.versions():
            if version >= manifest.version:
                continue
            earlier = self._payloads.manifest(version)
            if earlier.tensors == manifest.tensors and self._payloads.has(full_payload(earlier).digest):
                weights = stored_weights(self._payloads, earlier)
                if len(weights.data) == manifest.full_bytes:
                    found.append(weights)
        return found
