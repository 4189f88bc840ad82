"""Wire: records to protos and back, the one place that knows both.

Every pair is `<record>_to_proto` and `<record>_from_proto`; reading what was written gives an
equal record. Messages that cannot be meant raise ContractError before anything is done; what
concerns drafting alone is translated in `wire_drafting`, which never refuses a message.
"""

import math
from typing import Any

import numpy as np

from antiphon.core import records as r
from antiphon.core.audit import SampleFigures
from antiphon.core.errors import ContractError
from antiphon.protos import coordinator_pb2, learner_pb2, records_pb2, reward_pb2, rollout_pb2
from antiphon.services.coordinator import api as coordinator_api
from antiphon.services.learner import api as learner_api
from antiphon.services.reward import api as reward_api
from antiphon.services.wire_arrays import (
    finish_reason_from_text,
)
from antiphon.services.wire_completions import (
    completions_from_proto,
    completions_to_proto,
    rows_from_proto,
)
from antiphon.services.wire_drafting import (
    drafting_figures_from_proto,
    drafting_figures_to_proto,
    prompt_history_from_proto,
    prompt_history_to_proto,
)
from antiphon.services.wire_progress import (
    lease_progress_from_proto,
    lease_progress_to_proto,
    partial_trajectory_from_proto,
    partial_trajectory_to_proto,
)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def sampling_parameters_to_proto(x: r.SamplingParameters) -> records_pb2.SamplingParameters:
    """Translate."""
    return records_pb2.SamplingParameters(
        temperature=x.temperature, top_k=x.top_k, top_p=x.top_p, max_tokens=x.max_tokens
    )


def sampling_parameters_from_proto(m: records_pb2.SamplingParameters) -> r.SamplingParameters:
    """Translate."""
    return r.SamplingParameters(
        temperature=m.temperature, top_k=m.top_k, top_p=m.top_p, max_tokens=m.max_tokens
    )


def prompt_to_proto(x: r.Prompt) -> records_pb2.Prompt:
    """Translate."""
    return records_pb2.Prompt(key=x.key, token_ids=x.token_ids)


def prompt_from_proto(m: records_pb2.Prompt) -> r.Prompt:
    """Translate."""
    return r.Prompt(key=m.key, token_ids=tuple(m.token_ids))


def lease_to_proto(x: r.Lease) -> records_pb2.Lease:
    """Translate."""
    return records_pb2.Lease(
        lease_id=x.lease_id,
        group_id=x.group_id,
        prompt=prompt_to_proto(x.prompt),
        epoch=x.epoch,
        seeds=x.seeds,
        sampling=sampling_parameters_to_proto(x.sampling),
        version=x.version,
        duration_s=x.duration_s,
        attempt=x.attempt,
        history=None if x.history is None else prompt_history_to_proto(x.history),
        prefix=[partial_trajectory_to_proto(piece) for piece in x.prefix],
    )


def lease_from_proto(m: records_pb2.Lease) -> r.Lease:
    """Translate."""
    return r.Lease(
        lease_id=m.lease_id,
        group_id=m.group_id,
        prompt=prompt_from_proto(m.prompt),
        epoch=m.epoch,
        seeds=tuple(m.seeds),
        sampling=sampling_parameters_from_proto(m.sampling),
        version=_optional(m, "version"),
        duration_s=m.duration_s,
        attempt=m.attempt,
        history=prompt_history_from_proto(m.history) if m.HasField("history") else None,
        prefix=tuple(partial_trajectory_from_proto(piece) for piece in m.prefix),
    )


def group_submission_to_proto(x: r.GroupSubmission) -> records_pb2.GroupSubmission:
    """Translate."""
    return records_pb2.GroupSubmission(
        lease_id=x.lease_id,
        group_id=x.group_id,
        worker_id=x.worker_id,
        completions=completions_to_proto(x.trajectories),
        generation_s=x.generation_s,
        drafting=None if x.drafting is None else drafting_figures_to_proto(x.drafting),
    )


