"""Wire steps: sealed batches, commits and snapshots, as records and as messages."""

from antiphon.api import learner as learner_api
from antiphon.api.manifest import decode_manifest, encode_manifest
from antiphon.core import records as r
from antiphon.core.run_clock import RunTimes
from antiphon.core.voided_batch import VoidedBatch
from antiphon.net.rpc.codec import by_hand, codec
from antiphon.net.wire import drafting  # noqa: F401 - says how statistics of drafting travel
from antiphon.protos import learner_pb2, records_pb2

codec(VoidedBatch, records_pb2.VoidedBatch)
batch_ref_to_proto, batch_ref_from_proto = codec(r.BatchRef, records_pb2.BatchRef)


def snapshot_manifest_to_proto(manifest: r.SnapshotManifest) -> records_pb2.SnapshotManifest:
    """Return the message of a manifest; its body is encoded once, however many workers ask for it."""
    return records_pb2.SnapshotManifest(
        body=encode_manifest(manifest), origin=manifest.origin, signature=manifest.signature
    )


def snapshot_manifest_from_proto(m: records_pb2.SnapshotManifest) -> r.SnapshotManifest:
    """Return the manifest of a message.

    Raises:
        IntegrityError: when its body is no manifest.
    """
    return decode_manifest(m.body, m.origin, m.signature)


by_hand(records_pb2.SnapshotManifest, snapshot_manifest_to_proto, snapshot_manifest_from_proto)
codec(RunTimes, records_pb2.RunTimes)
step_commit_to_proto, step_commit_from_proto = codec(r.StepCommit, records_pb2.StepCommit)
codec(learner_api.StepResult, learner_pb2.StepResult)
