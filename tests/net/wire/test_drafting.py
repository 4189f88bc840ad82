"""Drafting's part of the wire reads what it wrote."""

import math
from dataclasses import replace

import pytest

from antiphon.core.checks import submission_digest
from antiphon.core.records import BatchRef, DraftingStatistics, GroupSubmission
from antiphon.core.requests import LeaseRequest
from antiphon.core.seeds import derive_seed, request_seeds
from antiphon.net import wire
from antiphon.protos import records_pb2, rollout_pb2
from tests.support.messages import read, written

STATISTICS = DraftingStatistics(100, 40, 90, 70, 60, 2, 0.25, 0.5, 1.75)
SUBMISSION = GroupSubmission("l", "g", "w", (), 0.5)
REF = BatchRef(0, "d", "t", 2, 1, 0, 0, 9, 0.5, {0: 2}, 4.5)


@pytest.mark.parametrize("statistics", [None, STATISTICS])
def test_statistics_travel_with_submissions_and_batches(statistics: DraftingStatistics | None) -> None:
    submission = replace(SUBMISSION, drafting=statistics)
    message = records_pb2.GroupSubmission.FromString(
        wire.group_submission_to_proto(submission).SerializeToString()
    )
    assert wire.group_submission_from_proto(message).drafting == statistics
    assert submission_digest(submission) == submission_digest(SUBMISSION)
    ref = replace(REF, drafting=statistics)
    assert read(written(ref, records_pb2.BatchRef)) == ref


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"drafter_s": math.nan}, {"gain": math.inf}])
def test_impossible_statistics_are_none(wrong: dict[str, float]) -> None:
    submission = replace(SUBMISSION, drafting=replace(STATISTICS, **wrong))
    assert wire.group_submission_from_proto(wire.group_submission_to_proto(submission)).drafting is None


@pytest.mark.parametrize("wanted", [False, True])
def test_a_lease_request_says_whether_history_is_wanted(wanted: bool) -> None:
    request = LeaseRequest("w", None, 3, 1.5, wanted)
    assert read(written(request, rollout_pb2.LeaseRequest)) == request


def test_the_seeds_of_a_group_are_those_of_its_samples_one_by_one() -> None:
    assert request_seeds(7, "p", 3, 8) == tuple(derive_seed("request", 7, "p", 3, i) for i in range(8))
