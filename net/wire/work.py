"""Wire work: what a worker and the coordinator send each other, as records and as messages.

Messages that are invalid raise ContractError before anything is done; what concerns drafting alone is
translated in `wire.drafting`, which never refuses a message.
"""

import math
from typing import Any

from antiphon.api import coordinator as api
from antiphon.core import records as r
from antiphon.core.dissemination.plan import Assignment, TransferPlan
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkReport
from antiphon.core.errors import ContractError
from antiphon.net.rpc.codec import by_hand, codec
from antiphon.net.wire.completions import completions_from_proto, completions_to_proto
from antiphon.net.wire.drafting import (
    drafting_statistics_from_proto,
    drafting_statistics_to_proto,
    prompt_history_to_proto,
)
from antiphon.net.wire.progress import partial_trajectory_to_proto
from antiphon.protos import coordinator_pb2, records_pb2, rollout_pb2


def group_submission_to_proto(x: r.GroupSubmission) -> records_pb2.GroupSubmission:
    """Return the message; `encoded` is no field of it."""
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
    """Return the record; with `keep_encoded`, it holds the message without fields that are unknown here."""
    encoded = None
    if keep_encoded:
        m.DiscardUnknownFields()  # what no one checks is not stored either
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


def lease_to_proto(x: r.Lease) -> records_pb2.Lease:
    """Return the message; by hand, since the table takes half as long again and every group is leased."""
    s = x.sampling
    return records_pb2.Lease(
        lease_id=x.lease_id,
        group_id=x.group_id,
        prompt=records_pb2.Prompt(key=x.prompt.key, token_ids=x.prompt.token_ids),
        epoch=x.epoch,
        seeds=x.seeds,
        sampling=records_pb2.SamplingParameters(
            temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, max_tokens=s.max_tokens
        ),
        version=x.version,
        duration_s=x.duration_s,
        attempt=x.attempt,
        history=None if x.history is None else prompt_history_to_proto(x.history),
        prefix=[partial_trajectory_to_proto(piece) for piece in x.prefix],
    )


def submit_verdict_to_proto(x: r.SubmitVerdict) -> rollout_pb2.SubmitReply:
    """Return the message."""
    return rollout_pb2.SubmitReply(verdict=x.value)


def submit_verdict_from_proto(m: rollout_pb2.SubmitReply) -> r.SubmitVerdict:
    """Return the verdict.

    Raises:
        ContractError: for one that only a newer coordinator knows.
    """
    try:
        return r.SubmitVerdict(m.verdict)
    except ValueError:
        raise ContractError(f"verdict={m.verdict!r} is unknown to this worker; update it") from None


def _check_pause(m: Any) -> None:
    if not (math.isfinite(m.next_s) and m.next_s >= 0):
        raise ContractError(f"next_s={m.next_s} is no pause between two heartbeats; update this worker")


def _check_assignment(m: Any) -> None:
    if not (math.isfinite(m.assignment.bytes_per_s) and m.assignment.bytes_per_s > 0):
        raise ContractError(f"bytes_per_s={m.assignment.bytes_per_s} is no planned rate; update this worker")


by_hand(records_pb2.GroupSubmission, group_submission_to_proto, group_submission_from_proto)
codec(r.SamplingParameters, records_pb2.SamplingParameters)
codec(r.Prompt, records_pb2.Prompt)
codec(r.KeptProgress, rollout_pb2.KeptProgress)
_, lease_from_proto = codec(r.Lease, records_pb2.Lease)
by_hand(records_pb2.Lease, lease_to_proto, lease_from_proto)
codec(api.KitPart, coordinator_pb2.KitPart)
codec(api.WorkerHello, rollout_pb2.WorkerHello)
codec(Assignment, coordinator_pb2.Assignment)
transfer_plan_to_proto, transfer_plan_from_proto = codec(
    TransferPlan, coordinator_pb2.TransferPlan, _check_assignment
)
codec(DeliveryRecord, rollout_pb2.DeliveryRecord)
codec(NetworkReport, rollout_pb2.NetworkReport)
codec(api.WorkerWelcome, rollout_pb2.WorkerWelcome)
worker_heartbeat_to_proto, worker_heartbeat_from_proto = codec(
    api.WorkerHeartbeat, rollout_pb2.WorkerHeartbeat
)
heartbeat_reply_to_proto, heartbeat_reply_from_proto = codec(
    api.HeartbeatReply, rollout_pb2.HeartbeatReply, _check_pause
)
lease_request_to_proto, lease_request_from_proto = codec(api.LeaseRequest, rollout_pb2.LeaseRequest)
lease_reply_to_proto, lease_reply_from_proto = codec(api.LeaseReply, rollout_pb2.LeaseReply)
