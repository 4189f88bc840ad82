"""Sealing: rewarded groups become two immutable files and one event.

The first file is what the step uses, and its digest is the batch's; the second holds timings,
worker and lease ids. Rows stand in the order of the groups, then of the samples.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.config import RunConfig
from antiphon.core.coordinator.loop_state import PromptSource
from antiphon.core.drafting.statistics import add_statistics
from antiphon.core.loop.advantages import (
    OwnAdvantage,
    batch_advantages,
    check_advantage,
    group_advantages,
    overlong_punishment,
    own_advantages,
)
from antiphon.core.loop.assembly import SealPlan
from antiphon.core.loop.events import BatchSealed, EvaluationFinished
from antiphon.core.loop.group_state import (
    EvaluationState,
    GroupOutcome,
    GroupState,
    Tally,
    heldout_group_id,
    mean_parts,
)
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import BatchRow, FloatArray, GroupSubmission, Prompt, RowTiming, Trajectory
from antiphon.core.reference_config import kl_estimate
from antiphon.environments.outside import import_named
from antiphon.lineage.rollout_table import DRAFTING_COLUMNS, LeftOut, encode_batch, encode_timings
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.journal.submissions import Submissions

Sampled = tuple[GroupSubmission, Prompt]
"""What was handed in for a group, and the prompt that it was sampled from."""


def seal_batch(
    plan: SealPlan,
    sampled: Mapping[str, Sampled],
    since_seal: Tally,
    config: RunConfig,
    store: ArtifactStore,
    kept: Sequence[BatchRow] = (),
    references: Mapping[str, Sequence[FloatArray]] | None = None,
) -> BatchSealed:
    """Write the files of a batch and return the event that makes it final.

    Args:
        plan: which groups, in order.
        sampled: every used group, by id, and where completions that were cut off do not count, every filtered
            one.
        since_seal: what left the buffer since the batch before.
        config: says how advantages are made and what counts.
        store: takes the files; they are on disk when this returns.
        kept: the rows of `left_out_rows`.
        references: the reference model's logprobs, [G] of [T], of every used group, by id; None without.

    Raises:
        UnavailableError: when the store cannot be written.
    """
    rows: list[BatchRow] = []
    timings: list[RowTiming] = []
    # With filter=refill their places went to other groups, so that the step divides by those.
    dropped = plan.filtered if config.loop.filter == "drop" else ()
    found = _advantages(plan.used, dropped, sampled, config, references or {})
    for group, advantages in zip(plan.used, found, strict=True):
        own = _rows(group, *sampled[group.group_id], advantages)
        if references:
            given = references[group.group_id]
            own = [replace(row, reference_logprobs=one) for row, one in zip(own, given, strict=True)]
        rows.extend(own)
        timings.extend(_timings(group))
    counted = [(group, _counted_lengths(group, sampled, config.algorithm)) for group in dropped]
    left_out = [LeftOut(group.group_id, len(lengths), sum(lengths)) for group, lengths in counted]
    recomputed = config.rollout.logprobs == "learner"
    digest = store.put(encode_batch(rows, left_out, recomputed))
    timings_digest = store.put(encode_timings(timings))
    rewarded = (*plan.used, *plan.filtered)
    outcomes = [*map(GroupOutcome.of, rewarded), *since_seal.filtered]
    rewards = [reward for group in outcomes for reward in group.rewards]
    lengths = [length for group in outcomes for length in group.token_counts]
    staleness = Counter(plan.step - row.oldest_version for row in rows if row.spans)
    return BatchSealed(
        step=plan.step,
        group_ids=tuple(group.group_id for group in plan.used),
        filtered_ids=tuple(group.group_id for group in plan.filtered),
        digest=digest,
        timings_digest=timings_digest,
        trajectories=len(rows),
        groups_filtered=len(plan.filtered) + len(since_seal.filtered),
        groups_dropped_stale=since_seal.groups_stale,
        tokens=sum(row.sampled_tokens for row in rows),
        reward_mean=math.fsum(rewards) / max(1, len(rewards)),
        completion_tokens_mean=sum(lengths) / max(1, len(lengths)),
        staleness=tuple(sorted(staleness.items())),
        drafting=add_statistics([group.drafting for group in outcomes]),
        trajectories_failed=sum(group.failed for group in outcomes),
        tokens_dropped_stale=since_seal.tokens_stale,
        samples_digest=store.put(encode_batch(kept)) if kept else "",
        reward_parts=mean_parts(group.parts for group in outcomes),
    )


async def left_out_rows(
    plan: SealPlan, since_seal: Tally, submissions: Submissions, prompts: PromptSource
) -> list[BatchRow]:
    """Return the completions of the groups that a step was sampled for and that its batch leaves out.

    Nothing trains on them; without them nothing would show why a run learns nothing.
    """
    rows = []
    filtered = [*map(GroupOutcome.of, plan.filtered), *since_seal.filtered]
    for group in sorted(filtered, key=lambda group: group.group_id):
        # All that were scored have the same reward.
        rewards = (group.rewards[0] if group.rewards else 0.0,) * len(group.token_counts)
        prompt = prompts.prompt("train", group.prompt_index)
        told = group.failures, group.said
        rows += await _kept_rows(group.group_id, prompt, rewards, *told, submissions)
    return rows


async def answers_of(
    version: int, evaluation: EvaluationState, submissions: Submissions, prompts: PromptSource
) -> list[BatchRow]:
    """Return the held-out answers of a version, in the order of their prompts."""
    rows = []
    for index, rewards in sorted(evaluation.rewards.items()):
        group_id, prompt = heldout_group_id(version, index), prompts.prompt("heldout", index)
        told = evaluation.failures.get(index, {}), evaluation.said.get(index, {})
        rows += await _kept_rows(group_id, prompt, rewards, *told, submissions)
    return rows


def finish_evaluation(
    version: int,
    evaluation: EvaluationState,
    rows: Sequence[BatchRow],
    store: ArtifactStore,
    within: RewardRange = UNIT_RANGE,
) -> EvaluationFinished:
    """Write the answers of an evaluation and return the event that ends it; `within` is the range of rewards.

    Raises:
        UnavailableError: when the store cannot be written.
    """
    digest = store.put(encode_batch(rows)) if rows else ""
    return EvaluationFinished(
        version,
        *evaluation.means(within[0]),
        samples_digest=digest,
        samples=evaluation.samples,
        best_of_k=evaluation.best_of_k(within[0]) if evaluation.samples > 1 else None,
        reward_range=within,
    )


async def _kept_rows(
    group_id: str,
    prompt: Prompt,
    rewards: Sequence[float],
    failures: Mapping[int, str],
    said: Mapping[int, str],
    submissions: Submissions,
) -> list[BatchRow]:
    submission = await submissions.find(group_id)
    if submission is None:
        return []  # an older version kept only some
    given = [0.0 if index in failures else reward for index, reward in enumerate(rewards)]
    return [
        replace(
            _row(group_id, prompt, trajectory, given[index], 0.0, failures.get(index, "")),
            said=said.get(index, ""),
        )
        for index, trajectory in enumerate(submission.trajectories)
    ]


def _row(
    group_id: str, prompt: Prompt, trajectory: Trajectory, reward: float, advantage: float, failure: str
) -> BatchRow:
    return BatchRow(
        group_id=group_id,
        prompt_key=prompt.key,
        sample_index=trajectory.sample_index,
        prompt_token_ids=np.asarray(prompt.token_ids, dtype=np.int32),
        token_ids=trajectory.token_ids,
        logprobs=trajectory.logprobs,
        spans=trajectory.spans,
        finish_reason=trajectory.finish_reason,
        observed=trajectory.observed,
        breaks=trajectory.breaks,
        reward=reward,
        advantage=advantage,
        failure=failure,
    )


def _counts(
    group: GroupState, sampled: Mapping[str, Sampled], algorithm: AlgorithmSection
) -> npt.NDArray[np.bool_]:
    """Return which trajectories [G] count as sampled: those scored, and not cut off where that is masked."""
    counts = np.array([index not in group.failures for index in range(group.samples)])
    if algorithm.truncated_completions == "mask":
        counts &= [not x.finish_reason.cut_off for x in sampled[group.group_id][0].trajectories]
    return counts


def _counted_lengths(
    group: GroupState, sampled: Mapping[str, Sampled], algorithm: AlgorithmSection
) -> list[int]:
    counts = _counts(group, sampled, algorithm)
    return [length for length, counted in zip(group.token_counts, counts, strict=True) if counted]


@cache
def own_advantage(reference: str) -> OwnAdvantage:
    """Return the user's function that `algorithm.advantage` names, tried out.

    Raises:
        ConfigError: when there is none, or it is no advantage.
    """
    called = f"algorithm.advantage={reference}"
    function: OwnAdvantage = import_named(called, reference, "function")
    check_advantage(called, function)
    return function


def _advantages(
    used: Sequence[GroupState],
    dropped: Sequence[GroupState],
    sampled: Mapping[str, Sampled],
    config: RunConfig,
    references: Mapping[str, Sequence[FloatArray]],
) -> list[npt.NDArray[np.float64]]:
    """Return the advantages [G] of each used group of a batch.

    Those dropped are part of its deviation, so that the filter does not change the update.
    """
    algorithm, most = config.algorithm, config.sampling.max_tokens
    over_batch = algorithm.advantage is None and "batch" in (algorithm.deviation, algorithm.baseline)
    groups = [*used, *dropped] if over_batch else used
    counted = [_counts(group, sampled, algorithm) for group in groups]
    rewards = [np.asarray(group.rewards, dtype=np.float64) for group in groups]
    lengths = [np.asarray(group.token_counts, dtype=np.int64) for group in groups]
    if (margin := algorithm.overlong_margin_tokens) is not None:
        for own, tokens in zip(rewards, lengths, strict=True):
            own += algorithm.overlong_penalty * overlong_punishment(tokens, most, margin)
    if weight := config.reference.of_rewards:
        for group, own in zip(groups, rewards, strict=True):
            if (given := references.get(group.group_id)) is None:  # one that is dropped was not scored
                continue
            pairs = zip(sampled[group.group_id][0].trajectories, given, strict=True)
            kind = config.reference.kl_estimator
            own -= weight * np.array([kl_estimate(kind, x.logprobs, one).sum() for x, one in pairs])
    if name := algorithm.advantage:
        return own_advantages(f"algorithm.advantage={name}", own_advantage(name), rewards, lengths, counted)
    normalise, baseline = algorithm.divides_by_deviation, algorithm.baseline
    if algorithm.deviation == "batch" or baseline == "batch":
        return batch_advantages(rewards, counted, normalise, baseline)[: len(used)]
    return [
        group_advantages(own, normalise, baseline, among) for own, among in zip(rewards, counted, strict=True)
    ]


def _rows(
    group: GroupState, submission: GroupSubmission, prompt: Prompt, advantages: npt.NDArray[np.float64]
) -> list[BatchRow]:
    return [
        _row(
            group.group_id,
            prompt,
            trajectory,
            group.rewards[index],
            float(advantages[index]),
            group.failures.get(index, ""),
        )
        for index, trajectory in enumerate(submission.trajectories)
    ]


def _timings(group: GroupState) -> list[RowTiming]:
    drafting = group.drafting
    counts = {} if drafting is None else {name: getattr(drafting, name) for name in DRAFTING_COLUMNS}
    return [
        RowTiming(
            group_id=group.group_id,
            sample_index=index,
            worker_id=group.worker_id,
            lease_id=group.lease_id,
            attempt=group.attempt,
            generation_s=group.generation_s,
            leased_at_s=group.leased_at_s,
            submitted_at_s=group.submitted_at_s,
            rewarded_at_s=group.rewarded_at_s,
            said=group.said.get(index, ""),
            **counts,
        )
        for index in range(group.samples)
    ]
