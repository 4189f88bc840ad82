"""Wire: records as protobuf messages and back, and which calls of the .proto files stand for which methods.

Most records have a message of the same fields, which `rpc.codec` translates. Reading what was
written gives an equal record; arrays travel as little-endian bytes. Messages that are invalid raise
ContractError before anything is done. What concerns drafting alone never refuses a message: it can change no
token and no batch, so a history that cannot be read is no history, impossible statistics are no statistics,
and a log line says so.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate, islice, repeat
from typing import Any

import numpy as np
import structlog

from antiphon.api import coordinator as api
from antiphon.api import learner as learner_api
from antiphon.api import scorer as scorer_api
from antiphon.api.manifest import decode_manifest, encode_manifest
from antiphon.core import client_records
from antiphon.core import records as r
from antiphon.core import requests as core_requests
from antiphon.core import status as core_status
from antiphon.core.client_records import Scores
from antiphon.core.dissemination.plan import Assignment, TransferPlan
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkReport
from antiphon.core.drafting.history_codec import EncodedHistory, decode_history, encode_history
from antiphon.core.errors import ContractError
from antiphon.core.loop.partials import KeptGroup, KeptSample
from antiphon.core.message_sizes import MOST_SPANS
from antiphon.core.messages import UNIT_RANGE
from antiphon.core.run_clock import RunTimes
from antiphon.core.trust.audit import AuthoredSpan, SampleStatistics
from antiphon.core.voided_batch import VoidedBatch
from antiphon.net.rpc.calls import Call, unary_calls
from antiphon.net.rpc.codec import array_from_bytes, by_hand, codec, reader_of
from antiphon.protos import coordinator_pb2, learner_pb2, records_pb2, reward_pb2, rollout_pb2, scorer_pb2

INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_NO_TOKENS = np.empty(0, dtype=np.int32)
_NO_LOGPROBS = np.empty(0, dtype=np.float32)
_finish_reason = reader_of(r.FinishReason, "finish_reason")


# The trajectories of a group in one message, column by column: row by row, each completion costs the
# coordinator several small arrays; in columns a group costs two, and its completions are views.


def completions_to_proto(trajectories: Sequence[r.Trajectory]) -> records_pb2.Completions:
    """Return the completions of a group as columns."""
    spans = [span for trajectory in trajectories for span in trajectory.spans]
    observed = [one for trajectory in trajectories for one in trajectory.observed]
    tokens = np.concatenate([_NO_TOKENS, *(t.token_ids for t in trajectories)])
    logprobs = np.concatenate([_NO_LOGPROBS, *(t.logprobs for t in trajectories)])
    return records_pb2.Completions(
        sample_indices=[t.sample_index for t in trajectories],
        seeds=[t.seed for t in trajectories],
        lengths=[t.token_ids.size for t in trajectories],
        token_ids=np.asarray(tokens, INT32).tobytes(),
        behaviour_logprobs=np.asarray(logprobs, FLOAT32).tobytes(),
        span_counts=[len(t.spans) for t in trajectories],
        span_versions=[span.version for span in spans],
        span_starts=[span.start for span in spans],
        span_stops=[span.stop for span in spans],
        finish_reasons=[t.finish_reason for t in trajectories],
        span_kept_caches=[s.kept_cache for s in spans] if any(s.kept_cache for s in spans) else (),
        observed_counts=[len(t.observed) for t in trajectories] if observed else (),
        observed_starts=[start for start, _ in observed],
        observed_stops=[stop for _, stop in observed],
        break_counts=[len(t.breaks) for t in trajectories] if any(t.breaks for t in trajectories) else (),
        breaks=[place for t in trajectories for place in t.breaks],
    )


def completions_from_proto(m: records_pb2.Completions) -> tuple[r.Trajectory, ...]:
    """Return the completions of a group; their tokens and log-probabilities share its memory.

    Raises:
        ContractError: when the columns do not fit each other.
    """
    token_bytes, logprob_bytes = m.token_ids, m.behaviour_logprobs
    # A slice is a list at less than half of what `list` takes, which asks for each number.
    lengths, indices, seeds, counts = m.lengths[:], m.sample_indices[:], m.seeds[:], m.span_counts[:]
    reasons = m.finish_reasons[:]
    columns: list[list[Any]] = [lengths, indices, seeds, counts, reasons]
    if len({len(column) for column in columns}) > 1:
        raise ContractError(
            f"a group came with {len(lengths)} lengths, {len(indices)} sample indices, {len(seeds)} seeds, "
            f"{len(counts)} span counts and {len(reasons)} finish reasons; one each is needed for every "
            "completion"
        )
    if min(lengths, default=0) < 0 or {len(token_bytes), len(logprob_bytes)} - {4 * sum(lengths)}:
        raise ContractError(
            f"completions of {sum(lengths)} tokens came with {len(token_bytes)} bytes of tokens and "
            f"{len(logprob_bytes)} of behaviour logprobs; four each are needed for every token"
        )
    tokens = np.frombuffer(token_bytes, INT32).astype(np.int32)
    logprobs = np.frombuffer(logprob_bytes, FLOAT32).astype(np.float32)
    if max(counts, default=0) > MOST_SPANS:
        raise ContractError(
            f"a completion came with {max(counts)} version spans; at most {MOST_SPANS} can be within a bound"
        )
    total, kept = sum(counts), m.span_kept_caches[:]
    versions, starts, stops = m.span_versions[:], m.span_starts[:], m.span_stops[:]
    if min(counts, default=0) < 0 or {len(versions), len(starts), len(stops)} - {total}:
        raise ContractError(f"completions with {total} version spans came with other columns of them")
    if kept and len(kept) != total:
        raise ContractError(f"{len(kept)} marks of a kept cache came for {total} version spans")
    spans = map(r.VersionSpan, versions, starts, stops, kept or repeat(False))
    ends, shown = list(accumulate(lengths)), m.observed_counts[:] or [0] * len(lengths)
    ranges = m.observed_starts[:], m.observed_stops[:]
    if (
        len(shown) != len(lengths)
        or min(shown, default=0) < 0
        or {*map(len, ranges)} != {sum(shown)}
        or max(shown, default=0) > MOST_SPANS
    ):
        raise ContractError(
            f"{sum(shown)} observed ranges of {len(lengths)} completions came with {len(ranges[0])} starts "
            f"and {len(ranges[1])} stops; at most {MOST_SPANS} are possible in one"
        )
    observed = zip(*ranges, strict=True)
    breaks, marks = iter(m.breaks), m.break_counts[:] or [0] * len(lengths)
    possible = all(0 <= count <= MOST_SPANS for count in marks)
    if not possible or len(marks) != len(lengths) or len(m.breaks) != sum(marks):
        raise ContractError(f"{len(m.breaks)} breaks came for {len(lengths)} completions with {sum(marks)}")
    return tuple(
        [
            r.Trajectory(
                tokens[end - length : end],
                logprobs[end - length : end],
                tuple(islice(spans, count)),
                _finish_reason(reason),
                sample_index=index,
                seed=seed,
                observed=tuple(islice(observed, shows)) if shows else (),
                breaks=tuple(islice(breaks, places)) if places else (),
            )
            for index, seed, length, end, count, reason, shows, places in zip(
                indices, seeds, lengths, ends, counts, reasons, shown, marks, strict=True
            )
        ]
    )


# Drafting.

_log = structlog.get_logger(__name__)


_encoded_to_proto, _encoded_from_proto = codec(EncodedHistory, records_pb2.PromptHistory)
drafting_statistics_to_proto, _statistics_from_proto = codec(
    r.DraftingStatistics, records_pb2.DraftingStatistics
)
_NUMBERS = tuple(field.name for field in dataclasses.fields(r.DraftingStatistics))


def prompt_history_to_proto(x: r.PromptHistory) -> records_pb2.PromptHistory:
    """Return the message, tokens compressed; its sender has cut it to its limit before."""
    return _encoded_to_proto(encode_history(x))


def prompt_history_from_proto(m: records_pb2.PromptHistory) -> r.PromptHistory | None:
    """Return the record; None, and a line in the log, when it cannot be read."""
    try:
        return decode_history(_encoded_from_proto(m))
    except ContractError as error:
        _log.warning("history.unreadable", prompt=m.prompt_key[:80], reason=str(error))
        return None


def drafting_statistics_from_proto(m: records_pb2.DraftingStatistics) -> r.DraftingStatistics | None:
    """Return the record; None, and a line in the log, when a number is negative or not finite."""
    found = _statistics_from_proto(m)
    for name in _NUMBERS:
        value = getattr(found, name)
        if not (math.isfinite(value) and value >= 0):
            _log.warning("drafting.unreadable", field=name, value=value)
            return None
    return found


by_hand(records_pb2.PromptHistory, prompt_history_to_proto, prompt_history_from_proto)
by_hand(records_pb2.DraftingStatistics, drafting_statistics_to_proto, drafting_statistics_from_proto)


# Unfinished completions in heartbeats, leases and the journal.


_span_to_proto, _span_from_proto = codec(r.VersionSpan, records_pb2.VersionSpan)


def partial_trajectory_to_proto(x: r.PartialTrajectory) -> records_pb2.PartialTrajectory:
    """Return the message."""
    return records_pb2.PartialTrajectory(
        sample_index=x.sample_index,
        start=x.start,
        token_ids=np.asarray(x.token_ids, INT32).tobytes(),
        behaviour_logprobs=np.asarray(x.logprobs, FLOAT32).tobytes(),
        spans=[_span_to_proto(span) for span in x.spans],
        finish_reason="" if x.finish_reason is None else x.finish_reason.value,
        observed=[place for one in x.observed for place in one],
        breaks=x.breaks,
    )


def partial_trajectory_from_proto(m: records_pb2.PartialTrajectory) -> r.PartialTrajectory:
    """Return the record.

    Raises:
        ContractError: when its spans do not begin where it says that it begins, or are too many.
    """
    most = max(len(m.spans), len(m.observed) / 2, len(m.breaks))
    if most > MOST_SPANS or len(m.observed) % 2:
        raise ContractError(
            f"progress of sample {m.sample_index} came with {len(m.spans)} version spans, {len(m.observed)} "
            f"bounds of observed ranges and {len(m.breaks)} breaks; at most {MOST_SPANS} of each are possible"
        )
    bounds = iter(m.observed)
    found = r.PartialTrajectory(
        array_from_bytes(m.token_ids, INT32),
        array_from_bytes(m.behaviour_logprobs, FLOAT32),
        tuple(_span_from_proto(span) for span in m.spans),
        _finish_reason(m.finish_reason) if m.finish_reason else None,
        sample_index=m.sample_index,
        observed=tuple(zip(bounds, bounds, strict=True)),
        breaks=tuple(m.breaks),
    )
    if m.start != found.start:
        raise ContractError(
            f"progress of sample {m.sample_index}: start={m.start}, "
            f"but its version spans begin at {found.start}"
        )
    return found


def _author_to_proto(author: tuple[str, int]) -> records_pb2.Authorship:
    return records_pb2.Authorship(worker_id=author[0], stop=author[1])


def _author_from_proto(m: records_pb2.Authorship) -> tuple[str, int]:
    return m.worker_id, m.stop


by_hand(records_pb2.PartialTrajectory, partial_trajectory_to_proto, partial_trajectory_from_proto)
codec(r.LeaseProgress, rollout_pb2.LeaseProgress)
codec(KeptSample, records_pb2.KeptSample, authors=(_author_to_proto, _author_from_proto))
kept_group_to_proto, kept_group_from_proto = codec(KeptGroup, records_pb2.KeptGroup)


# What a worker and the coordinator send each other.


group_submission_to_proto, group_submission_from_proto = codec(
    r.GroupSubmission,
    records_pb2.GroupSubmission,
    trajectories=(completions_to_proto, completions_from_proto),
    encoded=None,
)


def _arrived(m: records_pb2.GroupSubmission) -> tuple[r.GroupSubmission]:
    """Return a submission that also holds its message, without fields that are unknown here."""
    m.DiscardUnknownFields()  # what no one checks is not stored either
    return (group_submission_from_proto(m, encoded=m.SerializeToString()),)


def _check_pause(m: Any) -> None:
    if not (math.isfinite(m.next_s) and m.next_s >= 0):
        raise ContractError(f"next_s={m.next_s} is no pause between two heartbeats; update this worker")


def _check_assignment(m: Any) -> None:
    if not (math.isfinite(m.assignment.bytes_per_s) and m.assignment.bytes_per_s > 0):
        raise ContractError(f"bytes_per_s={m.assignment.bytes_per_s} is no planned rate; update this worker")


codec(r.SamplingParameters, records_pb2.SamplingParameters)
codec(r.KeptProgress, rollout_pb2.KeptProgress)
codec(r.TurnLimits, records_pb2.TurnLimits)
codec(r.Lease, records_pb2.Lease)
codec(api.KitPart, coordinator_pb2.KitPart)
codec(core_requests.WorkerHello, rollout_pb2.WorkerHello)
codec(Assignment, coordinator_pb2.Assignment)
codec(TransferPlan, coordinator_pb2.TransferPlan, _check_assignment)
codec(DeliveryRecord, rollout_pb2.DeliveryRecord)
codec(NetworkReport, rollout_pb2.NetworkReport)
codec(core_requests.WorkerWelcome, rollout_pb2.WorkerWelcome)
codec(core_requests.WorkerHeartbeat, rollout_pb2.WorkerHeartbeat)
codec(core_requests.HeartbeatReply, rollout_pb2.HeartbeatReply, _check_pause)
codec(core_requests.LeaseRequest, rollout_pb2.LeaseRequest)
codec(core_requests.TurnRequest, rollout_pb2.TurnRequest)
codec(core_requests.TurnReply, rollout_pb2.TurnReply)
codec(core_requests.LeaseReply, rollout_pb2.LeaseReply)


# Sealed batches, commits and snapshots.

codec(VoidedBatch, records_pb2.VoidedBatch)
codec(r.BatchRef, records_pb2.BatchRef)


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
codec(r.StepCommit, records_pb2.StepCommit)
codec(learner_api.StepResult, learner_pb2.StepResult)


# Groups that go to a reward service or an auditor, and what these find.


def _check_statistics(m: records_pb2.SampleStatistics) -> None:
    counts = {name: getattr(m, name) for name in ("missed", "impossible", "near", "gross")}
    if not all(0 <= count <= m.tokens for count in counts.values()) or m.drift < 0:
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ContractError(
            f"the statistics of sample {m.sample_index} are invalid: {said} of {m.tokens} tokens, "
            f"drift {m.drift}"
        )


def _check_keys(m: reward_pb2.PullReply) -> None:
    if len(m.groups) != len(m.prompt_keys):
        raise ContractError(f"{len(m.groups)} groups to reward came with {len(m.prompt_keys)} prompt keys")
    if len(m.prompts) not in (0, len(m.groups)):
        raise ContractError(f"{len(m.groups)} groups to reward came with {len(m.prompts)} prompts")


def _range_to_proto(observed: tuple[int, int]) -> records_pb2.TokenRange:
    return records_pb2.TokenRange(start=observed[0], stop=observed[1])


def _range_from_proto(m: records_pb2.TokenRange) -> tuple[int, int]:
    return m.start, m.stop


codec(r.TurnToAnswer, records_pb2.TurnToAnswer, observed=(_range_to_proto, _range_from_proto))
codec(r.TurnAnswer, records_pb2.TurnAnswer)
codec(r.SampleReward, records_pb2.SampleReward)
group_rewards_to_proto, group_rewards_from_proto = codec(r.GroupRewards, records_pb2.GroupRewards)
codec(core_requests.PullReply, reward_pb2.PullReply, _check_keys)
codec(AuthoredSpan, records_pb2.AuthoredSpan)
codec(r.GroupToAudit, records_pb2.GroupToAudit)
codec(SampleStatistics, records_pb2.SampleStatistics, _check_statistics)


# What a run, its services and its journal say of themselves.


def _check_range(m: Any) -> None:
    if not m.reward_range:  # an older coordinator says none
        m.reward_range.extend(UNIT_RANGE)


codec(core_status.EvaluationRecord, coordinator_pb2.EvaluationRecord, _check_range)
codec(core_status.CapacityRecord, coordinator_pb2.CapacityRecord)
codec(core_status.WorkerRecord, coordinator_pb2.WorkerRecord)
codec(core_status.WorkerOrder, coordinator_pb2.WorkerOrder)
codec(core_requests.StageReply, coordinator_pb2.StageReply)
codec(core_status.RunStatus, coordinator_pb2.RunStatus, _check_range)
codec(core_requests.CommitsReply, coordinator_pb2.CommitsReply)
codec(client_records.SampleRequest, coordinator_pb2.SampleRequest)
codec(
    client_records.SampledReply,
    coordinator_pb2.SampledReply,
    trajectories=(completions_to_proto, completions_from_proto),
)
event_to_proto, event_from_proto = codec(core_status.Event, coordinator_pb2.Event)
codec(core_status.LearnerProgress, learner_pb2.LearnerProgress)
codec(learner_api.StepReply, learner_pb2.StepReply)
codec(learner_api.SnapshotReply, learner_pb2.SnapshotReply)
codec(learner_api.LearnerStatus, learner_pb2.LearnerStatus)
codec(learner_api.CallReply, learner_pb2.CallReply)
codec(learner_api.SavedReply, learner_pb2.SavedReply)


def _scores_to_proto(x: Scores) -> learner_pb2.Scores:
    return learner_pb2.Scores(
        logprobs=np.asarray(x.logprobs, FLOAT32).tobytes(),
        top_ids=np.asarray(x.top_ids, INT32).tobytes(),
        top_logprobs=np.asarray(x.top_logprobs, FLOAT32).tobytes(),
    )


def _scores_from_proto(m: learner_pb2.Scores) -> Scores:
    logprobs = array_from_bytes(m.logprobs, FLOAT32)
    ids, values = array_from_bytes(m.top_ids, INT32), array_from_bytes(m.top_logprobs, FLOAT32)
    if ids.size != values.size or not logprobs.size or ids.size % logprobs.size:
        raise ContractError(
            f"scores of {logprobs.size} tokens came with {ids.size} most probable tokens and {values.size} "
            "log-probabilities of them; as many of each token are needed"
        )
    shape = (logprobs.size, ids.size // logprobs.size)
    return Scores(logprobs, ids.reshape(shape), values.reshape(shape))


by_hand(learner_pb2.Scores, _scores_to_proto, _scores_from_proto)


_REPLIES = "coordinator.reply.before"
COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
CALLS = unary_calls(COORDINATOR, api.Coordinator, {"commit_step": _REPLIES})
"""The unary calls of the coordinator and the methods they stand for, by name."""
_REQUESTS, _ANSWERS = (m.DESCRIPTOR.fields_by_name for m in (rollout_pb2.WorkRequest, rollout_pb2.WorkReply))
WORK_CALLS = {
    name: Call(name, _REQUESTS[name].message_type, _ANSWERS[name].message_type, method, failpoint)
    for name, method, failpoint in (
        ("heartbeat", api.Coordinator.heartbeat, ""),
        ("lease", api.Coordinator.lease_group, _REPLIES),
        ("turn", api.Coordinator.answer_turn, _REPLIES),
        ("submission", api.Coordinator.submit_group, _REPLIES),
    )
}
"""What the requests of a worker's stream stand for, by the name of their body."""
WORK_CALLS["submission"].read_request = _arrived
LEARNER = learner_pb2.DESCRIPTOR.services_by_name["Learner"]
LEARNER_CALLS = unary_calls(LEARNER, learner_api.Learner, {})
"""The learner's unary calls."""
SCORER = scorer_pb2.DESCRIPTOR.services_by_name["Scorer"]
SCORER_CALLS = unary_calls(SCORER, scorer_api.Scorer, {})
"""The scorer's calls."""
