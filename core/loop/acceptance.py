"""Acceptance: what the coordinator takes in and what it refuses, decided from state alone.

A group is accepted once, a step is committed once and in order, and the answer to a repetition
is the answer that was given before.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from antiphon.core.checks import FAILURE_CHARS, TokenRules, check_submission, submission_digest
from antiphon.core.config import RunConfig
from antiphon.core.drafting.statistics import believed_statistics
from antiphon.core.errors import ContractError, IntegrityError, RefusedError
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import (
    GroupPhase,
    GroupState,
    mean_parts,
    newest_scored,
    remembered_scores,
)
from antiphon.core.loop.partials import KeptGroup, authorship
from antiphon.core.loop.places import window_of
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import (
    GroupSubmission,
    SampleReward,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
    TurnLimits,
)
from antiphon.core.trust.worker_names import name_of_worker


def newest_possible_version(state: RunState) -> int:
    """Return the newest version that any token can come from."""
    return max(len(state.commits), state.newest_version or 0)


def max_tokens_of(config: RunConfig, group: GroupState) -> int:
    """Return the most tokens of one completion, or turn, of a group."""
    return config.sampling.max_tokens if group.request is None else group.request.sampling.max_tokens


def check_held_version(state: RunState, worker_id: str, version: int | None) -> None:
    """Check the version that a worker says it holds: what others may begin depends on the newest one held.

    Raises:
        ContractError: when it was never announced.
    """
    if version is not None and version not in state.snapshots:
        raise ContractError(
            f"worker {worker_id[:80]} says that it holds version {version}, which was never announced; "
            "load an announced snapshot"
        )


def early_verdict(state: RunState, submission: GroupSubmission) -> SubmitVerdict | None:
    """Answer submissions that need no look at the trajectories' fit; None for all others.

    Raises:
        RefusedError: when the lease was never granted for this group, or to another worker.
    """
    receipt = state.receipts.get(submission.group_id)
    if receipt is not None:
        if receipt.payload_digest == submission_digest(submission):
            return SubmitVerdict.STALE if receipt.stale else SubmitVerdict.ALREADY_ACCEPTED
        same_lease = receipt.lease_id == submission.lease_id
        return SubmitVerdict.CONFLICT if same_lease else SubmitVerdict.LATE
    group = state.groups.get(submission.group_id)
    if group is None or state.finished:
        return SubmitVerdict.LATE
    holder = group.holders.get(submission.lease_id)
    if holder is None:
        raise RefusedError(
            f"lease {submission.lease_id[:40]!r} was never granted for group {submission.group_id}; "
            "hand in what was leased from this run"
        )
    if holder != name_of_worker(submission.worker_id):
        raise RefusedError(
            f"the lease of group {submission.group_id} was not granted to {submission.worker_id[:80]!r}; "
            "hand in what was leased to you"
        )
    return None


def accept_submission(
    state: RunState,
    config: RunConfig,
    submission: GroupSubmission,
    seeds: Sequence[int],
    now: float,
    given: KeptGroup | None = None,
    rules: TokenRules | None = None,
    limits: TurnLimits | None = None,
) -> tuple[SubmitVerdict, list[e.JournalEvent]]:
    """Decide on a submission that `early_verdict` left open.

    A lease that expired is still good until its group was handed in, even if that was leased again: the
    work is not wasted. Only where it is too old for the group's place it does not end what another is
    sampling. Drafting statistics that cannot be true are left out of the event; the group is taken.
    `seeds` are those of the group's lease; `given` is what heartbeats reported of the group, by which
    it is known who sampled which tokens, `rules` what is known of the model's tokens, and `limits` those of a
    task with turns.

    Raises:
        ContractError: when the trajectories do not fit the lease.
    """
    group = state.groups[submission.group_id]
    check_submission(
        submission,
        seeds,
        max_tokens=max_tokens_of(config, group),
        version=group.version,
        newest_version=newest_possible_version(state),
        published=state.snapshots,
        keeps_cache=config.rollout.swap_cache == "keep",
        rules=rules,
        limits=limits,
    )
    versions = [span.version for trajectory in submission.trajectories for span in trajectory.spans]
    # A host that fails at once leaves no token of any version.
    versions = versions or [group.held_version if group.version is None else group.version]
    oldest = min(versions)
    found: list[e.JournalEvent] = [
        e.GroupSubmitted(
            group_id=group.group_id,
            lease_id=submission.lease_id,
            worker_id=submission.worker_id,
            attempt=list(group.holders).index(submission.lease_id) + 1,
            payload_digest=submission_digest(submission),
            oldest_version=oldest,
            token_counts=tuple([t.sampled_tokens for t in submission.trajectories]),
            generation_s=submission.generation_s,
            at_s=now,
            drafting=believed_statistics(submission),
            authors=authorship(given, submission.trajectories, submission.worker_id),
            newest_version=max(versions),
        )
    ]
    running = submission.lease_id in (group.lease_id, group.twin_lease_id)
    if not (window := window_of(state, config.loop, group)).admits(oldest):
        if group.request is not None:  # its window never moves, so the lease said so
            raise ContractError(
                f"group {group.group_id} was sampled with version {oldest}, but its client asked for "
                f"{window.oldest} or newer; sample with what the lease allows"
            )
        if group.phase is GroupPhase.LEASED and not running:
            return SubmitVerdict.LATE, []
        # Older than what its lease was granted for, or handed in late for a place that was given back.
        found.append(e.GroupDropped(group.group_id, "stale_on_arrival"))
        return SubmitVerdict.STALE, found
    return SubmitVerdict.ACCEPTED, found


def accept_rewards(
    state: RunState,
    group_id: str,
    given: Sequence[SampleReward],
    client_id: str,
    now: float,
    max_failed_share: float,
) -> list[e.JournalEvent]:
    """Return what the rewards of a submitted group do; they stand in the order of its samples.

    Where more than `max_failed_share` of the `remembered_scores` could not be scored, and not those of one
    worker alone, the run is paused: something is wrong with the scorer or its machine, and what it learns is
    not what was meant.
    """
    group = state.groups[group_id]
    rewards = tuple(sample.reward for sample in given)
    failures = tuple((sample.sample_index, sample.failure) for sample in given if sample.failure)
    lines = ((sample.sample_index, _said(sample)) for sample in given)
    said = tuple((index, line) for index, line in lines if line)
    parts = mean_parts(sample.parts for sample in given if not sample.failure)
    found: list[e.JournalEvent] = [e.GroupRewarded(group_id, rewards, client_id, now, failures, said, parts)]
    if not failures or state.paused_reason:
        return found
    recent = newest_scored(state.recent_scored, state.authors(group), dict(failures), state.group_size)
    failed = Counter(author for author, bad in recent if bad)
    (worst, _), *_ = failed.most_common(1)
    of_one_alone = _scorer_works(state, [bad for author, bad in recent if author != worst], max_failed_share)
    if failed.total() > max_failed_share * remembered_scores(state.group_size) and not of_one_alone:
        found.append(
            e.RunPaused(
                f"{failed.total()} of the newest {len(recent)} answers could not be scored, and "
                f"reward.max_failed_share is {max_failed_share:g}; the last one, sample {failures[-1][0]} of "
                f"group {group_id}: {failures[-1][1]}; fix the scorer and start the run again"
            )
        )
    return found


def _said(sample: SampleReward) -> str:
    """Return what an environment said at a trajectory's end, in a line.

    >>> _said(SampleReward(0, 0.5, reason="won", parts={"moves": 3.0}))
    'won; moves 3'
    """
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.parts.items())
    return "; ".join(filter(None, (sample.reason, parts)))[:FAILURE_CHARS]


def author_of_failures(
    state: RunState, group_id: str, given: Sequence[SampleReward], max_failed_share: float
) -> str:
    """Return the worker whose answers fail while those of others are scored, where this group is another sign
    of that; "" for none. Call it before the rewards of the group are taken.

    More than two groups' worth of its answers and more than half of them could not be scored, and since the
    first of these at least a group's worth by others was, but for `max_failed_share`: the scorer works.
    """
    failed = {sample.sample_index for sample in given if sample.failure}
    if not failed:
        return ""
    authors = state.authors(state.groups[group_id])
    recent = newest_scored(state.recent_scored, authors, failed, state.group_size)
    for author in sorted({authors[index] for index in failed}):
        own = [bad for name, bad in recent if name == author]
        since = recent[recent.index((author, True)) :]
        works = _scorer_works(state, [bad for name, bad in since if name != author], max_failed_share)
        if works and sum(own) > max(2 * state.group_size, max(0.5, max_failed_share) * len(own)):
            return author
    return ""


def _scorer_works(state: RunState, others: Sequence[bool], max_failed_share: float) -> bool:
    """Return whether the answers of others, of which these failed, are a group's worth and are scored."""
    return len(others) >= state.group_size and sum(others) <= max_failed_share * len(others)


