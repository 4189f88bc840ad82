"""Reward queue: groups go to a reward service until a deadline, and rewards are taken once.

Who has which group is kept in memory alone: after a restart every unrewarded group is simply
handed out again, and the first rewards that arrive count.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.core.checks import check_rewards
from antiphon.core.errors import ContractError
from antiphon.core.loop import acceptance
from antiphon.core.loop.assembly import step_progress
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.message_sizes import group_bytes, page
from antiphon.core.records import GroupRewards, GroupToReward, SampleReward
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.worker_registry import strike

REWARD_S = 15.0
"""A reward service that has not answered by then loses the group (or after a lease's time, if shorter);
its late rewards still count if they are the first. Each deadline that passes doubles the group's next one, up
to services.stall_timeout_s: a group that takes long to score is not begun again and again."""
GATHER_S = 0.15
"""How long a reward service's call waits for more groups after the first, unless the next batch needs nothing
but rewards: groups come in one by one, and a call for each cost both sides more than the scoring."""
GATHER_LOOK_S = 0.05
"""How often it is looked meanwhile."""
FINISHED_WAIT_S = 1.0
"""How long a reward service that asks after the end is held, so that it cannot ask in a tight loop."""


@dataclass(frozen=True, slots=True)
class _Rewarding:
    """A group at a reward service until a deadline."""

    client_id: str
    deadline_s: float


class RewardQueue:
    """Hands out finished groups and takes their rewards."""

    def __init__(self, state_machine: RunStateMachine) -> None:
        self._state_machine, self._state = state_machine, state_machine.state
        self._duration_s = min(REWARD_S, state_machine.config.coordinator.lease_s)
        self._expired: dict[str, int] = {}
        """How many deadlines of a group have passed."""
        self._rewarding: dict[str, _Rewarding] = {}

    @property
    def held(self) -> int:
        """Return how many groups are at a reward service."""
        return len(self._rewarding)

    async def pull(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToReward]:
        """Hand out up to `limit` groups, waiting up to `wait_s` seconds for the first.

        After the first it waits a moment for more, but not when these hold up a batch.
        """
        state_machine = self._state_machine
        deadline = state_machine.clock() + wait_s
        gathered_s = 0.0 if limit > 1 and wait_s > 0 else GATHER_S
        while True:
            state_machine.check()
            now = state_machine.clock()
            waiting = page(self._unrewarded(now)[: max(0, limit)], self._bytes)
            if waiting and gathered_s < GATHER_S and len(waiting) < limit and not self._hold_up_a_batch():
                gathered_s += GATHER_LOOK_S
                await asyncio.sleep(GATHER_LOOK_S)
                continue
            if waiting:
                return await self._hand_out(client_id, waiting, now)
            if self._state.finished:
                await state_machine.submitted.wait(min(FINISHED_WAIT_S, deadline - now))
                return ()
            if now >= deadline:
                return ()
            free_again = min(
                (rewarding.deadline_s for rewarding in self._rewarding.values()), default=deadline
            )
            await state_machine.submitted.wait(min(deadline, free_again) - now)

    def _hold_up_a_batch(self) -> bool:
        """Return whether all groups of the next batch were handed in, so that it waits for rewards alone."""
        unsealed = self._state.unsealed_steps()
        handed_in = (GroupPhase.SUBMITTED, GroupPhase.REWARDED)
        config = self._state_machine.config
        return bool(unsealed) and step_progress(self._state, config, unsealed[0], *handed_in) == 1.0

    def _time_for(self, group_id: str) -> float:
        """Return the seconds that a reward service gets for a group now."""
        longest_s = max(self._duration_s, self._state_machine.config.services.stall_timeout_s)
        return min(longest_s, self._duration_s * 2.0 ** min(self._expired.get(group_id, 0), 32))

    def _unrewarded(self, now: float) -> list[str]:
        """Return the groups that no reward service has; training groups first, then as they came in."""
        groups = self._state.groups
        submitted = [group for group in groups.values() if group.phase is GroupPhase.SUBMITTED]
        unrewarded = {group.group_id for group in submitted}
        self._expired = {group_id: n for group_id, n in self._expired.items() if group_id in unrewarded}
        for group_id, rewarding in list(self._rewarding.items()):
            if group_id in unrewarded and rewarding.deadline_s > now:
                continue
            del self._rewarding[group_id]
            if group_id in unrewarded:
                self._expired[group_id] = self._expired.get(group_id, 0) + 1
                group = groups[group_id]
                self._state_machine.move_back(group, group.oldest_version)
        found = [group for group in submitted if group.group_id not in self._rewarding]
        found.sort(key=lambda group: (group.evaluation is not None, group.submitted_at_s))
        return [group.group_id for group in found]

    def _bytes(self, group_id: str) -> int:
        group = self._state.groups[group_id]
        return group_bytes(group.samples, sum(group.token_counts), 0)

    async def _hand_out(self, client_id: str, group_ids: list[str], now: float) -> list[GroupToReward]:
        for group_id in group_ids:
            self._rewarding[group_id] = _Rewarding(client_id, now + self._time_for(group_id))
        found = []
        for group_id in group_ids:
            submission = await self._state_machine.submissions.find(group_id)
            if not self._unanswered(group_id):  # rewarded or found stale while a payload was read
                continue
            if submission is None:
                raise self._state_machine.submissions.lost(group_id)
            group = self._state.groups[group_id]
            found.append(
                GroupToReward(
                    group_id=group_id,
                    prompt_key=self._state_machine.prompts.prompt(group.split, group.prompt_index).key,
                    completions=tuple(trajectory.token_ids for trajectory in submission.trajectories),
                    finish_reasons=tuple(trajectory.finish_reason for trajectory in submission.trajectories),
                )
            )
        return found

    async def submit(self, groups: Sequence[GroupRewards]) -> list[str]:
        """Take the rewards of groups, in one transaction; return the ids of those that had none yet and
        were not gone.

        Raises:
            ContractError: when a reward is missing or outside [0, 1]; the other groups are taken.
        """
        state_machine, taken, refused = self._state_machine, [], None
        try:
            for group in groups:
                try:
                    if await self._take(group.group_id, group.samples):
                        taken.append(group.group_id)
                except ContractError as error:
                    refused = refused or error
        finally:  # also when the caller hangs up meanwhile
            if taken:
                state_machine.settle()
                if self._state.paused_reason:  # perhaps by this
                    state_machine.wake_all()
        await state_machine.record()
        if refused is not None:
            raise refused
        return taken

    async def _take(self, group_id: str, sample_rewards: Sequence[SampleReward]) -> bool:
        """Take the rewards of a group; False when they were already there or the group is gone."""
        state_machine = self._state_machine
        state_machine.check_open()
        rewarding = self._rewarding.pop(group_id, None)
        if not self._unanswered(group_id):
            return False
        given = check_rewards(group_id, sample_rewards, self._state.groups[group_id].samples)
        submission = await state_machine.submissions.find(group_id) if state_machine.archive.keeps else None
        if not self._unanswered(group_id):  # by another one, while a payload was read from the disk
            return False
        group, client_id = self._state.groups[group_id], "" if rewarding is None else rewarding.client_id
        most, now = state_machine.config.reward.max_failed_share, state_machine.clock()
        author = acceptance.author_of_failures(self._state, group_id, given, most)
        found = acceptance.accept_rewards(self._state, group_id, given, client_id, now, most)
        history = None
        if submission is not None:
            key = state_machine.prompts.prompt(group.split, group.prompt_index).key
            rewards = tuple(sample.reward for sample in given)
            history = state_machine.archive.take(key, group, submission, rewards)
        # A held-out answer is over now; its payload stays until the evaluation's file is written.
        answered = [] if group.evaluation is None else [group_id]
        forget = [] if state_machine.config.record.samples else answered
        state_machine.fleet.work_done += 1
        state_machine.record(*found, forget=forget, history=history)
        state_machine.submissions.forget(answered)
        if author:
            last = next(sample for sample in reversed(given) if sample.failure)
            told = f"sample {last.sample_index}: {last.failure}"
            told = f"its answers cannot be scored, those of others can; the last one, {told}"
            strike(state_machine, author, group_id, "scoring", told)
        return True

    def _unanswered(self, group_id: str) -> bool:
        group = self._state.groups.get(group_id)
        return group is not None and group.phase is GroupPhase.SUBMITTED
