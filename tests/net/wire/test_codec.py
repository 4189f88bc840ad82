"""A record whose message has the same field names is translated by functions made of both."""

from dataclasses import dataclass
from typing import Any

import pytest

from antiphon.core.errors import ContractError
from antiphon.core.records import StepCommit
from antiphon.core.requests import HeartbeatReply, StageReply
from antiphon.core.status import EvaluationRecord, RunStatus, WorkerRecord, WorkerState
from antiphon.core.trust.audit import SampleStatistics
from antiphon.net.rpc.codec import codec
from antiphon.protos import coordinator_pb2, records_pb2, rollout_pb2
from tests.support.messages import read, written

COMMIT = StepCommit(3, 4, "a" * 64, "b" * 64, {"b": 1.0, "a": 0.5}, True)


def again(record: Any, message: type[Any]) -> Any:
    """Return what is read of the message that a record was written as."""
    return read(written(record, message))


def test_tuples_maps_nested_and_absent_fields_come_back_as_they_were() -> None:
    worker = WorkerRecord("w-1", WorkerState.ACTIVE, None, 2, 10, 0.5, 1.0)
    run = RunStatus(
        "run-1", 9, 4, 5, 4, 0, 1, 2, 3, 4, 5, 6, 7,
        staleness_histogram={2: 1, 0: 5},
        workers=(worker,),
        evaluations=(EvaluationRecord(0, 4, 4, 0.5, 8.0),),
        last_commit=COMMIT,
    )  # fmt: skip
    found = again(run, coordinator_pb2.RunStatus)
    assert found == run
    assert list(found.staleness_histogram) == [0, 2]  # in the order of the keys, whatever a message says
    assert found.newest_version == 0 and found.workers[0].held_version is None
    nothing = StageReply(False, "w-1", 0.0)
    assert again(nothing, coordinator_pb2.StageReply) == nothing
    assert again(COMMIT, records_pb2.StepCommit) == COMMIT


def test_a_status_says_its_range_of_rewards_and_an_older_one_the_usual() -> None:
    wide = EvaluationRecord(0, 4, 4, -0.5, 8.0, reward_range=(-1.0, 1.0))
    assert again(wide, coordinator_pb2.EvaluationRecord) == wide
    assert read(coordinator_pb2.EvaluationRecord(version=3)).reward_range == (0.0, 1.0)
    assert read(coordinator_pb2.RunStatus(run_id="r")).reward_range == (0.0, 1.0)


def test_a_message_that_is_invalid_is_refused() -> None:
    good = SampleStatistics(0, 5, 1, 0, 0.1)
    assert again(good, records_pb2.SampleStatistics) == good
    with pytest.raises(ContractError, match="sample 2 are invalid: 6 missed"):
        read(records_pb2.SampleStatistics(sample_index=2, tokens=5, missed=6))
    with pytest.raises(ContractError, match="no pause between two heartbeats"):
        again(HeartbeatReply(True, (), None, False, next_s=float("inf")), rollout_pb2.HeartbeatReply)


def test_a_field_that_the_message_lacks_is_found_at_once() -> None:
    @dataclass(frozen=True)
    class Other:
        version: int
        prompt: int

    with pytest.raises(AssertionError, match="EvaluationRecord has other fields"):
        codec(Other, coordinator_pb2.EvaluationRecord)