def accept_commit(
    state: RunState, commit: StepCommit, now: float, plan: dict[str, float] | None = None
) -> list[e.JournalEvent]:
    """Return the event of a commit at `now`, or nothing when it is a repetition.

    `plan` is what the capacity model expects at that time.

    Raises:
        IntegrityError: for a step out of order, another batch, or another digest.
    """
    if commit.version != commit.step + 1:
        raise IntegrityError(
            f"step {commit.step} makes version {commit.step + 1}, but the commit says {commit.version}"
        )
    if commit.step < 0:
        raise IntegrityError(f"step {commit.step} cannot be committed: steps begin at 0")
    done = len(state.commits)
    if commit.step < done:
        before = state.commits[commit.step]
        if (before.weights_digest, before.batch_digest) == (commit.weights_digest, commit.batch_digest):
            return []
        raise IntegrityError(
            f"step {commit.step} was committed with weights {before.weights_digest[:12]} from batch "
            f"{before.batch_digest[:12]}, but now with {commit.weights_digest[:12]} from "
            f"{commit.batch_digest[:12]}; the learner must restore the committed version"
        )
    if commit.step > done:
        raise IntegrityError(
            f"step {commit.step} cannot be committed: steps 0..{done - 1} are, so step {done} is next"
        )
    if not state.is_sealed(commit.step):
        raise IntegrityError(f"step {commit.step} cannot be committed: its batch is not sealed yet")
    sealed = state.sealed[commit.step].digest
    if commit.batch_digest != sealed:
        raise IntegrityError(
            f"step {commit.step} was trained on batch {commit.batch_digest[:12]}, "
            f"but the sealed batch is {sealed[:12]}; train on the sealed one"
        )
    told = {name: value for name, value in dataclasses.asdict(commit).items() if name != "times"}
    return [e.StepCommitted(**told, at_s=now, plan=plan)]


def accept_snapshot(state: RunState, manifest: SnapshotManifest) -> list[e.JournalEvent]:
    """Return the event of an announcement; the same weights may be announced from a new origin.

    Raises:
        ContractError: for the snapshot of another run.
        IntegrityError: for a version that no step made, or other weights under a known version.
    """
    if manifest.run_id != state.run_id:
        raise ContractError(
            f"a snapshot of run {manifest.run_id!r} was announced to run {state.run_id!r}; "
            "announce it to its own coordinator"
        )
    if not 0 <= manifest.version <= len(state.commits):
        raise IntegrityError(
            f"version {manifest.version} was announced, but only {len(state.commits)} steps are committed"
        )
    known = state.snapshots.get(manifest.version)
    if known is not None and known != manifest.weights_digest:
        raise IntegrityError(
            f"version {manifest.version} was announced with weights {known[:12]}, "
            f"now with {manifest.weights_digest[:12]}; the learner must restore the announced one"
        )
    return [e.SnapshotAnnounced(manifest.version, manifest.weights_digest, manifest.origin)]
