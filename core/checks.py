"""Group checks: whether what a worker hands in can be what it was given a lease for.

Legend: G trajectories of one group, T tokens of one completion. A worker is not trusted: every
field that a batch or a gradient depends on is compared with the lease before it is accepted.
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress, pairwise

import numpy as np
from blake3 import blake3

from antiphon.core.errors import ContractError
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import (
    Completion,
    FinishReason,
    FloatArray,
    GroupSubmission,
    PartialTrajectory,
    SampleReward,
    TurnLimits,
    VersionSpan,
)
from antiphon.core.reporting.plain_text import plain
from antiphon.core.spans import check_cover, may_follow, turns_of

_TOKENS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
LOGPROB_CEILING = 1e-6
"""Log-probabilities are at most 0; this much is forgiven to float32 arithmetic."""
LOGPROB_FLOOR = -50.0
"""No token less probable than e^-50 is ever sampled, so a lower log-probability is an engine's error. One of
-1e5 would make a loss that is no number."""
MOST_NUMBER = 1e15
"""Nothing that a worker counts or measures is larger; sums of a run's stay exact."""
MOST_PLACES = 4096
"""Groups that one worker samples at the same time."""
LONGEST_TEXT = 200
"""Characters of what a worker says of itself."""
FAILURE_CHARS = 200
"""Longest reason for a failure that is kept."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What is known of a model's tokens."""

    vocabulary: int
    """Rows of the embedding; every token id is smaller."""
    end_tokens: frozenset[int]
    """A completion ends with one of these, or at its longest; empty where they are not known."""
    stop: Callable[[Sequence[int]], int | None] | None = None
    """Returns how many of a turn's tokens there are when a text of `sampling.stop` is complete; None without
    any."""


def check_number(what: str, value: float, most: float = MOST_NUMBER) -> None:
    """Refuse a number of a worker that cannot be.

    Raises:
        ContractError: when it is not one from 0 to `most`.
    """
    if not 0 <= value <= most:  # what is no number is outside too
        raise ContractError(f"{what} is {value}, not a number from 0 to {most:g}; update this worker")


def check_submission(
    submission: GroupSubmission,
    seeds: Sequence[int],
    max_tokens: int,
    version: int | None,
    newest_version: int,
    published: Container[int] | None = None,
    keeps_cache: bool = False,
    rules: TokenRules | None = None,
    limits: TurnLimits | None = None,
) -> None:
    """Compare a submission with the lease it answers.

    Args:
        submission: what the worker handed in.
        seeds: the seeds of the lease, one per sample.
        max_tokens: longest completion, or turn, allowed.
        version: the only version allowed, where the group names one: all of fixed mode, and evaluations.
        newest_version: no token can come from a newer one.
        published: versions that workers could fetch, or None for every one.
        keeps_cache: whether engines of the run keep their cache over a swap (`rollout.swap_cache=keep`).
        rules: what is known of the model's tokens, or None.
        limits: of a task with turns; None for one without.

    Raises:
        ContractError: naming the group, the field and what was expected.
    """
    group, given = f"group {submission.group_id}", submission.trajectories
    if len(given) != len(seeds):
        raise ContractError(
            f"{group} was handed in with {len(given)} trajectories, but its lease "
            f"asks for {len(seeds)}; hand in whole groups"
        )
    check_number(f"{group}: generation_s", submission.generation_s)
    check_number(f"{group}: cached_tokens", submission.cached_tokens)
    names = [f"{group}, trajectory {index}" for index in range(len(seeds))]
    for index, where in enumerate(names):
        if given[index].sample_index != index:
            raise ContractError(
                f"{where}: sample_index={given[index].sample_index}; trajectories stand in sample order"
            )
        if given[index].seed != seeds[index]:
            raise ContractError(f"{where}: seed={given[index].seed}, but the lease says {seeds[index]}")
        if limits is not None and given[index].finish_reason.ends_turn:
            raise ContractError(f"{where}: its last turn was not answered; ask before it is handed in")
    versions = _allowed(version, newest_version)
    _check_completions(given, 0, names, max_tokens, versions, published, keeps_cache, rules, limits)


