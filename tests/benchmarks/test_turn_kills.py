"""The audit behind `benchmarks/turns.py --kills` sees each thing that must not be."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from antiphon.benchmarks.parts.turn_kills import FAULTS, audit
from antiphon.core.loop import events as e
from antiphon.core.loop.turns import check_answered
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.core.spans import beginning_of
from antiphon.services.rollout.work import piece_of

ROW = BatchRow(
    token_ids=np.array([4, 5, 6, 7, 8], dtype=np.int32),
    logprobs=np.array([-1, -1, 0, 0, -1], dtype=np.float32),
    spans=(VersionSpan(0, 0, 2), VersionSpan(0, 4, 5)),
    finish_reason=FinishReason.ENVIRONMENT,
    group_id="g0",
    prompt_key="train-0-0",
    sample_index=0,
    prompt_token_ids=np.array([1], dtype=np.int32),
    reward=1.0,
    advantage=0.0,
    observed=((2, 4),),
)
OPENED = e.GroupOpened("g0", 0, 0, 0, None, None, False)


def lease(attempt: int, continued: int) -> e.LeaseGranted:
    return e.LeaseGranted("g0", f"l{attempt}", "worker-0-1", attempt, 0, 0.0, continued)


def answers() -> tuple[e.TurnAnswered, e.TurnAnswered]:
    """Return the answers to both turns of the row."""
    piece = piece_of(replace(ROW, finish_reason=None), 0)
    first = check_answered(beginning_of(piece, 2), 0, {}, "")
    going_on = e.TurnAnswered("g0", 0, first, (6, 7), "", 0.0, "", 0.0)
    last = check_answered(piece, 0, {f"0/{first}": going_on}, "")
    return going_on, e.TurnAnswered("g0", 0, last, (), "environment", 1.0, "", 0.0)


FIRST, LAST = answers()
SOUND = [OPENED, lease(1, 0), FIRST, lease(2, 2), LAST, e.RunFinished()]
OTHER = dataclasses.replace(FIRST, row_digest=32 * "0")


@pytest.mark.parametrize(
    ("events", "rows", "found"),
    [
        (SOUND, [ROW], {}),
        (SOUND, [], {"lost": 1}),
        ([*SOUND, e.GroupDropped("g0", "stale_on_arrival")], [], {}),
        (SOUND, [ROW, ROW], {"twice": 1}),
        (SOUND, [replace(ROW, token_ids=ROW.token_ids + 1)], {"wrong": 1, "sampled_again": 2}),
        (SOUND, [replace(ROW, failure="it raised")], {"failed": 1}),
        ([OPENED, lease(1, 0), FIRST, lease(2, 0), LAST], [ROW], {"sampled_again": 2}),
        ([OPENED, lease(1, 0), OTHER, FIRST, LAST], [ROW], {"sampled_again": 1}),
    ],
)
def test_every_fault_is_counted(events, rows, found) -> None:
    audited = audit(events, rows, group_size=1)
    assert {name: getattr(audited, name) for name in FAULTS} == dict.fromkeys(FAULTS, 0) | found
