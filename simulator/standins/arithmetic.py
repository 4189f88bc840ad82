"""Arithmetic: what the stand-ins compute instead of a model, cheap and the same everywhere.

Weights are a number, made from the weights before and the batch; a token is a number made from
weights, prompt, seed and position, as with position-keyed sampling. So tokens, rewards, batches and
digests depend on what really happened, and everyone who knows the inputs can check them.
"""

from collections.abc import Sequence

import numpy as np

from antiphon.core.digests import digest_bytes
from antiphon.core.records import Completion, FinishReason, FloatArray, IntArray, TurnLimits, VersionSpan
from antiphon.core.seeds import branch_seed
from antiphon.core.spans import branches, clipped, shifted

VOCABULARY = 64
END_TOKEN = 0
_MASK = (1 << 64) - 1
BASE_WEIGHTS = digest_bytes(b"base weights")


def mix(*numbers: int) -> int:
    """Mix whole numbers into an unsigned 64-bit one.

    >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
    (True, False)
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
        state = (state * 0x94D049BB133111EB) & _MASK
        state ^= state >> 32
    return state


def weights_number(weights_digest: str) -> int:
    """Return the number that stands for the weights of a digest."""
    return int(weights_digest[:16], 16)


def token_at(weights: int, prompt: int, seed: int, position: int) -> tuple[int, float]:
    """Return the token at `position` and its log-probability, nats."""
    drawn = mix(weights, prompt, seed, position)
    # The end comes with probability 1/8; everything else is evenly likely.
    token = END_TOKEN if drawn & 7 == 0 else 1 + (drawn >> 3) % (VOCABULARY - 1)
    return token, -((drawn >> 40) % 4096 + 1) / 1024.0


def prompt_number(token_ids: tuple[int, ...]) -> int:
    """Return the number that stands for a prompt."""
    return mix(*token_ids)


def completion(
    weights_of: dict[int, int], spans: tuple[VersionSpan, ...], prompt: int, seed: int
) -> tuple[IntArray, FloatArray]:
    """Return the tokens [T] and logprobs [T] that a completion with these spans must have.

    `weights_of`: version -> number of its weights.
    """
    found = [
        token_at(weights_of[span.version], prompt, seed, position)
        for span in spans
        for position in range(span.start, span.stop)
    ]
    tokens = np.array([token for token, _ in found], dtype=np.int32)
    return tokens, np.array([logprob for _, logprob in found], dtype=np.float32)


def sampled(
    weights_of: dict[int, int],
    spans: Sequence[VersionSpan],
    prompt: Sequence[int],
    row: Completion,
    seed: int,
) -> tuple[IntArray, FloatArray]:
    """Return the tokens and logprobs of some spans of a row, one after the other, as `completion` does.

    Each branch of a row has a context and a seed of its own, and positions that count from its context.
    """
    found = []
    for branch in branches(prompt, row):
        own = shifted(clipped(spans, branch.start, branch.stop), -branch.start)
        number = prompt_number(tuple(branch.context.tolist()))
        found.append(completion(weights_of, own, number, branch_seed(seed, branch.number)))
    tokens, logprobs = zip(*found, strict=True)
    return np.concatenate(tokens), np.concatenate(logprobs)


def finish_reason(last_token: int) -> FinishReason:
    """Return why a finished completion ended."""
    return FinishReason.STOP if last_token == END_TOKEN else FinishReason.LENGTH


def next_weights(weights_digest: str, batch_digest: str) -> str:
    """Return the digest of the weights that a batch makes of those before it."""
    return digest_bytes(f"{weights_digest} {batch_digest}".encode())


def failure(token_ids: IntArray, failure_rarity: int) -> str:
    """Return why an answer cannot be scored; "" where it can: in all cases where the rarity is 0."""
    hit = failure_rarity and (3 * int(token_ids.sum()) + token_ids.size) % failure_rarity == 0
    return "the scorer failed: ArithmeticError: this answer cannot be scored" if hit else ""


def reward(prompt_key: str, token_ids: IntArray, reward_rarity: int) -> float:
    """Return 0 or 1; the rarer a reward, the more groups lack variance."""
    total = int(token_ids.sum()) + len(prompt_key)
    return float(total % (reward_rarity + 1) == 0)


MOST_OBSERVED = 4
"""Tokens that an environment answers with at most."""


def said(row: IntArray) -> tuple[int, ...] | None:
    """Return what an environment says to a row, or None where it ends the trajectory.

    Among the tokens are such as end a turn of the policy.
    """
    drawn = mix(int(row.sum()), row.size)
    if (drawn >> 40) % 3 == 0:
        return None
    return tuple((drawn >> (8 * place)) % VOCABULARY for place in range(1 + drawn % MOST_OBSERVED))


def turn_answer(
    context: IntArray, row: int, turns: int, limits: TurnLimits
) -> tuple[int, ...] | FinishReason:
    """Return what follows a context after this many turns, or why the trajectory is over.

    `row`: tokens of the row so far, which is longer than the context where that began again.
    """
    answer = said(context)
    if answer is None:
        return FinishReason.ENVIRONMENT
    if turns == limits.turns:
        return FinishReason.TURNS
    return answer if row + len(answer) < limits.tokens else FinishReason.TOKENS


def opening(prompt_key: str) -> tuple[int, ...]:
    """Return the tokens with which a host begins."""
    drawn = mix(*prompt_key.encode())
    return tuple((drawn >> (8 * place)) % VOCABULARY for place in range(1 + drawn % MOST_OBSERVED))


def begins_anew(context: Sequence[int]) -> bool:
    """Return whether a host shows the policy nothing of a context but what follows it.

    It does not where that is how the context began: the same turn would answer it, and so on for ever.
    """
    following = said(np.array(context, dtype=np.int32)) or ()
    return (
        following != tuple(context[: len(following)])
        and mix(sum(map(int, context)), len(context), 1) % 4 == 0
    )
