"""Wire steps: sealed batches, commits and snapshots, as records and as messages."""

from antiphon.core import records as r
from antiphon.core.run_clock import RunTimes
from antiphon.core.voided_batch import VoidedBatch
from antiphon.protos import learner_pb2, records_pb2
from antiphon.services.learner import api as learner_api
from antiphon.services.wire import drafting  # noqa: F401 - says how statistics of drafting travel
from antiphon.services.wire.codec import codec

codec(VoidedBatch, records_pb2.VoidedBatch)
batch_ref_to_proto, batch_ref_from_proto = codec(r.BatchRef, records_pb2.BatchRef)
codec(r.TensorEntry, records_pb2.TensorEntry)
codec(r.ChunkEntry, records_pb2.ChunkEntry)
snapshot_manifest_to_proto, snapshot_manifest_from_proto = codec(
    r.SnapshotManifest, records_pb2.SnapshotManifest
)
codec(RunTimes, records_pb2.RunTimes)
step_commit_to_proto, step_commit_from_proto = codec(r.StepCommit, records_pb2.StepCommit)
codec(learner_api.StepResult, learner_pb2.StepResult)
