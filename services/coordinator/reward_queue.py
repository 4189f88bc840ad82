"""Judge desk: groups go to a judge until a deadline, and rewards are taken once.

Who has which group is kept in memory alone: after a restart every unjudged group is simply
handed out again, and the first rewards that arrive count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.core.loop import acceptance
from antiphon.core.loop.checks import check_judgements
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.records import GroupToJudge, Judgement
from antiphon.services.coordinator.run_state_machine import RunKeeper

JUDGE_S = 15.0
"""A judge that has not answered by then loses the group (or after a lease's time, if shorter);
its late rewards still count if they are the first."""
FINISHED_WAIT_S = 1.0
"""How long a judge that asks after the end is held, so that it cannot ask in a tight loop."""


@dataclass(frozen=True, slots=True)
class _Judging:
    """A group at a judge until a deadline."""

    judge_id: str
    deadline_s: float


class JudgeDesk:
    """Hands out finished groups and takes their rewards."""

    def __init__(self, keeper: RunKeeper) -> None:
        self._keeper = keeper
        self._duration_s = min(JUDGE_S, keeper.config.coordinator.lease_s)
        self._judging: dict[str, _Judging] = {}

    @property
    def held(self) -> int:
        """Return how many groups are at a judge."""
        return len(self._judging)

    async def pull(self, judge_id: str, limit: int, wait_s: float) -> Sequence[GroupToJudge]:
        """Hand out up to `limit` groups, waiting up to `wait_s` seconds for the first."""
        keeper = self._keeper
        deadline = keeper.clock() + wait_s
        while True:
            keeper.check()
            now = keeper.clock()
            waiting = self._unjudged(now)[: max(0, limit)]
            if waiting:
                return await self._hand_out(judge_id, waiting, now)
            if keeper.state.finished:
                await keeper.submitted.wait(min(FINISHED_WAIT_S, deadline - now))
                return ()
            if now >= deadline:
                return ()
            free_again = min((judging.deadline_s for judging in self._judging.values()), default=deadline)
            await keeper.submitted.wait(min(deadline, free_again) - now)

    def _unjudged(self, now: float) -> list[str]:
        """Return the groups that no judge has; training groups first, then as they came in."""
        groups = self._keeper.state.groups
        submitted = [group for group in groups.values() if group.phase is GroupPhase.SUBMITTED]
        alive = {group.group_id for group in submitted}
        self._judging = {
            group_id: judging
            for group_id, judging in self._judging.items()
            if group_id in alive and judging.deadline_s > now
        }
        found = [group for group in submitted if group.group_id not in self._judging]
        found.sort(key=lambda group: (group.evaluation is not None, group.submitted_at_s))
        return [group.group_id for group in found]

    async def _hand_out(self, judge_id: str, group_ids: list[str], now: float) -> list[GroupToJudge]:
        for group_id in group_ids:
            self._judging[group_id] = _Judging(judge_id, now + self._duration_s)
        found = []
        for group_id in group_ids:
            submission = await self._keeper.find_submission(group_id)
            if not self._unanswered(group_id):  # judged or found stale while a payload was read
                continue
            if submission is None:
                raise self._keeper.payload_lost(group_id)
            group = self._keeper.state.groups[group_id]
            found.append(
                GroupToJudge(
                    group_id=group_id,
                    prompt_key=self._keeper.prompts.prompt(group.split, group.prompt_index).key,
                    completions=tuple(trajectory.token_ids for trajectory in submission.trajectories),
                    finish_reasons=tuple(trajectory.finish_reason for trajectory in submission.trajectories),
                )
            )
        return found

    async def submit(self, group_id: str, judgements: Sequence[Judgement]) -> bool:
        """Take the rewards of a group; False when they were already there or the group is gone.

        Raises:
            ContractError: when a reward is missing or not finite.
        """
        keeper = self._keeper
        keeper.check_open()
        judging = self._judging.pop(group_id, None)
        if not self._unanswered(group_id):
            return False
        rewards = check_judgements(group_id, judgements, keeper.state.groups[group_id].samples)
        submission = await keeper.find_submission(group_id) if keeper.archive.keeps else None
        if not self._unanswered(group_id):  # by another judge, while a payload was read from the disk
            return False
        group, judge_id = keeper.state.groups[group_id], judging.judge_id if judging is not None else ""
        found = acceptance.accept_judgement(keeper.state, group_id, rewards, judge_id, keeper.clock())
        history = None
        if submission is not None:
            key = keeper.prompts.prompt(group.split, group.prompt_index).key
            history = keeper.archive.take(key, group, submission, rewards)
        forget = [group_id] if group.evaluation is not None else []
        written = keeper.record(*found, forget=forget, history=history)
        keeper.settle()
        await written
        return True

    def _unanswered(self, group_id: str) -> bool:
        group = self._keeper.state.groups.get(group_id)
        return group is not None and group.phase is GroupPhase.SUBMITTED
