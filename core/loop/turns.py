"""Turns: what a row says its policy observed, against what its environment answered.

An answer is named by the row that it answers, so a worker that samples this row again gets the same answer.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from blake3 import blake3

from antiphon.core.errors import ContractError
from antiphon.core.loop.events import TurnAnswered, TurnSampled
from antiphon.core.records import (
    Completion,
    FinishReason,
    GroupSubmission,
    PartialTrajectory,
    SampleReward,
    VersionSpan,
)
from antiphon.core.spans import joined, rest_of

DIGEST_BYTES = 16
Answers = Mapping[str, TurnAnswered]
"""The answers to the turns of one group, by `answer_key`."""


def answer_key(sample_index: int, row_digest: str) -> str:
    """Return the name of an answer within its group."""
    return f"{sample_index}/{row_digest}"


def _digests(row: Completion) -> Iterator[str]:
    """Yield the digest of what stands before each observed range, then that of the row."""
    tokens, hashed, at = np.ascontiguousarray(row.token_ids, dtype="<i4"), blake3(), 0
    for stop in (*(start for start, _ in row.observed), tokens.size):
        hashed.update(tokens[at:stop].tobytes())
        hashed.update(int(stop).to_bytes(4, "little"))  # so that the ranges are part of it
        yield hashed.hexdigest(DIGEST_BYTES)
        if stop in row.breaks:
            hashed.update(b"break")
        at = stop


def check_answered(row: Completion, sample_index: int, answers: Answers, where: str) -> str:
    """Check that a row observed what the environment answered, and ended as it said; return its digest.

    It begins at its first token, and may end within an answer.

    Raises:
        ContractError: naming the first tokens that no answer has, or an end that was not said.
    """
    digests = list(_digests(row))
    for (start, stop), digest in zip(row.observed, digests, strict=False):
        answer, said = answers.get(answer_key(sample_index, digest)), row.token_ids[start:stop].tolist()
        whole = () if answer is None else answer.token_ids
        fresh = answer is not None and answer.fresh
        partly = stop < row.stop and len(said) < len(whole)
        if tuple(said) != whole[: len(said)] or partly or fresh != (start in row.breaks):
            raise ContractError(
                f"{where}: tokens [{start}, {stop}) are not what its environment answered; "
                "hand in what the coordinator said"
            )
    if row.finish_reason is not None and not row.finish_reason.ends_turn:
        answer = answers.get(answer_key(sample_index, digests[-1]))
        ended = "goes on" if answer is None or not answer.finish_reason else answer.finish_reason
        if ended != row.finish_reason.value:
            raise ContractError(
                f"{where}: it ended with finish_reason={row.finish_reason}, but its environment said: {ended}"
            )
    return digests[-1]


def rewards_of(submission: GroupSubmission, answers: Answers) -> tuple[SampleReward, ...]:
    """Return the rewards [G] of a group whose environment answered every turn.

    Raises:
        ContractError: when a trajectory observed something else, or did not end as the environment said.
    """
    found = []
    for x in submission.trajectories:
        where = f"group {submission.group_id}, trajectory {x.sample_index}"
        digest = check_answered(x, x.sample_index, answers, where)
        answer = answers[answer_key(x.sample_index, digest)]
        if x.sampled_tokens:
            told = answer.reward, answer.failure, answer.parts, answer.reason
            found.append(SampleReward(x.sample_index, *told))
        else:
            failure = answer.failure or "its host ended it before a token was sampled"
            found.append(SampleReward(x.sample_index, 0.0, failure))
    return tuple(found)


def sampled_turn(
    row: PartialTrajectory, known: Sequence[TurnSampled], group_id: str, worker_id: str, now: float
) -> TurnSampled | None:
    """Return the event of a turn that ended with `row`, the whole of a sample; None where it is `known`."""
    before = row_of(known)
    size = min(row.stop, before.stop) if before is not None else 0
    if before is not None and np.array_equal(row.token_ids[:size], before.token_ids[:size]):
        piece = rest_of(row, before.stop)
    else:  # it was begun again, by a worker that could not go on
        piece = row
    if piece is None or not piece.token_ids.size:
        return None
    assert piece.finish_reason is not None, "a turn has ended"
    return TurnSampled(
        group_id=group_id,
        sample_index=row.sample_index,
        worker_id=worker_id,
        start=piece.start,
        token_ids=b64encode(np.asarray(piece.token_ids, "<i4").tobytes()).decode(),
        logprobs=b64encode(np.asarray(piece.logprobs, "<f4").tobytes()).decode(),
        spans=tuple((s.version, s.start, s.stop, s.kept_cache) for s in piece.spans),
        observed=piece.observed,
        breaks=piece.breaks,
        finish_reason=piece.finish_reason.value,
        at_s=now,
    )


def is_over(sample_index: int, turns: Sequence[TurnSampled], answers: Answers) -> bool:
    """Return whether the row that these turns of a sample make was answered with the trajectory's end."""
    nothing = PartialTrajectory(np.empty(0, np.int32), np.empty(0, np.float32), (), sample_index=sample_index)
    digest = check_answered(row_of(turns) or nothing, sample_index, answers, "a kept row")
    answer = answers.get(answer_key(sample_index, digest))
    return answer is not None and bool(answer.finish_reason)


def piece_of_turn(event: TurnSampled) -> PartialTrajectory:
    """Return the tokens that an event has of a sample."""
    return PartialTrajectory(
        np.frombuffer(b64decode(event.token_ids), "<i4").astype(np.int32),
        np.frombuffer(b64decode(event.logprobs), "<f4").astype(np.float32),
        tuple(VersionSpan(*span) for span in event.spans),
        FinishReason(event.finish_reason),
        sample_index=event.sample_index,
        observed=event.observed,
        breaks=event.breaks,
    )


def row_of(turns: Sequence[TurnSampled]) -> PartialTrajectory | None:
    """Return the row of a sample, from the events of its turns in order; None where there are none."""
    return joined([piece_of_turn(event) for event in turns]) if turns else None