def check_piece(
    piece: PartialTrajectory,
    group_id: str,
    *,
    samples: int,
    max_tokens: int,
    version: int | None,
    newest_version: int,
    rules: TokenRules | None = None,
    published: Container[int] | None = None,
    keeps_cache: bool = False,
    limits: TurnLimits | None = None,
) -> None:
    """Refuse a piece, reported by a heartbeat, that no completion of the lease can have.

    The limits are those of `check_submission`; `samples` is the lease's G, and
    `rules` are None where nothing is known of the model's tokens.

    Raises:
        ContractError: naming the group, the field and what was expected.
    """
    where = f"progress of group {group_id}, sample {piece.sample_index}"
    if not 0 <= piece.sample_index < samples:
        raise ContractError(f"{where}: sample_index must be in [0, {samples})")
    if piece.start < 0:
        raise ContractError(f"{where}: start={piece.start} is negative")
    versions = _allowed(version, newest_version)
    _check_completions(
        [piece], piece.start, [where], max_tokens, versions, published, keeps_cache, rules, limits
    )


def _allowed(version: int | None, newest_version: int) -> range:
    return range(newest_version + 1) if version is None else range(version, version + 1)


def _check_completions(
    completions: Sequence[Completion],
    start: int,
    names: Sequence[str],
    max_tokens: int,
    versions: range,
    published: Container[int] | None,
    keeps_cache: bool,
    rules: TokenRules | None,
    limits: TurnLimits | None,
) -> None:
    """Check completions that begin at token `start`, their numbers all at once; `names` are for errors."""
    if limits is not None and limits.hosted and start == 0:
        # Of these the host has said nothing yet, or that they are over before a token was sampled.
        begun = [
            x.token_ids.size + x.logprobs.size + len(x.spans) + len(x.observed) + len(x.breaks) > 0
            for x in completions
        ]
        completions, names = list(compress(completions, begun)), list(compress(names, begun))
    for x, where in zip(completions, names, strict=True):
        tokens, stop = x.token_ids, start + x.token_ids.size
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise ContractError(
                f"{where}: token_ids must be a non-empty row of integers, not {tokens.dtype} "
                f"of shape {tokens.shape}"
            )
        if x.logprobs.shape != tokens.shape:
            raise ContractError(
                f"{where}: {x.logprobs.size} behaviour logprobs for {tokens.size} tokens; one each is needed"
            )
        if limits is not None:
            _check_turns(x, start, max_tokens, limits, where)
        elif stop > max_tokens:
            raise ContractError(f"{where}: {stop} tokens exceed sampling.max_tokens={max_tokens}")
        elif x.finish_reason is (None if stop == max_tokens else FinishReason.LENGTH):
            raise ContractError(
                f"{where}: finish_reason={x.finish_reason} after {stop} tokens, "
                f"but sampling.max_tokens={max_tokens}"
            )
        elif x.observed or x.breaks or not (x.finish_reason is None or x.finish_reason.ends_turn):
            raise ContractError(f"{where}: it has turns, but its task has none")
        check_cover(x.spans, start, stop, where, versions, x.observed)
        _check_versions(x.spans, where, published, keeps_cache)
    if not completions:
        return
    tokens = np.concatenate([x.token_ids for x in completions])
    logprobs = np.concatenate([x.logprobs for x in completions])
    ends = list(accumulate(x.token_ids.size for x in completions))

    def holder(place: int) -> int:
        return bisect_right(ends, place)

    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0:
        raise ContractError(f"{names[holder(int(tokens.argmin()))]}: token id {smallest} is negative")
    # What is no number is neither above nor below anything, so it fails this too.
    if not (float(logprobs.min()) >= LOGPROB_FLOOR and float(logprobs.max()) <= LOGPROB_CEILING):
        index = holder(int(((logprobs >= LOGPROB_FLOOR) & (logprobs <= LOGPROB_CEILING)).argmin()))
        row = completions[index].logprobs
        raise ContractError(
            f"{names[index]}: behaviour logprobs must lie in [{LOGPROB_FLOOR:g}, 0] nats, "
            f"but lie in [{row.min():g}, {row.max():g}]; look at the worker's engine"
        )
    for x, where in zip(completions, names, strict=True):
        if any(x.logprobs[a - x.start : b - x.start].any() for a, b in x.observed):
            raise ContractError(f"{where}: observed tokens have no log-probability; theirs must be 0")
    if rules is None:
        return
    if largest >= rules.vocabulary:
        where = names[holder(int(tokens.argmax()))]
        raise ContractError(f"{where}: token id {largest} is not in the vocabulary of {rules.vocabulary}")
    if not rules.end_tokens and rules.stop is None:
        return
    ended = np.zeros(tokens.size, dtype=bool)
    for token in rules.end_tokens:  # a model has a few, and each is found faster than all by `np.isin`
        ended |= tokens == token
    if rules.stop is not None:
        for x, end in zip(completions, ends, strict=True):
            for first, last in turns_of(x, x.start):
                if (size := rules.stop(x.token_ids[first - x.start : last - x.start].tolist())) is not None:
                    ended[end - x.stop + first + size - 1] = True
    for x, where, end in zip(completions, names, ends, strict=True):
        begin = end - x.token_ids.size
        for first, last in x.observed:  # the environment may write any token, and a turn ends before it does
            ended[begin + max(first - x.start - 1, 0) : begin + last - x.start] = False
        if x.observed and x.observed[-1][1] == x.stop:
            continue
        # A text that ends a turn may have begun before the piece; the whole row is looked at later.
        shows = rules.stop is None or x.start == 0 or x.observed
        if x.finish_reason is FinishReason.STOP and shows and not ended[end - 1]:
            told = f"{where}: finish_reason=stop, but token {tokens[end - 1]} is no end token"
            raise ContractError(told if rules.stop is None else f"{told} and completes no text that stops")
        if x.finish_reason is None and ended[end - 1]:  # else the next piece could go on after it
            raise ContractError(f"{where}: token {tokens[end - 1]} ends it, but it has no finish_reason")
    ended[[end - 1 for end in ends]] = False
    if ended.any():
        place = int(ended.argmax())
        index = holder(place)
        size = completions[index].token_ids.size
        at = place - ends[index] + size
        told = "its end token" if rules.stop is None else "an end token or a text of sampling.stop"
        raise ContractError(f"{names[index]}: continues after {told} at {at} of {size}")


