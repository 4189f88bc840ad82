"""Drafting's part of the wire reads what it wrote, and shared seeds shift nobody else's."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import build_config
from antiphon.core.loop.admission import group_seeds
from antiphon.core.loop.checks import submission_digest
from antiphon.core.loop.group_state import GroupState
from antiphon.core.records import BatchRef, DraftingStatistics, GroupSubmission
from antiphon.core.seeds import derive_seed, request_seeds
from antiphon.protos import records_pb2
from antiphon.services.coordinator.api import LeaseRequest
from antiphon.services.coordinator.run_state_machine import pinned_values
from antiphon.services.wire import steps as wire_steps
from antiphon.services.wire import work as wire_work

FIGURES = DraftingStatistics(100, 40, 90, 70, 60, 2, 0.25, 0.5, 1.75)
SUBMISSION = GroupSubmission("l", "g", "w", (), 0.5)
REF = BatchRef(0, "d", "t", 2, 1, 0, 0, 9, 0.5, {0: 2}, 4.5)


@pytest.mark.parametrize("figures", [None, FIGURES])
def test_figures_travel_with_submissions_and_batches(figures: DraftingStatistics | None) -> None:
    submission = replace(SUBMISSION, drafting=figures)
    message = records_pb2.GroupSubmission.FromString(
        wire_work.group_submission_to_proto(submission).SerializeToString()
    )
    assert wire_work.group_submission_from_proto(message).drafting == figures
    assert submission_digest(submission) == submission_digest(SUBMISSION)
    ref = replace(REF, drafting=figures)
    assert wire_steps.batch_ref_from_proto(wire_steps.batch_ref_to_proto(ref)) == ref


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"drafter_s": math.nan}, {"gain": math.inf}])
def test_figures_that_cannot_be_meant_are_none(wrong: dict[str, float]) -> None:
    submission = replace(SUBMISSION, drafting=replace(FIGURES, **wrong))
    assert (
        wire_work.group_submission_from_proto(wire_work.group_submission_to_proto(submission)).drafting
        is None
    )


@pytest.mark.parametrize("wanted", [False, True])
def test_a_lease_request_says_whether_history_is_wanted(wanted: bool) -> None:
    request = LeaseRequest("w", None, 3, 1.5, wanted)
    assert wire_work.lease_request_from_proto(wire_work.lease_request_to_proto(request)) == request


def test_seeds_are_todays_without_sharing() -> None:
    expected = tuple(derive_seed("request", 7, "p", 3, i) for i in range(8))
    assert request_seeds(7, "p", 3, 8) == request_seeds(7, "p", 3, 8, shared=0.0) == expected


@given(st.integers(1, 32), st.floats(0.0, 1.0), st.integers(0, 50), st.integers(51, 99))
def test_only_the_shared_samples_repeat(size: int, shared: float, epoch: int, later: int) -> None:
    first, second = (request_seeds(7, "p", e, size, shared) for e in (epoch, later))
    common = round(shared * size)
    assert [a == b for a, b in zip(first, second, strict=True)] == [i < common for i in range(size)]
    assert first[common:] == request_seeds(7, "p", epoch, size)[common:]
    assert len(set(first) | set(second)) == 2 * size - common
    assert not set(first) & set(request_seeds(7, "q", epoch, size, shared))


def test_the_fraction_belongs_to_the_run() -> None:
    config = build_config({"drafting": {"shared_seeds": 0.5}, "loop": {"group_size": 4}})
    assert pinned_values(config)["drafting.shared_seeds"] == "0.5"
    group = GroupState("g", 0, "train", 0, epoch=2, samples=4)
    again = replace(group, epoch=3)
    equal = np.equal(group_seeds(config, group, "p"), group_seeds(config, again, "p"))
    assert equal.tolist() == [True, True, False, False]
