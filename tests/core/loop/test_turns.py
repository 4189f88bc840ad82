"""Turns are answered once, and what a worker makes of them is found and blamed on the one who did it."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from antiphon.core.checks import TokenRules
from antiphon.core.config import build_config
from antiphon.core.coordinator.consequences import check_of, take_back
from antiphon.core.coordinator.groups import hold_until, reward_at_once, submit
from antiphon.core.coordinator.loop_state import LoopState
from antiphon.core.coordinator.overview import explained, stage_reply
from antiphon.core.coordinator.turns import ask, take_answers, to_answer
from antiphon.core.errors import ContractError, RefusedError
from antiphon.core.loop import events as e
from antiphon.core.loop.acceptance import accept_rewards
from antiphon.core.loop.admission import plan_leases
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.loop.partials import KeptGroup, KeptSample, false_author
from antiphon.core.loop.turns import piece_of_turn, rewards_of, row_of
from antiphon.core.records import (
    FinishReason,
    GroupSubmission,
    PartialTrajectory,
    SampleReward,
    SubmitVerdict,
    Trajectory,
    TurnAnswer,
    VersionSpan,
)
from antiphon.core.requests import TurnReply, TurnRequest
from antiphon.core.spans import rest_of
from tests.support.light_environment import LightHostedPrompts, LightTurnPrompts

GROUP, LEASE, WORKER = "g0000000", "1" * 32, "w-1"


def made_loop(prompts: type[LightTurnPrompts] = LightTurnPrompts) -> LoopState:
    """Return a run with one leased group of two samples."""
    config = build_config(
        {
            "loop": {"prompts_per_step": 1, "group_size": 2},
            "sampling": {"max_tokens": 8},
            "run": {"steps": 2},
            "rollout": {"max_model_tokens": 24},
        }
    )
    loop = LoopState(config, "run-1", prompts(turns=3, tokens=40), bytes(32), 0.0)
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


NOTHING = PartialTrajectory(
    np.empty(0, np.int32), np.empty(0, np.float32), (), FinishReason.STOP, sample_index=0
)
"""What a sample of a host begins with."""


def go_on(
    row: PartialTrajectory, said: list[int], tokens: list[int], *, fresh: bool = False
) -> PartialTrajectory:
    """Return a row with what the environment said, which may begin a branch, and the next turn."""
    start, stop = row.stop, row.stop + len(said)
    return replace(
        row,
        token_ids=np.array([*row.token_ids.tolist(), *said, *tokens], dtype=np.int32),
        logprobs=np.array(
            [*row.logprobs.tolist(), *[0.0] * len(said), *[-1.0] * len(tokens)], dtype=np.float32
        ),
        spans=(*row.spans, VersionSpan(0, stop, stop + len(tokens))),
        observed=(*row.observed, (start, stop)),
        breaks=(*row.breaks, start) if fresh else row.breaks,
    )


def run(loop: LoopState, decision: Generator[Any, None, Any]) -> Any:
    """Apply what a decision yields, and return its reply."""
    while True:
        try:
            effect = next(decision)
        except StopIteration as ended:
            return ended.value
        if isinstance(effect, e.JournalEvent):
            assert e.load_event(effect.kind, e.dump_event(effect)) == effect
            loop.apply(effect, 1.0)


def asked(loop: LoopState, piece: PartialTrajectory) -> TurnReply | str:
    found: TurnReply | str = run(loop, ask(loop, TurnRequest(WORKER, LEASE, piece, 1.0), 1.0))
    return found


def answer(loop: LoopState, said: list[int], service: str = "r-1", *, fresh: bool = False) -> None:
    (question,) = to_answer(loop, service, 8, 1.0)
    asked = question.group_id, question.sample_index, question.row_digest
    told = TurnAnswer(*asked, tuple(said), fresh=fresh, service=service)
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


def test_a_question_waits_for_the_lease_that_asked_last() -> None:
    loop, row, other = made_loop(), turn([3, 4]), "2" * 32
    asked(loop, row)
    held = loop.leases.get(LEASE)
    assert held is not None
    run(loop, take_back(loop, held, "its turns were answered too late", 1.0))
    loop.apply(e.LeaseGranted(GROUP, other, WORKER, 2, 0, 1.0), 1.0)
    run(loop, ask(loop, TurnRequest(WORKER, other, row, 1.0), 1.0))
    (waiting,) = loop.turns.values()
    assert waiting.asked == (other, 0)


def test_a_conversation_that_has_begun_is_leased_before_others() -> None:
    loop, lease = made_loop(), "2" * 32
    asked(loop, turn([3, 4]))
    answer(loop, [5, 6])
    loop.apply(e.StepOpened(1), 1.0)
    loop.apply(e.EvaluationOpened(0, 1), 1.0)
    held = loop.leases.get(LEASE)
    assert held is not None
    run(loop, take_back(loop, held, "its turns were answered too late", 1.0))
    assert plan_leases(loop.run, loop.config, 0, 1).group_ids == (GROUP,)
    loop.apply(e.LeaseGranted(GROUP, lease, WORKER, 2, 0, 1.0), 1.0)
    assert plan_leases(loop.run, loop.config, 0, 1).group_ids[0] == "v000000-e0000"


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


def hosted_loop() -> tuple[LoopState, PartialTrajectory]:
    """Return a run of a host, and the row of a sample that has sampled once in a second context."""
    loop = made_loop(LightHostedPrompts)
    asked(loop, NOTHING)
    answer(loop, [3, 4])
    row = go_on(NOTHING, [3, 4], [5])
    asked(loop, row)
    answer(loop, [4, 5, 6], fresh=True)
    return loop, go_on(row, [4, 5, 6], [7], fresh=True)


def recorded(loop: LoopState) -> list[tuple[int, list[int]]]:
    """Return beginning and tokens of each turn of sample 0 that the journal has."""
    turns = loop.run.groups[GROUP].turns[0]
    return [(turn.start, piece_of_turn(turn).token_ids.tolist()) for turn in turns]


def test_a_turn_that_a_host_hears_of_is_recorded_first_and_once() -> None:
    loop, row = hosted_loop()
    group = loop.run.groups[GROUP]
    assert recorded(loop) == [(0, [3, 4, 5])]
    decision = ask(loop, TurnRequest(WORKER, LEASE, rest_of(row, 3) or row, 1.0), 1.0)
    told = next(decision)
    assert isinstance(told, e.TurnSampled) and not to_answer(loop, "r-1", 8, 1.0)
    loop.apply(told, 1.0)
    assert recorded(loop) == [(0, [3, 4, 5]), (3, [4, 5, 6, 7])] and told.breaks == (3,)
    with pytest.raises(StopIteration):
        next(decision)
    (question,) = to_answer(loop, "r-1", 8, 1.0)
    assert (question.breaks, question.logprobs.tolist()) == ((3,), [0, 0, -1, 0, 0, 0, -1])
    before = group.turns[0]
    asked(loop, row)
    assert group.turns[0] == before
    again = row_of(before)
    assert again is not None and (again.spans, again.observed) == (row.spans, row.observed)
    assert (again.breaks, again.token_ids.tolist()) == (row.breaks, row.token_ids.tolist())


def test_a_row_that_is_begun_again_is_recorded_anew() -> None:
    loop, row = hosted_loop()
    asked(loop, row)
    other = go_on(NOTHING, [3, 4], [6])
    asked(loop, other)
    assert recorded(loop) == [(0, [3, 4, 6])]


def test_a_row_that_is_begun_again_after_its_end_is_not_over() -> None:
    loop, row = hosted_loop()
    asked(loop, row)
    (question,) = to_answer(loop, "r-1", 8, 1.0)
    ended = TurnAnswer(GROUP, 0, question.row_digest, finish_reason=FinishReason.ENVIRONMENT, reward=1.0)
    run(loop, take_answers(loop, [ended], 1.0))
    run(loop, ask(loop, TurnRequest(WORKER, LEASE, go_on(NOTHING, [3, 4], [6]), 1.0), 2.0))
    asked(loop, replace(NOTHING, sample_index=1))
    assert [question.over for question in to_answer(loop, "r-1", 8, 2.0)] == [(), ()]


def test_a_lease_records_no_more_turns_than_it_can_have() -> None:
    loop, _ = hosted_loop()
    limits = loop.limits
    assert limits is not None
    most = loop.run.groups[GROUP].samples * (limits.turns + 1)
    with pytest.raises(RefusedError, match="a lease has one"):
        for token in range(most + 2):  # each time its holder says that it began again
            asked(loop, go_on(NOTHING, [3, 4], [6 + token % 2]))


def test_a_run_that_waits_for_a_host_has_not_stalled(monkeypatch) -> None:
    loop = made_loop(LightHostedPrompts)
    monkeypatch.setattr(loop.fleet, "absence", lambda: "")

    def looked() -> str:
        reply = explained(loop, stage_reply(loop, "collect", 0), "collect", 0, 1.0, "")
        return reply.waiting_for if reply.no_workers else ""

    assert not looked()
    asked(loop, NOTHING)
    assert looked() == "1 turns to be answered by hosts of the environment"


@pytest.mark.parametrize("breaks", [(7,), (1000, -3)])
def test_a_row_that_nothing_was_said_of_has_no_breaks(breaks: tuple[int, ...]) -> None:
    with pytest.raises(RefusedError):
        asked(made_loop(LightHostedPrompts), replace(NOTHING, breaks=breaks))


@pytest.mark.parametrize("kept", [0, 5])
def test_the_next_holder_continues_what_was_recorded_or_begins_again(kept: int) -> None:
    loop, row = hosted_loop()
    asked(loop, row)
    loop.apply(e.LeaseExpired(GROUP, LEASE, WORKER, "lost", 2.0, kept=kept), 2.0)
    assert bool(loop.run.groups[GROUP].turns) == bool(kept)
    loop.apply(e.LeaseGranted(GROUP, "2" * 32, WORKER, 2, 0, 3.0), 3.0)
    assert not loop.run.groups[GROUP].turns


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: replace(row, breaks=()), "are not what its environment answered"),
        (lambda row: replace(row, breaks=(3, 7)), "where no host began a branch"),
        (lambda row: replace(row, breaks=(0, 3)), "where no host began a branch"),
        (lambda row: replace(row, breaks=(3, 3)), "where no host began a branch"),
        (lambda row: replace(row, observed=((3, 6),), spans=(VersionSpan(0, 0, 3), *row.spans[1:])), "ones"),
    ],
)
def test_a_break_stands_where_a_host_began_a_branch(change: Any, words: str) -> None:
    loop, row = hosted_loop()
    with pytest.raises(RefusedError, match=words):
        asked(loop, replace(change(row), logprobs=np.where(change(row).logprobs < 0, -1.0, 0.0)))


def test_a_context_is_no_longer_than_the_engine_allows() -> None:
    loop, row = hosted_loop()
    asked(loop, row)
    answer(loop, [*range(1, 14)])
    long = go_on(row, [*range(1, 14)], [8] * 7)  # 4 + 13 + 7 tokens, of 24
    assert isinstance(asked(loop, replace(long, finish_reason=FinishReason.LENGTH)), str)
    with pytest.raises(RefusedError, match="a context of 25 tokens exceeds 24"):
        asked(loop, go_on(row, [*range(1, 14)], [8] * 8))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"token_ids": (1,), "fresh": True}, ""),
        ({"finish_reason": FinishReason.ENVIRONMENT, "fresh": True}, "a branch begins with"),
        ({"token_ids": (1,) * 24, "fresh": True}, "24 tokens leave no place for a turn in the 24"),
        ({"token_ids": (1,) * 20}, "20 tokens leave no place for a turn in the 20"),
    ],
)
def test_what_a_host_can_say(told: dict[str, Any], words: str) -> None:
    loop, row = hosted_loop()
    asked(loop, row)
    (question,) = to_answer(loop, "r-1", 8, 1.0)
    said = take_answers(loop, [TurnAnswer(GROUP, 0, question.row_digest, **told)], 1.0)
    if not words:
        assert run(loop, said) == 1
        return
    with pytest.raises(ContractError, match=words):
        run(loop, said)


@pytest.mark.parametrize("hosted", [False, True])
def test_no_branch_begins_before_a_turn_or_without_a_host(hosted: bool) -> None:
    loop = made_loop(LightHostedPrompts if hosted else LightTurnPrompts)
    asked(loop, NOTHING if hosted else turn([3]))
    (question,) = to_answer(loop, "r-1", 8, 1.0)
    told = TurnAnswer(GROUP, 0, question.row_digest, (1, 2), fresh=True)
    with pytest.raises(ContractError, match="a branch begins with what a host says to a turn"):
        run(loop, take_answers(loop, [told], 1.0))


def test_a_question_says_which_trajectories_of_its_group_are_over() -> None:
    loop, row = hosted_loop()
    asked(loop, row)
    (question,) = to_answer(loop, "r-1", 8, 1.0)
    assert question.over == ()
    ended = TurnAnswer(GROUP, 0, question.row_digest, finish_reason=FinishReason.ENVIRONMENT, reward=1.0)
    run(loop, take_answers(loop, [ended], 1.0))
    asked(loop, replace(NOTHING, sample_index=1))
    (question,) = to_answer(loop, "r-1", 8, 1.0)
    assert (question.sample_index, question.over) == (1, (0,))


@pytest.mark.parametrize(("reason", "failure"), [("failed", "no server"), ("environment", "")])
def test_a_trajectory_that_ends_before_a_token_has_failed(reason: str, failure: str) -> None:
    loop = made_loop(LightHostedPrompts)
    ended = FinishReason(reason)
    for index in (0, 1):
        asked(loop, replace(NOTHING, sample_index=index))
    for question in to_answer(loop, "r-1", 8, 1.0):
        told = TurnAnswer(
            GROUP, question.sample_index, question.row_digest, finish_reason=ended, failure=failure
        )
        run(loop, take_answers(loop, [told], 1.0))
    whole = tuple(
        Trajectory(NOTHING.token_ids, NOTHING.logprobs, (), ended, sample_index=index, seed=seed)
        for index, seed in enumerate(loop.seeds(loop.run.groups[GROUP]))
    )
    submission = GroupSubmission(LEASE, GROUP, WORKER, whole, 1.0)
    assert run(loop, submit(loop, submission, 1.0)) is SubmitVerdict.ACCEPTED
    # Of a worker's own answers these would be a sign that it spoils them.
    loop.run.recent_scored = [("w", True)] * 8 + [("v", False)] * 4
    run(loop, reward_at_once(loop, submission, 1.0))
    assert "w" not in loop.run.standings
    group = loop.run.groups.get(GROUP)
    assert loop.run.trajectories_failed == 2 and (group is None or group.token_counts == (0, 0))
    assert loop.run.last_failure == (failure or "its host ended it before a token was sampled")


def test_a_row_is_named_by_its_breaks_too() -> None:
    names = []
    for fresh in (False, True):
        loop = made_loop(LightHostedPrompts)
        asked(loop, NOTHING)
        answer(loop, [3, 4])
        row = go_on(NOTHING, [3, 4], [5])
        asked(loop, row)
        answer(loop, [6], fresh=fresh)
        names.append(asked(loop, go_on(row, [6], [7], fresh=fresh)))
    assert names[0] != names[1]
