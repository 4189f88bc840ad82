"""Verified weights: tensors whose digest was computed from their own bytes, and no others.

An engine takes nothing else, so it need not digest what it is given, and nobody can hand it weights that
were not checked. A snapshot's tensors are views of its mapped file: they take no memory of their own.
"""

import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from antiphon.api.manifest import DTYPE_BYTES, check_manifest, full_payload, header_of
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import SnapshotManifest
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import weights_digest, weights_hasher

_SEAL = object()


class VerifiedWeights(Mapping[str, torch.Tensor]):
    """Name -> tensor; made by `verify` and `open_snapshot` alone."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], digest: str, seal: object) -> None:
        if seal is not _SEAL:
            raise ContractError("weights are verified by verify or open_snapshot; call one of them")
        self._tensors = tensors
        self.digest = digest
        """Computed from the tensors."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def verify(tensors: Mapping[str, torch.Tensor]) -> VerifiedWeights:
    """Digest tensors in memory; they must not change afterwards."""
    return VerifiedWeights(tensors, weights_digest(tensors), _SEAL)


def open_snapshot(manifest: SnapshotManifest, store: PayloadStore) -> VerifiedWeights:
    """Map the policy file of a version and check all of it, with all threads; takes seconds per 10 GB.

    The tensors may not be written to: doing so ends the process.

    Raises:
        IntegrityError: when the file is not the version's; nothing of it may be used then.
        UnavailableError: when it is not held.
    """
    check_manifest(manifest)
    payload, head = full_payload(manifest), header_of(manifest)
    mapping = store.map(payload.digest)
    if len(mapping) != payload.payload_bytes or mapping[: len(head)] != head:
        raise IntegrityError(
            f"the file of version {manifest.version} has {len(mapping)} bytes or another header than its "
            f"manifest says ({payload.payload_bytes} bytes); fetch it again"
        )
    hasher = weights_hasher(manifest.tensors)
    hasher.update(mapping[len(head) :])
    if (digest := hasher.hexdigest()) != manifest.weights_digest:
        raise IntegrityError(
            f"the weights of version {manifest.version} have digest {digest}, but the manifest says "
            f"{manifest.weights_digest}; they are not loaded"
        )
    with warnings.catch_warnings():
        # torch warns once that the memory is read-only, which is what it is mapped for.
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        whole = torch.from_numpy(np.frombuffer(mapping, np.uint8))
    tensors = {}
    for entry in manifest.tensors:
        start = len(head) + entry.offset
        flat = whole[start : start + entry.length]
        if start % DTYPE_BYTES[entry.dtype]:
            flat = flat.clone()  # a narrow tensor leaves the next one at an odd address, where no view is
        tensors[entry.name] = flat.view(getattr(torch, entry.dtype)).reshape(entry.shape)
    return VerifiedWeights(tensors, digest, _SEAL)