def group_submission_from_proto(
    m: records_pb2.GroupSubmission, keep_encoded: bool = False
) -> r.GroupSubmission:
    """Translate; with `keep_encoded`, the message stays at hand, without fields that are unknown here."""
    encoded = None
    if keep_encoded:
        m.DiscardUnknownFields()  # nobody stores here what nobody checks
        encoded = bytes(m.SerializeToString())
    return r.GroupSubmission(
        lease_id=m.lease_id,
        group_id=m.group_id,
        worker_id=m.worker_id,
        trajectories=_trajectories_from_proto(m),
        generation_s=m.generation_s,
        drafting=drafting_figures_from_proto(m.drafting) if m.HasField("drafting") else None,
        encoded=encoded,
    )


def _trajectories_from_proto(m: records_pb2.GroupSubmission) -> tuple[r.Trajectory, ...]:
    if not m.trajectories:
        return completions_from_proto(m.completions)
    if m.HasField("completions"):
        raise ContractError(f"group {m.group_id[:40]} came with its completions twice; hand it in once")
    return rows_from_proto(m.trajectories)


def submit_verdict_to_proto(x: r.SubmitVerdict) -> rollout_pb2.SubmitReply:
    """Translate."""
    return rollout_pb2.SubmitReply(verdict=x.value)


def submit_verdict_from_proto(m: rollout_pb2.SubmitReply) -> r.SubmitVerdict:
    """Translate."""
    try:
        return r.SubmitVerdict(m.verdict)
    except ValueError:
        raise ContractError(f"verdict={m.verdict!r} is unknown to this worker; update it") from None


def judgement_to_proto(x: r.Judgement) -> records_pb2.Judgement:
    """Translate."""
    return records_pb2.Judgement(sample_index=x.sample_index, reward=x.reward)


def judgement_from_proto(m: records_pb2.Judgement) -> r.Judgement:
    """Translate."""
    return r.Judgement(sample_index=m.sample_index, reward=m.reward)


def group_to_judge_to_proto(x: r.GroupToJudge) -> records_pb2.GroupToJudge:
    """Translate."""
    return records_pb2.GroupToJudge(
        group_id=x.group_id,
        prompt_key=x.prompt_key,
        completions=[
            records_pb2.Completion(token_ids=tokens.tolist(), finish_reason=reason.value)
            for tokens, reason in zip(x.completions, x.finish_reasons, strict=True)
        ],
    )


def group_to_judge_from_proto(m: records_pb2.GroupToJudge) -> r.GroupToJudge:
    """Translate."""
    return r.GroupToJudge(
        group_id=m.group_id,
        prompt_key=m.prompt_key,
        completions=tuple(np.array(c.token_ids, dtype=np.int32) for c in m.completions),
        finish_reasons=tuple(finish_reason_from_text(c.finish_reason) for c in m.completions),
    )


def group_to_audit_to_proto(x: r.GroupToAudit) -> records_pb2.GroupToAudit:
    """Translate."""
    return records_pb2.GroupToAudit(
        submission=group_submission_to_proto(x.submission), prompt_token_ids=x.prompt_token_ids
    )


def group_to_audit_from_proto(m: records_pb2.GroupToAudit) -> r.GroupToAudit:
    """Translate."""
    return r.GroupToAudit(group_submission_from_proto(m.submission), tuple(m.prompt_token_ids))


def sample_figures_to_proto(x: SampleFigures) -> records_pb2.SampleFigures:
    """Translate."""
    return records_pb2.SampleFigures(
        sample_index=x.sample_index,
        tokens=x.tokens,
        missed=x.missed,
        impossible=x.impossible,
        drift=x.drift,
    )


def sample_figures_from_proto(m: records_pb2.SampleFigures) -> SampleFigures:
    """Translate."""
    if not 0 <= m.missed <= m.tokens or not 0 <= m.impossible <= m.tokens or m.drift < 0:
        raise ContractError(f"the figures of sample {m.sample_index} cannot be: {m.missed} of {m.tokens}")
    return SampleFigures(m.sample_index, m.tokens, m.missed, m.impossible, m.drift)


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
        staleness_histogram=x.staleness_histogram,
        completion_tokens_mean=x.completion_tokens_mean,
        drafting=None if x.drafting is None else drafting_figures_to_proto(x.drafting),
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
        staleness_histogram=dict(sorted(m.staleness_histogram.items())),
        completion_tokens_mean=m.completion_tokens_mean,
        drafting=drafting_figures_from_proto(m.drafting) if m.HasField("drafting") else None,
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


