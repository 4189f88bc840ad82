"""Group checks: whether what a worker hands in can be what it was given a lease for.

Legend: G trajectories of one group, T tokens of one completion. A worker is not trusted: every
field that a batch or a gradient depends on is compared with the lease before it is accepted.
"""

import math
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, FloatArray, GroupSubmission, RewardedGroup, Trajectory

LOGPROB_CEILING = 1e-6
"""Log-probabilities are at most 0; this much is forgiven to float32 arithmetic."""


def check_submission(
    submission: GroupSubmission,
    seeds: Sequence[int],
    max_tokens: int,
    version: int | None,
    newest_version: int,
) -> None:
    """Compare a submission with the lease it answers.

    Args:
        submission: what the worker handed in.
        seeds: the seeds of the lease, one per sample.
        max_tokens: longest completion allowed.
        version: fixed mode: the only version allowed, else None.
        newest_version: no token can come from a newer one.

    Raises:
        ContractError: naming the group, the field and what was expected.
    """
    group = f"group {submission.group_id}"
    if len(submission.trajectories) != len(seeds):
        raise ContractError(
            f"{group} was handed in with {len(submission.trajectories)} trajectories, but its lease "
            f"asks for {len(seeds)}; hand in whole groups"
        )
    if not math.isfinite(submission.generation_s) or submission.generation_s < 0:
        raise ContractError(f"{group}: generation_s={submission.generation_s} is no duration")
    possible = _numbers_possible(submission.trajectories)
    for index, trajectory in enumerate(submission.trajectories):
        where = f"{group}, trajectory {index}"
        if trajectory.sample_index != index:
            raise ContractError(
                f"{where}: sample_index={trajectory.sample_index}; trajectories stand in sample order"
            )
        if trajectory.seed != seeds[index]:
            raise ContractError(f"{where}: seed={trajectory.seed}, but the lease says {seeds[index]}")
        _check_row(trajectory, where, max_tokens)
        if not possible:
            _check_numbers(trajectory, where)
        _check_spans(trajectory, where, version, newest_version)


def _numbers_possible(trajectories: Sequence[Trajectory]) -> bool:
    """Tell at once whether every token and log-probability can be one; if not, each says by itself."""
    tokens = np.concatenate([trajectory.token_ids for trajectory in trajectories], axis=None)
    logprobs = np.concatenate([trajectory.behaviour_logprobs for trajectory in trajectories], axis=None)
    if not tokens.size or not logprobs.size:
        return False
    return int(tokens.min()) >= 0 and _in_range(logprobs)


def _in_range(logprobs: FloatArray) -> bool:
    # What is no number is neither above nor below anything, so it fails this too.
    return float(logprobs.min()) > -math.inf and float(logprobs.max()) <= LOGPROB_CEILING


def _check_numbers(trajectory: Trajectory, where: str) -> None:
    tokens, logprobs = trajectory.token_ids, trajectory.behaviour_logprobs
    if int(tokens.min()) < 0:
        raise ContractError(f"{where}: token id {int(tokens.min())} is negative")
    if not _in_range(logprobs):
        raise ContractError(
            f"{where}: behaviour logprobs must be finite and at most 0, "
            f"but lie in [{logprobs.min()}, {logprobs.max()}]"
        )


def _check_row(trajectory: Trajectory, where: str, max_tokens: int) -> None:
    tokens, logprobs = trajectory.token_ids, trajectory.behaviour_logprobs
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
        raise ContractError(
            f"{where}: token_ids must be a non-empty row of integers, not {tokens.dtype} "
            f"of shape {tokens.shape}"
        )
    if logprobs.shape != tokens.shape:
        raise ContractError(
            f"{where}: {logprobs.size} behaviour logprobs for {tokens.size} tokens; one each is needed"
        )
    if tokens.size > max_tokens:
        raise ContractError(f"{where}: {tokens.size} tokens exceed sampling.max_tokens={max_tokens}")
    if trajectory.finish_reason is FinishReason.LENGTH and tokens.size != max_tokens:
        raise ContractError(
            f"{where}: finish_reason=length after {tokens.size} tokens, but sampling.max_tokens={max_tokens}"
        )


def _check_spans(trajectory: Trajectory, where: str, version: int | None, newest_version: int) -> None:
    at = 0
    for span in trajectory.spans:
        if span.start != at or span.stop <= span.start:
            raise ContractError(
                f"{where}: version spans must cover [0, {trajectory.token_ids.size}) in order without "
                f"gaps, but one is [{span.start}, {span.stop}) where {at} was due"
            )
        at = span.stop
        if version is not None and span.version != version:
            raise ContractError(
                f"{where}: sampled with version {span.version}, but the lease demands version {version}"
            )
        if not 0 <= span.version <= newest_version:
            raise ContractError(
                f"{where}: sampled with version {span.version}, but versions 0..{newest_version} exist"
            )
    if at != trajectory.token_ids.size:
        raise ContractError(
            f"{where}: version spans cover [0, {at}), but there are {trajectory.token_ids.size} tokens"
        )


def check_rewards(group_id: str, rewarded_groups: Sequence[RewardedGroup], samples: int) -> tuple[float, ...]:
    """Return the rewards [G] of a group by sample.

    Raises:
        ContractError: when one is missing, doubled or not finite.
    """
    by_sample = {rewarded_group.sample_index: rewarded_group.reward for rewarded_group in rewarded_groups}
    if len(rewarded_groups) != samples or set(by_sample) != set(range(samples)):
        raise ContractError(
            f"group {group_id} needs one reward for each of its samples 0..{samples - 1}, but got "
            f"{sorted(rewarded_group.sample_index for rewarded_group in rewarded_groups)}"
        )
    for index, reward in by_sample.items():
        if not math.isfinite(reward):
            raise ContractError(
                f"group {group_id}: the reward of sample {index} is {reward}; rewards must be finite"
            )
    return tuple(by_sample[index] for index in range(samples))


def submission_digest(submission: GroupSubmission) -> str:
    """Return the digest of what was sampled, whoever sampled it and however long that took."""
    told = bytearray(submission.group_id.encode())
    for trajectory in submission.trajectories:
        spans = [[span.version, span.start, span.stop] for span in trajectory.spans]
        head = [trajectory.sample_index, trajectory.seed, trajectory.token_ids.size, spans]
        told += f"{head}{trajectory.finish_reason}".encode()
        told += trajectory.token_ids.astype("<i4", copy=False).tobytes()
        told += trajectory.behaviour_logprobs.astype("<f4", copy=False).tobytes()
    return blake3(told).hexdigest()
