"""What a reference model said of a group is checked, outlives a restart, and stands in the batch's file."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.errors import ContractError
from antiphon.core.records import FloatArray, GroupRewards, GroupSubmission, SampleReward
from antiphon.core.reference_config import ReferenceSection
from antiphon.core.requests import LeaseRequest
from antiphon.lineage.rollout_table import decode_batch
from tests.support.light_parties import hello, sample_lease, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(
    steps=2, max_staleness=0, filter_="none", train_size=2, prompts_per_step=2, evaluation_prompts=2
).model_copy(update={"reference": ReferenceSection(kl=0.1)})


def said_of(group: GroupSubmission) -> tuple[FloatArray, ...]:
    return tuple(one.logprobs - np.float32(1.0) for one in group.trajectories)


def rewards_of(group: GroupSubmission, said: tuple[FloatArray, ...]) -> GroupRewards:
    samples = tuple(SampleReward(index, float(index % 2)) for index in range(len(group.trajectories)))
    return GroupRewards(group.group_id, samples, said)


def test_what_the_reference_said_outlives_a_restart_and_is_a_column(tmp_path: Path) -> None:
    async def first_half() -> str:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            client = site.client()
            worker_id = (await client.register(hello())).worker_id
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            reply = await client.lease_group(LeaseRequest(worker_id, 0, 2, 5.0, False))
            for lease in reply.leases:
                await client.submit_group(sample_lease(lease, worker_id, 0))
            pulled = await client.pull_for_reward("judge", 1, 5.0)
            (group,), (prompt,) = pulled.groups, pulled.prompts
            assert prompt.dtype == np.int32 and prompt.size
            spoiled = (said_of(group)[0] * np.float32("nan"), *said_of(group)[1:])
            for wrong in ((), said_of(group)[:1], spoiled):
                with pytest.raises(ContractError, match="reference model"):
                    await client.submit_rewards([rewards_of(group, wrong)])
            assert await client.submit_rewards([rewards_of(group, said_of(group))])
            return group.group_id

    async def second_half() -> bytes:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            client = site.client()
            (group,) = (await client.pull_for_reward("judge", 2, 5.0)).groups
            assert await client.submit_rewards([rewards_of(group, said_of(group))])
            batch = (await client.await_stage("reward", 0, 10.0)).batch
            assert batch is not None
            return site.store.get(batch.digest)

    before = asyncio.run(first_half())
    rows = decode_batch(asyncio.run(second_half()))
    assert before in {row.group_id for row in rows}
    for row in rows:
        assert row.reference_logprobs is not None
        assert row.reference_logprobs.tolist() == (row.logprobs - np.float32(1.0)).tolist()