def _check_turns(x: Completion, start: int, max_tokens: int, limits: TurnLimits, where: str) -> None:
    """Check how long the turns of a completion are, as far as it shows them from token `start` on."""
    stop = start + x.token_ids.size
    if stop > limits.tokens:
        raise ContractError(f"{where}: {stop} tokens exceed the {limits.tokens} of its lease")
    ends = [first for first, _ in x.observed]
    if start == 0 and (0 in ends) != limits.hosted:
        reason = "sampled ones, before what its host says" if limits.hosted else "observed ones, a prompt's"
        raise ContractError(f"{where}: its first tokens are {reason}")
    if x.breaks != tuple(end for end in ends if limits.hosted and end and end in x.breaks):
        raise ContractError(f"{where}: its context breaks at {x.breaks}, where no host began a branch")
    # Where a break may have come before a piece, how long its context is does not show.
    contexts = x.breaks if limits.hosted and start else (0, *x.breaks)
    for begin, end in pairwise((*contexts, stop)):
        if limits.context is not None and end - begin > limits.context:
            raise ContractError(f"{where}: a context of {end - begin} tokens exceeds {limits.context}")
    turns = turns_of(x, start)
    if start == 0 and len(turns) > limits.turns:
        raise ContractError(f"{where}: {len(turns)} turns exceed environment.max_turns={limits.turns}")
    if longest := next((b - a for a, b in turns if b - a > max_tokens), 0):
        raise ContractError(f"{where}: a turn of {longest} tokens exceeds sampling.max_tokens={max_tokens}")
    last = turns[-1] if turns else (stop, stop)
    open_turn = last[1] == stop and last[0] < stop
    if x.finish_reason is not None and x.finish_reason.ends_turn and not open_turn:
        raise ContractError(f"{where}: finish_reason={x.finish_reason} after an observed token")
    # Where a piece begins within a turn, how long that turn is does not show.
    whole = (last[0] != start or start == 0) and len(contexts) > 0
    full = stop == limits.longest(x.breaks) or last[1] - last[0] == max_tokens
    if whole and open_turn and x.finish_reason is (None if full else FinishReason.LENGTH):
        raise ContractError(
            f"{where}: finish_reason={x.finish_reason} after a turn of {last[1] - last[0]} tokens, but "
            f"sampling.max_tokens={max_tokens} and {limits.tokens} tokens in all"
        )


