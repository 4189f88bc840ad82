"""Wire work: what a worker and the coordinator tell each other, as records and as messages.

Every pair is `<record>_to_proto` and `<record>_from_proto`; reading what was written gives an
equal record. Messages that cannot be meant raise ContractError before anything is done; what
concerns drafting alone is translated in `wire_drafting`, which never refuses a message.
"""

import math

from antiphon.core import records as r
from antiphon.core.errors import ContractError
from antiphon.protos import records_pb2, rollout_pb2
from antiphon.services.coordinator import api as coordinator_api
from antiphon.services.wire.arrays import optional
from antiphon.services.wire.completions import completions_from_proto, completions_to_proto
from antiphon.services.wire.drafting import (
    drafting_statistics_from_proto,
    drafting_statistics_to_proto,
    prompt_history_from_proto,
    prompt_history_to_proto,
)
from antiphon.services.wire.progress import (
    lease_progress_from_proto,
    lease_progress_to_proto,
    partial_trajectory_from_proto,
    partial_trajectory_to_proto,
)


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
        version=optional(m, "version"),
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
        drafting=None if x.drafting is None else drafting_statistics_to_proto(x.drafting),
    )


def group_submission_from_proto(
    m: records_pb2.GroupSubmission, keep_encoded: bool = False
) -> r.GroupSubmission:
    """Translate; with `keep_encoded`, the message stays at hand, without fields that are unknown here."""
    if m.trajectories:
        raise ContractError(f"group {m.group_id[:40]} came with rows; hand its completions in as columns")
    encoded = None
    if keep_encoded:
        m.DiscardUnknownFields()  # nobody stores here what nobody checks
        encoded = bytes(m.SerializeToString())
    return r.GroupSubmission(
        lease_id=m.lease_id,
        group_id=m.group_id,
        worker_id=m.worker_id,
        trajectories=completions_from_proto(m.completions),
        generation_s=m.generation_s,
        drafting=drafting_statistics_from_proto(m.drafting) if m.HasField("drafting") else None,
        encoded=encoded,
    )


def submit_verdict_to_proto(x: r.SubmitVerdict) -> rollout_pb2.SubmitReply:
    """Translate."""
    return rollout_pb2.SubmitReply(verdict=x.value)


def submit_verdict_from_proto(m: rollout_pb2.SubmitReply) -> r.SubmitVerdict:
    """Translate."""
    try:
        return r.SubmitVerdict(m.verdict)
    except ValueError:
        raise ContractError(f"verdict={m.verdict!r} is unknown to this worker; update it") from None


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
        held_version=optional(m, "held_version"),
        weights_digest=optional(m, "weights_digest"),
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
        newest_version=optional(m, "newest_version"),
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
        held_version=optional(m, "held_version"),
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
        newest_version=optional(m, "newest_version"),
        wanted_version=optional(m, "wanted_version"),
        run_finished=m.run_finished,
    )
