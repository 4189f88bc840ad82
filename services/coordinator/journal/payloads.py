"""Payloads: how submissions, manifests, history and unfinished groups lie in the journal, as bytes."""

from typing import Any

from google.protobuf.message import DecodeError

from antiphon.core.errors import IntegrityError
from antiphon.core.loop.partials import KeptGroup
from antiphon.core.records import GroupRewards, GroupSubmission, PromptHistory, SnapshotManifest
from antiphon.net import wire
from antiphon.protos import records_pb2

LEASE_KEY = "lease-key"
"""Name under which the secret is kept that lease ids are made with."""


def dump(record: GroupSubmission | KeptGroup | SnapshotManifest | GroupRewards) -> bytes:
    """Return a record as bytes; a submission's are those it came in, where they are known."""
    if isinstance(record, GroupSubmission):
        if record.encoded is not None:
            return record.encoded
        return bytes(wire.group_submission_to_proto(record).SerializeToString())
    if isinstance(record, GroupRewards):
        return bytes(wire.group_rewards_to_proto(record).SerializeToString())
    if isinstance(record, KeptGroup):
        return bytes(wire.kept_group_to_proto(record).SerializeToString())
    return bytes(wire.snapshot_manifest_to_proto(record).SerializeToString())


def load_prefix(payload: bytes) -> KeptGroup:
    """Read the beginning of a group that `dump` wrote.

    Raises:
        IntegrityError: when the bytes are no beginning of a group.
    """
    return wire.kept_group_from_proto(_parse(records_pb2.KeptGroup, payload, "a group's beginning"))


def load_submission(payload: bytes) -> GroupSubmission:
    """Read a submission that `dump` wrote.

    Raises:
        IntegrityError: when the bytes are no submission.
    """
    message = _parse(records_pb2.GroupSubmission, payload, "a group's payload")
    return wire.group_submission_from_proto(message)


def load_rewards(payload: bytes) -> GroupRewards:
    """Read the rewards of a group, with what the reference model said, that `dump` wrote.

    Raises:
        IntegrityError: when the bytes are no rewards.
    """
    message = _parse(records_pb2.GroupRewards, payload, "what the reference model said of a group")
    return wire.group_rewards_from_proto(message)


def load_manifest(payload: bytes) -> SnapshotManifest:
    """Read a manifest that `dump` wrote.

    Raises:
        IntegrityError: when the bytes are no manifest.
    """
    message = _parse(records_pb2.SnapshotManifest, payload, "a manifest")
    return wire.snapshot_manifest_from_proto(message)


def dump_history(history: PromptHistory) -> bytes:
    """Return a history as bytes, its tokens compressed."""
    return bytes(wire.prompt_history_to_proto(history).SerializeToString())


def load_history(payload: bytes) -> PromptHistory | None:
    """Read what `dump_history` wrote; None, with a line in the log, when the bytes are damaged."""
    try:
        return wire.prompt_history_from_proto(records_pb2.PromptHistory.FromString(payload))
    except DecodeError:
        return None


def _parse(message: Any, payload: bytes, what: str) -> Any:
    try:
        return message.FromString(payload)
    except DecodeError as error:
        raise IntegrityError(f"{what} in the journal cannot be read: {error}") from error
