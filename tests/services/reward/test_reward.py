"""The judge scores every group once, from the tokens alone, while others are still sampled."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.core.records import (
    FinishReason,
    GroupSubmission,
    SampleReward,
    Trajectory,
    TurnAnswer,
    TurnToAnswer,
    VersionSpan,
)
from antiphon.core.status import RunStatus
from antiphon.environments.environment import Problem
from antiphon.environments.registry import make_environment
from antiphon.environments.scoring.messages import Failed, Verdict
from antiphon.environments.scoring.pool import InProcess, ScoringPool
from antiphon.services.reward.server import scorer_of
from antiphon.services.reward.service import PULL_GROUPS, SENT_TOGETHER, RewardService, Scorer
from antiphon.services.reward.turns import Hosting
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.light_coordinator import LightCoordinator
from tests.support.light_environment import LightEnvironment, light_codec

DEADLINE_S = 60.0


def make_reward_service(
    coordinator: LightCoordinator,
    scorer: Scorer | None = None,
    *,
    run_id: str = "run-1",
    limit_s: float = 10.0,
    at_once: int = 1,
    environment_digest: str = "",
    answer: Hosting | None = None,
) -> RewardService:
    return RewardService(
        coordinator,
        scorer or InProcess(LightEnvironment()),
        light_codec(),
        run_id,
        "judge-1",
        limit_s,
        at_once=at_once,
        pull_wait_s=0.01,
        environment_digest=environment_digest,
        answer=answer,
    )


def group(number: int, *token_ids: Sequence[int], key: str | None = None) -> tuple[str, GroupSubmission]:
    """Return a group as it was handed in, behind the key of its prompt."""
    trajectories = tuple(
        Trajectory(
            np.array(ids, dtype=np.int32),
            np.zeros(len(ids), dtype=np.float32),
            (VersionSpan(0, 0, len(ids)),),
            FinishReason.LENGTH,
            sample_index=index,
            seed=index,
        )
        for index, ids in enumerate(token_ids)
    )
    return key or f"train-0-{number}", GroupSubmission(
        f"lease-{number}", f"g{number}", "w-1", trajectories, 0.0
    )


class Counting:
    """A scorer that counts the groups it scored."""

    def __init__(self) -> None:
        self.scored = 0

    async def score(self, key: str, texts: Sequence[str]) -> list[Verdict]:
        self.scored += 1
        return [1.0 for _ in texts]


@asynccontextmanager
async def rewarding(judge: RewardService) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(judge.run(lambda: None))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield task
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=DEADLINE_S)


def test_groups_are_judged_as_they_come_until_the_run_ends() -> None:
    async def story() -> None:
        coordinator = LightCoordinator(RunConfig())
        judge = make_reward_service(coordinator)
        async with rewarding(judge) as task:
            coordinator.to_reward.append(group(0, [1, 5, 0], [2, 3]))
            await coordinator.until(lambda: len(coordinator.rewards) == 1)
            coordinator.to_reward.extend(group(n, [1], [2]) for n in range(1, 40))
            await coordinator.until(lambda: len(coordinator.rewards) == 40)
            coordinator.finished = True
            await task
        first = coordinator.rewards["g0"]
        assert [(j.sample_index, j.reward) for j in first] == [(0, 1.0), (1, 0.0)]
        assert sum(len(rewards) for rewards in coordinator.rewards.values()) == 80

    asyncio.run(story())


class Unasked(LightCoordinator):
    """No turn is asked about."""

    async def pull_turns(self, client_id: str, limit: int, wait_s: float) -> Sequence[TurnToAnswer]:
        await asyncio.sleep(DEADLINE_S)
        return ()


class Listening(Hosting):
    """Notes what it hears; its look at the time fails once told to."""

    def __init__(self) -> None:
        self.breaks, self.told = asyncio.Event(), asyncio.Event()
        self.answered = asyncio.Queue()

    def asked(self, turn: TurnToAnswer) -> None:
        raise AssertionError("no turn is asked about")

    def sent(self, answers: Sequence[TurnAnswer]) -> None:
        raise AssertionError("nothing was answered")

    def heard(self, status: RunStatus, unfinished: Sequence[str]) -> None:
        self.told.set()

    async def look(self) -> None:
        await self.breaks.wait()
        raise AssertionError("a count is missing")


def test_a_service_that_cannot_look_after_its_hosts_ends_and_says_why() -> None:
    async def story() -> None:
        hosting = Listening()
        judge = make_reward_service(Unasked(RunConfig()), answer=hosting)
        async with rewarding(judge) as task:
            await hosting.told.wait()
            assert not task.done()
            hosting.breaks.set()
            with pytest.raises(AssertionError, match="a count is missing"):
                await task

    asyncio.run(story())


def test_a_group_is_compared_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        calls: list[str] = []

        async def noted(work: Callable[..., list[Verdict]], *arguments: Any) -> list[Verdict]:
            calls.append(work.__name__)
            return work(*arguments)

        monkeypatch.setattr(asyncio, "to_thread", noted)
        assert await InProcess(LightEnvironment()).score("train-0-0", ["a", "b", "c"]) == [1.0, 0.0, 0.0]
        assert len(calls) == 1

    asyncio.run(story())


def test_groups_are_scored_while_rewards_wait_for_their_answer_and_go_together() -> None:
    async def story() -> None:
        coordinator, scorer = LightCoordinator(RunConfig()), Counting()
        coordinator.answer.clear()
        async with rewarding(make_reward_service(coordinator, scorer)):
            coordinator.to_reward.append(group(0, [1]))
            await coordinator.until(lambda: "g0" in coordinator.rewards)
            coordinator.to_reward.extend(group(n, [1]) for n in range(1, 30))
            await coordinator.until(lambda: scorer.scored == 30)
            coordinator.answer.set()
            await coordinator.until(lambda: len(coordinator.rewards) == 30)
        assert coordinator.calls["submit_rewards"] == 2

    asyncio.run(story())


def test_groups_that_were_pulled_together_are_rewarded_in_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("antiphon.services.reward.service.TOGETHER_S", DEADLINE_S)  # however slow the machine

    async def story() -> None:
        coordinator, scorer = LightCoordinator(RunConfig()), Counting()
        coordinator.to_reward.extend(group(n, [1]) for n in range(PULL_GROUPS))
        async with rewarding(make_reward_service(coordinator, scorer)):
            await coordinator.until(lambda: len(coordinator.rewards) == PULL_GROUPS)
        assert coordinator.calls["submit_rewards"] == 1

    asyncio.run(story())


def test_rewards_do_not_wait_for_a_group_that_takes_long() -> None:
    async def story() -> None:
        coordinator, scorer = LightCoordinator(RunConfig()), Uneven()
        coordinator.to_reward.extend((group(1, [1]), group(0, [1]), group(2, [1])))
        async with rewarding(make_reward_service(coordinator, scorer, at_once=1)):
            await coordinator.until(lambda: "g1" in coordinator.rewards)
            assert len(coordinator.rewards) == 1
            scorer.free.set()
            await coordinator.until(lambda: len(coordinator.rewards) == 3)

    asyncio.run(story())


def test_what_is_scored_waits_within_bounds_for_a_coordinator_that_does_not_answer() -> None:
    async def story() -> None:
        coordinator, scorer = LightCoordinator(RunConfig()), Counting()
        coordinator.answer.clear()
        judge = make_reward_service(coordinator, scorer)
        async with rewarding(judge) as task:
            coordinator.to_reward.extend(group(n, [1]) for n in range(200))
            await coordinator.until(lambda: coordinator.calls["submit_rewards"] == 1)
            while scorer.scored < SENT_TOGETHER:
                await asyncio.sleep(0)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert scorer.scored < SENT_TOGETHER + 2 * PULL_GROUPS
            coordinator.answer.set()
            await coordinator.until(lambda: len(coordinator.rewards) == 200)
            judge.stop()
            await task

    asyncio.run(story())


def test_outage_loses_no_reward() -> None:
    async def story() -> None:
        coordinator = LightCoordinator(RunConfig())
        coordinator.away = True
        judge = make_reward_service(coordinator)
        async with rewarding(judge):
            await coordinator.until(lambda: coordinator.calls["status"] > 1)
            coordinator.to_reward.append(group(0, [1]))
            coordinator.away = False
            await coordinator.until(lambda: "g0" in coordinator.rewards)

    asyncio.run(story())


def test_rewards_that_were_there_already_are_no_error() -> None:
    async def story() -> None:
        coordinator = LightCoordinator(RunConfig())
        async with rewarding(make_reward_service(coordinator)):
            coordinator.to_reward.extend([group(0, [1]), group(0, [1]), group(1, [2])])
            await coordinator.until(lambda: len(coordinator.rewards) == 2)

    asyncio.run(story())


def test_stop_leaves_after_the_group_in_hand() -> None:
    async def story() -> None:
        coordinator = LightCoordinator(RunConfig())

        class StopsWhenAsked(LightEnvironment):
            def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
                loop.call_soon_threadsafe(judge.stop)
                return super().reward(problem, completions)

        loop = asyncio.get_running_loop()
        judge = make_reward_service(coordinator, InProcess(StopsWhenAsked()))
        coordinator.to_reward.extend(group(n, [1]) for n in range(3))
        async with rewarding(judge) as task:
            await task
        assert list(coordinator.rewards) == ["g0"]

    asyncio.run(story())


def test_stop_while_the_coordinator_is_away() -> None:
    async def story() -> None:
        coordinator = LightCoordinator(RunConfig())
        coordinator.away = True
        judge = make_reward_service(coordinator)
        async with rewarding(judge) as task:
            await coordinator.until(lambda: coordinator.calls["status"] > 0)
            judge.stop()
            await task

    asyncio.run(story())


def test_a_coordinator_that_stays_away_is_named() -> None:
    async def story() -> None:
        coordinator = LightCoordinator(RunConfig())
        coordinator.away = True
        async with rewarding(make_reward_service(coordinator, limit_s=0.2)) as task:
            with pytest.raises(UnavailableError, match=r"coordinator\.status"):
                await task

    asyncio.run(story())


def test_another_run_is_refused() -> None:
    async def story() -> None:
        async with rewarding(make_reward_service(LightCoordinator(RunConfig()), run_id="run-9")) as task:
            with pytest.raises(ContractError, match="run-9"):
                await task

    asyncio.run(story())


def test_files_that_changed_since_the_run_was_opened_are_refused() -> None:
    async def story(digest: str) -> None:
        coordinator = LightCoordinator(RunConfig())
        coordinator.environment_digest, coordinator.finished = "a" * 64, True
        async with rewarding(make_reward_service(coordinator, environment_digest=digest)) as task:
            await task

    with pytest.raises(
        ConfigError, match="digest bbbbbbbbbbbb here, but run run-1 was opened with aaaaaaaaaaaa"
    ):
        asyncio.run(story("b" * 64))
    for same in ("a" * 64, ""):
        asyncio.run(story(same))


def test_a_foreign_prompt_key_is_refused() -> None:
    async def story() -> None:
        coordinator = LightCoordinator(RunConfig())
        coordinator.to_reward.append(group(0, [1], key="poker-0-1"))
        async with rewarding(make_reward_service(coordinator)) as task:
            with pytest.raises(ContractError, match="poker"):
                await task

    asyncio.run(story())


@pytest.mark.parametrize(
    ("task", "sandbox", "apart"),
    [
        ("chain_sum", "auto", False),
        ("chain_sum", "always", True),
        ("countdown", "auto", True),
        ("countdown", "process", True),
        ("chain_sum", "process", False),
    ],
)
def test_only_scorers_that_compare_run_in_the_service(task: str, sandbox: str, apart: bool) -> None:
    config = build_config(
        {
            "environment": {"name": f"reasoning/{task}", "train_size": 32, "heldout_size": 1},
            "evaluation": {"prompts": 1},
            "reward": {"sandbox": sandbox, "processes": 1},
        }
    )
    section = config.environment
    environment = make_environment(section.name, {}, 0, section.train_size, section.heldout_size)

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), scorer_of(config, environment) as scorer:
            assert isinstance(scorer, ScoringPool if apart else InProcess)
            problem = environment.problem("train", 3)
            texts = [f"<answer>{problem.answer}</answer>", problem.answer]
            assert await scorer.score(problem.key, texts) == [1.0, 0.0]

    if sandbox != "process" and apart:
        needs_bubblewrap()
    asyncio.run(story())


class Uneven:
    """A scorer for which the answers of one prompt take until `free` is set, and one answer fails."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def score(self, key: str, texts: Sequence[str]) -> list[Verdict]:
        if key == "train-0-0":
            await self.free.wait()
        return [1.0, Failed("it hung")][: len(texts)]


def test_a_group_that_takes_long_holds_up_no_other_and_a_failure_is_told_apart() -> None:
    async def story() -> None:
        coordinator, scorer = LightCoordinator(RunConfig()), Uneven()
        service = make_reward_service(coordinator, scorer, at_once=2)
        async with rewarding(service) as task:
            coordinator.to_reward.extend(group(n, [1], [2]) for n in range(20))
            await coordinator.until(lambda: len(coordinator.rewards) == 19)
            assert "g0" not in coordinator.rewards
            service.stop()
            scorer.free.set()
            await task
        assert coordinator.rewards["g0"] == (SampleReward(0, 1.0), SampleReward(1, 0.0, "it hung"))

    asyncio.run(story())


def test_an_error_of_one_group_ends_the_service() -> None:
    class Broken:
        async def score(self, key: str, texts: Sequence[str]) -> list[Verdict]:
            raise ContractError(f"there is no problem {key}")

    async def story() -> None:
        coordinator = LightCoordinator(RunConfig())
        async with rewarding(make_reward_service(coordinator, Broken(), at_once=2)) as task:
            coordinator.to_reward.append(group(0, [1]))
            with pytest.raises(ContractError, match="no problem train-0-0"):
                await task

    asyncio.run(story())
