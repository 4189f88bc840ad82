"""A group in columns is the group that was sampled; columns that do not fit each other are refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.checks import submission_digest
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, GroupSubmission, Trajectory, VersionSpan
from antiphon.net import wire
from antiphon.services.coordinator.journal import payloads

PLACES = st.sets(st.integers(0, 2**31 - 2), max_size=3).map(lambda places: tuple(sorted(places)))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    cuts = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=3)))
    tokens = np.array(
        draw(st.lists(st.integers(0, 2**31 - 1), min_size=cuts[-1], max_size=cuts[-1])), dtype=np.int32
    )
    return Trajectory(
        sample_index=draw(st.integers(0, 7)),
        seed=draw(st.integers(0, 2**64 - 1)),
        token_ids=tokens,
        logprobs=-np.arange(tokens.size, dtype=np.float32) / 3,
        spans=tuple(
            VersionSpan(i, a, b, draw(st.booleans()))
            for i, (a, b) in enumerate(zip([0, *cuts], cuts, strict=False))
        ),
        finish_reason=draw(st.sampled_from(FinishReason)),
        observed=tuple((place, place + 1) for place in draw(PLACES)),
        breaks=draw(PLACES),
    )


def submission(*group: Trajectory) -> GroupSubmission:
    return GroupSubmission("lease", "group", "worker-1", group, 0.5)


def as_told(group: tuple[Trajectory, ...]) -> list[Any]:
    return [
        (
            t.sample_index,
            t.seed,
            t.token_ids.tolist(),
            t.logprobs.tobytes(),
            t.spans,
            t.finish_reason,
            t.observed,
            t.breaks,
        )
        for t in group
    ]


@given(st.lists(trajectories(), max_size=5))
def test_reading_what_was_written_gives_the_same_group(group: list[Trajectory]) -> None:
    told = submission(*group)
    found = payloads.load_submission(payloads.dump(told))
    assert as_told(found.trajectories) == as_told(told.trajectories)
    assert submission_digest(found) == submission_digest(told)
    assert all(t.token_ids.dtype == np.int32 and t.token_ids.ndim == 1 for t in found.trajectories)


def plain() -> Any:
    one = Trajectory(
        np.array([3, 4], np.int32),
        np.array([-1, -2], np.float32),
        (VersionSpan(0, 0, 2),),
        FinishReason.STOP,
        sample_index=0,
        seed=5,
    )
    return wire.group_submission_to_proto(submission(one, one))


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("span_kept_caches", [True], "1 marks of a kept cache came for 2 version spans"),
        ("sample_indices", [0], "1 sample indices"),
        ("seeds", [1, 2, 3], "3 seeds"),
        ("lengths", [2, 3], "5 tokens came with 16 bytes"),
        ("lengths", [-1, 5], "4 tokens came with 16 bytes"),
        ("token_ids", b"123", "4 tokens came with 3 bytes of tokens"),
        ("behaviour_logprobs", b"1234", "and 4 of behaviour logprobs"),
        ("span_counts", [1, 2], "3 version spans"),
        ("span_counts", [3, -1], "2 version spans"),
        ("span_stops", [2], "2 version spans"),
        ("finish_reasons", ["stop", "tired"], "finish_reason='tired' is unknown"),
        ("finish_reasons", ["stop"], "1 finish reasons"),
    ],
)
def test_columns_that_do_not_fit_are_refused(column: str, value: Any, sentence: str) -> None:
    message = plain()
    if isinstance(value, bytes):
        setattr(message.trajectories, column, value)
    else:
        del getattr(message.trajectories, column)[:]
        getattr(message.trajectories, column).extend(value)
    with pytest.raises(ContractError, match=sentence):
        wire.group_submission_from_proto(message)
