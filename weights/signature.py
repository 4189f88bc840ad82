"""Signature: weights are loaded only when the learner of the run signed for them.

The signature covers the run, the version, every tensor and chunk and the digest of the whole
payload; not the origin, which changes when the learner moves and may be anyone: what an
origin sends is compared with the digests.
"""

import dataclasses

from antiphon.api.manifest import encode_manifest
from antiphon.core.errors import IntegrityError
from antiphon.core.records import SnapshotManifest
from antiphon.net.security.keys import SigningKey, verifies

_PURPOSE = b"antiphon snapshot manifest\n"
"""Keeps a signature made for one thing from being shown for another."""


def signed_bytes(manifest: SnapshotManifest) -> bytes:
    """Return what the signature of a manifest covers."""
    return _PURPOSE + encode_manifest(manifest)


def sign_manifest(manifest: SnapshotManifest, key: SigningKey) -> SnapshotManifest:
    """Return the manifest with the learner's signature."""
    return dataclasses.replace(manifest, signature=key.sign(signed_bytes(manifest)))


def check_signature(manifest: SnapshotManifest, public: bytes) -> None:
    """Check who signed a manifest.

    Args:
        manifest: as it came.
        public: the learner's public key, 32 bytes; empty where the run signs nothing.

    Raises:
        IntegrityError: when it is not signed by that key, or was altered since.
    """
    if public and not verifies(public, signed_bytes(manifest), manifest.signature):
        how = "is not signed by the learner of this run" if manifest.signature else "is not signed"
        raise IntegrityError(
            f"the manifest of version {manifest.version} {how}; nothing of it was loaded: "
            "see who announced it, and that learner.pub is the run's own"
        )
