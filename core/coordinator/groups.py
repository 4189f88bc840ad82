"""Groups: what a worker hands in, what a reward service gets, and the rewards that it brings."""

from collections.abc import Sequence

from antiphon.core.checks import check_reference, check_rewards
from antiphon.core.coordinator.consequences import begin_again, move_back, settle, strike
from antiphon.core.coordinator.loop_state import (
    Decision,
    Forget,
    Keep,
    KeepHistory,
    LoopState,
    Rewarding,
    prefix_name,
    reference_name,
)
from antiphon.core.errors import ContractError, RefusedError
from antiphon.core.loop import acceptance
from antiphon.core.loop.assembly import step_progress
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.loop.turns import rewards_of
from antiphon.core.message_sizes import group_bytes, page
from antiphon.core.records import GroupRewards, GroupSubmission, SubmitVerdict
from antiphon.core.trust.worker_names import name_of_worker

REWARD_S = 15.0
"""A reward service that has not answered by then loses the group (or after a lease's time, if shorter);
its late rewards still count if they are the first. Each deadline that passes doubles the group's next one, up
to services.stall_timeout_s: a group that takes long to score is not begun again and again."""


def submit(loop: LoopState, submission: GroupSubmission, now: float) -> Decision[SubmitVerdict]:
    """Take in a group once; what cannot be is a strike against the worker that sampled it.

    Raises:
        RefusedError: when the lease is not the worker's, or the trajectories do not fit it.
    """
    run, leases = loop.run, loop.leases
    if run.barred(name_of_worker(submission.worker_id)):
        return SubmitVerdict.LATE
    try:
        verdict = acceptance.early_verdict(run, submission)
    except RefusedError as error:
        if submission.lease_id in run.groups[submission.group_id].holders:
            name = name_of_worker(submission.worker_id)
            yield from strike(loop, name, submission.group_id, "refused", str(error), now)
        raise
    if verdict is not None:
        return verdict
    group = run.groups[submission.group_id]
    given, limits = leases.known_of(submission.lease_id, group), loop.limits_of(group)
    try:
        verdict, events = acceptance.accept_submission(
            run, loop.config, submission, loop.seeds(group), now, given, loop.rules_of(group), limits
        )
        if limits is not None:
            rewards_of(submission, group.answers)
    except ContractError as error:
        false = yield from begin_again(loop, group, submission.lease_id, given, now)
        worker_id, reason = false or (submission.worker_id, str(error))
        yield from strike(loop, name_of_worker(worker_id), group.group_id, "refused", reason, now)
        raise RefusedError(str(error)) from error
    if not events:
        return verdict
    yield from leases.slower(group, submission.lease_id, now)
    yield from events
    if given is not None:
        yield Forget((prefix_name(submission.group_id),))
    if verdict is SubmitVerdict.ACCEPTED:
        yield submission
        loop.fleet.work_done += 1
    return verdict


def reward_at_once(loop: LoopState, submission: GroupSubmission, now: float) -> Decision[None]:
    """Take the rewards of a group that was just accepted, where its environment gave them with answers."""
    if loop.limits is not None:
        rewards = rewards_of(submission, loop.run.groups[submission.group_id].answers)
        yield from take_rewards(loop, GroupRewards(submission.group_id, rewards), submission, now)
        yield from settle(loop)


def to_reward(loop: LoopState, limit: int, now: float) -> Decision[list[str]]:
    """Return up to `limit` groups that no reward service has; training groups first, then as they came in."""
    groups = loop.run.groups
    submitted = {g.group_id: g for g in groups.values() if g.phase is GroupPhase.SUBMITTED}
    loop.overdue = {group_id: n for group_id, n in loop.overdue.items() if group_id in submitted}
    for group_id, rewarding in list(loop.rewarding.items()):
        if group_id in submitted and rewarding.deadline_s > now:
            continue
        del loop.rewarding[group_id]
        if group_id in submitted:
            loop.overdue[group_id] = loop.overdue.get(group_id, 0) + 1
            yield from move_back(loop, groups[group_id], groups[group_id].oldest_version)
    waiting = [group for group in submitted.values() if group.group_id not in loop.rewarding]
    waiting.sort(key=lambda group: (group.evaluation is not None, group.submitted_at_s))
    ids = [group.group_id for group in waiting[: max(0, limit)]]
    most = loop.limits.tokens if loop.limits else 0  # counts leave out what was observed

    def size(group_id: str) -> int:
        group = groups[group_id]
        return group_bytes(group.samples, max(sum(group.token_counts), most * group.samples), 0)

    return page(ids, size)


