"""Turns: a sample whose turn has ended waits for its environment's answer, which is on the disk before it is
heard.

What a worker says its sample observed is compared with the answers, token by token. Questions that wait stand
in memory alone: after a restart the workers ask again.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from antiphon.core.checks import LONGEST_TEXT, failure_line
from antiphon.core.coordinator.consequences import begin_again, check_of, strike
from antiphon.core.coordinator.groups import hold_until
from antiphon.core.coordinator.loop_state import Decision, LoopState, OpenTurn
from antiphon.core.errors import ContractError, RefusedError
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.turns import answer_key, check_answered, sampled_turn
from antiphon.core.message_sizes import group_bytes, page
from antiphon.core.records import (
    FinishReason,
    LeaseProgress,
    PartialTrajectory,
    TurnAnswer,
    TurnLimits,
    TurnToAnswer,
)
from antiphon.core.requests import TurnReply, TurnRequest
from antiphon.core.trust.worker_names import name_of_worker

UNANSWERED = (GroupPhase.OPEN, GroupPhase.LEASED)
"""Groups whose turns are answered; one that was handed in has no more."""


def ask(loop: LoopState, request: TurnRequest, now: float) -> Decision[TurnReply | str]:
    """Return the answer to a turn, or the name of the question that now waits for it.

    Raises:
        RefusedError: when no completion of the group can have these tokens; that is a strike.
    """
    leases, piece = loop.leases, request.piece
    held = leases.get(request.lease_id)
    group = None if held is None else loop.run.groups.get(held.group_id)
    limits = None if group is None else loop.limits_of(group)
    if held is None or group is None or held.worker_id != request.worker_id or limits is None:
        return TurnReply(answered=False, cancelled=True)
    try:
        check = check_of(loop, group)
        check(piece)
        if piece.finish_reason is None or not piece.finish_reason.ends_turn:
            raise ContractError(f"a turn of group {group.group_id} was asked about before its end")
        leases.take_progress(request.worker_id, LeaseProgress(request.lease_id, (piece,)))
        row = _row(loop, request)
        if row is None:
            return TurnReply(answered=False, kept=_kept(loop, request))
        if row is not piece:
            check(row)  # a piece alone does not show how long its turn is, or its context
        where = f"a turn of group {group.group_id}, sample {row.sample_index}"
        digest = check_answered(row, row.sample_index, group.answers, where)
        name = f"{group.group_id}/{answer_key(row.sample_index, digest)}"
        _check_number(group, row.sample_index, limits, where)
    except ContractError as error:
        known = leases.partial_groups.snapshot(request.lease_id)
        false = yield from begin_again(loop, group, request.lease_id, known, now)
        worker_id, reason = false or (request.worker_id, str(error))
        yield from strike(loop, name_of_worker(worker_id), group.group_id, "refused", reason, now)
        raise RefusedError(str(error)) from error
    if (reply := reply_to(loop, request, name)) is not None:
        return reply
    if limits.hosted:
        turns = group.turns.get(row.sample_index, ())
        sampled = sampled_turn(row, turns, group.group_id, request.worker_id, now)
        if sampled is not None:
            yield sampled
    asked = request.lease_id, row.sample_index
    if name in loop.turns:
        loop.turns[name].asked = asked  # which was another lease of its group before
    else:
        # A lease has one row of each sample: another question of it waits for nothing any more.
        loop.turns = {other: turn for other, turn in loop.turns.items() if turn.asked != asked}
        loop.turns[name] = OpenTurn(_question(loop, group, row, digest), now, asked, _home(group, row))
    return name


def reply_to(loop: LoopState, request: TurnRequest, name: str) -> TurnReply | None:
    """Return the answer to a question by its name, if the worker still has its lease and there is one."""
    group_id, _, key = name.partition("/")
    held, group = loop.leases.get(request.lease_id), loop.run.groups.get(group_id)
    if held is None or group is None or (held.group_id, held.worker_id) != (group_id, request.worker_id):
        return None
    if (answer := group.answers.get(key)) is None:
        return None
    over = FinishReason(answer.finish_reason) if answer.finish_reason else None
    return TurnReply(True, answer.token_ids, over, kept=_kept(loop, request), fresh=answer.fresh)


def _kept(loop: LoopState, request: TurnRequest) -> int:
    """Return how many tokens of a sample are kept here."""
    kept = dict(enumerate(loop.leases.partial_groups.kept(request.lease_id)))
    return kept.get(request.piece.sample_index, 0)


def _check_number(group: GroupState, sample_index: int, limits: TurnLimits, where: str) -> None:
    """Refuse a sample with more answers than its leases can have asked for, each with a row of its own."""
    answers = sum(answer.sample_index == sample_index for answer in group.answers.values())
    leases, most = max(1, group.attempt), limits.turns + limits.hosted  # a host's first one is the prompt
    if answers > most * leases or group.turns_sampled > group.samples * most * leases:
        rows = max(answers, group.turns_sampled)
        raise ContractError(f"{where}: {rows} rows of it were answered; a lease has one")


def _row(loop: LoopState, request: TurnRequest) -> PartialTrajectory | None:
    """Return the whole row of a sample; None while its beginning is not known here."""
    piece = request.piece
    if piece.start == 0:
        return piece
    kept = loop.leases.partial_groups.row(request.lease_id, piece.sample_index)
    if kept is None or kept.stop != piece.stop:
        return None
    return replace(kept, finish_reason=piece.finish_reason)


def _home(group: GroupState, row: PartialTrajectory) -> str:
    """Return the reward service that holds a row's conversation: who answered its sample last."""
    answers = reversed(group.answers.values()) if row.observed else ()
    return next((answer.service for answer in answers if answer.sample_index == row.sample_index), "")