def worker_hello_to_proto(x: coordinator_api.WorkerHello) -> rollout_pb2.WorkerHello:
    """Translate."""
    return rollout_pb2.WorkerHello(
        worker_name=x.worker_name,
        protocol_version=x.protocol_version,
        run_id=x.run_id,
        concurrent_groups=x.concurrent_groups,
    )


def worker_hello_from_proto(m: rollout_pb2.WorkerHello) -> coordinator_api.WorkerHello:
    """Translate."""
    return coordinator_api.WorkerHello(
        worker_name=m.worker_name,
        protocol_version=m.protocol_version,
        run_id=m.run_id,
        concurrent_groups=m.concurrent_groups,
    )


def worker_welcome_to_proto(x: coordinator_api.WorkerWelcome) -> rollout_pb2.WorkerWelcome:
    """Translate."""
    return rollout_pb2.WorkerWelcome(
        worker_id=x.worker_id,
        run_id=x.run_id,
        config_yaml=x.config_yaml,
        heartbeat_s=x.heartbeat_s,
        learner_key=x.learner_key,
    )


def worker_welcome_from_proto(m: rollout_pb2.WorkerWelcome) -> coordinator_api.WorkerWelcome:
    """Translate."""
    return coordinator_api.WorkerWelcome(
        worker_id=m.worker_id,
        run_id=m.run_id,
        config_yaml=m.config_yaml,
        heartbeat_s=m.heartbeat_s,
        learner_key=m.learner_key,
    )


def worker_heartbeat_to_proto(x: coordinator_api.WorkerHeartbeat) -> rollout_pb2.WorkerHeartbeat:
    """Translate."""
    return rollout_pb2.WorkerHeartbeat(
        worker_id=x.worker_id,
        held_version=x.held_version,
        weights_digest=x.weights_digest,
        lease_ids=x.lease_ids,
        tokens_generated=x.tokens_generated,
        busy_s=x.busy_s,
        uptime_s=x.uptime_s,
        progress=[lease_progress_to_proto(found) for found in x.progress],
        released_leases=x.released_leases,
        leaving=x.leaving,
    )


def worker_heartbeat_from_proto(m: rollout_pb2.WorkerHeartbeat) -> coordinator_api.WorkerHeartbeat:
    """Translate."""
    return coordinator_api.WorkerHeartbeat(
        worker_id=m.worker_id,
        held_version=_optional(m, "held_version"),
        weights_digest=_optional(m, "weights_digest"),
        lease_ids=tuple(m.lease_ids),
        tokens_generated=m.tokens_generated,
        busy_s=m.busy_s,
        uptime_s=m.uptime_s,
        progress=tuple(lease_progress_from_proto(found) for found in m.progress),
        released_leases=tuple(m.released_leases),
        leaving=m.leaving,
    )


def heartbeat_reply_to_proto(x: coordinator_api.HeartbeatReply) -> rollout_pb2.HeartbeatReply:
    """Translate."""
    return rollout_pb2.HeartbeatReply(
        known=x.known,
        cancelled_leases=x.cancelled_leases,
        newest_version=x.newest_version,
        drain=x.drain,
        run_finished=x.run_finished,
        kept=[rollout_pb2.KeptProgress(lease_id=k.lease_id, tokens=k.tokens) for k in x.kept],
        next_s=x.next_s,
    )


def heartbeat_reply_from_proto(m: rollout_pb2.HeartbeatReply) -> coordinator_api.HeartbeatReply:
    """Translate."""
    if not (math.isfinite(m.next_s) and m.next_s >= 0):
        raise ContractError(f"next_s={m.next_s} is no pause between two heartbeats; update this worker")
    return coordinator_api.HeartbeatReply(
        known=m.known,
        cancelled_leases=tuple(m.cancelled_leases),
        newest_version=_optional(m, "newest_version"),
        drain=m.drain,
        run_finished=m.run_finished,
        kept=tuple(r.KeptProgress(k.lease_id, tuple(k.tokens)) for k in m.kept),
        next_s=m.next_s,
    )


