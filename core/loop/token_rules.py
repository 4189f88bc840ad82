"""Token rules: what every completion of a model obeys, whoever sampled it."""

from dataclasses import dataclass

import numpy as np

from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, GroupSubmission


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What is known of a model's tokens."""

    vocabulary: int
    """Rows of the embedding; every token id is smaller."""
    end_tokens: frozenset[int]
    """A completion ends with one of these, or at its longest; empty where they are not known."""


def check_token_rules(submission: GroupSubmission, rules: TokenRules) -> None:
    """Check tokens and finish reasons against the model's own rules.

    Raises:
        ContractError: naming the trajectory, the token and the rule.
    """
    ends = np.array(sorted(rules.end_tokens), dtype=np.int64)
    for trajectory in submission.trajectories:
        where = f"group {submission.group_id}, trajectory {trajectory.sample_index}"
        tokens = trajectory.token_ids
        if not tokens.size:
            continue  # refused by the checks against the lease
        if int(tokens.max()) >= rules.vocabulary:
            raise ContractError(
                f"{where}: token id {int(tokens.max())} is not in the vocabulary of {rules.vocabulary}"
            )
        if not rules.end_tokens:
            continue
        ended = np.isin(tokens, ends)
        if ended[:-1].any():
            place = int(np.flatnonzero(ended)[0])
            raise ContractError(f"{where}: goes on after its end token at {place} of {tokens.size}")
        if trajectory.finish_reason is FinishReason.STOP and not ended[-1]:
            raise ContractError(f"{where}: finish_reason=stop, but token {int(tokens[-1])} ends nothing")