def _check_versions(
    spans: Sequence[VersionSpan], where: str, published: Container[int] | None, keeps_cache: bool
) -> None:
    """Check that what the spans name can be audited: versions that were published, each after older ones, and
    a kept cache only where the run keeps it over a swap: audits do not judge the tokens after that.
    """
    before: VersionSpan | None = None
    for span in spans:
        if span.kept_cache and not keeps_cache:
            raise ContractError(
                f"{where}: tokens from {span.start} on were sampled over a kept cache, but the run has "
                "rollout.swap_cache=recompute"
            )
        if published is not None and span.version not in published:
            raise ContractError(
                f"{where}: sampled with version {span.version}, which was never published; "
                "sample with an announced snapshot"
            )
        if before is not None and span.version < before.version:
            raise ContractError(
                f"{where}: sampled with version {span.version} after version {before.version}; "
                "the versions along a completion never fall"
            )
        if span.kept_cache and (span.start == 0 or (before is not None and not may_follow(before, span))):
            raise ContractError(
                f"{where}: tokens from {span.start} on were sampled over a kept cache, but no swap came "
                "before them"
            )
        before = span


def check_rewards(
    group_id: str,
    sample_rewards: Sequence[SampleReward],
    samples: int,
    within: RewardRange = UNIT_RANGE,
) -> tuple[SampleReward, ...]:
    """Return the rewards [G] of a group by sample; the reasons of failures are cut to one short line.

    Raises:
        ContractError: when one is missing, doubled or not `within` the range that the environment states, or
            what failed has one other than 0.
    """
    by_sample = {sample_reward.sample_index: sample_reward for sample_reward in sample_rewards}
    if len(sample_rewards) != samples or set(by_sample) != set(range(samples)):
        raise ContractError(
            f"group {group_id} needs one reward for each of its samples 0..{samples - 1}, but got "
            f"{sorted(sample_reward.sample_index for sample_reward in sample_rewards)}"
        )
    for index, given in by_sample.items():
        low, high = (0.0, 0.0) if given.failure else within
        if not low <= given.reward <= high:  # what is no number is outside too
            raise ContractError(
                f"group {group_id}: the reward of sample {index} is {given.reward}; environments must "
                f"score in [{within[0]:g}, {within[1]:g}], and what could not be scored has 0"
            )
    ordered = (by_sample[index] for index in range(samples))
    return tuple(replace(one, failure=failure_line(one.failure)) if one.failure else one for one in ordered)


def check_reference(group_id: str, logprobs: Sequence[FloatArray], token_counts: Sequence[int]) -> None:
    """Check a reference model's logprobs of a group, [G] of [T]; `token_counts` is empty without one.

    Raises:
        ContractError: when they are not one finite number, at most 0, for each token.
    """
    if [one.size for one in logprobs] != list(token_counts):
        raise ContractError(
            f"group {group_id} has {list(token_counts)} tokens to score by the reference model, but got "
            f"{[one.size for one in logprobs]} log-probabilities; give all services the run's configuration"
        )
    for index, one in enumerate(logprobs):
        if not (np.isfinite(one) & (one <= LOGPROB_CEILING)).all():
            raise ContractError(
                f"group {group_id}: the reference model gave sample {index} a log-probability that is no "
                "finite number up to 0; see that reference.model computes finite logits"
            )


def failure_line(reason: str) -> str:
    """Return the reason of a failure as one short line."""
    return plain(" ".join(reason[:FAILURE_CHARS].split())) or "no reason was given"


def submission_digest(submission: GroupSubmission) -> str:
    """Return the digest of what was sampled, regardless of the worker and of the time it took."""
    parts = [submission.group_id.encode()]
    for x in submission.trajectories:
        tokens, logprobs = x.token_ids, x.logprobs
        spans = ", ".join([f"[{s.version}, {s.start}, {s.stop}, {s.kept_cache}]" for s in x.spans])
        head = (
            f"[{x.sample_index}, {x.seed}, {tokens.size}, [{spans}]]"
            f"{x.finish_reason.value}{x.observed or ''}{x.breaks or ''}"
        )
        # Nearly always they have the type already, and to ask is cheaper than to convert.
        parts += (
            head.encode(),
            (tokens if tokens.dtype is _TOKENS else tokens.astype(_TOKENS)).tobytes(),
            (logprobs if logprobs.dtype is _LOGPROBS else logprobs.astype(_LOGPROBS)).tobytes(),
        )
    return blake3(b"".join(parts)).hexdigest()
