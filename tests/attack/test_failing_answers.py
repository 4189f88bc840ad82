"""Answers that end their scorer: one worker that hands in nothing else is soon out, and the run goes on."""

import asyncio
from pathlib import Path

from antiphon.core.errors import AntiphonError
from antiphon.core.records import GroupRewards, SampleReward
from antiphon.core.requests import LeaseRequest
from tests.support.light_parties import hello, sample_lease, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(steps=4, prompts_per_step=20, train_size=40, filter_="none", speculation=0.0)


def test_a_worker_whose_answers_fail_is_shut_out_and_the_run_is_not_paused(tmp_path: Path) -> None:
    async def act() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(120.0):
            client = site.client()
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            ids = {name: (await client.register(hello(name))).worker_id for name in ("good", "evil")}

            async def hand_in(name: str, failure: str) -> None:
                (lease,) = (await client.lease_group(LeaseRequest(ids[name], 0, 1, 5.0))).leases
                await client.submit_group(sample_lease(lease, ids[name], 0))
                rewards = tuple(SampleReward(i, 0.0, failure) for i in range(len(lease.seeds)))
                await client.submit_rewards([GroupRewards(lease.group_id, rewards)])

            evil = 0
            for _ in range(6):
                await hand_in("good", "")
                try:
                    await hand_in("evil", "the scorer gave no reward within 5 s")
                    evil += 1
                except (AntiphonError, ValueError):  # it gets no lease any more
                    break
            status = await client.status()
            assert evil == 5 and not status.paused_reason
            assert "its answers cannot be scored" in status.barred["evil"] and "good" not in status.barred
            assert [w.strikes for w in status.workers if w.worker_id == ids["good"]] == [0]

    asyncio.run(act())
