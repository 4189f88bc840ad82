"""A reference model scores training groups beside the environment, and no held-out ones."""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from antiphon.core.config import build_config
from antiphon.core.errors import UnavailableError
from antiphon.core.loop.group_state import heldout_group_id
from antiphon.core.records import FloatArray, GroupRewards, IntArray
from antiphon.core.requests import PullReply
from antiphon.environments.scoring.pool import InProcess
from antiphon.services.reward.service import RewardService
from tests.services.reward.test_reward import group, rewarding
from tests.support.light_coordinator import LightCoordinator
from tests.support.light_environment import LightEnvironment, light_codec


class Telling(LightCoordinator):
    """Sends the prompts along, and keeps all that it is sent."""

    def __init__(self) -> None:
        super().__init__(build_config({}))
        self.sent: dict[str, GroupRewards] = {}

    async def pull_for_reward(self, client_id: str, limit: int, wait_s: float) -> PullReply:
        reply = await super().pull_for_reward(client_id, limit, wait_s)
        prompts = tuple(np.array([7, int(key[-1])], dtype=np.int32) for key in reply.prompt_keys)
        return dataclasses.replace(reply, prompts=prompts)

    async def submit_rewards(self, groups: Sequence[GroupRewards]) -> Sequence[str]:
        self.sent |= {one.group_id: one for one in groups}
        return await super().submit_rewards(groups)


class Flaky:
    """A scorer that does not answer the first time."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def score(
        self, prompt_token_ids: IntArray, completions: Sequence[IntArray]
    ) -> Sequence[FloatArray]:
        self.asked.append(prompt_token_ids.tolist())
        if len(self.asked) == 1:
            raise UnavailableError("it is being started")
        return [-one.astype(np.float32) for one in completions]


def test_training_groups_are_scored_by_the_reference_also_when_it_comes_late() -> None:
    async def run() -> tuple[Telling, Flaky]:
        coordinator, flaky = Telling(), Flaky()
        service = RewardService(
            coordinator,
            InProcess(LightEnvironment()),
            light_codec(),
            "run-1",
            "judge-1",
            10.0,
            pull_wait_s=0.01,
            reference=flaky,
        )
        key, held = group(5, [1])
        held_out = key, dataclasses.replace(held, group_id=heldout_group_id(0, 5))
        async with rewarding(service):
            coordinator.to_reward += [group(3, [1, 2], [3]), held_out]
            await coordinator.until(lambda: len(coordinator.rewards) == 2)
        return coordinator, flaky

    coordinator, flaky = asyncio.run(run())
    assert flaky.asked == [[7, 3], [7, 3]]
    assert [one.tolist() for one in coordinator.sent["g3"].reference_logprobs] == [[-1.0, -2.0], [-3.0]]
    assert coordinator.sent[heldout_group_id(0, 5)].reference_logprobs == ()