def lease_request_to_proto(x: coordinator_api.LeaseRequest) -> rollout_pb2.LeaseRequest:
    """Translate."""
    return rollout_pb2.LeaseRequest(
        worker_id=x.worker_id,
        held_version=x.held_version,
        groups=x.groups,
        wait_s=x.wait_s,
        wants_history=x.wants_history,
    )


def lease_request_from_proto(m: rollout_pb2.LeaseRequest) -> coordinator_api.LeaseRequest:
    """Translate."""
    return coordinator_api.LeaseRequest(
        worker_id=m.worker_id,
        held_version=_optional(m, "held_version"),
        groups=m.groups,
        wait_s=m.wait_s,
        wants_history=m.wants_history,
    )


def lease_reply_to_proto(x: coordinator_api.LeaseReply) -> rollout_pb2.LeaseReply:
    """Translate."""
    return rollout_pb2.LeaseReply(
        leases=[lease_to_proto(lease) for lease in x.leases],
        reason=x.reason,
        newest_version=x.newest_version,
        wanted_version=x.wanted_version,
        run_finished=x.run_finished,
    )


def lease_reply_from_proto(m: rollout_pb2.LeaseReply) -> coordinator_api.LeaseReply:
    """Translate."""
    return coordinator_api.LeaseReply(
        leases=tuple(lease_from_proto(lease) for lease in m.leases),
        reason=m.reason,
        newest_version=_optional(m, "newest_version"),
        wanted_version=_optional(m, "wanted_version"),
        run_finished=m.run_finished,
    )


def batch_reply_to_proto(x: coordinator_api.BatchReply) -> coordinator_pb2.BatchReply:
    """Translate."""
    return coordinator_pb2.BatchReply(
        batch=None if x.batch is None else batch_ref_to_proto(x.batch),
        waiting_for=x.waiting_for,
        progress=x.progress,
    )


def batch_reply_from_proto(m: coordinator_pb2.BatchReply) -> coordinator_api.BatchReply:
    """Translate."""
    return coordinator_api.BatchReply(
        batch=batch_ref_from_proto(m.batch) if m.HasField("batch") else None,
        waiting_for=m.waiting_for,
        progress=m.progress,
    )


def evaluation_record_to_proto(x: coordinator_api.EvaluationRecord) -> coordinator_pb2.EvaluationRecord:
    """Translate."""
    return coordinator_pb2.EvaluationRecord(
        version=x.version,
        prompts=x.prompts,
        judged=x.judged,
        reward_mean=x.reward_mean,
        completion_tokens_mean=x.completion_tokens_mean,
    )


def evaluation_record_from_proto(m: coordinator_pb2.EvaluationRecord) -> coordinator_api.EvaluationRecord:
    """Translate."""
    return coordinator_api.EvaluationRecord(
        version=m.version,
        prompts=m.prompts,
        judged=m.judged,
        reward_mean=m.reward_mean,
        completion_tokens_mean=m.completion_tokens_mean,
    )


def _worker_state(text: str) -> r.WorkerState:
    try:
        return r.WorkerState(text)
    except ValueError:
        raise ContractError(
            f"worker state {text[:40]!r} is unknown here; use the coordinator's version"
        ) from None


def worker_record_to_proto(x: coordinator_api.WorkerRecord) -> coordinator_pb2.WorkerRecord:
    """Translate."""
    return coordinator_pb2.WorkerRecord(
        worker_id=x.worker_id,
        state=x.state.value,
        held_version=x.held_version,
        open_leases=x.open_leases,
        tokens_generated=x.tokens_generated,
        busy_share=x.busy_share,
        seconds_since_heartbeat=x.seconds_since_heartbeat,
        audited=x.audited,
        strikes=x.strikes,
    )


def worker_record_from_proto(m: coordinator_pb2.WorkerRecord) -> coordinator_api.WorkerRecord:
    """Translate."""
    return coordinator_api.WorkerRecord(
        worker_id=m.worker_id,
        state=_worker_state(m.state),
        held_version=_optional(m, "held_version"),
        open_leases=m.open_leases,
        tokens_generated=m.tokens_generated,
        busy_share=m.busy_share,
        seconds_since_heartbeat=m.seconds_since_heartbeat,
        audited=m.audited,
        strikes=m.strikes,
    )


