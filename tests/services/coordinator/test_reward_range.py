"""Rewards in another range than 0..1: a whole run, answers that fail included."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.loop.run_state import range_of
from antiphon.core.records import SampleReward
from antiphon.lineage.rollout_table import decode_batch
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.prompts import RestingPrompts
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.light_parties import LightPrompts, run_parties, served
from tests.support.loop_model import RUN_ID, make_config

WIDE = (2.0, 9.0)


class WidePrompts(LightPrompts):
    """Prompts of an environment whose rewards never come near the 0 of an answer that failed."""

    def __init__(self, low: float = WIDE[0], high: float = WIDE[1]) -> None:
        super().__init__()
        self.reward_range = (low, high)


def score(index: int, token_ids: np.ndarray) -> SampleReward:
    total = int(token_ids.sum())
    if total % 13 == 0:
        return SampleReward(index, 0.0, "it hung")
    return SampleReward(index, 2.0 + total % 8)


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_what_failed_leaks_into_no_mean(tmp_path: Path, mode: str) -> None:
    config = make_config(mode=mode, steps=6, group_size=4, evaluation_prompts=8, evaluation_samples=3)

    async def story() -> None:
        async with served(config, tmp_path, prompts=WidePrompts()) as site:
            client = site.client()
            await client.open_evaluation(0)
            refs, _ = await run_parties(client, config, 3, score=score)
            status = await client.status()
            (evaluation,) = status.evaluations
            assert status.reward_range == evaluation.reward_range == WIDE
            assert status.trajectories_failed > 0 and status.last_failure == "it hung"
            for ref in refs:
                rows = decode_batch(site.store.get(ref.digest))
                rows += decode_batch(site.store.get(ref.samples_digest)) if ref.samples_digest else []
                expected = [score(row.sample_index, row.token_ids) for row in rows]
                assert [(row.reward, row.failure) for row in rows] == [
                    (x.reward, x.failure) for x in expected
                ]
                assert ref.reward_mean == pytest.approx(
                    np.mean([x.reward for x in expected if not x.failure])
                )
                assert all(not row.advantage for row in rows if row.failure)
            answers = [
                score(0, row.token_ids) for row in decode_batch(site.store.get(evaluation.samples_digest))
            ]
            assert len(answers) == 24 and any(x.failure for x in answers)
            counted = [WIDE[0] if x.failure else x.reward for x in answers]
            assert evaluation.reward_mean == pytest.approx(np.mean(counted))

    asyncio.run(story())


def test_rewards_outside_are_refused_with_the_range(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(make_config(), tmp_path, prompts=WidePrompts()) as site:
            running = asyncio.ensure_future(
                run_parties(site.client(), make_config(), 3, score=lambda i, _: SampleReward(i, 1.0))
            )
            with pytest.raises(ContractError, match=r"is 1\.0; environments must score in \[2, 9\]"):
                await running

    asyncio.run(story())


def test_a_run_goes_on_in_its_range_alone_and_who_looks_at_it_knows_it(tmp_path: Path) -> None:
    config = make_config(steps=2)

    async def story() -> None:
        async with served(config, tmp_path, prompts=WidePrompts()):
            pass
        async with served(config, tmp_path, prompts=WidePrompts()) as site:
            assert range_of(site.service.state_machine.state.pinned) == WIDE
        journal, clock = Journal(tmp_path / JOURNAL_NAME, RUN_ID), asyncio.get_running_loop().time
        looking = RunStateMachine(config, RUN_ID, journal, site.store, RestingPrompts(), clock)
        await looking.start()
        assert looking.loop.reward_range == WIDE
        await looking.close()
        with pytest.raises(ConfigError, match=r"reward range of environment\.name=\[2\.0, 8\.0\] differs"):
            async with served(config, tmp_path, prompts=WidePrompts(2.0, 8.0)):
                pass

    asyncio.run(story())
