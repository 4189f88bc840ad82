"""Turns are answered once, and what a worker makes of them is found and blamed on the one who did it."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from antiphon.core.checks import TokenRules
from antiphon.core.config import build_config
from antiphon.core.coordinator.consequences import check_of
from antiphon.core.coordinator.groups import hold_until
from antiphon.core.coordinator.loop_state import LoopState
from antiphon.core.coordinator.turns import ask, take_answers, to_answer
from antiphon.core.errors import ContractError, RefusedError
from antiphon.core.loop import events as e
from antiphon.core.loop.acceptance import accept_rewards
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.loop.partials import KeptGroup, KeptSample, false_author
from antiphon.core.loop.turns import rewards_of
from antiphon.core.records import (
    FinishReason,
    GroupSubmission,
    PartialTrajectory,
    SampleReward,
    Trajectory,
    TurnAnswer,
    VersionSpan,
)
from antiphon.core.requests import TurnReply, TurnRequest
from antiphon.core.spans import rest_of
from tests.support.light_environment import LightTurnPrompts

GROUP, LEASE, WORKER = "g0000000", "1" * 32, "w-1"


def made_loop() -> LoopState:
    """Return a run with one leased group of two samples."""
    config = build_config(
        {"loop": {"prompts_per_step": 1, "group_size": 2}, "sampling": {"max_tokens": 8}, "run": {"steps": 2}}
    )
    loop = LoopState(config, "run-1", LightTurnPrompts(turns=3, tokens=40), bytes(32), 0.0)
    for event in (
        e.RunOpened("run-1", {}, 0.0),
        e.SnapshotAnnounced(0, "0" * 64, "origin"),
        e.StepOpened(0),
        e.WorkerRegistered(WORKER, "w", 1),
        e.GroupOpened(GROUP, 0, 0, 0, None, None, False),
        e.LeaseGranted(GROUP, LEASE, WORKER, 1, 0, 0.0),
    ):
        loop.apply(event, 0.0)
    return loop


def turn(tokens: list[int], reason: FinishReason = FinishReason.STOP, start: int = 0) -> PartialTrajectory:
    size = len(tokens)
    return PartialTrajectory(
        np.array(tokens, dtype=np.int32),
        np.full(size, -1.0, dtype=np.float32),
        (VersionSpan(0, start, start + size),),
        reason,
        sample_index=0,
    )


def go_on(row: PartialTrajectory, said: list[int], tokens: list[int]) -> PartialTrajectory:
    """Return a row with what the environment said and the next turn."""
    start, stop = row.stop, row.stop + len(said)
    return replace(
        row,
        token_ids=np.array([*row.token_ids.tolist(), *said, *tokens], dtype=np.int32),
        logprobs=np.array(
            [*row.logprobs.tolist(), *[0.0] * len(said), *[-1.0] * len(tokens)], dtype=np.float32
        ),
        spans=(*row.spans, VersionSpan(0, stop, stop + len(tokens))),
        observed=(*row.observed, (start, stop)),
    )


def run(loop: LoopState, decision: Generator[Any, None, Any]) -> Any:
    """Apply what a decision yields, and return its reply."""
    while True:
        try:
            effect = next(decision)
        except StopIteration as ended:
            return ended.value
        if isinstance(effect, e.JournalEvent):
            loop.apply(effect, 1.0)


def asked(loop: LoopState, piece: PartialTrajectory) -> TurnReply | str:
    found: TurnReply | str = run(loop, ask(loop, TurnRequest(WORKER, LEASE, piece, 1.0), 1.0))
    return found


def answer(loop: LoopState, said: list[int], service: str = "r-1") -> None:
    (question,) = to_answer(loop, service, 8, 1.0)
    named = question.group_id, question.sample_index, question.row_digest
    told = TurnAnswer(*named, tuple(said), service=service)
    assert run(loop, take_answers(loop, [told], 1.0)) == 1


def test_the_same_question_has_the_same_answer_and_is_asked_once() -> None:
    loop, row = made_loop(), turn([3, 4])
    assert asked(loop, row) == asked(loop, row)
    answer(loop, [5, 6])
    assert asked(loop, row) == TurnReply(True, (5, 6), kept=2)
    again = go_on(row, [5, 6], [7])
    assert isinstance(asked(loop, rest_of(again, 2) or again), str)


def test_the_turns_of_a_trajectory_go_to_the_service_that_began_it_until_it_is_gone() -> None:
    loop, row = made_loop(), turn([3, 4])
    silent_s = hold_until(loop, 0, 0.0)
    asked(loop, row)
    answer(loop, [5, 6], "r-1")
    asked(loop, go_on(row, [5, 6], [7]))

    def given(service: str, now: float) -> int:
        return len(to_answer(loop, service, 8, now))

    assert [given("r-2", 2.0), given("r-1", 2.0)] == [0, 1]
    overdue = 2.0 + silent_s
    assert [given("r-2", overdue - 0.1), given("r-2", overdue)] == [0, 1]  # the other was silent since
    restarted = made_loop()  # a coordinator that was started again has not seen it yet
    restarted.run, restarted.begun_s = loop.run, 100.0
    asked(restarted, go_on(row, [5, 6], [7]))
    assert not to_answer(restarted, "r-2", 8, 99.9 + silent_s)
    assert to_answer(restarted, "r-2", 8, 100.0 + silent_s)


def test_an_answer_to_a_group_that_was_handed_in_meanwhile_changes_nothing() -> None:
    loop = made_loop()
    asked(loop, turn([3, 4]))
    (question,) = to_answer(loop, "r-1", 8, 1.0)
    loop.run.groups[GROUP].phase = GroupPhase.SUBMITTED
    told = TurnAnswer(GROUP, 0, question.row_digest, (5,))
    assert run(loop, take_answers(loop, [told], 1.0)) == 0 and not loop.turns


def test_a_lease_asks_about_one_row_of_a_sample() -> None:
    loop = made_loop()
    for token in range(3, 9):
        asked(loop, turn([token]))
    assert len(loop.turns) == 1
    for token in range(9, 13):
        asked(loop, turn([token]))
        answer(loop, [1])
    with pytest.raises(RefusedError, match="rows of it were answered"):
        asked(loop, turn([13]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: replace(row, token_ids=np.where(row.token_ids == 5, 6, row.token_ids)), "not what its"),
        (lambda row: replace(row, observed=()), "spans must cover"),
        (lambda row: replace(row, logprobs=np.full_like(row.logprobs, -1.0)), "must be 0"),
        (lambda row: replace(row, finish_reason=FinishReason.LENGTH), "after a turn of 1 tokens"),
        (lambda row: replace(row, finish_reason=None), "before its end"),
    ],
)
def test_what_was_not_said_is_refused(change: Any, words: str) -> None:
    loop, row = made_loop(), turn([3, 4])
    asked(loop, row)
    answer(loop, [5, 8])
    with pytest.raises(RefusedError, match=words):
        asked(loop, change(go_on(row, [5, 8], [7])))


def test_a_turn_that_is_cut_short_in_two_pieces_is_seen() -> None:
    loop = made_loop()
    loop.leases.partial_groups.take(LEASE, WORKER, replace(turn([3, 4]), finish_reason=None))
    with pytest.raises(RefusedError, match="finish_reason=length after a turn of 3 tokens"):
        asked(loop, turn([5], FinishReason.LENGTH, start=2))


def test_a_row_that_goes_on_behind_a_text_that_stops_is_refused() -> None:
    """Tokens 5 and 6 are the text, 1 is the end token."""

    def stop(tokens: Sequence[int]) -> int | None:
        return next((n for n in range(2, len(tokens) + 1) if tuple(tokens[n - 2 : n]) == (5, 6)), None)

    loop = made_loop()
    loop.prompts.rules = TokenRules(64, frozenset({1}), stop)  # type: ignore[attr-defined]
    check = check_of(loop, loop.run.groups[GROUP])
    open_end = replace(turn([3, 5, 6]), finish_reason=None)
    for good in (turn([3, 5, 6]), turn([5, 6]), turn([5, 1]), replace(turn([3, 5]), finish_reason=None)):
        check(good)
    check(turn([6], start=2))  # whether it completes the text shows in the whole row
    for bad, words in (
        (turn([5, 6, 7, 1]), "continues after an end token or a text of sampling.stop at 1 of 4"),
        (open_end, "token 6 ends it, but it has no finish_reason"),
        (turn([3, 4]), "token 4 is no end token and completes no text"),
        (turn([7, 5, 6, 1], start=2), "continues after"),
    ):
        with pytest.raises(ContractError, match=words):
            check(bad)
    loop.leases.partial_groups.take(LEASE, WORKER, replace(turn([3, 5]), finish_reason=None))
    row = turn([3, 5, 6])
    assert isinstance(asked(loop, rest_of(row, 2) or row), str)
    answer(loop, [5, 6, 5])  # what is observed stops nothing, nor does it begin what does
    assert isinstance(asked(loop, go_on(row, [5, 6, 5], [6, 1])), str)
    other = made_loop()
    other.prompts.rules = loop.prompts.rules  # type: ignore[attr-defined]
    other.leases.partial_groups.take(LEASE, WORKER, replace(turn([3, 5]), finish_reason=None))
    with pytest.raises(RefusedError, match="continues after"):
        asked(other, turn([6, 7, 1], start=2))


def test_who_handed_over_between_two_turns_is_not_blamed_for_what_came_after() -> None:
    loop, row = made_loop(), turn([3, 4])
    asked(loop, row)
    answer(loop, [5, 8])
    group = loop.run.groups[GROUP]
    whole = go_on(row, [5, 8], [7])
    kept = KeptGroup((KeptSample(whole, (("honest", 2), ("other", 5))),))
    assert false_author(kept, check_of(loop, group)) is None
    lied = replace(whole, token_ids=np.array([3, 4, 5, 9, 7], dtype=np.int32))
    kept = KeptGroup((KeptSample(lied, (("honest", 2), ("other", 5))),))
    found = false_author(kept, check_of(loop, group))
    assert found is not None and found[0] == "other"


def test_what_the_environment_says_at_the_end_is_kept_with_the_rewards() -> None:
    loop, row = made_loop(), turn([3, 1])
    asked(loop, row)
    (question,) = to_answer(loop, "r-1", 8, 1.0)
    named = question.group_id, question.sample_index, question.row_digest
    over = FinishReason.ENVIRONMENT
    told = TurnAnswer(
        *named, finish_reason=over, reward=1.0, parts={"right": 1.0, "moves": 3.0}, reason="won"
    )
    assert run(loop, take_answers(loop, [told], 1.0)) == 1
    (answer,) = loop.run.groups[GROUP].answers.values()
    assert (answer.reason, answer.parts) == ("won", told.parts)
    whole = Trajectory(row.token_ids, row.logprobs, row.spans, over, sample_index=0, seed=0)
    given = rewards_of(GroupSubmission(LEASE, GROUP, WORKER, (whole,), 0.0), loop.run.groups[GROUP].answers)
    other = SampleReward(1, 0.0, parts={"right": 0.0})
    (rewarded,) = accept_rewards(loop.run, GROUP, (*given, other), "", 1.0, 0.1)
    assert isinstance(rewarded, e.GroupRewarded)
    assert rewarded.said == ((0, "won; right 1, moves 3"), (1, "right 0"))
    assert rewarded.parts == {"moves": 3.0, "right": 0.5}
    again = e.load_event(rewarded.kind, e.dump_event(rewarded))
    assert again == rewarded


def test_a_group_without_its_answers_is_no_group() -> None:
    loop = made_loop()
    with pytest.raises(ContractError, match="ended with finish_reason=environment, but its environment said"):
        check_of(loop, loop.run.groups[GROUP])(turn([3, 4], FinishReason.ENVIRONMENT))
