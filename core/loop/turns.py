"""Turns: what a row says its policy observed, against what its environment answered.

An answer is named by the row that it answers, so a worker that samples this row again gets the same answer.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from blake3 import blake3

from antiphon.core.errors import ContractError
from antiphon.core.loop.events import TurnAnswered
from antiphon.core.records import Completion, GroupSubmission, SampleReward

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
        if tuple(said) != whole[: len(said)] or (stop < row.stop and len(said) < len(whole)):
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
        found.append(SampleReward(x.sample_index, answer.reward, answer.failure, answer.parts, answer.reason))
    return tuple(found)
