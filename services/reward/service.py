"""Reward service: rewards every finished group with the environment, as soon as there is one.

It trusts nothing of a worker but the tokens: it decodes them itself and has the texts scored
(`environments.scoring`). A completion that was cut off is rewarded by its text like any other. A group
whose rewards were refused because they were already there is simply done.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import ContractError
from antiphon.core.records import GroupRewards, GroupToReward, SampleReward
from antiphon.environments.scoring.messages import Failed, Verdict
from antiphon.net.rpc.retry import retry_unavailable
from antiphon.system import failpoints
from antiphon.system.wakeup import Wakeup

PULL_GROUPS = 16
"""Most groups taken at once; few, so that several services share the work."""
PULL_WAIT_S = 2.0
"""How long one request for groups is held open, and how soon the end of the run is noticed."""
SENT_TOGETHER = 64
"""Most groups whose rewards travel in one message; where this many wait for it, no more are pulled."""
TOGETHER_S = 0.05
"""Longest that rewards wait for those of the other groups that were pulled: a message for each group cost
the coordinator more than the group."""
EMPTY_PAUSE_S = 0.02
"""Pause after a request that was answered at once with nothing."""

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class Decoder(Protocol):
    """What is needed of a tokenizer; `models.codec.TextCodec` is one."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids."""


class Scorer(Protocol):
    """Gives verdicts on answers; `environments.scoring.pool` has two."""

    async def score(self, key: str, texts: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer to the problem with a key."""


class RewardService:
    """Pulls groups, rewards them, hands the rewards back."""

    def __init__(
        self,
        coordinator: Coordinator,
        scorer: Scorer,
        codec: Decoder,
        run_id: str,
        client_id: str,
        limit_s: float,
        *,
        at_once: int = 1,
        pace: Callable[[], Awaitable[None]] | None = None,
        pull_wait_s: float = PULL_WAIT_S,
    ) -> None:
        """Prepare; nothing is pulled before `run`.

        Args:
            coordinator: the run's coordinator, or a client of it.
            scorer: scores answers to problems that are named by their keys.
            codec: the tokenizer that made the prompts.
            run_id: the run whose groups are rewarded.
            client_id: distinguishes several services of one run, for the coordinator's deadline.
            limit_s: longest time that the coordinator may be away.
            at_once: groups that are scored at the same time.
            pace: awaited before each group is rewarded; tests inject delays with it.
            pull_wait_s: how long one request for groups may be held open.
        """
        self._coordinator = coordinator
        self._scorer = scorer
        self._codec = codec
        self._run_id = run_id
        self._client_id = client_id
        self._limit_s = limit_s
        self._at_once = at_once
        self._pace = pace
        self._pull_wait_s = pull_wait_s
        self._pulled: deque[GroupToReward] = deque()
        self._scoring: set[asyncio.Task[None]] = set()
        self._unscored = 0
        """Groups that were pulled and are not scored yet."""
        self._all_scored = Wakeup()
        self._scored: deque[GroupRewards] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._groups_rewarded = 0

    def stop(self) -> None:
        """Leave after the groups that are being scored; the others are offered to another service."""
        self._stopping.set()

    async def run(self, ready: Callable[[], None]) -> None:
        """Reward groups until the run is finished or `stop` was called.

        Args:
            ready: called once the coordinator has answered.

        Raises:
            ContractError: when the coordinator serves another run, or a group names a problem the
                environment does not have.
            UnavailableError: when the coordinator was away for longer than `limit_s`.
        """
        try:
            await self._check_run()
            ready()
            while not self._stopping.is_set():
                if len(self._scored) >= SENT_TOGETHER:
                    await self._one_done()
                    continue
                if not self._pulled and not await self._pull():
                    break
                while self._pulled and len(self._scoring) < self._at_once:
                    self._scoring.add(asyncio.create_task(self._reward(self._pulled.popleft())))
                if self._pulled:
                    await self._one_done()
            while self._scoring or self._sending:
                await self._one_done()
        finally:
            for task in (*self._scoring, *self._sending):
                task.cancel()
            _log.info("reward.left", client=self._client_id, groups=self._groups_rewarded)

    async def _pull(self) -> bool:
        """Ask for groups; return False once the run is finished or `stop` was called."""
        groups = await self._unless_stopped(
            "coordinator.pull_for_reward",
            lambda: self._coordinator.pull_for_reward(self._client_id, PULL_GROUPS, self._pull_wait_s),
        )
        self._pulled.extend(groups or ())
        self._unscored += len(groups or ())
        self._drop_done()
        return bool(groups) or not (self._stopping.is_set() or await self._run_finished())

    async def _one_done(self) -> None:
        await asyncio.wait(self._scoring | self._sending, return_when=asyncio.FIRST_COMPLETED)
        self._drop_done()

    def _drop_done(self) -> None:
        done = {task for task in self._scoring | self._sending if task.done()}
        self._scoring -= done
        self._sending -= done
        for task in done:
            task.result()

    async def _reward(self, group: GroupToReward) -> None:
        if self._pace is not None:
            await self._pace()
        failpoints.reach("reward.score")
        self._scored.append(GroupRewards(group.group_id, tuple(await self._rewards_of(group))))
        self._unscored -= 1
        if not self._unscored:
            self._all_scored.notify()
        if not any(not task.done() for task in self._sending):
            self._sending.add(asyncio.create_task(self._send()))

    async def _send(self) -> None:
        """Hand in what is scored, what was pulled together in one message unless it takes long. Others are
        scored until the answer comes, which waits for the coordinator's transaction."""
        while self._scored:
            if self._unscored and len(self._scored) < SENT_TOGETHER:
                await self._all_scored.wait(TOGETHER_S)
            together = [self._scored.popleft() for _ in range(min(SENT_TOGETHER, len(self._scored)))]
            taken = await self._reach(
                "coordinator.submit_rewards", partial(self._coordinator.submit_rewards, together)
            )
            failpoints.reach("reward.submit.after")
            self._groups_rewarded += len(together)
            _log.debug("groups.rewarded", groups=[one.group_id for one in together], taken=len(taken))

    async def _rewards_of(self, group: GroupToReward) -> list[SampleReward]:
        texts = [self._codec.decode(token_ids) for token_ids in group.completions]
        verdicts = await self._scorer.score(group.prompt_key, texts)
        for index, verdict in enumerate(verdicts):
            if isinstance(verdict, Failed):
                _log.warning("reward.failed", group=group.group_id, sample=index, reason=verdict.reason)
        return [
            SampleReward(index, 0.0, verdict.reason or "no reason was given")
            if isinstance(verdict, Failed)
            else SampleReward(index, verdict)
            for index, verdict in enumerate(verdicts)
        ]

    async def _check_run(self) -> None:
        status = await self._unless_stopped("coordinator.status", self._coordinator.status)
        if status is not None and status.run_id != self._run_id:
            raise ContractError(
                f"the coordinator serves run {status.run_id}, not {self._run_id}; "
                "give the address of the right one"
            )

    async def _run_finished(self) -> bool:
        await asyncio.sleep(EMPTY_PAUSE_S)
        status = await self._unless_stopped("coordinator.status", self._coordinator.status)
        return status is not None and status.finished

    async def _unless_stopped(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T | None:
        """Return the answer of a call, or None as soon as `stop` is called."""
        calling = asyncio.ensure_future(self._reach(what, attempt))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({calling, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return calling.result() if calling.done() else None
        finally:
            calling.cancel()
            stopping.cancel()

    async def _reach(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        return await retry_unavailable(what, attempt, self._limit_s)
