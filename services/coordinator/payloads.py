"""Payloads: how submissions and manifests lie in the journal, as serialized messages."""

from google.protobuf.message import DecodeError

from antiphon.core.errors import IntegrityError
from antiphon.core.records import GroupSubmission, SnapshotManifest
from antiphon.protos import records_pb2
from antiphon.services import wire


def manifest_name(version: int) -> str:
    """Return the name under which the manifest of a version is kept."""
    return f"manifest-{version:06d}"


def dump_submission(submission: GroupSubmission) -> bytes:
    """Return a submission as bytes."""
    return bytes(wire.group_submission_to_proto(submission).SerializeToString())


def load_submission(payload: bytes) -> GroupSubmission:
    """Read what `dump_submission` wrote.

    Raises:
        IntegrityError: when the bytes are no submission.
    """
    try:
        return wire.group_submission_from_proto(records_pb2.GroupSubmission.FromString(payload))
    except DecodeError as error:
        raise IntegrityError(f"a group's payload in the journal cannot be read: {error}") from error


def dump_manifest(manifest: SnapshotManifest) -> bytes:
    """Return a manifest as bytes."""
    return bytes(wire.snapshot_manifest_to_proto(manifest).SerializeToString())


def load_manifest(payload: bytes) -> SnapshotManifest:
    """Read what `dump_manifest` wrote.

    Raises:
        IntegrityError: when the bytes are no manifest.
    """
    try:
        return wire.snapshot_manifest_from_proto(records_pb2.SnapshotManifest.FromString(payload))
    except DecodeError as error:
        raise IntegrityError(f"a manifest in the journal cannot be read: {error}") from error
