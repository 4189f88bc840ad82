"""Wire steps: sealed batches, commits and snapshots, as records and as messages.

Reading what was written gives an equal record; messages that cannot be meant raise ContractError.
"""

from antiphon.core import records as r
from antiphon.protos import learner_pb2, records_pb2
from antiphon.services.learner import api as learner_api
from antiphon.services.wire.drafting import drafting_statistics_from_proto, drafting_statistics_to_proto


def batch_ref_to_proto(x: r.BatchRef) -> records_pb2.BatchRef:
    """Translate."""
    return records_pb2.BatchRef(
        step=x.step,
        digest=x.digest,
        timings_digest=x.timings_digest,
        trajectories=x.trajectories,
        groups=x.groups,
        groups_filtered=x.groups_filtered,
        groups_dropped_stale=x.groups_dropped_stale,
        tokens=x.tokens,
        reward_mean=x.reward_mean,
        reward_std=x.reward_std,
        staleness_histogram=x.staleness_histogram,
        completion_tokens_mean=x.completion_tokens_mean,
        drafting=None if x.drafting is None else drafting_statistics_to_proto(x.drafting),
    )


def batch_ref_from_proto(m: records_pb2.BatchRef) -> r.BatchRef:
    """Translate."""
    return r.BatchRef(
        step=m.step,
        digest=m.digest,
        timings_digest=m.timings_digest,
        trajectories=m.trajectories,
        groups=m.groups,
        groups_filtered=m.groups_filtered,
        groups_dropped_stale=m.groups_dropped_stale,
        tokens=m.tokens,
        reward_mean=m.reward_mean,
        reward_std=m.reward_std,
        staleness_histogram=dict(sorted(m.staleness_histogram.items())),
        completion_tokens_mean=m.completion_tokens_mean,
        drafting=drafting_statistics_from_proto(m.drafting) if m.HasField("drafting") else None,
    )


def snapshot_manifest_to_proto(x: r.SnapshotManifest) -> records_pb2.SnapshotManifest:
    """Translate."""
    return records_pb2.SnapshotManifest(
        run_id=x.run_id,
        version=x.version,
        weights_digest=x.weights_digest,
        tensors=[
            records_pb2.TensorEntry(
                name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, length=t.length
            )
            for t in x.tensors
        ],
        chunks=[records_pb2.ChunkEntry(digest=c.digest, offset=c.offset, length=c.length) for c in x.chunks],
        payload_bytes=x.payload_bytes,
        origin=x.origin,
        signature=x.signature,
    )


def snapshot_manifest_from_proto(m: records_pb2.SnapshotManifest) -> r.SnapshotManifest:
    """Translate."""
    return r.SnapshotManifest(
        run_id=m.run_id,
        version=m.version,
        weights_digest=m.weights_digest,
        tensors=tuple(
            r.TensorEntry(name=t.name, dtype=t.dtype, shape=tuple(t.shape), offset=t.offset, length=t.length)
            for t in m.tensors
        ),
        chunks=tuple(r.ChunkEntry(digest=c.digest, offset=c.offset, length=c.length) for c in m.chunks),
        payload_bytes=m.payload_bytes,
        origin=m.origin,
        signature=m.signature,
    )


def step_commit_to_proto(x: r.StepCommit) -> records_pb2.StepCommit:
    """Translate."""
    return records_pb2.StepCommit(
        step=x.step,
        version=x.version,
        weights_digest=x.weights_digest,
        batch_digest=x.batch_digest,
        metrics=x.metrics,
        published=x.published,
    )


def step_commit_from_proto(m: records_pb2.StepCommit) -> r.StepCommit:
    """Translate."""
    return r.StepCommit(
        step=m.step,
        version=m.version,
        weights_digest=m.weights_digest,
        batch_digest=m.batch_digest,
        metrics=dict(sorted(m.metrics.items())),
        published=m.published,
    )


def step_result_to_proto(x: learner_api.StepResult) -> learner_pb2.StepResult:
    """Translate."""
    return learner_pb2.StepResult(commit=step_commit_to_proto(x.commit), idle_s=x.idle_s, train_s=x.train_s)


def step_result_from_proto(m: learner_pb2.StepResult) -> learner_api.StepResult:
    """Translate."""
    return learner_api.StepResult(commit=step_commit_from_proto(m.commit), idle_s=m.idle_s, train_s=m.train_s)
