"""Wire status: what a run, its parties and its journal say of themselves.

Reading what was written gives an equal record; messages that cannot be meant raise ContractError.
"""

from antiphon.core import records as r
from antiphon.core import status as core_status
from antiphon.core.errors import ContractError
from antiphon.protos import coordinator_pb2, learner_pb2
from antiphon.services.learner import api as learner_api
from antiphon.services.wire.arrays import optional
from antiphon.services.wire.steps import step_commit_from_proto, step_commit_to_proto


def evaluation_record_to_proto(x: core_status.EvaluationRecord) -> coordinator_pb2.EvaluationRecord:
    """Translate."""
    return coordinator_pb2.EvaluationRecord(
        version=x.version,
        prompts=x.prompts,
        rewarded=x.rewarded,
        reward_mean=x.reward_mean,
        completion_tokens_mean=x.completion_tokens_mean,
    )


def evaluation_record_from_proto(m: coordinator_pb2.EvaluationRecord) -> core_status.EvaluationRecord:
    """Translate."""
    return core_status.EvaluationRecord(
        version=m.version,
        prompts=m.prompts,
        rewarded=m.rewarded,
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


def worker_record_to_proto(x: core_status.WorkerRecord) -> coordinator_pb2.WorkerRecord:
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


def worker_record_from_proto(m: coordinator_pb2.WorkerRecord) -> core_status.WorkerRecord:
    """Translate."""
    return core_status.WorkerRecord(
        worker_id=m.worker_id,
        state=_worker_state(m.state),
        held_version=optional(m, "held_version"),
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
    "groups_to_reward",
    "groups_ready",
    "groups_dropped_stale",
    "groups_filtered",
    "groups_requeued",
    "paused_reason",
    "waiting",
    "finished",
)


def run_status_to_proto(x: core_status.RunStatus) -> coordinator_pb2.RunStatus:
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


def run_status_from_proto(m: coordinator_pb2.RunStatus) -> core_status.RunStatus:
    """Translate."""
    return core_status.RunStatus(
        **{name: getattr(m, name) for name in _STATUS_SCALARS},
        newest_version=optional(m, "newest_version"),
        staleness_histogram=dict(sorted(m.staleness_histogram.items())),
        workers=tuple(worker_record_from_proto(w) for w in m.workers),
        evaluations=tuple(evaluation_record_from_proto(e) for e in m.evaluations),
        last_commit=step_commit_from_proto(m.last_commit) if m.HasField("last_commit") else None,
        barred=dict(sorted(m.barred.items())),
        worker_seconds=dict(sorted(m.worker_seconds.items())),
        tokens_by_use=dict(sorted(m.tokens_by_use.items())),
    )


def event_to_proto(x: core_status.Event) -> coordinator_pb2.Event:
    """Translate."""
    return coordinator_pb2.Event(seq=x.seq, at=x.at, kind=x.kind, data_json=x.data_json)


def event_from_proto(m: coordinator_pb2.Event) -> core_status.Event:
    """Translate."""
    return core_status.Event(seq=m.seq, at=m.at, kind=m.kind, data_json=m.data_json)


def learner_status_to_proto(x: learner_api.LearnerStatus) -> learner_pb2.LearnerStatus:
    """Translate."""
    return learner_pb2.LearnerStatus(version=x.version, state=x.state, idle_s=x.idle_s, busy_s=x.busy_s)


def learner_status_from_proto(m: learner_pb2.LearnerStatus) -> learner_api.LearnerStatus:
    """Translate."""
    return learner_api.LearnerStatus(version=m.version, state=m.state, idle_s=m.idle_s, busy_s=m.busy_s)
