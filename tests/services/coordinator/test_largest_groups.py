"""The largest group that a configuration may have travels over gRPC, each way that a group goes."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ConfigError
from antiphon.core.records import (
    FinishReason,
    GroupRewards,
    GroupSubmission,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    SampleReward,
    SubmitVerdict,
    Trajectory,
    VersionSpan,
)
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat
from antiphon.services.coordinator.audit_queue import AuditQueue, _Waiting
from antiphon.services.coordinator.client import CoordinatorClient
from tests.support.light_parties import hello, served
from tests.support.loop_model import light_manifest, make_config

GROUP_SIZE = 8
LONGEST = 956_000
"""Nearly the longest completions that eight of fit one message, with a prompt as long as they."""
GROUPS = 2


def config_of(max_tokens: int) -> RunConfig:
    tree = make_config(
        prompts_per_step=GROUPS, group_size=GROUP_SIZE, filter_="none", evaluation_prompts=1
    ).model_dump()
    tree["sampling"]["max_tokens"] = max_tokens
    tree["rollout"]["max_model_tokens"] = max_tokens + 16
    return build_config(tree)


def heartbeat(worker_id: str, *leases: Lease, tokens: int = 0) -> WorkerHeartbeat:
    """Report the beginnings of all completions of some leases, and give these leases up."""
    digest = light_manifest(0).weights_digest
    plain = WorkerHeartbeat(worker_id, 0, digest, (), 0, 0.0, 1.0)
    progress = tuple(
        LeaseProgress(
            lease.lease_id,
            tuple(
                PartialTrajectory(
                    np.full(tokens, 2_000_000, dtype=np.int32),
                    np.full(tokens, -1.5, dtype=np.float32),
                    (VersionSpan(0, 0, tokens),),
                    None,
                    sample_index=index,
                )
                for index in range(GROUP_SIZE)
            ),
        )
        for lease in leases
    )
    names = tuple(lease.lease_id for lease in leases)
    return dataclasses.replace(plain, progress=progress, released_leases=names)


def finished(lease: Lease, worker_id: str) -> GroupSubmission:
    tokens = lease.sampling.max_tokens
    return GroupSubmission(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        worker_id=worker_id,
        trajectories=tuple(
            Trajectory(
                np.full(tokens, 2_000_000, dtype=np.int32),
                np.full(tokens, -1.5, dtype=np.float32),
                (VersionSpan(0, 0, tokens),),
                FinishReason.LENGTH,
                sample_index=index,
                seed=seed,
            )
            for index, seed in enumerate(lease.seeds)
        ),
        generation_s=1.0,
    )


def test_one_above_is_refused() -> None:
    config_of(LONGEST)
    with pytest.raises(ConfigError, match=r"loop\.group_size=8 times sampling\.max_tokens=960000"):
        config_of(960_000)


def test_the_largest_groups_are_handed_over_handed_in_rewarded_and_audited(tmp_path: Path) -> None:
    config = config_of(LONGEST)

    async def act() -> None:
        async with served(config, tmp_path) as site:
            client = CoordinatorClient(site.address, timeout_s=60.0)
            site.clients.append(client)
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            worker_id = (await client.register(hello())).worker_id
            ask = LeaseRequest(worker_id, 0, GROUPS, 1.0)
            leases = (await client.lease_group(ask)).leases
            assert len(leases) == GROUPS
            for lease in leases:
                assert (await client.heartbeat(heartbeat(worker_id, lease, tokens=LONGEST - 1))).known
            audits = AuditQueue(site.service.state_machine, bytes(32))
            for _ in range(GROUPS):
                # Both wait; one message cannot carry two of them.
                (lease,) = (await client.lease_group(ask)).leases
                assert [piece.stop for piece in lease.prefix] == [LONGEST - 1] * GROUP_SIZE
                submission = finished(lease, worker_id)
                assert await client.submit_group(submission) is SubmitVerdict.ACCEPTED
                audits._waiting[lease.group_id] = _Waiting(submission, lease.prompt_token_ids)
            for _ in range(GROUPS):
                (group,) = (await client.pull_for_reward("r", 16, 1.0)).groups
                assert [one.token_ids.size for one in group.trajectories] == [LONGEST] * GROUP_SIZE
                rewards = [SampleReward(index, float(index % 2)) for index in range(GROUP_SIZE)]
                assert await client.submit_rewards([GroupRewards(group.group_id, tuple(rewards))])
            site.service._audits = audits
            for _ in range(GROUPS):
                assert len(await client.pull_for_audit("a", 4, 1.0)) == 1

    asyncio.run(act())
