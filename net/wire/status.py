"""Wire status: what a run, its services and its journal say of themselves."""

from operator import attrgetter

from antiphon.api import coordinator as coordinator_api
from antiphon.api import learner as learner_api
from antiphon.core import status as core_status
from antiphon.core.errors import ContractError
from antiphon.net.rpc.codec import codec
from antiphon.net.wire import steps, work  # noqa: F401 - say how batches, commits and deliveries travel
from antiphon.protos import coordinator_pb2, learner_pb2


def _worker_state(text: str) -> core_status.WorkerState:
    try:
        return core_status.WorkerState(text)
    except ValueError:
        raise ContractError(
            f"worker state {text[:40]!r} is unknown here; use the coordinator's version"
        ) from None


codec(core_status.EvaluationRecord, coordinator_pb2.EvaluationRecord)
codec(core_status.CapacityRecord, coordinator_pb2.CapacityRecord)
codec(core_status.WorkerRecord, coordinator_pb2.WorkerRecord, state=(attrgetter("value"), _worker_state))
stage_reply_to_proto, stage_reply_from_proto = codec(coordinator_api.StageReply, coordinator_pb2.StageReply)
run_status_to_proto, run_status_from_proto = codec(core_status.RunStatus, coordinator_pb2.RunStatus)
codec(coordinator_api.CommitsReply, coordinator_pb2.CommitsReply)
event_to_proto, event_from_proto = codec(core_status.Event, coordinator_pb2.Event)
codec(core_status.LearnerProgress, learner_pb2.LearnerProgress)
codec(learner_api.StepReply, learner_pb2.StepReply)
codec(learner_api.SnapshotReply, learner_pb2.SnapshotReply)
codec(learner_api.LearnerStatus, learner_pb2.LearnerStatus)
