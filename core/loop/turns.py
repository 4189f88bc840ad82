"""Turns: what a row says its policy observed, against what its environment answered.

An answer is named by the row that it answers, so whoever samples the same row again gets the same answer.
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


def row_digest(row: Completion) -> str:
    """Return the digest of a whole row, 32 hex digits."""
    *_, last = _digests(row)
    return last


def _digests(row: Completion) -> Iterator[str]:
    """Yield the digest of what stands before each observed range, then that of the row."""
    tokens, hashed, at = np.ascontiguousarray(row.token_ids, dtype="<i4"), blake3(), 0
    for stop in (*(start for start, _ in row.observed), tokens.size):
        hashed.update(tokens[at:stop].tobytes())
        yield hashed.hexdigest(DIGEST_BYTES)
        at = stop


def check_observed(row: Completion, sample_index: int, answers: Answers, where: str) -> None:
    """Check that what a row observed, from its first token on, is what the environment answered.

    A row may end within an answer.

    Raises:
        ContractError: naming the first tokens that no answer has.
    """
    for (start, stop), digest in zip(row.observed, _digests(row), strict=False):
        answer, said = answers.get(answer_key(sample_index, digest)), row.token_ids[start:stop].tolist()
        whole = () if answer is None else answer.token_ids
        if tuple(said) != whole[: len(said)] or (stop < row.stop and len(said) < len(whole)):
            raise ContractError(
                f"{where}: tokens [{start}, {stop}) are not what its environment answered; "
                "hand in what the coordinator said"
            )


def rewards_of(submission: GroupSubmission, answers: Answers) -> tuple[SampleReward, ...]:
    """Return the rewards [G] of a group whose environment answered every turn.

    Raises:
        ContractError: when a trajectory observed something else, or did not end as the environment said.
    """
    found = []
    for x in submission.trajectories:
        where = f"group {submission.group_id}, trajectory {x.sample_index}"
        check_observed(x, x.sample_index, answers, where)
        answer = answers.get(answer_key(x.sample_index, row_digest(x)))
        if answer is None or answer.finish_reason != x.finish_reason.value:
            said = "goes on" if answer is None or not answer.finish_reason else answer.finish_reason
            raise ContractError(
                f"{where}: it ended with finish_reason={x.finish_reason}, but its environment said: {said}"
            )
        found.append(SampleReward(x.sample_index, answer.reward, answer.failure))
    return tuple(found)
