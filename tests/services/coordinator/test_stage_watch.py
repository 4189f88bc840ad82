"""The flow's long poll ends when its stage is over, and says meanwhile whom the stage waits for."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from antiphon.core.errors import ContractError
from antiphon.core.records import SampleReward
from antiphon.services.coordinator.api import LeaseRequest, StageReply, WorkerHeartbeat
from antiphon.services.coordinator.client import CoordinatorClient
from tests.support.light_parties import Served, hello, sample_lease, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(steps=4, max_staleness=0, filter_="none", evaluation_prompts=1)
FAR_S = 20.0
"""Longer than any test takes: whoever waits so long must be woken."""


def serve_and(tmp_path: Path, act: Callable[[Served, CoordinatorClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(15.0):
            await act(site, site.client())

    asyncio.run(run())


def beat(worker_id: str, version: int) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id, version, light_manifest(version).weights_digest, (), 0, 0.0, 1.0)


async def begin(client: CoordinatorClient, stage: str, number: int) -> "asyncio.Task[StageReply]":
    """Begin to wait for a stage that is not over."""
    assert not (await client.await_stage(stage, number, 0.0)).done
    return asyncio.ensure_future(client.await_stage(stage, number, FAR_S))


async def reward_waiting(client: CoordinatorClient) -> None:
    for group in await client.pull_for_reward("j", 10, 5.0):
        rewards = [SampleReward(i, float(i)) for i in range(len(group.completions))]
        await client.submit_rewards(group.group_id, rewards)


def test_collect_ends_when_the_groups_are_handed_in_and_reward_when_they_are_rewarded(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        collecting, rewarding = await begin(client, "collect", 0), await begin(client, "reward", 0)
        await client.announce_snapshot(light_manifest(0))
        await client.open_step(0)
        worker = (await client.register(hello())).worker_id
        leases = (await client.lease_group(LeaseRequest(worker, 0, 3, 5.0))).leases
        for lease in leases[:2]:
            await client.submit_group(sample_lease(lease, worker, 0))
        assert not collecting.done()
        far = await client.await_stage("collect", 0, 0.0)
        assert far.progress == pytest.approx(2 / 3) and "1 being sampled" in far.waiting_for
        await client.submit_group(sample_lease(leases[2], worker, 0))
        assert (await collecting).done and not rewarding.done()
        await reward_waiting(client)
        batch = (await rewarding).batch
        assert batch is not None and batch == (await client.await_stage("reward", 0, 0.0)).batch
        assert (batch.reward_mean, batch.reward_std) == (0.5, 0.5)
        assert not (await client.await_stage("collect", 1, 0.0)).done

    serve_and(tmp_path, act)


def test_broadcast_ends_when_every_active_worker_holds_the_version(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.announce_snapshot(light_manifest(0))
        waiting = await begin(client, "broadcast", 0)
        assert (await client.await_stage("broadcast", 0, 0.0)).waiting_for == "any worker at all"
        one, two = [(await client.register(hello(name))).worker_id for name in ("a", "b")]
        await client.heartbeat(beat(one, 0))
        assert (await client.await_stage("broadcast", 0, 0.0)).waiting_for == two
        assert not waiting.done()
        await client.heartbeat(beat(two, 0))
        assert (await waiting).done
        assert not (await client.await_stage("broadcast", 1, 0.0)).done

    serve_and(tmp_path, act)


def test_evaluate_ends_with_the_score(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.announce_snapshot(light_manifest(0))
        waiting = await begin(client, "evaluate", 0)
        await client.open_evaluation(0)
        words = (await client.await_stage("evaluate", 0, 0.0)).waiting_for
        assert words == "the evaluation of version 0: 0 of 1 prompts"
        worker = (await client.register(hello())).worker_id
        (lease,) = (await client.lease_group(LeaseRequest(worker, 0, 1, 5.0))).leases
        await client.submit_group(sample_lease(lease, worker, 0))
        await reward_waiting(client)
        reply = await waiting
        assert reply.evaluation == (await client.status()).evaluations[0]

    serve_and(tmp_path, act)


def test_a_pause_and_the_end_of_the_run_end_every_wait(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        waits = [await begin(client, stage, 0) for stage in ("collect", "reward", "broadcast", "evaluate")]
        await client.pause("two digests of one step")
        for reply in await asyncio.gather(*waits):
            assert not reply.done and reply.halted == "the run is paused: two digests of one step"
        await client.finish()
        assert (await client.await_stage("collect", 0, FAR_S)).halted == "run run-1 is finished"
        with pytest.raises(ContractError, match="stage 'step' is unknown; known: collect, reward"):
            await client.await_stage("step", 0, FAR_S)

    serve_and(tmp_path, act)