_STATUS_SCALARS = (
    "run_id",
    "steps_total",
    "committed_steps",
    "opened_steps",
    "sealed_steps",
    "groups_open",
    "groups_leased",
    "groups_to_judge",
    "groups_ready",
    "groups_dropped_stale",
    "groups_filtered",
    "groups_requeued",
    "paused_reason",
    "waiting",
    "finished",
)


def run_status_to_proto(x: coordinator_api.RunStatus) -> coordinator_pb2.RunStatus:
    """Translate."""
    return coordinator_pb2.RunStatus(
        **{name: getattr(x, name) for name in _STATUS_SCALARS},
        newest_version=x.newest_version,
        staleness_histogram=x.staleness_histogram,
        workers=[worker_record_to_proto(w) for w in x.workers],
        evaluations=[evaluation_record_to_proto(e) for e in x.evaluations],
        last_commit=None if x.last_commit is None else step_commit_to_proto(x.last_commit),
        barred=x.barred,
        worker_seconds=x.worker_seconds,
        tokens_by_use=x.tokens_by_use,
    )


def run_status_from_proto(m: coordinator_pb2.RunStatus) -> coordinator_api.RunStatus:
    """Translate."""
    return coordinator_api.RunStatus(
        **{name: getattr(m, name) for name in _STATUS_SCALARS},
        newest_version=_optional(m, "newest_version"),
        staleness_histogram=dict(sorted(m.staleness_histogram.items())),
        workers=tuple(worker_record_from_proto(w) for w in m.workers),
        evaluations=tuple(evaluation_record_from_proto(e) for e in m.evaluations),
        last_commit=step_commit_from_proto(m.last_commit) if m.HasField("last_commit") else None,
        barred=dict(sorted(m.barred.items())),
        worker_seconds=dict(sorted(m.worker_seconds.items())),
        tokens_by_use=dict(sorted(m.tokens_by_use.items())),
    )


def event_to_proto(x: coordinator_api.Event) -> coordinator_pb2.Event:
    """Translate."""
    return coordinator_pb2.Event(seq=x.seq, at=x.at, kind=x.kind, data_json=x.data_json)


def event_from_proto(m: coordinator_pb2.Event) -> coordinator_api.Event:
    """Translate."""
    return coordinator_api.Event(seq=m.seq, at=m.at, kind=m.kind, data_json=m.data_json)


def step_result_to_proto(x: learner_api.StepResult) -> learner_pb2.StepResult:
    """Translate."""
    return learner_pb2.StepResult(commit=step_commit_to_proto(x.commit), idle_s=x.idle_s, train_s=x.train_s)


def step_result_from_proto(m: learner_pb2.StepResult) -> learner_api.StepResult:
    """Translate."""
    return learner_api.StepResult(commit=step_commit_from_proto(m.commit), idle_s=m.idle_s, train_s=m.train_s)


def learner_status_to_proto(x: learner_api.LearnerStatus) -> learner_pb2.LearnerStatus:
    """Translate."""
    return learner_pb2.LearnerStatus(version=x.version, state=x.state, idle_s=x.idle_s, busy_s=x.busy_s)


def learner_status_from_proto(m: learner_pb2.LearnerStatus) -> learner_api.LearnerStatus:
    """Translate."""
    return learner_api.LearnerStatus(version=m.version, state=m.state, idle_s=m.idle_s, busy_s=m.busy_s)


def reward_status_to_proto(x: reward_api.RewardStatus) -> reward_pb2.RewardStatus:
    """Translate."""
    return reward_pb2.RewardStatus(
        groups_judged=x.groups_judged,
        trajectories_judged=x.trajectories_judged,
        judge_s=x.judge_s,
        state=x.state,
    )


def reward_status_from_proto(m: reward_pb2.RewardStatus) -> reward_api.RewardStatus:
    """Translate."""
    return reward_api.RewardStatus(
        groups_judged=m.groups_judged,
        trajectories_judged=m.trajectories_judged,
        judge_s=m.judge_s,
        state=m.state,
    )
