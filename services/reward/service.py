"""Reward service: rewards every finished group with the environment, as soon as there is one.

It trusts nothing of a worker but the tokens: it decodes them itself and has the texts scored
(`environments.scoring`). A completion that was cut off is rewarded by its text like any other. A group
whose rewards were refused because they were already there is simply done.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import structlog

from antiphon.api import scorer as scorer_api
from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.loop.group_state import is_heldout
from antiphon.core.message_sizes import PAGE_BYTES
from antiphon.core.records import FloatArray, GroupRewards, GroupSubmission, IntArray, SampleReward
from antiphon.environments.scoring.messages import Failed, Verdict
from antiphon.net.rpc.retry import retry_unavailable
from antiphon.services.reward.turns import Answer, Hosting, answer_turns
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
        scorer: Scorer | None,
        codec: Decoder,
        run_id: str,
        client_id: str,
        limit_s: float,
        *,
        at_once: int = 1,
        pull_wait_s: float = PULL_WAIT_S,
        answer: Answer | Hosting | None = None,
        environment_digest: str = "",
        reference: scorer_api.Scorer | None = None,
    ) -> None:
        """Prepare; nothing is pulled before `run`.

        Args:
            coordinator: the run's coordinator, or a client of it.
            scorer: scores answers to problems that are named by their keys; None for an environment that
                answers turns, since it gives the rewards itself.
            codec: the tokenizer that made the prompts.
            run_id: the run whose groups are rewarded.
            client_id: distinguishes several services of one run, for the coordinator's deadline.
            limit_s: longest time that the coordinator may be away.
            at_once: groups that are scored at the same time.
            pull_wait_s: how long one request for groups may be held open.
            answer: answers turns, or is who has hosts answer them; None for an environment without.
            environment_digest: of the environment's files here; "" for one without.
            reference: scores the tokens of training groups by the reference model; None for a run without.
        """
        self._coordinator = coordinator
        self._scorer = scorer
        self._codec = codec
        self._run_id = run_id
        self._client_id = client_id
        self._limit_s = limit_s
        self._at_once = at_once
        self._pull_wait_s = pull_wait_s
        self._answer, self._hosting = answer, answer if isinstance(answer, Hosting) else None
        self._environment_digest = environment_digest
        self._reference = reference
        self._pulled: asyncio.Queue[tuple[str, GroupSubmission, IntArray | None]] = asyncio.Queue()
        """Groups, each behind the key of its prompt, and before its tokens where a reference scores them."""
        self._unscored = 0
        """Groups that were pulled and are not scored yet."""
        self._all_scored = Wakeup()
        self._scored: asyncio.Queue[GroupRewards] = asyncio.Queue(SENT_TOGETHER)
        self._stopping, self._is_right = asyncio.Event(), asyncio.Event()
        self._groups_rewarded = 0

    def stop(self) -> None:
        """Leave after the groups that are being scored; the others are offered to another service."""
        self._stopping.set()
        while not self._pulled.empty():
            self._pulled.get_nowait()
            self._unscored -= 1

    async def run(self, ready: Callable[[], None]) -> None:
        """Reward groups until the run is finished or `stop` was called.

        Args:
            ready: called once the coordinator has answered.

        Raises:
            ConfigError: when the environment's files are others than those that the run was opened with.
            ContractError: when the coordinator serves another run, or a group names a problem the
                environment does not have.
            UnavailableError: when the coordinator was away for longer than `limit_s`.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                stopping = tasks.create_task(self._stopping.wait())
                pulling = tasks.create_task(self._pull(ready))
                working = [tasks.create_task(self._score()) for _ in range(self._at_once)]
                working.append(tasks.create_task(self._send()))
                if self._answer is not None:
                    working.append(tasks.create_task(self._answer_turns(self._answer)))
                if self._hosting is not None:
                    working.append(tasks.create_task(self._hosting.look()))
                await asyncio.wait({pulling, stopping}, return_when=asyncio.FIRST_COMPLETED)
                pulling.cancel()
                while self._unscored:
                    await self._all_scored.wait(self._pull_wait_s)
                await self._scored.join()
                for task in (*working, stopping):
                    task.cancel()
        except ExceptionGroup as group:
            first: Exception = group
            while isinstance(first, ExceptionGroup):  # turns are answered in a group of their own
                first = first.exceptions[0]
            raise first from group
        finally:
            _log.info("reward.left", client=self._client_id, groups=self._groups_rewarded)

    async def _pull(self, ready: Callable[[], None]) -> None:
        """Ask for groups whenever the last ones were taken up, until the run is finished."""
        status = await retry_unavailable("coordinator.status", self._coordinator.status, self._limit_s)
        if status.run_id != self._run_id:
            raise ContractError(
                f"the coordinator serves run {status.run_id}, not {self._run_id}; "
                "give the address of the right one"
            )
        digest, opened_with = self._environment_digest, status.environment_digest
        if digest and opened_with and digest != opened_with:
            raise ConfigError(
                f"the files of environment.name have the digest {digest[:12]} here, but run {self._run_id} "
                f"was opened with {opened_with[:12]}; put them back, or start a new run (--fresh)"
            )
        if self._hosting is not None:
            self._hosting.heard(status, ())  # which tokens are revoked
        self._is_right.set()
        ready()
        asking = partial(self._coordinator.pull_for_reward, self._client_id, PULL_GROUPS, self._pull_wait_s)
        while not status.finished:
            reply = await retry_unavailable("coordinator.pull_for_reward", asking, self._limit_s)
            if self._stopping.is_set():
                return
            self._unscored += len(reply.groups)
            prompts = reply.prompts or [None] * len(reply.groups)
            for pulled in zip(reply.prompt_keys, reply.groups, prompts, strict=True):
                self._pulled.put_nowait(pulled)
            await self._pulled.join()
            if not reply.groups:
                await asyncio.sleep(EMPTY_PAUSE_S)
                status = await retry_unavailable(
                    "coordinator.status", self._coordinator.status, self._limit_s
                )
                if self._hosting is not None:
                    self._hosting.heard(status, reply.unfinished)

    async def _answer_turns(self, answer: Answer | Hosting) -> None:
        """Answer turns once the coordinator was seen to be the right one."""
        await self._is_right.wait()
        await answer_turns(self._coordinator, answer, self._client_id, self._limit_s, self._pull_wait_s)

    async def _score(self) -> None:
        """Score one group after the other; as many of these run as may be scored at the same time."""
        while True:
            prompt_key, group, prompt = await self._pulled.get()
            self._pulled.task_done()
            failpoints.reach("reward.score")
            if self._scorer is None:
                raise ContractError(f"group {group.group_id} has turns, and came without its rewards")
            texts = [self._codec.decode(trajectory.token_ids) for trajectory in group.trajectories]
            rewards = []
            scoring, logprobs = self._scorer.score(prompt_key, texts), tuple[FloatArray, ...]()
            if self._reference is None or is_heldout(group.group_id):
                verdicts = await scoring
            else:
                asking = self._reference_logprobs(self._reference, group, prompt)
                verdicts, logprobs = await asyncio.gather(scoring, asking)
            for index, verdict in enumerate(verdicts):
                if isinstance(verdict, Failed):
                    reason = verdict.reason or "no reason was given"
                    _log.warning("reward.failed", group=group.group_id, sample=index, reason=verdict.reason)
                    rewards.append(SampleReward(index, 0.0, reason))
                else:
                    rewards.append(SampleReward(index, verdict))
            await self._scored.put(GroupRewards(group.group_id, tuple(rewards), logprobs))
            self._unscored -= 1
            if not self._unscored:
                self._all_scored.notify()

    async def _reference_logprobs(
        self, reference: scorer_api.Scorer, group: GroupSubmission, prompt: IntArray | None
    ) -> tuple[FloatArray, ...]:
        """Return the reference model's logprobs of a training group's tokens, [G] of [T].

        Raises:
            UnavailableError: when the scorer was away for longer than `limit_s`.
        """
        if prompt is None:
            raise ContractError(
                f"group {group.group_id} came without its prompt, which the reference model needs; give the "
                "coordinator the configuration of the reward service"
            )
        asking = partial(reference.score, prompt, [one.token_ids for one in group.trajectories])
        return tuple(await retry_unavailable("scorer.score", asking, self._limit_s))

    async def _send(self) -> None:
        """Hand in what is scored, what was pulled together in one message unless it takes long. Others are
        scored until the answer comes, which waits for the coordinator's transaction."""
        while True:
            together = [await self._scored.get()]
            if self._unscored and self._scored.qsize() + 1 < SENT_TOGETHER:
                await self._all_scored.wait(TOGETHER_S)
            room = PAGE_BYTES - _reference_bytes(together[0])
            while not self._scored.empty() and len(together) < SENT_TOGETHER and room > 0:
                together.append(self._scored.get_nowait())
                room -= _reference_bytes(together[-1])
            handing_in = partial(self._coordinator.submit_rewards, together)
            taken = await retry_unavailable("coordinator.submit_rewards", handing_in, self._limit_s)
            failpoints.reach("reward.submit.after")
            self._groups_rewarded += len(together)
            _log.debug("groups.rewarded", groups=[one.group_id for one in together], taken=len(taken))
            for _ in together:
                self._scored.task_done()


def _reference_bytes(rewards: GroupRewards) -> int:
    return sum(one.nbytes for one in rewards.reference_logprobs)