def _question(loop: LoopState, group: GroupState, row: PartialTrajectory, digest: str) -> TurnToAnswer:
    prompt, limits = loop.prompt_of(group), loop.limits_of(group)
    assert limits is not None
    return TurnToAnswer(
        group_id=group.group_id,
        sample_index=row.sample_index,
        row_digest=digest,
        prompt_key=prompt.key,
        prompt_token_ids=prompt.token_ids,
        token_ids=row.token_ids,
        observed=row.observed,
        limits=limits,
        # A host may ask for a turn again, with all that is known of it.
        logprobs=row.logprobs if limits.hosted else row.logprobs[:0],
        spans=row.spans if limits.hosted else (),
        breaks=row.breaks,
    )


def to_answer(loop: LoopState, client_id: str, limit: int, now: float) -> list[TurnToAnswer]:
    """Hand a reward service up to `limit` turns that none has, those that wait longest first.

    The turns of one trajectory go to the service that holds its conversation, until that was silent for a
    deadline: another one begins the conversation again, or says that it cannot be.
    """
    groups = loop.run.groups
    loop.answering[client_id] = now
    for name, turn in list(loop.turns.items()):
        group = groups.get(turn.question.group_id)
        if group is None or group.phase not in UNANSWERED:
            del loop.turns[name]

    def is_for(turn: OpenTurn) -> bool:
        seen_s = loop.answering.get(turn.home, loop.begun_s)
        return turn.home in ("", client_id) or hold_until(loop, 0, seen_s) <= now

    free = [turn for turn in loop.turns.values() if turn.deadline_s <= now and is_for(turn)]
    free = free[: max(0, limit)]
    free = page(free, lambda t: group_bytes(1, t.question.token_ids.size, len(t.question.prompt_token_ids)))
    for turn in free:
        # A question that waits for a host is no sign of a slow service: one that starts again soon hears it.
        overdue = 0 if turn.question.limits.hosted else turn.handed_out
        turn.deadline_s = hold_until(loop, overdue, now)
        turn.handed_out += 1
    over = {group_id: _over(groups[group_id]) for group_id in {turn.question.group_id for turn in free}}
    return [replace(turn.question, over=over[turn.question.group_id]) for turn in free]


def unfinished(loop: LoopState) -> tuple[str, ...]:
    """Return the groups of whose turns a host may still be asked; none where the run answers itself."""
    groups = loop.run.groups.values() if loop.hosted else ()
    return tuple(group.group_id for group in groups if group.phase in UNANSWERED)


def _over(group: GroupState) -> tuple[int, ...]:
    """Return the samples of a hosted group whose trajectories are over, of which no further turn is asked.

    A row that was begun again after its end has a younger turn than that, or none but other answers.
    """
    if not group.turns:
        return ()
    answers = defaultdict(list)
    for answer in group.answers.values():
        answers[answer.sample_index].append(answer)
    newest = {sample: turns[-1].at_s for sample, turns in group.turns.items()}
    return tuple(
        sample
        for sample, said in sorted(answers.items())
        if said[-1].finish_reason
        and (said[-1].at_s >= newest[sample] if sample in newest else len(said) == 1)
    )


def take_answers(loop: LoopState, answers: Sequence[TurnAnswer], now: float) -> Decision[int]:
    """Take answers and return how many questions they end; one that nobody waits for changes nothing.

    Raises:
        ContractError: when an answer can be none; others of the call count.
    """
    taken, refused = 0, ""
    for answer in answers:
        name = f"{answer.group_id}/{answer_key(answer.sample_index, answer.row_digest)}"
        turn, group = loop.turns.get(name), loop.run.groups.get(answer.group_id)
        if turn is None or group is None or group.phase not in UNANSWERED:
            loop.turns.pop(name, None)  # its group was handed in meanwhile
            continue
        if problem := _problem(loop, turn.question, answer):
            refused = refused or f"the answer to a turn of group {answer.group_id}: {problem}"
            continue
        del loop.turns[name]
        yield e.TurnAnswered(
            group_id=answer.group_id,
            sample_index=answer.sample_index,
            row_digest=answer.row_digest,
            token_ids=answer.token_ids,
            finish_reason="" if answer.finish_reason is None else answer.finish_reason.value,
            reward=answer.reward,
            failure=failure_line(answer.failure) if answer.failure else "",
            at_s=now,
            fresh=answer.fresh,
            host=answer.host[:LONGEST_TEXT],
            service=answer.service,
            parts=answer.parts,
            reason=answer.reason,
        )
        loop.answering[answer.service] = now
        loop.fleet.work_done += 1
        taken += 1
    if refused:
        raise ContractError(refused)
    return taken


def _problem(loop: LoopState, question: TurnToAnswer, answer: TurnAnswer) -> str:
    """Say why an answer can be none; "" for one that can."""
    over = answer.finish_reason is not None
    if over == bool(answer.token_ids) or (over and answer.finish_reason.ends_turn):  # type: ignore[union-attr]
        return "either tokens are to be observed, or the trajectory is over"
    if over and not math.isfinite(answer.reward):
        return f"the reward is {answer.reward}, no finite number"
    limits, size = question.limits, int(question.token_ids.size)
    if answer.fresh and (over or not size or not limits.hosted):
        return "a branch begins with what a host says to a turn"
    room = limits.longest((*question.breaks, size) if answer.fresh else question.breaks) - size
    if not over and len(answer.token_ids) >= room:
        return f"{len(answer.token_ids)} tokens leave no place for a turn in the {room} that are left"
    rules = loop.rules
    if (
        rules is not None
        and answer.token_ids
        and not 0 <= min(answer.token_ids) <= max(answer.token_ids) < (rules.vocabulary)
    ):
        return f"a token is not in the vocabulary of {rules.vocabulary}"
    return ""