def hold_up_a_batch(loop: LoopState) -> bool:
    """Return whether all groups of the next batch were handed in, so that it waits for rewards alone."""
    unsealed = loop.run.unsealed_steps()
    handed_in = (GroupPhase.SUBMITTED, GroupPhase.REWARDED)
    return bool(unsealed) and step_progress(loop.run, loop.config, unsealed[0], *handed_in) == 1.0


def hand_out(loop: LoopState, client_id: str, group_ids: Sequence[str], now: float) -> None:
    """Note who has groups to reward, and until when."""
    for group_id in group_ids:
        until_s = hold_until(loop, loop.overdue.get(group_id, 0), now)
        loop.rewarding[group_id] = Rewarding(client_id, until_s)


def hold_until(loop: LoopState, overdue: int, now: float) -> float:
    """Return until when a reward service has what it was given, after this many deadlines of that passed."""
    usual_s = min(REWARD_S, loop.config.coordinator.lease_s)
    longest_s = max(usual_s, loop.config.services.stall_timeout_s)
    return now + min(longest_s, usual_s * 2.0 ** min(overdue, 32))


def unanswered(loop: LoopState, group_id: str) -> bool:
    """Return whether a group waits for rewards."""
    group = loop.run.groups.get(group_id)
    return group is not None and group.phase is GroupPhase.SUBMITTED


def take_rewards(
    loop: LoopState,
    rewards: GroupRewards,
    submission: GroupSubmission | None,
    now: float,
) -> Decision[bool]:
    """Take the rewards of a group; False when they were already there or the group is gone.

    `submission` is what was handed in, where the history keeps it.

    Raises:
        ContractError: when a reward is missing or outside of the environment's range, or the reference
            model's log-probabilities are not those of the group.
    """
    group_id = rewards.group_id
    rewarding = loop.rewarding.pop(group_id, None)
    if not unanswered(loop, group_id):
        return False
    group, client_id = loop.run.groups[group_id], "" if rewarding is None else rewarding.client_id
    given = check_rewards(group_id, rewards.samples, group.samples, loop.reward_range)
    scored = loop.config.reference.used and group.evaluation is None
    check_reference(group_id, rewards.reference_logprobs, group.token_counts if scored else ())
    most = loop.config.reward.max_failed_share
    # What a host says of its episodes is no answer of a worker.
    author = "" if loop.hosted else acceptance.author_of_failures(loop.run, group_id, given, most)
    yield from acceptance.accept_rewards(loop.run, group_id, given, client_id, now, most)
    if scored:
        yield Keep(reference_name(group_id), rewards)
    if submission is not None:
        by_sample = tuple(loop.reward_range[0] if sample.failure else sample.reward for sample in given)
        yield KeepHistory(loop.prompt_of(group).key, group, submission, by_sample)
    if group.evaluation is not None:
        # A held-out answer is over now; its payload stays until the evaluation's file is written.
        yield Forget((group_id,), only_at_hand=loop.config.record.samples > 0)
    loop.fleet.work_done += 1
    if author:
        last = next(sample for sample in reversed(given) if sample.failure)
        reason = f"sample {last.sample_index}: {last.failure}"
        reason = f"its answers cannot be scored, those of others can; the last one, {reason}"
        yield from strike(loop, author, group_id, "scoring", reason, now)
    return True
